import math

import pytest
import torch
from spec_samples import configs, inputs_of, interpret, sized

from tilekern.kernels import spec_named

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
    for tile_m in {config["tile_m"]: config for config in configs(spec, problem)}.values():
        check = interpret(spec, problem, tile_m, inputs)
        assert check.passed, check.reason


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
def test_what_is_no_number_stays_in_its_row(name, value):
    spec = spec_named(name)
    problem = sized(spec, flags=True, tokens=6, choices=3, experts=10, expert_groups=2)
    inputs = inputs_of(spec, problem)
    flat = inputs["logits"].view(6, 10)
    flat[1, 7] = flat[3, 2] = flat[3, 9] = value
    flat[4] = value
    for config in dict.fromkeys((spec.default(problem, None), spec.generic(problem))):
        check = interpret(spec, problem, config, inputs)
        assert check.passed, check.reason


@pytest.mark.parametrize("name", FORWARD)
def test_equal_logits_give_experts_in_their_order(name):
    spec = spec_named(name)
    problem = sized(spec, tokens=3, choices=11, experts=24, expert_groups=3)
    inputs = inputs_of(spec, problem) | {"logits": torch.zeros(3, 24)}
    if "bias" in inputs:
        inputs |= {"logits": torch.zeros(3, 3, 8), "bias": torch.zeros(3, 8), "kept": 2}
    assert spec.reference(**inputs, normalized=False)["ids"].tolist() == [list(range(11))] * 3
    assert interpret(spec, problem, spec.generic(problem), inputs).relative_error < 1e-7
