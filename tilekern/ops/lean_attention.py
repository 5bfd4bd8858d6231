"""Attention that keeps no queries and keys behind their norm and rotation, whose backward keeps what they are made of.

The backward makes them again by the launch of the forward, on the same numbers, so gradients have the same bits. For a
launch it saves two bytes for each number of q and k: 10 KiB of the 102 that a layer of Qwen3-8B keeps for a token.

Of a patched model only its own attention's code runs between the two ops: no module begins or ends there, so no hook
and no collective can write to q and k. A norm's result, which other modules read, is not made again for that reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tilekern.errors import NoVariant
from tilekern.ops.kept import are_packed
from tilekern.ops.qk_norm_rope import OPS
from tilekern.ops.registration import applied, differentiable_once, is_traced, needs_gradient

# The launches of a forward, by the class of the nodes that autograd has of it.
_LAUNCHES: dict[type, Callable[..., tuple[Tensor, Tensor]]] = {
    function._backward_cls: launch for function, launch in OPS
}  # fmt: skip


def lean(attention: Mapping[str, Any], q: Tensor, k: Tensor, *rest: Any) -> Tensor | None:
    """Return the attention of q and k if its backward can make them again; else None.

    Hooks that pack what is kept, as those of checkpoints, would pack twice what two nodes share.

    Args:
        attention: the functions of the op, by name.
        q, k, rest: its arguments in their order.
    """
    if is_traced(q) or not needs_gradient(q):
        return None
    node = q.grad_fn
    if type(node) not in _LAUNCHES:
        return None
    # A number that was written since is not made again.
    is_whole = k.grad_fn is node and (q.output_nr, k.output_nr, q._version, k._version) == (0, 1, 0, 0)
    if not is_whole or are_packed():
        return None
    made_of = _saved_by(node)
    plans = None if made_of is None else attention["plans_of"](True, q, k, *rest)
    if plans is None:
        return None
    try:
        out: Tensor = _apply(attention, plans, node, made_of, q, k, *rest)
    except NoVariant:  # which the op itself counts
        return None
    return out


def _saved_by(node: Any) -> tuple[Tensor, ...] | None:
    """Return what a forward has saved; None if hooks packed it, it was written since, or a backward has freed it."""
    try:
        # To unpack it may copy it from the host or run a checkpoint again. Older versions of torch do not tell.
        is_packed = getattr(node._raw_saved_tensors[0], "unpack_hook", None) is not None
        return None if is_packed else node.saved_tensors
    except RuntimeError:
        return None


class _Lean(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, attention: Mapping[str, Any], plans: Any, node: Any, made_of: tuple[Tensor, ...], q: Tensor,
        k: Tensor, v: Tensor, *rest: Any,
    ) -> Tensor:  # fmt: skip
        out: Tensor
        (sinks, starts, key_starts), numbers = rest[:3], rest[3:]
        out, lse = attention["launch"](plans, q, k, v, *rest)
        ctx.save_for_backward(*made_of, v, out, lse, sinks, starts, key_starts)
        ctx.attention, ctx.plans, ctx.scalars = attention, plans, numbers
        ctx.make, ctx.of_making = _LAUNCHES[type(node)], (node.plans, node.scalars)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        *made_of, v, out, lse, sinks, starts, key_starts = ctx.saved_tensors
        plans, scalars = ctx.of_making
        q, k = ctx.make(plans, *made_of, *scalars)
        as_kept = SimpleNamespace(
            saved_tensors=(q, k, v, out, lse, sinks, starts, key_starts), plans=ctx.plans, scalars=ctx.scalars,
            needs_input_grad=ctx.needs_input_grad[4:],
        )  # fmt: skip
        return None, None, None, None, *ctx.attention["Attention"].backward(as_kept, dout)[:-1]


_apply = applied(_Lean)
