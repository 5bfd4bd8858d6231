import inspect
import math

import pytest
import torch
from spec_samples import assert_right, inputs_of, interpret, sized

from tilekern.kernels import spec_named
from tilekern.kernels.experts.route import PART

ROUTE = ("route_count", "route_place")


def defaults(spec, problem):
    """The default and the generic config."""
    return dict.fromkeys((spec.default(problem, None), spec.generic(problem)))


@pytest.mark.parametrize("name", ROUTE)
@pytest.mark.parametrize("blocks", [1, 2, None])
def test_slots_of_several_parts_are_routed_by_any_number_of_blocks(name, blocks):
    spec = spec_named(name)
    problem = sized(spec, rows=2 * PART + 77, experts=33)
    assert_right(spec, problem, defaults(spec, problem), inputs_of(spec, problem), blocks)


@pytest.mark.parametrize("ids", [[3] * 40, [7] * 40, [-1, 9, 0] * 13])
def test_one_expert_may_have_all_slots_or_none(ids):
    """An id beyond the experts, or below 0, is of no expert."""
    problem = sized(spec_named(ROUTE[0]), rows=len(ids), experts=7)
    given = torch.tensor(ids, dtype=torch.int32)
    counts = torch.stack([(given == e).sum() * (e < 7) for e in range(32)]).to(torch.int32)[None]
    for name, inputs in zip(ROUTE, ({}, {"counts": counts}), strict=True):
        spec = spec_named(name)
        for config in defaults(spec, problem):
            assert interpret(spec, problem, config, {"ids": given, "experts": 7, **inputs}).relative_error == 0


@pytest.mark.parametrize(
    ("name", "numbers"),
    [("experts_combine", ("x",)), ("experts_gate", ("pre",)), ("experts_gate_backward", ("pre", "dy"))],
)
def test_rows_of_no_expert_may_hold_anything(name, numbers):
    spec = spec_named(name)
    problem = sized(spec, flags=True, choices=3)
    inputs = inputs_of(spec, problem)
    assert (inputs["experts"] == inputs["total"]).any()
    for number in numbers:
        inputs[number][inputs["experts"] == inputs["total"]] = math.nan
    assert_right(spec, problem, defaults(spec, problem), inputs)


def test_a_gate_without_a_limit_is_silu():
    spec = spec_named("experts_gate")
    problem = sized(spec)
    inputs = inputs_of(spec, problem) | {"alpha": 1.0, "limit": math.inf, "shift": 0.0}
    inputs["experts"].zero_()
    gate, up = inputs["pre"].double().chunk(2, 1)
    expected = torch.nn.functional.silu(gate) * up
    assert torch.allclose(spec.reference(**inputs, tanh=False, interleaved=False, biased=False)["y"], expected)
    for config in defaults(spec, problem):
        assert interpret(spec, problem, config, inputs).passed


def test_more_choices_than_are_written_out():
    spec = spec_named("experts_combine")
    problem = sized(spec, flags=True, tokens=3, choices=11, columns=40)
    constants = dict(spec.device(problem, spec.generic(problem)).constants)
    assert not constants["unrolled"]
    assert interpret(spec, problem, spec.generic(problem), inputs_of(spec, problem)).passed


@pytest.mark.parametrize("flags", [False, True])
def test_the_gate_s_gradients_are_what_autograd_says(flags):
    """Of its value times the routing weight of each row's slot, and of what the second product's bias adds to that."""
    forward, backward = spec_named("experts_gate"), spec_named("experts_gate_backward")
    problem = sized(backward, flags=flags, rows=9, columns=6)
    inputs = {k: x.double() if _is_float(x) else x for k, x in inputs_of(backward, problem).items()}
    named = {d.name: problem[d.name] for d in backward.dimensions if d.kind == "flag"}
    pre, weights = (inputs[name].clone().requires_grad_() for name in ("pre", "weights"))
    takes = inspect.signature(forward.reference).parameters
    given = {name: x for name, x in (inputs | named | {"pre": pre}).items() if name in takes}
    counts = inputs["experts"] < inputs["total"]
    of_rows = weights[inputs["order"].long()] * counts
    loss = (inputs["dy"] * of_rows[:, None] * forward.reference(**given)["y"]).sum()
    if named["biased"]:
        loss = loss + (of_rows * inputs["shares"]).sum()
    loss.backward()
    found = backward.reference(**inputs, **named)
    torch.testing.assert_close(found["dpre"], pre.grad, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found["dweights"], weights.grad, rtol=1e-9, atol=1e-9)


def _is_float(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()
