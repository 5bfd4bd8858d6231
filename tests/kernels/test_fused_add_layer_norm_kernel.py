import torch
from spec_samples import assert_right, configs, inputs_of, interpret, sized

from tilekern.kernels import spec_named

FORWARD, BACKWARD = spec_named("fused_add_layer_norm_forward"), spec_named("fused_add_layer_norm_backward")


def test_the_norm_is_that_of_the_rounded_sum():
    """4 + 2^-7 lies between two values of bfloat16, and a row of nothing else has no variance once it is rounded."""
    problem = sized(FORWARD, "bfloat16", rows=2, columns=64).but(weight_dtype="float32")
    inputs = inputs_of(FORWARD, problem)
    inputs["residual"], inputs["x"] = torch.full((2, 64), 4.0).bfloat16(), torch.full((2, 64), 0.0).bfloat16()
    inputs["x"][:, 1:] = 2**-7
    inputs["weight"], inputs["bias"] = torch.ones(64), torch.full((64,), 0.5)
    assert torch.equal(FORWARD.reference(**inputs)["y"], torch.full((2, 64), 0.5).double())
    assert_right(FORWARD, problem, configs(FORWARD, problem)[:4], inputs)


def test_a_mean_far_from_zero_costs_no_more_than_its_own_rounding():
    for columns in (83, 1500):
        problem = sized(BACKWARD, rows=3, columns=columns)
        inputs = BACKWARD.inputs(problem, torch.Generator().manual_seed(0), "cpu")
        inputs["total"] += 256
        for config in configs(BACKWARD, problem)[:2]:
            assert interpret(BACKWARD, problem, config, inputs).relative_error < 1e-4, config
