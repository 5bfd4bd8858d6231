"""gated_mlp as a model uses it: results and gradients, what it keeps, frozen weights, the paths it leaves to others."""

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from op_samples import APART, DTYPES, assert_like_float64, assert_near, laid_out

from tilekern.ops import gated_mlp
from tilekern.runtime.dispatch import counters

linear, silu = torch.nn.functional.linear, torch.nn.functional.silu
REMAKE, FORWARD = "swiglu_backward_remake", "swiglu_forward"


def reference(x, gate, up, down):
    return linear(silu(linear(x, gate)) * linear(x, up), down)


def leaves(dtype=torch.float32, leading=(2, 5), hidden=24, intermediate=37, layouts=("contiguous",)):
    generator = torch.Generator().manual_seed(0)
    shapes = [(*leading, hidden), (intermediate, hidden), (intermediate, hidden), (hidden, intermediate)]
    found = []
    for number, shape in enumerate(shapes):
        values = (torch.randn(shape, generator=generator) / (shape[-1] ** 0.5 if number else 1)).to(dtype)
        found.append(laid_out(values, layouts[number % len(layouts)]).detach().requires_grad_())
    return found


def check(inputs, layout="contiguous"):
    (y,) = assert_like_float64(
        lambda *inputs: (gated_mlp(*inputs),), lambda *wide: (reference(*wide),), inputs, layout, (2, 3)
    )
    assert y.dtype == inputs[0].dtype


@examples(40)
@given(data=st.data())
def test_results_and_gradients_match_float64(data):
    inputs = leaves(
        data.draw(st.sampled_from(DTYPES)),
        data.draw(st.sampled_from([(1,), (7,), (2, 5), (3, 1, 4)])),
        data.draw(st.integers(8, 80)),
        data.draw(st.integers(8, 80)),
        data.draw(st.lists(st.sampled_from(APART), min_size=2, max_size=4)),
    )
    before = counters(REMAKE).launches, counters(FORWARD).launches
    check(inputs, data.draw(st.sampled_from(APART)))
    assert (counters(REMAKE).launches, counters(FORWARD).launches) == (before[0] + 1, before[1] + 1)


def test_a_single_token_without_leading_dimensions():
    check(leaves(leading=()))


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (3,), (1, 2, 3), (0, 1, 2), (0, 3)], ids=str)
def test_frozen_inputs_get_no_gradient(frozen):
    inputs = leaves()
    for number in frozen:
        inputs[number].requires_grad_(False)
    check(inputs)
    assert all(inputs[number].grad is None for number in frozen)


def test_it_keeps_its_input_gate_and_up_and_no_third_matrix():
    inputs = leaves()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        y = gated_mlp(*inputs)
    assert sorted(tuple(x.shape) for x in kept) == sorted(
        [(2, 5, 24), (10, 37), (10, 37), *(tuple(x.shape) for x in inputs[1:])]
    )
    assert y.requires_grad


def test_no_grad_keeps_nothing_and_gives_the_same():
    inputs = leaves()
    wanted, before = gated_mlp(*inputs).detach(), counters(FORWARD).launches
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = gated_mlp(*inputs)
        assert not y.requires_grad
        torch.testing.assert_close(y, wanted)
    assert counters(FORWARD).launches == before + 2


def test_autocast_takes_the_plain_path():
    inputs = leaves()
    before = counters(REMAKE).launches
    with torch.autocast("cpu", torch.bfloat16):
        y, wanted = gated_mlp(*inputs), reference(*inputs)
    assert y.dtype == wanted.dtype == torch.bfloat16
    assert_near(y, wanted, 1e-2)
    got = torch.autograd.grad(y.float().sum(), inputs)
    for a, b in zip(got, torch.autograd.grad(wanted.float().sum(), inputs), strict=True):
        assert_near(a, b, 3e-2)
    assert counters(REMAKE).launches == before


@pytest.mark.filterwarnings("ignore::tilekern.errors.TilekernWarning")
def test_what_no_kernel_serves_runs_torch_s_own_operations_and_counts():
    before = counters(FORWARD).fallbacks, counters(REMAKE).launches
    inputs = leaves(torch.float64)
    y = gated_mlp(*inputs)
    assert_near(y, reference(*inputs), 1e-12)
    y.sum().backward()
    empty = leaves(leading=(0,))
    gated_mlp(*empty).sum().backward()
    assert not any(x.grad.any() for x in empty)
    assert (counters(FORWARD).fallbacks, counters(REMAKE).launches) == (before[0] + 2, before[1])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_and_a_kept_graph_give_the_same_gradients(use_reentrant):
    from torch.utils.checkpoint import checkpoint

    inputs = leaves()
    loss = gated_mlp(*inputs).square().sum()
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    again = torch.autograd.grad(loss, inputs)
    checkpoint(gated_mlp, *inputs, use_reentrant=use_reentrant).square().sum().backward()
    for found in (again, [x.grad for x in inputs]):
        assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True))


def test_one_mlp_twice_in_a_graph():
    inputs = leaves()
    got = torch.autograd.grad(gated_mlp(gated_mlp(*inputs), *inputs[1:]).square().sum(), inputs)
    wanted = torch.autograd.grad(reference(reference(*inputs), *inputs[1:]).square().sum(), inputs)
    for a, b in zip(got, wanted, strict=True):
        assert_near(a, b, 1e-5)


def test_an_input_that_is_changed_before_the_backward_is_noticed():
    x, *weights = leaves()
    hidden = x * 1
    y = gated_mlp(hidden, *weights)
    hidden.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_second_derivatives_are_refused():
    inputs = leaves()
    gradients = torch.autograd.grad(gated_mlp(*inputs).square().sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        sum(g.square().sum() for g in gradients).backward()


def test_torch_compile_traces_it_whole():
    torch._dynamo.reset()
    inputs = leaves()
    compiled = torch.compile(gated_mlp, backend="aot_eager", fullgraph=True)
    got = torch.autograd.grad(compiled(*inputs).square().sum(), inputs)
    for a, b in zip(got, torch.autograd.grad(gated_mlp(*inputs).square().sum(), inputs), strict=True):
        assert_near(a, b, 1e-5)


@pytest.mark.parametrize("rows", [30, 44])
def test_weights_of_two_shapes_are_refused(rows):
    x, gate, _, down = leaves()
    up = torch.ones(rows, 24, requires_grad=True)
    with pytest.raises(ValueError, match=rf"gate_weight and up_weight must have one shape, got .* and \[{rows}, 24\]"):
        gated_mlp(x, gate, up, down)
