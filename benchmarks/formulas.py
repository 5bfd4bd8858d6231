"""Define the ops in torch exactly like Hugging Face's Qwen3 and Llama; torch.compile gets the same functions.

Attention is not here: Hugging Face's eager formula needs all scores at once, and nobody trains with it.
"""

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


def fused_add_rms_norm(residual: Any, x: Any, weight: Any, eps: float) -> tuple[Any, Any]:
    """The end of attention in ``Qwen3DecoderLayer.forward``: the sum, and its norm."""
    total = residual + x
    return total, rms_norm(total, weight, eps)


def qk_norm_rope(q: Any, k: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any, eps: float) -> tuple[Any, Any]:
    """The head of ``Qwen3Attention.forward``; q, k and results are [batch, tokens, heads, head_dim]."""
    q, k = rms_norm(q, q_weight, eps).transpose(1, 2), rms_norm(k, k_weight, eps).transpose(1, 2)
    q, k = rope(q, k, cos, sin)
    return q.transpose(1, 2), k.transpose(1, 2)


def cross_entropy(logits: Any, target: Any) -> Any:
    """``ForCausalLMLoss``, which takes the logits to float32 first."""
    import torch

    return torch.nn.functional.cross_entropy(logits.float(), target)


def fused_linear_cross_entropy(hidden: Any, weight: Any, target: Any) -> Any:
    """The head and ``ForCausalLMLoss``."""
    return cross_entropy(linear(hidden, weight), target)


def linear(x: Any, weight: Any) -> Any:
    """``torch.nn.Linear`` without bias: cuBLAS."""
    import torch

    return torch.nn.functional.linear(x, weight)
