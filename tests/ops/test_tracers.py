"""Whoever watches or transforms torch's operations sees an op as one of them, or torch's own, and never nothing."""

import pytest
import torch
from op_samples import SHIPPED, public, tensors_of
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tilekern import ops
from tilekern.runtime import dispatch

GENERATOR = torch.Generator().manual_seed(0)
HIDDEN, WEIGHT, TARGET = (
    torch.randn(6, 16, generator=GENERATOR),
    torch.randn(8, 16, generator=GENERATOR),
    torch.arange(6),
)


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def results(op):
    found = public(op)(**tensors_of(op))
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("op", SHIPPED.values(), ids=SHIPPED)
def test_a_dispatch_mode_sees_one_operation_with_the_same_result(op):
    if op.name in ("jsd_loss", "tvd_loss"):
        pytest.skip("called by functions of their own")
    expected = results(op)
    with Seen() as seen:
        found = results(op)
    assert f"tilekern::{op.name}" in seen.names
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_make_fx_records_the_op_and_its_gradient():
    def step(x, weight):
        return torch.autograd.grad(ops.rms_norm(x, weight).square().sum(), (x, weight))

    given = HIDDEN.clone().requires_grad_(), torch.ones(16, requires_grad=True)
    graph = make_fx(step)(*given)
    assert "torch.ops.tilekern.rms_norm.default" in graph.code
    assert "torch.ops.tilekern.rms_norm_backward.default" in graph.code
    others = [(2 * x).detach().requires_grad_() for x in given]
    for one, other in zip(graph(*others), step(*others), strict=True):
        assert torch.equal(one, other)


def test_make_fx_records_the_loss_of_a_head():
    given = HIDDEN.clone().requires_grad_(), WEIGHT.clone().requires_grad_()

    def step(hidden, weight):
        return torch.autograd.grad(ops.fused_linear_cross_entropy(hidden, weight, TARGET), (hidden, weight))

    graph = make_fx(step)(*given)
    assert "tilekern.linear_cross_entropy_total" in graph.code
    for one, other in zip(graph(*given), step(*given), strict=True):
        torch.testing.assert_close(one, other)


def test_a_selective_checkpoint_keeps_what_attention_gave():
    q = torch.randn(1, 8, 2, 16, generator=GENERATOR).requires_grad_()
    (expected,) = torch.autograd.grad(ops.attention(q, q, q).square().sum(), q)

    def policy(_, op, *args, **kwargs):
        kept = op is torch.ops.tilekern.attention.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def launches():
        return dispatch.counters("attention_forward").launches

    before = launches()
    out = checkpoint(
        lambda x: ops.attention(x, x, x).square().sum(), q, use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )  # fmt: skip
    (found,) = torch.autograd.grad(out, q)
    assert launches() == before + 1
    assert torch.equal(found, expected)
