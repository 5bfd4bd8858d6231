"""Layers of experts with any routing, and what they must equal: a loop over tokens and their experts."""

from __future__ import annotations

import math
from typing import Any

import torch

# Gates of models: Qwen3-MoE and most others, Gemma 4, DeepSeek-V4, GPT-OSS, and GPT-OSS's with halves.
GATES: dict[str, dict[str, Any]] = {
    "silu": {},
    "gelu_tanh": {"activation": "gelu_tanh"},
    "clamped": {"limit": 0.7},
    "gpt_oss": {"alpha": 1.702, "limit": 0.7, "shift": 1.0, "interleaved": True},
    "gpt_oss_halves": {"alpha": 1.702, "limit": 0.7, "shift": 1.0},
}


def layer(
    tokens: int, choices: int, experts: int, hidden: int, inner: int, *, biased: bool = False, transposed: bool = False,
    dtype: torch.dtype = torch.float32, weight_dtype: torch.dtype | None = None, seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Arguments of the op, all of which need gradients but the ids: any, those of no expert among them."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    # Each token has other experts, as of a router; some have none in the place of one.
    ids = torch.rand(tokens, experts + 1, generator=generator).topk(min(choices, experts + 1)).indices
    scores = torch.rand(ids.shape, generator=generator)
    up, down = normal(experts, 2 * inner, hidden) / math.sqrt(hidden), normal(experts, hidden, inner) / math.sqrt(inner)
    if transposed:
        up, down = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (up, down))
    found = {"x": normal(tokens, hidden), "gate_up": up, "down": down}
    if biased:
        found |= {"gate_up_bias": normal(experts, 2 * inner), "down_bias": normal(experts, hidden)}
    found = {name: x.to(dtype).requires_grad_() for name, x in found.items()}
    return found | {"ids": ids, "weights": scores.to(weight_dtype or dtype).requires_grad_()}


def clear_limit(found: dict[str, Any]) -> float:
    """Return a limit that is far from all gates: rounding one across it would switch its gradient on or off."""
    pairs = [(t, n) for t, ids in enumerate(found["ids"].tolist()) for n in ids if n < len(found["gate_up"])]
    bias = found.get("gate_up_bias")
    gates = [found["gate_up"][n] @ found["x"][t] + (0 if bias is None else bias[n]) for t, n in pairs]
    limits = torch.linspace(0.5, 0.9, 41)
    if not gates:
        return 0.7
    return float(limits[(torch.cat(gates).detach().abs()[:, None] - limits).abs().amin(0).argmax()])


def by_loop(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None, down_bias: torch.Tensor | None = None, *, activation: str = "silu",
    alpha: float = 1.0, limit: float | None = None, shift: float = 0.0, interleaved: bool = False,
) -> torch.Tensor:  # fmt: skip
    """The layer, token by token and expert by expert."""
    rows = []
    for t, token in enumerate(x):
        total = token * 0
        for number, weight in zip(ids[t].tolist(), weights[t], strict=True):
            if not 0 <= number < len(gate_up):
                continue
            both = gate_up[number] @ token + (0 if gate_up_bias is None else gate_up_bias[number])
            gate, up = (both[::2], both[1::2]) if interleaved else both.chunk(2)
            if limit is not None:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            tanh = activation == "gelu_tanh"
            value = torch.nn.functional.gelu(gate, approximate="tanh") if tanh else gate * torch.sigmoid(alpha * gate)
            total = total + weight * (
                down[number] @ (value * (up + shift)) + (0 if down_bias is None else down_bias[number])
            )
        rows.append(total)
    return torch.stack(rows) if rows else x * 0


def results(function: Any, given: dict[str, Any], slope: torch.Tensor, **how: Any) -> dict[str, torch.Tensor]:
    """The result of a function of a layer's arguments, and the gradients of those that need one."""
    y = function(**given, **how)
    leaves = {name: x for name, x in given.items() if x.requires_grad}
    gradients = torch.autograd.grad(
        y, list(leaves.values()), slope.to(y.dtype), allow_unused=True, materialize_grads=True
    )
    return {"y": y.detach(), **dict(zip(leaves, gradients, strict=True))}


def wide(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments in float64."""
    return {
        name: x if name == "ids" else x.detach().double().requires_grad_(x.requires_grad) for name, x in given.items()
    }
