"""The divergence of two heads' logits: any beta, probabilities of 0, rows that do not count, slopes, and its memory."""

import math

import pytest
import torch
from divergence import divergence
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from spec_samples import configs, interpret, launched, one_of_each, sized

from tilekern.kernels import spec_named
from tilekern.spec.targets import INTERPRETED

FORWARD, BACKWARD = spec_named("logits_jsd_forward"), spec_named("logits_jsd_backward")
BOTH = (FORWARD, BACKWARD)
BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)
SUMS = ("student_total", "teacher_total", "pull")
betas = pytest.mark.parametrize("beta", BETAS)
# The schedule, and the shape of steps.
WAYS = ("schedule", "tile_n", "unroll")


def drawn(dtype="float32", vocabulary=83, beta=0.5, seed=0):
    problem = sized(FORWARD, dtype, rows=5, vocabulary=vocabulary).but(pure=beta in (0, 1))
    return problem, FORWARD.inputs(problem, torch.Generator().manual_seed(seed), "cpu") | {"beta": beta}


def with_sums(problem, inputs):
    """Inputs of the backward: with what the reference of the forward makes of them."""
    known = FORWARD.reference(**inputs, pure=problem["pure"])
    return inputs | {name: known[name].float() for name in SUMS}


def check(problem, inputs):
    for spec, given_to in ((FORWARD, inputs), (BACKWARD, with_sums(problem, inputs))):
        for config in one_of_each(spec, problem, *WAYS):
            found = interpret(spec, problem, config, given_to)
            assert found.passed, (spec.name, config, found.reason)


@examples(25)
@given(
    st.sampled_from(BETAS), st.sampled_from(["float32", "bfloat16", "float16"]), st.integers(2, 3000),
    st.sampled_from(BOTH), st.data(),
)  # fmt: skip
def test_any_beta_is_right(beta, dtype, vocabulary, spec, data):
    problem, inputs = drawn(dtype, vocabulary, beta)
    config = data.draw(st.sampled_from(configs(spec, problem)), label="config")
    found = interpret(spec, problem, config, inputs if spec is FORWARD else with_sums(problem, inputs))
    assert found.passed, found.reason


@betas
def test_probabilities_of_0_make_no_nan(beta):
    problem, inputs = drawn(vocabulary=700, beta=beta)
    # One of both alone is an infinite divergence of the other at an end.
    if beta != 0:
        inputs["student"][0, 3::5] = -math.inf
    if beta != 1:
        inputs["teacher"][1, 4::7] = -math.inf
    for name in ("student", "teacher"):
        inputs[name][2, 5::3] = -math.inf
    inputs["student"][3, 6], inputs["teacher"][3, 6] = -200.0, -300.0
    expected = FORWARD.reference(**inputs, pure=beta in (0, 1))
    assert all(x.isfinite().all() for x in expected.values())
    check(problem, inputs)


@betas
def test_rows_that_do_not_count_add_nothing_whatever_they_hold(beta):
    problem, inputs = drawn(beta=beta)
    inputs["student"][1], inputs["teacher"][3] = math.nan, math.inf
    inputs["slope"][[1, 3]] = 0
    check(problem, inputs)


@pytest.mark.parametrize("slope", [math.inf, -math.inf, math.nan])
def test_a_slope_that_is_not_finite_makes_its_row_nan(slope):
    problem, inputs = drawn()
    inputs["slope"][2] = slope
    assert FORWARD.reference(**inputs, pure=False)["loss"].isnan().nonzero().tolist() == [[2]]
    gradient = BACKWARD.reference(**with_sums(problem, inputs), pure=False)["gradient"]
    assert bool(gradient[2].isnan().all())
    check(problem, inputs)


def test_equal_heads_have_no_divergence_and_no_gradient():
    problem, inputs = drawn(vocabulary=300)
    inputs["teacher"] = inputs["student"].clone()
    for config in one_of_each(FORWARD, problem, *WAYS):
        sums = launched(FORWARD, problem, config, inputs)
        assert float(sums.pop("loss").abs().max()) < 1e-9
        for other in one_of_each(BACKWARD, problem, *WAYS):
            assert float(launched(BACKWARD, problem, other, inputs | sums)["gradient"].abs().max()) < 1e-9


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_likely_column_leaves_no_more_than_its_rounding(dtype):
    """What the sum of g takes away there is g itself but for the last bits."""
    problem, inputs = drawn(dtype, vocabulary=300, beta=0.5)
    inputs["student"][:, 7] = inputs["student"].amax() + 12
    sums = launched(FORWARD, problem, FORWARD.default(problem, INTERPRETED), inputs)
    del sums["loss"]
    found = launched(BACKWARD, problem, BACKWARD.default(problem, INTERPRETED), inputs | sums)["gradient"]
    wanted = BACKWARD.reference(**with_sums(problem, inputs), pure=False)["gradient"]
    error = (found.double() - wanted).norm() / wanted.norm()
    # A likely column's gradient is what its probability lacks of 1, here 1e-3, of which a rounding of 1 is 6e-5.
    assert error < {"bfloat16": 4e-3, "float32": 1e-4}[dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("vocabulary", [83, 700])
def test_the_gradient_may_take_the_memory_of_the_student_s_logits(dtype, vocabulary):
    problem, inputs = drawn(dtype, vocabulary)
    inputs = with_sums(problem, inputs)
    for config in one_of_each(BACKWARD, problem, *WAYS):
        apart = launched(BACKWARD, problem, config, inputs)
        within = {"gradient": inputs["student"].clone()}
        launched(BACKWARD, problem, config, inputs | {"student": within["gradient"]}, outputs=within)
        assert torch.equal(apart["gradient"], within["gradient"])


@betas
def test_the_gradient_is_that_of_the_loss(beta):
    """By autograd of torch's kl_div in float64."""
    _, inputs = drawn(vocabulary=61, beta=beta)
    student = inputs["student"].double().requires_grad_()
    x = (student * inputs["scale"]).log_softmax(-1)
    y = (inputs["teacher"].double() * inputs["scale"]).log_softmax(-1)
    loss = divergence(x, y, beta) * inputs["slope"].double()
    pure = beta in (0, 1)
    known = FORWARD.reference(**inputs, pure=pure)
    found = BACKWARD.reference(**inputs | {name: known[name] for name in SUMS}, pure=pure)
    torch.testing.assert_close(known["loss"], loss.detach())
    torch.testing.assert_close(found["gradient"], torch.autograd.grad(loss.sum(), student)[0])
