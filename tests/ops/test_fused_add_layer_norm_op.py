import pytest
import torch
from op_samples import DTYPES, EPS, TOLERANCE, assert_near, launched_by

from tilekern.kernels.fused_add_layer_norm import reference_forward
from tilekern.ops.fused_add_layer_norm import fused_add_layer_norm


def given(dtype=torch.float32, weight_dtype=None, shape=(3, 5, 33)):
    generator = torch.Generator().manual_seed(0)
    shapes = (shape, shape, shape[-1:], shape[-1:])
    dtypes = (dtype, dtype, weight_dtype or dtype, weight_dtype or dtype)
    values = (torch.randn(size, generator=generator) for size in shapes)
    return [value.to(kind).requires_grad_() for value, kind in zip(values, dtypes, strict=True)]


def reference(*inputs):
    return list(reference_forward(*inputs, EPS).values())


def wide(inputs):
    return [x.detach().double().requires_grad_() for x in inputs]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_results_and_gradients_match_float64(dtype, weight_dtype):
    inputs = given(dtype, weight_dtype)
    results, exact = fused_add_layer_norm(*inputs, EPS), wide(inputs)
    assert (results[0].dtype, results[1].dtype) == (dtype, torch.promote_types(dtype, weight_dtype))
    expected = reference(*exact)
    slopes = [torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype) for y in results]
    gradients = torch.autograd.grad(results, inputs, slopes)
    references = torch.autograd.grad(expected, exact, [slope.double() for slope in slopes])
    for got, right in zip((*results, *gradients), (*expected, *references), strict=True):
        assert_near(got, right, max(TOLERANCE[dtype], TOLERANCE[weight_dtype]))
    for leaf, gradient in zip(inputs, gradients, strict=True):
        assert gradient.dtype == leaf.dtype


@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("kernel", [True, False])
def test_a_result_that_nothing_uses(used, kernel, monkeypatch):
    if not kernel:
        monkeypatch.setenv("TILEKERN_INTERPRET", "0")
    inputs = given(shape=(6, 12))
    exact = wide(inputs)
    gradients = torch.autograd.grad(fused_add_layer_norm(*inputs, EPS)[used].square().sum(), inputs, allow_unused=True)
    expected = torch.autograd.grad(reference(*exact)[used].square().sum(), exact, allow_unused=True)
    for got, other in zip(gradients, expected, strict=True):
        assert (got is None) == (other is None)
        if other is not None:
            assert_near(got, other, 1e-5)


def test_it_is_two_launches_and_the_sums():
    inputs = given()

    def step():
        sum(y.square().sum() for y in fused_add_layer_norm(*inputs)).backward()

    kernels = ("fused_add_layer_norm_forward", "fused_add_layer_norm_backward", "column_sum")
    assert launched_by(step) == dict.fromkeys(kernels, 1)


def test_a_norm_without_weight_or_bias_is_made_by_itself():
    residual, x, weight, _ = (value.detach() for value in given())
    total, y = fused_add_layer_norm(residual, x, weight, None)
    assert torch.equal(total, residual + x)
    torch.testing.assert_close(y, torch.nn.functional.layer_norm(total, (33,), weight))


def test_shapes_that_differ_are_refused():
    with pytest.raises(ValueError, match="residual and x must have one shape"):
        fused_add_layer_norm(torch.ones(1, 8), torch.ones(2, 8), torch.ones(8), torch.ones(8))
