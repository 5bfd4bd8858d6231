"""A patched Qwen3 computes what an unpatched one does."""

import warnings

import pytest
import torch
from tiny_qwen3 import IDS, KERNELS, launched, launches, make, same, step, worst

import tilekern
from tilekern import dispatch

# Launches of one step of the two-layer model: 9 norms (4 a layer and the last), 2 MLPs, 2 rotations there and back.
STEP = {
    "rms_norm_forward": 9, "rms_norm_backward": 9, "column_sum": 9,
    "swiglu_forward": 2, "swiglu_backward": 2, "rope": 4,
}  # fmt: skip


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("way", [lambda _: tilekern.apply(), tilekern.apply_to_model], ids=["class", "model"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kv_heads", [1, 5])
def test_loss_and_gradients_agree_and_reset_is_exact(way, attention, kv_heads):
    model = make(kv_heads, attention)
    reference = step(model)
    before = launches()
    assert way(model) == ["rms_norm", "swiglu", "rope"]
    assert worst(step(model), reference) < 1e-5
    assert launched(before) == STEP
    assert tilekern.reset() == ["rms_norm", "swiglu", "rope"]
    before = launches()
    assert same(step(model), reference)
    assert not launched(before)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("op", ["rms_norm", "swiglu", "rope"])
@pytest.mark.parametrize("whole", [True, False], ids=["class", "model"])
def test_one_op_alone(op, whole):
    model = make()
    reference, before = step(model), launches()
    switches = {name: name == op for name in ("rms_norm", "swiglu", "rope")}
    assert (tilekern.apply(**switches) if whole else tilekern.apply_to_model(model, **switches)) == [op]
    assert worst(step(model), reference) < 1e-5
    assert {kernel for kernel in launched(before) if kernel != "column_sum"} == {k for k in KERNELS if k.startswith(op)}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_bfloat16_is_as_exact_as_torch(attention):
    """Judged by the error of the same model in bfloat16 without patches, both against float32.

    The two round different intermediate values, so that neither is closer by rule: a quarter more is allowed, and 4e-3,
    one unit in the last place of a bfloat16.
    """
    exact = step(make(attention=attention))
    model = make(attention=attention).bfloat16()
    plain = step(model)
    tilekern.apply()
    patched = step(model)
    for ours, torchs, reference in zip(patched, plain, exact, strict=True):
        assert worst([ours], [reference]) <= 1.25 * worst([torchs], [reference]) + 4e-3


def test_on_a_cpu_without_the_interpreter_the_models_own_ops_run(monkeypatch):
    monkeypatch.delenv("TILEKERN_INTERPRET", raising=False)
    monkeypatch.setattr(dispatch, "_said", set())
    model = make()
    reference = step(model)
    tilekern.apply()
    before = {kernel: counts["fallbacks"] for kernel, counts in tilekern.stats().items()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert same(step(model), reference)
        assert same(step(model), reference)
    said = [str(w.message) for w in caught if "tilekern" in str(w.message)]
    assert len(said) == 3, "one for each op, however often it runs"
    assert all("TILEKERN_INTERPRET=1" in text and "the model's own op runs instead" in text for text in said)
    counted = {k: c["fallbacks"] - before.get(k, 0) for k, c in tilekern.stats().items()}
    assert {k: n for k, n in counted.items() if n} == {"rms_norm_forward": 18, "swiglu_forward": 4, "rope": 4}


@pytest.mark.usefixtures("interpreted")
def test_an_mlp_with_another_activation_keeps_its_own_forward():
    model = make(hidden_act="gelu")
    reference, before = step(model), launches()
    tilekern.apply(rms_norm=False, rope=False)
    assert same(step(model), reference)
    assert not launched(before)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("activation", ["silu", "swish"])
def test_both_names_of_silu_are_known(activation):
    model = make(hidden_act=activation)
    before = launches()
    tilekern.apply(rms_norm=False, rope=False)
    step(model)
    assert launched(before) == {"swiglu_forward": 2, "swiglu_backward": 2}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
@pytest.mark.parametrize("angles", [1, 2])
def test_rope_takes_both_layouts(unsqueeze_dim, angles):
    from transformers.models.qwen3 import modeling_qwen3

    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 7, 16), torch.randn(2, 1, 7, 16)
    half = torch.randn(angles, 7, 8)
    cos, sin = torch.cat((half, half), -1).cos(), torch.cat((half, half), -1).sin()
    if unsqueeze_dim == 2:
        q, k = q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous()
    wanted = modeling_qwen3.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
    tilekern.apply()
    before = launches()
    found = modeling_qwen3.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
    assert launched(before) == {"rope": 1}
    assert [t.shape for t in found] == [t.shape for t in wanted]
    assert worst(found, wanted) < 1e-6


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("q_shape", "angle_shape", "unsqueeze_dim"),
    [((2, 3, 7, 16), (2, 1, 16), 1), ((2, 3, 7, 16), (2, 7, 1), 1), ((7, 16), (7, 16), 0)],
)
def test_rope_leaves_unusual_shapes_to_the_model(q_shape, angle_shape, unsqueeze_dim):
    from transformers.models.qwen3 import modeling_qwen3

    q, angle = torch.randn(q_shape), torch.randn(angle_shape)
    wanted = modeling_qwen3.apply_rotary_pos_emb(q, q, angle.cos(), angle.sin(), unsqueeze_dim)
    tilekern.apply()
    before = launches()
    assert same(modeling_qwen3.apply_rotary_pos_emb(q, q, angle.cos(), angle.sin(), unsqueeze_dim), wanted)
    assert not launched(before)


@pytest.mark.usefixtures("interpreted")
def test_generation_with_a_cache_gives_the_same_tokens():
    model = make().eval()
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    wanted = model.generate(IDS, **settings)
    tilekern.apply()
    before = launches()
    assert torch.equal(model.generate(IDS, **settings), wanted)
    assert set(launched(before)) == {"rms_norm_forward", "swiglu_forward", "rope"}
