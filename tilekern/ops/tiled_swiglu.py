"""tiled_swiglu: a gated MLP with silu over shards of the tokens, for sequences whose activations do not fit.

It is written by hand and not declared: it has no kernel of its own, but runs torch's products and another op once for
each shard, and again in the backward.
"""

from __future__ import annotations

import torch

from tilekern.ops.swiglu import swiglu
from tilekern.ops.tiled_mlp import gated


def tiled_swiglu(
    x: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor, down_weight: torch.Tensor,
    num_shards: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """``(silu(x @ gate_weight.T) * (x @ up_weight.T)) @ down_weight.T``, keeping nothing but x and the weights.

    Activations [tokens / num_shards, intermediate] exist for one shard at a time, and are made again in the backward.

    Args:
        x: [..., tokens, hidden]; the batch counts among the tokens.
        gate_weight, up_weight: [intermediate, hidden], of the dtype of ``x``.
        down_weight: [hidden, intermediate], of the dtype of ``x``.
        num_shards: how many shards; ``tokens / hidden``, rounded up, where it is None.

    Returns:
        [..., tokens, hidden]. The gradients of the weights are added up over the shards in their dtype.

    Raises:
        ValueError: the devices differ, or the shapes of ``gate_weight`` and ``up_weight``, or ``num_shards`` is less
            than 1.
    """
    return gated("tiled_swiglu", swiglu, x, gate_weight, up_weight, down_weight, num_shards)
