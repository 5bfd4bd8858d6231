"""Packed sequences, one after the other in a batch of one: check and read their starts."""

from __future__ import annotations

import collections
import itertools
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")


class LastReads(Generic[_T]):
    """What was read of the last two tensors, as of queries and of keys, until something is written to them.

    All layers of a model pass the same mask, positions or starts, and reading a value waits for the GPU.
    """

    def __init__(self) -> None:
        self._last: collections.deque[tuple[weakref.ref[Tensor], int, _T]] = collections.deque(maxlen=2)

    def of(self, x: Tensor, read: Callable[[], _T]) -> _T:
        """Return what ``read`` returned for this tensor, or what it returns now."""
        # Tensors of inference mode have no version counter.
        version = None if x.is_inference() else x._version
        for tensor, seen, found in tuple(self._last):  # other threads read too
            if version is not None and tensor() is x and seen == version:
                return found
        found = read()
        if version is not None:
            self._last.appendleft((weakref.ref(x), version, found))
        return found


def check_starts(
    op: str, starts: Tensor, tokens: int, most: int | None, side: str = "", is_whole: bool = True
) -> None:  # fmt: skip
    """Raise ValueError for starts that do not split ``tokens`` into sequences.

    Values are checked on the CPU only, since reading them from a GPU would wait for it.

    Args:
        op: its name, for messages.
        starts: the argument ``cu_seqlens``, [sequences + 1].
        tokens: their number in the row.
        most: the argument ``max_seqlen``.
        side: the end of the arguments' names.
        is_whole: whether the last sequence must end with the last token.
    """
    if starts.dim() != 1 or len(starts) < 2:
        raise ValueError(f"{op}: cu_seqlens{side} must be [sequences + 1], got {list(starts.shape)}")
    if starts.device.type != "cpu" or torch.compiler.is_compiling() or type(starts) is not Tensor:
        return
    found = starts.tolist()
    lengths = [end - start for start, end in itertools.pairwise(found)]
    if found[0] or min(lengths) < 0 or found[-1] > tokens or (is_whole and found[-1] < tokens):
        raise ValueError(
            f"{op}: cu_seqlens{side} must start with 0, never fall, and end with {'' if is_whole else 'at most '}"
            f"{tokens}, the number of tokens; it starts with {found[0]}, its least step is {min(lengths)}, and it ends "
            f"with {found[-1]}"
        )
    if most is not None and most < max(lengths):
        raise ValueError(f"{op}: the longest sequence has {max(lengths)} tokens, got max_seqlen{side} {most}")


def can_read() -> bool:
    """Return whether values of tensors may be read: not while a graph is traced or captured."""
    return not (torch.compiler.is_compiling() or torch.jit.is_tracing() or is_capturing())


# Whether the step that is captured has run before in the same way, so that libraries have made their plans for it.
is_rehearsed = False


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured; a build of torch without CUDA cannot tell."""
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError:
        return False


_longest = LastReads[int]()


def longest(starts: Tensor, tokens: int) -> int:
    """Return the length of the longest sequence, or ``tokens``, an upper bound, if values cannot be read."""
    if not can_read() or starts.device.type == "meta" or type(starts) is not Tensor:
        return tokens
    return _longest.of(starts, lambda: int(starts.diff().max()))
