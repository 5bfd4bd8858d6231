"""MLPs and projections: what they keep and launch, and the paths that they leave to others."""

import formulas
import pytest
import torch
from contract import CASES, Drawn, leaves
from op_samples import assert_near, launched_by
from tolerances import CAST, REORDERED

from tilekern.ops import gated_mlp, mlp, projections, tiled_swiglu
from tilekern.runtime.dispatch import counters

FORWARD, BACKWARD, REMAKE = "activation_forward", "activation_backward", "activation_backward_remake"
tiled = pytest.mark.parametrize("name", ["tiled_swiglu", "tiled_geglu"])


def usual(name):
    """The arguments of a case, of (2, 3) tokens, sizes 24 and 37."""
    return CASES[name].given(Drawn())


KEPT = {
    "gated_mlp": [(2, 3, 24), (6, 37), (6, 37), (24, 37), (37, 24), (37, 24)],
    "mlp": [(2, 3, 24), (6, 37), (24, 37), (37, 24)],
}


@pytest.mark.parametrize("name", KEPT)
def test_a_layer_keeps_its_input_and_what_went_into_the_activation(name):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(tuple(x.shape)) or x, lambda x: x):
        CASES[name].run(usual(name))
    assert sorted(kept) == KEPT[name]


@tiled
def test_a_tiled_layer_keeps_nothing_of_the_size_of_the_activations(name):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        (y,) = CASES[name].run(usual(name))
    assert y.requires_grad
    assert all(x.shape[-1] == 24 for x in kept), [tuple(x.shape) for x in kept]


@pytest.mark.parametrize("frozen", [(0,), (1, 2, 3, 4), (2, 3), (0, 1, 3), (2, 4)], ids=str)
def test_what_is_made_again_and_added_up_hangs_on_what_learns(frozen):
    inputs = [x for x in usual("mlp").values() if isinstance(x, torch.Tensor)]
    for number in frozen:
        inputs[number].requires_grad_(False)
    # Where neither the second weight nor the first bias learns, nothing is made again and nothing added up.
    backward = BACKWARD if {2, 3} <= set(frozen) else REMAKE
    launched = launched_by(lambda: mlp(*inputs).sum().backward())
    assert launched == {FORWARD: 1, backward: 1, **({} if 2 in frozen else {"column_sum": 1})}


def test_a_gradient_has_the_layout_of_its_weight():
    """Autograd would copy a gradient of another layout than that of a weight stored transposed."""
    x, up, up_bias, down, down_bias, _ = usual("mlp").values()
    wanted = torch.autograd.grad(mlp(x, up, up_bias, down, down_bias).sum(), (up, down))
    up, down = (weight.detach().t().contiguous().requires_grad_() for weight in (up, down))
    found = torch.autograd.grad(mlp(x, up.t(), up_bias, down.t(), down_bias).sum(), (up, down))
    for weight, gradient, right in zip((up, down), found, wanted, strict=True):
        assert gradient.stride() == weight.stride()
        assert_near(gradient.t(), right, REORDERED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_input_s_gradient_is_no_memory_of_another(dtype):
    x, weight = torch.randn(6, 24, dtype=dtype).requires_grad_(), torch.randn(24, 24, dtype=dtype).requires_grad_()
    (y,) = projections(x, weight)
    slope = torch.randn_like(y)
    before = slope.clone()
    torch.autograd.grad(y, (x, weight), slope)
    assert torch.equal(slope, before)


def test_dtypes_that_a_linear_layer_refuses_are_refused():
    x, weight, *_ = usual("projections").values()
    with pytest.raises(RuntimeError, match="dtype"):
        projections(x, weight, weight.bfloat16())


@pytest.mark.parametrize(("tokens", "shards"), [(24, 1), (25, 2), (49, 3)])
def test_there_are_as_many_shards_as_a_sequence_is_longer_than_a_token(tokens, shards):
    _, *weights = list(usual("tiled_swiglu").values())[:4]
    before = counters("swiglu_forward").launches
    with torch.no_grad():
        tiled_swiglu(torch.randn(2, tokens, 24), *weights)
    assert counters("swiglu_forward").launches == before + shards


@tiled
def test_hooks_of_parameters_see_one_gradient_of_all_shards(name):
    given, seen = usual(name), []
    weights = list(leaves(given).values())[1:]
    for weight in weights:
        weight.register_post_accumulate_grad_hook(seen.append)
    CASES[name].run(given)[0].sum().backward()
    assert sorted(map(id, seen)) == sorted(map(id, weights))


@tiled
def test_autocast_holds_in_a_backward_outside_of_it(name):
    given = usual(name)
    with torch.autocast("cpu", torch.bfloat16):
        (y,) = CASES[name].run(given)
    found = torch.autograd.grad(y.float().sum(), leaves(given).values())
    (right,) = CASES[name].reference(given)
    for gradient, wanted in zip(found, torch.autograd.grad(right.sum(), leaves(given).values()), strict=True):
        assert_near(gradient, wanted, CAST)


@pytest.mark.parametrize("rows", [30, 44])
def test_weights_of_two_shapes_are_refused(rows):
    x, gate, _, down = usual("gated_mlp").values()
    with pytest.raises(ValueError, match=rf"gate_weight and up_weight must have one shape, got .* and \[{rows}, 24\]"):
        gated_mlp(x, gate, torch.ones(rows, 24, requires_grad=True), down)


def test_a_gradient_through_an_activation_inside_of_the_registered_op_is_refused():
    """``linear`` applies it outside then; results with it are those of the contract."""
    x, weight = torch.randn(2, 5, 24), torch.randn(19, 24, requires_grad=True)
    y = torch.ops.tilekern.linear.default(x, weight, None, "silu")
    assert_near(y, formulas.linear(x, weight, None, "silu"), REORDERED)
    with pytest.raises(AssertionError, match="applies an activation outside"):
        y.sum().backward()
