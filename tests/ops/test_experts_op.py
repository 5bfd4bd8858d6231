import sys

import pytest
import torch
from experts_samples import GATES, by_loop, layer, results, wide
from op_samples import launched_by

import tilekern
from tilekern import ops
from tilekern.ops.experts import _find
from tilekern.runtime import dispatch

TOLERANCES = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def made_by(function):
    """What a function gives, and how often it launches each kernel."""
    found = []
    launched = launched_by(lambda: found.append(function()))
    return found[0], launched


def only(given, wanted):
    """A layer's arguments, of which some alone need gradients."""
    return given | {name: given[name].detach().requires_grad_(name in wanted) for name in given if name != "ids"}


def differences(given, **how):
    """The relative error of the result and of each gradient."""
    slope = torch.randn(given["x"].shape, generator=torch.Generator().manual_seed(1))
    found = results(ops.experts, given, slope, **how)
    expected = results(by_loop, wide(given), slope, **how)
    assert found.keys() == expected.keys()
    for name, x in found.items():
        assert x.shape == expected[name].shape
        assert x.dtype == (given[name] if name in given else given["x"]).dtype
    return {
        name: float((found[name].double() - x).norm() / (x.norm() if float(x.norm()) else 1.0))
        for name, x in expected.items()
    }


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("biased", [False, True])
def test_result_and_gradients_are_those_of_a_loop_in_float64(gate, biased):
    given = layer(11, 3, 5, 7, 9, biased=biased, transposed=biased)
    errors = {}
    launched = launched_by(lambda: errors.update(differences(given, **GATES[gate])))
    assert max(errors.values()) < TOLERANCES[torch.float32], errors
    assert launched["experts_gate"] == 1


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 8, 16), (3, 8, 256, 20, 12), (40, 2, 3, 90, 45), (7, 4, 32, 45, 90), (5, 5, 4, 33, 31)]
)
def test_any_number_of_choices_and_experts_and_sizes_that_divide_nothing(sizes):
    errors = differences(layer(*sizes))
    assert max(errors.values()) < TOLERANCES[torch.float32], errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_halves_of_precision_with_weights_of_another_dtype(dtype, weight_dtype):
    given = layer(13, 4, 6, 16, 24, dtype=dtype, weight_dtype=weight_dtype, biased=True, transposed=True)
    errors = differences(given, **GATES["gpt_oss"])
    assert max(errors.values()) < TOLERANCES[dtype], errors


def test_no_token_at_all_gives_gradients_of_zeros():
    given = layer(0, 2, 3, 8, 16)
    errors = differences(given)
    assert max(errors.values()) == 0


def test_slots_of_no_expert_alone_give_zeros():
    given = layer(6, 2, 3, 8, 16, biased=True)
    given["ids"].copy_(torch.tensor([3, -1]))
    assert not any(x.any() for x in results(ops.experts, given, torch.ones(6, 8)).values())


def test_one_expert_may_have_all_tokens():
    given = layer(20, 1, 4, 8, 16, biased=True)
    given["ids"].fill_(2)
    errors = differences(given, **GATES["gpt_oss"])
    assert max(errors.values()) < TOLERANCES[torch.float32], errors


def test_two_runs_give_the_same_bits():
    given = layer(20, 4, 6, 8, 16, dtype=torch.bfloat16, biased=True)
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


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [("x", "weights"), ("gate_up", "down", "gate_up_bias", "down_bias")])
def test_torch_compile_traces_it_whole_with_the_same_launches_and_bits(wanted):
    torch._dynamo.reset()
    given = only(layer(11, 3, 5, 8, 16, biased=True, transposed=True), wanted)
    slope = torch.randn(given["x"].shape)
    compiled = torch.compile(ops.experts, backend="aot_eager", fullgraph=True)
    expected, launched = made_by(lambda: results(ops.experts, given, slope, **GATES["gpt_oss"]))
    found, again = made_by(lambda: results(compiled, given, slope, **GATES["gpt_oss"]))
    assert again == launched
    assert found.keys() == {"y", *wanted}
    assert all(torch.equal(x, expected[name]) for name, x in found.items())


def test_autocast_casts_what_goes_into_products():
    given = layer(6, 2, 3, 8, 16, biased=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = ops.experts(**given)
    cast = {name: x.bfloat16() if name not in ("ids", "weights") else x for name, x in given.items()}
    assert torch.equal(y, ops.experts(**cast).float())
    y.sum().backward()
    assert given["gate_up"].grad.dtype == torch.float32


@pytest.mark.filterwarnings("ignore:.*TILEKERN_INTERPRET=1")
@pytest.mark.parametrize("gate", ["silu", "gpt_oss"])
def test_torch_s_own_operations_compute_the_same(gate, monkeypatch):
    monkeypatch.setenv("TILEKERN_INTERPRET", "0")
    given = layer(11, 3, 5, 7, 9, biased=True)
    before = tilekern.stats()["experts_gate"]["fallbacks"]
    errors = differences(given, **GATES[gate])
    assert max(errors.values()) < TOLERANCES[torch.float32], errors
    assert tilekern.stats()["experts_gate"]["fallbacks"] == before + 1


def test_it_cannot_be_differentiated_twice():
    given = layer(4, 2, 3, 8, 16)
    (dx,) = torch.autograd.grad(ops.experts(**given).sum(), given["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dx.sum().backward()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.randn(4, 9)}, r"x must have the shape \[tokens, 8\], got \[4, 9\]"),
        ({"ids": torch.zeros(5, 2, dtype=torch.long)}, r"ids and weights must have the shape \[4, choices\]"),
        ({"gate_up": torch.randn(3, 31, 8)}, r"gate_up must be \[experts, 2 \* inner, hidden\]"),
        ({"down": torch.randn(3, 8, 15)}, r"down must have the shape \[3, 8, 16\], got \[3, 8, 15\]"),
        ({"down": torch.randn(3, 8, 16).half()}, r"down must be torch.float32 as gate_up is"),
        ({"activation": "relu"}, "activation must be one of silu, gelu_tanh, got 'relu'"),
        ({"limit": 0.0}, "limit must be positive, or None for no limit, got 0.0"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ops.experts(**layer(4, 2, 3, 8, 16) | changes)
