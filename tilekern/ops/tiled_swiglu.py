"""tiled_swiglu: a gated MLP with silu over shards of the tokens, for sequences whose activations do not fit.

It is written by hand and not declared: it has no kernel of its own, but runs torch's products and another op for each
shard, and again in the backward.
"""

from __future__ import annotations

from torch import Tensor

from tilekern.ops.swiglu import swiglu
from tilekern.ops.tiled_mlp import gated


def tiled_swiglu(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor, num_shards: int | None = None
) -> Tensor:
    """Return ``(silu(x @ gate_weight.T) * (x @ up_weight.T)) @ down_weight.T``, saving only x and the weights.

    Activations [tokens / num_shards, intermediate] exist for one shard at a time, and are recomputed in the backward.

    Args:
        x: [..., tokens, hidden]; the shards split the tokens of the whole batch.
        gate_weight, up_weight: [intermediate, hidden], of the dtype of ``x``.
        down_weight: [hidden, intermediate], of the dtype of ``x``.
        num_shards: the number of shards; None for ``tokens / hidden``, rounded up.

    Returns:
        [..., tokens, hidden]. The gradients of the weights are summed over the shards in their dtype.

    Raises:
        ValueError: the devices differ, or the shapes of ``gate_weight`` and ``up_weight``, or ``num_shards`` is less
            than 1.
    """
    return gated("tiled_swiglu", swiglu, x, gate_weight, up_weight, down_weight, num_shards)
