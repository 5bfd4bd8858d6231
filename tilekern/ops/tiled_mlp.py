"""Shared code of the tiled MLPs: run a function over shards of the tokens, and again in the backward."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tilekern.ops.registration import check_tensors


def tiled(function: Callable[[Tensor], Tensor], x: Tensor, num_shards: int | None, op: str = "tiled") -> Tensor:
    """Return ``function(x)``, computed in shards of rows; only the input and the result are saved.

    Each shard runs again in the backward, so the tensors that ``function`` saves exist for one shard at a time.
    Autograd sums the gradients of its weights over the shards, in their dtype, and passes each on once, as hooks on
    parameters (DDP, FSDP) expect.

    Args:
        function: maps [rows, columns] to [rows, any], row by row.
        x: [..., columns].
        num_shards: the number of shards; None for ``tokens / columns``, rounded up, where tokens is the dimension
            before the last.
        op: the name in error messages.

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
    op: str, activation: Callable[[Tensor, Tensor], Tensor], x: Tensor, gate_weight: Tensor, up_weight: Tensor,
    down_weight: Tensor, num_shards: int | None,
) -> Tensor:  # fmt: skip
    """Check the weights and run ``activation(x @ gate_weight.T, x @ up_weight.T) @ down_weight.T`` in shards."""
    if up_weight.shape != gate_weight.shape:
        raise ValueError(
            f"{op}: gate_weight and up_weight must have one shape, got {list(gate_weight.shape)} and "
            f"{list(up_weight.shape)}"
        )
    check_tensors(op, x=x, gate_weight=gate_weight, up_weight=up_weight, down_weight=down_weight)
    linear = torch.nn.functional.linear

    def mlp(shard: Tensor) -> Tensor:
        return linear(activation(linear(shard, gate_weight), linear(shard, up_weight)), down_weight)

    return tiled(mlp, x, num_shards, op)
