"""Torch's own checks of the registered ops and their gradients; tangents; errors of kernels."""

import pytest
import torch
from op_samples import SHIPPED, assert_near, scalars_of, tensors_of
from torch.autograd import forward_ad

from tilekern import interpreter
from tilekern.ops import swiglu


def test_torch_s_operations_that_run_in_an_op_s_place_keep_tangents():
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        got, wanted = (forward_ad.unpack_dual(y).tangent for y in (swiglu(dual, x), x * torch.nn.functional.silu(dual)))
    assert_near(got, wanted, 1e-6)


def registered_arguments(name, optional):
    """Of a registered op or, after ``_backward``, of its gradient, as its declaration has them."""
    op = SHIPPED[name.removesuffix("_backward")]
    given = tensors_of(op, optional=optional) | scalars_of(op)
    for tensor in op.gradients:
        if given[tensor] is not None:
            given[tensor].requires_grad_()
    arguments = [given[name] for name in op.arguments]
    if name == op.name:
        return arguments
    results = getattr(torch.ops.tilekern, op.name).default(*arguments)
    found = given | dict(zip(op.results, results if isinstance(results, tuple) else (results,), strict=True))
    found |= {slope: torch.randn_like(found[name]) for slope, name in zip(op.slopes, op.shown, strict=True)}
    needs = [isinstance(x, torch.Tensor) and x.requires_grad for x in arguments]
    taken = map((found | {"needs": needs}).get, op.registered_backward_arguments)
    return [x.detach() if isinstance(x, torch.Tensor) else x for x in taken]


REGISTERED = [
    pytest.param(name, optional, id=f"{name} {'all' if optional else 'least'}")
    for op in SHIPPED.values()
    for name in (op.name, *[f"{op.name}_backward"][: len(op.gradients)])
    for optional in ((True, False) if op.optional else (True,))
]


@pytest.mark.parametrize(("name", "optional"), REGISTERED)
@pytest.mark.share(8)
def test_torch_s_own_checks_of_a_registered_op(name, optional):
    op = getattr(torch.ops.tilekern, name).default
    result = torch.library.opcheck(op, registered_arguments(name, optional))
    assert set(result.values()) == {"SUCCESS"}


def test_an_error_of_a_kernel_reaches_the_caller(monkeypatch):
    def broken(*args, **kwargs):
        raise interpreter.OutOfBounds("x")

    monkeypatch.setattr(interpreter, "launch", broken)
    with pytest.raises(interpreter.OutOfBounds):
        swiglu(torch.ones(2, 8), torch.ones(2, 8))
