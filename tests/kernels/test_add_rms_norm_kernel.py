import pytest
import torch
from spec_samples import configs, inputs_of, interpret, sized

from tilekern.kernels import spec_named

FORWARD, BACKWARD = spec_named("add_rms_norm_forward"), spec_named("add_rms_norm_backward")
every_spec = pytest.mark.parametrize("spec", [FORWARD, BACKWARD], ids=lambda spec: spec.name)


@every_spec
@pytest.mark.parametrize(("rows", "columns"), [(1, 4096), (3, 5120), (2, 9000), (3, 20000)])
def test_long_rows(spec, rows, columns):
    """Rows of several chunks, and rows so long that they are read twice, by the first config of each function."""
    problem = sized(spec, "bfloat16", rows=rows, columns=columns)
    inputs = inputs_of(spec, problem)
    seen = {}
    for config in configs(spec, problem):
        seen.setdefault((spec.device(problem, config).function, config["tile_n"]), config)
    for config in seen.values():
        check = interpret(spec, problem, config, inputs)
        assert check.passed, (config, check.reason)


def test_the_norm_is_that_of_the_rounded_sum():
    """4 + 2^-7 lies between two values of bfloat16, and the norm of a row sees to which of them it was rounded."""
    problem = sized(FORWARD, "bfloat16", rows=2, columns=64).but(weight_dtype="float32")
    inputs = inputs_of(FORWARD, problem) | {"eps": 0.0}
    inputs["residual"], inputs["x"] = torch.full((2, 64), 4.0).bfloat16(), torch.full((2, 64), 0.0).bfloat16()
    inputs["x"][:, 1:] = 2**-7
    inputs["weight"] = torch.ones(64)
    assert torch.equal(FORWARD.reference(**inputs)["y"], torch.ones(2, 64).double())
    for config in configs(FORWARD, problem)[:4]:
        check = interpret(FORWARD, problem, config, inputs)
        assert check.passed, check.reason


def test_the_backward_s_reference_is_what_autograd_says():
    problem = sized(BACKWARD, "float32")
    given = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in inputs_of(BACKWARD, problem).items()}
    total, weight = given["total"].requires_grad_(), given["weight"].requires_grad_()
    results = FORWARD.reference(residual=total, x=torch.zeros_like(total), weight=weight, eps=given["eps"])
    slopes = [given["dtotal"], given["dy"]]
    gradients = torch.autograd.grad([results["total"], results["y"]], [total, weight], slopes)
    references = BACKWARD.reference(**{k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in given.items()})
    for name, gradient in zip(("dx", "dweight"), gradients, strict=True):
        torch.testing.assert_close(references[name], gradient, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("spec", "dtype", "weight_dtype", "moved"),
    [
        (FORWARD, "bfloat16", "bfloat16", 4 * 2000 + 200),
        (FORWARD, "bfloat16", "float32", 3 * 2000 + 4000 + 400),
        (BACKWARD, "float16", "float16", 4 * 2000 + 2 * 200),
        (BACKWARD, "bfloat16", "float32", 3 * 2000 + 4000 + 2 * 400),
    ],
)
def test_bytes_counted_by_hand(spec, dtype, weight_dtype, moved):
    problem = spec.problem(rows=10, columns=100, dtype=dtype, weight_dtype=weight_dtype)
    assert spec.bytes_moved(problem) == moved
