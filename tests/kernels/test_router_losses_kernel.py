import math

import pytest
import torch
from spec_samples import inputs_of, interpret, sized

from tilekern.kernels import spec_named

BOTH = ("router_losses_forward", "router_losses_backward")


@pytest.mark.parametrize(("choices", "experts"), [(1, 1), (2, 8), (4, 60), (8, 128), (8, 256)])
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("blocks", [1, 5])
def test_routers_of_models_by_any_number_of_blocks(name, choices, experts, blocks):
    spec = spec_named(name)
    problem = sized(spec, "bfloat16", flags=True, rows=150, choices=choices, experts=experts)
    check = interpret(spec, problem, spec.generic(problem), inputs_of(spec, problem), blocks)
    assert check.passed, check.reason


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", BOTH)
def test_rows_that_do_not_count_may_hold_anything(name, value):
    spec = spec_named(name)
    problem = sized(spec, flags=True, rows=9, experts=6)
    inputs = inputs_of(spec, problem)
    assert (inputs["shares"] == 0).any()
    inputs["logits"][inputs["shares"] == 0] = value
    check = interpret(spec, problem, spec.generic(problem), inputs)
    assert check.passed, check.reason
    assert math.isfinite(check.relative_error)
    assert all(x.isfinite().all() for x in spec.reference(**inputs, masked=True).values())


def test_large_logits_keep_their_digits():
    spec = spec_named("router_losses_forward")
    problem = sized(spec, rows=9, experts=6)
    inputs = inputs_of(spec, problem)
    inputs["logits"] += 1000
    check = interpret(spec, problem, spec.generic(problem), inputs)
    assert check.passed, check.reason


@pytest.mark.parametrize("masked", [False, True])
def test_the_gradient_s_reference_is_what_autograd_says(masked):
    """Of sums of probabilities by their slopes, and of sums of squares by half the pull; counts have no gradient."""
    forward, backward = map(spec_named, BOTH)
    problem = sized(backward, rows=9, experts=6).but(masked=masked)
    inputs = {name: x.double() for name, x in inputs_of(backward, problem).items()}
    logits = inputs["logits"].clone().requires_grad_()
    ids = logits.detach().topk(2, 1).indices
    sums = forward.reference(logits, ids, inputs["shares"], 2, masked)
    pulled = (sums["squares"] * inputs["pull"][0] / 2).sum()
    ((inputs["slopes"][0] * sums["probabilities"]).sum() + pulled).backward()
    found = backward.reference(**inputs, masked=masked)["dlogits"]
    torch.testing.assert_close(found, logits.grad, rtol=1e-9, atol=1e-9)
