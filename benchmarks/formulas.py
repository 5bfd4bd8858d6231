"""The ops in torch, exactly as Hugging Face's Qwen3 and Llama write them; torch.compile is given the same functions."""

from __future__ import annotations

from typing import Any


def rms_norm(x: Any, weight: Any, eps: float) -> Any:
    """``Qwen3RMSNorm.forward``."""
    import torch

    dtype = x.dtype
    hidden = x.to(torch.float32)
    variance = hidden.pow(2).mean(-1, keepdim=True)
    hidden = hidden * torch.rsqrt(variance + eps)
    return weight * hidden.to(dtype)


def swiglu(gate: Any, up: Any) -> Any:
    """The product in ``Qwen3MLP.forward``."""
    import torch

    return torch.nn.functional.silu(gate) * up


def rope(q: Any, k: Any, cos: Any, sin: Any) -> tuple[Any, Any]:
    """``apply_rotary_pos_emb``."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin


def _rotate_half(x: Any) -> Any:
    import torch

    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)
