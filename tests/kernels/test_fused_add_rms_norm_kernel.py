import torch
from spec_samples import assert_right, configs, inputs_of, sized

from tilekern.kernels import spec_named

FORWARD = spec_named("fused_add_rms_norm_forward")


def test_the_norm_is_that_of_the_rounded_sum():
    """4 + 2^-7 lies between two values of bfloat16, and the norm of a row sees to which of them it was rounded."""
    problem = sized(FORWARD, "bfloat16", rows=2, columns=64).but(weight_dtype="float32")
    inputs = inputs_of(FORWARD, problem) | {"eps": 0.0}
    inputs["residual"], inputs["x"] = torch.full((2, 64), 4.0).bfloat16(), torch.full((2, 64), 0.0).bfloat16()
    inputs["x"][:, 1:] = 2**-7
    inputs["weight"] = torch.ones(64)
    assert torch.equal(FORWARD.reference(**inputs)["y"], torch.ones(2, 64).double())
    assert_right(FORWARD, problem, configs(FORWARD, problem)[:4], inputs)
