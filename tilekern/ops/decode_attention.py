"""decode_attention: attention of one new token per sequence to a cache of keys and values.

Its launches are written for it: a cache has two layouts, and one split of the keys needs no second launch.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilekern.errors import NoVariant
from tilekern.kernels import decode_attention as kernels
from tilekern.kernels.families.placeholders import placeholder
from tilekern.ops.attention import WIDEST_HEAD
from tilekern.ops.operation import operation
from tilekern.ops.registration import Rows, check_softcap, check_tensors, check_vectors, disjoint, viewed, whole_numbers
from tilekern.runtime.dispatch import Plan, is_invariant, plan_for, refused, tuned_plan_for
from tilekern.spec import Array, bucket


class Plans(NamedTuple):
    """The plans of a call; a single split has nothing to join."""

    splits: Plan
    join: Plan | None


def decode_attention(
    q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, *, starts: Tensor | None = None,
    table: Tensor | None = None, sinks: Tensor | None = None, scale: float | None = None, window: int | None = None,
    softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """Return ``softmax(scale q k^T) v`` of one new token per sequence, whose key is the last one in the cache.

    The numbers in ``lengths``, ``starts`` and ``table`` are read on the GPU alone, so a captured graph may be replayed
    after they have changed. A row does not depend on the other sequences, nor on the room of the cache.

    Args:
        q: [batch, heads, head_dim]; bfloat16, float16 or float32. Kernels take heads of up to 256, and up to 32 query
            heads for each key head.
        keys, values: [batch, kv_heads, room, head_dim], as transformers' dynamic and static caches are, or with a
            ``table`` [pages, page_size, kv_heads, head_dim]; any strides, the dtype of ``q``. ``heads`` is a multiple
            of ``kv_heads``. Rows that belong to no key may hold anything.
        lengths: [batch] int32, the number of keys of each sequence, the new one included; at most the room.
        starts: [batch] int32, the first key of each sequence, after padding on the left; None for 0.
        table: [batch, most pages] int32, the pages of each sequence in order; entries that no key needs may be -1.
        sinks: [heads], a logit that is added to each head's denominator.
        scale: factor of the scores; None for head_dim ** -0.5.
        window: only the last ``window`` keys are seen; None for all.
        softcap: scores s become ``softcap * tanh(s / softcap)``; positive and finite.

    Returns:
        [batch, heads, head_dim], contiguous; 0 for a sequence without keys.

    Raises:
        ValueError: the shapes, dtypes or devices do not fit, or a number is out of its range.
        RuntimeError: a gradient is needed.
    """
    return _decode_attention(q, keys, values, lengths, starts, table, sinks, scale, window, softcap)


def _check(
    q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, starts: Tensor | None, table: Tensor | None,
    sinks: Tensor | None, scale: float | None, window: int | None, softcap: float | None, tuned: bool,
) -> None:  # fmt: skip
    op = "decode_attention"
    check_softcap(op, softcap)
    if window is not None and window < 1:
        raise ValueError(f"{op}: window must be positive, got {window}")
    shapes = f"got q {list(q.shape)}, keys {list(keys.shape)} and values {list(values.shape)}"
    if q.dim() != 3 or keys.dim() != 4 or keys.shape != values.shape or q.shape[2] != keys.shape[3]:
        cache = "[batch, kv_heads, room, head_dim]" if table is None else "[pages, page_size, kv_heads, head_dim]"
        raise ValueError(f"{op}: q must be [batch, heads, head_dim], and keys and values {cache}, {shapes}")
    if not q.shape[2]:
        raise ValueError(f"{op}: head_dim must be at least 1, {shapes}")
    heads, kv_heads = q.shape[1], keys.shape[1 if table is None else 2]
    if not q.dtype == keys.dtype == values.dtype:
        raise ValueError(f"{op}: keys and values must be {q.dtype} as q is, got {keys.dtype} and {values.dtype}")
    if table is None and q.shape[0] != keys.shape[0]:
        raise ValueError(f"{op}: q, keys and values must be of one batch, {shapes}")
    if heads % kv_heads if kv_heads else heads:
        raise ValueError(f"{op}: {heads} heads must be a multiple of the {kv_heads} key heads, {shapes}")
    check_vectors(op, q.shape[0], lengths=lengths, starts=starts)
    check_vectors(op, heads, sinks=sinks)
    if table is not None and (table.dim() != 2 or table.shape[0] != q.shape[0]):
        raise ValueError(f"{op}: table must be [{q.shape[0]}, most pages], got {list(table.shape)}")
    numbers = {"lengths": lengths, "starts": starts, "table": table}
    check_tensors(op, *numbers, q=q, keys=keys, values=values, sinks=sinks, **numbers)


def is_tuned(
    q_shape: tuple[int, ...], keys_shape: tuple[int, ...], dtype: torch.dtype, device: torch.device,
    window: int | None, has_softcap: bool, has_sinks: bool, has_starts: bool,
) -> bool:  # fmt: skip
    """Return whether a record says that kernels are the fastest for a cache [batch, kv_heads, room, head_dim]."""
    flags = window, has_softcap, has_sinks, has_starts
    return _search(q_shape, keys_shape, dtype, device, *flags, None, True) is not None


def _find(
    graded: bool, q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, starts: Tensor | None,
    table: Tensor | None, sinks: Tensor | None, scale: float | None, window: int | None, softcap: float | None,
    tuned: bool,
) -> Plans | None:  # fmt: skip
    if scale is not None and scale <= 0:
        return None
    pages = None if table is None else table.shape[1]
    flags = window, softcap is not None, sinks is not None, starts is not None, pages
    return _search(q.shape, keys.shape, q.dtype, q.device, *flags, tuned)


def _search(
    q_shape: tuple[int, ...], keys_shape: tuple[int, ...], dtype: torch.dtype, device: torch.device,
    window: int | None, has_softcap: bool, has_sinks: bool, has_starts: bool, pages: int | None, tuned: bool,
) -> Plans | None:  # fmt: skip
    """Return the plans for tensors of such shapes; ``pages`` is the width of a table."""
    batch, heads, head_dim = q_shape
    page_size, kv_heads = (1, keys_shape[1]) if pages is None else keys_shape[1:3]
    room = keys_shape[2] if pages is None else page_size * pages
    if not math.prod(q_shape) or not math.prod(keys_shape) or not room:
        return None
    group = heads // kv_heads
    if head_dim > WIDEST_HEAD or group > kernels.MOST_HEADS:
        return None
    room = bucket(room)
    splits = (tuned_plan_for if tuned else plan_for)(
        kernels.SPEC, device, batch * kv_heads, room, page_size, group, head_dim,
        window is not None and window < room, has_softcap, has_sinks, has_starts, pages is not None, dtype,
    )  # fmt: skip
    if tuned and splits is not None and pages is not None and page_size % splits.config["tile_n"] and is_invariant():
        # A tile ends with its page, where training's goes on; the tuner judged the bits of another page size.
        return None
    parts = 0 if splits is None else splits.blocks // (batch * kv_heads)
    if splits is None or parts == 1:
        return None if splits is None else Plans(splits, None)
    join = plan_for(kernels.JOIN, device, batch * kv_heads, parts, group, head_dim, dtype)
    return None if join is None else Plans(splits, join)


def _launch(
    plans: Plans, q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, starts: Tensor | None,
    table: Tensor | None, sinks: Tensor | None, scale: float | None, window: int | None, softcap: float | None,
    tuned: bool,
) -> Tensor:  # fmt: skip
    device, (batch, heads, head_dim) = q.get_device(), q.shape
    kv_heads = keys.shape[1 if table is None else 2]
    shape = (batch, kv_heads, heads // kv_heads, head_dim)
    see = Rows if q.is_cuda else viewed
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    logits = placeholder(2, torch.float32, q.device)
    if sinks is not None:
        logits = sinks.float().contiguous().view(shape[1:3])
    parts = placeholder(3, torch.float32, q.device)
    if plans.join is not None:
        parts = torch.empty(
            plans.splits.blocks, shape[2], kernels.part_of(head_dim), dtype=torch.float32, device=q.device
        )
    plans.splits.launch(
        device, disjoint(q).view(shape), disjoint(keys), disjoint(values), whole_numbers(lengths, 1, q.device),
        whole_numbers(starts, 1, q.device), whole_numbers(table, 2, q.device), logits,
        head_dim**-0.5 if scale is None else float(scale), float(softcap or 1.0), window or 1, see(out, shape), parts,
    )  # fmt: skip
    if plans.join is not None:
        pairs = batch * kv_heads
        plans.join.launch(device, parts, plans.splits.blocks // pairs, see(out, (pairs, *shape[2:])))
    return out


_CACHE = ("batch", "kv_heads", "room", "head_dim")
# The room is known by its bucket: otherwise each token of a growing cache would be a new kind of call.
_ROOM = "(keys.shape[:2], keys.numel() and bucket(keys.shape[-2]), keys.shape[3:])"


@operation(
    kernels.SPEC, name="decode_attention", arrays=(
        Array("q", "dtype", ("batch", "heads", "head_dim")), Array("keys", "dtype", _CACHE),
        Array("values", "dtype", _CACHE), Array("lengths", "int32", ("batch",)), Array("starts", "int32", ("batch",)),
        Array("table", "int32", ("batch", "pages")), Array("sinks", "sinks_dtype", ("heads",)),
        Array("out", "dtype", ("batch", "heads", "head_dim"), "output"),
    ), shapes={"keys": f"{_ROOM} if table is None else keys.shape", "values": "values.shape == keys.shape"},
    key=("scale is None or scale > 0", "window", "softcap", "tuned"), check=_check, find=_find, launch=_launch,
    no_gradient="call it under torch.no_grad(), or use tilekern.ops.attention",
)  # fmt: skip
def _decode_attention(
    q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, starts: Tensor | None, table: Tensor | None,
    sinks: Tensor | None, scale: float | None, window: int | None, softcap: float | None, tuned: bool = False,
) -> Tensor:  # fmt: skip
    """Compute the op; nothing waits for the numbers. ``tuned`` leaves calls without a measured record to torch."""
    if table is not None:
        pages = table.clamp(min=0).long()
        keys, values = (x[pages].flatten(1, 2).transpose(1, 2) for x in (keys, values))
    place = torch.arange(keys.shape[2], dtype=torch.int64, device=q.device)
    ends = lengths.clamp(max=keys.shape[2])[:, None]
    seen = place < ends
    if starts is not None:
        seen = seen & (place >= starts[:, None])
    if window is not None:
        seen = seen & (place >= ends - window)
    seen = seen[:, None, None]
    queries = q.unflatten(1, (keys.shape[1], -1)) if q.numel() else q.new_empty(*keys.shape[:2], 0, q.shape[2])
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("bhgd,bhkd->bhgk", queries, keys).to(wide) * (q.shape[2] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, torch.finfo(wide).min)
    if sinks is not None:
        logits = sinks.to(wide).view(1, *queries.shape[1:3], 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, logits), -1)
    weights = torch.softmax(scores, -1)[..., : keys.shape[2]].masked_fill(~seen, 0)
    values = values.masked_fill(~seen.mT, 0)
    return torch.einsum("bhgk,bhkd->bhgd", weights.to(q.dtype), values).reshape(q.shape).contiguous()


def by_tuned_kernels(*given: Any) -> Tensor | None:
    """Run the op on real tensors, given in its order; None if no record says that kernels are the fastest."""
    functions, arguments = _decode_attention.functions, (*given, True)  # type: ignore[attr-defined]
    try:
        plans = functions["plans_of"](False, *arguments)
        return None if plans is None else _launch(plans, *arguments)
    except NoVariant as error:
        refused(kernels.SPEC, error)
        return None
