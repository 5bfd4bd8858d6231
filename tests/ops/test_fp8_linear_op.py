"""A linear layer by 8-bit floats: its three products beside float64, what it keeps, and when torch's layer runs."""

import contextlib
import itertools
import math
import pickle
import sys

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import tilekern
from tilekern.kernels.fp8.scales import scaled_rows
from tilekern.ops.fp8_block_linear import fp8_block_linear, fp8_block_linears
from tilekern.ops.fp8_linear import fp8_linear, fp8_linears, vectors
from tilekern.ops.kept import tell_kept
from tilekern.ops.mxfp8_linear import mxfp8_linear, mxfp8_linears
from tilekern.ops.rounded_weight import RoundedWeight

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
    results = fp8_linears(x, layers)
    inputs = [x, *(part for layer in layers for part in layer if part is not None)]
    return results, torch.autograd.grad(results, inputs, slopes)


def exact(x, layers, slopes):
    layers = [
        tuple(None if part is None else part.detach().double().requires_grad_() for part in layer) for layer in layers
    ]
    x = x.detach().double().requires_grad_()
    results = [torch.nn.functional.linear(x, *layer) for layer in layers]
    inputs = [x, *(part for layer in layers for part in layer if part is not None)]
    return results, torch.autograd.grad(results, inputs, [slope.double() for slope in slopes])


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
        results, gradients = run(x, layers, slopes)
    wanted, of_wanted = exact(x, layers, slopes)
    for found, want in zip((*results, *gradients), (*wanted, *of_wanted), strict=True):
        assert found.dtype == dtype
        assert found.shape == want.shape
        assert distance(found, want) < NOISE


def test_the_interpreter_and_torchs_operations_round_to_the_same_numbers(monkeypatch):
    x, layers = leaves(70, 64, (48, 32), torch.float32)
    slopes = [torch.randn(2, 35, out) for out in (48, 32)]
    found = []
    for interpreted in "01":
        monkeypatch.setenv("TILEKERN_INTERPRET", interpreted)
        results, gradients = run(x, layers, slopes)
        found.append((*results, *gradients))
    for one, other in zip(*found, strict=True):
        # Sums of the same numbers, in another order.
        assert distance(one, other.double()) < 1e-6


def test_a_step_gives_the_same_bits_again(monkeypatch):
    monkeypatch.setenv("TILEKERN_INTERPRET", "1")
    x, layers = leaves(80, 64, (48,))
    slopes = [torch.randn(2, 40, 48).bfloat16()]
    first, second = (run(x, layers, slopes) for _ in range(2))
    for one, other in zip((*first[0], *first[1]), (*second[0], *second[1]), strict=True):
        assert torch.equal(one, other)


def test_outliers_of_1e4_leave_other_rows_as_exact_as_before():
    x, layers = leaves(80, 64, (48,), torch.float32)
    with torch.no_grad():
        x[0, 3, 5] = 1e4
    (y,), (want,) = fp8_linears(x, layers), exact(x, layers, [torch.zeros(2, 40, 48)])[0]
    others = torch.ones(2, 40, dtype=torch.bool)
    others[0, 3] = False
    assert distance(y[others], want[others]) < NOISE
    assert distance(y, want) < NOISE


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_makes_its_row_nan_and_no_other(odd):
    x, layers = leaves(80, 64, (48,))
    with torch.no_grad():
        x[1, 7, 9] = odd
    y = fp8_linear(x, *layers[0])
    assert y[1, 7].isnan().all()
    assert y.isfinite().all(-1).sum() == 79
    y.nan_to_num().sum().backward()
    # A gradient that sums over the row says so too, as a scaler of losses expects.
    assert layers[0][0].grad.isnan().any()


def test_zeros_stay_zeros():
    x, layers = leaves(80, 64, (48,))
    with torch.no_grad():
        x.zero_()
    y = fp8_linear(x, *layers[0])
    y.backward(torch.ones_like(y))
    assert not y.any()
    assert not layers[0][0].grad.any()


def test_eight_bits_are_kept_of_the_input_and_nothing_of_a_frozen_weights():
    x, layers = leaves(80, 64, (48, 32))

    def kept(*given):
        found = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
            fp8_linears(*given)
        return [(tuple(t.shape), t.dtype) for t in found]

    weights = [((48, 64), torch.bfloat16), ((32, 64), torch.bfloat16)]
    scales = [((48,), torch.float32), ((32,), torch.float32)]
    numbers = [((80, 64), torch.float8_e4m3fn), ((80,), torch.float32)]
    assert kept(x, layers) == [*scales, *numbers, *weights]
    frozen = [(weight.detach(), None) for weight, _ in layers]
    assert kept(x, frozen) == [*scales, *weights]
    assert kept(x.detach(), layers) == numbers


@pytest.mark.parametrize("interpreted", ["0", "1"])
@pytest.mark.parametrize("op", [fp8_linear, fp8_block_linear, mxfp8_linear])
def test_autocast_to_the_dtype_of_the_layer_changes_no_bit(monkeypatch, op, interpreted):
    """As trainers train with ``bf16=True``."""
    monkeypatch.setenv("TILEKERN_INTERPRET", interpreted)
    x, ((weight, bias),) = leaves(80, 128, (48,), biased=True)
    expected = op(x, weight, bias)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(op(x, weight, bias), expected)


def test_autocast_casts_as_for_a_linear_layer():
    x, layers = leaves(80, 64, (48,), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = fp8_linear(x, *layers[0])
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert layers[0][0].grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("why", "rows", "graded"),
    [("few rows without a gradient", 8, False), ("an empty matrix", 0, True)],
)
def test_torchs_layer_runs_where_it_must_and_is_counted(why, rows, graded):
    x, layers = leaves(rows, 64, (48,))
    before = tilekern.stats()["fp8_matmul"]["fallbacks"]
    with torch.set_grad_enabled(graded):
        y = fp8_linear(x, *layers[0])
    assert torch.equal(y, torch.nn.functional.linear(x, *layers[0]))
    assert tilekern.stats()["fp8_matmul"]["fallbacks"] == before + 1
    from tilekern.runtime import dispatch

    assert why in dispatch.reasons()["fp8_matmul"]


def dual(x, layer):
    with torch.autograd.forward_ad.dual_level():
        return torch.autograd.forward_ad.unpack_dual(
            fp8_linear(torch.autograd.forward_ad.make_dual(x.detach(), torch.ones_like(x)), *layer)
        ).primal


def counted_flops(x, layer):
    with FlopCounterMode(display=False):
        return fp8_linear(x, *layer)


@pytest.mark.parametrize(
    ("why", "run", "dtype"),
    [
        ("a transform or a mode", lambda x, layer: torch.vmap(lambda row: fp8_linear(row, *layer))(x), None),
        ("a transform or a mode", counted_flops, None),
        ("forward-mode differentiation", dual, None),
        ("a dtype that is not", lambda x, layer: fp8_linear(x, *layer), torch.float64),
    ],
    ids=["vmap", "mode", "forward mode", "float64"],
)
def test_other_ways_to_compute_run_torchs_layer_and_are_counted(why, run, dtype):
    from tilekern.runtime import dispatch

    x, layers = leaves(160, 64, (48,), dtype or torch.bfloat16)
    before = dispatch.reasons().get("fp8_matmul", {})
    y = run(x, layers[0])
    assert torch.equal(y, torch.nn.functional.linear(x, *layers[0]))
    now = dispatch.reasons()["fp8_matmul"]
    assert [text for text in now if now[text] > before.get(text, 0) and why in text]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("power", [16, -20])
def test_gradients_of_a_scaled_loss_are_scaled_to_the_bit(dtype, power, monkeypatch):
    monkeypatch.setenv("TILEKERN_INTERPRET", "1")
    x, layers = leaves(80, 64, (48, 32), dtype, biased=True)
    # Rows of which some are 2^-20 of others.
    slopes = [
        torch.randn(2, 40, out).to(dtype) * 2.0 ** -torch.arange(0, 20, 0.5)[:, None].to(dtype) for out in (48, 32)
    ]
    _, plain = run(x, layers, slopes)
    _, scaled = run(x, layers, [slope * 2.0**power for slope in slopes])
    assert all(torch.equal(one * 2.0**power, other) for one, other in zip(plain, scaled, strict=True))


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_reaches_what_a_scaler_of_losses_reads(odd):
    x, layers = leaves(80, 64, (48,), torch.float16)
    slope = torch.randn(2, 40, 48).half()
    slope[1, 7, 9] = odd
    _, (dx, dweight) = run(x, layers, [slope])
    assert not dx[1, 7].isfinite().any()
    assert dx.isfinite().all(-1).sum() == 79
    assert not dweight.isfinite().any()


def test_a_single_token_trains(monkeypatch):
    monkeypatch.setenv("TILEKERN_INTERPRET", "1")
    x, layers = leaves(2, 64, (48,))
    x = x[:1].detach().requires_grad_()
    slopes = [torch.randn(1, 1, 48).bfloat16()]
    (y,), (dx, dweight) = run(x, layers, slopes)
    (want,), of_wanted = exact(x, layers, slopes)
    # Few terms average less of their noise.
    assert all(
        distance(found, other) < 2 * NOISE for found, other in zip((y, dx, dweight), (want, *of_wanted), strict=True)
    )


def test_strides_of_any_kind_are_read():
    x, layers = leaves(80, 64, (48,))
    turned = x.detach().transpose(0, 2).contiguous().transpose(0, 2).requires_grad_()
    slope = torch.randn(48, 40, 2).bfloat16().permute(2, 1, 0)
    results, gradients = run(turned, layers, [slope])
    wanted, of_wanted = run(x, layers, [slope.contiguous()])
    assert all(map(torch.equal, (*results, *gradients), (*wanted, *of_wanted)))
    spread = x[:, :1].expand(2, 40, 64)
    assert torch.equal(fp8_linear(spread, *layers[0]), fp8_linear(spread.contiguous(), *layers[0]))


def test_what_needs_no_gradient_gets_none_and_the_rest_the_same():
    x, ((weight, bias), (other, _)) = leaves(80, 64, (48, 32), biased=True)
    slope = torch.randn(2, 40, 48).bfloat16()
    given = x, weight, bias
    wanted = torch.autograd.grad(fp8_linear(*given), given, slope)
    for graded in itertools.product([False, True], repeat=3):
        parts = [part.detach().requires_grad_(needs) for part, needs in zip(given, graded, strict=True)]
        if any(graded):
            fp8_linear(*parts).backward(slope)
        for part, needs, want in zip(parts, graded, wanted, strict=True):
            assert torch.equal(part.grad, want) if needs else part.grad is None
    # A result that nothing reads.
    fp8_linears(x, [(weight, bias), (other, None)])[0].backward(slope)
    assert other.grad is None
    assert torch.equal(x.grad, wanted[0])


def test_results_may_be_changed_in_place_and_weights_may_not():
    x, layers = leaves(80, 64, (48, 32))
    wanted = [2 * y.detach() for y in fp8_linears(x, layers)]
    changed = [y.mul_(2) for y in fp8_linears(x, layers)]
    assert all(map(torch.equal, changed, wanted))
    changed[0].sum().backward()
    y = fp8_linear(x, *layers[0])
    with torch.no_grad():
        layers[0][0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_differentiating_twice_is_refused():
    x, layers = leaves(80, 64, (48,))
    (dx,) = torch.autograd.grad(fp8_linear(x, *layers[0]).float().square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="the gradient of this op has no gradient"):
        dx.float().sum().backward()


@pytest.mark.parametrize("interpreted", ["0", "1"])
def test_a_weight_that_is_rounded_already_gives_the_same_bits(interpreted, monkeypatch):
    monkeypatch.setenv("TILEKERN_INTERPRET", interpreted)
    x, layers = leaves(80, 64, (48, 32), biased=True)
    with torch.no_grad():
        # Rows of which some are 2^-12 of others: their smallest numbers vanish when the weight is turned.
        layers[0][0].mul_(2.0 ** -torch.arange(0, 12, 0.25)[:, None])
    slopes = [torch.randn(2, 40, out).bfloat16() for out in (48, 32)]
    results, gradients = run(x, layers, slopes)
    rounded = [(RoundedWeight(*scaled_rows(weight.detach()), weight.dtype), bias) for weight, bias in layers]
    for weight, _ in rounded:
        weight.requires_grad_()
    found, of_found = run(x, rounded, slopes)
    assert all(map(torch.equal, (*results, *gradients), (*found, *of_found)))
    assert {type(gradient) for gradient in of_found} == {torch.Tensor}


def test_other_operations_read_a_rounded_weight_as_its_numbers():
    x, ((weight, _),) = leaves(8, 64, (48,))
    rounded = RoundedWeight(*scaled_rows(weight.detach()), weight.dtype)
    want = rounded.numbers.double() * rounded.scale[:, None]
    assert torch.equal(rounded.double(), want)
    parameter = torch.nn.Parameter(rounded)
    assert (type(parameter.detach()), parameter.dtype, parameter.shape) == (RoundedWeight, weight.dtype, weight.shape)
    same = torch.as_strided(parameter.detach(), (48, 64), (64, 1))
    assert same.numbers.data_ptr() == rounded.numbers.data_ptr()
    assert torch.equal(torch.as_strided(parameter.detach(), (64, 48), (1, 64)).double(), want.t())
    # Few rows, and products of torch's with a gradient, are in the weight's dtype.
    with torch.no_grad():
        assert torch.equal(fp8_linear(x, parameter), torch.nn.functional.linear(x, want.bfloat16()))
    torch.nn.functional.linear(x.detach(), parameter).sum().backward()
    assert type(parameter.grad) is torch.Tensor


def test_the_invariant_mode_has_the_bits_of_bfloat16():
    x, layers = leaves(80, 64, (48,))
    with tilekern.invariant():
        y = fp8_linear(x, *layers[0])
    assert distance(y, exact(x, layers, [torch.zeros(2, 40, 48)])[0][0]) < 0.004


def test_shapes_that_do_not_fit_are_said():
    x, layers = leaves(80, 64, (48,))
    with pytest.raises(ValueError, match=r"fp8_linear: x must be \[..., in_features\]"):
        fp8_linear(x[..., :32], *layers[0])
    with pytest.raises(ValueError, match=r"fp8_linear: bias must be \[48\], got \[47\]"):
        fp8_linear(x, layers[0][0], torch.zeros(47))


def roundings(monkeypatch):
    """Count the matrices that are rounded."""
    module, found = sys.modules["tilekern.ops.fp8_linear"], []
    original = module.rounded
    monkeypatch.setattr(module, "rounded", lambda x, *memory: found.append(x.shape) or original(x, *memory))
    return found


def test_layers_called_one_by_one_round_the_same_input_once_until_it_is_written_to(monkeypatch):
    leaf, layers = leaves(80, 64, (48, 32, 32))
    x, found = leaf * 1, roundings(monkeypatch)
    apart = [fp8_linear(x, weight) for weight, _ in layers]
    assert found == [(80, 64), (48, 64), (32, 64), (32, 64)]
    for one, other in zip(apart, fp8_linears(x.clone(), layers), strict=True):
        assert torch.equal(one, other)
    with torch.no_grad():
        x += 1
    found.clear()
    after = fp8_linear(x, layers[0][0])
    assert found[0] == (80, 64)
    assert not torch.equal(after, apart[0])
    with torch.inference_mode():
        unseen = torch.ones(80, 64, dtype=torch.bfloat16)
        first = fp8_linear(unseen, layers[0][0])
        unseen.zero_()
        assert first.any()
        assert not fp8_linear(unseen, layers[0][0]).any()


def test_numbers_are_held_of_the_last_input_alone_and_while_it_lives(monkeypatch):
    leaf, layers = leaves(80, 64, (64,))
    found, weight = roundings(monkeypatch), layers[0][0]
    first, second = leaf * 1, leaf * 2
    for x in (first, second, first, first):
        fp8_linear(x, weight)
    assert found == [(80, 64), (64, 64)] * 3 + [(64, 64)]
    del first, x
    assert sys.modules["tilekern.ops.fp8_linear"]._last.held is None


def test_inputs_that_live_on_are_rounded_anew(monkeypatch):
    """Fused optimizers and collectives write to them without a new version."""
    leaf, layers = leaves(80, 64, (64,), torch.float32)
    weight = layers[0][0]
    for x in (leaf, leaf.detach().clone()):
        before = fp8_linear(x, weight)
        x.data.mul_(4)
        assert torch.equal(fp8_linear(x, weight), 4 * before)


@pytest.mark.parametrize("are_packed", [False, True])
def test_what_attention_keeps_is_kept_unless_hooks_pack_it(monkeypatch, are_packed):
    module, kept = sys.modules["tilekern.ops.fp8_linear"], []
    original = module.kept_input
    monkeypatch.setattr(module, "kept_input", lambda *given: kept.append(original(*given)) or kept[-1])
    leaf, layers = leaves(80, 64, (48,))
    whole, weight = (leaf * 1).view(2, 40, 4, 16), layers[0][0]
    tell_kept(whole)
    with torch.autograd.graph.save_on_cpu() if are_packed else contextlib.nullcontext():
        y = fp8_linear(whole.reshape(2, 40, 64), weight)
    apart = fp8_linear(leaf * 1, weight)
    assert [[x.dtype for x in each] for each in kept] == [
        [torch.float8_e4m3fn, torch.float32] if are_packed else [torch.bfloat16], [torch.float8_e4m3fn, torch.float32],
    ]  # fmt: skip
    inputs = [leaf, weight]
    for one, other in zip(
        torch.autograd.grad(y.sum(), inputs), torch.autograd.grad(apart.sum(), inputs), strict=True
    ):  # fmt: skip
        assert torch.equal(one, other)


def test_inputs_are_pickled_and_copied_as_before():
    leaf, layers = leaves(80, 64, (48,))
    x = leaf * 1
    fp8_linear(x, layers[0][0])
    assert torch.equal(pickle.loads(pickle.dumps(x.detach())), x)
    y = torch.empty(80, 64).normal_()
    fp8_linear(y, layers[0][0].float())
    assert not vars(y)


@pytest.mark.parametrize("op", [fp8_linears, fp8_block_linears, mxfp8_linears])
@pytest.mark.parametrize("interpreted", ["0", "1"])
def test_layers_of_one_shape_write_the_same_memory_again_and_none_reads_another_s_numbers(
    op, interpreted, monkeypatch
):  # fmt: skip
    """All matrices are square, so that each has the shape of all others."""
    monkeypatch.setenv("TILEKERN_INTERPRET", interpreted)
    x, layers = leaves(128, 128, (128, 128, 128))
    weights = [weight for weight, _ in layers]
    slopes = [torch.randn(2, 64, 128, generator=torch.Generator().manual_seed(n)).bfloat16() for n in range(3)]
    memory, rooms = sys.modules["tilekern.ops.fp8_linear"].memory, []

    def noted(shape, dtype, device, room=None):
        made = memory(shape, dtype, device, room)
        rooms.append((id(room), shape, dtype, made.data_ptr())) if room is not None else None
        return made

    for name in ("fp8_linear", "fp8_block_linear", "mxfp8_linear"):
        monkeypatch.setattr(f"tilekern.ops.{name}.memory", noted, raising=False)
    results = op(x, layers)
    found = torch.autograd.grad(results, weights, slopes)
    assert len(set(rooms)) < len(rooms)
    for weight, y, gradient, slope in zip(weights, results, found, slopes, strict=True):
        (apart,) = op(x, [(weight, None)])
        assert torch.equal(apart, y)
        assert torch.equal(torch.autograd.grad(apart, weight, slope)[0], gradient)


@pytest.mark.parametrize("sizes", [(64, 128), (65, 1, 0, 100), (3,)])
def test_vectors_of_one_memory_are_aligned_and_apart(sizes):
    found = vectors(torch.zeros(1), *sizes)
    for n, vector in enumerate(found):
        vector.fill_(n)
    assert [len(vector) for vector in found] == list(sizes)
    assert all((vector == n).all() for n, vector in enumerate(found))
    assert not any((vector.data_ptr() - found[0].data_ptr()) % 256 for vector in found if len(vector))
