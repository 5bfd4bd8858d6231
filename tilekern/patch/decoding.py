"""One new token after a cache, of which a mask hides unused room and padding: the keys are told beside the mask.

A static cache counts its tokens in a tensor on its device, so a captured or compiled step attends to the keys of its
replay. If a record says that the kernel for decoding is the fastest it reads these numbers; else SDPA reads the mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilekern.ops.decode_attention import decode_attention, is_tuned
from tilekern.patch.guards import constant_in_graphs
from tilekern.patch.padding import Keys, padding_of
from tilekern.patch.positions import has_values


def with_keys(made: Tensor, given: dict[str, Any], can_read: bool) -> Tensor:
    """Return a mask [batch, 1, 1, keys] of one query, with the keys that it shows if they follow one another.

    Args:
        made: the mask, of causality, padding and the layer's window alone.
        given: the arguments of transformers' request for it; releases without ``q_offset`` get no numbers.
        can_read: whether values may be read: those of a padding mask.
    """
    mask, offset, before = given.get("attention_mask"), given.get("q_offset"), given.get("kv_offset", 0)
    padding = padding_of(mask) if can_read and mask is not None and mask.dim() == 2 and has_values(mask) else None
    if offset is None or (padding is None and mask is not None):
        return made
    number = offset + 1 - before
    if not isinstance(number, Tensor):
        number = torch.full((), number, dtype=torch.int32, device=made.device)
    lengths = number.to(torch.int32).reshape(1).repeat(made.shape[0])
    starts = None
    if padding is not None and not padding.is_none:
        shown = padding.to(made.device).keys
        lengths = torch.minimum(lengths, shown.lengths - before)
        starts = None if shown.starts is None else (shown.starts - before).clamp(min=0)
    # generate makes its masks contiguous, and a copy would lose the numbers.
    made = made.contiguous()
    made.shown_keys = Keys(lengths, starts)
    return made


def keys_of(mask: Any) -> Keys | None:
    """Return the keys of each sequence, if they are all that a mask tells; else None."""
    found: Keys | None = getattr(mask, "shown_keys", None)
    return found


def in_graph(
    query: Tensor, key: Tensor, value: Tensor, shown: Keys, sinks: Tensor | None, scale: float | None,
    window: int | None, softcap: float | None,
) -> Tensor | None:  # fmt: skip
    """Compute the attention of ``query`` [batch, heads, head_dim] where torch.compile traces; None without a record."""
    sizes = (*query.shape, *key.shape)
    if not all(type(size) is int for size in sizes) or (scale is not None and scale <= 0):
        return None
    # torch.compile takes no attribute of a layer for a constant, but what is computed of it.
    flags = None if window is None else int(window), softcap is not None, sinks is not None, shown.starts is not None
    if not _is_tuned(tuple(query.shape), tuple(key.shape), query.dtype, query.device, *flags):
        return None
    found = decode_attention(
        query, key, value, shown.lengths, starts=shown.starts, sinks=sinks, scale=scale, window=window, softcap=softcap
    )  # fmt: skip
    return found.unsqueeze(1)


@constant_in_graphs
def _is_tuned(*kind: Any) -> bool:
    return is_tuned(*kind)
