"""grouped_linear as a user calls it: results, gradients, layouts of the weight, gathered rows, fallbacks, bad input."""

import importlib

import contract
import pytest
import torch

from tilekern.ops.grouped_linear import _find, grouped_linear, grouped_outer
from tilekern.runtime import dispatch

linear = importlib.import_module("tilekern.ops.linear")
SPECS = ("grouped_linear", "grouped_weight_gradient", "grouped_sum")


def launched():
    return [dispatch.counters(name).launches for name in SPECS]


def fallbacks():
    return sum(dispatch.counters(name).fallbacks for name in SPECS)


def layer(counts, dtype=torch.float32, inner=24, columns=19, *, nobody=0, slots=0, biased=True, turned=False):
    """x, weight, bias (or None), offsets and order (or None); a turned weight is stored [experts, inner, columns]."""
    generator = torch.Generator().manual_seed(0)
    rows = sum(counts) + nobody

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    x = normal(rows // slots if slots else rows, inner)
    weight = normal(len(counts), inner, columns) if turned else normal(len(counts), columns, inner)
    bias = normal(len(counts), columns) if biased else None
    order = torch.randperm(rows, generator=generator).int() if slots else None
    return x, weight, bias, torch.tensor(counts).cumsum(0).int(), order


def check(x, weight, bias, offsets, order, slots=1):
    """The gradients of x, weight and bias, like the result held to those in float64."""
    given = {"x": x, "weight": weight, "bias": bias, "offsets": offsets, "order": order, "slots": slots}
    return contract.check(contract.CASES["grouped_linear"], given).values()


@pytest.mark.parametrize("slots", [0, 2])
def test_each_gradient_is_one_launch_and_only_those_that_are_wanted(slots):
    x, weight, bias, offsets, order = layer([4, 0, 6], slots=slots)
    begun = launched()

    def steps():
        return [now - before for now, before in zip(launched(), begun, strict=True)]

    grouped_linear(x, weight, offsets, bias, order, max(1, slots)).sum().backward()
    assert steps() == [2, 1, 1]
    grouped_linear(x, weight.detach(), offsets, bias.detach(), order, max(1, slots)).sum().backward()
    assert steps() == [4, 1, 1]
    grouped_linear(x.detach(), weight, offsets, None, order, max(1, slots)).sum().backward()
    assert steps() == [5, 2, 1]
    with torch.no_grad():
        grouped_linear(x, weight, offsets, bias, order, max(1, slots))
    assert steps() == [6, 2, 1]


def test_a_turned_weight_is_read_as_it_lies_and_its_gradient_lies_alike():
    x, weight, bias, offsets, _ = layer([4, 0, 6], turned=True)
    before = fallbacks()
    check(x, weight.transpose(1, 2), bias, offsets, None)
    y = grouped_linear(x, weight.transpose(1, 2), offsets, bias)
    assert fallbacks() == before
    assert torch.autograd.grad(y.sum(), weight)[0].is_contiguous()
    assert y.is_contiguous()


def test_experts_without_rows_have_gradients_of_zeros():
    _, dweight, dbias = check(*layer([0, 7, 0, 3, 0]))
    for expert in (0, 2, 4):
        assert not dweight[expert].any()
        assert not dbias[expert].any()


def test_rows_of_nobody_are_zeros_or_left_alone():
    x, weight, bias, offsets, _ = layer([3, 2], nobody=4)
    y = grouped_linear(x, weight, offsets, bias)
    assert not y[5:].any()
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert not dx[5:].any()
    left = grouped_linear(x, weight, offsets, bias, partial=False)
    assert torch.equal(left[:5], y[:5])


def test_two_steps_give_the_same_bits():
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(check(*layer([30, 0, 34], torch.bfloat16, slots=4), slots=4))
    assert all(torch.equal(one, other) for one, other in zip(*made, strict=True))


def test_products_of_more_elements_than_32_bits_index_are_left_to_torch():
    offsets = torch.zeros(2, dtype=torch.int32)
    given_to = (None, offsets, None, 1, False, True)
    x = torch.empty(1 << 16, 8)
    assert _find(False, x, torch.empty(2, 1 << 14, 8), *given_to) is not None
    assert _find(False, x, torch.empty(2, 1 << 15, 8), *given_to) is None
    assert linear._find(False, x, torch.empty(1 << 14, 8), None, None) is not None
    assert linear._find(False, x, torch.empty(1 << 15, 8), None, None) is None


def test_the_outer_product_is_the_weight_s_gradient():
    x, weight, _, offsets, _ = layer([4, 0, 6], biased=False)
    y = grouped_linear(x, weight, offsets)
    dy = torch.randn_like(y)
    (dweight,) = torch.autograd.grad(y, weight, dy)
    assert torch.equal(grouped_outer(dy, x.detach(), offsets), dweight)
    wide = grouped_outer(dy.double(), x.detach().double(), offsets)
    torch.testing.assert_close(wide.float(), dweight, rtol=1e-5, atol=1e-5)


def test_torch_compile_makes_no_gradient_that_nobody_asks_for():
    torch._dynamo.reset()
    x, weight, bias, offsets, _ = layer([4, 0, 6])
    compiled = torch.compile(grouped_linear, backend="aot_eager", fullgraph=True)
    begun = launched()
    (dx,) = torch.autograd.grad(compiled(x, weight.detach(), offsets, bias.detach()).sum(), x)
    assert [now - before for now, before in zip(launched(), begun, strict=True)] == [2, 0, 0]
    assert torch.equal(dx, torch.autograd.grad(grouped_linear(x, weight, offsets, bias).sum(), x)[0])
