"""A linear layer by 8-bit floats with scales of blocks: its products beside float64, outliers, and what it keeps."""

import math

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

import tilekern
from tilekern.ops.fp8_block_linear import fp8_block_linear, fp8_block_linears
from tilekern.ops.fp8_linear import fp8_linear

# What rounding two operands to 4 significant bits leaves of a product's norm: 2^-5 / sqrt(3) for each, and a margin.
NOISE = 0.045


def leaves(rows, inner, outs, dtype=torch.bfloat16, seed=0, biased=False):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    return normal(2, rows // 2, inner), [(normal(out, inner), normal(out) if biased else None) for out in outs]


def distance(found, wanted):
    return ((found.double() - wanted).norm() / wanted.norm()).item()


def run(x, layers, slopes):
    results = fp8_block_linears(x, layers)
    inputs = [x, *(part for layer in layers for part in layer if part is not None)]
    return *results, *torch.autograd.grad(results, inputs, slopes)


def exact(x, layers, slopes):
    layers = [
        tuple(None if part is None else part.detach().double().requires_grad_() for part in layer) for layer in layers
    ]
    x = x.detach().double().requires_grad_()
    results = [torch.nn.functional.linear(x, *layer) for layer in layers]
    inputs = [x, *(part for layer in layers for part in layer if part is not None)]
    return *results, *torch.autograd.grad(results, inputs, [slope.double() for slope in slopes])


@pytest.mark.parametrize("interpreted", ["0", "1"])
@examples(12)
@given(data=st.data())
def test_results_and_gradients_are_those_of_float64_but_for_the_roundings(interpreted, data):
    rows = 2 * data.draw(st.integers(33, 80), label="rows")
    inner = data.draw(st.sampled_from([48, 128, 200]), label="inner")
    outs = data.draw(st.lists(st.sampled_from([16, 96, 130]), min_size=1, max_size=3), label="outs")
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32]), label="dtype")
    x, layers = leaves(rows, inner, outs, dtype, data.draw(st.integers(0, 9)), data.draw(st.booleans(), label="biased"))
    slopes = [torch.randn(2, rows // 2, out).to(dtype) for out in outs]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEKERN_INTERPRET", interpreted)
        found = run(x, layers, slopes)
    for one, want in zip(found, exact(x, layers, slopes), strict=True):
        assert one.dtype == dtype
        assert one.shape == want.shape
        assert distance(one, want) < NOISE


def test_the_interpreter_and_torchs_operations_round_to_the_same_numbers(monkeypatch):
    x, layers = leaves(150, 192, (144, 32), torch.float32)
    slopes = [torch.randn(2, 75, out) for out in (144, 32)]
    found = []
    for interpreted in "011":
        monkeypatch.setenv("TILEKERN_INTERPRET", interpreted)
        found.append(run(x, layers, slopes))
    for by_torch, one, again in zip(*found, strict=True):
        # Sums of the same numbers, in another order.
        assert distance(one, by_torch.double()) < 1e-6
        assert torch.equal(one, again)


def test_an_outlier_of_1e4_costs_a_row_no_more_than_the_block_that_it_is_in():
    """A scale for the row leaves none of its other numbers; one for each 128 leaves other blocks as they are."""
    x, ((weight, _),) = leaves(80, 512, (48,), torch.float32)
    with torch.no_grad():
        x[0, 3] *= 1e-2
        x[0, 3, 5] = 1e4
        # The outlier itself has no share in the result.
        weight[:, 5] = 0
    want = torch.nn.functional.linear(x.double(), weight.double())[0, 3]
    assert distance(fp8_linear(x, weight)[0, 3], want) > 0.9
    # Of four blocks one is lost.
    assert 0.3 < distance(fp8_block_linear(x, weight)[0, 3], want) < 0.7


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_makes_its_row_nan_and_no_other(odd):
    x, layers = leaves(80, 64, (48,))
    with torch.no_grad():
        x[1, 7, 9] = odd
    y = fp8_block_linear(x, *layers[0])
    assert y[1, 7].isnan().all()
    assert y.isfinite().all(-1).sum() == 79
    y.nan_to_num().sum().backward()
    # A gradient that sums over the number says so too, as a scaler of losses expects; others do not.
    assert layers[0][0].grad[:, 9].isnan().all()
    assert layers[0][0].grad.isnan().sum() == 48


def test_zeros_stay_zeros():
    x, layers = leaves(80, 64, (48,))
    with torch.no_grad():
        x.zero_()
    y = fp8_block_linear(x, *layers[0])
    y.backward(torch.ones_like(y))
    assert not y.any()
    assert not layers[0][0].grad.any()


def test_eight_bits_are_kept_of_the_input_and_nothing_of_a_frozen_weights():
    x, layers = leaves(80, 192, (48, 32))

    def kept(*given):
        found = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
            fp8_block_linears(*given)
        return [(tuple(t.shape), t.dtype) for t in found]

    weights = [((48, 192), torch.bfloat16), ((32, 192), torch.bfloat16)]
    numbers = [((192, 80), torch.float8_e4m3fn), ((1, 192), torch.float32)]
    assert kept(x, layers) == [*numbers, *weights]
    frozen = [(weight.detach(), None) for weight, _ in layers]
    assert kept(x, frozen) == weights
    assert kept(x.detach(), layers) == numbers


def test_autocast_casts_as_for_a_linear_layer():
    x, layers = leaves(80, 64, (48,), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = fp8_block_linear(x, *layers[0])
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert layers[0][0].grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("why", "rows", "graded"),
    [("few rows without a gradient", 8, False), ("an empty matrix", 0, True)],
)
def test_torchs_layer_runs_where_it_must_and_is_counted(why, rows, graded):
    from tilekern.runtime import dispatch

    x, layers = leaves(rows, 64, (48,))
    before = tilekern.stats()["fp8_block_matmul"]["fallbacks"]
    with torch.set_grad_enabled(graded):
        y = fp8_block_linear(x, *layers[0])
    assert torch.equal(y, torch.nn.functional.linear(x, *layers[0]))
    assert tilekern.stats()["fp8_block_matmul"]["fallbacks"] == before + 1
    assert why in dispatch.reasons()["fp8_block_matmul"]


def test_shapes_that_do_not_fit_are_said():
    x, layers = leaves(80, 64, (48,))
    with pytest.raises(ValueError, match=r"fp8_block_linear: x must be \[..., in_features\]"):
        fp8_block_linear(x[..., :32], *layers[0])
