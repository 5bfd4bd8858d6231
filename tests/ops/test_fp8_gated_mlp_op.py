"""A gated MLP by 8-bit floats: beside float64, beside its layers one by one, what it keeps, and when layers run."""

import math
from functools import partial

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import tilekern
from tilekern.ops.fp8_gated_mlp import fp8_gated_mlp
from tilekern.ops.fp8_linear import fp8_linear, fp8_linears
from tilekern.ops.geglu import geglu
from tilekern.ops.swiglu import swiglu

# Of each product's operands two are rounded to 4 significant bits, and gradients pass three products one after another.
NOISE = 0.09
GATES = {"silu": swiglu, "gelu": geglu, "gelu_tanh": lambda gate, up: geglu(gate, up, tanh=True)}
CURVES = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


def leaves(rows=80, hidden=64, inner=96, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, size=1.0):
        return (torch.randn(shape, generator=generator) * size).to(dtype).requires_grad_()

    weights = [normal(inner, hidden, size=hidden**-0.5) for _ in range(2)]
    return normal(2, rows // 2, hidden), *weights, normal(hidden, inner, size=inner**-0.5)


def slope_of(x, seed=1):
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(x.dtype)


def run(inputs, activation="silu", op=fp8_gated_mlp):
    y = op(*inputs, activation)
    return y, *torch.autograd.grad(y, inputs, slope_of(inputs[0]))


def exact(inputs, activation):
    x, gate, up, down = wide = [each.detach().double().requires_grad_() for each in inputs]
    y = (CURVES[activation](x @ gate.t()) * (x @ up.t())) @ down.t()
    return y, *torch.autograd.grad(y, wide, slope_of(inputs[0]).double())


def by_layers(x, gate, up, down, activation):
    made = fp8_linears(x, [(gate, None), (up, None)])
    return fp8_linear(GATES[activation](*made), down)


def distance(found, wanted):
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


@pytest.mark.parametrize("interpreted", ["0", "1"])
@examples(8)
@given(data=st.data())
def test_results_and_gradients_are_those_of_float64_but_for_the_roundings(interpreted, data):
    rows = 2 * data.draw(st.integers(33, 60), label="rows")
    hidden, inner = (data.draw(st.sampled_from([48, 80, 136]), label=size) for size in ("hidden", "inner"))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32]), label="dtype")
    activation = data.draw(st.sampled_from(list(GATES)), label="activation")
    inputs = leaves(rows, hidden, inner, dtype, data.draw(st.integers(0, 9)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEKERN_INTERPRET", interpreted)
        made = run(inputs, activation)
    for found, want in zip(made, exact(inputs, activation), strict=True):
        assert found.dtype == dtype
        assert found.shape == want.shape
        assert distance(found, want) < NOISE


@pytest.mark.parametrize("activation", GATES)
def test_it_differs_from_its_layers_by_the_gates_roundings_to_bfloat16_alone(activation):
    """In float32 these are none, so that nearly all e4m3 numbers are the same."""
    inputs = leaves(dtype=torch.float32)
    for found, want in zip(run(inputs, activation), run(inputs, activation, by_layers), strict=True):
        assert distance(found, want) < 2e-3


def test_the_interpreter_and_torchs_operations_round_to_the_same_numbers(monkeypatch):
    inputs, found = leaves(dtype=torch.float32), []
    for interpreted in "01":
        monkeypatch.setenv("TILEKERN_INTERPRET", interpreted)
        found.append(run(inputs))
    for one, other in zip(*found, strict=True):
        # A sum in another order may lie on the other side of a tie.
        assert distance(one, other) < 4e-3


def test_a_step_gives_the_same_bits_again_and_so_does_a_forward_without_gradients(monkeypatch):
    """As when activations are made again."""
    monkeypatch.setenv("TILEKERN_INTERPRET", "1")
    inputs = leaves()
    first, second = run(inputs), run(inputs)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
    with torch.no_grad():
        assert torch.equal(fp8_gated_mlp(*inputs), first[0])


@pytest.mark.parametrize("activation", GATES)
def test_checkpoints_give_the_same_bits(activation):
    inputs = leaves()
    again = run(inputs, activation, partial(checkpoint, fp8_gated_mlp, use_reentrant=False))
    assert all(map(torch.equal, again, run(inputs, activation)))


def test_it_keeps_a_byte_of_each_number_of_x_and_gate_and_up_but_no_result():
    inputs, kept = leaves(rows=80, hidden=64, inner=96), []

    def pack(x):
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        fp8_gated_mlp(*inputs)
    addresses = {each.data_ptr() for each in inputs}
    sizes = sorted(x.nbytes for x in kept if x.data_ptr() not in addresses and x.dim() == 2)
    assert sizes == [80 * 64, 2 * 80 * 96, 2 * 80 * 96]


@pytest.mark.parametrize("wanted", [(0,), (3,), (1, 3), (0, 2)])
def test_only_the_gradients_that_are_asked_for_are_computed(wanted):
    inputs = leaves()
    whole = run(inputs)[1:]
    for n, each in enumerate(inputs):
        each.requires_grad_(n in wanted)
    y = fp8_gated_mlp(*inputs)
    found = torch.autograd.grad(y, [inputs[n] for n in wanted], slope_of(y))
    for n, gradient in zip(wanted, found, strict=True):
        assert torch.equal(gradient, whole[n])


def test_infinity_reaches_its_row_and_every_weight():
    inputs = leaves()
    with torch.no_grad():
        inputs[0][1, 7, 9] = math.inf
    y, _, *of_weights = run(inputs)
    assert y[1, 7].isnan().all()
    assert y.isfinite().all(-1).sum() == 79
    assert all(gradient.isnan().any() for gradient in of_weights)


def test_float32_under_autocast_runs_in_bfloat16():
    inputs = leaves(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = fp8_gated_mlp(*inputs)
    assert y.dtype == torch.bfloat16
    gradients = torch.autograd.grad(y, inputs, slope_of(y))
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    assert distance(y, exact(inputs, "silu")[0]) < NOISE


def test_few_rows_without_a_gradient_and_the_invariant_mode_run_torchs_layers():
    x, *weights = leaves()
    layers = (swiglu(x @ weights[0].t(), x @ weights[1].t()) @ weights[2].t()).detach()
    with torch.no_grad():
        few = fp8_gated_mlp(x[:, :20], *weights)
    assert distance(few, layers[:, :20]) < 0.006
    with tilekern.invariant():
        assert distance(fp8_gated_mlp(x, *weights), layers) < 0.006
    assert distance(fp8_gated_mlp(x, *weights), layers) > 0.02


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"up_weight": torch.ones(95, 64)}, r"x must be \[..., hidden\], gate_weight and up_weight .* \[95, 64\]"),
        ({"down_weight": torch.ones(96, 64)}, r"down_weight \[hidden, intermediate\], got .* \[96, 64\]$"),
        ({"x": torch.ones(80, 65)}, r"got \[80, 65\]"),
        ({"activation": "relu"}, r"activation must be one of \('silu', 'gelu', 'gelu_tanh'\), got 'relu'$"),
        ({"x": torch.ones(80, 64, dtype=torch.int32)}, "x must be of a floating dtype, got torch.int32"),
    ],
    ids=str,
)
def test_wrong_shapes_are_named(changes, text):
    given = dict(zip(("x", "gate_weight", "up_weight", "down_weight"), leaves(), strict=True))
    with pytest.raises(ValueError, match=f"^fp8_gated_mlp: .*{text}"):
        fp8_gated_mlp(**(given | changes))
