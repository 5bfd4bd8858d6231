"""append_to_cache: the bits of the norms' and the rotation's kernel by every config, and the forms of models."""

import pytest
import torch
from spec_samples import launched, one_of_each, plain_inputs, resources_of, sized

from tilekern.compile.toolchain import compile_candidate, toolkit
from tilekern.kernels import spec_named
from tilekern.spec import ALIGNED
from tilekern.spec.targets import resolve

SPEC, NORMED = spec_named("append_to_cache"), spec_named("qk_norm_rope_general_forward")
QWEN3 = {"heads": 32, "kv_heads": 8, "head_dim": 128, "pairs": 64}
FORMS = {
    "qwen3": {**QWEN3, "normed": True}, "llama": QWEN3, "glm4": {**QWEN3, "pairs": 32, "interleaved": True},
    "qwen3_next": {"heads": 16, "kv_heads": 2, "head_dim": 256, "pairs": 32, "normed": True},
    "phi3": {"heads": 32, "kv_heads": 32, "head_dim": 96, "pairs": 48},
}  # fmt: skip


@pytest.mark.parametrize("flags", [(), ("norm_last",), ("interleaved",)], ids=str)
def test_every_config_has_the_bits_of_the_kernel_of_training(flags):
    sizes = {"tokens": 3, "batch": 2, "heads": 6, "kv_heads": 3, "head_dim": 24, "pairs": 8}
    problem = sized(SPEC, "bfloat16", **sizes).but(normed=True, **dict.fromkeys(flags, True))
    inputs = plain_inputs(SPEC, problem)
    training = sized(NORMED, "bfloat16", **sizes).but(**dict.fromkeys(flags, True))
    given = {name: inputs[name] for name in plain_inputs(NORMED, training)}
    expected = launched(NORMED, training, NORMED.generic(training), given)
    rows = expected["k_out"].gather(1, inputs["positions"].long().argsort(1)[..., None, None].expand(2, 3, 3, 24))
    for config in one_of_each(SPEC, problem, "tile_h", "schedule"):
        found = launched(SPEC, problem, config, inputs)
        assert torch.equal(found["q_out"], expected["q_out"])
        assert torch.equal(found["keys"], rows.transpose(1, 2))


@pytest.mark.slow
@pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])
@pytest.mark.share(16)
def test_the_forms_of_models_spill_nothing(arch, form, paged):
    target = resolve(arch)
    problem = SPEC.bucketed(sized(SPEC, "bfloat16", tokens=1, batch=8).but(**FORMS[form], paged=paged))
    made = compile_candidate(SPEC, problem, SPEC.default(problem, target), target, ALIGNED)
    assert resources_of(SPEC, problem, made, target).stack_bytes == 0
