"""Log-probabilities of rows of logits: probabilities of 0, lost digits, invalid ids, and slopes."""

import math

import pytest
import torch
from spec_samples import assert_right, each, launched, one_of_each, plain_inputs, sized

from tilekern.kernels import spec_named
from tilekern.spec.targets import INTERPRETED

FORWARD, BACKWARD = spec_named("log_probs_forward"), spec_named("log_probs_backward")
both = each([FORWARD, BACKWARD])
# The axes of the schedule and of steps.
WAYS = ("schedule", "tile_n", "unroll")


def given(spec, vocabulary=83, **flags):
    problem = sized(spec, rows=6, vocabulary=vocabulary).but(**flags)
    return problem, plain_inputs(spec, problem)


@both
def test_probabilities_of_0_add_nothing(spec):
    """A bias of -inf masks ids, or an exponential is 0 in float32."""
    problem, inputs = given(spec, vocabulary=513, biased=True)
    inputs["bias"][0, ::3] = -math.inf
    inputs["bias"][0, 1::3] -= 3000
    inputs["ids"][:] = 2
    if spec is BACKWARD:
        names = ("logits", "bias", "ids", "ignore_index", "scale", "softcap")
        saved = FORWARD.reference(**{name: inputs[name] for name in names}, biased=True, capped=False)
        inputs |= {name: saved[name].float() for name in ("lse", "entropy")}
    for config in one_of_each(spec, problem, *WAYS):
        assert all(x.isfinite().all() for x in launched(spec, problem, config, inputs).values())
        assert_right(spec, problem, [config], inputs)


@pytest.mark.parametrize("offset", [0.0, 3e4, -3e4])
def test_logits_far_from_zero_cost_no_digits(offset):
    problem, inputs = given(FORWARD, vocabulary=3000)
    inputs["logits"] = (16 * inputs["logits"]).round() / 16 + offset  # so that the sum is exact
    inputs["scale"] = 1.0
    for config in one_of_each(FORWARD, problem, *WAYS):
        outputs = launched(FORWARD, problem, config, inputs)
        expected = FORWARD.reference(**inputs, biased=False, capped=False)
        for name in ("log_probs", "entropy"):
            torch.testing.assert_close(outputs[name].double(), expected[name], rtol=3e-6, atol=1e-6)


def test_nearly_certain_rows_keep_their_entropy():
    """The difference of lse and the mean of z would lose it."""
    problem, inputs = given(FORWARD, vocabulary=300)
    inputs["logits"].zero_()
    inputs["logits"][:, 7] = 1000.0
    inputs["logits"][:, 8] = 980.0
    inputs["scale"], inputs["ids"][:] = 1.0, 7
    share = math.exp(-20)
    for config in one_of_each(FORWARD, problem, *WAYS):
        outputs = launched(FORWARD, problem, config, inputs)
        assert outputs["entropy"].tolist() == pytest.approx(6 * [21 * share], rel=6e-2)
        assert outputs["log_probs"].tolist() == pytest.approx(6 * [-share], abs=1.2e-7)


@both
@pytest.mark.parametrize("bad", [83, 1 << 20, -1, -99])
def test_an_invalid_id_makes_only_its_row_nan(spec, bad):
    problem, inputs = given(FORWARD)
    wrong = inputs | {"ids": inputs["ids"].clone()}
    wrong["ids"][2] = bad
    config = FORWARD.default(problem, INTERPRETED)
    right, found = (launched(FORWARD, problem, config, x) for x in (inputs, wrong))
    others = torch.arange(6) != 2
    for name in ("log_probs", "lse"):
        assert found[name].isnan().nonzero().tolist() == [[2]]
        assert torch.equal(found[name][others], right[name][others])
    assert torch.equal(found["entropy"], right["entropy"])
    if spec is BACKWARD:
        _, inputs = given(BACKWARD)
        inputs |= {"ids": wrong["ids"], "lse": found["lse"], "entropy": found["entropy"]}
        (dlogits,) = launched(BACKWARD, problem, BACKWARD.default(problem, INTERPRETED), inputs).values()
        assert bool(dlogits[2].isnan().all())
        assert bool(dlogits[others].isfinite().all())


def test_rows_whose_slopes_are_0_have_no_gradient_whatever_they_hold():
    problem, inputs = given(BACKWARD)
    inputs["logits"][2], inputs["lse"][2] = -math.inf, math.nan
    for name in ("dlog_probs", "dentropy", "dlse"):
        inputs[name][2] = 0
    for config in one_of_each(BACKWARD, problem, *WAYS):
        assert not launched(BACKWARD, problem, config, inputs)["dlogits"][2].any()


@pytest.mark.parametrize("name", ["dlog_probs", "dentropy", "dlse"])
@pytest.mark.parametrize("slope", [math.inf, -math.inf, math.nan])
def test_a_slope_that_is_not_finite_makes_its_row_nan(name, slope):
    problem, inputs = given(BACKWARD)
    inputs["ids"][:] = 5
    inputs[name][2] = slope
    for config in one_of_each(BACKWARD, problem, *WAYS):
        (dlogits,) = launched(BACKWARD, problem, config, inputs).values()
        assert bool(dlogits[2].isnan().all())
        assert bool(dlogits[torch.arange(6) != 2].isfinite().all())
        assert_right(BACKWARD, problem, [config], inputs)
