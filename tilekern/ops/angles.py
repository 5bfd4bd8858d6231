"""The angles of rotary position embeddings: what shapes the ops take them in."""

from __future__ import annotations

import torch


def check_angles(op: str, cos: torch.Tensor, sin: torch.Tensor, batch: int, tokens: int, head_dim: int) -> None:
    """Refuse angles that are not those of every token of heads of an even size, in full or their first half alone."""
    fits = (
        cos.dim() == 3
        and cos.shape[0] in (1, batch)
        and cos.shape[1] == tokens
        and cos.shape[2] in (head_dim, head_dim // 2)
    )
    if head_dim % 2 or not fits or cos.shape != sin.shape:
        raise ValueError(
            f"{op}: cos {list(cos.shape)} and sin {list(sin.shape)} must have one shape, [1 or {batch}, {tokens}, "
            f"{head_dim} or {head_dim // 2}], with an even head size"
        )
