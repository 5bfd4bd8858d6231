"""Sequences that stand one after the other in a batch of one: what says where each begins."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch


def check_starts(op: str, starts: torch.Tensor, tokens: int, max_seqlen: int | None) -> None:
    """Refuse ``cu_seqlens`` that do not cut ``tokens`` into sequences.

    Values are looked at where they lie on the CPU only: to read them from a GPU would be to wait for it.
    """
    if starts.dim() != 1 or len(starts) < 2:
        raise ValueError(f"{op}: cu_seqlens must be [sequences + 1], got {list(starts.shape)}")
    if starts.device.type != "cpu" or torch.compiler.is_compiling() or type(starts) is not torch.Tensor:
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
    """Whether values of tensors may be read: not while a graph is traced or captured."""
    return not (torch.compiler.is_compiling() or torch.jit.is_tracing() or is_capturing())


def is_capturing() -> bool:
    """Whether a CUDA graph is captured; a build of torch without CUDA cannot be asked."""
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError:
        return False


# The last starts that were read, how often they had been written to then, and the longest of their sequences.
_last: tuple[Any, int, int] = (lambda: None, 0, 0)


def longest(starts: torch.Tensor, tokens: int) -> int:
    """The length of the longest sequence; ``tokens``, which is never too short, where values cannot be read.

    The layers of a model hand over the same tensor, which is read for the first of them.
    """
    global _last  # noqa: PLW0603
    if not can_read() or starts.device.type == "meta" or type(starts) is not torch.Tensor:
        return tokens
    tensor, version, length = _last
    # Tensors of inference mode do not know how often they were written to.
    if starts.is_inference() or tensor() is not starts or version != starts._version:
        length = int(starts.diff().max())
        if not starts.is_inference():
            _last = (weakref.ref(starts), starts._version, length)
    return length
