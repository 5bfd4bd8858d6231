"""qwen2vl_mrope: multimodal rotary position embedding of q and k, as Qwen2-VL has it, out of place.

Each frequency has the angle of one of a token's three positions (time, height, width). These angles are put together
by torch, and ``rope`` does the rest: they are a thirtieth of what it moves.

It is written by hand and not declared, as it has no kernel of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilekern.ops.rope import rope


def qwen2vl_mrope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mrope_section: Sequence[int],
    unsqueeze_dim: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Rotate the halves of every head of ``q`` and ``k`` by the angles of their tokens' three positions.

    Args:
        q: [batch, heads, tokens, head_dim]; bfloat16, float16 or float32, any strides.
        k: [batch, kv_heads, tokens, head_dim], of the dtype of ``q``.
        cos, sin: [3, batch, tokens, head_dim], of which the second half of the last dimension repeats the first, as
            Hugging Face stores angles, and is not read. Where they need a gradient torch's own operations run.
        mrope_section: how many frequencies take the angle of each position in turn, head_dim / 2 in all.
        unsqueeze_dim: the dimension of the heads; 2 where q is [batch, tokens, heads, head_dim], and k likewise.

    Returns:
        The rotated q and k in the layout of their inputs, in the dtype that torch promotes q and cos to.

    Raises:
        ValueError: the shapes or the sections do not go together, or the devices differ.
    """
    if cos.dim() != 4 or cos.shape[0] != 3 or sin.shape != cos.shape or 2 * sum(mrope_section) != cos.shape[-1]:
        raise ValueError(
            f"qwen2vl_mrope: cos {list(cos.shape)} and sin {list(sin.shape)} must be [3, batch, tokens, head_dim], and "
            f"mrope_section {list(mrope_section)} must add up to half of head_dim"
        )
    if unsqueeze_dim not in (1, 2):
        raise ValueError(f"qwen2vl_mrope: unsqueeze_dim must be 1 or 2, got {unsqueeze_dim}")
    angles = _chosen(cos, sin, mrope_section)
    if unsqueeze_dim == 1:
        return rope(q, k, *angles)
    q_out, k_out = rope(q.transpose(1, 2), k.transpose(1, 2), *angles)
    return q_out.transpose(1, 2), k_out.transpose(1, 2)


def _chosen(
    cos: torch.Tensor, sin: torch.Tensor, sections: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Of each [3, batch, tokens, head_dim] the first half of the last dimension, each section from its position.

    Both come out of one launch, as views of what it writes.
    """
    half = sum(sections)
    parts = [
        part[position % 3]
        for angles in (cos, sin)
        for position, part in enumerate(angles[..., :half].split(list(sections), -1))
    ]
    chosen = torch.cat(parts, -1)
    return chosen[..., :half], chosen[..., half:]
