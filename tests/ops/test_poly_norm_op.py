import pytest
import torch
from op_samples import DTYPES, assert_as_in_float64, assert_differentiable_once, launched_by, leaves_of

from tilekern.kernels.poly_norm import reference_forward
from tilekern.ops import poly_norm


def given(dtype, weight_dtype=None, shape=(3, 5, 83), bias_shape=()):
    return leaves_of((shape, (3,), bias_shape), (dtype, *[weight_dtype or dtype] * 2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_result_and_gradients_match_autograd_in_float64(dtype, weight_dtype):
    assert_as_in_float64(
        lambda *leaves: poly_norm(*leaves, 1e-3), lambda *wide: reference_forward(*wide, 1e-3)["y"],
        given(dtype, weight_dtype),
    )  # fmt: skip


@pytest.mark.parametrize("in_place", [True, False])
def test_the_gradient_that_comes_in_is_left_as_it_is(in_place):
    leaves = given(torch.float32)
    y = poly_norm(*leaves, 1e-6, in_place)
    slope = torch.randn_like(y)
    before = slope.clone()
    y.backward(slope)
    assert torch.equal(slope, before)


def test_a_bias_of_one_element_gets_a_gradient_of_its_shape():
    leaves = given(torch.float32, bias_shape=(1,))
    poly_norm(*leaves).sum().backward()
    torch.testing.assert_close(leaves[2].grad, torch.tensor([15.0 * 83]))


def test_each_way_is_one_launch_and_all_sums_another():
    launched = launched_by(lambda: poly_norm(*given(torch.float32)).sum().backward())
    assert launched == {"poly_norm_forward": 1, "poly_norm_backward": 1, "column_sum": 1}


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
def test_empty_tensors_give_empty_ones(shape):
    leaves = given(torch.float32, shape=shape)
    y = poly_norm(*leaves)
    y.sum().backward()
    assert y.shape == leaves[0].grad.shape == shape
    assert torch.equal(leaves[1].grad, torch.zeros(3))


def test_a_bias_of_another_dtype_than_the_weight_runs_the_formula():
    x, weight, bias = given(torch.bfloat16)
    y = poly_norm(x, weight, bias.detach().float())
    assert y.dtype == torch.float32
    y.sum().backward()
    assert weight.grad.dtype == torch.bfloat16


def test_a_gradient_of_the_gradient_is_refused():
    assert_differentiable_once(poly_norm, given(torch.float32))


@pytest.mark.parametrize(
    ("weight", "bias", "words"),
    [((2,), (), r"weight must have the shape \[3\], got \[2\]"), ((3,), (2,), r"bias must be one number.* got \[2\]")],
)
def test_weights_of_another_shape_are_refused(weight, bias, words):
    with pytest.raises(ValueError, match=words):
        poly_norm(torch.randn(2, 83), torch.randn(weight), torch.randn(bias))
