import pytest
import torch
from spec_samples import interpret, launched, sized

from tilekern.kernels import spec_named
from tilekern.ops.activation import CURVES
from tilekern.spec.targets import INTERPRETED

FORWARD, BACKWARD, REMAKE = (spec_named(f"activation_{name}") for name in ("forward", "backward", "backward_remake"))
every_curve = pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES)


def problem_of(spec, curve, **sizes):
    return sized(spec, **sizes).but(erf=curve.erf, relu=curve.relu)


def numbers(curve):
    return {"linear": curve.linear, "cubic": curve.cubic}


@every_curve
@pytest.mark.parametrize("spec", [FORWARD, BACKWARD, REMAKE], ids=lambda spec: spec.name)
def test_numbers_far_from_zero_are_right(spec, curve):
    """There an activation is 0, the number or its square, and its exponential overflows or vanishes."""
    problem = problem_of(spec, curve, rows=4, columns=256)
    inputs = spec.inputs(problem, torch.Generator().manual_seed(0), "cpu") | numbers(curve)
    for scale in (5.0, 1e4, 1e15):
        check = interpret(spec, problem, spec.default(problem, INTERPRETED), inputs | {"x": inputs["x"] * scale})
        assert check.passed, (scale, check.reason)


def made(spec, curve, **given):
    """The outputs of a spec's default config."""
    rows, columns = given["x"].shape
    problem = problem_of(spec, curve, rows=rows, columns=columns)
    return launched(spec, problem, spec.default(problem, INTERPRETED), given | numbers(curve), 1)


@every_curve
def test_the_largest_numbers_give_no_nan(curve):
    """Their squares overflow, as that of relu's does where its result is that square."""
    x = torch.tensor([[3e38, -3e38, 1e20, -1e20, 0.0, 1e-30, -1e-30, 1.0]])
    found = made(FORWARD, curve, x=x)["y"]
    assert not found.isnan().any()
    assert not found[0, [1, 3, 4]].any()


@pytest.mark.parametrize("kind", ["relu", "relu2"])
def test_nothing_comes_back_through_what_was_cut_off(kind):
    x = torch.tensor([[-1.0, 0.0, float("nan"), 2.0]])
    dy = torch.tensor([[float("nan"), float("inf"), 1.0, 1.0]])
    found = made(BACKWARD, CURVES[kind], x=x, dy=dy)["dx"]
    assert found[0, :2].tolist() == [0.0, 0.0]
    assert found[0, 2].isnan() == (kind == "relu2")
    assert found[0, 3] == (4.0 if kind == "relu2" else 1.0)


def test_stripes_of_a_wide_matrix_are_added_up_on_any_number_of_blocks():
    problem = problem_of(REMAKE, CURVES["gelu"], rows=37, columns=3000)
    inputs = REMAKE.inputs(problem, torch.Generator().manual_seed(0), "cpu")
    for blocks in (1, 3, 7):
        check = interpret(REMAKE, problem, REMAKE.default(problem, INTERPRETED), inputs, blocks)
        assert check.passed, (blocks, check.reason)
