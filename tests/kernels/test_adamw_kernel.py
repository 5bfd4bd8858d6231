"""A step of AdamW: roundings, zero gradients, overflow, and the view of memory as rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from spec_samples import assert_right, configs, inputs_of, launched, sized

from tilekern.kernels import spec_named
from tilekern.kernels.adamw import WIDTHS, flat_shape
from tilekern.spec import DTYPES
from tilekern.spec.targets import INTERPRETED

SPEC = spec_named("adamw")


def step(problem, inputs):
    """Return the results of the default config."""
    return launched(SPEC, problem, SPEC.default(problem, INTERPRETED), inputs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_changes_if_gradient_and_moments_are_zero(dtype):
    problem = sized(SPEC, dtype)
    inputs = inputs_of(SPEC, problem)
    zeros = {name: torch.zeros_like(inputs[name]) for name in ("grad", "exp_avg", "exp_avg_sq")}
    found = step(problem, inputs | zeros | {"decay": 1.0, "eps": 1e-8})
    assert torch.equal(found["new_param"], inputs["param"])
    assert not found["new_exp_avg"].any()
    assert not found["new_exp_avg_sq"].any()


def test_nothing_but_the_results_is_rounded():
    """A step brings the parameter near zero: if anything were rounded before, the result would be lost."""
    problem = sized(SPEC, "bfloat16")
    inputs = inputs_of(SPEC, problem)
    alone = SPEC.reference(**inputs | {"param": torch.zeros_like(inputs["param"])})["new_param"]
    inputs["param"] = (-alone / inputs["decay"]).bfloat16()
    assert_right(SPEC, problem, [SPEC.default(problem, INTERPRETED)], inputs)


def test_a_second_moment_that_has_overflowed_stops_the_parameter_and_does_not_spoil_it():
    """As in torch: in float16 the square of a gradient above 256 does not fit."""
    problem = sized(SPEC, "float16")
    inputs = inputs_of(SPEC, problem) | {"decay": 1.0}
    inputs["exp_avg_sq"] = torch.full_like(inputs["exp_avg_sq"], torch.inf)
    found = step(problem, inputs)
    assert torch.equal(found["new_param"], inputs["param"])
    assert found["new_exp_avg_sq"].isposinf().all()


def test_the_sign_turns_the_gradient_alone():
    problem = sized(SPEC, "bfloat16")
    inputs = inputs_of(SPEC, problem)
    turned = step(problem, inputs | {"sign": 1.0, "grad": -inputs["grad"]})
    for name, expected in step(problem, inputs | {"sign": -1.0}).items():
        assert torch.equal(turned[name], expected), name


def test_constants_do_not_change_from_step_to_step():
    problem = sized(SPEC, "bfloat16")
    for config in configs(SPEC, problem):
        constants = [name for name, _ in SPEC.device(problem, config).constants]
        assert constants == ["columns", "tile_m", "tile_n", "persistent", "bounded"]


@given(elements=st.one_of(st.integers(1, 1 << 40), st.integers(1, 1 << 20).map(lambda n: 256 * n)))
def test_memory_is_viewed_as_whole_rows_of_the_widest_width(elements):
    rows, columns = flat_shape(elements)
    assert rows * columns == elements
    assert columns == max(width for width in WIDTHS if elements % width == 0)
