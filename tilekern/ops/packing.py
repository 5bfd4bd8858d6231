"""Packed sequences, one after the other in a batch of one: check and read their starts."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor


def check_starts(op: str, starts: Tensor, tokens: int, max_seqlen: int | None) -> None:
    """Raise ValueError for ``cu_seqlens`` that do not split ``tokens`` into sequences.

    Values are checked on the CPU only, since reading them from a GPU would wait for it.
    """
    if starts.dim() != 1 or len(starts) < 2:
        raise ValueError(f"{op}: cu_seqlens must be [sequences + 1], got {list(starts.shape)}")
    if starts.device.type != "cpu" or torch.compiler.is_compiling() or type(starts) is not Tensor:
        return
    found = starts.tolist()
    lengths = [end - start for start, end in itertools.pairwise(found)]
    if found[0] or min(lengths) < 0 or found[-1] != tokens:
        raise ValueError(
            f"{op}: cu_seqlens must start with 0, never fall, and end with {tokens}, the number of tokens; it starts "
            f"with {found[0]}, its least step is {min(lengths)}, and it ends with {found[-1]}"
        )
    if max_seqlen is not None and max_seqlen < max(lengths):
        raise ValueError(f"{op}: the longest sequence has {max(lengths)} tokens, got max_seqlen {max_seqlen}")


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


# The last starts that were read, their version at that time, and the length of their longest sequence.
_last: tuple[Any, int, int] = (lambda: None, 0, 0)


def longest(starts: Tensor, tokens: int) -> int:
    """Return the length of the longest sequence, or ``tokens``, an upper bound, if values cannot be read.

    All layers of a model pass the same tensor, which is read once.
    """
    global _last  # noqa: PLW0603
    if not can_read() or starts.device.type == "meta" or type(starts) is not Tensor:
        return tokens
    tensor, version, length = _last
    # Tensors of inference mode have no version.
    if starts.is_inference() or tensor() is not starts or version != starts._version:
        length = int(starts.diff().max())
        if not starts.is_inference():
            _last = (weakref.ref(starts), starts._version, length)
    return length
