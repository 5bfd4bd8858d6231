import pytest
import torch

from tilekern.ops.geglu import geglu

forms = pytest.mark.parametrize("tanh", [False, True])


@forms
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_result_and_gradients_match_autograd_in_float64(dtype, tanh):
    leaves = [torch.randn(3, 5, 83).to(dtype).requires_grad_() for _ in range(2)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    expected = torch.nn.functional.gelu(wide[0], approximate="tanh" if tanh else "none") * wide[1]
    y = geglu(*leaves, tanh)
    slope = torch.randn_like(y)
    gradients = torch.autograd.grad(y, leaves, slope)
    references = torch.autograd.grad(expected, wide, slope.double())
    for got, reference in zip((y, *gradients), (expected, *references), strict=True):
        error = (got.double() - reference).norm() / reference.norm()
        assert error < {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]


@forms
def test_the_formula_is_of_the_same_form(tanh):
    gate, up = (torch.randn(4, 9, dtype=torch.float64) for _ in range(2))
    expected = torch.nn.functional.gelu(gate, approximate="tanh" if tanh else "none") * up
    torch.testing.assert_close(geglu(gate, up, tanh), expected)


@forms
@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (2, 3, 0), (0,)], ids=str)
def test_no_rows_and_no_columns_give_results_and_gradients_of_their_shapes(shape, tanh):
    gate, up = (torch.randn(shape, requires_grad=True) for _ in range(2))
    y = geglu(gate, up, tanh)
    assert y.shape == shape
    y.sum().backward()
    assert gate.grad.shape == up.grad.shape == shape


def test_shapes_that_differ_raise():
    with pytest.raises(ValueError, match="gate and up must have one shape"):
        geglu(torch.randn(2, 3), torch.randn(3))
