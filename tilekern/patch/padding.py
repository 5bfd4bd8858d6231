"""The tokens of a batch that a padding mask leaves, read once for all masks and layers of a forward."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from tilekern.ops.packing import LastReads


class Keys(NamedTuple):
    """The keys that each sequence sees: from ``starts`` (None: the first), [batch] int32, to before ``lengths``."""

    lengths: torch.Tensor
    starts: torch.Tensor | None

    def clone(self) -> Keys:
        """Return a copy with tensors of its own."""
        return Keys(self.lengths.clone(), None if self.starts is None else self.starts.clone())

    def copy_(self, other: Keys) -> None:
        """Take the values of another one, which has starts if this one has."""
        self.lengths.copy_(other.lengths)
        if self.starts is not None:
            self.starts.copy_(other.starts)


@dataclass(frozen=True, eq=False)
class Padding:
    """The run of tokens in each row of a batch; padding stands before it and behind it.

    Attributes:
        runs: the first token of each row, and the end of its run; both are the end of a row that has none yet.
        tokens: the number of tokens of each row, with padding; a cache may have more room.
        device: the device of the tensors here, which are made when they are first asked for. That may be in inference
            mode, and autograd must still be able to save them.
    """

    runs: tuple[tuple[int, int], ...]
    tokens: int
    device: torch.device

    @property
    def is_behind(self) -> bool:
        """Return whether padding only stands behind: no token sees it, if none sees a later one."""
        return not any(first for first, _ in self.runs)

    @property
    def is_none(self) -> bool:
        """Return whether there is no padding."""
        return all(run == (0, self.tokens) for run in self.runs)

    @property
    def longest(self) -> int:
        """Return at least the length of the longest run; takes few different values, since each needs its own plans."""
        return min(1 << (max(end - first for first, end in self.runs) - 1).bit_length(), self.tokens)

    @functools.cached_property
    @torch.inference_mode(mode=False)
    def starts(self) -> torch.Tensor:
        """Return the start of each run if they follow one another, [rows + 1] int32, as ``cu_seqlens`` of attention."""
        counts = (end - first for first, end in self.runs)
        return torch.tensor(list(itertools.accumulate(counts, initial=0)), dtype=torch.int32, device=self.device)

    @functools.cached_property
    @torch.inference_mode(mode=False)
    def keys(self) -> Keys:
        """Return the keys that the last token of each row sees."""
        firsts, ends = torch.tensor(self.runs, dtype=torch.int32, device=self.device).unbind(1)
        return Keys(ends.contiguous(), None if self.is_behind else firsts.contiguous())

    @functools.cached_property
    @torch.inference_mode(mode=False)
    def places(self) -> torch.Tensor:
        """Return the places of the runs' tokens in the batch, [tokens in runs] int64, one row after the other."""
        spans = ((row * self.tokens + first, row * self.tokens + end) for row, (first, end) in enumerate(self.runs))
        return torch.cat([torch.arange(*span, dtype=torch.int64, device=self.device) for span in spans])

    def to(self, device: torch.device) -> Padding:
        """Return the same on a device."""
        return self if device == self.device else replace(self, device=device)


# Whether the masks of the step that is captured hide only what stands behind the tokens: it cannot look.
is_behind_in_graph = False
_last = LastReads[Padding | None]()


def padding_of(mask: torch.Tensor) -> Padding | None:
    """Return the runs of a mask [rows, tokens]; None if no row has one, or a row has tokens behind a gap."""
    return _last.of(mask, lambda: _read(mask))


def _read(mask: torch.Tensor) -> Padding | None:
    shown, tokens = mask.bool(), mask.shape[1]
    firsts, counts, behind = shown.int().argmax(1), shown.sum(1), shown.flip(1).int().argmax(1)
    told = torch.stack((firsts, counts, tokens - behind)).tolist()  # one wait for all
    runs = tuple((first, end) if count else (tokens, tokens) for first, count, end in zip(*told, strict=True))
    if not any(told[1]) or any(end - first != count for (first, end), count in zip(runs, told[1], strict=True)):
        return None
    return Padding(runs, tokens, mask.device)
