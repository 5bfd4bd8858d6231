"""Layers for ``kernelize`` of Hugging Face's library ``kernels``; each defines only a forward.

These layers are never instantiated. ``kernels`` puts a layer's forward in place of a module's forward. It then reads
the module's attributes: those of Llama's norm and MLP, of torch's ``LayerNorm`` etc. It has the signature of the
module's forward (``kernels`` compares them), and calls the module's own forward if the op would compute something else.

``python -m tilekern.cache_tools repository`` makes the folder from which ``kernels`` loads them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tilekern.errors import needing

with needing(__name__):
    import torch

from tilekern import ops
from tilekern.ops import modules
from tilekern.ops.geglu import geglu
from tilekern.patch import replacements
from tilekern.patch.table import Norm

__all__ = [
    "CrossEntropyLoss", "GatedMLP", "GeLU", "GeluAndMul", "GeluTanh", "GeluTanhAndMul", "LayerNorm", "QuickGELU",
    "RMSNorm", "RMSNormZeroCentered", "RotaryPosEmb", "SiLU", "SiluAndMul",
]  # fmt: skip


def _norm_as_it_is(self: Any, hidden_states: torch.Tensor) -> Any:
    return type(self).forward(self, hidden_states)


def _layer_as_it_is(self: Any, x: torch.Tensor) -> Any:
    return type(self).forward(self, x)


def _activation_as_it_is(self: Any, input: torch.Tensor) -> Any:
    return type(self).forward(self, input)


_rms_norm = replacements.rms_norm(_norm_as_it_is)
_zero_centered = replacements.rms_norm(_layer_as_it_is, Norm("eps", 1.0, "gemma"))
_gated_mlp = replacements.gated_mlp(_layer_as_it_is)
_gelu, _gelu_tanh, _quick_gelu, _silu = (
    replacements.activation(_activation_as_it_is, kind) for kind in ("gelu", "gelu_tanh", "quick_gelu", "silu")
)


class _Layer(torch.nn.Module):
    """Base of the layers; ``kernels`` reads the attribute."""

    can_torch_compile = True


class RMSNorm(_Layer):
    """Llama's norm: ``weight`` [columns] and ``variance_epsilon``; the name in transformers is ``RMSNorm``."""

    def forward(self, hidden_states: torch.Tensor) -> Any:
        """Normalise the last dimension of ``hidden_states`` [..., columns]."""
        return _rms_norm(self, hidden_states)


class RMSNormZeroCentered(_Layer):
    """Gemma's norm: ``weight`` [columns], to which 1 is added, and ``eps``."""

    def forward(self, x: torch.Tensor) -> Any:
        """Normalise the last dimension of ``x`` [..., columns]."""
        return _zero_centered(self, x)


class LayerNorm(_Layer):
    """``torch.nn.LayerNorm``."""

    def forward(self, input: torch.Tensor) -> Any:
        """Normalise the last dimensions of ``input``, as many as ``normalized_shape`` has."""
        return modules.LayerNorm.forward(self, input)


class GatedMLP(_Layer):
    """Llama's and Gemma's MLP: ``gate_proj``, ``up_proj``, ``down_proj``, and ``act_fn`` a silu or a gelu."""

    def forward(self, x: torch.Tensor) -> Any:
        """Return ``down_proj(act_fn(gate_proj(x)) * up_proj(x))`` for ``x`` [..., hidden]."""
        return _gated_mlp(self, x)


class GeLU(_Layer):
    """``torch.nn.GELU``, by tanh if its ``approximate`` says so, and transformers' gelu with this name."""

    def forward(self, input: torch.Tensor) -> Any:
        """Return the activation of each element of ``input`` [..., columns]."""
        by_tanh = getattr(self, "approximate", "none") == "tanh"
        return (_gelu_tanh if by_tanh else _gelu)(self, input)


class GeluTanh(_Layer):
    """The tanh approximation of gelu, also named ``NewGELU`` and ``FastGELU`` in transformers."""

    def forward(self, input: torch.Tensor) -> Any:
        """Return the activation of each element of ``input`` [..., columns]."""
        return _gelu_tanh(self, input)


class QuickGELU(_Layer):
    """``x * sigmoid(1.702 * x)``."""

    def forward(self, input: torch.Tensor) -> Any:
        """Return the activation of each element of ``input`` [..., columns]."""
        return _quick_gelu(self, input)


class SiLU(_Layer):
    """``torch.nn.SiLU``."""

    def forward(self, input: torch.Tensor) -> Any:
        """Return the activation of each element of ``input`` [..., columns]."""
        return _silu(self, input)


class SiluAndMul(_Layer):
    """``silu(x[..., :n]) * x[..., n:]`` for the two halves of the last dimension."""

    def forward(self, x: torch.Tensor) -> Any:
        """Map [..., 2n] to [..., n]."""
        return ops.swiglu(*x.chunk(2, dim=-1))


class GeluAndMul(_Layer):
    """``gelu(x[..., :n]) * x[..., n:]`` for the two halves of the last dimension."""

    def forward(self, x: torch.Tensor) -> Any:
        """Map [..., 2n] to [..., n]."""
        return geglu(*x.chunk(2, dim=-1))


class GeluTanhAndMul(_Layer):
    """Like :class:`GeluAndMul`, with the tanh approximation of gelu."""

    def forward(self, x: torch.Tensor) -> Any:
        """Map [..., 2n] to [..., n]."""
        gate, up = x.chunk(2, dim=-1)
        return geglu(gate, up, tanh=True)


class RotaryPosEmb(_Layer):
    """``apply_rotary_pos_emb`` of Llama and most other models; the name in transformers is ``rotary_pos_emb``."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> Any:
        """Rotate q and k [batch, heads, tokens, head_dim] by the angles of cos and sin [batch, tokens, head_dim]."""
        return replacements.rope(partial(type(self).forward, self))(q, k, cos, sin, unsqueeze_dim)


class CrossEntropyLoss(_Layer):
    """``torch.nn.CrossEntropyLoss``; targets that are probabilities run torch's own code."""

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> Any:
        """Return the loss of ``input`` [rows, classes] or [rows, classes, ...] against ``target`` [rows, ...]."""
        if input.dim() < 2 or target.is_floating_point():
            return type(self).forward(self, input, target)
        loss: Any = ops.cross_entropy(
            input.movedim(1, -1), target, self.weight, self.ignore_index, self.reduction, self.label_smoothing
        )
        return loss.to(input.dtype)
