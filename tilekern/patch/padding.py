"""The tokens of a batch that a padding mask leaves, read once for all masks and layers of a forward."""

from __future__ import annotations

import itertools
import weakref
from typing import Any, NamedTuple

import torch


class Padding(NamedTuple):
    """The run of tokens in each row of a batch; padding stands before it and behind it.

    Attributes:
        runs: the first token of each row, and the end of its run.
        tokens: the number of tokens of each row, with padding; a cache may have more room.
        starts: [rows + 1] int32, the start of each run if they follow one another, as ``cu_seqlens`` of attention.
        places: [tokens in runs] int64, their places in the batch's rows, one row after the other.
        longest: at least the length of the longest run; takes few different values, since each needs its own plans.
    """

    runs: tuple[tuple[int, int], ...]
    tokens: int
    starts: torch.Tensor
    places: torch.Tensor
    longest: int

    @property
    def is_behind(self) -> bool:
        """Return whether padding only stands behind: no token sees it, if none sees a later one."""
        return not any(first for first, _ in self.runs)

    def to(self, device: torch.device | str | None) -> Padding:
        """Return the same on a device; None keeps the current device."""
        return self._replace(starts=self.starts.to(device), places=self.places.to(device))


# Whether the masks of the step that is captured hide only what stands behind the tokens: it cannot look.
is_behind_in_graph = False
# The last mask that was read, its version at that time, and what it says.
_last: tuple[Any, int, Padding | None] = (lambda: None, -1, None)


def padding_of(mask: torch.Tensor) -> Padding | None:
    """Return the runs of a mask [rows, tokens]; None if a row has none, or has tokens behind a gap."""
    global _last  # noqa: PLW0603
    tensor, version, found = _last
    # Tensors of inference mode have no version counter.
    current = -1 if mask.is_inference() else mask._version
    if current >= 0 and tensor() is mask and version == current:
        return found
    found = _read(mask)
    _last = (weakref.ref(mask), current, found)
    return found


def without_padding(rows: int, tokens: int, device: torch.device | str) -> Padding:
    """Return the runs of a batch that has no padding."""
    return _of_runs(((0, tokens),) * rows, tokens, device)


def _read(mask: torch.Tensor) -> Padding | None:
    shown, tokens = mask.bool(), mask.shape[1]
    firsts, counts, behind = shown.int().argmax(1), shown.sum(1), shown.flip(1).int().argmax(1)
    told = torch.stack((firsts, counts, tokens - behind)).tolist()  # one wait for all
    runs = tuple((first, end) for first, _, end in zip(*told, strict=True))
    if any(not count or end - first != count for (first, end), count in zip(runs, told[1], strict=True)):
        return None
    return _of_runs(runs, tokens, mask.device)


def _of_runs(runs: tuple[tuple[int, int], ...], tokens: int, device: torch.device | str) -> Padding:
    counts = [end - first for first, end in runs]
    starts = torch.tensor(list(itertools.accumulate(counts, initial=0)), dtype=torch.int32, device=device)
    places = torch.cat([torch.arange(row * tokens + a, row * tokens + b) for row, (a, b) in enumerate(runs)])
    return Padding(runs, tokens, starts, places.to(device), min(1 << (max(counts) - 1).bit_length(), tokens))
