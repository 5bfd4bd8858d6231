"""qwen2vl_mrope: multimodal rotary position embedding of q and k, as in Qwen2-VL, in one launch, out of place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilekern.kernels.qwen2vl_mrope import INVERSE, SPEC
from tilekern.ops.operation import operation
from tilekern.ops.rope import refuse, rope

Pair = tuple[Tensor, Tensor]


def qwen2vl_mrope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int], unsqueeze_dim: int = 1
) -> Pair:
    """Rotate the halves of every head of ``q`` and ``k`` by the angles of their tokens' three positions.

    Args:
        q: [batch, heads, tokens, head_dim]; bfloat16, float16 or float32, any strides.
        k: [batch, kv_heads, tokens, head_dim], of the dtype of ``q``.
        cos, sin: [3, batch, tokens, head_dim], with the second half of the last dimension repeating the first, as
            Hugging Face stores angles; it is not read. If they need a gradient, torch's own operations run.
        mrope_section: the number of frequencies that use the angle of each position in turn, head_dim / 2 in all. If
            there are not three sections, torch selects the angles, and ``rope`` does the rest.
        unsqueeze_dim: the dimension of the heads; 2 if q and k are [batch, tokens, heads, head_dim].

    Returns:
        The rotated q and k in the layout of their inputs, in the dtype that torch promotes q and cos to.

    Raises:
        ValueError: the shapes or the sections do not fit, or the devices differ.
    """
    if (
        cos.dim() != 4
        or cos.shape[0] != 3
        or sin.shape != cos.shape
        or 2 * sum(mrope_section) != cos.shape[-1]
        or any(section < 0 for section in mrope_section)
    ):
        raise ValueError(
            f"qwen2vl_mrope: cos {list(cos.shape)} and sin {list(sin.shape)} must be [3, batch, tokens, head_dim], and "
            f"mrope_section {list(mrope_section)} must add up to half of head_dim"
        )
    if unsqueeze_dim not in (1, 2):
        raise ValueError(f"qwen2vl_mrope: unsqueeze_dim must be 1 or 2, got {unsqueeze_dim}")
    if unsqueeze_dim == 2:
        q_out, k_out = qwen2vl_mrope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, mrope_section)
        return q_out.transpose(1, 2), k_out.transpose(1, 2)
    if len(mrope_section) != 3 or cos.shape[-1] != q.shape[-1]:
        return rope(q, k, *_chosen(cos, sin, mrope_section))
    time, height, _ = mrope_section
    return _turned(q, k, cos, sin, time, height)


def _chosen(cos: Tensor, sin: Tensor, sections: Sequence[int]) -> Pair:
    """Select the first half of the last dimension of [3, batch, tokens, head_dim], by sections of positions.

    Both are views of the result of one launch.
    """
    half = sum(sections)
    parts = [
        part[position % 3]
        for angles in (cos, sin)
        for position, part in enumerate(angles[..., :half].split(list(sections), -1))
    ]
    chosen = torch.cat(parts, -1)
    return chosen[..., :half], chosen[..., half:]


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, time: int, height: int) -> None:
    refuse("qwen2vl_mrope_sections", q, k, cos[0], sin[0], q.shape[-1])


def _turned_back(dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor, time: int, height: int) -> Pair:
    """Apply the transpose, the rotation by the negative angles."""
    return _by_rope(dq, dk, cos, -sin, time, height)


def _by_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, time: int, height: int) -> Pair:
    return rope(q, k, *_chosen(cos, sin, (time, height, cos.shape[-1] // 2 - time - height)))


@operation(
    SPEC, INVERSE, name="qwen2vl_mrope_sections", ungraded=("cos", "sin"), flags={"inverse": "False"},
    backward_flags={"inverse": "True"}, strided=True, check=_check, fallback_backward=_turned_back,
)  # fmt: skip
def _turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, time: int = 0, height: int = 0) -> Pair:
    """Rotate; the first ``time`` frequencies belong to the first position, the next ``height`` to the second.

    Without a kernel of its own this calls ``rope``, which may have records.
    """
    return _by_rope(q, k, cos, sin, time, height)
