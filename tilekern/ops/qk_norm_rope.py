"""qk_norm_rope: RMSNorm of each head of q and k and their rotary position embedding, in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from tilekern.kernels import rotations_to as to
from tilekern.kernels.qk_norm_rope import GENERAL as GENERAL_FORWARD
from tilekern.kernels.qk_norm_rope import SPEC as FORWARD
from tilekern.kernels.qk_norm_rope_backward import GENERAL as GENERAL_BACKWARD
from tilekern.kernels.qk_norm_rope_backward import SPEC as BACKWARD
from tilekern.ops.operation import operation
from tilekern.ops.registration import check_tensors, constant_row, promoted
from tilekern.ops.rms_norm import CASTING_MODES
from tilekern.ops.rope import check_angles, turned_halves

Pair = tuple[Tensor, Tensor]


def qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float = 1e-6,
    *, offset: float = 0.0, casting_mode: str = "llama", rotary_dim: int | None = None, interleaved: bool = False,
    norm_last: bool = False,
) -> Pair:  # fmt: skip
    """Normalise every head of ``q`` and ``k`` to a root mean square of 1, scale it, and rotate its halves.

    Args:
        q: [batch, tokens, heads, head_dim]; bfloat16, float16 or float32, any strides.
        k: [batch, tokens, kv_heads, head_dim], any strides.
        q_weight, k_weight: [head_dim], the norms' weights; None for norms without one, which have no offset either.
        cos, sin: [1 or batch, tokens, head_dim] (or without the first dimension), with the second half repeating the
            first, as Hugging Face stores angles; it is not read. Or [.., head_dim / 2]. If they need a gradient,
            torch's own operations run.
        eps: added to the mean squares.
        offset: added to the weights, in float32; 1 for Gemma.
        casting_mode: the dtype of the result: ``llama`` promotes ``q``, its weight and ``cos``, ``gemma`` promotes
            ``q`` and ``cos``, ``none`` keeps the dtype of ``q``. In all modes only the result is rounded.
        rotary_dim: how many numbers at the beginning of each head are rotated, an even number; the others are only
            normalised. cos and sin then have this size, or half of it. None for the whole head.
        interleaved: rotate the pairs (x[2i], x[2i + 1]) by angle i instead of (x[i], x[i + rotary_dim / 2]). Angles of
            the size ``rotary_dim`` then have each angle twice in a row.
        norm_last: rotate first and normalise the result, instead of the other way round.

    Returns:
        The new q and k in the layout of the arguments.

    Raises:
        ValueError: the shapes do not fit, ``rotary_dim`` is odd or larger than a head, the devices differ, or the
            casting mode is unknown.
    """
    if cos.dim() == 2:
        cos, sin = cos.unsqueeze(0), sin.unsqueeze(0)
    weighted = q_weight is not None and k_weight is not None
    if weighted and not (offset or rotary_dim or interleaved or norm_last or casting_mode != "llama"):
        return _qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps)
    return _with_options(
        q, k, q_weight, k_weight, cos, sin, eps, offset, casting_mode, rotary_dim, interleaved, norm_last
    )


def _with_options(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float,
    offset: float, casting_mode: str, rotary_dim: int | None, interleaved: bool, norm_last: bool,
) -> Pair:  # fmt: skip
    if casting_mode not in CASTING_MODES:
        raise ValueError(f"qk_norm_rope: casting_mode must be llama, gemma or none, got {casting_mode!r}")
    if (q_weight is None) != (k_weight is None):
        raise ValueError("qk_norm_rope: q_weight and k_weight must both be given, or both be None")
    size, width = q.shape[-1], cos.shape[-1]
    rotary = size if rotary_dim is None else rotary_dim
    if rotary % 2 or not 0 < rotary <= size or width not in (rotary, rotary // 2):
        raise ValueError(
            f"qk_norm_rope: rotary_dim must be even, at most {size} as the heads' size, and that of cos "
            f"{list(cos.shape)} or twice that, got {rotary}"
        )
    if q_weight is None or k_weight is None:
        q_weight, k_weight, offset = constant_row(q, 1.0), constant_row(k, 1.0), 0.0
    counted = {"llama": (q, q_weight, cos), "gemma": (q, cos), "none": (q,)}[casting_mode]
    dtype = promoted(*(x.dtype for x in counted))
    whole = rotary == size and not (offset or interleaved or norm_last)
    if whole and dtype == promoted(q.dtype, q_weight.dtype, cos.dtype):
        return _qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps)
    if width == rotary:
        cos, sin = (x[..., ::2] if interleaved else x[..., : rotary // 2] for x in (cos, sin))
    if promoted(q.dtype, q_weight.dtype) != dtype:
        # The kernel's result has the dtype of q and its weight.
        q_weight, k_weight = (x.to(promoted(x.dtype, dtype)) for x in (q_weight, k_weight))
    made = qk_norm_rope_general(q, k, q_weight, k_weight, cos, sin, eps, offset, norm_last, interleaved)
    return made[0].to(dtype), made[1].to(dtype)


def _check(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> None:
    _refuse("qk_norm_rope", q, k, q_weight, k_weight, cos, sin, q.shape[-1])


def _refuse(
    op: str, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int
) -> None:
    """Raise ValueError if shapes or devices do not fit; ``rotary_dim`` numbers of each head are rotated."""
    if q.dim() != 4 or k.dim() != 4 or k.shape[:2] != q.shape[:2] or k.shape[3] != q.shape[3]:
        raise ValueError(
            f"{op}: q {list(q.shape)} and k {list(k.shape)} must be [batch, tokens, heads, head_dim] and may "
            "differ in heads only"
        )
    size = q.shape[3]
    if q_weight.shape != (size,) or k_weight.shape != (size,):
        raise ValueError(f"{op}: q_weight {list(q_weight.shape)} and k_weight {list(k_weight.shape)} must be [{size}]")
    check_angles(op, cos, sin, q.shape[0], q.shape[1], rotary_dim)
    check_tensors(op, q=q, k=k, q_weight=q_weight, k_weight=k_weight, cos=cos, sin=sin)


@operation(FORWARD, BACKWARD, name="qk_norm_rope", sums=("q_weight", "k_weight"), ungraded=("cos", "sin"), check=_check)
def _qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> Pair:
    """Compute the op like Hugging Face."""

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        # Heads before tokens, as Hugging Face rotates them, so that sums in the backward have the same order.
        return (weight * wide.to(x.dtype)).transpose(1, 2)

    q, k = turned_halves(normed(q, q_weight), normed(k, k_weight), cos, sin)
    return q.transpose(1, 2), k.transpose(1, 2)


def _check_general(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float, offset: float,
    norm_last: bool, interleaved: bool,
) -> None:  # fmt: skip
    _refuse("qk_norm_rope_general", q, k, q_weight, k_weight, cos, sin, 2 * cos.shape[-1])
    if 2 * cos.shape[-1] > q.shape[-1]:
        raise ValueError(f"qk_norm_rope_general: heads of {q.shape[-1]} have fewer than {cos.shape[-1]} pairs")


@operation(
    GENERAL_FORWARD, GENERAL_BACKWARD, sums=("q_weight", "k_weight"), ungraded=("cos", "sin"),
    flags={"norm_last": "norm_last", "interleaved": "interleaved"}, check=_check_general,
)  # fmt: skip
def qk_norm_rope_general(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float = 1e-6,
    offset: float = 0.0, norm_last: bool = False, interleaved: bool = False,
) -> Pair:  # fmt: skip
    """Compute the op with options; cos and sin [1 or batch, tokens, pairs] have each angle once.

    The results have the dtype that torch promotes q and its weight to.
    """
    size = 2 * cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def turned(x: Tensor) -> Tensor:
        part, rest = x[..., :size], x[..., size:]
        one, other = (part[..., ::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
        both = one * cos - other * sin, other * cos + one * sin
        joined = torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1)
        return torch.cat((joined, rest.to(joined.dtype)), -1)

    def normal(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return (wide * (weight.to(torch.float32) + offset)).to(x.dtype)

    def made(x: Tensor, weight: Tensor) -> Tensor:
        # Heads before tokens, as Hugging Face rotates them.
        y = x.transpose(1, 2)
        y = normal(turned(y), weight) if norm_last else turned(normal(y, weight))
        return y.transpose(1, 2).to(torch.promote_types(x.dtype, weight.dtype))

    return made(q, q_weight), made(k, k_weight)


@operation(to.FORWARD, to.BACKWARD, sums=("q_weight", "k_weight"), ungraded=("cos", "sin"), check=_check)
def qk_norm_rope_to(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float = 1e-6
) -> Pair:
    """Return :func:`qk_norm_rope` in the dtype of q and k, rounded once; so are their gradients."""
    made = _qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps)
    return made[0].to(q.dtype), made[1].to(k.dtype)


@operation(
    to.GENERAL_FORWARD, to.GENERAL_BACKWARD, sums=("q_weight", "k_weight"), ungraded=("cos", "sin"),
    flags={"norm_last": "norm_last", "interleaved": "interleaved"}, check=_check_general,
)  # fmt: skip
def qk_norm_rope_general_to(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float = 1e-6,
    offset: float = 0.0, norm_last: bool = False, interleaved: bool = False,
) -> Pair:  # fmt: skip
    """Return :func:`qk_norm_rope_general` in the dtype of q and k, rounded once; so are their gradients."""
    made = qk_norm_rope_general(q, k, q_weight, k_weight, cos, sin, eps, offset, norm_last, interleaved)
    return made[0].to(q.dtype), made[1].to(k.dtype)


# By op: autograd's function, and the launch of its forward.
OPS = tuple(
    (op.functions[title], op.functions["launch"])  # type: ignore[attr-defined]
    for op, title in ((_qk_norm_rope, "QkNormRope"), (qk_norm_rope_general, "QkNormRopeGeneral"))
)
