import pytest
import torch
from op_samples import ONCE, launched_by

from tilekern.ops import group_norm

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def given(dtype, weight_dtype=None, shape=(2, 12, 5, 7)):
    generator = torch.Generator().manual_seed(0)
    shapes, dtypes = (shape, shape[1:2], shape[1:2]), (dtype, *[weight_dtype or dtype] * 2)
    return [
        torch.randn(size, generator=generator).to(kind).requires_grad_()
        for size, kind in zip(shapes, dtypes, strict=True)
    ]


def compare(leaves, groups, eps=1e-3):
    wide = [x.detach().double().requires_grad_() for x in leaves]
    expected = torch.nn.functional.group_norm(wide[0], groups, *wide[1:], eps)
    y = group_norm(*leaves, leaves[0].shape[1], groups, eps)
    slope = torch.randn_like(y)
    gradients, references = torch.autograd.grad(y, leaves, slope), torch.autograd.grad(expected, wide, slope.double())
    for got, right in zip((y, *gradients), (expected, *references), strict=True):
        assert got.shape == right.shape
        assert (got.double() - right).norm() <= ONCE[got.dtype] * right.norm()
    return y


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_result_and_gradients_match_autograd_in_float64(dtype, weight_dtype):
    assert compare(given(dtype, weight_dtype), 4).dtype == torch.promote_types(dtype, weight_dtype)


@pytest.mark.parametrize("groups", [1, 3, 12])
@pytest.mark.parametrize("shape", [(3, 12, 9), (1, 12, 2, 3, 5), (2, 12, 1, 4)])
def test_any_number_of_groups_and_of_dimensions(groups, shape):
    compare(given(torch.float32, shape=shape), groups)


def test_channels_that_are_last_in_memory():
    x, weight, bias = given(torch.float32)
    spread = x.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    assert compare([spread, weight, bias], 4).is_contiguous()


def test_each_way_is_one_launch_and_both_sums_another():
    launched = launched_by(lambda: group_norm(*given(torch.float32), 12, 4).sum().backward())
    assert launched == {"group_norm_forward": 1, "group_norm_backward": 1, "column_sum": 1}


@pytest.mark.parametrize("shape", [(0, 12, 5), (2, 12, 0)])
def test_empty_tensors_give_empty_ones(shape):
    leaves = given(torch.float32, shape=shape)
    y = group_norm(*leaves, 12, 4)
    y.sum().backward()
    assert y.shape == leaves[0].grad.shape == shape
    assert torch.equal(leaves[1].grad, torch.zeros(12))


def test_a_bias_of_another_dtype_than_the_weight_runs_the_formula():
    x, weight, bias = given(torch.bfloat16)
    y = group_norm(x, weight, bias.detach().float(), 12, 4)
    assert y.dtype == torch.float32
    y.sum().backward()
    assert weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("shape", "channels", "groups", "words"),
    [((2, 12), 12, 4, r"x must have the shape \[batch, 12, ...\], got \[2, 12\]"),
     ((2, 12, 5), 11, 4, r"x must have the shape \[batch, 11, ...\], got \[2, 12, 5\]"),
     ((2, 12, 5), 12, 5, "num_groups must divide the 12 channels, got 5")],
)  # fmt: skip
def test_shapes_that_do_not_go_together_are_refused(shape, channels, groups, words):
    x, weight, bias = given(torch.float32, shape=shape)
    with pytest.raises(ValueError, match=words):
        group_norm(x, weight, bias, channels, groups)
    with pytest.raises(ValueError, match=r"weight must have the shape \[12\], got \[11\]"):
        group_norm(torch.randn(2, 12, 5), weight[1:], bias, 12, 4)
