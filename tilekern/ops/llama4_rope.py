"""llama4_rope: rotary position embedding of adjacent pairs of q and k, as in Llama 4, in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from tilekern.kernels.llama4_rope import INVERSE, SPEC
from tilekern.ops.operation import operation
from tilekern.ops.registration import check_tensors

Pair = tuple[Tensor, Tensor]


def llama4_rope(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> Pair:
    """Multiply adjacent pairs of every head of ``xq`` and ``xk``, as complex numbers, by ``freqs_cis``.

    Args:
        xq: [batch, tokens, heads, head_dim]; bfloat16, float16 or float32, any strides.
        xk: [batch, tokens, kv_heads, head_dim], of the dtype of ``xq``.
        freqs_cis: [1 or batch, tokens, head_dim / 2], complex (or without the first dimension), or the real view of
            that (``torch.view_as_real``). If it needs a gradient, torch's own operations run.

    Returns:
        The rotated ``xq`` and ``xk``, each in the layout and the dtype of its input.

    Raises:
        ValueError: the shapes do not fit, ``freqs_cis`` is real and not such a view, or the devices differ.
    """
    pairs = torch.view_as_real(freqs_cis.resolve_conj()) if freqs_cis.is_complex() else freqs_cis
    if pairs.dim() not in (3, 4) or pairs.shape[-1] != 2:
        raise ValueError(
            f"llama4_rope: freqs_cis {list(freqs_cis.shape)} {freqs_cis.dtype} must be complex, [1 or batch, tokens, "
            "head_dim / 2], or its view as real numbers, with a last dimension of 2"
        )
    angles = pairs.flatten(-2)
    return _pairs(xq, xk, angles if angles.dim() == 3 else angles.unsqueeze(0))


def _check(q: Tensor, k: Tensor, angles: Tensor) -> None:
    if q.dim() != 4 or k.dim() != 4 or k.shape[:2] != q.shape[:2] or k.shape[3] != q.shape[3] or k.dtype != q.dtype:
        raise ValueError(
            f"llama4_rope_pairs: q {list(q.shape)} {q.dtype} and k {list(k.shape)} {k.dtype} must be [batch, tokens, "
            "heads, head_dim] and may differ in heads only"
        )
    batch, tokens, _, size = q.shape
    if size % 2 or angles.shape not in ((1, tokens, size), (batch, tokens, size)):
        raise ValueError(
            f"llama4_rope_pairs: angles {list(angles.shape)} must be two for each pair, [1 or {batch}, {tokens}, "
            f"{size}], with an even head size"
        )
    check_tensors("llama4_rope_pairs", q=q, k=k, angles=angles)


def _turned(q: Tensor, k: Tensor, angles: Tensor) -> Pair:
    c, s = angles[..., ::2].unsqueeze(2), angles[..., 1::2].unsqueeze(2)

    def turned(x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        one, other = wide[..., ::2], wide[..., 1::2]
        return torch.stack((one * c - other * s, other * c + one * s), -1).flatten(-2).to(x.dtype)

    return turned(q), turned(k)


def _turned_back(dq: Tensor, dk: Tensor, angles: Tensor) -> Pair:
    """Apply the transpose, the product with the conjugate."""
    c, s = angles[..., ::2], angles[..., 1::2]
    return _turned(dq, dk, torch.stack((c, -s), -1).flatten(-2))


@operation(
    SPEC, INVERSE, name="llama4_rope_pairs", ungraded=("angles",), flags={"inverse": "False"},
    backward_flags={"inverse": "True"}, strided=True, check=_check, fallback_backward=_turned_back,
)  # fmt: skip
def _pairs(q: Tensor, k: Tensor, angles: Tensor) -> Pair:
    """Rotate; ``angles`` [1 or batch, tokens, head_dim] alternate real and imaginary parts."""
    return _turned(q, k, angles)
