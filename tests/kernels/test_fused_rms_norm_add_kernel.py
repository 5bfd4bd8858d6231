"""Where norms before a sum are rounded, in both kernels that have one."""

import pytest
import torch
from spec_samples import assert_right, configs, inputs_of, sized

from tilekern.kernels import spec_named

SPECS = [spec_named(f"{name}_forward") for name in ("fused_rms_norm_add", "fused_rms_norm_add_rms_norm")]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_the_norm_is_rounded_before_the_sum(spec):
    """Of ones a norm by the weight 1 + 2^-9 is that weight, which bfloat16 does not have: 1 / 512 must not come out."""
    problem = sized(spec, "bfloat16", rows=2, columns=64).but(weight_dtype="float32")
    inputs = inputs_of(spec, problem) | {"eps": 0.0, "offset": 0.0}
    inputs["x"], inputs["residual"] = torch.ones(2, 64).bfloat16(), torch.full((2, 64), -1.0).bfloat16()
    inputs["weight"] = torch.full((64,), 1 + 2**-9)
    inputs["residual"][:, 0], inputs["next_weight"] = 1.0, torch.ones(64)
    given = {name: x for name, x in inputs.items() if name != "next_weight" or len(spec.outputs(problem, 1)) == 2}
    assert spec.reference(**given, cast=False)[next(iter(spec.outputs(problem, 1)))][0].tolist() == [2.0] + [0.0] * 63
    assert_right(spec, problem, configs(spec, problem)[:4], given)
