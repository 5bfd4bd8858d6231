import pytest
import torch
from op_samples import DTYPES, assert_as_in_float64, launched_by, leaves_of

import tilekern
from tilekern.kernels.dyt import BACKWARD, groups_of
from tilekern.ops import dyt
from tilekern.spec import bucket
from tilekern.spec.targets import resolve


def given(dtype, weight_dtype=None, shape=(3, 5, 83)):
    """x, alpha, gamma and beta."""
    return leaves_of((shape, (1,), shape[-1:], shape[-1:]), (dtype, *[weight_dtype or dtype] * 3))


def formula(x, alpha, gamma, beta=None):
    y = gamma * torch.tanh(alpha * x)
    return y if beta is None else y + beta


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("shifted", [True, False])
def test_result_and_gradients_match_autograd_in_float64(dtype, weight_dtype, shifted):
    assert_as_in_float64(dyt, formula, given(dtype, weight_dtype)[: 3 + shifted])


def test_numbers_near_0_keep_their_digits():
    x = torch.logspace(-8, 1, 83).repeat(2, 1)
    one = torch.ones(83)
    torch.testing.assert_close(dyt(x, one[:1], one), torch.tanh(x.double()).float(), rtol=5e-7, atol=0)


def test_alpha_may_have_no_dimension_and_keeps_its_shape():
    x, alpha, gamma, beta = given(torch.float32)
    number = alpha.detach()[0].requires_grad_()
    dyt(x, number, gamma, beta).square().sum().backward()
    dyt(x, alpha, gamma, beta).square().sum().backward()
    assert torch.equal(number.grad, alpha.grad[0])


def test_each_way_is_one_launch_and_all_sums_for_columns_another():
    launched = launched_by(lambda: dyt(*given(torch.float32)).sum().backward())
    assert launched == {"dyt_forward": 1, "dyt_backward": 1, "dyt_sums": 1}


def test_a_trace_has_the_sums_of_every_config_that_may_win():
    """A group of blocks leaves a row of sums, and the winner's grid says how many groups there are."""
    with torch.device("meta"):
        leaves = [torch.randn(size, requires_grad=True) for size in ((8192, 4096), (1,), (4096,), (4096,))]
    with tilekern.trace(gpu="H200") as found:
        dyt(*leaves).sum().backward()
    target, problems = resolve("H200"), dict(found.problems)
    problem = problems["dyt_backward"]
    ways = (BACKWARD.device(problem, config) for config in BACKWARD.space.candidates(problem, target))
    grids = {way.grid(problem, target.sm_count) for way in ways}
    sums = {problem["rows"] for name, problem in found.problems if name == "dyt_sums"}
    assert sums == {bucket(groups_of(blocks, 4096)) for blocks in grids}
    assert len(sums) > 1


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
def test_empty_tensors_give_empty_ones(shape):
    leaves = given(torch.float32, shape=shape)
    y = dyt(*leaves)
    y.sum().backward()
    assert y.shape == leaves[0].grad.shape == shape
    assert leaves[2].grad.shape == shape[-1:]


def test_weights_of_several_dtypes_run_the_formula():
    x, alpha, gamma, beta = given(torch.bfloat16)
    y = dyt(x, alpha.detach().float(), gamma, beta)
    assert y.dtype == torch.float32
    y.sum().backward()
    assert gamma.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("sizes", "words"),
    [((2, 83, 83), r"alpha must be one number.* got \[2\]"), ((1, 82, 83), r"gamma must .*\[83\], got \[82\]"),
     ((1, 83, 82), r"beta must .*\[83\], got \[82\]")],
)  # fmt: skip
def test_weights_of_another_shape_are_refused(sizes, words):
    with pytest.raises(ValueError, match=words):
        dyt(torch.randn(2, 83), *map(torch.randn, sizes))
