"""The ops and Liger's functions in torch's own operations, for inputs in float64; arguments as those of the ops."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch.nn import functional

Pair = tuple[torch.Tensor, torch.Tensor]
CURVES = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": functional.silu,
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
    None: lambda x: x,
}


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float = 0.0, *_: Any) -> torch.Tensor:
    normal = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return normal if weight is None else normal * (weight + offset)


def fused_add_rms_norm(residual: torch.Tensor, x: torch.Tensor, *rest: Any) -> Pair:
    return residual + x, rms_norm(residual + x, *rest)


def fused_rms_norm_add(residual: torch.Tensor, x: torch.Tensor, *rest: Any) -> torch.Tensor:
    return residual + rms_norm(x, *rest)


def fused_rms_norm_add_rms_norm(
    residual: torch.Tensor, x: torch.Tensor, weight: Any, next_weight: Any, *rest: Any
) -> Pair:
    total = fused_rms_norm_add(residual, x, weight, *rest)
    return total, rms_norm(total, next_weight, *rest)


def layer_norm(x: torch.Tensor, weight: Any, bias: Any, eps: float) -> torch.Tensor:
    return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def fused_add_layer_norm(residual: torch.Tensor, x: torch.Tensor, *rest: Any) -> Pair:
    return residual + x, layer_norm(residual + x, *rest)


def group_norm(x: torch.Tensor, weight: Any, bias: Any, _: int, groups: int, eps: float) -> torch.Tensor:
    return functional.group_norm(x, groups, weight, bias, eps)


def poly_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, *_: Any) -> torch.Tensor:
    return sum(w * rms_norm(x**power, None, eps) for w, power in zip(weight, (3, 2, 1), strict=True)) + bias


def dyt(x: torch.Tensor, alpha: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None = None) -> torch.Tensor:
    y = gamma * torch.tanh(alpha * x)
    return y if beta is None else y + beta


def swiglu(gate: torch.Tensor, up: torch.Tensor, of_gate: float = 1.0, of_down: float = 1.0) -> torch.Tensor:
    return of_down * functional.silu(gate * of_gate) * up


def geglu(gate: torch.Tensor, up: torch.Tensor, tanh: bool = True) -> torch.Tensor:
    return CURVES["gelu_tanh" if tanh else "gelu"](gate) * up


def linear(x: torch.Tensor, weight: torch.Tensor, bias: Any = None, activation: str | None = None) -> torch.Tensor:
    return CURVES[activation](functional.linear(x, weight, bias))


def lora_linear(
    x: torch.Tensor, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float, bias: Any = None,
    dropped: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    return functional.linear(x, weight, bias) + scaling * ((x if dropped is None else dropped) @ a.T @ b.T)


def gated_linear(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    return CURVES[activation](x @ gate.T) * (x @ up.T)


def gated_mlp(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, *how: Any) -> torch.Tensor:
    return swiglu(x @ gate.T, x @ up.T, *how) @ down.T


def tiled_geglu(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, _: int | None = None, tanh: bool = True
) -> torch.Tensor:
    return geglu(x @ gate.T, x @ up.T, tanh) @ down.T


def mlp(x: torch.Tensor, up: torch.Tensor, up_bias: Any, down: torch.Tensor, down_bias: Any, kind: str) -> torch.Tensor:
    return functional.linear(linear(x, up, up_bias, kind), down, down_bias)


def grouped_linear(
    x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, bias: Any = None, order: Any = None, slots: int = 1
) -> torch.Tensor:
    """The loop over experts; zeros for rows of nobody."""
    rows = x if order is None else x[order.long() // slots]
    ends = [0, *offsets.tolist()]
    parts = [
        functional.linear(rows[begin:end], weight[expert], None if bias is None else bias[expert])
        for expert, (begin, end) in enumerate(itertools.pairwise(ends))
    ]
    return torch.cat([*parts, rows.new_zeros(len(rows) - ends[-1], weight.shape[1])])


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any) -> torch.Tensor:
    from tilekern.kernels.attention.problem import formula

    starts, window, softcap, sinks = (how.get(name) for name in ("cu_seqlens", "window", "softcap", "sinks"))
    at = torch.zeros(1, dtype=torch.int32) if starts is None else starts
    of_keys = at if how.get("cu_seqlens_k") is None else how["cu_seqlens_k"]
    found = formula(
        q, k, v, torch.zeros(1) if sinks is None else sinks, at, of_keys, 0, 0, how.get("scale") or q.shape[3] ** -0.5,
        softcap or 1.0, window or 1, how.get("causal", True), window is not None, softcap is not None,
        sinks is not None, starts is not None,
    )["out"]  # fmt: skip
    return torch.nn.functional.pad(found, (0, 0, 0, 0, 0, q.shape[1] - found.shape[1]))


def neighborhood(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kernel_size: int, dilation: int, scale: Any = None
) -> torch.Tensor:
    """The neighbours that there are, by a mask over all scores, as Liger's kernel makes it."""
    position = torch.arange(query.shape[2], device=query.device)
    distance = position - position[:, None]
    seen = (distance.abs() <= kernel_size // 2 * dilation) & (distance % dilation == 0)
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.mT * (query.shape[3] ** -0.5 if scale is None else scale)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """The first numbers of each head, halves or pairs, turned: as many as there are angles, or twice as many."""
    size = cos.shape[-1]
    part, rest = x[..., :size], x[..., size:]
    if interleaved:
        other = torch.stack((-part[..., 1::2], part[..., ::2]), -1).flatten(-2)
    else:
        first, second = part.chunk(2, -1)
        other = torch.cat((-second, first), -1)
    return torch.cat((part * cos + other * sin, rest), -1)


def _whole(x: torch.Tensor, size: int, interleaved: bool) -> torch.Tensor:
    """Angles [..., size], of which there may be one for each pair."""
    if x.shape[-1] == size:
        return x
    return x.repeat_interleave(2, -1) if interleaved else torch.cat((x, x), -1)


def rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, twice: bool = False,
    rotary_dim: int | None = None, interleaved: bool = False, dim: int = 1,
) -> Pair:  # fmt: skip
    size = rotary_dim or q.shape[-1]
    cos, sin = (_whole(x.unsqueeze(0) if x.dim() == 2 else x, size, interleaved) for x in (cos, sin))
    cos, sin = (x.unsqueeze(dim) if x.dim() == 3 else x for x in (cos, sin))
    return turned(q, cos, sin, interleaved), turned(k, cos, sin, interleaved)


def qk_norm_rope(
    q: torch.Tensor, k: torch.Tensor, q_weight: Any, k_weight: Any, cos: torch.Tensor, sin: torch.Tensor,
    eps: float, offset: float = 0.0, casting_mode: str = "llama", rotary_dim: int | None = None,
    interleaved: bool = False, norm_last: bool = False,
) -> Pair:  # fmt: skip
    how = {"rotary_dim": rotary_dim, "interleaved": interleaved, "dim": 2}
    if norm_last:
        q, k = rope(q, k, cos, sin, **how)
    q, k = rms_norm(q, q_weight, eps, offset), rms_norm(k, k_weight, eps, offset)
    return (q, k) if norm_last else rope(q, k, cos, sin, **how)


def llama4_rope(xq: torch.Tensor, xk: torch.Tensor, freqs_cis: torch.Tensor) -> Pair:
    pairs = freqs_cis if not freqs_cis.is_complex() else torch.view_as_real(freqs_cis.resolve_conj())
    cos, sin = (x.to(xq.dtype).repeat_interleave(2, -1).unsqueeze(-2) for x in pairs.unbind(-1))
    return turned(xq, cos, sin, True), turned(xk, cos, sin, True)


def qwen2vl_mrope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sections: list[int], dim: int = 1
) -> Pair:
    def chosen(angles: torch.Tensor) -> torch.Tensor:
        parts = angles[..., : sum(sections)].split(list(sections), -1)
        half = torch.cat([part[number % 3] for number, part in enumerate(parts)], -1)
        return torch.cat((half, half), -1)

    return rope(q, k, chosen(cos), chosen(sin), dim=dim)


def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, weight: Any = None, ignore_index: int = -100, z_loss: float = 0.0,
    smoothing: float = 0.0, reduction: str = "mean", softcap: float | None = None, *, scaled: bool = False,
    z_by_rows: bool = False, num_items: Any = None, least: int = 0,
) -> Pair:  # fmt: skip
    """The loss, and the part of it that is the z-loss; ``least`` is what the mean divides by where no row counts."""
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    shape, logits, target = target.shape, logits.reshape(-1, logits.shape[-1]), target.reshape(-1).long()
    weight = None if weight is None else weight.to(logits.dtype)
    loss = functional.cross_entropy(
        logits, target, weight, ignore_index=ignore_index, reduction="none", label_smoothing=smoothing
    )
    counts = target != ignore_index
    at = target.where(counts, 0)
    z = (z_loss * logits.logsumexp(-1).square()).where(counts, 0)
    if scaled:
        shares = logits.detach().softmax(-1).gather(-1, at[:, None])[:, 0]
        loss, z = loss * shares, z * shares
    if reduction == "none":
        return (loss + z).view(shape), z.view(shape)
    rows = 1 if reduction == "sum" else counts.sum().clamp(min=least)
    whole = rows if weight is None or reduction == "sum" else (weight[at] * counts).sum()
    if num_items is not None:
        rows = whole = num_items
    z = z.sum() / (rows if z_by_rows else whole)
    return (loss.sum() / whole + z).view(()), z.view(())


def log_probs(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, *, bias: Any = None, temperature: float = 1.0,
    softcap: float | None = None, ignore_index: int = -100, **_: Any,
) -> Pair:  # fmt: skip
    """Return the log-probability of each row's id, and its entropy."""
    logits = functional.linear(hidden, weight, bias)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    log, counts = (logits / temperature).log_softmax(-1), ids != ignore_index
    chosen = log.gather(-1, ids.long().where(counts, 0)[..., None])[..., 0]
    return chosen.where(counts, 0), (-(log.exp() * log).sum(-1)).where(counts, 0)


def _of_rows(loss: torch.Tensor, labels: torch.Tensor | None, ignored: int) -> tuple[torch.Tensor, Any]:
    """Losses of elements, 0 in rows that do not count, and how many rows do, at least 1."""
    counts = torch.ones_like(loss[..., 0], dtype=torch.bool) if labels is None else labels != ignored
    return loss.where(counts[..., None], 0), counts.sum().clamp(min=1)


def jsd(x: torch.Tensor, y: torch.Tensor, labels: Any = None, beta: float = 0.5, ignored: int = -100) -> torch.Tensor:
    def plain(log: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return functional.kl_div(other, log, reduction="none", log_target=True)

    if beta in (0, 1):
        loss = plain(x, y) if beta else plain(y, x)
    else:
        mixed = torch.logaddexp(y + math.log(beta), x + math.log(1 - beta))
        loss = beta * plain(y, mixed) + (1 - beta) * plain(x, mixed)
    loss, rows = _of_rows(loss, labels, ignored)
    return loss.sum() / rows


def linear_jsd(
    x: torch.Tensor, weight: torch.Tensor, teacher: torch.Tensor, teacher_weight: torch.Tensor, labels: Any = None,
    beta: float = 0.5, ignored: int = -100, temperature: float = 1.0, *_: Any,
) -> torch.Tensor:  # fmt: skip
    heads = (x, weight), (teacher, teacher_weight)
    return jsd(*((x @ w.T / temperature).log_softmax(-1) for x, w in heads), labels, beta, ignored)


def tvd(
    p: torch.Tensor, q: torch.Tensor, labels: Any = None, reduction: str = "batchmean", ignored: int = -100
) -> torch.Tensor:
    loss, rows = _of_rows(0.5 * (p - q).abs(), labels, ignored)
    by = {"none": 1, "sum": 1, "batchmean": rows, "mean": rows * p.shape[-1]}[reduction]
    return loss if reduction == "none" else loss.sum() / by


def kl_div(x: torch.Tensor, y: torch.Tensor, reduction: str = "batchmean", log_target: bool = False, *_: Any) -> Any:
    return functional.kl_div(x, y, reduction=reduction, log_target=log_target)


def _threshold(x: torch.Tensor, dim: int) -> torch.Tensor:
    values = x.movedim(dim, -1).sort(-1, descending=True).values
    sums, counts = values.cumsum(-1), torch.arange(1, values.shape[-1] + 1, device=x.device)
    size = (1 + counts * values > sums).sum(-1, keepdim=True)
    return ((sums.gather(-1, size - 1) - 1) / size).movedim(-1, dim)


def sparsemax(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    return (x - _threshold(x, dim)).clamp(min=0)


def without_ties(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Numbers of 16 bits often lie on the threshold itself, where sparsemax has no one gradient; these are moved."""
    tied = (x - _threshold(x.detach().double(), dim)).abs() < 1e-4
    return torch.where(tied, -4.0, x.detach()).requires_grad_()
