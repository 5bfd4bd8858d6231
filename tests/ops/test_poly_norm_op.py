import pytest
import torch

import tilekern
from tilekern.kernels.poly_norm import reference_forward
from tilekern.ops import poly_norm

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BOUNDS = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def given(dtype, weight_dtype=None, shape=(3, 5, 83), bias_shape=()):
    generator = torch.Generator().manual_seed(0)
    shapes, dtypes = (shape, (3,), bias_shape), (dtype, *[weight_dtype or dtype] * 2)
    return [
        torch.randn(size, generator=generator).to(kind).requires_grad_()
        for size, kind in zip(shapes, dtypes, strict=True)
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_result_and_gradients_match_autograd_in_float64(dtype, weight_dtype):
    leaves = given(dtype, weight_dtype)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    y, expected = poly_norm(*leaves, 1e-3), reference_forward(*wide, 1e-3)["y"]
    assert y.dtype == torch.promote_types(dtype, weight_dtype)
    slope = torch.randn_like(y)
    gradients, references = torch.autograd.grad(y, leaves, slope), torch.autograd.grad(expected, wide, slope.double())
    for got, right in zip((y, *gradients), (expected, *references), strict=True):
        assert got.shape == right.shape
        assert (got.double() - right).norm() <= BOUNDS[got.dtype] * right.norm()


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
    def launches():
        return {name: counts.get("launches", 0) for name, counts in tilekern.stats().items()}

    leaves, before = given(torch.float32), launches()
    poly_norm(*leaves).sum().backward()
    more = {name: count - before.get(name, 0) for name, count in launches().items()}
    expected = {"poly_norm_forward": 1, "poly_norm_backward": 1, "column_sum": 1}
    assert {name: count for name, count in more.items() if count} == expected


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
    leaves = given(torch.float32)
    (first,) = torch.autograd.grad(poly_norm(*leaves).square().sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.sum().backward()


@pytest.mark.parametrize(
    ("weight", "bias", "words"),
    [((2,), (), r"weight must have the shape \[3\], got \[2\]"), ((3,), (2,), r"bias must be one number.* got \[2\]")],
)
def test_weights_of_another_shape_are_refused(weight, bias, words):
    with pytest.raises(ValueError, match=words):
        poly_norm(torch.randn(2, 83), torch.randn(weight), torch.randn(bias))
