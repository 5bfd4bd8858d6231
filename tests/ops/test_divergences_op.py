"""jsd, tvd and kl_div of rows that do not count, of zeros, and of targets with gradients; softmax and sparsemax."""

import math

import formulas
import pytest
import torch

from tilekern.ops import jsd, kl_div, softmax, sparsemax, tvd

pytestmark = pytest.mark.filterwarnings("ignore:reduction. 'mean' divides", "ignore::tilekern.errors.TilekernWarning")
EMPTY = [(0, 5), (2, 0)]
REDUCTIONS = ("none", "sum", "mean", "batchmean")
# A loss with labels, its options before the label that does not count, and its formula.
LABELLED = {f"jsd {beta}": (jsd, beta, formulas.jsd) for beta in (0.0, 0.1, 0.5, 0.9, 1.0)} | {
    f"tvd {reduction}": (tvd, reduction, formulas.tvd) for reduction in REDUCTIONS
}
labelled = pytest.mark.parametrize(("loss", "option", "formula"), LABELLED.values(), ids=LABELLED)
KL = {f"{reduction}{' of logarithms' * log}": (reduction, log) for reduction in REDUCTIONS for log in (False, True)}
every_kl = pytest.mark.parametrize(("reduction", "log_target"), KL.values(), ids=KL)


def drawn(loss, shape=(4, 5, 83)):
    """Two distributions, or their logarithms, and labels from 0 to 2."""
    x, y = (torch.randn(shape).log_softmax(-1) if loss is jsd else torch.randn(shape).softmax(-1) for _ in range(2))
    return x.requires_grad_(), y, torch.randint(0, 3, shape[:-1])


@labelled
def test_a_target_of_another_dtype_that_needs_a_gradient_gets_the_formula_s(loss, option, formula):
    x, y, labels = drawn(loss)
    right = loss(x, y, labels, option, 1)
    wide = y.double().requires_grad_()
    value, exact = loss(x, wide, labels, option, 1), formula(x.double(), wide, labels, option, 1)
    torch.testing.assert_close(value.float(), right)
    slope = torch.randn_like(right)
    torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-7)
    found = torch.autograd.grad(value, (x, wide), slope.to(value.dtype))
    for one, other in zip(found, torch.autograd.grad(exact, (x, wide), slope.double()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(found[0], torch.autograd.grad(right, x, slope)[0], rtol=1e-4, atol=1e-7)


@labelled
def test_rows_that_do_not_count_may_hold_anything(loss, option, formula):
    x, y, labels = drawn(loss)
    labels[0, 0] = labels[1, 1] = -100
    spoilt = x.detach().clone()
    spoilt[0, 0], spoilt[1, 1] = math.nan, math.inf
    for target in (y, y.double()):  # the kernel and the formula
        right = loss(x, target, labels, option)
        exact = formula(x.double(), target.double(), labels, option)
        torch.testing.assert_close(right.double(), exact, rtol=1e-4, atol=1e-6)
        (gradient,) = torch.autograd.grad(right.sum(), x)
        leaf = spoilt.clone().requires_grad_()
        value = loss(leaf, target, labels, option)
        assert torch.equal(value, right)
        assert torch.equal(torch.autograd.grad(value.sum(), leaf)[0], gradient)
        assert not gradient[0, 0].any()


@labelled
def test_where_no_row_counts_the_loss_and_the_gradient_are_0(loss, option, formula):
    x, y, labels = drawn(loss)
    value = loss(x, y, torch.full_like(labels, 7), option, 7)
    value.sum().backward()
    assert not value.any()
    assert not x.grad.any()


@labelled
def test_rows_of_no_columns_give_0(loss, option, formula):
    x = torch.zeros(2, 0, requires_grad=True)
    value = loss(x, torch.zeros(2, 0), None, option)
    value.sum().backward()
    assert value.shape == ((2, 0) if option == "none" else ())
    assert not value.any()
    assert x.grad.shape == (2, 0)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_probabilities_of_0_make_no_nan(beta):
    x, y, labels = drawn(jsd)
    with torch.no_grad():
        x[1, 1, 5] = y[1, 1, 5] = -math.inf
    for target in (y, y.double()):
        value = jsd(x, target, labels, beta)
        assert value.isfinite()
        assert torch.autograd.grad(value, x)[0].isfinite().all()


@pytest.mark.slow
def test_under_compile_what_no_kernel_serves_has_its_gradient():
    x, y, labels = drawn(jsd)
    x, y = x.detach().double().requires_grad_(), y.double()
    value = torch.compile(jsd, backend="aot_eager", fullgraph=True)(x, y, labels, 0.5, 1)
    (gradient,) = torch.autograd.grad(3 * value, x)
    torch.testing.assert_close(gradient, torch.autograd.grad(3 * jsd(x, y, labels, 0.5, 1), x)[0])


@every_kl
def test_kl_div_is_torch_s_for_targets_with_gradients_and_by_keyword(reduction, log_target):
    log, target, _ = drawn(jsd)
    leaves = log, (target if log_target else target.exp()).requires_grad_()
    how = {"reduction": reduction, "log_target": log_target}
    expected = torch.nn.functional.kl_div(input=leaves[0], target=leaves[1], **how)
    loss = kl_div(input=leaves[0], target=leaves[1], **how)
    slope = torch.randn_like(loss)
    found = (torch.autograd.grad(value, leaves, slope) for value in (loss, expected))
    for got, right in zip(*found, strict=True):
        torch.testing.assert_close(got, right)
    if not log_target:
        torch.testing.assert_close(kl_div(*leaves), torch.nn.functional.kl_div(*leaves, reduction="batchmean"))
    narrow = log.detach().bfloat16().requires_grad_()
    loss = kl_div(narrow, leaves[1].detach(), **how)
    assert loss.dtype == torch.float32
    loss.sum().backward()
    assert narrow.grad.dtype == torch.bfloat16
    exact = torch.nn.functional.kl_div(narrow.detach().double(), leaves[1].detach().double(), **how)
    torch.testing.assert_close(loss.detach().double(), exact, rtol=1e-5, atol=1e-6)


@every_kl
def test_probabilities_of_0_and_infinite_logarithms_give_what_torch_gives(reduction, log_target):
    least = -math.inf if log_target else 0.0
    log = torch.tensor([[-math.inf, -1.0, 0.0], [-1.0, -1.0, -2.0]], requires_grad=True)
    target = torch.tensor([[least, 0.5, 0.5], [least, 0.5, 0.5]])
    for x, y in ((log, target), *((torch.zeros(shape, requires_grad=True), torch.zeros(shape)) for shape in EMPTY)):
        expected = torch.nn.functional.kl_div(x, y, reduction=reduction, log_target=log_target)
        loss = kl_div(x, y, reduction, log_target)
        torch.testing.assert_close(loss, expected, equal_nan=True)
        gradients = (torch.autograd.grad(value.sum(), x)[0] for value in (loss, expected))
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: jsd(x, x, beta=-0.1), "jsd: beta must be from 0 to 1"),
        (lambda x: jsd(x, x, beta=math.nan), "jsd: beta must be from 0 to 1"),
        (lambda x: tvd(x, x, reduction="max"), "reduction must be none, sum, mean or batchmean, got 'max'"),
        (lambda x: tvd(x, x, torch.ones(5, 4)), r"shift_labels must have the shape \[4, 5\], got \[5, 4\]"),
        *((lambda x, way=way: tvd(x, x[:1], None, way), "p and q must have one shape") for way in REDUCTIONS),
        (lambda x: kl_div(x, x, "max"), "reduction must be batchmean, mean, sum or none, got 'max'"),
        *((lambda x, way=way: kl_div(x, x[0, 0], way), "input and target must have one shape") for way in REDUCTIONS),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(4, 5, 3))


def test_masked_columns_get_no_share_and_no_gradient():
    x = torch.tensor([[0.5, -math.inf, 1.0], [-math.inf] * 3], requires_grad=True)
    y = softmax(x)
    torch.testing.assert_close(y, torch.softmax(x, -1), equal_nan=True)
    assert torch.autograd.grad(y[0, 0], x)[0][0, 1] == 0


def test_sparsemax_of_rows_that_one_can_compute_by_hand():
    x = torch.tensor([[2.0, 1.5, 0.0], [3.0, 1.0, 0.0], [0.0, -math.inf, 0.0], [5.0, 5.0, 5.0]])
    expected = torch.tensor([[0.75, 0.25, 0.0], [1.0, 0.0, 0.0], [0.5, 0.0, 0.5], [1 / 3, 1 / 3, 1 / 3]])
    torch.testing.assert_close(sparsemax(x), expected)
    assert sparsemax(torch.tensor([[0.0, math.nan], [0.0, math.inf], [-math.inf, -math.inf]])).isnan().all()
    with pytest.raises(IndexError, match="Dimension out of range"):
        sparsemax(x, 2)


@pytest.mark.parametrize("shape", EMPTY)
@pytest.mark.parametrize("call", [softmax, sparsemax, lambda x: sparsemax(x, 0)])
def test_empty_tensors_give_empty_ones(call, shape):
    x = torch.zeros(shape, requires_grad=True)
    y = call(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == shape
