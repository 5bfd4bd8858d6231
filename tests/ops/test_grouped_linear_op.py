"""grouped_linear as a user calls it: results, gradients, layouts of the weight, gathered rows, fallbacks, bad input."""

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from op_samples import DTYPES, LAYOUTS, TOLERANCE, assert_near, laid_out

from tilekern.ops.grouped_linear import _find, grouped_linear, grouped_outer
from tilekern.runtime import dispatch

SPECS = ("grouped_linear", "grouped_weight_gradient", "grouped_sum")


def reference(x, weight, offsets, bias=None, order=None, slots=1):
    """The loop over experts; zeros for rows of nobody."""
    rows = x if order is None else x[order.long() // slots]
    parts, begin = [], 0
    for expert, end in enumerate(offsets.tolist()):
        parts.append(
            torch.nn.functional.linear(rows[begin:end], weight[expert], None if bias is None else bias[expert])
        )
        begin = end
    return torch.cat([*parts, rows.new_zeros(len(rows) - begin, weight.shape[1])])


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


def check(x, weight, bias, offsets, order, *, slots=1, turned=False, dy_layout="contiguous"):
    leaves = [leaf for leaf in (x, weight, bias) if leaf is not None]
    seen = weight.transpose(1, 2) if turned else weight
    y = grouped_linear(x, seen, offsets, bias, order, slots)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    wide_weight = wide[1].transpose(1, 2) if turned else wide[1]
    expected = reference(wide[0], wide_weight, offsets, wide[2] if bias is not None else None, order, slots)
    slope = laid_out(torch.randn(y.shape).to(y.dtype), dy_layout)
    tolerance = TOLERANCE[x.dtype]
    assert y.dtype == x.dtype
    assert_near(y, expected, tolerance)
    found = torch.autograd.grad(y, leaves, slope)
    for leaf, gradient, right in zip(leaves, found, torch.autograd.grad(expected, wide, slope.double()), strict=True):
        assert gradient.dtype == leaf.dtype
        assert_near(gradient, right, tolerance)
    return y, found


@examples(40)
@given(data=st.data())
def test_results_and_gradients_match_float64(data):
    slots = data.draw(st.sampled_from([0, 1, 3]))
    counts = [max(1, slots) * n for n in data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))]
    counts[0] += 3
    turned = data.draw(st.booleans())
    dtype, layouts = (
        data.draw(st.sampled_from(DTYPES)),
        data.draw(st.lists(st.sampled_from(LAYOUTS), min_size=2, max_size=2)),
    )
    nobody = data.draw(st.sampled_from([0, 3]))
    sizes = (data.draw(st.integers(8, 70)), data.draw(st.integers(8, 70)))
    x, weight, *others = layer(
        counts, dtype, *sizes, nobody=nobody, slots=slots, biased=data.draw(st.booleans()), turned=turned
    )
    x, weight = (laid_out(leaf.detach(), how).requires_grad_() for leaf, how in zip((x, weight), layouts, strict=True))
    check(x, weight, *others, slots=max(1, slots), turned=turned, dy_layout=data.draw(st.sampled_from(LAYOUTS)))


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
    y, (_, dweight, _) = check(x, weight, bias, offsets, None, turned=True)
    assert fallbacks() == before
    assert dweight.is_contiguous()
    assert y.is_contiguous()


def test_experts_without_rows_have_gradients_of_zeros():
    _, (_, dweight, dbias) = check(*layer([0, 7, 0, 3, 0]))
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
        made.append(check(*layer([30, 0, 34], torch.bfloat16, slots=4), slots=4)[1])
    assert all(torch.equal(one, other) for one, other in zip(*made, strict=True))


@pytest.mark.parametrize("slots", [0, 2])
def test_what_no_kernel_serves_runs_by_torch_and_is_counted(slots):
    x, weight, bias, offsets, order = layer([4, 0, 6], torch.float64, slots=slots, nobody=2)
    begun, before = launched(), fallbacks()
    y = grouped_linear(x, weight, offsets, bias, order, max(1, slots))
    assert_near(y, reference(x, weight, offsets, bias, order, max(1, slots)), 1e-12)
    y.sum().backward()
    assert weight.grad is not None
    assert launched() == begun
    assert fallbacks() == before + 1
    empty = grouped_linear(torch.randn(0, 24), torch.randn(2, 5, 24), torch.zeros(2, dtype=torch.int32))
    assert empty.shape == (0, 5)


def test_products_of_more_elements_than_32_bits_index_are_left_to_torch():
    offsets = torch.zeros(2, dtype=torch.int32)
    given_to = (None, offsets, None, 1, False, True)
    x = torch.empty(1 << 16, 8)
    assert _find(False, x, torch.empty(2, 1 << 14, 8), *given_to) is not None
    assert _find(False, x, torch.empty(2, 1 << 15, 8), *given_to) is None


def test_autocast_casts_as_it_does_for_a_linear_layer():
    x, weight, bias, offsets, _ = layer([4, 0, 6])
    with torch.autocast("cpu", torch.bfloat16):
        y = grouped_linear(x, weight, offsets, bias)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert weight.grad.dtype == torch.float32


def test_the_outer_product_is_the_weight_s_gradient():
    x, weight, _, offsets, _ = layer([4, 0, 6], biased=False)
    y = grouped_linear(x, weight, offsets)
    dy = torch.randn_like(y)
    (dweight,) = torch.autograd.grad(y, weight, dy)
    assert torch.equal(grouped_outer(dy, x.detach(), offsets), dweight)
    wide = grouped_outer(dy.double(), x.detach().double(), offsets)
    torch.testing.assert_close(wide.float(), dweight, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("slots", [0, 2])
def test_torch_compile_traces_it_whole(slots, turned):
    torch._dynamo.reset()
    x, weight, bias, offsets, order = layer([4, 0, 6], slots=slots, turned=turned)

    def call(x, weight, bias):
        seen = weight.transpose(1, 2) if turned else weight
        return 2 * grouped_linear(x, seen, offsets, bias, order, max(1, slots))

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    slope = torch.randn(10, 19)
    expected = torch.autograd.grad(call(x, weight, bias), (x, weight, bias), slope)
    for one, other in zip(
        torch.autograd.grad(compiled(x, weight, bias), (x, weight, bias), slope), expected, strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_torch_compile_makes_no_gradient_that_nobody_asks_for():
    torch._dynamo.reset()
    x, weight, bias, offsets, _ = layer([4, 0, 6])
    compiled = torch.compile(grouped_linear, backend="aot_eager", fullgraph=True)
    begun = launched()
    (dx,) = torch.autograd.grad(compiled(x, weight.detach(), offsets, bias.detach()).sum(), x)
    assert [now - before for now, before in zip(launched(), begun, strict=True)] == [2, 0, 0]
    assert torch.equal(dx, torch.autograd.grad(grouped_linear(x, weight, offsets, bias).sum(), x)[0])


def test_the_registered_op_is_sound():
    x, weight, bias, offsets, order = layer([4, 0, 6], slots=2)
    torch.library.opcheck(torch.ops.tilekern.grouped_linear.default, (x, weight, bias, offsets, order, 2, False, True))
    torch.library.opcheck(torch.ops.tilekern.grouped_linear.default, (x, weight, None, offsets, order, 2, False, False))


SHAPES = {"x": (10, 24), "weight": (2, 5, 24), "offsets": (2,), "bias": (2, 5)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": (10,)}, r"x must have the shape \[rows, in_features\], got \[10\]"),
        ({"weight": (5, 24)}, r"weight must have the shape \[experts, out_features, 24\], got \[5, 24\]"),
        ({"weight": (2, 5, 23)}, r"weight must have the shape \[experts, out_features, 24\], got \[2, 5, 23\]"),
        ({"offsets": (3,)}, r"offsets must have the shape \[2\], got \[3\]"),
        ({"bias": (5,)}, r"bias must have the shape \[2, 5\], got \[5\]"),
        ({"order": (10,), "slots": 2}, r"order must have the shape \[10 tokens \* 2 slots\], got \[10\]"),
    ],
)
def test_bad_input_is_refused(changes, message):
    slots = changes.get("slots", 1)
    shapes = {name: shape for name, shape in (SHAPES | changes).items() if name != "slots"}
    given_to = {name: torch.zeros(shape) for name, shape in shapes.items() if name not in ("offsets", "order")}
    given_to |= {name: torch.arange(*shapes[name]) for name in ("offsets", "order") if name in shapes}
    with pytest.raises(ValueError, match=f"grouped_linear: {message}"):
        grouped_linear(**given_to, slots=slots)
