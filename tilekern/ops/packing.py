"""Sequences that stand one after the other in a batch of one: what says where each begins."""

from __future__ import annotations

import itertools

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
