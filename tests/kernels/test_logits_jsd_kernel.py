"""The divergence of two heads' logits: any beta, probabilities of 0, rows that do not count, slopes, and its memory."""

import math

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from spec_samples import configs, interpret, sized

from tilekern import interpreter
from tilekern.kernels import spec_named
from tilekern.targets import INTERPRETED
from tuning.verify.check import launch_arguments, make_outputs

SPEC = spec_named("logits_jsd")
BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)
betas = pytest.mark.parametrize("beta", BETAS)


def drawn(dtype="float32", vocabulary=83, beta=0.5, seed=0, graded=True):
    problem = sized(SPEC, dtype, rows=5, vocabulary=vocabulary).but(graded=graded, pure=beta in (0, 1))
    return problem, SPEC.inputs(problem, torch.Generator().manual_seed(seed), "cpu") | {"beta": beta}


def one_of_each(problem):
    found = {}
    for config in configs(SPEC, problem):
        found.setdefault((config["schedule"], config["tile_n"], config["unroll"]), config)
    return found.values()


def check(problem, inputs):
    for config in one_of_each(problem):
        found = interpret(SPEC, problem, config, inputs)
        assert found.passed, (config, found.reason)


@examples(25)
@given(
    st.sampled_from(BETAS), st.sampled_from(["float32", "bfloat16", "float16"]), st.integers(2, 3000), st.booleans(),
    st.data(),
)  # fmt: skip
def test_any_beta_is_right(beta, dtype, vocabulary, graded, data):
    problem, inputs = drawn(dtype, vocabulary, beta, graded=graded)
    config = data.draw(st.sampled_from(configs(SPEC, problem)), label="config")
    found = interpret(SPEC, problem, config, inputs)
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
    expected = SPEC.reference(**inputs, graded=True, pure=beta in (0, 1))
    assert all(x.isfinite().all() for x in expected.values())
    check(problem, inputs)


@betas
@pytest.mark.parametrize("graded", [False, True])
def test_rows_that_do_not_count_add_nothing_whatever_they_hold(beta, graded):
    problem, inputs = drawn(beta=beta, graded=graded)
    inputs["student"][1], inputs["teacher"][3] = math.nan, math.inf
    inputs["slope"][[1, 3]] = 0
    check(problem, inputs)


@pytest.mark.parametrize("slope", [math.inf, -math.inf, math.nan])
def test_a_slope_that_is_not_finite_makes_its_row_nan(slope):
    problem, inputs = drawn()
    inputs["slope"][2] = slope
    expected = SPEC.reference(**inputs, graded=True, pure=False)
    assert expected["loss"].isnan().nonzero().tolist() == [[2]]
    assert bool(expected["gradient"][2].isnan().all())
    check(problem, inputs)


def test_equal_heads_have_no_divergence_and_no_gradient():
    problem, inputs = drawn(vocabulary=300)
    inputs["teacher"] = inputs["student"].clone()
    for config in one_of_each(problem):
        implementation = SPEC.device(problem, config)
        blocks = implementation.grid(problem, INTERPRETED.sm_count)
        outputs = make_outputs(SPEC, problem, blocks, "cpu")
        interpreter.launch(implementation.function, (blocks,), launch_arguments(implementation, inputs, outputs))
        assert all(float(x.abs().max()) < 1e-9 for x in outputs.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("vocabulary", [83, 700])
def test_the_gradient_may_take_the_memory_of_the_student_s_logits(dtype, vocabulary):
    problem, inputs = drawn(dtype, vocabulary)
    for config in one_of_each(problem):
        implementation = SPEC.device(problem, config)
        blocks = implementation.grid(problem, INTERPRETED.sm_count)
        apart, within = (make_outputs(SPEC, problem, blocks, "cpu") for _ in range(2))
        within["gradient"] = inputs["student"].clone()
        for given_to, student in ((apart, inputs["student"]), (within, within["gradient"])):
            arguments = launch_arguments(implementation, inputs | {"student": student}, given_to)
            interpreter.launch(implementation.function, (blocks,), arguments)
        assert all(torch.equal(apart[name], within[name]) for name in apart)


@betas
def test_the_gradient_is_that_of_the_loss(beta):
    """By autograd of torch's kl_div in float64."""
    _, inputs = drawn(vocabulary=61, beta=beta)
    student = inputs["student"].double().requires_grad_()
    x = (student * inputs["scale"]).log_softmax(-1)
    y = (inputs["teacher"].double() * inputs["scale"]).log_softmax(-1)

    def divergence(log, other):
        return torch.nn.functional.kl_div(other, log, reduction="none", log_target=True).sum(-1)

    if beta in (0, 1):
        loss = divergence(y, x) if beta == 0 else divergence(x, y)
    else:
        mixed = (beta * y.exp() + (1 - beta) * x.exp()).log()
        loss = beta * divergence(y, mixed) + (1 - beta) * divergence(x, mixed)
    loss = loss * inputs["slope"].double()
    found = SPEC.reference(**inputs, graded=True, pure=beta in (0, 1))
    torch.testing.assert_close(found["loss"], loss.detach())
    torch.testing.assert_close(found["gradient"], torch.autograd.grad(loss.sum(), student)[0])
