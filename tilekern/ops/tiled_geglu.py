"""tiled_geglu: a gated MLP with gelu over shards of the tokens, for sequences whose activations do not fit.

It is written by hand and not declared: it has no kernel of its own, but runs torch's products and another op for each
shard, and again in the backward.
"""

from __future__ import annotations

import functools

from torch import Tensor

from tilekern.ops.geglu import geglu
from tilekern.ops.tiled_mlp import gated


def tiled_geglu(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor, num_shards: int | None = None,
    tanh: bool = True,
) -> Tensor:  # fmt: skip
    """Return ``(gelu(x @ gate_weight.T) * (x @ up_weight.T)) @ down_weight.T``, saving only x and the weights.

    Activations [tokens / num_shards, intermediate] exist for one shard at a time, and are recomputed in the backward.

    Args:
        x: [..., tokens, hidden]; the shards split the tokens of the whole batch.
        gate_weight, up_weight: [intermediate, hidden], of the dtype of ``x``.
        down_weight: [hidden, intermediate], of the dtype of ``x``.
        num_shards: the number of shards; None for ``tokens / hidden``, rounded up.
        tanh: use gelu's tanh approximation, like Gemma's and Liger's MLPs; otherwise gelu is exact.

    Returns:
        [..., tokens, hidden]. The gradients of the weights are summed over the shards in their dtype.

    Raises:
        ValueError: the devices differ, or the shapes of ``gate_weight`` and ``up_weight``, or ``num_shards`` is less
            than 1.
    """
    activation = functools.partial(geglu, tanh=tanh)
    return gated("tiled_geglu", activation, x, gate_weight, up_weight, down_weight, num_shards)
