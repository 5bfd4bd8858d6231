"""cross_entropy as users call it: every option, alone and together, against float64; memory, graphs and errors."""

import math

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from op_samples import DTYPES, LAYOUTS, TOLERANCE, assert_near, laid_out

import tilekern
from tilekern.ops.cross_entropy import cross_entropy
from tilekern.runtime.dispatch import counters

FORWARD, BACKWARD = "cross_entropy_forward", "cross_entropy_backward"


def expected(logits, target, weight=None, ignore_index=-100, reduction="mean", label_smoothing=0.0, softcap=None,
             z_loss=0.0):  # fmt: skip
    """The formula in float64, by torch's own cross entropy for what torch has."""
    x = logits.double().reshape(-1, logits.shape[-1])
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    labels = target.reshape(-1).long()
    options = {"weight": None if weight is None else weight.double(), "ignore_index": ignore_index}
    plain = torch.nn.functional.cross_entropy(
        x, labels, reduction=reduction, label_smoothing=label_smoothing, **options
    )
    valid = labels != ignore_index
    extra = z_loss * x.logsumexp(-1).square() * valid
    if reduction == "none":
        return (plain + extra).view(target.shape)
    if reduction == "sum":
        return plain + extra.sum()
    shares = valid.double() if weight is None else weight.double()[labels.where(valid, 0)] * valid
    return plain + extra.sum() / shares.sum()


def check(logits, target, slope=None, tolerance=None, **options):
    """Loss and gradient against :func:`expected`; returns the gradient."""
    wide = logits.detach().double().requires_grad_()
    reference = expected(wide, target, **options)
    loss = cross_entropy(logits, target, **options)
    assert loss.dtype == torch.float32
    slope = torch.ones_like(loss) if slope is None else slope
    (wide_gradient,) = torch.autograd.grad(reference, wide, slope.double())
    (gradient,) = torch.autograd.grad(loss, logits, slope)
    assert gradient.dtype == logits.dtype
    tolerance = tolerance or TOLERANCE[logits.dtype]
    assert_near(loss, reference, max(1e-5, tolerance / 100))
    assert_near(gradient, wide_gradient, tolerance)
    return gradient


def sample(rows=7, vocabulary=83, dtype=torch.float32, scale=1.0, ignored=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocabulary, generator=generator) * scale).to(dtype).requires_grad_()
    target = torch.randint(vocabulary, (rows,), generator=generator)
    target[1 : 1 + ignored] = -100
    return logits, target


@examples(80)
@given(data=st.data())
def test_any_options_shape_layout_and_dtype(data):
    leading = data.draw(st.lists(st.integers(1, 4), max_size=2), label="leading")
    vocabulary = data.draw(st.one_of(st.integers(2, 40), st.sampled_from([63, 64, 65, 128, 255, 300])), label="V")
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    reduction = data.draw(st.sampled_from(["mean", "sum", "none"]), label="reduction")
    ignore_index = data.draw(st.sampled_from([-100, -1, 0, 1]), label="ignore_index")
    layout = data.draw(st.sampled_from(LAYOUTS), label="layout")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 5), label="seed"))
    options = {
        "reduction": reduction,
        "ignore_index": ignore_index,
        "label_smoothing": data.draw(st.sampled_from([0.0, 0.1, 1.0]), label="smoothing"),
        "softcap": data.draw(st.sampled_from([None, 2.0, 30.0]), label="softcap"),
        "z_loss": data.draw(st.sampled_from([0.0, 1e-2, 0.5]), label="z_loss"),
        "weight": data.draw(st.booleans(), label="weighted") and torch.rand(vocabulary, generator=generator) + 0.1,
    }
    options["weight"] = None if options["weight"] is False else options["weight"]
    logits = laid_out(torch.rand(*leading, vocabulary, generator=generator) * 3, layout).to(dtype)
    logits = logits.detach().requires_grad_()
    target = torch.randint(vocabulary, tuple(leading), generator=generator)
    if target.numel() > 1:
        target.view(-1)[1] = ignore_index
    if ignore_index >= 0 and not bool((target != ignore_index).any()):
        target.fill_(vocabulary - 1 if ignore_index != vocabulary - 1 else 0)
    slope = torch.rand(target.shape if reduction == "none" else (), generator=generator) + 0.5
    before = counters(FORWARD).launches, counters(BACKWARD).launches
    check(logits, target, slope, **options)
    assert (counters(FORWARD).launches, counters(BACKWARD).launches) == (before[0] + 1, before[1] + 1)


@pytest.mark.parametrize("vocabulary", [1, 2, 1000, 4097, 8192, 12345])
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1, "softcap": 5.0, "z_loss": 1e-3}], ids=["plain", "all"]
)
def test_short_and_long_rows(vocabulary, options):
    logits, target = sample(5, vocabulary)
    if vocabulary == 1 and not options:
        assert float(cross_entropy(logits, target).detach()) == 0
        return
    check(logits, target, **options)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_one_row(reduction):
    check(*sample(1, 50, ignored=0), reduction=reduction)
    logits, target = torch.randn(50, requires_grad=True), torch.tensor(7)
    check(logits, target, reduction=reduction)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-4, 100.0, 1e4])
def test_large_and_small_logits(dtype, scale):
    logits, target = sample(6, 70, dtype, scale)
    # The backward's lse is a float32 number of the logits' size, so its own rounding is the softmax's error.
    check(logits, target, tolerance=max(TOLERANCE[dtype], 1e-7 * scale))


def test_the_loss_near_zero_is_exact():
    logits, target = torch.full((2, 9), -20.0), torch.tensor([3, 4])
    logits[0, 3] = logits[1, 4] = 1e4
    assert cross_entropy(logits, target).item() == 0
    logits[0, 3] = -12.0
    reference = expected(logits, target, reduction="none")
    torch.testing.assert_close(
        cross_entropy(logits, target, reduction="none").double(), reference, rtol=1e-5, atol=1e-7
    )


def test_logits_of_minus_infinity_have_no_probability():
    logits, target = sample(6, 300)
    with torch.no_grad():
        logits[:, 5:60] = -math.inf
        logits[:, :4] = torch.finfo(torch.float32).min
        target[target < 60] = 61
    target[1:3] = -100
    gradient = check(logits, target)
    assert not bool(gradient[:, 5:60].any())


def test_a_target_of_probability_zero_and_rows_of_minus_infinity_are_what_torch_says():
    logits = torch.zeros(3, 40, requires_grad=True)
    with torch.no_grad():
        logits[0, 7] = -math.inf
        logits[1] = -math.inf
    target = torch.tensor([7, 7, 7])
    loss = cross_entropy(logits, target, reduction="none")
    reference = torch.nn.functional.cross_entropy(logits, target, reduction="none")
    torch.testing.assert_close(loss, reference, equal_nan=True)
    for got, wanted in zip(
        torch.autograd.grad(loss.sum(), logits), torch.autograd.grad(reference.sum(), logits), strict=True
    ):
        torch.testing.assert_close(got, wanted, equal_nan=True)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", [{}, {"z_loss": 0.1, "softcap": 3.0}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernels", "torch"])
def test_all_rows_ignored(dtype, options, reduction):
    logits, target = sample(4, 30, dtype)
    target.fill_(-100)
    loss = cross_entropy(logits, target, reduction=reduction, **options)
    torch.testing.assert_close(
        loss, torch.nn.functional.cross_entropy(logits, target, reduction=reduction), equal_nan=True
    )
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert not bool(gradient.any())


@pytest.mark.parametrize("wrong", [-1, -101, 30, 31, 2**31 - 1, -(2**31)])
def test_a_target_that_is_no_class_gives_nan_and_touches_nothing_else(wrong):
    logits, target = sample(4, 30, ignored=1)
    target[2] = wrong
    weight = torch.rand(30) + 0.5
    for options in ({}, {"weight": weight}):
        loss = cross_entropy(logits, target, reduction="none", **options)
        (gradient,) = torch.autograd.grad(loss.sum(), logits)
        assert loss.isnan().tolist() == [False, False, True, False]
        assert gradient.isnan().all(1).tolist() == [False, False, True, False]
        assert not bool(gradient[[0, 1, 3]].isnan().any())
        with pytest.raises(ValueError, match=f"cross_entropy got the label {wrong} in"):
            tilekern.check_labels()


def test_rows_without_an_upstream_gradient_get_zeros():
    logits, target = sample(5, 30, ignored=0)
    slope = torch.tensor([1.0, 0.0, 2.0, 0.0, -1.0])
    gradient = check(logits, target, slope, reduction="none")
    assert not bool(gradient[[1, 3]].any())


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_targets_of_any_integer_dtype(dtype):
    logits, target = sample(5, 30, ignored=0)
    torch.testing.assert_close(cross_entropy(logits, target.to(dtype)), cross_entropy(logits, target), rtol=0, atol=0)


def test_without_a_gradient_there_is_one_launch_and_nothing_is_kept():
    logits, target = sample()
    before = counters(FORWARD).launches, counters(BACKWARD).launches
    graded = cross_entropy(logits, target).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            loss = cross_entropy(logits, target)
        assert torch.equal(loss, graded)
        assert not loss.requires_grad
    assert (counters(FORWARD).launches, counters(BACKWARD).launches) == (before[0] + 3, before[1])


def head(hidden, weight, in_place):
    return cross_entropy(hidden @ weight.t(), torch.tensor([3, 1, -100, 4]), in_place=in_place, z_loss=1e-2)


def test_the_gradient_can_take_the_logits_memory():
    hidden, weight = torch.randn(4, 6, requires_grad=True), torch.randn(31, 6, requires_grad=True)
    gradients = [torch.autograd.grad(head(hidden, weight, flag), (hidden, weight)) for flag in (False, True)]
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))

    logits = hidden @ weight.t()
    kept = []
    logits.register_hook(lambda gradient: kept.append(gradient.data_ptr()))
    cross_entropy(logits, torch.tensor([3, 1, -100, 4]), in_place=True).backward()
    assert kept == [logits.data_ptr()]


def test_leaves_are_never_overwritten():
    logits, target = sample()
    before = logits.detach().clone()
    cross_entropy(logits, target, in_place=True).backward()
    assert torch.equal(logits.detach(), before)
    assert logits.grad.data_ptr() != logits.data_ptr()


def test_a_later_use_of_overwritten_logits_is_noticed():
    leaf, target = sample()
    logits = leaf * 1
    other = logits.exp().sum() + logits.square().sum()
    loss = cross_entropy(logits, target, in_place=True)
    before = logits.detach().clone()
    loss.backward(retain_graph=True)
    assert torch.equal(logits, before), "the graph is kept for another backward, which reads them"
    loss.backward()
    assert not torch.equal(logits, before)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


def test_strided_logits_in_place_change_nothing_beside_them():
    leaf = torch.randn(5, 40, requires_grad=True)
    target = torch.tensor([1, 2, 3, 4, 5])
    wide = leaf * 1
    wide_before = wide.detach().clone()
    cross_entropy(wide[:, 3:33], target, in_place=True).backward()
    assert torch.equal(wide.detach()[:, :3], wide_before[:, :3])
    assert torch.equal(wide.detach()[:, 33:], wide_before[:, 33:])
    (reference,) = torch.autograd.grad(expected(leaf[:, 3:33], target), leaf)
    torch.testing.assert_close(leaf.grad, reference.float(), rtol=1e-5, atol=1e-6)


def test_a_kept_graph_gives_the_same_gradient_again():
    logits, target = sample()
    loss = cross_entropy(logits * 1, target)
    first = torch.autograd.grad(loss, logits, retain_graph=True)
    assert torch.equal(first[0], torch.autograd.grad(loss, logits)[0])


@pytest.mark.parametrize("power", [1, 2])
def test_second_derivatives_are_refused_and_not_wrong(power):
    logits, target = sample()
    loss = cross_entropy(logits, target) ** power
    (gradient,) = torch.autograd.grad(loss, logits, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        (gradient.square().sum() + logits.sum()).backward()


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.share(4)
def test_torch_compile_without_a_graph_break(dynamic, reduction):
    logits, target = sample()
    options = {"weight": torch.rand(83) + 0.5, "label_smoothing": 0.1, "softcap": 4.0, "z_loss": 0.1}
    torch._dynamo.reset()

    def call(x):
        return cross_entropy(x, target, reduction=reduction, in_place=True, **options)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    loss, eager = compiled(logits), call(logits)
    torch.testing.assert_close(loss, eager)
    slope = torch.rand_like(eager)
    (got,) = torch.autograd.grad(loss, logits, slope)
    assert_near(got, torch.autograd.grad(eager, logits, slope)[0], 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_class_weights_are_added_up_without_rounding(dtype):
    """In their own dtype the divisor loses its last digits, and 700 of these are more than float16 can hold."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(700, 3, generator=generator)
    target = torch.randint(3, (700,), generator=generator)
    weight = torch.tensor([100.0, 200.0, 150.0], dtype=dtype)
    assert weight[target].double().sum() > torch.finfo(torch.float16).max
    assert_near(cross_entropy(logits, target, weight), expected(logits, target, weight), 1e-6)


def test_what_no_kernel_serves_runs_torch_s_own_operations_and_counts():
    logits, target = sample(dtype=torch.float64)
    empty = torch.zeros(0, 83, requires_grad=True)
    before = tilekern.stats()[FORWARD]
    loss = cross_entropy(logits, target, label_smoothing=0.1, softcap=3.0, z_loss=0.1)
    torch.testing.assert_close(loss, expected(logits, target, label_smoothing=0.1, softcap=3.0, z_loss=0.1))
    assert loss.dtype == torch.float64
    assert cross_entropy(empty, target[:0]).isnan()
    cross_entropy(empty, target[:0], reduction="sum").backward()
    after = tilekern.stats()[FORWARD]
    assert after["fallbacks"] == before["fallbacks"] + 3
    assert after["launches"] == before["launches"]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("far", [2**40, -(2**31) - 1])
def test_an_index_to_ignore_that_is_no_int32(far, dtype):
    logits, target = sample()
    near = -100 if dtype == torch.int64 else 2**31 - 1
    given = target.where(target >= 0, far if dtype == torch.int64 else 3).to(dtype)
    wanted = target.where(target >= 0, near if dtype == torch.int64 else 3)
    losses = [cross_entropy(logits, *pair) for pair in ((given, None, far), (wanted, None, near))]
    assert torch.equal(*losses)
    assert torch.equal(*(torch.autograd.grad(loss, logits)[0] for loss in losses))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": torch.zeros(4, dtype=torch.long)}, r"target must be \[3\] as the rows of logits are, got \[4\]"),
        ({"target": torch.zeros(3, 8)}, r"target must be \[3\] .*, got \[3, 8\]"),
        ({"target": torch.zeros(3)}, r"integer dtype, got torch.float32"),
        ({"target": torch.zeros(3, dtype=torch.bool)}, r"integer dtype, got torch.bool"),
        ({"target": torch.zeros(3, dtype=torch.long, device="meta")}, "target is on meta, and must be on cpu"),
        ({"weight": torch.ones(7)}, r"weight must have the shape \[8\], got \[7\]"),
        ({"weight": torch.ones(8, requires_grad=True)}, r"weight gets no gradient"),
        ({"reduction": "max"}, r"reduction must be mean, sum or none, got 'max'"),
        ({"label_smoothing": 1.5}, r"label_smoothing must be from 0 to 1, got 1.5"),
        ({"label_smoothing": math.nan}, r"label_smoothing must be from 0 to 1"),
        ({"softcap": 0.0}, "softcap must be positive and finite .*, got 0.0"),
        ({"softcap": math.nan}, "softcap must be positive and finite .*, got nan"),
        ({"softcap": math.inf}, "softcap must be positive and finite .*, got inf"),
    ],
)
def test_bad_input_is_refused(changes, message):
    arguments = {"logits": torch.zeros(3, 8), "target": torch.zeros(3, dtype=torch.long)} | changes
    with pytest.raises(ValueError, match=rf"^cross_entropy: .*{message}|^cross_entropy: {message}"):
        cross_entropy(**arguments)
