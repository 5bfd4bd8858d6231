"""Activations, alone and of a gate: numbers far from zero, gradients where relu is 0, and sums over stripes."""

import pytest
import torch
from spec_samples import assert_right, each, launched, plain_inputs, sized

from tilekern.kernels import spec_named
from tilekern.ops.activation import CURVES
from tilekern.spec.targets import INTERPRETED

FORWARD, BACKWARD, REMAKE = (spec_named(f"activation_{name}") for name in ("forward", "backward", "backward_remake"))
GEGLU = [spec_named("geglu_forward"), spec_named("geglu_backward")]
every_curve = pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES)


def problem_of(spec, curve, **sizes):
    return sized(spec, **sizes).but(erf=curve.erf, relu=curve.relu)


def numbers(curve):
    return {"linear": curve.linear, "cubic": curve.cubic}


def assert_right_far_from_zero(spec, problem, inputs, name):
    """Far from zero an activation is 0, the number or its square, and its exponential overflows or vanishes."""
    for scale in (5.0, 50.0, 1e4, 1e15):
        if name == "x" or scale < 1e15:
            scaled = inputs | {name: inputs[name] * scale}
            assert_right(spec, problem, [spec.default(problem, INTERPRETED)], scaled)


@every_curve
@each([FORWARD, BACKWARD, REMAKE])
def test_numbers_far_from_zero_are_right(spec, curve):
    problem = problem_of(spec, curve, rows=4, columns=256)
    assert_right_far_from_zero(spec, problem, plain_inputs(spec, problem) | numbers(curve), "x")


@pytest.mark.parametrize("tanh", [False, True])
@each(GEGLU)
def test_gates_far_from_zero_are_right(spec, tanh):
    problem = sized(spec, rows=4, columns=256).but(tanh=tanh)
    assert_right_far_from_zero(spec, problem, plain_inputs(spec, problem), "gate")


def made(spec, curve, **given):
    """Return the outputs of a spec's default config."""
    rows, columns = given["x"].shape
    problem = problem_of(spec, curve, rows=rows, columns=columns)
    return launched(spec, problem, spec.default(problem, INTERPRETED), given | numbers(curve), 1)


@every_curve
def test_the_largest_numbers_give_no_nan(curve):
    """Their squares overflow, and so does the result of relu2."""
    x = torch.tensor([[3e38, -3e38, 1e20, -1e20, 0.0, 1e-30, -1e-30, 1.0]])
    found = made(FORWARD, curve, x=x)["y"]
    assert not found.isnan().any()
    assert not found[0, [1, 3, 4]].any()


@pytest.mark.parametrize("kind", ["relu", "relu2"])
def test_no_gradient_passes_where_relu_is_0(kind):
    x = torch.tensor([[-1.0, 0.0, float("nan"), 2.0]])
    dy = torch.tensor([[float("nan"), float("inf"), 1.0, 1.0]])
    found = made(BACKWARD, CURVES[kind], x=x, dy=dy)["dx"]
    assert found[0, :2].tolist() == [0.0, 0.0]
    assert found[0, 2].isnan() == (kind == "relu2")
    assert found[0, 3] == (4.0 if kind == "relu2" else 1.0)


@pytest.mark.parametrize("blocks", [1, 3, 7])
def test_stripes_of_a_wide_matrix_are_added_up_on_any_number_of_blocks(blocks):
    problem = problem_of(REMAKE, CURVES["gelu"], rows=37, columns=3000)
    default = REMAKE.default(problem, INTERPRETED)
    assert_right(REMAKE, problem, [default], plain_inputs(REMAKE, problem), blocks)


def test_the_exact_form_differs_from_that_by_tanh_as_erf_does():
    """Each element is within some float32 units of erf."""
    problem = sized(GEGLU[0], rows=1, columns=4096).but(tanh=False)
    gate = torch.linspace(-8, 8, 4096)[None]
    given = {"gate": gate, "up": torch.ones_like(gate)}
    found = launched(GEGLU[0], problem, GEGLU[0].default(problem, INTERPRETED), given, 4)["y"]
    exact = torch.nn.functional.gelu(gate.double())
    assert (found.double() - exact).abs().max() < 1e-6
    by_tanh = torch.nn.functional.gelu(gate.double(), approximate="tanh")
    assert (by_tanh - exact).abs().max() > 1e-4
