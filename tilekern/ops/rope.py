"""rope: rotary position embedding of q and k in one launch, out of place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilekern.kernels import llama4_rope as pairs
from tilekern.kernels import rotations_to as to
from tilekern.kernels.rope import INVERSE, SPEC
from tilekern.ops.operation import operation
from tilekern.ops.registration import check_tensors, plans_of_both, readable
from tilekern.runtime.dispatch import Plan

Pair = tuple[Tensor, Tensor]
Plans = tuple[Plan, Plan | None, torch.dtype]


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, twice: bool = False, rotary_dim: int | None = None,
    interleaved: bool = False,
) -> Pair:  # fmt: skip
    """Rotate the halves of every head of ``q`` and ``k``, or pairs in it, by their positions' angles.

    Args:
        q: [batch, heads, tokens, head_dim]; bfloat16, float16 or float32, any strides.
        k: [batch, kv_heads, tokens, head_dim], of the dtype of ``q``.
        cos, sin: [1 or batch, tokens, rotary_dim or rotary_dim / 2] (or without the first dimension); no gradient
            flows to them.
        twice: promises that the last dimension of cos and sin holds the same angles twice, as Hugging Face stores
            them; then only the first half is read.
        rotary_dim: how many numbers at the beginning of each head are rotated, an even number; the others are copied.
            None for the whole head if cos has its size or half of it; otherwise, without ``twice``, None for the size
            of cos.
        interleaved: rotate the pairs (x[2i], x[2i + 1]) by angle i instead of (x[i], x[i + rotary_dim / 2]). Angles of
            the size ``rotary_dim`` then contain each angle twice in a row, as Cohere stores them; for GLM's angles,
            pass the first half.

    Returns:
        The rotated q and k in the layout of their inputs, in the dtype that torch promotes q and cos to.

    Raises:
        ValueError: the shapes do not go together, ``rotary_dim`` is odd or larger than a head, or the devices differ.
    """
    if cos.dim() == 2:
        cos, sin = cos.unsqueeze(0), sin.unsqueeze(0)
    if rotary_dim is not None or interleaved:
        return _rotated(q, k, cos, sin, twice, rotary_dim, interleaved)
    full = not twice and cos.shape[-1] == q.shape[-1]
    if not twice and not full and 2 * cos.shape[-1] != q.shape[-1]:
        return _rotated(q, k, cos, sin, twice, cos.shape[-1], interleaved)
    return _rope(q, k, cos, sin, full)


def _rotated(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, twice: bool, rotary_dim: int | None, interleaved: bool
) -> Pair:
    """Rotate part of each head, or pairs, for :func:`rope`."""
    size, width = q.shape[-1], cos.shape[-1]
    rotary = rotary_dim or (size if width == size or 2 * width == size else width)
    if rotary % 2 or not 0 < rotary <= size or width not in (rotary, rotary // 2):
        raise ValueError(
            f"rope: rotary_dim must be even, at most {size} as the heads' size, and that of cos {list(cos.shape)} or "
            f"twice that, got {rotary}"
        )
    full = width == rotary and not (twice or interleaved)
    if not interleaved:
        return _rope(q, k, cos, sin, full) if rotary == size else rope_part(q, k, cos, sin, full, rotary)
    if width == rotary:
        cos, sin = cos[..., ::2], sin[..., ::2]
    # The kernel of pairs returns the dtype of its input.
    dtype = torch.promote_types(q.dtype, cos.dtype)
    return rope_part(q.to(dtype), k.to(dtype), cos, sin, full, rotary, interleaved)


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, full: bool) -> None:
    refuse("rope", q, k, cos, sin, q.shape[-1])


def refuse(op: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, size: int) -> None:
    """Raise ValueError if shapes, dtypes or devices do not fit; ``size`` numbers of each head are rotated."""
    if q.dim() != 4 or k.dim() != 4 or k.shape[0] != q.shape[0] or k.shape[2:] != q.shape[2:] or k.dtype != q.dtype:
        raise ValueError(f"{op}: q {list(q.shape)} {q.dtype} and k {list(k.shape)} {k.dtype} may differ in heads only")
    check_angles(op, cos, sin, q.shape[0], q.shape[2], size)
    if cos.dtype != sin.dtype:
        raise ValueError(f"{op}: cos and sin must have one shape and dtype, got {cos.dtype} and {sin.dtype}")
    check_tensors(op, q=q, k=k, cos=cos, sin=sin)


def check_angles(op: str, cos: Tensor, sin: Tensor, batch: int, tokens: int, head_dim: int) -> None:
    """Refuse angles that are not one for each token and number (or pair of numbers) of heads of even size."""
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


def turned_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    """Rotate the halves of q and k [batch, heads, tokens, head_dim] in torch."""
    half = q.shape[-1] // 2
    if cos.shape[-1] == half:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def turned(x: Tensor) -> Tensor:
        return torch.cat((-x[..., half:], x[..., :half]), -1)

    return q * cos + turned(q) * sin, k * cos + turned(k) * sin


def _turned_back(dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor, full: bool) -> Pair:
    """Apply the transpose: each half's sine multiplies the other half's gradient, with the signs changed."""
    half = dq.shape[-1] // 2
    first, second = sin[..., :half], sin[..., -half:]
    return turned_halves(dq, dk, cos, torch.cat((-second, -first), -1) if cos.shape[-1] != half else -sin)


@operation(
    SPEC, INVERSE, name="rope", ungraded=("cos", "sin"), flags={"full": "full", "inverse": "False"},
    backward_flags={"inverse": "True"}, strided=True, check=_check, fallback_backward=_turned_back,
)  # fmt: skip
def _rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, full: bool) -> Pair:
    """Rotate; ``full`` says that the halves of the angles differ, so both are read."""
    return turned_halves(q, k, cos, sin)


def _turned_back_to(dq: Tensor, dk: Tensor, *rest: Any) -> Pair:
    turned = _turned_back(dq, dk, *rest)
    return turned[0].to(dq.dtype), turned[1].to(dk.dtype)


@operation(
    to.ROPE, to.ROPE_INVERSE, ungraded=("cos", "sin"), flags={"full": "full", "inverse": "False"},
    backward_flags={"inverse": "True"}, strided=True, check=_check, fallback_backward=_turned_back_to,
)  # fmt: skip
def rope_to(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, full: bool = False) -> Pair:
    """Rotate as ``rope``, in the dtype of q and k, rounded once; so are their gradients."""
    turned = turned_halves(q, k, cos, sin)
    return turned[0].to(q.dtype), turned[1].to(k.dtype)


def _check_part(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, full: bool, rotary: int, interleaved: bool) -> None:
    refuse("rope_part", q, k, cos, sin, rotary or q.shape[-1])


def _find(graded: bool, q: Tensor, k: Tensor, *rest: Any) -> Plans | None:
    cos, _, full, rotary, interleaved = rest
    if not q.numel() or not k.numel():
        return None
    sizes = (q.shape[2], q.shape[0], q.shape[1], k.shape[1], rotary or q.shape[3])
    dtypes = (q.dtype, cos.dtype)

    begin = (pairs.SPEC, *sizes) if interleaved else (SPEC, *sizes, full)
    plans = plans_of_both(graded, q.device, (*begin, False, *dtypes), (*begin, True, *dtypes))
    return None if plans is None else (*plans, q.dtype)


def _launched(
    plan: Plan, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, rotary: int, interleaved: bool
) -> Pair:
    """Launch on views of the rotated parts, and copy the others."""
    size = rotary or q.shape[-1]
    q, k = readable(q), readable(k)
    made = torch.empty_like(q, dtype=dtype), torch.empty_like(k, dtype=dtype)
    parts = [x[..., :size] for x in (q, k, *made)]
    angles = [readable(cos), readable(sin)]
    if interleaved:
        parts = [x.transpose(1, 2) for x in parts]
        angles = [torch.stack((cos, sin), -1).flatten(-2)]
    plan.launch(q.get_device(), *parts[:2], *angles, *parts[2:])
    if size < q.shape[-1]:
        for x, y in zip((q, k), made, strict=True):
            y[..., size:] = x[..., size:]
    return made


def _launch(plans: Plans, q: Tensor, k: Tensor, *rest: Any) -> Pair:
    cos, sin, _, rotary, interleaved = rest
    return _launched(plans[0], q, k, cos, sin, torch.promote_types(q.dtype, cos.dtype), rotary, interleaved)


def _launch_backward(
    plans: tuple[Plan, Plan, torch.dtype], needs: tuple[bool, ...], dq: Tensor, dk: Tensor, *rest: Any
) -> Pair:
    cos, sin, _, rotary, interleaved = rest
    return _launched(plans[1], dq, dk, cos, sin, plans[2], rotary, interleaved)


def _pairs_turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def turned(x: Tensor) -> Tensor:
        one, other = x[..., ::2], x[..., 1::2]
        return torch.stack((one * cos - other * sin, other * cos + one * sin), -1).flatten(-2)

    return turned(q), turned(k)


def _part_turned_back(
    dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor, full: bool, rotary: int, interleaved: bool
) -> Pair:
    size = rotary or dq.shape[-1]
    one, other = dq[..., :size], dk[..., :size]
    turned = _pairs_turned(one, other, cos, -sin) if interleaved else _turned_back(one, other, cos, sin, full)
    return torch.cat((turned[0], dq[..., size:]), -1), torch.cat((turned[1], dk[..., size:]), -1)


@operation(
    SPEC, INVERSE, ungraded=("cos", "sin"), flags={"full": "full", "inverse": "False"},
    backward_flags={"inverse": "True"}, key=("rotary", "interleaved"), strided=True, check=_check_part, find=_find,
    launch=_launch, launch_backward=_launch_backward, fallback_backward=_part_turned_back,
)  # fmt: skip
def rope_part(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, full: bool = False, rotary: int = 0, interleaved: bool = False
) -> Pair:
    """Rotate the first ``rotary`` numbers of each head, all for 0; pairs if ``interleaved``.

    Its launches are written by hand: they take views of the rotated part and copy the rest, and the kernel of
    ``llama4_rope`` rotates pairs.
    """
    size = rotary or q.shape[-1]
    turned = (_pairs_turned if interleaved else turned_halves)(q[..., :size], k[..., :size], cos, sin)
    rest = (x[..., size:].to(y.dtype) for x, y in zip((q, k), turned, strict=True))
    one, other = (torch.cat(both, -1) for both in zip(turned, rest, strict=True))
    return one, other
