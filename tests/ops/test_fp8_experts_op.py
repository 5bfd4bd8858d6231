"""A layer of experts by 8-bit floats: results and gradients beside float64, what it keeps, and when experts runs."""

import math

import pytest
import torch
from examples import examples
from experts_samples import GATES, by_loop, clear_limit, layer, results, wide
from hypothesis import given
from hypothesis import strategies as st

import tilekern
from tilekern import ops
from tilekern.kernels.families import placeholders
from tilekern.ops.fp8_experts import fp8_experts
from tilekern.runtime import dispatch

# Rounding leaves 0.045 of a product's norm (test_fp8_linear_op.py), and here up to three follow each other with a gate.
NOISE = 0.1


def distance(found, wanted):
    return ((found.double() - wanted).norm() / (wanted.norm() + 1e-30)).item()


def both(patch, is_interpreted):
    """Run the kernels by the interpreter, or torch's operations."""
    patch.setenv("TILEKERN_INTERPRET", str(int(is_interpreted)))
    dispatch.forget()


@pytest.mark.parametrize("interpreted", [False, True])
@examples(12)
@given(data=st.data())
def test_results_and_gradients_are_those_of_float64_but_for_the_roundings(interpreted, data):
    sizes = data.draw(st.sampled_from([(70, 2, 3), (40, 3, 8), (130, 1, 2)]), label="tokens, choices, experts")
    hidden, inner = data.draw(st.sampled_from([(64, 48), (144, 32), (32, 160)]), label="hidden, inner")
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32]), label="dtype")
    biased, transposed = data.draw(st.booleans(), label="biased"), data.draw(st.booleans(), label="transposed")
    given_to = layer(*sizes, hidden, inner, biased=biased, transposed=transposed, dtype=dtype)
    how = data.draw(st.sampled_from([{}, {"activation": "gelu_tanh"}, GATES["gpt_oss"]]), label="gate")
    if "limit" in how:
        # Of a gate next to its limit, rounding switches the gradient on or off.
        how = how | {"limit": 1e3}
    slope = torch.randn(sizes[0], hidden)
    with pytest.MonkeyPatch.context() as patch:
        both(patch, interpreted)
        found = results(fp8_experts, given_to, slope, **how)
    wanted = results(by_loop, wide(given_to), slope.to(dtype).double(), **how)
    for name, want in wanted.items():
        assert found[name].dtype == dtype
        assert distance(found[name], want) < NOISE, name


@pytest.mark.parametrize("biased", [False, True])
def test_what_stands_for_an_absent_array_on_a_gpu_is_never_read(monkeypatch, biased):
    both(monkeypatch, False)
    given_to, slope = layer(20, 2, 3, 64, 48, biased=biased), torch.randn(20, 64)
    wanted = results(fp8_experts, given_to, slope)
    monkeypatch.setattr("tilekern.ops.fp8_experts.placeholder", lambda ndim, dtype, _: placeholders._of(ndim, dtype))
    found = results(fp8_experts, given_to, slope)
    assert all(torch.equal(x, found[name]) for name, x in wanted.items())


def test_a_limited_gate_is_that_of_experts():
    given_to = layer(70, 2, 3, 64, 48, biased=True, transposed=True)
    how = GATES["gpt_oss"] | {"limit": clear_limit(given_to)}
    slope = torch.randn(70, 64)
    found, wanted = (results(function, given_to, slope, **how) for function in (fp8_experts, ops.experts))
    assert distance(found["y"], wanted["y"].double()) < NOISE
    cosines = [torch.cosine_similarity(found[n].flatten(), wanted[n].flatten(), 0).item() for n in wanted]
    assert min(cosines) > 0.9


def test_the_interpreter_and_torchs_operations_round_to_the_same_numbers(monkeypatch):
    for biased, transposed in ((False, False), (True, True)):
        given_to = layer(60, 3, 5, 64, 48, biased=biased, transposed=transposed)
        slope, found = torch.randn(60, 64), []
        for is_interpreted in (False, True):
            both(monkeypatch, is_interpreted)
            found.append(results(fp8_experts, given_to, slope, **GATES["gpt_oss"] if biased else {}))
        for name, one in found[0].items():
            # Sums in another order, some of which then lie on the other side of a rounding.
            assert distance(one, found[1][name].double()) < 2e-3, name


def test_two_runs_give_the_same_bits():
    given_to = layer(40, 3, 4, 64, 48, dtype=torch.bfloat16, biased=True)
    slope = torch.randn(given_to["x"].shape)
    first, second = (results(fp8_experts, given_to, slope, **GATES["gpt_oss"]) for _ in range(2))
    assert all(torch.equal(x, second[name]) for name, x in first.items())


@pytest.mark.parametrize("chosen", [[2, 2], [3, -1], [0, 3]], ids=["one expert", "no expert", "one of two"])
def test_experts_without_rows_get_zeros_as_gradients(chosen):
    given_to = layer(80, 2, 3, 64, 48)
    given_to["ids"].copy_(torch.tensor(chosen))
    slope = torch.randn(80, 64)
    found, wanted = results(fp8_experts, given_to, slope), results(by_loop, wide(given_to), slope.double())
    for name, want in wanted.items():
        assert distance(found[name], want) < NOISE, name
    for expert in set(range(3)) - set(chosen):
        assert not found["gate_up"][expert].any()
        assert not found["down"][expert].any()


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_a_number_that_is_not_finite_makes_its_row_nan_and_no_other(odd):
    given_to = layer(80, 1, 3, 64, 48)
    given_to["ids"].copy_(torch.arange(80)[:, None] % 3)
    with torch.no_grad():
        given_to["x"][7, 9] = odd
    found = results(fp8_experts, given_to, torch.randn(80, 64))
    assert found["y"].isfinite().all(1).tolist() == [n != 7 for n in range(80)]
    # As of experts, whose gate gives a gradient of zero where a comparison with its limit fails.
    assert found["x"].isfinite().all()
    # A gradient that sums over the row says so too, as a scaler of losses expects; row 7 is of expert 1.
    for name in ("gate_up", "down"):
        assert found[name].isfinite().flatten(1).all(1).tolist() == [True, False, True]
        assert found[name][1].isnan().any()


def test_outliers_of_1e4_leave_other_rows_as_exact_as_before():
    given_to = layer(80, 2, 3, 64, 48)
    with torch.no_grad():
        given_to["x"][3, 5] = 1e4
    y, want = fp8_experts(**given_to), by_loop(**wide(given_to))
    others = torch.arange(80) != 3
    assert distance(y[others], want[others]) < NOISE


def test_eight_bits_are_kept_of_the_input_and_none_of_frozen_weights():
    given_to = layer(32, 4, 6, 64, 48, dtype=torch.bfloat16)

    def kept(given_to):
        found = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: found.append(x) or x, lambda x: x):
            fp8_experts(**given_to)
        own = {x.data_ptr() for x in given_to.values()}
        return [(tuple(x.shape), x.dtype) for x in found if x.data_ptr() not in own and x.dim() == 2]

    pre, ranks = ((128, 96), torch.bfloat16), ((32, 4), torch.int32)
    assert kept(given_to) == [pre, ranks, ((32, 64), torch.float8_e4m3fn)]
    frozen = given_to | {name: given_to[name].detach() for name in ("gate_up", "down")}
    assert kept(frozen) == [pre, ranks]


@pytest.mark.parametrize("wanted", [("x",), ("weights",), ("gate_up",), ("down", "down_bias"), ("gate_up_bias",)])
def test_gradients_are_the_same_whichever_are_asked_for(wanted):
    given_to = layer(24, 3, 5, 32, 48, biased=True, transposed=True)
    slope = torch.randn(given_to["x"].shape)
    everything = results(fp8_experts, given_to, slope)
    some = given_to | {name: x.detach().requires_grad_(name in wanted) for name, x in given_to.items() if name != "ids"}
    found = results(fp8_experts, some, slope)
    assert found.keys() == {"y", *wanted}
    assert all(torch.equal(x, everything[name]) for name, x in found.items())


def test_autocast_casts_as_for_experts():
    given_to = layer(40, 2, 3, 64, 48, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = fp8_experts(**given_to), ops.experts(**given_to)
    assert found.dtype == wanted.dtype == torch.float32
    assert distance(found, wanted.double()) < NOISE
    found.sum().backward()
    assert given_to["gate_up"].grad.dtype == torch.float32


def counted(why, run):
    """Run a call that experts computes, and check that it was counted, and why."""
    before = dispatch.reasons().get("fp8_grouped_matmul", {})
    found = run(fp8_experts)
    now = dispatch.reasons()["fp8_grouped_matmul"]
    assert [text for text in now if now[text] > before.get(text, 0) and why in text]
    assert torch.equal(found, run(ops.experts))


def no_gradient(function):
    with torch.no_grad():
        return function(**layer(20, 2, 3, 64, 48))


def invariant(function):
    with tilekern.invariant():
        return function(**layer(20, 2, 3, 64, 48))


@pytest.mark.parametrize(
    ("why", "run"),
    [
        ("few rows without a gradient", no_gradient),
        ("no multiple of 16", lambda function: function(**layer(20, 2, 3, 40, 48))),
        ("an empty matrix", lambda function: function(**layer(0, 2, 3, 64, 48))),
        ("a dtype that is not", lambda function: function(**layer(9, 2, 3, 64, 48, dtype=torch.float64))),
        ("the invariant mode", invariant),
    ],
    ids=["few rows", "odd sides", "no tokens", "float64", "invariant"],
)
def test_experts_runs_where_it_must_and_is_counted(why, run):
    counted(why, run)


def test_many_rows_run_8_bit_floats_without_a_gradient_too():
    given_to = layer(200, 2, 3, 64, 48)
    wanted = fp8_experts(**given_to)
    before = tilekern.stats()["fp8_grouped_matmul"]["launches"]
    with torch.no_grad():
        found = fp8_experts(**given_to)
    assert torch.equal(found, wanted)
    assert tilekern.stats()["fp8_grouped_matmul"]["launches"] == before + 2


@pytest.mark.parametrize("power", [16, -20])
def test_gradients_of_a_scaled_loss_are_scaled_to_the_bit(power):
    given_to = layer(40, 2, 3, 64, 48)
    slope = torch.randn(40, 64) * 2.0 ** -torch.arange(0, 20, 0.5)[:, None]
    plain, scaled = (results(fp8_experts, given_to, slope * 2.0**n) for n in (0, power))
    assert all(torch.equal(x * 2.0**power, scaled[name]) for name, x in plain.items() if name != "y")


def test_arguments_that_do_not_fit_are_refused():
    given_to = layer(40, 2, 3, 64, 48)
    with pytest.raises(ValueError, match="down must have the shape"):
        fp8_experts(**given_to | {"down": torch.randn(3, 64, 64, requires_grad=True)})
