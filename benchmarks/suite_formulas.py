"""Define the ops of the Liger suite in torch, by their definitions; torch.compile gets the same functions."""

from __future__ import annotations

from typing import Any


def softmax(x: Any) -> Any:
    """Of the last dimension."""
    import torch

    return torch.softmax(x, -1)


def sparsemax(x: Any) -> Any:
    """By sorting (Martins and Astudillo 2016)."""
    import torch

    ordered = x.sort(-1, descending=True).values
    excess = ordered.cumsum(-1) - 1
    ranks = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=x.dtype)
    count = (ranks * ordered > excess).sum(-1, keepdim=True)
    return (x - excess.gather(-1, count - 1) / count).relu()


def layer_norm(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    """``torch.nn.LayerNorm``."""
    from torch.nn import functional

    return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def dyt(x: Any, alpha: Any, gamma: Any, beta: Any) -> Any:
    """Dynamic Tanh (Zhu et al. 2025)."""
    import torch

    return gamma * torch.tanh(alpha * x) + beta


def poly_norm(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    """PolyNorm (Zhuo et al. 2024), its norms in float32 at least."""
    import torch

    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    powers = (wide**3, wide**2, wide)
    normal = [u * torch.rsqrt(u.square().mean(-1, keepdim=True) + eps) for u in powers]
    return (weight[0] * normal[0] + weight[1] * normal[1] + weight[2] * normal[2] + bias).to(x.dtype)


def group_norm(x: Any, weight: Any, bias: Any, channels: int, groups: int, eps: float) -> Any:  # noqa: ARG001
    """``torch.nn.GroupNorm``."""
    from torch.nn import functional

    return functional.group_norm(x, groups, weight, bias, eps)


def geglu(gate: Any, up: Any) -> Any:
    """The product in ``GemmaMLP.forward``."""
    from torch.nn import functional

    return functional.gelu(gate, approximate="tanh") * up


def kl_div(x: Any, target: Any) -> Any:
    """Of probabilities from log-probabilities, by rows."""
    from torch.nn import functional

    return functional.kl_div(x, target, reduction="batchmean")


def jsd(x: Any, target: Any) -> Any:
    """Of log-probabilities, with equal weights, by rows; in float32 at least, like Liger's own test."""
    import torch
    from torch.nn import functional

    q, p = (y.to(torch.promote_types(y.dtype, torch.float32)) for y in (x, target))
    mixture = ((q.exp() + p.exp()) / 2).log()
    both = functional.kl_div(mixture, p, reduction="sum", log_target=True)
    both = both + functional.kl_div(mixture, q, reduction="sum", log_target=True)
    return both / 2 / x.shape[0]


def tvd(p: Any, q: Any) -> Any:
    """Half the distance, by rows."""
    import torch

    return (p - q).abs().sum(dtype=torch.promote_types(p.dtype, torch.float32)) / 2 / p.shape[0]


def llama4_rope(q: Any, k: Any, freqs_cis: Any) -> tuple[Any, Any]:
    """``apply_rotary_emb`` of Llama 4."""

    import torch

    def turned(x: Any) -> Any:
        pairs = torch.view_as_complex(x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * freqs_cis[:, :, None, :]).flatten(3).to(x.dtype)

    return turned(q), turned(k)


def qwen2vl_mrope(q: Any, k: Any, cos: Any, sin: Any, sections: list[int]) -> tuple[Any, Any]:
    """``apply_multimodal_rotary_pos_emb`` of Qwen2-VL."""

    import torch

    def chosen(angles: Any) -> Any:
        parts = angles.split(sections * 2, dim=-1)
        return torch.cat([part[n % 3] for n, part in enumerate(parts)], -1).unsqueeze(1)

    def turned(x: Any, c: Any, s: Any) -> Any:
        low, high = x.chunk(2, -1)
        return x * c + torch.cat((-high, low), -1) * s

    c, s = chosen(cos), chosen(sin)
    return turned(q, c, s), turned(k, c, s)


def fused_neighborhood_attention(q: Any, k: Any, v: Any) -> Any:
    """Each token sees the 7 around it that exist."""
    import torch
    from torch.nn import functional

    near, tokens = 3, q.shape[2]

    def neighbours(x: Any) -> Any:
        return functional.pad(x, (0, 0, near, near)).unfold(2, 2 * near + 1, 1)

    scores = (q.unsqueeze(-1) * neighbours(k)).sum(-2) * q.shape[-1] ** -0.5
    place = torch.arange(tokens, device=q.device)[:, None] + torch.arange(-near, near + 1, device=q.device)
    p = scores.masked_fill((place < 0) | (place >= tokens), -torch.inf).softmax(-1)
    return (p.unsqueeze(-2) * neighbours(v)).sum(-1)


def tiled_swiglu(x: Any, gate: Any, up: Any, down: Any) -> Any:
    """A gated MLP; torch computes it without tiles."""
    from torch.nn import functional

    return (functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def tiled_geglu(x: Any, gate: Any, up: Any, down: Any) -> Any:
    """The same with gelu."""
    return geglu(x @ gate.T, x @ up.T) @ down.T


def fused_linear_jsd(x: Any, weight: Any, teacher: Any, teacher_weight: Any) -> Any:
    """The divergence of two heads' distributions, by rows, their logarithms in float32 at least."""
    import torch

    wide = torch.promote_types(x.dtype, torch.float32)
    return jsd((x @ weight.T).to(wide).log_softmax(-1), (teacher @ teacher_weight.T).to(wide).log_softmax(-1))


def linear_log_probs(hidden: Any, weight: Any, ids: Any) -> tuple[Any, Any]:
    """The log-probability of each id, and the entropy, of a head's logits."""
    import torch

    logits = hidden @ weight.T
    logs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return logs.gather(-1, ids[:, None])[:, 0], -(logs.exp() * logs).sum(-1)
