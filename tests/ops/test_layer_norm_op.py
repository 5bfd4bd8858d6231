import pytest
import torch
from op_samples import launched_by

from tilekern.ops.layer_norm import layer_norm

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def given(dtype, weight_dtype=None, shape=(3, 5, 83)):
    x = torch.randn(shape, dtype=torch.float32).to(dtype).requires_grad_()
    weight, bias = (torch.randn(shape[-1]).to(weight_dtype or dtype).requires_grad_() for _ in range(2))
    return x, weight, bias


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_result_and_gradients_match_autograd_in_float64(dtype, weight_dtype):
    leaves = given(dtype, weight_dtype)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    expected = torch.nn.functional.layer_norm(wide[0], wide[0].shape[-1:], *wide[1:], 1e-3)
    y = layer_norm(*leaves, 1e-3)
    assert y.dtype == torch.promote_types(dtype, weight_dtype)
    slope = torch.randn_like(y)
    gradients = torch.autograd.grad(y, leaves, slope)
    references = torch.autograd.grad(expected, wide, slope.double())
    for got, reference in zip((y, *gradients), (expected, *references), strict=True):
        error = (got.double() - reference).norm() / reference.norm()
        assert error < {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[got.dtype]


def test_both_sums_are_one_launch():
    launched = launched_by(lambda: layer_norm(*given(torch.float32)).sum().backward())
    assert launched == {"layer_norm_forward": 1, "layer_norm_backward": 1, "column_sum": 1}


def test_it_is_the_layer_norm_of_torch_to_the_last_bits():
    x, weight, bias = (tensor.detach() for tensor in given(torch.float32))
    expected = torch.nn.functional.layer_norm(x, (83,), weight, bias)
    torch.testing.assert_close(layer_norm(x, weight, bias), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (2, 3, 0), (0,)], ids=str)
def test_no_rows_and_no_columns_give_results_and_gradients_of_their_shapes(shape):
    leaves = given(torch.float32, shape=shape)
    y = layer_norm(*leaves)
    assert y.shape == shape
    y.sum().backward()
    assert [x.grad.shape for x in leaves] == [x.shape for x in leaves]
    assert not any(x.grad.any() for x in leaves)


def test_a_bias_of_another_dtype_than_the_weight_runs_the_formula():
    x, weight, bias = given(torch.bfloat16)
    y = layer_norm(x, weight, bias.detach().float())
    assert y.dtype == torch.float32
    y.sum().backward()
    assert weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(("weight", "bias"), [(82, 83), (83, 82)])
def test_weights_of_another_length_are_refused(weight, bias):
    with pytest.raises(ValueError, match=r"must have the shape \[83\], got \[82\]"):
        layer_norm(torch.randn(2, 83), torch.randn(weight), torch.randn(bias))
