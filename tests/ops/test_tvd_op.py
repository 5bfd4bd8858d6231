import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from op_samples import launched_by

from tilekern.ops import tvd

REDUCTIONS = ("none", "sum", "mean", "batchmean")
reductions = pytest.mark.parametrize("reduction", REDUCTIONS)
BOUNDS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def drawn(dtype=torch.float32, shape=(4, 5, 83), seed=0):
    torch.manual_seed(seed)
    p, q = (torch.randn(shape).softmax(-1).to(dtype) for _ in range(2))
    return p.requires_grad_(), q, torch.randint(0, 3, shape[:-1])


def expected(p, q, labels, reduction, ignored):
    """In float64 by its definition."""
    counted = torch.ones(p.shape[:-1], dtype=torch.bool) if labels is None else labels != ignored
    loss = torch.where(counted[..., None], 0.5 * (p - q).abs(), 0)
    if reduction == "none":
        return loss
    rows = max(1, int(counted.sum()))
    return loss.sum() / {"sum": 1, "batchmean": rows, "mean": rows * p.shape[-1]}[reduction]


@examples(60)
@given(
    st.sampled_from(list(BOUNDS)), st.lists(st.integers(1, 5), max_size=2), st.integers(1, 300),
    st.sampled_from(REDUCTIONS), st.booleans(), st.integers(0, 3),
)  # fmt: skip
def test_loss_and_gradient_match_float64(dtype, leading, columns, reduction, labelled, seed):
    p, q, labels = drawn(dtype, (*leading, columns), seed)
    labels = labels if labelled else None
    wide = p.detach().double().requires_grad_()
    right = expected(wide, q.double(), labels, reduction, 1)
    loss = tvd(p, q, labels, reduction, 1)
    assert (loss.dtype, loss.shape) == (torch.float32, right.shape)
    slope = 100 * torch.rand_like(loss)  # else float16 has no numbers for the gradients of means
    loss.backward(slope)
    reference = torch.autograd.grad(right, wide, slope.double())[0]
    assert p.grad.dtype == dtype
    assert (loss.double() - right).norm() <= BOUNDS[torch.float32] * right.norm()
    # Gradients of means vanish in float16 where rows are long: they are rounded before the slope comes.
    least = 1e-6 if dtype == torch.float16 else 0
    assert (p.grad.double() - reference).norm() <= 2 * BOUNDS[dtype] * reference.norm() + least


@reductions
def test_rows_that_do_not_count_may_hold_anything(reduction):
    p, q, labels = drawn()
    labels[0, 0], labels[1, 1] = -100, -100
    right = tvd(p, q, labels, reduction)
    gradient = torch.autograd.grad(right.sum(), p)[0]
    spoilt = p.detach().clone()
    spoilt[0, 0], spoilt[1, 1] = torch.nan, torch.inf
    loss = tvd(spoilt.requires_grad_(), q, labels, reduction)
    assert torch.equal(loss, right)
    assert torch.equal(torch.autograd.grad(loss.sum(), spoilt)[0], gradient)


@reductions
def test_where_no_row_counts_the_loss_and_the_gradient_are_0(reduction):
    p, q, labels = drawn()
    loss = tvd(p, q, torch.full_like(labels, 7), reduction, 7)
    loss.sum().backward()
    assert not loss.any()
    assert not p.grad.any()


@reductions
def test_the_formula_gives_the_same(reduction):
    """Where dtypes differ, and where q needs a gradient."""
    p, q, labels = drawn()
    right = tvd(p, q, labels, reduction, 1)
    wide = q.double().requires_grad_()
    loss = tvd(p, wide, labels, reduction, 1)
    torch.testing.assert_close(loss.float(), right)
    for got, gradient in zip(torch.autograd.grad(loss.sum(), (p, wide)), (1, -1), strict=True):
        reference = torch.autograd.grad(tvd(p, q, labels, reduction, 1).sum(), p)[0]
        torch.testing.assert_close(got.float(), gradient * reference)


def test_a_loss_is_one_launch_and_its_backward_one_that_scales():
    p, q, _ = drawn()

    def losses():
        tvd(p, q).backward()
        with torch.no_grad():
            tvd(p, q)

    assert launched_by(losses) == {"tvd": 2, "scale": 1}


def test_a_second_backward_through_one_loss_gives_the_same_again():
    p, q, _ = drawn()
    loss = tvd(p, q)
    (2 * loss).backward(retain_graph=True)
    first, p.grad = p.grad, None
    (2 * loss).backward()
    assert torch.equal(p.grad, first)


@reductions
def test_strides_do_not_matter(reduction):
    p, q, _ = drawn()
    right = tvd(p, q, reduction=reduction)
    spread = p.detach().permute(2, 0, 1).contiguous().permute(1, 2, 0).requires_grad_()
    loss = tvd(spread, q.mT.contiguous().mT, reduction=reduction)
    assert torch.equal(loss, right)
    right.sum().backward()
    loss.sum().backward()
    assert torch.equal(spread.grad, p.grad)


@reductions
@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
def test_empty_tensors_give_0(reduction, shape):
    p = torch.zeros(shape, requires_grad=True)
    loss = tvd(p, torch.zeros(shape), reduction=reduction)
    assert loss.shape == (shape if reduction == "none" else ())
    assert not loss.any()
    loss.sum().backward()
    assert p.grad.shape == shape


def test_under_compile_loss_and_gradient_are_the_same():
    p, q, labels = drawn()
    right = tvd(p, q, labels, "mean", 1)
    gradient = torch.autograd.grad(3 * right, p)[0]
    loss = torch.compile(tvd, backend="aot_eager", fullgraph=True)(p, q, labels, "mean", 1)
    assert torch.equal(loss, right)
    assert torch.equal(torch.autograd.grad(3 * loss, p)[0], gradient)


def test_what_does_not_fit_raises():
    p, q, labels = drawn()
    with pytest.raises(ValueError, match="reduction must be none, sum, mean or batchmean, got 'max'"):
        tvd(p, q, reduction="max")
    with pytest.raises(ValueError, match=r"shift_labels must have the shape \[4, 5\], got \[5, 4\]"):
        tvd(p, q, labels.T)
    for reduction in REDUCTIONS:
        with pytest.raises(ValueError, match="p and q must have one shape"):
            tvd(p, q[:1], reduction=reduction)
