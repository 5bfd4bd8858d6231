"""A patched model on the GPU, and caches that serve with no compiler."""

import pytest
import torch

import tilekern
from tilekern import cache
from tilekern.compile import cutile
from tilekern.errors import CacheMiss
from tilekern.kernels import spec_named
from tilekern.patch.warmup import sizes_of
from tilekern.runtime import dispatch
from tilekern.spec.targets import here
from tilekern.tuning.plan.models import plan_of_model
from tilekern.tuning.plan.steps import Steps

IDS = torch.randint(0, 331, (2, 37), generator=torch.Generator().manual_seed(1))


def step(dtype):
    """The loss and all gradients of a tiny Qwen3 with odd sizes."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=80, num_attention_heads=5, num_key_value_heads=5, head_dim=16, intermediate_size=208,
        vocab_size=331, num_hidden_layers=2, max_position_embeddings=64, attn_implementation="eager",
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to("cuda", dtype)
    loss = model(input_ids=IDS.cuda(), labels=IDS.cuda()).loss
    loss.backward()
    return [loss.detach().double(), *(p.grad.double() for p in model.parameters())]


@pytest.fixture
def patched():
    """Runs a step with the patches applied."""

    def run(dtype):
        tilekern.apply(rms_norm=True, swiglu=True, rope=True, model_type="qwen3")
        try:
            return step(dtype)
        finally:
            tilekern.reset()

    yield run
    tilekern.reset()


def errors(results, references):
    return [float((a - b).norm() / (b.norm() + 1e-30)) for a, b in zip(results, references, strict=True)]


def launched():
    return {kernel for kernel, counts in tilekern.stats().items() if counts["launches"]}


def test_a_patched_model_is_as_near_to_float32_as_the_model_itself(patched):
    reference = step(torch.float32)
    assert not launched()
    ours, theirs = errors(patched(torch.bfloat16), reference), errors(step(torch.bfloat16), reference)
    forward = {"rms_norm_forward", "fused_add_rms_norm_forward", "qk_norm_rope_forward", "swiglu_forward"}
    backward = {"rms_norm_backward", "fused_add_rms_norm_backward", "qk_norm_rope_backward", "swiglu_backward_remake"}
    assert launched() >= forward | backward
    assert all(counts["fallbacks"] == 0 for counts in tilekern.stats().values())
    for own, other in zip(ours, theirs, strict=True):
        assert own <= 2 * other + 1e-2, (ours, theirs)


def test_a_patched_model_in_float32_gives_the_same_gradients(patched, full_float32):
    for error in errors(patched(torch.float32), step(torch.float32)):
        assert error < 1e-4


def test_the_prebuilt_packs_serve_qwen3_8b_with_no_compiler_and_an_empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEKERN_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.delenv("TILEKERN_CACHE_PATH", raising=False)
    monkeypatch.setattr(cutile, "_tileiras", lambda: None)
    cutile.toolkit.cache_clear()
    target = here()
    try:
        if not any(target.key in layer.targets() for layer in cache.default_layers()):
            pytest.skip(f"no prebuilt pack is for {target.key}")
        dispatch.set_miss_policy("error")
        device = torch.device("cuda", torch.cuda.current_device())
        for kernel, problem in plan_of_model("qwen3-8b", Steps([8192]), target).problems:
            spec = spec_named(kernel)
            try:
                assert dispatch.plan_for(spec, device, *sizes_of(spec, problem)) is not None
            except CacheMiss as error:
                pytest.fail(str(error))
        x, weight = torch.randn(64, 4096, device="cuda").bfloat16(), torch.ones(4096, device="cuda").bfloat16()
        from tilekern.ops import rms_norm

        y = rms_norm(x, weight)
        expected = torch.nn.functional.rms_norm(x, (4096,), weight, 1e-6)
        torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
        assert not (tmp_path / "empty").exists()
    finally:
        cutile.toolkit.cache_clear()
