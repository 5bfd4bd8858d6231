import math

import pytest
import torch
from divergence import divergence
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from op_samples import LAYOUTS, assert_near, laid_out, launched_by

from tilekern.ops import jsd

BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)
betas = pytest.mark.parametrize("beta", BETAS)


def drawn(dtype=torch.float32, shape=(4, 5, 83), seed=0):
    torch.manual_seed(seed)
    x, y = (torch.randn(shape).log_softmax(-1).to(dtype) for _ in range(2))
    return x.requires_grad_(), y, torch.randint(0, 3, shape[:-1])


def expected(x, y, labels, beta, ignored):
    """In float64 by torch's kl_div."""
    counted = torch.ones(x.shape[:-1], dtype=torch.bool) if labels is None else labels != ignored
    return (divergence(x, y, beta) * counted).sum() / max(1, int(counted.sum()))


@examples(60)
@given(
    st.sampled_from(list(BOUNDS)), st.lists(st.integers(1, 5), max_size=2), st.integers(8, 300),
    st.sampled_from(BETAS), st.booleans(), st.integers(0, 3),
)  # fmt: skip
def test_loss_and_gradient_match_float64(dtype, leading, columns, beta, labelled, seed):
    x, y, labels = drawn(dtype, (*leading, columns), seed)
    labels = labels if labelled else None
    wide = x.detach().double().requires_grad_()
    right = expected(wide, y.double(), labels, beta, 1)
    loss = jsd(x, y, labels, beta, 1)
    assert (loss.dtype, loss.shape) == (dtype, ())
    loss.backward(torch.tensor(8.0, dtype=dtype))
    reference = 8 * torch.autograd.grad(right, wide)[0]
    assert x.grad.dtype == dtype
    assert abs(loss.double() - right) <= BOUNDS[dtype] * right.abs()
    # Gradients in float16 are rounded before the slope comes.
    least = 1e-5 if dtype == torch.float16 else 0
    assert (x.grad.double() - reference).norm() <= BOUNDS[dtype] * reference.norm() + least


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("of_target", LAYOUTS)
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_any_strides(layout, of_target, beta):
    x, y, labels = drawn()
    x, y = laid_out(x.detach(), layout).requires_grad_(), laid_out(y, of_target)
    labels = laid_out(labels, layout)
    wide = x.detach().double().requires_grad_()
    loss, right = jsd(x, y, labels, beta, 1), expected(wide, y.double(), labels, beta, 1)
    torch.testing.assert_close(loss.double(), right, rtol=1e-5, atol=0)
    assert_near(torch.autograd.grad(loss, x)[0], torch.autograd.grad(right, wide)[0], BOUNDS[torch.float32])


@betas
def test_the_formula_gives_the_same_and_the_target_a_gradient(beta):
    x, y, labels = drawn()
    right = jsd(x, y, labels, beta, 1)
    gradient = torch.autograd.grad(right, x)[0]
    wide = y.double().requires_grad_()
    loss = jsd(x, wide, labels, beta, 1)
    torch.testing.assert_close(loss, right)
    found = torch.autograd.grad(loss, (x, wide))
    torch.testing.assert_close(found[0], gradient, rtol=1e-4, atol=1e-7)
    reference = torch.autograd.grad(expected(x.detach().double(), wide, labels, beta, 1), wide)[0]
    torch.testing.assert_close(found[1], reference, rtol=1e-5, atol=1e-8)


@betas
def test_rows_that_do_not_count_and_probabilities_of_0_make_no_nan(beta):
    x, y, labels = drawn()
    labels[0, 0] = -100
    spoilt, target = x.detach().clone(), y.clone()
    spoilt[0, 0] = math.nan
    spoilt[1, 1, 5] = target[1, 1, 5] = -math.inf
    for other in (target, target.double()):  # the kernel and the formula
        leaf = spoilt.clone().requires_grad_()
        loss = jsd(leaf, other, labels, beta)
        loss.backward()
        assert loss.isfinite()
        assert leaf.grad.isfinite().all()
        assert not leaf.grad[0, 0].any()


def test_a_loss_is_one_launch_and_its_backward_one_that_scales():
    x, y, labels = drawn()

    def losses():
        jsd(x, y, labels).backward()
        with torch.no_grad():
            jsd(x, y, labels, 1.0)

    assert launched_by(losses) == {"jsd": 2, "scale": 1}


def test_where_no_row_counts_the_loss_and_the_gradient_are_0():
    x, y, labels = drawn()
    loss = jsd(x, y, torch.full_like(labels, 7), 0.5, 7)
    loss.backward()
    assert loss == 0
    assert not x.grad.any()


@pytest.mark.parametrize("beta", [0.5, 1.0])
def test_under_compile_loss_and_gradient_are_the_same(beta):
    x, y, labels = drawn()
    right = jsd(x, y, labels, beta, 1)
    gradient = torch.autograd.grad(3 * right, x)[0]
    loss = torch.compile(jsd, backend="aot_eager", fullgraph=True)(x, y, labels, beta, 1)
    assert torch.equal(loss, right)
    assert torch.equal(torch.autograd.grad(3 * loss, x)[0], gradient)


@pytest.mark.filterwarnings("ignore::tilekern.errors.TilekernWarning")
def test_under_compile_what_no_kernel_serves_has_its_gradient():
    x, y, labels = drawn()
    x, y = x.detach().double().requires_grad_(), y.double()
    loss = torch.compile(jsd, backend="aot_eager", fullgraph=True)(x, y, labels, 0.5, 1)
    (gradient,) = torch.autograd.grad(3 * loss, x)
    torch.testing.assert_close(gradient, torch.autograd.grad(3 * jsd(x, y, labels, 0.5, 1), x)[0])


@pytest.mark.parametrize("beta", [-0.1, 1.1, math.nan])
def test_a_beta_that_is_no_share_raises(beta):
    x, y, _ = drawn()
    with pytest.raises(ValueError, match="jsd: beta must be from 0 to 1"):
        jsd(x, y, beta=beta)
