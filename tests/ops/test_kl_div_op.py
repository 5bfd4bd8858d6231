import math

import pytest
import torch
from op_samples import launched_by

import tilekern
from tilekern.ops.kl_div import kl_div

pytestmark = pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
forms = pytest.mark.parametrize("log_target", [False, True])
reductions = pytest.mark.parametrize("reduction", ["none", "sum", "mean", "batchmean"])
BOUNDS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def given(dtype, log_target, shape=(4, 5, 83)):
    log, target = (torch.randn(shape).log_softmax(-1).to(dtype) for _ in range(2))
    return log.requires_grad_(), target if log_target else target.float().exp().to(dtype)


def fallbacks():
    return sum(counts.get("fallbacks", 0) for counts in tilekern.stats().values())


@forms
@reductions
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(83,), (4, 83), (4, 5, 83)])
def test_loss_and_gradient_match_torch_in_float64(dtype, log_target, reduction, shape):
    log, target = given(dtype, log_target, shape)
    wide = log.detach().double().requires_grad_()
    expected = torch.nn.functional.kl_div(wide, target.double(), reduction=reduction, log_target=log_target)
    before = fallbacks()
    loss = kl_div(log, target, reduction, log_target)
    assert loss.dtype == (dtype if reduction == "none" else torch.float32)
    assert loss.shape == expected.shape
    slope = 100 * (1 + torch.rand_like(loss))  # else float16 has no numbers for the gradients of means
    loss.backward(slope)
    assert fallbacks() == before
    reference = torch.autograd.grad(expected, wide, slope.double())[0]
    assert log.grad.dtype == dtype
    for got, right in ((loss, expected), (log.grad, reference)):
        assert (got.double() - right).norm() < BOUNDS[got.dtype] * right.norm()


@reductions
def test_it_takes_the_keywords_of_torch(reduction):
    log, target = given(torch.float32, log_target=False)
    assert torch.allclose(
        kl_div(input=log, target=target, reduction=reduction, log_target=False),
        torch.nn.functional.kl_div(input=log, target=target, reduction=reduction, log_target=False),
    )
    assert torch.allclose(kl_div(log, target), torch.nn.functional.kl_div(log, target, reduction="batchmean"))


@forms
@reductions
def test_a_target_that_needs_a_gradient_gets_that_of_torch(reduction, log_target):
    log, target = given(torch.float32, log_target)
    leaves = (log, target.requires_grad_())
    expected = torch.nn.functional.kl_div(*leaves, reduction=reduction, log_target=log_target)
    loss = kl_div(*leaves, reduction, log_target)
    slope = torch.randn_like(loss)
    for got, right in zip(
        torch.autograd.grad(loss, leaves, slope), torch.autograd.grad(expected, leaves, slope), strict=True
    ):
        torch.testing.assert_close(got, right)


@forms
@reductions
def test_strides_do_not_matter(reduction, log_target):
    log, target = given(torch.float32, log_target)
    expected = kl_div(log, target, reduction, log_target)
    spread = log.detach().permute(2, 0, 1).contiguous().permute(1, 2, 0).requires_grad_()
    loss = kl_div(spread, target.mT.contiguous().mT, reduction, log_target)
    assert torch.equal(loss, expected)
    expected.sum().backward()
    loss.sum().backward()
    assert torch.equal(spread.grad, log.grad)


@reductions
def test_dtypes_that_differ_run_the_formula(reduction):
    log, target = given(torch.bfloat16, log_target=False)
    loss = kl_div(log, target.float(), reduction)
    assert loss.dtype == torch.float32
    loss.sum().backward()
    assert log.grad.dtype == torch.bfloat16
    expected = torch.nn.functional.kl_div(log.detach().double(), target.double(), reduction=reduction)
    torch.testing.assert_close(loss.detach().double(), expected, rtol=1e-5, atol=1e-6)


@reductions
def test_float64_runs_the_formula_in_float64(reduction):
    log, target = given(torch.float64, log_target=False)
    expected = torch.nn.functional.kl_div(log, target, reduction=reduction)
    torch.testing.assert_close(kl_div(log, target, reduction), expected)


@forms
@reductions
def test_probabilities_of_0_and_infinite_logarithms_give_what_torch_gives(reduction, log_target):
    least = -math.inf if log_target else 0.0
    log = torch.tensor([[-math.inf, -1.0, 0.0], [-1.0, -1.0, -2.0]], requires_grad=True)
    target = torch.tensor([[least, 0.5, 0.5], [least, 0.5, 0.5]])
    expected = torch.nn.functional.kl_div(log, target, reduction=reduction, log_target=log_target)
    loss = kl_div(log, target, reduction, log_target)
    torch.testing.assert_close(loss, expected, equal_nan=True)
    gradients = (torch.autograd.grad(x.sum(), log)[0] for x in (loss, expected))
    torch.testing.assert_close(*gradients)


@reductions
@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
def test_empty_tensors_give_what_torch_gives(reduction, shape):
    log = torch.zeros(shape, requires_grad=True)
    loss = kl_div(log, torch.zeros(shape), reduction)
    expected = torch.nn.functional.kl_div(log, torch.zeros(shape), reduction=reduction)
    torch.testing.assert_close(loss, expected, equal_nan=True)
    loss.sum().backward()
    assert log.grad.shape == shape


@pytest.mark.parametrize(("reduction", "kernel"), [("sum", "kl_div"), ("none", "kl_div_elements")])
def test_each_reduction_is_one_launch_each_way(reduction, kernel):
    inputs = given(torch.float32, log_target=False)
    launched = launched_by(lambda: kl_div(*inputs, reduction).sum().backward())
    assert launched == {f"{kernel}_forward": 1, f"{kernel}_backward": 1}


def test_a_reduction_that_is_unknown_raises():
    with pytest.raises(ValueError, match="reduction must be batchmean, mean, sum or none, got 'max'"):
        kl_div(torch.zeros(2, 3), torch.zeros(2, 3), "max")


@reductions
def test_shapes_that_differ_raise(reduction):
    with pytest.raises(ValueError, match="input and target must have one shape"):
        kl_div(torch.zeros(2, 3), torch.zeros(3), reduction)
