"""Attention of transformers' continuous batching: sequences of one row, and their keys in the pages of a cache.

The cache has two ways. Before a step with prompts it writes the new keys itself and gathers those of all sequences
behind one another: the attention kernel takes them as packed sequences. Before a step of one token for each sequence it
only hands over its pages and a table of them: the token's key is written here. Either way no value is read on the host,
so transformers' own CUDA graphs may capture it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilekern.errors import InputError
from tilekern.ops.attention import attention
from tilekern.ops.decode_attention import by_tuned_kernels
from tilekern.patch.masking import reading_of

# Keys that are gathered at once if no kernel reads them in their pages: 1 GiB of 8 heads of 128 in two bytes.
MOST_KEYS = 1 << 18


class Pages(NamedTuple):
    """The numbers of a step of one token for each sequence, which its layers share.

    Attributes:
        layer: the layer that used them last.
        slots: [sequences] int64, the row of the cache for each new key.
        lengths: [sequences] int32, the number of keys, the new one included; 0 for a sequence that fills up the batch.
        parts: for each part of the batch, if keys are gathered, the sequences, the first query and the first key of
            each, and the rows of the cache with the keys.
    """

    layer: int
    slots: Tensor
    lengths: Tensor
    parts: list[tuple[slice, Tensor, Tensor, Tensor]]


class Way(NamedTuple):
    """What a layer asks for, with the names of :func:`tilekern.ops.attention`."""

    causal: bool
    scale: float | None
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    deterministic: bool


# The cache's views are not for torch.compile; transformers leaves its update out of graphs too.
@torch.compiler.disable
def attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, way: Way, given: dict[str, Any]
) -> Tensor:  # fmt: skip
    """Compute the attention of a layer after its cache's update; see :func:`tilekern.patch.attention.attend`.

    Args:
        module: the attention layer.
        query: [1, heads, tokens, head_dim].
        key, value: [1, kv_heads, keys, head_dim], those of all sequences, or with a table those of the new tokens.
        way: what the layer asks for.
        given: the arguments of transformers: ``cu_seq_lens_q`` and ``_k``, ``max_length_q`` and ``_k``, and, if the
            cache has a table of its pages, ``block_table``, ``k_cache`` and ``v_cache``.

    Raises:
        InputError: the model's code gives its window, or more, by a mask alone, which this cache has not; or the layer
            uses another one's keys.
    """
    config = getattr(module, "config", None)
    reading, window = reading_of(type(config)), getattr(config, "sliding_window", None)
    if reading.by_mask_alone or not (reading.hands_window or window is None):
        raise InputError(
            f'attn_implementation="tilekern": {type(module).__name__} says by a mask alone what tokens see, and '
            'continuous batching has none; use "sdpa"'
        )
    if not isinstance(given["cu_seq_lens_k"], Tensor):
        raise InputError(
            f'attn_implementation="tilekern": {type(module).__name__} has no keys of its own, and continuous batching '
            "does not tell whose it takes"
        )
    if given.get("block_table") is not None:
        return _by_table(module, query[0].transpose(0, 1), key, value, way, given)
    most, longest, keys = given.get("max_length_q"), given.get("max_length_k"), key.shape[2]
    most = most if isinstance(most, int) else query.shape[2]
    if not isinstance(longest, int):
        longest = keys
    elif way.window is not None:
        # transformers bounds it by the cache's size, which a chunk behind a window may exceed.
        longest = min(keys, max(longest, most + way.window - 1))
    return attention(
        *(x.to(key.dtype).transpose(1, 2) for x in (query, key, value)), **way._asdict(),
        cu_seqlens=given["cu_seq_lens_q"], max_seqlen=most, cu_seqlens_k=given["cu_seq_lens_k"], max_seqlen_k=longest,
    )  # fmt: skip


def _by_table(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, way: Way, given: dict[str, Any]
) -> Tensor:  # fmt: skip
    """Write the new keys to their pages and return the attention of ``query`` [sequences, heads, head_dim]."""
    keys, values, table = given["k_cache"], given["v_cache"], given["block_table"]
    pages = _pages(module, table, keys.shape[1], given["cu_seq_lens_k"])
    rows = keys.flatten(0, 1), values.flatten(0, 1)
    for cached, new in zip(rows, (key, value), strict=True):
        cached.index_copy_(0, pages.slots, new[0].transpose(0, 1).to(cached.dtype))
    query, found = query.to(keys.dtype), None
    if type(query) is Tensor:
        found = by_tuned_kernels(
            query, keys, values, pages.lengths, None, table, way.sinks, way.scale, way.window, way.softcap,
        )  # fmt: skip
    if found is not None:
        return found[None]
    if not pages.parts:
        pages.parts.extend(_parts(table, keys.shape[1], pages.lengths))
    found = [
        attention(
            query[None, part], *(x.index_select(0, places)[None] for x in rows), **way._asdict(), cu_seqlens=first,
            max_seqlen=1, cu_seqlens_k=starts, max_seqlen_k=keys.shape[1] * table.shape[1],
        )
        for part, first, starts, places in pages.parts
    ]  # fmt: skip
    return found[0] if len(found) == 1 else torch.cat(found, 1)


def _pages(module: torch.nn.Module, table: Tensor, page_size: int, starts: Tensor) -> Pages:
    """Return the numbers of a step, which its first layer computes and its tensor of starts keeps."""
    layer = getattr(module, "layer_idx", 0)
    known = getattr(starts, "tilekern_pages", None)
    # A graph that is captured must compute them in its first layer, also if a step with the same tensors ran before.
    if known is not None and known.layer < layer:
        pages: Pages = known._replace(layer=layer)
    else:
        lengths = starts.diff()
        # A sequence that fills up the batch has no page: its key goes where no sequence's is, to the first one.
        place = (lengths - 1).clamp(min=0).to(torch.int64)
        page = table.gather(1, (place // page_size)[:, None])[:, 0].clamp(min=0)
        pages = Pages(layer, page * page_size + place % page_size, lengths, [])
    starts.tilekern_pages = pages
    return pages


def _parts(table: Tensor, page_size: int, lengths: Tensor) -> list[tuple[slice, Tensor, Tensor, Tensor]]:
    """Return which rows of the cache hold the keys of each part of a batch; the last ones may belong to none."""
    room, found = table.shape[1] * page_size, []
    width = max(1, MOST_KEYS // room)
    for begin in range(0, len(lengths), width):
        part = slice(begin, begin + width)
        starts = torch.nn.functional.pad(lengths[part].cumsum(0, dtype=torch.int32), (1, 0))
        count = len(starts) - 1
        row = torch.arange(count * room, dtype=torch.int64, device=table.device)
        number = torch.searchsorted(starts[1:], row, right=True).clamp(max=count - 1)
        place = (row - starts[number]).clamp(max=room - 1)
        page = table[part][number, place // page_size].clamp(min=0)
        first = torch.arange(count + 1, dtype=torch.int32, device=table.device)
        found.append((part, first, starts, page * page_size + place % page_size))
    return found
