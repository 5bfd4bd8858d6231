import math

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from spec_samples import assert_right, configs, interpret, sized

from tilekern.kernels import spec_named
from tilekern.tuning.verify.adversarial import one_hot_rows

LOSS = spec_named("jsd")
BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)


def drawn(problem, beta, seed=0):
    """Log-probabilities."""
    return LOSS.inputs(problem, torch.Generator().manual_seed(seed), "cpu") | {"beta": beta}


@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize("columns", [83, 128256])
def test_its_inputs_are_log_probabilities_whatever_is_drawn(columns, graded, monkeypatch):
    """Of a long row with one large number in the place of normal ones, the exponential would not fit float32."""
    problem = sized(LOSS, rows=3, columns=columns).but(graded=graded)
    randn = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *size, **rest: one_hot_rows(0, randn(*size, **rest)))
    inputs = drawn(problem, 0.25)
    for name in ("input", "target"):
        torch.testing.assert_close(inputs[name].exp().sum(-1), torch.ones(3))
    assert_right(LOSS, problem, configs(LOSS, problem)[:2], inputs)


@examples(40)
@given(
    st.sampled_from(BETAS), st.sampled_from(["float32", "bfloat16", "float16"]), st.integers(2, 3000), st.booleans(),
    st.data(),
)  # fmt: skip
def test_any_beta_is_right_on_log_probabilities(beta, dtype, columns, graded, data):
    problem = sized(LOSS, dtype, rows=3, columns=columns).but(graded=graded, pure=beta in (0, 1))
    config = data.draw(st.sampled_from(configs(LOSS, problem)), label="config")
    check = interpret(LOSS, problem, config, drawn(problem, beta))
    assert check.passed, check.reason


@pytest.mark.parametrize("beta", BETAS)
def test_probabilities_of_0_make_no_nan(beta):
    """Of the input, of the target, of both, and those that only float32 takes for 0."""
    problem = sized(LOSS, rows=4, columns=83).but(graded=True, pure=beta in (0, 1))
    inputs = drawn(problem, beta)
    # One of both alone is an infinite divergence of the other at an end.
    inputs["input"][0, 3] = -math.inf if beta != 0 else -5.0
    inputs["target"][1, 4] = -math.inf if beta != 1 else -5.0
    inputs["input"][2, 5] = inputs["target"][2, 5] = -math.inf
    inputs["input"][3, 6], inputs["target"][3, 6] = -200.0, -300.0
    expected = LOSS.reference(**inputs, graded=True, pure=beta in (0, 1))
    assert all(x.isfinite().all() for x in expected.values())
    assert_right(LOSS, problem, configs(LOSS, problem)[:3], inputs)


@pytest.mark.parametrize("beta", BETAS)
def test_rows_that_do_not_count_add_nothing_whatever_they_hold(beta):
    problem = sized(LOSS, rows=4, columns=83).but(graded=True, pure=beta in (0, 1))
    inputs = drawn(problem, beta)
    inputs["input"][1], inputs["target"][3] = math.nan, math.inf
    inputs["slope"][[1, 3]] = 0
    assert_right(LOSS, problem, configs(LOSS, problem)[:3], inputs)


@pytest.mark.parametrize("columns", [1025, 5000])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_lies_beyond_a_row_adds_no_rounding_to_a_small_loss(dtype, columns):
    problem = sized(LOSS, dtype, rows=4, columns=columns).but(graded=False, pure=False)
    inputs = drawn(problem, 0.1)
    # As of a student that has learnt its teacher.
    other = inputs["input"].float() + 0.3 * torch.randn(4, columns, generator=torch.Generator().manual_seed(1))
    inputs["target"] = other.log_softmax(-1).to(inputs["input"].dtype)
    assert_right(LOSS, problem, configs(LOSS, problem)[:4], inputs)
