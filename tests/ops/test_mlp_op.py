"""mlp as a model uses it: results and gradients, what it keeps, layouts of weights, the paths it leaves to others."""

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from op_samples import (
    APART,
    DTYPES,
    assert_differentiable_once,
    assert_like_float64,
    assert_near,
    laid_out,
    launched_by,
)
from test_activation_op import REFERENCES

from tilekern.ops import activation, mlp
from tilekern.ops.activation import CURVES

FORWARD, BACKWARD, REMAKE = "activation_forward", "activation_backward", "activation_backward_remake"
linear = torch.nn.functional.linear


def reference(x, up, up_bias, down, down_bias, kind="gelu"):
    return linear(REFERENCES[kind](linear(x, up, up_bias)), down, down_bias)


def leaves(dtype=torch.float32, leading=(2, 5), layouts=("contiguous",), biased=(True, True)):
    generator, hidden, columns, out = torch.Generator().manual_seed(0), 24, 37, 19
    shapes = [(*leading, hidden), (columns, hidden), (columns,), (out, columns), (out,)]
    found = []
    for number, shape in enumerate(shapes):
        if number in (2, 4) and not biased[number // 2 - 1]:
            found.append(None)
            continue
        values = (torch.randn(shape, generator=generator) / (shape[-1] ** 0.5 if len(shape) == 2 else 1)).to(dtype)
        layout = layouts[number % len(layouts)] if len(shape) > 1 else "contiguous"
        found.append(laid_out(values, layout).detach().requires_grad_())
    return found


def check(inputs, kind="gelu"):
    (y,) = assert_like_float64(
        lambda *inputs: (mlp(*inputs, kind),), lambda *wide: (reference(*wide, kind),), inputs, factors=(2, 3)
    )
    assert y.dtype == inputs[0].dtype


@examples(30)
@given(data=st.data())
def test_results_and_gradients_match_float64(data):
    inputs = leaves(
        data.draw(st.sampled_from(DTYPES)),
        data.draw(st.sampled_from([(1,), (7,), (2, 5), (3, 1, 4)])),
        data.draw(st.lists(st.sampled_from(APART), min_size=2, max_size=4)),
        data.draw(st.tuples(st.booleans(), st.booleans())),
    )
    kind = data.draw(st.sampled_from(list(CURVES)))
    assert launched_by(lambda: check(inputs, kind)).items() >= {FORWARD: 1, REMAKE: 1}.items()


@pytest.mark.parametrize("frozen", [(0,), (1, 2, 3, 4), (2, 3), (0, 1, 3), (2, 4)], ids=str)
def test_frozen_inputs_get_no_gradient(frozen):
    inputs = leaves()
    for number in frozen:
        inputs[number].requires_grad_(False)
    # Where neither the second weight nor the first bias learns, nothing is made again and nothing added up.
    backward = BACKWARD if {2, 3} <= set(frozen) else REMAKE
    launched = launched_by(lambda: check(inputs))
    assert launched == {FORWARD: 1, backward: 1, **({} if 2 in frozen else {"column_sum": 1})}


def test_a_gradient_has_the_layout_of_its_weight():
    """Of a weight that is stored transposed, autograd would copy another gradient."""
    x, up, up_bias, down, down_bias = leaves()
    up, down = (weight.detach().t().contiguous().requires_grad_() for weight in (up, down))
    mlp(x, up.t(), up_bias, down.t(), down_bias).sum().backward()
    assert up.grad.stride() == up.stride()
    assert down.grad.stride() == down.stride()
    check([x, up.detach().t().requires_grad_(), up_bias, down.detach().t().requires_grad_(), down_bias])


def test_it_keeps_its_input_and_one_matrix_more():
    inputs, kept = leaves(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        mlp(*inputs)
    assert sorted(tuple(x.shape) for x in kept) == [(2, 5, 24), (10, 37), (19, 37), (37, 24)]


def test_no_grad_keeps_nothing_and_gives_the_same():
    inputs = leaves()
    wanted = mlp(*inputs).detach()
    with torch.no_grad():
        assert launched_by(lambda: torch.testing.assert_close(mlp(*inputs), wanted)) == {FORWARD: 1}


def test_autocast_takes_the_plain_path():
    inputs = leaves()
    with torch.autocast("cpu", torch.bfloat16):
        y, wanted = mlp(*inputs), reference(*inputs)
    assert y.dtype == wanted.dtype == torch.bfloat16
    assert_near(y, wanted, 1e-2)
    for a, b in zip(*(torch.autograd.grad(z.float().sum(), inputs) for z in (y, wanted)), strict=True):
        assert_near(a, b, 3e-2)


@pytest.mark.filterwarnings("ignore::tilekern.errors.TilekernWarning")
@pytest.mark.parametrize("kind", CURVES)
def test_what_no_kernel_serves_runs_torch_s_own_operations(kind):
    inputs = leaves(torch.float64)
    found = []
    assert launched_by(lambda: found.append(mlp(*inputs, kind))) == {}
    assert_near(found[0], reference(*inputs, kind), 1e-12)
    empty = leaves(leading=(0,))
    mlp(*empty, kind).sum().backward()
    assert not any(x.grad.any() for x in empty[:4])


def test_checkpointing_gives_the_same_gradients():
    inputs = leaves()
    first = torch.autograd.grad(mlp(*inputs).square().sum(), inputs)
    torch.utils.checkpoint.checkpoint(mlp, *inputs, use_reentrant=False).square().sum().backward()
    assert all(torch.equal(a, x.grad) for a, x in zip(first, inputs, strict=True))


def test_second_derivatives_are_refused():
    assert_differentiable_once(mlp, leaves())


def test_torch_compile_traces_it_whole():
    torch._dynamo.reset()
    inputs = leaves()
    compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)
    got = torch.autograd.grad(compiled(*inputs, "gelu_tanh").square().sum(), inputs)
    wanted = torch.autograd.grad(mlp(*inputs, "gelu_tanh").square().sum(), inputs)
    for a, b in zip(got, wanted, strict=True):
        assert_near(a, b, 1e-5)


def test_an_activation_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match=r"mlp: the activation must be one of gelu, .*, relu2, got 'mish'"):
        mlp(*leaves(), "mish")
    with pytest.raises(ValueError, match="activation: the activation must be"):
        activation(torch.ones(1, 8), "mish")
