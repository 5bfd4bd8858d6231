"""Attention "tilekern" inside of torch's ``context_parallel`` (accelerate's ``maybe_context_parallel`` is the same).

It shards each sequence over the ranks, and replaces torch's own attention alone: any other would see a rank's own
tokens only, and give a wrong loss without a word. Here the ranks exchange tokens for heads (DeepSpeed calls that
Ulysses), so that each computes all tokens of its heads by the ordinary op. Heads do not depend on each other, so
windows, sinks, soft caps and packed sequences need nothing else.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tilekern.errors import InputError
from tilekern.patch.guards import constant_in_graphs
from tilekern.patch.parallel import variables_of
from tilekern.patch.positions import Positions, cut, number_of_sequences
from tilekern.patch.told import ToldMask

# What torch's ``context_parallel`` replaces in torch.nn.functional. Code that compares the two is guarded in a graph.
SDPA = torch._C._nn.scaled_dot_product_attention
_HOME = "torch.distributed.tensor.experimental."
_WORDS = 'attn_implementation="tilekern" in context_parallel'
# The attribute of torch's stand-in that holds what masks told of rows, by their tokens: whether one held several
# sequences. It is gone when the context ends.
_ROWS = "_tilekern_rows"


class Shards(NamedTuple):
    """How the ranks share each row.

    Attributes:
        group: their process group.
        size: their number.
        rank: this one's.
        pieces: how many pieces of a row a rank has: one, or two, of which the second is as far from the end as the
            first is from the beginning.
        rows: whether rows of so many tokens held several sequences.
    """

    group: Any
    size: int
    rank: int
    pieces: int
    rows: dict[int, bool]

    def order(self) -> list[tuple[int, int]]:
        """Return the rank and the number there of each piece of a row."""
        there = [(rank, 0) for rank in range(self.size)]
        return there if self.pieces == 1 else [*there, *((rank, 1) for rank in reversed(range(self.size)))]

    def joined(self, parts: torch.Tensor) -> torch.Tensor:
        """Return [batch, tokens, ...] of all ranks' parts [size, batch, tokens of a rank, ...]."""
        pieces = parts.unflatten(2, (self.pieces, -1))
        return torch.cat([pieces[rank, :, number] for rank, number in self.order()], 1)

    def parted(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the inverse of :meth:`joined`."""
        pieces = whole.unflatten(1, (self.size * self.pieces, -1))
        places = {place: number for number, place in enumerate(self.order())}
        own = [pieces[:, places[rank, number]] for rank in range(self.size) for number in range(self.pieces)]
        return torch.stack(own).unflatten(0, (self.size, self.pieces)).transpose(1, 2).flatten(2, 3)

    def exchanged(self, parts: torch.Tensor) -> torch.Tensor:
        """Send each rank its part of [size, ...], and return what each has sent."""
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, parts.contiguous(), group=self.group)
        return received

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Return [size, ...], each rank's tensor of the same shape."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.stack(parts)


@constant_in_graphs
def shards_here() -> Shards | None:
    """Return how sequences are sharded now; None outside of ``context_parallel``, and inside of it with one rank.

    Raises:
        InputError: torch's context parallelism is another than this module knows.
    """
    stand_in = torch.nn.functional.scaled_dot_product_attention
    if not isinstance(stand_in, FunctionType) or not str(stand_in.__module__).startswith(_HOME):
        return None
    mesh = variables_of(stand_in).get("device_mesh")
    options = stand_in.__globals__.get("_cp_options")
    if mesh is None or options is None or not hasattr(options, "enable_load_balance"):
        raise InputError(f'{_WORDS}: this torch implements it in a way that tilekern does not know; use "sdpa"')
    if mesh.size() == 1:
        return None
    if torch.compiler.is_compiling():
        raise InputError(f'{_WORDS}: torch.compile cannot trace it; compile no attention, or use "sdpa"')
    rows = vars(stand_in).setdefault(_ROWS, {})
    pieces = 2 if options.enable_load_balance else 1
    return Shards(mesh.get_group(), mesh.size(), mesh.get_local_rank(), pieces, rows)


def refuse_labels() -> None:
    """Raise InputError where sequences are sharded: the label of a shard's last token is on another rank."""
    if shards_here() is not None:
        raise InputError(
            "context_parallel: labels of shards cannot be shifted; shift those of whole rows, and give them as "
            "shift_labels beside labels, both among its buffers"
        )


def mask_of(
    shards: Shards, given: Positions, visible: torch.Tensor | None, batch: int, tokens: int, window: int | None
) -> ToldMask:
    """Return the mask of whole rows, of which this rank has ``tokens`` each.

    All ranks gather the positions, which tell the sequences of a packed row, and whether they fit the shards.

    Args:
        shards: how rows are shared.
        given: this rank's positions, [batch or 1, tokens].
        visible: [batch, tokens], False for padding; None without padding.
        batch: number of rows.
        tokens: number of tokens of this rank.
        window: as in the mask.

    Raises:
        InputError: positions are missing or do not count up, padding is in front, or ranks differ; on all ranks alike.
    """
    ids = given.ids
    if ids is None or not given.are_given or ids.dim() != 2 or ids.shape[1] != tokens:
        raise InputError(f"{_WORDS}: give position_ids [batch, tokens], and list them among buffers with input_ids")
    sizes = torch.tensor([batch, tokens, len(ids), visible is not None], dtype=torch.int64, device=ids.device)
    if bool((shards.gathered(sizes) != sizes).any()):
        raise InputError(f"{_WORDS}: ranks have other numbers of tokens; pad rows to a multiple of {shards.size}")
    values = ids.long() if visible is None else torch.cat((ids.long(), visible.to(ids.device).long()))
    whole = shards.joined(shards.gathered(values)).cpu()
    places, seen = whole[: len(ids)], whole[len(ids) :].bool()
    if bool((~seen[:, :-1] & seen[:, 1:]).any()):
        raise InputError(f"{_WORDS}: padding must be behind all tokens of a row")
    jumps = places.diff() != 1
    if len(seen):
        jumps = jumps & seen[:, 1:]
    if bool((jumps & (places[:, 1:] != places.amin(1, keepdim=True))).any()):
        raise InputError(f"{_WORDS}: position_ids must be sharded as input_ids are; list both among its buffers")
    found = cut(number_of_sequences(places), ids.device) if bool(jumps.any()) else None
    if found is not None and batch > 1:
        raise InputError(f"{_WORDS}: packed sequences need a batch of one row, got {batch}")
    everywhere = whole.shape[1]
    shards.rows[everywhere] = shards.rows.get(everywhere, False) or found is not None
    starts = torch.empty(0, dtype=torch.int32, device=ids.device) if found is None else found.starts
    return ToldMask(starts, everywhere if found is None else found.longest, window, everywhere, everywhere, batch)


def sequences_of(shards: Shards, mask: Any, tokens: int) -> tuple[torch.Tensor | None, int]:
    """Return the starts of the sequences in a row, or None, and the longest length, by the mask that a layer has got.

    accelerate drops masks on their way to the layers; then the rows of this context must hold one sequence each.

    Raises:
        InputError: the mask is another one, or was dropped and rows hold several sequences.
    """
    everywhere = tokens * shards.size
    if mask is None and shards.rows.get(everywhere) is False:
        return None, everywhere
    if not isinstance(mask, ToldMask) or mask.shape[3] != everywhere:
        said = "packed sequences need the mask, which was dropped" if mask is None else "it takes no mask of your own"
        raise InputError(f"{_WORDS}: {said}; use rows of one sequence, without a 4-dimensional attention_mask")
    return (mask.starts if len(mask.starts) else None), mask.longest


def to_heads(shards: Shards, x: torch.Tensor) -> torch.Tensor:
    """Return all tokens of this rank's heads, [batch, tokens, heads / size, head_dim], for its tokens of all heads."""
    return _ToHeads.apply(x, shards)


def to_tokens(shards: Shards, x: torch.Tensor) -> torch.Tensor:
    """Return the inverse of :func:`to_heads`."""
    return _ToTokens.apply(x, shards)


def with_enough_heads(shards: Shards, heads: int, x: torch.Tensor) -> torch.Tensor:
    """Repeat key heads, [batch, tokens, kv_heads, head_dim], as often as each rank needs one of its own.

    Raises:
        InputError: the ranks cannot share the heads of the queries evenly.
    """
    if heads % shards.size:
        raise InputError(f"{_WORDS}: {heads} heads cannot be shared by {shards.size} ranks")
    group = heads // x.shape[2]
    times = next(n for n in range(1, group + 1) if group % n == 0 and x.shape[2] * n % shards.size == 0)
    return x if times == 1 else x.repeat_interleave(times, 2)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shards: Shards) -> torch.Tensor:
        ctx.shards = shards
        parts = x.unflatten(2, (shards.size, -1)).permute(2, 0, 1, 3, 4)
        return shards.joined(shards.exchanged(parts))

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _ToTokens.apply(slope, ctx.shards), None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shards: Shards) -> torch.Tensor:
        ctx.shards = shards
        parts = shards.exchanged(shards.parted(x))
        return parts.permute(1, 2, 0, 3, 4).flatten(2, 3)

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _ToHeads.apply(slope, ctx.shards), None
