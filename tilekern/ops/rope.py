"""rope: rotary position embedding of q and k in one launch, out of place."""

from __future__ import annotations

import torch

from tilekern.kernels.rope import INVERSE, SPEC
from tilekern.ops.angles import check_angles
from tilekern.ops.operation import operation
from tilekern.ops.registration import check_devices

Pair = tuple[torch.Tensor, torch.Tensor]


def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, twice: bool = False) -> Pair:
    """Rotate the halves of every head of ``q`` and ``k`` by their positions' angles.

    Args:
        q: [batch, heads, tokens, head_dim]; bfloat16, float16 or float32, any strides.
        k: [batch, kv_heads, tokens, head_dim], of the dtype of ``q``.
        cos, sin: [1 or batch, tokens, head_dim or head_dim / 2] (or without the first dimension); no gradient flows
            to them.
        twice: promises that the last dimension of cos and sin holds the same angles twice, as Hugging Face stores
            them; then only the first half is read.

    Returns:
        The rotated q and k in the layout of their inputs, in the dtype that torch promotes q and cos to.

    Raises:
        ValueError: the shapes do not go together, or the devices differ.
    """
    if cos.dim() == 2:
        cos, sin = cos.unsqueeze(0), sin.unsqueeze(0)
    return _rope(q, k, cos, sin, not twice and cos.shape[-1] == q.shape[-1])


def _check(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, full: bool) -> None:
    if q.dim() != 4 or k.dim() != 4 or k.shape[0] != q.shape[0] or k.shape[2:] != q.shape[2:] or k.dtype != q.dtype:
        raise ValueError(f"rope: q {list(q.shape)} {q.dtype} and k {list(k.shape)} {k.dtype} may differ in heads only")
    check_angles("rope", cos, sin, q.shape[0], q.shape[2], q.shape[3])
    if cos.dtype != sin.dtype:
        raise ValueError(f"rope: cos and sin must have one shape and dtype, got {cos.dtype} and {sin.dtype}")
    check_devices("rope", q=q, k=k, cos=cos, sin=sin)


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
