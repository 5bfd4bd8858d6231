"""One new token after a static cache, whose unused room a mask hides: the number of keys is told beside the mask.

A static cache counts its tokens in a tensor on its device, so a captured or compiled step attends to the keys of its
replay. If a record says that the kernel for decoding is the fastest it reads that number; if none does, SDPA reads the
mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilekern.ops.decode_attention import decode_attention, is_tuned
from tilekern.patch.guards import constant_in_graphs
from tilekern.patch.positions import has_values


def with_lengths(made: Tensor, given: dict[str, Any], can_read: bool) -> Tensor:
    """Return a mask [batch, 1, 1, keys] of one query, with the number of keys that it shows if it hides no others.

    Args:
        made: the mask, of causality and the layer's window alone but for padding.
        given: the arguments of transformers' request for it; releases without ``q_offset`` get no numbers.
        can_read: whether values may be read: a padding mask of ones is none.
    """
    padding, offset = given.get("attention_mask"), given.get("q_offset")
    if offset is None or (padding is not None and not (can_read and has_values(padding) and bool(padding.all()))):
        return made
    number = offset + 1 - given.get("kv_offset", 0)
    if not isinstance(number, Tensor):
        number = torch.full((), number, dtype=torch.int32, device=made.device)
    # generate makes its masks contiguous, and a copy would lose the number.
    made = made.contiguous()
    made.lengths = number.to(torch.int32).reshape(1).repeat(made.shape[0])
    return made


def lengths_of(mask: Any) -> Tensor | None:
    """Return the number of keys of each sequence, [batch] int32, if they are all that a mask tells; else None."""
    found: Tensor | None = getattr(mask, "lengths", None)
    return found


def in_graph(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, sinks: Tensor | None, scale: float | None,
    window: int | None, softcap: float | None,
) -> Tensor | None:  # fmt: skip
    """Compute the attention of ``query`` [batch, heads, head_dim] where torch.compile traces; None without a record."""
    sizes = (*query.shape, *key.shape)
    if not all(type(size) is int for size in sizes) or (scale is not None and scale <= 0):
        return None
    # torch.compile takes no attribute of a layer for a constant, but what is computed of it.
    flags = None if window is None else int(window), softcap is not None, sinks is not None
    if not _is_tuned(tuple(query.shape), tuple(key.shape), query.dtype, query.device, *flags):
        return None
    found = decode_attention(
        query, key, value, lengths, sinks=sinks, scale=scale, window=window, softcap=softcap
    )  # fmt: skip
    return found.unsqueeze(1)


@constant_in_graphs
def _is_tuned(*kind: Any) -> bool:
    return is_tuned(*kind)
