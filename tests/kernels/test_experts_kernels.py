"""Routers and layers of experts: choices, losses, routes of slots, gates."""

import inspect
import math

import pytest
import torch
from spec_samples import assert_right, both_defaults, configs, inputs_of, interpret, is_float, sized

from tilekern.kernels import spec_named
from tilekern.kernels.experts.route import PART

ROUTE = ("route_count", "route_place")


@pytest.mark.parametrize("name", ROUTE)
@pytest.mark.parametrize("blocks", [1, 2, None])
def test_slots_of_several_parts_are_routed_by_any_number_of_blocks(name, blocks):
    spec = spec_named(name)
    problem = sized(spec, rows=2 * PART + 77, experts=33)
    assert_right(spec, problem, both_defaults(spec, problem), inputs_of(spec, problem), blocks)


@pytest.mark.parametrize("ids", [[3] * 40, [7] * 40, [-1, 9, 0] * 13])
def test_one_expert_may_have_all_slots_or_none(ids):
    """An id beyond the experts, or below 0, is of no expert."""
    problem = sized(spec_named(ROUTE[0]), rows=len(ids), experts=7)
    given = torch.tensor(ids, dtype=torch.int32)
    counts = torch.stack([(given == e).sum() * (e < 7) for e in range(32)]).to(torch.int32)[None]
    for name, inputs in zip(ROUTE, ({}, {"counts": counts}), strict=True):
        spec = spec_named(name)
        for config in both_defaults(spec, problem):
            assert interpret(spec, problem, config, {"ids": given, "experts": 7, **inputs}).relative_error == 0


def test_a_gate_without_a_limit_is_silu():
    spec = spec_named("experts_gate")
    problem = sized(spec)
    inputs = inputs_of(spec, problem) | {"alpha": 1.0, "limit": math.inf, "shift": 0.0}
    inputs["experts"].zero_()
    gate, up = inputs["pre"].double().chunk(2, 1)
    expected = torch.nn.functional.silu(gate) * up
    assert torch.allclose(spec.reference(**inputs, tanh=False, interleaved=False, biased=False)["y"], expected)
    for config in both_defaults(spec, problem):
        assert interpret(spec, problem, config, inputs).passed


def test_more_choices_than_are_unrolled():
    spec = spec_named("experts_combine")
    problem = sized(spec, flags=True, tokens=3, choices=11, columns=40)
    constants = dict(spec.device(problem, spec.generic(problem)).constants)
    assert not constants["unrolled"]
    assert interpret(spec, problem, spec.generic(problem), inputs_of(spec, problem)).passed


@pytest.mark.parametrize("flags", [False, True])
def test_gate_gradients_match_autograd(flags):
    """Of its value times the routing weight of each row's slot, and of what the second product's bias adds to that."""
    forward, backward = spec_named("experts_gate"), spec_named("experts_gate_backward")
    problem = sized(backward, flags=flags, rows=9, columns=6)
    inputs = {k: x.double() if is_float(x) else x for k, x in inputs_of(backward, problem).items()}
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


# Routers.

FORWARD = ("router_softmax_forward", "router_sigmoid_forward")
BACKWARD = ("router_softmax_backward", "router_sigmoid_backward")
# Choices, experts and groups of Mixtral, GPT-OSS, Qwen2-MoE, Qwen3-MoE, DeepSeek-V3; and what no model has.
MODELS = [(2, 8, 1), (4, 32, 1), (4, 60, 1), (8, 128, 1), (8, 256, 8), (16, 160, 5), (1, 1, 1), (5, 5, 1), (7, 64, 32)]


@pytest.mark.parametrize(("choices", "experts", "groups"), MODELS)
@pytest.mark.parametrize("name", FORWARD + BACKWARD)
def test_routers_of_models(name, choices, experts, groups):
    spec = spec_named(name)
    problem = sized(spec, "bfloat16", flags=True, tokens=9, choices=choices, experts=experts, expert_groups=groups)
    inputs = inputs_of(spec, problem)
    ways = {config["tile_m"]: config for config in configs(spec, problem)}
    assert_right(spec, problem, ways.values(), inputs)


def by_hand(inputs, groups):
    """The experts of each token by DeepSeek-V3's words."""
    scores = inputs["logits"].sigmoid().flatten(1) + inputs["bias"].flatten()
    size, found = scores.shape[1] // groups, []
    for row in scores.tolist():
        parts = [row[g * size : (g + 1) * size] for g in range(groups)]
        kept = sorted(range(groups), key=lambda g, parts=parts: -sum(sorted(parts[g])[-2:]))[: inputs["kept"]]
        allowed = [e for e in range(len(row)) if e // size in kept]
        found.append(sorted(allowed, key=lambda e, row=row: -row[e])[: inputs["choices"]])
    return found


@pytest.mark.parametrize("kept", [1, 2, 3, 4])
def test_the_reference_keeps_the_groups_with_the_best_two(kept):
    """The inputs of the spec are such that float32 and float64 choose the same."""
    spec = spec_named("router_sigmoid_forward")
    problem = sized(spec, tokens=40, choices=5, experts=20, expert_groups=4)
    inputs = inputs_of(spec, problem) | {"kept": kept}
    expected = spec.reference(**inputs, normalized=False)
    assert expected["ids"].tolist() == by_hand(inputs, 4)
    assert interpret(spec, problem, spec.generic(problem), inputs).passed


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("name", FORWARD + BACKWARD)
def test_nonfinite_values_stay_in_their_row(name, value):
    spec = spec_named(name)
    problem = sized(spec, flags=True, tokens=6, choices=3, experts=10, expert_groups=2)
    inputs = inputs_of(spec, problem)
    flat = inputs["logits"].view(6, 10)
    flat[1, 7] = flat[3, 2] = flat[3, 9] = value
    flat[4] = value
    assert_right(spec, problem, both_defaults(spec, problem), inputs)


@pytest.mark.parametrize("name", FORWARD)
def test_equal_logits_give_experts_in_their_order(name):
    spec = spec_named(name)
    problem = sized(spec, tokens=3, choices=11, experts=24, expert_groups=3)
    inputs = inputs_of(spec, problem) | {"logits": torch.zeros(3, 24)}
    if "bias" in inputs:
        inputs |= {"logits": torch.zeros(3, 3, 8), "bias": torch.zeros(3, 8), "kept": 2}
    assert spec.reference(**inputs, normalized=False)["ids"].tolist() == [list(range(11))] * 3
    assert interpret(spec, problem, spec.generic(problem), inputs).relative_error < 1e-7


# Their losses.

LOSSES = ("router_losses_forward", "router_losses_backward")


@pytest.mark.parametrize(("choices", "experts"), [(1, 1), (2, 8), (4, 60), (8, 128), (8, 256)])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("blocks", [1, 5])
def test_losses_of_routers_of_models_by_any_number_of_blocks(name, choices, experts, blocks):
    spec = spec_named(name)
    problem = sized(spec, "bfloat16", flags=True, rows=150, choices=choices, experts=experts)
    assert_right(spec, problem, [spec.generic(problem)], inputs_of(spec, problem), blocks)


def test_losses_of_large_logits_keep_their_digits():
    spec = spec_named("router_losses_forward")
    problem = sized(spec, rows=9, experts=6)
    inputs = inputs_of(spec, problem)
    inputs["logits"] += 1000
    assert_right(spec, problem, [spec.generic(problem)], inputs)


@pytest.mark.parametrize("masked", [False, True])
def test_loss_gradient_matches_autograd(masked):
    """Of sums of probabilities by their slopes, and of sums of squares by half the pull; counts have no gradient."""
    forward, backward = map(spec_named, LOSSES)
    problem = sized(backward, rows=9, experts=6).but(masked=masked)
    inputs = {name: x.double() for name, x in inputs_of(backward, problem).items()}
    logits = inputs["logits"].clone().requires_grad_()
    ids = logits.detach().topk(2, 1).indices
    sums = forward.reference(logits, ids, inputs["shares"], 2, masked)
    pulled = (sums["squares"] * inputs["pull"][0] / 2).sum()
    ((inputs["slopes"][0] * sums["probabilities"]).sum() + pulled).backward()
    found = backward.reference(**inputs, masked=masked)["dlogits"]
    torch.testing.assert_close(found, logits.grad, rtol=1e-9, atol=1e-9)
