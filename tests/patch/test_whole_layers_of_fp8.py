"""A decoder layer whose linear layers are of 8-bit floats is one op while its modules do no more, in each call anew."""

import peft
import pytest
import torch
from test_whole_layers import hooked, of_its_own, served, steps_of  # noqa: F401 (a fixture)
from tiny_qwen3 import step
from transformers import AutoConfig, AutoModelForCausalLM

import tilekern
import tilekern.fp8

pytestmark = pytest.mark.usefixtures("interpreted")
SIZES = {
    "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 144,
    "vocab_size": 99, "num_hidden_layers": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "use_cache": False,
}  # fmt: skip
ROWS = torch.randint(3, 99, (1, 6), generator=torch.Generator().manual_seed(0))


def made(family="qwen3", format="rowwise", dtype=torch.bfloat16, chosen=None, attention="tilekern"):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(dtype).train()
    tilekern.fp8.convert(model, chosen, format=format)
    return model


@pytest.fixture
def by_parts(monkeypatch):
    def run(model, **given):
        with monkeypatch.context() as patch:
            patch.setattr("tilekern.patch.whole_layers.decoder_layer", lambda *_: None)
            return step(model, ROWS, **given)

    return run


@pytest.mark.parametrize(
    ("family", "format"),
    [
        ("qwen3", "rowwise"), ("llama", "rowwise"), ("qwen2", "rowwise"), ("gemma3_text", "rowwise"),
        ("qwen3", "blockwise"), ("gemma", "blockwise"), ("llama", "mxfp8"),
    ],
)  # fmt: skip
def test_a_step_has_the_bits_of_its_parts(family, format, served, by_parts):  # noqa: F811
    tilekern.apply(model_type=family.removesuffix("_text"))
    model = made(family, format)
    loss, *found = steps_of(model, served, ids=ROWS)
    assert served == [True, True]
    assert tilekern.report(model).whole == {"model.layers.0": 1, "model.layers.1": 1}
    expected, *theirs = by_parts(model)
    assert torch.equal(loss, expected)
    for one, other in zip(found, theirs, strict=True):
        assert torch.nn.functional.cosine_similarity(one.double().ravel(), other.double().ravel(), 0) > 0.99
    # The gradients of a layer's input and of its first norm are rounded once less, unless attention has a norm behind.
    for (name, _), one, other in zip(model.named_parameters(), found, theirs, strict=True):
        if family == "gemma3_text" or (name.startswith("model.layers.1") and "input_layernorm" not in name):
            assert torch.equal(one, other), name


def adapted(model):
    options = {"r": 4, "task_type": "CAUSAL_LM", "init_lora_weights": False, "target_modules": ["q_proj", "down_proj"]}
    peft.get_peft_model(model, peft.LoraConfig(**options), autocast_adapter_dtype=False)


# What changes in a model between two steps, and which layers are one op then.
CHANGES = {
    "nothing": (lambda _: None, [True, True]),
    "a layer in its dtype": (lambda model: tilekern.fp8.restore(model.model.layers[0].mlp.up_proj), [True]),
    "a decoder layer in its dtype": (lambda model: tilekern.fp8.restore(model.model.layers[0]), [True, True]),
    "another format": (lambda model: tilekern.fp8.convert(model, format="blockwise"), [True, True]),
    "two formats in a layer": (
        lambda model: tilekern.fp8.convert(model, lambda name, _: "0.mlp.down" in name, format="blockwise"), [True],
    ),
    "adapters": (adapted, []),
    **{f"a hook on {name}": (hooked(name), [True]) for name in ("self_attn.k_proj", "mlp.down_proj")},
    **{f"a forward of {name}'s own": (of_its_own(name), [True]) for name in ("self_attn.o_proj", "mlp.gate_proj")},
}  # fmt: skip


@pytest.mark.parametrize("kind", CHANGES)
def test_what_comes_between_two_steps_is_heeded(kind, served, by_parts):  # noqa: F811
    tilekern.apply(model_type="qwen3")
    model = made()
    steps_of(model, served, ids=ROWS)
    assert served == [True, True]
    change, layers = CHANGES[kind]
    change(model)
    found = steps_of(model, served, ids=ROWS)
    assert served == layers
    expected = by_parts(model)
    assert torch.equal(found[0], expected[0])
    for one, other in zip(found, expected, strict=True):
        assert torch.nn.functional.cosine_similarity(one.double().ravel(), other.double().ravel(), 0) > 0.99


def test_autocast_to_another_dtype_the_invariant_mode_and_few_layers_run_by_parts(served, by_parts):  # noqa: F811
    tilekern.apply(model_type="qwen3")
    model = made(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = steps_of(model, served, ids=ROWS)
        assert served == [False, False]
        assert all(map(torch.equal, found, by_parts(model)))
    model = made()
    with tilekern.invariant():
        steps_of(model, served, ids=ROWS)
    assert True not in served
    model = made(chosen=lambda name, _: "mlp" in name)
    steps_of(model, served, ids=ROWS)
    assert not served
    assert not tilekern.report(model).whole
