"""Which kernel runs a linear layer: one of its own for up to 64 rows without a gradient."""

import pytest
import torch
from op_samples import launched_by

import tilekern
from tilekern import ops
from tilekern.ops import few_rows
from tilekern.ops.linear import product
from tilekern.runtime import dispatch

FEW, MANY = {"skinny_linear": 1}, {"matmul": 1}
WEIGHT, OTHER, DOWN, BIAS = torch.randn(19, 24), torch.randn(19, 24), torch.randn(24, 19), torch.randn(19)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setenv("TILEKERN_INTERPRET", "1")


@pytest.mark.parametrize(("shape", "kernel"), [((24,), FEW), ((8, 8, 24), FEW), ((5, 13, 24), MANY)])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_up_to_64_rows_without_a_gradient(shape, kernel, activation):
    x = torch.randn(shape)
    assert launched_by(lambda: ops.linear(x, WEIGHT, BIAS, activation)) == kernel


def test_a_gradient_needs_the_kernels_of_both_directions():
    x = torch.randn(3, 24, requires_grad=True)
    assert launched_by(lambda: ops.linear(x, WEIGHT)) == MANY
    with torch.no_grad():
        assert launched_by(lambda: ops.linear(x, WEIGHT)) == FEW


# Calls of patched models, and the launches of their kernel for few rows.
CALLS = {
    "product": (lambda x: product(x, WEIGHT, BIAS), 1),
    "projections": (lambda x: ops.projections(x, WEIGHT, OTHER), 2),
    "gated_mlp": (lambda x: ops.gated_mlp(x, WEIGHT, OTHER, DOWN), 2),
    "mlp": (lambda x: ops.mlp(x, WEIGHT, BIAS, DOWN, None), 2),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_patched_models_call_runs_torch_s_products_otherwise(name):
    call, launches = CALLS[name]
    few, many = torch.randn(64, 24), torch.randn(65, 24)

    def products(x):
        ran = launched_by(lambda: call(x))
        return {kernel: ran[kernel] for kernel in ("skinny_linear", "matmul") if kernel in ran}

    assert products(few) == {"skinny_linear": launches}
    assert products(many) == products(few.clone().requires_grad_()) == {}
    with torch.autocast("cpu", torch.bfloat16):
        assert products(few) == {}


def test_q_k_and_v_are_one_launch_with_torch_s_results():
    x, weights = torch.randn(2, 3, 24), (torch.randn(40, 24), WEIGHT, OTHER)
    found = []
    assert launched_by(lambda: found.extend(ops.projections(x, *weights))) == {"skinny_projections": 1}
    for y, weight in zip(found, weights, strict=True):
        torch.testing.assert_close(y, x @ weight.T)
    # Others than two of one size, or more rows, are products of their own.
    assert "skinny_projections" not in launched_by(lambda: ops.projections(x, WEIGHT, weights[0], OTHER))
    assert "skinny_projections" not in launched_by(lambda: ops.projections(torch.randn(65, 24), *weights))


def test_weights_of_a_class_of_their_own_are_its_business():
    class Own(torch.Tensor):
        pass

    x, weights = torch.randn(3, 24), [torch.randn(size, 24).as_subclass(Own) for size in (40, 19, 19)]
    assert "skinny_projections" not in launched_by(lambda: ops.projections(x, *weights))


@pytest.mark.parametrize(("tile_n", "launches"), [(64, {"skinny_projections": 1}), (32, {"skinny_linear": 3})])
def test_in_the_mode_q_k_and_v_are_one_launch_if_its_sums_are_those_of_each(tile_n, launches, monkeypatch):
    """Tiles narrower than 64 have instructions of their own."""

    def found(spec, device, *sizes):
        plan = dispatch.plan_for(spec, device, *sizes)
        if spec.name == "skinny_linear":
            plan.config = plan.config.but(tile_n=tile_n)
        return plan

    monkeypatch.setattr(few_rows, "tuned_plan_for", found)
    dispatch.forget()
    x, weights = torch.randn(3, 24), (torch.randn(40, 24), WEIGHT, OTHER)
    with tilekern.invariant():
        ran = launched_by(lambda: ops.projections(x, *weights))
    dispatch.forget()
    assert ran == launches


def test_a_weight_that_is_stored_transposed_is_not_copied():
    x, stored = torch.randn(3, 24), torch.randn(24, 19)
    assert "skinny_linear" not in launched_by(lambda: ops.projections(x, stored.t()))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_gate_and_its_products_are_one_launch(activation):
    x = torch.randn(2, 3, 24)
    assert launched_by(lambda: ops.gated_linear(x, WEIGHT, OTHER, activation)) == FEW


def test_an_unknown_activation_is_named():
    with pytest.raises(ValueError, match=r"must be one of .*'silu', 'gelu_tanh'.*, got 'relu'"):
        ops.gated_linear(torch.randn(3, 24), WEIGHT, OTHER, "relu")
