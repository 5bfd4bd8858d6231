"""projections: linear layers that share their input, against torch's."""

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from op_samples import APART, DTYPES, TOLERANCE, assert_near, laid_out

from tilekern.ops import projections

linear = torch.nn.functional.linear


def leaves(dtype=torch.float32, leading=(2, 5), features=24, outs=(19, 8, 8), layouts=("contiguous",)):
    generator = torch.Generator().manual_seed(0)
    found = []
    for number, shape in enumerate([(*leading, features), *((out, features) for out in outs)]):
        values = torch.randn(shape, generator=generator).to(dtype)
        found.append(laid_out(values, layouts[number % len(layouts)]).detach().requires_grad_())
    return found


def check(inputs, layout="contiguous"):
    dtype = inputs[0].dtype
    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    results, expected = projections(*inputs), [linear(wide[0], weight) for weight in wide[1:]]
    assert isinstance(results, tuple)
    graded = [n for n, x in enumerate(inputs) if x.requires_grad]
    used = [n for n, y in enumerate(results) if y.requires_grad]
    generator = torch.Generator().manual_seed(1)
    slopes = [laid_out(torch.randn(results[n].shape, generator=generator).to(dtype), layout) for n in used]
    got = torch.autograd.grad([results[n] for n in used], [inputs[n] for n in graded], slopes, allow_unused=True)
    kept = [n for n in used if expected[n].requires_grad]
    wanted = torch.autograd.grad(
        [expected[n] for n in kept], [wide[n] for n in graded], [slopes[used.index(n)].double() for n in kept]
    )
    for y, reference in zip(results, expected, strict=True):
        assert y.dtype == dtype
        assert_near(y, reference, TOLERANCE[dtype])
    for n, gradient, reference in zip(graded, got, wanted, strict=True):
        assert gradient.dtype == inputs[n].dtype
        assert_near(gradient, reference, 2 * TOLERANCE[dtype])


@examples(40)
@given(data=st.data())
def test_results_and_gradients_match_float64(data):
    inputs = leaves(
        data.draw(st.sampled_from(DTYPES)),
        data.draw(st.sampled_from([(), (1,), (7,), (2, 5), (0,), (3, 1, 4)])),
        data.draw(st.integers(8, 80)),
        data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4)),
        data.draw(st.lists(st.sampled_from(APART), min_size=2, max_size=3)),
    )
    check(inputs, data.draw(st.sampled_from(APART)))


@pytest.mark.parametrize("frozen", [(0,), (1,), (2, 3), (1, 2, 3), (0, 2)], ids=str)
def test_frozen_inputs_get_no_gradient(frozen):
    inputs = leaves()
    for number in frozen:
        inputs[number].requires_grad_(False)
    check(inputs)
    assert all(inputs[number].grad is None for number in frozen)


def test_results_that_are_not_used_add_nothing():
    x, *weights = leaves()
    _, middle, _ = projections(x, *weights)
    dx, *dweights = torch.autograd.grad(middle.sum(), (x, *weights))
    assert_near(dx, weights[1].sum(0).expand_as(x), 1e-5)
    assert not dweights[0].any()
    assert not dweights[2].any()
    assert dweights[1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_input_s_gradient_is_no_memory_of_another(dtype):
    x, weight = leaves(dtype, outs=(24,))
    (y,) = projections(x, weight)
    slope = torch.randn_like(y)
    kept = slope.clone()
    torch.autograd.grad(y, (x, weight), slope)
    assert torch.equal(slope, kept)


def test_no_grad_keeps_nothing():
    inputs = leaves()
    wanted = [y.detach() for y in projections(*inputs)]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            results = projections(*inputs)
        assert all(torch.equal(a, b) and not a.requires_grad for a, b in zip(results, wanted, strict=True))


def test_autocast_and_mixed_dtypes_take_torch_s_path():
    x, *weights = leaves()
    with torch.autocast("cpu", torch.bfloat16):
        results = projections(x, *weights)
        wanted = [linear(x, weight) for weight in weights]
    assert all(torch.equal(a, b) and a.dtype == torch.bfloat16 for a, b in zip(results, wanted, strict=True))
    assert all("Projections" not in type(y.grad_fn).__name__ for y in results)
    with pytest.raises(RuntimeError, match="dtype"):
        projections(x, weights[0], weights[1].bfloat16())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_and_a_kept_graph_give_the_same_gradients(use_reentrant):
    from torch.utils.checkpoint import checkpoint

    def total(*inputs):
        return sum(y.square().sum() for y in projections(*inputs))

    inputs = leaves()
    loss = total(*inputs)
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    again = torch.autograd.grad(loss, inputs)
    checkpoint(total, *inputs, use_reentrant=use_reentrant).backward()
    for found in (again, [x.grad for x in inputs]):
        assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True))


def test_second_derivatives_are_refused():
    inputs = leaves()
    loss = sum(y.square().sum() for y in projections(*inputs))
    gradients = torch.autograd.grad(loss, inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        sum(g.square().sum() for g in gradients).backward()


def test_torch_compile_traces_it_whole():
    torch._dynamo.reset()
    inputs = leaves()
    compiled = torch.compile(projections, backend="aot_eager", fullgraph=True)
    got = torch.autograd.grad([y.square().sum() for y in compiled(*inputs)], inputs)
    wanted = torch.autograd.grad([y.square().sum() for y in projections(*inputs)], inputs)
    for a, b in zip(got, wanted, strict=True):
        assert_near(a, b, 1e-5)
