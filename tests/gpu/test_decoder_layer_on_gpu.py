"""A layer as one op, at the widths of real models: the bits of its parts, and not slower or larger."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

import tilekern
import tilekern.fp8
from tilekern.patch import whole_layers
from tilekern.spec.targets import here
from tilekern.tuning.plan.configs import config_named

pytestmark = pytest.mark.gpu
MODELS = ["qwen3-0.6b", "llama-3.2-1b", "qwen2.5-0.5b", "gemma-2-2b", "gemma-3-1b"]


@pytest.fixture(autouse=True)
def patched():
    tilekern.apply()
    yield
    tilekern.reset()


def made(name, device="cuda", dtype=torch.bfloat16):
    config = config_named(name)[1]
    config.num_hidden_layers, config.use_cache = 2, False
    if getattr(config, "layer_types", None):
        kinds = list(dict.fromkeys(config.layer_types))
        config.layer_types = [kinds[0], kinds[-1]]
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="tilekern").train()


def step(model, rows=2, tokens=384, around=nullcontext):
    device = model.device
    generator = torch.Generator(device).manual_seed(1)
    ids = torch.randint(0, 4096, (rows, tokens), device=device, generator=generator)
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)  # of dropouts
    torch.cuda.reset_peak_memory_stats(device)
    with around():
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return loss.detach(), gradients, torch.cuda.max_memory_allocated(device)


@pytest.fixture
def by_parts(monkeypatch):
    def run(call):
        with monkeypatch.context() as patch:
            patch.setattr(whole_layers, "decoder_layer", lambda *_: None)
            return call()

    return run


@pytest.fixture
def served(monkeypatch):
    found, whole = [], whole_layers.decoder_layer

    def layer(x, *given):
        made = whole(x, *given)
        if x.is_cuda:
            # A model without records first runs a step on meta tensors.
            found.append(made)
        return made

    monkeypatch.setattr(whole_layers, "decoder_layer", layer)
    return found


def adapted(model, *, cast=False, **options):
    peft = pytest.importorskip("peft")
    torch.manual_seed(2)
    options = {"r": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM", "init_lora_weights": False} | options
    return peft.get_peft_model(model, peft.LoraConfig(**options), autocast_adapter_dtype=cast).train()


def frozen(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" not in name and "mlp" not in name)
    return model


LEARNING = {
    "all": lambda model: model,
    "adapters on all": adapted,
    "adapters of float32": partial(adapted, cast=True),
    "adapters with dropouts": partial(adapted, lora_dropout=0.1),
    "adapters on q and v": lambda model: adapted(model, target_modules=["q_proj", "v_proj"], r=8),
    "adapters on the MLP": lambda model: adapted(model, target_modules=["gate_proj", "down_proj"], bias="all"),
    "frozen norms and MLPs": frozen,
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("learning", LEARNING)
def test_a_step_has_the_loss_of_its_parts_bit_by_bit_and_their_gradients(name, learning, by_parts, served):
    model = LEARNING[learning](made(name))
    if learning == "adapters on the MLP":
        model.enable_input_require_grads()
    step(model)
    loss, found, most = step(model)
    assert len(served) == 4
    assert None not in [y if y is None else 0 for y in served]
    served.clear()
    expected, theirs, usual = by_parts(lambda: step(model))
    assert torch.equal(loss, expected)
    for one, other in zip(found, theirs, strict=True):
        assert torch.nn.functional.cosine_similarity(one.double().ravel(), other.double().ravel(), 0) > 0.9995
    assert most <= 1.01 * usual
    again = step(model)
    assert torch.equal(loss, again[0])
    assert all(map(torch.equal, found, again[1]))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("format", ["rowwise", "blockwise"])
def test_a_step_of_8_bit_floats_has_the_bits_of_its_parts(name, format, by_parts, served):
    if not here().has_fp8:
        pytest.skip("8-bit floats need a GPU of sm_90 or newer")
    model = made(name)
    tilekern.fp8.convert(model, format=format)
    step(model)
    loss, found, most = step(model)
    assert len(served) == 4
    assert None not in [y if y is None else 0 for y in served]
    assert set(tilekern.report(model).whole.values()) == {2}
    expected, theirs, usual = by_parts(lambda: step(model))
    assert torch.equal(loss, expected)
    learnt = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    for where, one, other in zip(learnt, found, theirs, strict=True):
        # In the first layer, gradients of other roundings of the second one's input are rounded to 8 bits.
        assert torch.nn.functional.cosine_similarity(one.double().ravel(), other.double().ravel(), 0) > 0.99, where
        if ".layers.1." in where and "input_layernorm" not in where:
            assert torch.equal(one, other), where
    assert most <= 1.01 * usual
    again = step(model)
    assert all(map(torch.equal, [loss, *found], [again[0], *again[1]]))


def test_adapters_of_float32_are_cast_by_autocast(by_parts, served):
    model = adapted(made("qwen3-0.6b"), cast=True)
    with torch.autocast("cuda", torch.bfloat16):
        step(model)
        loss, found, most = step(model)
        assert None not in [y if y is None else 0 for y in served]
        expected, theirs, usual = by_parts(lambda: step(model))
    assert torch.equal(loss, expected)
    assert {gradient.dtype for gradient in found} == {torch.float32}
    for one, other in zip(found, theirs, strict=True):
        assert torch.nn.functional.cosine_similarity(one.double().ravel(), other.double().ravel(), 0) > 0.9995
    assert most <= 1.01 * usual


@pytest.mark.parametrize("is_wide", [False, True], ids=["of bfloat16", "of float32"])
@pytest.mark.parametrize("casts", [False, True], ids=["as they are", "under autocast"])
def test_dropouts_draw_as_in_peft_s_code(is_wide, casts, served):
    """Other masks would give gradients of other directions; on a GPU those of float32 are not those of bfloat16."""
    model = adapted(made("qwen3-0.6b"), cast=is_wide, lora_dropout=0.5)
    with torch.autocast("cuda", torch.bfloat16, enabled=casts):
        found = step(model)[1]
        state = torch.cuda.get_rng_state()
        assert served
        assert None not in [y if y is None else 0 for y in served]
        tilekern.reset()
        expected = step(model)[1]
    assert torch.equal(state, torch.cuda.get_rng_state())
    for one, other in zip(found, expected, strict=True):
        assert torch.nn.functional.cosine_similarity(one.double().ravel(), other.double().ravel(), 0) > 0.99


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("inside", [False, True], ids=["forward", "backward too"])
def test_weights_of_float32_under_autocast(name, inside, by_parts, served):
    """Norms are other kernels than those of parts, whose records may add up rows in another order."""
    model = made(name, dtype=torch.float32)

    casts = partial(torch.autocast, "cuda", torch.bfloat16)

    def autocast_step():
        if not inside:
            return step(model, around=casts)
        with casts():
            return step(model)

    autocast_step()
    loss, found, most = autocast_step()
    assert None not in [y if y is None else 0 for y in served]
    expected, theirs, usual = by_parts(autocast_step)
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=0)
    for one, other in zip(found, theirs, strict=True):
        assert torch.nn.functional.cosine_similarity(one.double().ravel(), other.double().ravel(), 0) > 0.9995
    assert most <= 1.01 * usual


@pytest.mark.parametrize(
    ("name", "learning"),
    [
        ("qwen3-0.6b", "all"),
        ("qwen3-0.6b", "adapters on all"),
        ("qwen3-0.6b", "adapters with dropouts"),
        ("gemma-3-1b", "all"),
    ],
)
def test_captured_steps_have_the_bits_of_eager_ones(name, learning):
    def losses(graphs):
        model = LEARNING[learning](made(name))
        learnt = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(learnt, lr=1e-4, fused=True)
        if graphs:
            tilekern.graphed(model)
        found = []
        for _ in range(6):
            ids = torch.randint(0, 4096, (1, 256), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            found.append(loss.detach().clone())
        return found

    assert all(map(torch.equal, losses(True), losses(False)))


def test_another_stream_and_another_device(served):
    expected = step(made("qwen3-0.6b"))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = step(made("qwen3-0.6b"))
    stream.synchronize()
    places = [found]
    if torch.cuda.device_count() > 1:
        places.append(step(made("qwen3-0.6b", "cuda:1")))
    for loss, gradients, _ in places:
        assert loss.item() == expected[0].item()
        assert all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(gradients, expected[1], strict=True))
    assert None not in [y if y is None else 0 for y in served]
