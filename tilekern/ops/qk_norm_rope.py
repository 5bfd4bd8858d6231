"""qk_norm_rope: RMSNorm of each head of q and k and their rotary position embedding, in one launch."""

from __future__ import annotations

import torch

from tilekern.kernels.qk_norm_rope import SPEC as FORWARD
from tilekern.kernels.qk_norm_rope_backward import SPEC as BACKWARD
from tilekern.ops.angles import check_angles
from tilekern.ops.operation import operation
from tilekern.ops.registration import check_devices

Pair = tuple[torch.Tensor, torch.Tensor]


def qk_norm_rope(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, cos: torch.Tensor,
    sin: torch.Tensor, eps: float = 1e-6,
) -> Pair:  # fmt: skip
    """Normalise every head of ``q`` and ``k`` to a root mean square of 1, scale it, and rotate its halves.

    Args:
        q: [batch, tokens, heads, head_dim]; bfloat16, float16 or float32, any strides.
        k: [batch, tokens, kv_heads, head_dim], any strides.
        q_weight, k_weight: [head_dim], the norms' weights.
        cos, sin: [1 or batch, tokens, head_dim] (or without the first dimension), of which the second half repeats
            the first, as Hugging Face stores angles, and is not read; or [.., head_dim / 2]. Where they need a
            gradient torch's own operations run.
        eps: added to the mean squares.

    Returns:
        The new q and k in the layout of the arguments, in the dtype that torch promotes q, its weight and cos to.

    Raises:
        ValueError: the shapes do not go together, or the devices differ.
    """
    if cos.dim() == 2:
        cos, sin = cos.unsqueeze(0), sin.unsqueeze(0)
    return _qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps)


def _check(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, cos: torch.Tensor,
    sin: torch.Tensor, eps: float,
) -> None:  # fmt: skip
    if q.dim() != 4 or k.dim() != 4 or k.shape[:2] != q.shape[:2] or k.shape[3] != q.shape[3]:
        raise ValueError(
            f"qk_norm_rope: q {list(q.shape)} and k {list(k.shape)} must be [batch, tokens, heads, head_dim] and may "
            "differ in heads only"
        )
    batch, tokens, _, size = q.shape
    if q_weight.shape != (size,) or k_weight.shape != (size,):
        raise ValueError(
            f"qk_norm_rope: q_weight {list(q_weight.shape)} and k_weight {list(k_weight.shape)} must be [{size}]"
        )
    check_angles("qk_norm_rope", cos, sin, batch, tokens, size)
    check_devices("qk_norm_rope", q=q, k=k, q_weight=q_weight, k_weight=k_weight, cos=cos, sin=sin)


@operation(FORWARD, BACKWARD, name="qk_norm_rope", sums=("q_weight", "k_weight"), ungraded=("cos", "sin"), check=_check)
def _qk_norm_rope(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, cos: torch.Tensor,
    sin: torch.Tensor, eps: float,
) -> Pair:  # fmt: skip
    """As Hugging Face writes it."""
    half = q.shape[-1] // 2
    if cos.shape[-1] == half:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def turned(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        # Heads before tokens, as Hugging Face rotates them, so that sums in the backward have the same order.
        z = (weight * wide.to(x.dtype)).transpose(1, 2)
        return (z * cos + torch.cat((-z[..., half:], z[..., :half]), -1) * sin).transpose(1, 2)

    return turned(q, q_weight), turned(k, k_weight)
