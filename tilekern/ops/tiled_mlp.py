"""Code that the tiled MLPs share: a function of single tokens runs over shards of them, again in the backward."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

from tilekern.ops.registration import check_tensors


def tiled(
    function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, num_shards: int | None, op: str = "tiled"
) -> torch.Tensor:
    """``function(x)``, shard by shard of its rows, of which only the input and the result are kept.

    Each shard runs once more in the backward, so that what ``function`` keeps exists for one shard at a time. autograd
    adds the gradients of its weights up over the shards, in their dtype, and hands each over once, which is what hooks
    on parameters (DDP, FSDP) count on.

    Args:
        function: [rows, columns] to [rows, any], each row by itself.
        x: [..., columns].
        num_shards: how many shards, at least 1; as many as ``tokens / columns``, rounded up, where it is None, with
            the tokens in the dimension before the last.
        op: the name that an error begins with.

    Returns:
        [..., any].

    Raises:
        ValueError: ``num_shards`` is less than 1.
    """
    if num_shards is not None and num_shards < 1:
        raise ValueError(f"{op}: num_shards must be at least 1, or None, got {num_shards}")
    tokens, columns = (x.shape if x.dim() > 1 else (1, *x.shape))[-2:]
    shards = x.reshape(-1, columns).chunk(num_shards or max(1, math.ceil(tokens / max(1, columns))))
    kept = torch.is_grad_enabled()
    parts = [
        checkpoint(function, shard, use_reentrant=False, preserve_rng_state=False) if kept else function(shard)
        for shard in shards
    ]
    y = parts[0] if len(parts) == 1 else torch.cat(parts)
    return y.view(*x.shape[:-1], y.shape[-1])


def gated(
    op: str, activation: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], x: torch.Tensor,
    gate_weight: torch.Tensor, up_weight: torch.Tensor, down_weight: torch.Tensor, num_shards: int | None,
) -> torch.Tensor:  # fmt: skip
    """``activation(x @ gate_weight.T, x @ up_weight.T) @ down_weight.T`` by :func:`tiled`, of weights that fit."""
    if up_weight.shape != gate_weight.shape:
        raise ValueError(
            f"{op}: gate_weight and up_weight must have one shape, got {list(gate_weight.shape)} and "
            f"{list(up_weight.shape)}"
        )
    check_tensors(op, x=x, gate_weight=gate_weight, up_weight=up_weight, down_weight=down_weight)
    linear = torch.nn.functional.linear

    def mlp(shard: torch.Tensor) -> torch.Tensor:
        return linear(activation(linear(shard, gate_weight), linear(shard, up_weight)), down_weight)

    return tiled(mlp, x, num_shards, op)
