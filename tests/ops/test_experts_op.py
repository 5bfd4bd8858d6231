import sys

import pytest
import torch
from contract import CASES, check
from experts_samples import GATES, layer, results
from op_samples import launched_by
from tolerances import TOLERANCE

from tilekern import ops
from tilekern.ops.experts import _find
from tilekern.runtime import dispatch


def made_by(function):
    """Return a function's result, and how often it launches each kernel."""
    found = []
    launched = launched_by(lambda: found.append(function()))
    return found[0], launched


def only(given, wanted):
    """A layer's arguments, of which some alone need gradients."""
    return given | {name: given[name].detach().requires_grad_(name in wanted) for name in given if name != "ids"}


@pytest.mark.parametrize(
    "sizes",
    [
        (1, 1, 1, 8, 16),
        pytest.param((3, 8, 256, 20, 12), marks=pytest.mark.nightly),
        (40, 2, 3, 90, 45),
        (7, 4, 32, 45, 90),
        (5, 5, 4, 33, 31),
        (0, 2, 3, 8, 16),
    ],
    ids=str,
)
def test_any_number_of_choices_and_experts_and_sizes_that_divide_nothing(sizes):
    check(CASES["experts"], layer(*sizes))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_halves_of_precision_with_weights_of_another_dtype(dtype, weight_dtype):
    given = layer(13, 4, 6, 16, 24, dtype=dtype, weight_dtype=weight_dtype, biased=True, transposed=True)
    check(CASES["experts"], given | GATES["gpt_oss"], table=TOLERANCE | {torch.float32: TOLERANCE[dtype]})


def test_slots_of_no_expert_alone_give_zeros():
    given = layer(6, 2, 3, 8, 16, biased=True)
    given["ids"].copy_(torch.tensor([3, -1]))
    assert not any(x.any() for x in results(ops.experts, given, torch.ones(6, 8)).values())


def test_one_expert_may_have_all_tokens():
    given = layer(20, 1, 4, 8, 16, biased=True)
    given["ids"].fill_(2)
    check(CASES["experts"], given | GATES["gpt_oss"])


def test_two_runs_give_the_same_bits():
    given = layer(9, 3, 4, 8, 16, dtype=torch.bfloat16, biased=True)
    slope = torch.randn(given["x"].shape)
    first, second = (results(ops.experts, given, slope, **GATES["gpt_oss"]) for _ in range(2))
    assert all(torch.equal(x, second[name]) for name, x in first.items())


def test_nothing_but_the_pre_activation_is_kept():
    given = layer(32, 4, 6, 16, 24)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        ops.experts(**given)
    own = {x.data_ptr() for x in given.values()}
    rows = [x for x in kept if x.data_ptr() not in own and x.is_floating_point()]
    assert [x.shape for x in rows] == [(32 * 4, 2 * 24)]


@pytest.mark.parametrize("wanted", [("x",), ("weights",), ("x", "weights"), ("gate_up",), ("down", "down_bias")])
def test_gradients_are_the_same_whichever_are_asked_for_and_others_are_not_made(wanted):
    given = layer(12, 3, 5, 8, 16, biased=True, transposed=True)
    slope = torch.randn(given["x"].shape)
    everything = results(ops.experts, given, slope)
    found, made = made_by(lambda: results(ops.experts, only(given, wanted), slope))
    assert found.keys() == {"y", *wanted}
    assert all(torch.equal(x, everything[name]) for name, x in found.items())
    assert made.get("grouped_sum", 0) == ("down_bias" in wanted)
    assert made.get("grouped_weight_gradient", 0) == ("gate_up" in wanted) + ("down" in wanted)
    # Two in the forward; that of the slopes, and that of the gradient of x, whose rows are then added up.
    assert made["grouped_linear"] == 3 + ("x" in wanted)
    assert made["experts_combine"] == 1 + ("x" in wanted)
    assert made["gather_rows"] == 1


def test_the_activation_is_not_made_again_for_frozen_weights(monkeypatch):
    asked, module = {}, sys.modules[_find.__module__]

    def plan_for(spec, device, *sizes):
        asked[spec.name] = dict(zip([d.name for d in spec.dimensions], sizes, strict=True))
        return dispatch.plan_for(spec, device, *sizes)

    monkeypatch.setattr(module, "plan_for", plan_for)
    given = layer(12, 3, 5, 8, 16)
    for wanted in (("x", "down"), ("x", "gate_up"), ("x", "weights")):
        results(ops.experts, only(given, wanted), torch.ones(12, 8))
        assert asked["experts_gate_backward"]["remade"] == ("down" in wanted)


def test_frozen_weights_are_served_by_what_is_known_of_trained_ones(monkeypatch):
    given = only(layer(12, 3, 5, 8, 16), ("x", "weights"))
    expected = results(ops.experts, given, torch.ones(12, 8))

    def plan_for(spec, device, *sizes):
        problem = dict(zip([d.name for d in spec.dimensions], sizes, strict=True))
        return dispatch.plan_for(spec, device, *sizes) if problem.get("remade", True) else None

    monkeypatch.setattr(sys.modules[_find.__module__], "plan_for", plan_for)
    dispatch.forget()
    found, launched = made_by(lambda: results(ops.experts, given, torch.ones(12, 8)))
    assert launched["experts_gate_backward"] == 1
    assert all(torch.equal(x, expected[name]) for name, x in found.items())
