"""cross_entropy as users call it: every option, alone and together, against float64; memory, graphs and errors."""

import math

import contract
import formulas
import pytest
import torch
from op_samples import DTYPES, assert_near
from tolerances import TOLERANCE

import tilekern
from tilekern.ops import fused_linear_cross_entropy
from tilekern.ops.cross_entropy import cross_entropy

FORWARD, BACKWARD = "cross_entropy_forward", "cross_entropy_backward"


def expected(logits, target, weight=None, **options):
    return formulas.cross_entropy(logits.double(), target, weight, **options)[0]


def check(logits, target, slope=None, tolerance=None, **options):
    """Loss and gradient against float64; returns the gradient."""
    given, slopes = {"logits": logits, "target": target, **options}, None if slope is None else [slope]
    return contract.check(contract.CASES["cross_entropy"], given, slopes=slopes, tolerance=tolerance)["logits"]


def sample(rows=7, vocabulary=83, dtype=torch.float32, scale=1.0, ignored=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocabulary, generator=generator) * scale).to(dtype).requires_grad_()
    target = torch.randint(vocabulary, (rows,), generator=generator)
    target[1 : 1 + ignored] = -100
    return logits, target


@pytest.mark.parametrize("vocabulary", [1, 2, 1000, 4097, 8192, 12345])
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1, "softcap": 5.0, "z_loss": 1e-3}], ids=["plain", "all"]
)
def test_short_and_long_rows(vocabulary, options):
    logits, target = sample(5, vocabulary)
    if vocabulary == 1 and not options:
        assert float(cross_entropy(logits, target).detach()) == 0
        return
    check(logits, target, torch.ones(()), **options)


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
def test_a_target_outside_the_classes_gives_nan_and_touches_nothing_else(wrong):
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_class_weights_are_added_up_without_rounding(dtype):
    """In their own dtype the divisor loses its last digits, and 700 of these are more than float16 can hold."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(700, 3, generator=generator)
    target = torch.randint(3, (700,), generator=generator)
    weight = torch.tensor([100.0, 200.0, 150.0], dtype=dtype)
    assert weight[target].double().sum() > torch.finfo(torch.float16).max
    assert_near(cross_entropy(logits, target, weight), expected(logits, target, weight), 1e-6)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("far", [2**40, -(2**31) - 1])
def test_an_ignored_index_outside_int32(far, dtype):
    logits, target = sample()
    near = -100 if dtype == torch.int64 else 2**31 - 1
    given = target.where(target >= 0, far if dtype == torch.int64 else 3).to(dtype)
    wanted = target.where(target >= 0, near if dtype == torch.int64 else 3)
    losses = [cross_entropy(logits, *pair) for pair in ((given, None, far), (wanted, None, near))]
    assert torch.equal(*losses)
    assert torch.equal(*(torch.autograd.grad(loss, logits)[0] for loss in losses))


@pytest.mark.parametrize("name", contract.BESIDE)
def test_what_is_not_asked_for_is_none(name):
    logits, target = torch.randn(7, 83), torch.randint(83, (7,))
    hidden, weight = torch.randn(7, 16), torch.randn(83, 16)
    fields = {key.removeprefix("return_") for key in contract.BESIDE}
    for got in (
        cross_entropy(logits, target, **{name: True}),
        fused_linear_cross_entropy(hidden, weight, target, **{name: True}),
    ):
        found = {key for key in fields if getattr(got, key) is not None}
        assert found == {name.removeprefix("return_")}
