"""rope: rotary position embedding of q and k in one launch, out of place."""

from __future__ import annotations

from typing import Any

import torch

from tilekern.kernels import llama4_rope as pairs
from tilekern.kernels.rope import INVERSE, SPEC
from tilekern.ops.angles import check_angles
from tilekern.ops.operation import operation
from tilekern.ops.registration import check_tensors, readable
from tilekern.runtime.dispatch import Plan, plan_for

Pair = tuple[torch.Tensor, torch.Tensor]
Plans = tuple[Plan, Plan | None, torch.dtype]


def rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, twice: bool = False,
    rotary_dim: int | None = None, interleaved: bool = False,
) -> Pair:  # fmt: skip
    """Rotate the halves of every head of ``q`` and ``k``, or pairs in it, by their positions' angles.

    Args:
        q: [batch, heads, tokens, head_dim]; bfloat16, float16 or float32, any strides.
        k: [batch, kv_heads, tokens, head_dim], of the dtype of ``q``.
        cos, sin: [1 or batch, tokens, rotary_dim or rotary_dim / 2] (or without the first dimension); no gradient
            flows to them.
        twice: promises that the last dimension of cos and sin holds the same angles twice, as Hugging Face stores
            them; then only the first half is read.
        rotary_dim: how many numbers at the beginning of each head are rotated, an even number; the others stay as they
            are. None for the whole head where cos has the size of it or half of that, else, without ``twice``, for as
            many as cos has.
        interleaved: rotate the pairs (x[2i], x[2i + 1]) by angle i in the place of (x[i], x[i + rotary_dim / 2]).
            Angles of the size ``rotary_dim`` then have each angle twice in a row, as Cohere stores them; of those that
            GLM stores, give the first half.

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
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, twice: bool, rotary_dim: int | None,
    interleaved: bool,
) -> Pair:  # fmt: skip
    """Rotate a part of each head, or pairs, for :func:`rope`."""
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
    # The kernel of pairs gives what it is given.
    dtype = torch.promote_types(q.dtype, cos.dtype)
    return rope_part(q.to(dtype), k.to(dtype), cos, sin, full, rotary, interleaved)


def _check(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, full: bool) -> None:
    refuse("rope", q, k, cos, sin, q.shape[-1])


def refuse(op: str, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, size: int) -> None:
    """Refuse what does not go together; ``size`` numbers of each head turn."""
    if q.dim() != 4 or k.dim() != 4 or k.shape[0] != q.shape[0] or k.shape[2:] != q.shape[2:] or k.dtype != q.dtype:
        raise ValueError(f"{op}: q {list(q.shape)} {q.dtype} and k {list(k.shape)} {k.dtype} may differ in heads only")
    check_angles(op, cos, sin, q.shape[0], q.shape[2], size)
    if cos.dtype != sin.dtype:
        raise ValueError(f"{op}: cos and sin must have one shape and dtype, got {cos.dtype} and {sin.dtype}")
    check_tensors(op, q=q, k=k, cos=cos, sin=sin)


def _turned(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Pair:
    half = q.shape[-1] // 2
    if cos.shape[-1] == half:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def turned(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((-x[..., half:], x[..., :half]), -1)

    return q * cos + turned(q) * sin, k * cos + turned(k) * sin


def _turned_back(dq: torch.Tensor, dk: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, full: bool) -> Pair:
    """The transpose: each half's sine goes with the other half's gradient, with the signs changed."""
    half = dq.shape[-1] // 2
    first, second = sin[..., :half], sin[..., -half:]
    return _turned(dq, dk, cos, torch.cat((-second, -first), -1) if cos.shape[-1] != half else -sin)


@operation(
    SPEC, INVERSE, name="rope", ungraded=("cos", "sin"), flags={"full": "full", "inverse": "False"},
    backward_flags={"inverse": "True"}, strided=True, check=_check, fallback_backward=_turned_back,
)  # fmt: skip
def _rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, full: bool) -> Pair:
    """The rotation; ``full`` says that the halves of the angles differ, so that both are read."""
    return _turned(q, k, cos, sin)


def _check_part(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, full: bool, rotary: int, interleaved: bool
) -> None:
    refuse("rope_part", q, k, cos, sin, rotary or q.shape[-1])


def _find(graded: bool, q: torch.Tensor, k: torch.Tensor, *rest: Any) -> Plans | None:
    cos, _, full, rotary, interleaved = rest
    if not q.numel() or not k.numel():
        return None
    sizes = (q.shape[2], q.shape[0], q.shape[1], k.shape[1], rotary or q.shape[3])
    dtypes = (q.dtype, cos.dtype)

    def plan(inverse: bool) -> Plan | None:
        if interleaved:
            return plan_for(pairs.SPEC, q.device, *sizes, inverse, *dtypes)
        return plan_for(SPEC, q.device, *sizes, full, inverse, *dtypes)

    forward = plan(False)
    backward = plan(True) if graded and forward is not None else None
    return None if forward is None or (graded and backward is None) else (forward, backward, q.dtype)


def _launched(
    plan: Plan, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype,
    rotary: int, interleaved: bool,
) -> Pair:  # fmt: skip
    """A launch on views of the parts that turn; the others are copied."""
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


def _launch(plans: Plans, q: torch.Tensor, k: torch.Tensor, *rest: Any) -> Pair:
    cos, sin, _, rotary, interleaved = rest
    return _launched(plans[0], q, k, cos, sin, torch.promote_types(q.dtype, cos.dtype), rotary, interleaved)


def _launch_backward(
    plans: tuple[Plan, Plan, torch.dtype], needs: tuple[bool, ...], dq: torch.Tensor, dk: torch.Tensor, *rest: Any
) -> Pair:
    cos, sin, _, rotary, interleaved = rest
    return _launched(plans[1], dq, dk, cos, sin, plans[2], rotary, interleaved)


def _pairs_turned(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Pair:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def turned(x: torch.Tensor) -> torch.Tensor:
        one, other = x[..., ::2], x[..., 1::2]
        return torch.stack((one * cos - other * sin, other * cos + one * sin), -1).flatten(-2)

    return turned(q), turned(k)


def _part_turned_back(
    dq: torch.Tensor, dk: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, full: bool, rotary: int, interleaved: bool
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
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, full: bool = False, rotary: int = 0,
    interleaved: bool = False,
) -> Pair:  # fmt: skip
    """The rotation of the first ``rotary`` numbers of each head, or of all for 0; of pairs where ``interleaved``.

    Its launches are written by hand: they take views of the part that turns and copy the rest, and pairs are turned by
    the kernel of ``llama4_rope``.
    """
    size = rotary or q.shape[-1]
    turned = (_pairs_turned if interleaved else _turned)(q[..., :size], k[..., :size], cos, sin)
    rest = (x[..., size:].to(y.dtype) for x, y in zip((q, k), turned, strict=True))
    one, other = (torch.cat(both, -1) for both in zip(turned, rest, strict=True))
    return one, other
