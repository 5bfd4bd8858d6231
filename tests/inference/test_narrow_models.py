"""Steps of many rows of narrow models have norms in the launches of products, and one between two attentions."""

import pytest
import torch
from emulated import read
from small_models import counts_of, draw_weights, ids_of

from benchmarks.mingpt import SIZES, MinGPT
from tilekern.inference import load
from tilekern.inference.architectures import architecture_of
from tilekern.inference.planning import DryRun
from tilekern.inference.steps import Step
from tilekern.runtime import dispatch
from tilekern.runtime.recorder import Trace
from tilekern.spec.targets import resolve

LINEAR, BLOCK = "narrow_linear", "narrow_block"
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 2, "n_positions": 128, "vocab_size": 97}
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 3, "vocab_size": 97,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
}  # fmt: skip
EXPERTS = LLAMA | {
    "model_type": "qwen3_moe", "moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}  # fmt: skip


def distance(x, reference):
    return (x.double() - reference).norm() / reference.norm()


@pytest.mark.parametrize("way", ["one launch", "norms alone"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_logits_are_as_near_to_transformers_as_those_of_launches_apart(gpu, saved, launched, monkeypatch, dtype, way):
    """Of whole sequences, 69 rows."""
    model, folder = saved
    ids = ids_of(23, 23, 23)
    if way == "norms alone":
        monkeypatch.setattr(Step, "_is_one_launch", lambda *_: False)
    found = read(load(folder, dtype=dtype).forward(ids)).clone()
    assert LINEAR in launched
    assert (BLOCK in launched) == (way == "one launch" and not hasattr(model.config, "num_experts"))
    launched.clear()
    monkeypatch.setattr(Step, "_is_one_launch", lambda *_: False)
    monkeypatch.setattr(Step, "_is_narrow", lambda *_: False)
    apart = read(load(folder, dtype=dtype).forward(ids))
    assert not {LINEAR, BLOCK} & set(launched)
    with torch.no_grad():
        wanted = model.double()(input_ids=torch.tensor(ids), use_cache=False).logits.flatten(0, 1)
        model.float()
    assert distance(found, wanted) < 1.2 * distance(apart, wanted) + 1e-3
    assert distance(apart, wanted) < 0.1


@pytest.mark.share(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [size for size, (*_, width) in SIZES.items() if width <= 128])
def test_logits_of_mingpt_s_small_models_are_as_near_as_torch_s(gpu, tmp_path, launched, size, dtype):
    model, ids = MinGPT(size, 97, positions=16), ids_of(*[11] * 6)
    draw_weights(model, 0.8 * SIZES[size][2] ** -0.5)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    found = read(load(tmp_path, heads=SIZES[size][1], dtype=str(dtype).removeprefix("torch.")).forward(ids))
    layers = SIZES[size][0]
    assert (launched.count(LINEAR), launched.count(BLOCK)) == (1, layers)
    with torch.no_grad():
        by_torch = model.to(dtype)(torch.tensor(ids)).flatten(0, 1)
        reference = model.double()(torch.tensor(ids)).flatten(0, 1)
    assert distance(found, reference) < 1.3 * distance(by_torch, reference)


def test_a_prompt_of_many_tokens_leaves_the_tokens_that_follow_it(gpu, saved, launched):
    """Its keys come by the kernels of narrow models, and its last token's logits too."""
    model, folder = saved
    (ids,), engine = ids_of(150), load(folder, dtype="float16", context=160)
    tokens = [token for (token,) in engine.generate([ids], 3, ignores_ends=True, chunk=70)]
    assert LINEAR in launched
    with torch.no_grad():
        logits = model.double()(input_ids=torch.tensor([ids + tokens[:-1]]), use_cache=False).logits[0, -3:]
        model.float()
    # As likely as the likeliest, but for the dtype.
    least = logits.max(-1).values - 0.05 * logits.std(-1)
    assert (logits[torch.arange(3), torch.tensor(tokens)] >= least).all()


def launches_of(config, dtype="bfloat16", rows=(8, 16), **how):
    """How often whole sequences launch each kernel."""
    found = Trace(resolve("H200"))
    DryRun(found, architecture_of(config), dtype, **how).forward(*rows)
    return counts_of(found)


def test_a_layer_of_a_narrow_model_is_two_launches():
    others = {"embedding": 1, "early_attention_forward": 3, "early_linear": 1}
    assert launches_of(GPT2) == {LINEAR: 1, BLOCK: 3} | others
    found = launches_of(LLAMA)
    assert (found[LINEAR], found["append_to_cache"], found["early_attention_forward"], found[BLOCK]) == (1, 3, 3, 3)
    assert found["early_linear"] == 1
    assert not [kernel for kernel in found if "norm" in kernel]


@pytest.mark.parametrize(
    ("config", "linear", "block"),
    [
        (GPT2 | {"n_embd": 128}, 1, 3),
        (GPT2 | {"n_embd": 130}, 0, 0),
        (LLAMA | {"hidden_size": 130}, 0, 0),
        # Attention leaves more than 128 numbers. A gate and its other product share a norm.
        (LLAMA | {"head_dim": 32}, 1, 3),
        (LLAMA | {"head_dim": 34}, 3, 0),
        (EXPERTS, 3, 0),
    ],
    ids=str,
)
def test_wider_models_have_more_launches(config, linear, block):
    found = launches_of(config)
    assert (found.get(LINEAR, 0), found.get(BLOCK, 0)) == (linear, block)


@pytest.mark.parametrize("how", [{"rows": (8, 8)}, {"dtype": "float32"}, {"int8": True}, "invariant"], ids=str)
def test_other_steps_launch_norms_and_products(how):
    before = dispatch.set_invariant(on=how == "invariant")
    try:
        found = launches_of(LLAMA, **({} if how == "invariant" else how))
    finally:
        dispatch.set_invariant(on=before)
    assert not {LINEAR, BLOCK} & found.keys()
    norm = "fused_add_rms_norm_forward"
    assert found.get(norm, 0) + found.get(f"early_{norm}", 0) == 2 * 3


def test_gpus_that_share_a_model_add_up_between_attention_and_the_mlp():
    found = launches_of(GPT2, gpus=2)
    assert (found[LINEAR], found.get(BLOCK, 0)) == (6, 0)
