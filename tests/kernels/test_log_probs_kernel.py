"""Log-probabilities of rows of logits: probabilities of 0, ids that are none, rows that do not count, and slopes."""

import math

import pytest
import torch
from spec_samples import assert_right, interpret, launched, one_of_each, sized

from tilekern import interpreter
from tilekern.kernels import spec_named
from tilekern.spec.targets import INTERPRETED
from tilekern.tuning.verify.check import launch_arguments

FORWARD, BACKWARD = spec_named("log_probs_forward"), spec_named("log_probs_backward")
both = pytest.mark.parametrize("spec", [FORWARD, BACKWARD], ids=lambda spec: spec.name)
# The schedule, and the shape of steps.
WAYS = ("schedule", "tile_n", "unroll")


def given(spec, dtype="float32", vocabulary=83, seed=0, **flags):
    problem = sized(spec, dtype, rows=6, vocabulary=vocabulary).but(**flags)
    inputs = spec.inputs(problem, torch.Generator().manual_seed(seed), "cpu")
    return problem, inputs


@both
@pytest.mark.parametrize("vocabulary", [1, 2, 83, 513, 5000])
@pytest.mark.parametrize("flags", [{}, {"biased": True}, {"capped": True}], ids=str)
def test_every_step_and_its_rest_are_right(spec, vocabulary, flags):
    problem, inputs = given(spec, vocabulary=vocabulary, **flags)
    assert_right(spec, problem, one_of_each(spec, problem, *WAYS), inputs)


@both
def test_probabilities_of_0_add_nothing(spec):
    """Where a bias of -inf masks ids, and where float32 takes an exponential for 0."""
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
        check = interpret(spec, problem, config, inputs)
        assert check.passed, (config, check.reason)


@pytest.mark.parametrize("offset", [0.0, 3e4, -3e4])
def test_logits_far_from_zero_cost_no_digits(offset):
    problem, inputs = given(FORWARD, vocabulary=3000)
    inputs["logits"] = (16 * inputs["logits"]).round() / 16 + offset  # so that the sum is exact
    inputs["scale"] = 1.0
    for config in one_of_each(FORWARD, problem, *WAYS):
        outputs, expected = (
            launched(FORWARD, problem, config, inputs),
            FORWARD.reference(**inputs, biased=False, capped=False),
        )
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
def test_an_id_that_is_none_makes_its_row_nan_and_no_other(spec, bad):
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


@both
def test_rows_that_do_not_count_are_0_whatever_they_hold(spec):
    problem, inputs = given(spec)
    inputs["ids"][:] = torch.tensor([1, -7, 2, -7, 3, 4])
    inputs["ignore_index"] = -7
    inputs["logits"][[1, 3]] = math.nan
    for name in inputs.keys() & {"lse", "entropy", "dlog_probs", "dentropy", "dlse"}:
        inputs[name][[1, 3]] = math.inf
    if spec is BACKWARD:
        inputs["dlog_probs"][5] = 1.0  # drawn as a row without slopes
    for config in one_of_each(spec, problem, *WAYS):
        for result in launched(spec, problem, config, inputs).values():
            assert bool(result[[1, 3]].eq(0).all())
            assert bool(result[[0, 2, 4, 5]].ne(0).any(-1).all() if result.dim() == 2 else result[0] != 0)


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
        assert interpret(BACKWARD, problem, config, inputs).passed


@pytest.mark.parametrize("flags", [{}, {"biased": True, "capped": True}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gradient_may_take_the_memory_of_the_logits(flags, dtype):
    problem, inputs = given(BACKWARD, dtype, 700, **flags)
    for config in one_of_each(BACKWARD, problem, *WAYS):
        expected = launched(BACKWARD, problem, config, inputs)["dlogits"]
        logits = inputs["logits"].clone()
        implementation = BACKWARD.device(problem, config)
        blocks = implementation.grid(problem, INTERPRETED.sm_count)
        arguments = launch_arguments(implementation, inputs | {"logits": logits}, {"dlogits": logits})
        interpreter.launch(implementation.function, (blocks,), arguments)
        assert torch.equal(logits, expected)


def test_the_gradient_is_that_of_the_results():
    """By autograd of the reference of the forward, with slopes of all three."""
    _, inputs = given(BACKWARD, vocabulary=61, biased=True, capped=True)
    names = ("logits", "bias", "ids", "ignore_index", "scale", "softcap")
    wide = inputs["logits"].double().requires_grad_()
    results = FORWARD.reference(**{name: inputs[name] for name in names} | {"logits": wide}, biased=True, capped=True)
    slopes = [inputs[f"d{name}"].double() for name in results]
    (expected,) = torch.autograd.grad(list(results.values()), wide, slopes)
    found = BACKWARD.reference(**inputs, biased=True, capped=True)["dlogits"]
    assert float((found - expected).norm() / expected.norm()) < 1e-6
