"""Replacements for the routers of experts and for their auxiliary loss.

Logits are computed as in the model. The original runs under ``torch.compile``, and for tensors that are not plain or
have unusual shapes.
"""

from __future__ import annotations

from typing import Any

import torch

from tilekern import ops
from tilekern.ops.registration import is_autocast
from tilekern.patch.guards import SHAPES, SUBCLASS, count_own, is_plain
from tilekern.patch.replacements import Function
from tilekern.patch.rewriting import named_as


def by_softmax(
    original: Function, normalized: bool | str = True, biased: bool = False, wide: bool = False, weights: str = "logits"
) -> Function:
    """Replace ``forward(self, hidden_states)``, [tokens, hidden], of a router that returns logits, weights and ids.

    Args:
        original: the forward to replace.
        normalized: whether the weights of a token sum to 1; a string is the attribute with this flag.
        biased: whether logits have a bias.
        wide: whether logits are cast to float32.
        weights: the tensor whose dtype the weights get, ``logits`` or ``hidden_states``; or ``float32``.
    """

    def forward(self: Any, hidden_states: torch.Tensor) -> Any:
        if not _is_usual(self, hidden_states) or hidden_states.dim() != 2:
            count_own("router_softmax_forward", _why(hidden_states))
            return original(self, hidden_states)
        logits = torch.nn.functional.linear(hidden_states, self.weight, self.bias if biased else None)
        logits = logits.float() if wide else logits
        dtype = {"logits": logits.dtype, "hidden_states": hidden_states.dtype}.get(weights, torch.float32)
        whole = getattr(self, normalized) if isinstance(normalized, str) else normalized
        ids, shares = ops.router(logits, self.top_k, normalized=whole, dtype=dtype)
        return logits, shares, ids

    return named_as(forward, original)


def by_sigmoid(original: Function) -> Function:
    """Replace ``forward(self, hidden_states)`` of DeepSeek-V3's router: sigmoids, groups, and a bias for the choice."""

    def forward(self: Any, hidden_states: torch.Tensor) -> Any:
        enough = self.topk_group * (self.num_experts // self.num_group) >= self.top_k
        # Autocast would round the logits, and so change the model's sigmoids.
        if not enough or not _is_usual(self, hidden_states) or is_autocast(hidden_states):
            count_own("router_sigmoid_forward", _why(hidden_states))
            return original(self, hidden_states)
        logits = torch.nn.functional.linear(hidden_states.reshape(-1, self.hidden_dim).float(), self.weight.float())
        ids, weights = ops.router(
            logits, self.top_k, scores="sigmoid", normalized=self.norm_topk_prob, bias=self.e_score_correction_bias,
            groups=self.num_group, kept_groups=self.topk_group, scale=self.routed_scaling_factor,
        )  # fmt: skip
        return logits, weights, ids

    return named_as(forward, original)


def _why(*tensors: torch.Tensor) -> str:
    if torch.compiler.is_compiling():
        return "torch.compile"
    if not is_plain(*tensors):
        return SUBCLASS
    return "autocast" if tensors and is_autocast(tensors[0]) else SHAPES


def _is_usual(router: Any, hidden_states: torch.Tensor) -> bool:
    return is_plain(hidden_states, router.weight) and not torch.compiler.is_compiling()


def balance(original: Function) -> Function:
    """Replace ``load_balancing_loss_func`` for logits [tokens, experts] of each layer, with an optional padding mask.

    As in the original, the softmax of the logits chooses the experts, whatever rule the router uses.
    """

    def load_balancing_loss_func(
        gate_logits: Any, num_experts: int | None = None, top_k: int = 2, attention_mask: torch.Tensor | None = None
    ) -> Any:
        if not _are_usual(gate_logits, num_experts, attention_mask):
            if isinstance(gate_logits, tuple) and gate_logits:
                count_own("router_losses_forward", _why(*gate_logits))
            return original(gate_logits, num_experts, top_k, attention_mask)
        logits = torch.cat([layer.to(gate_logits[0].device) for layer in gate_logits])
        shares = None
        if attention_mask is not None:
            shares = attention_mask.reshape(-1).to(logits.device, torch.float32).repeat(len(gate_logits))
        ids = ops.router(logits.detach(), top_k).ids
        return ops.router_losses(logits, ids, shares).balance

    return load_balancing_loss_func


def _are_usual(gate_logits: Any, experts: int | None, mask: torch.Tensor | None) -> bool:
    """Return whether all layers have plain logits for the same tokens, and the mask (if any) has these tokens."""
    if torch.compiler.is_compiling() or not isinstance(gate_logits, tuple) or not gate_logits:
        return False
    tensors = gate_logits if mask is None else (*gate_logits, mask)
    tokens = len(gate_logits[0]) if mask is None else mask.numel()
    return is_plain(*tensors) and all(layer.shape == (tokens, experts) for layer in gate_logits)
