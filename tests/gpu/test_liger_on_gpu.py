"""Liger-Kernel's functions on the GPU when tilekern is registered: their numbers, and that kernels made them."""

import inspect

import pytest
import torch

pytest.importorskip("triton", reason="Liger-Kernel needs Triton, which is not installed")
pytest.importorskip("liger_kernel", reason="Liger-Kernel is not installed")

import liger_kernel.functional
import liger_kernel.ops
from gpu_tolerances import OF_OPS
from liger_samples import CALLS, LIGERS_TOLERANCE, Sizes, in_float64, results_and_gradients
from op_samples import assert_near

from tilekern.integrations import liger
from tilekern.integrations.liger.table import TABLE
from tilekern.runtime import dispatch

SIZES = Sizes(rows=254, columns=1000, tokens=61, heads=8, head_dim=64, vocabulary=4099)


@pytest.fixture(autouse=True)
def registered():
    liger.register()
    yield
    liger.unregister()


def ligers_own(call, arguments):
    """Return the results of Liger's own kernels."""
    liger.unregister()
    try:
        return results_and_gradients(getattr(liger_kernel.ops, call.name).apply, arguments)
    finally:
        liger.register()


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.id)
@pytest.mark.parametrize("dtype", OF_OPS, ids=str)
def test_ligers_functions_run_kernels_and_are_right(call, dtype):
    torch.manual_seed(0)
    arguments = call.arguments(SIZES, dtype, "cuda")
    function = getattr(liger_kernel.ops, call.name)
    before = liger.calls().get(call.name, {"served": 0})["served"]
    found = results_and_gradients(function.apply, arguments)
    assert liger.calls()[call.name]["served"] == before + 1
    assert sum(counts["launches"] for counts in dispatch.stats().values()) > 0
    assert sum(counts["fallbacks"] for counts in dispatch.stats().values()) == 0
    reference = results_and_gradients(call.reference, in_float64(arguments))
    forward, backward = LIGERS_TOLERANCE[dtype]
    graded = sum(isinstance(x, torch.Tensor) and x.requires_grad for x in arguments)
    for number, (got, wide) in enumerate(zip(found, reference, strict=True)):
        assert_near(got, wide, OF_OPS[dtype])
        atol, rtol = forward if number < len(found) - graded else backward
        error = (got.double() - wide).abs()
        if bool((error > atol + rtol * wide.abs()).any()):
            # Liger's tolerances are for sizes of its own tests; at these its kernels may be outside of them as well.
            # Its MLP rounds neither gate nor up before it multiplies them, as a model's own MLP does.
            peers = ligers_own(call, arguments)[number], results_and_gradients(call.reference, arguments)[number]
            assert error.norm() <= 1.1 * max((peer.double() - wide).norm() for peer in peers)


@pytest.mark.parametrize("name", sorted(name for name, row in TABLE.items() if row.dispatched))
def test_ligers_dispatcher_gives_the_same_bits(name):
    torch.manual_seed(0)
    call = next(call for call in CALLS if call.name == name)
    arguments = call.arguments(SIZES, torch.bfloat16, "cuda")
    dispatched = getattr(liger_kernel.functional, TABLE[name].dispatched)
    kinds = [parameter.kind for parameter in inspect.signature(dispatched).parameters.values()]
    taken = len(kinds) - kinds.count(inspect.Parameter.KEYWORD_ONLY)
    assert all(x is None for x in arguments[taken:])
    for one, other in zip(
        results_and_gradients(getattr(liger_kernel.ops, name).apply, arguments),
        results_and_gradients(dispatched, arguments[:taken]),
        strict=True,
    ):
        assert torch.equal(one, other)


def test_what_is_not_served_runs_ligers_own_kernel():
    x, y = torch.randn(4, 64, device="cuda").log_softmax(-1), torch.rand(4, 64, device="cuda").softmax(-1)
    with pytest.warns(UserWarning, match="LigerKLDivLossFunction runs Liger's own kernel"):
        loss = liger_kernel.ops.LigerKLDivLossFunction.apply(x, y, "sum", False, 0.5)
    assert not any(counts["launches"] for counts in dispatch.stats().values())
    torch.testing.assert_close(loss.sum(), (y * (y.clamp(min=0.5).log() - x)).sum())
