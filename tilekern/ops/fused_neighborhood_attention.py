"""fused_neighborhood_attention: attention of each token to its neighbours along one dimension, by attention's kernels.

Token q sees the keys ``q + i * dilation`` for ``|i| <= kernel_size // 2`` inside the sequence, so a token at a border
sees fewer keys, as in Liger's kernel. NATTEN shifts the window inwards there, so that each token sees ``kernel_size``
keys; away from the borders the two agree.

Tokens whose positions have the same remainder by the dilation see only each other, at a distance of less than
``kernel_size // 2 + 1``: each remainder is a sequence with a window. All of them run as heads of one call of
:func:`attention`, or of two if some remainders have one token more. If the heads of a token are adjacent in memory, as
a projection writes them, sequences of one length are views.

It is written by hand and not declared: it has no kernel of its own, and arranges one or two calls of another op.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilekern.ops.attention import attention


def fused_neighborhood_attention(
    query: Tensor, key: Tensor, value: Tensor, kernel_size: int = 7, dilation: int = 1, scale: float | None = None
) -> Tensor:
    """Return ``softmax(scale query key^T) value`` where a token sees ``kernel_size`` neighbours, ``dilation`` apart.

    Args:
        query: [batch, heads, tokens, head_dim]; bfloat16, float16 or float32, any strides, as are key and value.
        key, value: [batch, kv_heads, tokens, head_dim]; ``heads`` is a multiple of ``kv_heads``.
        kernel_size: odd, includes the token itself. A token at a border sees fewer.
        dilation: the distance between neighbours, at least 1.
        scale: factor of the scores; None for head_dim ** -0.5.

    Returns:
        [batch, heads, tokens, head_dim]; the heads of a token stand side by side in memory.

    Raises:
        ValueError: ``kernel_size`` is not odd and positive, ``dilation`` is less than 1, or the shapes or the devices
            do not fit.
    """
    if kernel_size < 1 or kernel_size % 2 == 0:
        raise ValueError(f"fused_neighborhood_attention: kernel_size must be odd and positive, got {kernel_size}")
    if dilation < 1:
        raise ValueError(f"fused_neighborhood_attention: dilation must be at least 1, got {dilation}")
    if query.dim() != 4 or key.dim() != 4 or key.shape != value.shape or query.shape[2] != key.shape[2]:
        raise ValueError(
            "fused_neighborhood_attention: query, key and value must be [batch, heads, tokens, head_dim] with as many "
            f"queries as keys, got {list(query.shape)}, {list(key.shape)} and {list(value.shape)}"
        )
    # A dilation beyond all tokens is like one of all tokens: each token sees itself.
    dilation, heads = max(1, min(dilation, query.shape[2])), query.shape[1]
    sequences = zip(*(_by_remainder(x.transpose(1, 2), dilation) for x in (query, key, value)), strict=True)
    window = kernel_size // 2 + 1
    found = [attention(*parts, causal=False, scale=scale, window=window) for parts in sequences]
    return _in_order([x.unflatten(2, (-1, heads)) for x in found]).transpose(1, 2)


def _by_remainder(x: Tensor, dilation: int) -> list[Tensor]:
    """Return [batch, tokens, heads, head_dim] as [batch, steps, remainders * heads, head_dim], longer ones first."""
    if dilation == 1:
        return [x]
    longer = x.shape[1] % dilation
    return [
        _apart(x[:, start:].unfold(1, stop - start, dilation).movedim(-1, 2).flatten(2, 3))
        for start, stop in ((0, longer), (longer, dilation))
        if start < stop
    ]


def _apart(x: Tensor) -> Tensor:
    """Return ``x``, or a copy if the launcher, which compares strides and sizes, would assume shared memory."""
    nested = all(x.stride(at) >= x.stride(at + 1) * x.shape[at + 1] for at in range(3))
    return x if nested else x.contiguous()


def _in_order(parts: list[Tensor]) -> Tensor:
    """Return sequences [batch, steps, remainders, heads, head_dim] as [batch, tokens, heads, head_dim]."""
    if len(parts) == 1:
        return parts[0].flatten(1, 2)
    longer, shorter = parts
    steps = shorter.shape[1]
    return torch.cat((torch.cat((longer[:, :steps], shorter), 2).flatten(1, 2), longer[:, steps]), 1)
