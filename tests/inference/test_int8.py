"""Int8 weights beside the same quantised model in torch, in float64: logits, greedy tokens, memory, what is int8."""

import copy
import math
import shutil

import pytest
import torch
from emulated import read, tensor_of
from small_models import MODELS, ids_of

from tilekern.errors import InputError
from tilekern.inference import Sampling, load, weights

# The names of transformers' parameters that are int8 in the engine.
QUANTIZED = {
    "gpt2": ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"),
    "llama": ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "gate_proj.weight", "up_proj.weight",
              "down_proj.weight", "lm_head.weight"),
}  # fmt: skip
QUANTIZED["qwen3"] = QUANTIZED["llama"][:-1]  # its head is the embedding
QUANTIZED["experts"] = (*QUANTIZED["llama"][:4], "lm_head.weight")


def int8_of(weight):
    """A weight [out, in] rounded to 127 steps of each row's largest number."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round() * scale.double()


@pytest.fixture
def model(saved):
    """The model in float64, with the numbers that int8 weights stand for, and the folder of the whole one."""
    whole, folder = saved
    kind = next(name for name, (of, *_) in MODELS.items() if type(whole) is of)
    made = copy.deepcopy(whole).double()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith(QUANTIZED[kind]):
                weight = parameter.float()
                # GPT-2 stores [in, out].
                parameter.copy_(int8_of(weight.T).T if kind == "gpt2" else int8_of(weight))
    return made, folder


def logits_of(model, ids):
    with torch.no_grad():
        return model(input_ids=torch.tensor(ids), use_cache=False).logits.flatten(0, 1)


@pytest.mark.parametrize("lengths", [(11, 11), (40, 40)], ids=["few rows", "many rows"])
def test_logits_are_those_of_the_quantised_model(gpu, model, lengths):
    """80 rows are more than the kernels of few rows take."""
    made, folder = model
    ids = ids_of(*lengths)
    found = read(load(folder, dtype="float32", weight_dtype="int8").forward(ids)).double()
    wanted = logits_of(made, ids)
    assert (found - wanted).norm() < 2e-3 * wanted.norm()
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))
    whole = read(load(folder, dtype="float32").forward(ids)).double()
    assert (whole - wanted).norm() > 4e-3 * wanted.norm()


@pytest.mark.parametrize("chunk", [4, 2048])
def test_greedy_tokens_are_those_of_the_quantised_model(gpu, model, chunk):
    made, folder = model
    engine, prompts = load(folder, dtype="float32", weight_dtype="int8"), ids_of(10, 7, 10, seed=1)
    found = list(zip(*engine.generate(prompts, 6, ignores_ends=True, chunk=chunk), strict=True))
    asked = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for tokens, prompt in zip(found, prompts, strict=True):
        wanted = made.generate(torch.tensor([prompt]), **asked)
        assert list(tokens) == wanted[0, len(prompt) :].tolist()


def test_a_sequence_draws_the_same_tokens_alone_and_in_a_batch(gpu, model):
    _, folder = model
    engine, prompts = load(folder, dtype="float32", weight_dtype="int8"), ids_of(9, 5, seed=3)
    ways = [Sampling(temperature=1.0, seed=number) for number in range(2)]
    together = list(zip(*engine.generate(prompts, 5, ways, ignores_ends=True), strict=True))
    alone = [token for (token,) in engine.generate(prompts[1:], 5, ways[1:], ignores_ends=True)]
    assert list(together[1]) == alone


def arrays_of(value):
    """All arrays of the weights."""
    if isinstance(value, weights.Array):
        return [value]
    parts = value if isinstance(value, (list, tuple)) else vars(value).values() if hasattr(value, "__dict__") else ()
    return [array for part in parts for array in arrays_of(part)]


def test_products_have_a_byte_for_each_weight_and_the_rest_stays(gpu, model):
    made, folder = model
    found = {}
    for weight_dtype in (None, "int8"):
        engine = load(folder, weight_dtype=weight_dtype)
        arrays = arrays_of(engine._model.weights)
        found[engine.weight_dtype] = sum(array.memory.size_bytes for array in {a.address: a for a in arrays}.values())
        assert {array.dtype for array in arrays} == {"bfloat16"} | ({"int8", "float32"} if weight_dtype else set())
    kind = next(name for name, (of, *_) in MODELS.items() if of.__name__ == type(made).__name__)
    products = [x for name, x in made.named_parameters() if name.endswith(QUANTIZED[kind])]
    outputs = sum(x.shape[1 if kind == "gpt2" else 0] for x in products)
    assert found["bfloat16"] - found["int8"] == sum(x.numel() for x in products) - 4 * outputs


def test_the_scratch_holds_the_largest_weight_of_a_layer_and_a_larger_head_goes_in_parts(gpu, model, monkeypatch):
    """The head has 97 rows of 48 numbers, and the largest weight 80 of them or more."""
    made, folder = model
    engine = load(folder, dtype="float32", weight_dtype="int8")
    largest = max(
        math.prod(x.weight.shape)
        for layer in engine._model.weights.layers
        for x in (layer.projections, layer.output, layer.gate, layer.up, layer.down)
        if x is not None and x.scale is not None
    )
    assert engine._model.scratch.shape == (largest,)
    # A scratch that is too small for any weight: each goes in parts of whole units.
    small = engine._model.scratch.view((20 * max(48, engine.architecture.inner),))
    object.__setattr__(engine._model, "scratch", small)
    ids = ids_of(40, 40)
    wanted = logits_of(made, ids)
    assert (read(engine.forward(ids)).double() - wanted).norm() < 2e-3 * wanted.norm()


def test_weights_are_quantised_from_the_checkpoint_s_own_numbers(gpu, model):
    """In bfloat16 before, they would be others."""
    made, folder = model
    layer = load(folder, dtype="bfloat16", weight_dtype="int8")._model.weights.layers[1]
    found = tensor_of(layer.output.weight).double() * tensor_of(layer.output.scale).double()[:, None]
    names = dict(made.named_parameters())
    name = next(name for name in names if ".1." in name and name.endswith(("attn.c_proj.weight", "o_proj.weight")))
    wanted = names[name].T if "c_proj" in name else names[name]
    assert (found - wanted).abs().max() < 1e-6


@pytest.mark.parametrize("saved", ["llama", "experts"], indirect=True)
def test_a_weight_that_is_not_finite_makes_its_output_nan(gpu, saved, tmp_path):
    """The heads of the others are their embeddings, which are not quantised."""
    whole, folder = saved
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    spoilt = copy.deepcopy(whole)
    with torch.no_grad():
        spoilt.lm_head.weight[7, 3] = torch.inf
    spoilt.save_pretrained(tmp_path)
    found = read(load(tmp_path, dtype="float32", weight_dtype="int8").forward(ids_of(5)))
    assert found[:, 7].isnan().all()
    assert found.isnan().sum() == len(found)


@pytest.mark.parametrize("weight_dtype", ["float16", "int4"])
def test_other_dtypes_of_weights_are_refused(gpu, saved, weight_dtype):
    message = f"weight_dtype must be int8 or that of dtype, bfloat16, got '{weight_dtype}'"
    with pytest.raises(InputError, match=message):
        load(saved[1], weight_dtype=weight_dtype)
