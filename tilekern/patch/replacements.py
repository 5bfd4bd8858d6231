"""Functions that stand in for those of Hugging Face models; each is made from the one that it replaces.

The original runs wherever the kernel would not compute the same: another activation, a subclass of Tensor (DTensor and
the like), shapes that only broadcasting makes fit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tilekern import ops
from tilekern.ops.geglu import geglu
from tilekern.patch.plain import has_hooks, is_bare_linear
from tilekern.patch.rewriting import named_as

Function = Callable[..., Any]


def rms_norm(original: Function) -> Function:
    """For ``forward(self, hidden_states)`` of a norm with ``weight`` [columns] and ``variance_epsilon``."""

    def forward(self: Any, hidden_states: torch.Tensor) -> Any:
        if type(hidden_states) is not torch.Tensor:
            return original(self, hidden_states)
        return ops.rms_norm(hidden_states, self.weight, self.variance_epsilon)

    return named_as(forward, original)


def gated_mlp(original: Function) -> Function:
    """For ``forward(self, x)`` of an MLP with ``gate_proj``, ``up_proj``, ``down_proj`` and ``act_fn``."""
    gated = gates()

    def forward(self: Any, x: torch.Tensor) -> Any:
        gate = gated.get(type(self.act_fn))
        if gate is None or has_hooks(self.act_fn) or type(x) is not torch.Tensor:
            return original(self, x)
        layers = (self.gate_proj, self.up_proj, self.down_proj)
        if gate is ops.swiglu and all(map(is_bare_linear, layers)):
            return ops.gated_mlp(x, *(layer.weight for layer in layers))
        return self.down_proj(gate(self.gate_proj(x), self.up_proj(x)))

    return named_as(forward, original)


def joined_mlp(original: Function) -> Function:
    """For ``forward`` of an MLP whose ``gate_up_proj`` makes gate and up, one beside the other."""
    gated = gates()

    def forward(self: Any, hidden_states: torch.Tensor) -> Any:
        gate = gated.get(type(self.activation_fn))
        if gate is None or has_hooks(self.activation_fn) or type(hidden_states) is not torch.Tensor:
            return original(self, hidden_states)
        return self.down_proj(gate(*self.gate_up_proj(hidden_states).chunk(2, dim=-1)))

    return named_as(forward, original)


def gates() -> dict[type, Function]:
    """The op that computes ``activation(gate) * up``, for each class of activations that has one."""
    from transformers.activations import GELUActivation, GELUTanh, NewGELUActivation, SiLUActivation

    return {
        **dict.fromkeys((SiLUActivation, torch.nn.SiLU), ops.swiglu),
        **dict.fromkeys((GELUTanh, NewGELUActivation), partial(geglu, tanh=True)),
        GELUActivation: geglu,
    }


def rope(original: Function) -> Function:
    """For ``apply_rotary_pos_emb`` of a family whose cos and sin [batch or 1, tokens, head_dim] hold each angle twice.

    q and k are [batch, heads, tokens, head_dim] with ``unsqueeze_dim`` 1, [batch, tokens, heads, head_dim] with 2.
    """

    def apply_rotary_pos_emb(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> Any:
        if not _fits(q, k, cos, unsqueeze_dim):
            return original(q, k, cos, sin, unsqueeze_dim)
        if unsqueeze_dim == 1:
            return ops.rope(q, k, cos, sin, twice=True)
        q, k = ops.rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, twice=True)
        return q.transpose(1, 2), k.transpose(1, 2)

    return apply_rotary_pos_emb


def rope_cast_back(original: Function) -> Function:
    """As :func:`rope`, for a rotation that casts what it made to the dtypes of q and k."""
    turned = rope(original)

    def apply_rotary_pos_emb(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> Any:
        new_q, new_k = turned(q, k, cos, sin, unsqueeze_dim)
        return new_q.to(q.dtype), new_k.to(k.dtype)

    return apply_rotary_pos_emb


def _fits(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, unsqueeze_dim: int) -> bool:
    """Whether the arguments are the ordinary ones: no broadcasting but over heads and the batch of cos and sin."""
    if type(q) is not torch.Tensor or unsqueeze_dim not in (1, 2) or q.dtype != k.dtype:
        return False
    shape, others, angles = q.shape, k.shape, cos.shape
    if len(shape) != 4 or len(others) != 4 or len(angles) != 3:
        return False
    tokens = 3 - unsqueeze_dim
    same = shape[0] == others[0] and shape[tokens] == others[tokens] and shape[3] == others[3]
    return same and angles[0] in (1, shape[0]) and angles[1] == shape[tokens] and angles[2] == shape[3]
