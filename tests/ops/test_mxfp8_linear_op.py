"""A linear layer by MXFP8: its products beside float64, by the interpreter and by torch, and what it keeps."""

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

import tilekern
from tilekern.ops.fp8_block_linear import fp8_block_linears
from tilekern.ops.mxfp8_linear import mxfp8_linear, mxfp8_linears

# What rounding two operands to 4 significant bits leaves of a product's norm: 2^-5 / sqrt(3) for each, and a margin.
NOISE = 0.045


def leaves(rows, inner, outs, dtype=torch.bfloat16, seed=0, biased=False):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    return normal(2, rows // 2, inner), [(normal(out, inner), normal(out) if biased else None) for out in outs]


def distance(found, wanted):
    return ((found.double() - wanted).norm() / wanted.norm()).item()


def steps(op, x, layers, slopes):
    results = op(x, layers)
    inputs = [x, *(part for layer in layers for part in layer if part is not None)]
    return *results, *torch.autograd.grad(results, inputs, slopes)


def exact(x, layers, slopes):
    wide = [
        tuple(None if part is None else part.detach().double().requires_grad_() for part in layer) for layer in layers
    ]
    return steps(
        lambda x, layers: [torch.nn.functional.linear(x, *layer) for layer in layers],
        x.detach().double().requires_grad_(), wide, [slope.double() for slope in slopes],
    )  # fmt: skip


@pytest.mark.parametrize("interpreted", ["0", "1"])
@examples(10)
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
        found = steps(mxfp8_linears, x, layers, slopes)
    for one, want in zip(found, exact(x, layers, slopes), strict=True):
        assert one.dtype == dtype
        assert one.shape == want.shape
        assert distance(one, want) < NOISE


def test_the_interpreter_and_torchs_operations_round_to_the_same_numbers(monkeypatch):
    x, layers = leaves(150, 192, (144, 32), torch.float32)
    slopes, found = [torch.randn(2, 75, out) for out in (144, 32)], []
    for interpreted in "011":
        monkeypatch.setenv("TILEKERN_INTERPRET", interpreted)
        found.append(steps(mxfp8_linears, x, layers, slopes))
    for by_torch, one, again in zip(*found, strict=True):
        # Sums of the same numbers, in another order.
        assert distance(one, by_torch.double()) < 1e-6
        assert torch.equal(one, again)


def test_an_outlier_of_1e4_costs_its_own_32_numbers():
    x, ((weight, _),) = leaves(80, 512, (48,), torch.float32)
    with torch.no_grad():
        x[0, 3] *= 1e-2
        x[0, 3, 5] = 1e4
        # The outlier itself has no share in the result.
        weight[:, 5] = 0
    want = torch.nn.functional.linear(x.double(), weight.double())[0, 3]
    # Of sixteen groups one is lost.
    assert 0.15 < distance(mxfp8_linear(x, weight)[0, 3], want) < 0.4


@pytest.mark.parametrize("interpreted", ["0", "1"])
@pytest.mark.parametrize(("of_x", "of_weight"), [(True, False), (False, True)])
def test_eight_bits_are_kept_of_the_input_and_each_gradient_is_computed_alone(
    interpreted, of_x, of_weight, monkeypatch
):
    monkeypatch.setenv("TILEKERN_INTERPRET", interpreted)
    x, ((weight, _),) = leaves(80, 192, (48,))
    both = steps(mxfp8_linears, x, [(weight, None)], [torch.ones(2, 40, 48).bfloat16()])
    x, weight, found = x.detach().requires_grad_(of_x), weight.detach().requires_grad_(of_weight), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append((tuple(t.shape), t.dtype)) or t, lambda t: t):
        mxfp8_linear(x, weight).backward(torch.ones(2, 40, 48).bfloat16())
    kept = [((192, 80), torch.float8_e4m3fn), ((2, 1, 32, 16), torch.int8)]
    assert found == ([((48, 192), torch.bfloat16)] if of_x else kept)
    assert torch.equal(x.grad if of_x else weight.grad, both[1 if of_x else 2])


def test_torchs_layer_runs_where_it_must_and_is_counted():
    x, layers = leaves(8, 64, (48,))
    before = tilekern.stats()["mxfp8_matmul"]["fallbacks"]
    with torch.no_grad():
        y = mxfp8_linear(x, *layers[0])
    assert torch.equal(y, torch.nn.functional.linear(x, *layers[0]))
    assert tilekern.stats()["mxfp8_matmul"]["fallbacks"] == before + 1
    with pytest.raises(ValueError, match=r"mxfp8_linear: x must be \[..., in_features\]"):
        mxfp8_linear(x[..., :32], *layers[0])


@pytest.mark.parametrize("op", [mxfp8_linears, fp8_block_linears])
def test_a_result_that_nothing_reads_has_no_gradient(op):
    x, layers = leaves(80, 64, (48, 32), biased=True)
    first, _ = op(x, layers)
    first.backward(torch.ones_like(first))
    alone = x.grad.clone()
    assert layers[1][0].grad is None
    assert layers[1][1].grad is None
    x.grad = None
    (y,) = op(x, layers[:1])
    y.backward(torch.ones_like(y))
    assert torch.equal(alone, x.grad)
