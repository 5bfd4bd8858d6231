"""Module classes of the ops, exported in ``tilekern.ops``.

The constructor takes the options of the op, and a call takes its tensors. If torch has the class, ours is a subclass
with torch's arguments, state dict and text. The parameters of the others have the names of Liger's classes and of
Hugging Face's models, so state dicts can be exchanged.
"""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import torch
from torch import Tensor

from tilekern.ops.tiled_mlp import tiled

# Ops that are exported automatically are attributes of the package once it is imported.
_ops: Any = sys.modules["tilekern.ops"]
Pair = tuple[Tensor, Tensor]


def _as_one(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Flatten the last dimensions of ``x``, which must be ``shape``."""
    if x.shape[-len(shape) :] != shape:
        raise ValueError(f"the input must end with the dimensions {list(shape)}, got {list(x.shape)}")
    return x if len(shape) == 1 else x.flatten(-len(shape))


class LayerNorm(torch.nn.LayerNorm):
    """:func:`tilekern.ops.layer_norm` as ``torch.nn.LayerNorm``."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise the last dimensions of ``input``; any shape that ends with ``normalized_shape``."""
        x = _as_one(input, self.normalized_shape)
        weight = None if self.weight is None else self.weight.flatten()
        bias = None if self.bias is None else self.bias.flatten()
        return _ops.layer_norm(x, weight, bias, self.eps).view(input.shape)


class RMSNorm(torch.nn.RMSNorm):
    """:func:`tilekern.ops.rms_norm` as ``torch.nn.RMSNorm``, with the casts and the ``eps`` of Llama's norm.

    Gemma's norm has ``offset=1.0, casting_mode="gemma"``. A new weight is ``1 - offset``.
    """

    def __init__(
        self, normalized_shape: int | list[int] | torch.Size, eps: float = 1e-6, elementwise_affine: bool = True,
        device: Any = None, dtype: Any = None, *, offset: float = 0.0, casting_mode: str = "llama",
    ) -> None:  # fmt: skip
        self.offset, self.casting_mode = offset, casting_mode
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)

    def reset_parameters(self) -> None:
        """Set the weight so that it changes nothing."""
        if self.elementwise_affine:
            torch.nn.init.constant_(self.weight, 1 - self.offset)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimensions of ``x``; any shape that ends with ``normalized_shape``."""
        rows = _as_one(x, self.normalized_shape)
        weight = None if self.weight is None else self.weight.flatten()
        return _ops.rms_norm(rows, weight, self.eps, self.offset, self.casting_mode).view(x.shape)

    def extra_repr(self) -> str:
        """Return torch's text, with the offset and the casts."""
        return f"{super().extra_repr()}, offset={self.offset}, casting_mode={self.casting_mode}"


class FusedAddRMSNorm(torch.nn.Module):
    """:func:`tilekern.ops.fused_add_rms_norm`, with the parameters of Liger's class."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, *, offset: float = 0.0, casting_mode: str = "llama"
    ) -> None:
        super().__init__()
        self.eps, self.offset, self.casting_mode = eps, offset, casting_mode
        self.weight = torch.nn.Parameter(torch.full((hidden_size,), 1.0 - offset))

    def forward(self, residual: Tensor, x: Tensor) -> Pair:
        """Return the sum of ``residual`` and ``x`` [..., hidden_size], and its norm."""
        return _ops.fused_add_rms_norm(residual, x, self.weight, self.eps, self.offset, self.casting_mode)

    def extra_repr(self) -> str:
        """Return the size and the options."""
        return f"{len(self.weight)}, eps={self.eps}, offset={self.offset}, casting_mode={self.casting_mode}"


class GroupNorm(torch.nn.GroupNorm):
    """:func:`tilekern.ops.group_norm` as ``torch.nn.GroupNorm``, of three dimensions or more."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise groups of the channels of ``input`` [batch, channels, ...]."""
        weight = input.new_ones(self.num_channels) if self.weight is None else self.weight
        bias = torch.zeros_like(weight) if self.bias is None else self.bias
        return _ops.group_norm(input, weight, bias, self.num_channels, self.num_groups, self.eps)


class DyT(torch.nn.Module):
    """:func:`tilekern.ops.dyt`, with the arguments and the parameters of Liger's class."""

    def __init__(self, hidden_size: int, beta: bool = True, init_alpha: float = 0.5) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.alpha = torch.nn.Parameter(torch.full((1,), init_alpha))
        self.gamma = torch.nn.Parameter(torch.ones(hidden_size))
        self.beta = torch.nn.Parameter(torch.zeros(hidden_size)) if beta else None

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., hidden_size] to [..., hidden_size]."""
        return _ops.dyt(x, self.alpha, self.gamma, self.beta)

    def extra_repr(self) -> str:
        """Return the size."""
        return f"{self.hidden_size}, beta={self.beta is not None}"


class PolyNorm(torch.nn.Module):
    """:func:`tilekern.ops.poly_norm`, with the parameters of Liger's class."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.full((3,), 1 / 3))
        self.bias = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., columns] to [..., columns]."""
        return _ops.poly_norm(x, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        """Return the number that is added to each mean square."""
        return f"eps={self.eps}"


class Softmax(torch.nn.Softmax):
    """:func:`tilekern.ops.softmax` as ``torch.nn.Softmax``, along any dimension; the default is the last one."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__(dim)

    def forward(self, input: Tensor) -> Tensor:
        """Return probabilities in the shape and dtype of ``input``."""
        if self.dim in (-1, input.dim() - 1):
            return _ops.softmax(input)
        return _ops.softmax(input.transpose(self.dim, -1)).transpose(self.dim, -1)


class Sparsemax(torch.nn.Module):
    """:func:`tilekern.ops.sparsemax` along ``dim``."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """Return probabilities in the shape and dtype of ``x``."""
        return _ops.sparsemax(x, self.dim)

    def extra_repr(self) -> str:
        """Return the dimension."""
        return f"dim={self.dim}"


class KLDiv(torch.nn.KLDivLoss):
    """:func:`tilekern.ops.kl_div` as ``torch.nn.KLDivLoss``; the default reduction is ``mean``."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the divergence of log-probabilities ``input`` from ``target``."""
        return _ops.kl_div(input, target, self.reduction, self.log_target)


class JSD(torch.nn.Module):
    """:func:`tilekern.ops.jsd`, with the arguments of Liger's class."""

    def __init__(self, beta: float = 0.5, ignore_index: int = -100) -> None:
        super().__init__()
        self.beta, self.ignore_index = beta, ignore_index

    def forward(self, log_q: Tensor, log_p: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        """Return the divergence of a student's log-probabilities [..., columns] from a teacher's ``log_p``."""
        return _ops.jsd(log_q, log_p, shift_labels, self.beta, self.ignore_index)


class TVD(torch.nn.Module):
    """:func:`tilekern.ops.tvd`, with the arguments of Liger's class."""

    def __init__(self, reduction: str = "batchmean", ignore_index: int = -100) -> None:
        super().__init__()
        self.reduction, self.ignore_index = reduction, ignore_index

    def forward(self, p: Tensor, q: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        """Return the distance of two distributions, [..., columns]."""
        return _ops.tvd(p, q, shift_labels, self.reduction, self.ignore_index)


class CrossEntropy(torch.nn.CrossEntropyLoss):
    """:func:`tilekern.ops.cross_entropy` as ``torch.nn.CrossEntropyLoss``, with the op's further options.

    The target holds classes, not probabilities. As in torch, classes are the second dimension of the input.
    """

    def __init__(
        self, weight: Tensor | None = None, ignore_index: int = -100, reduction: str = "mean",
        label_smoothing: float = 0.0, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
        self.options = options

    def forward(self, input: Tensor, target: Tensor) -> Any:
        """Return the loss of ``input`` [rows, classes] or [rows, classes, ...] against ``target`` [rows, ...]."""
        logits = input.movedim(1, -1) if input.dim() > 2 else input
        return _ops.cross_entropy(
            logits, target, self.weight, self.ignore_index, self.reduction, self.label_smoothing, **self.options
        )


class FusedLinearCrossEntropy(torch.nn.Module):
    """:func:`tilekern.ops.fused_linear_cross_entropy` with its options; the head's parameters are arguments."""

    def __init__(self, class_weight: Tensor | None = None, **options: Any) -> None:
        super().__init__()
        self.register_buffer("class_weight", class_weight, persistent=False)
        self.options = options

    def forward(
        self, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None,
        num_items: Tensor | float | None = None,
    ) -> Any:  # fmt: skip
        """Return the loss of ``hidden`` [..., hidden] through the head ``weight`` [vocabulary, hidden]."""
        given = {"class_weight": self.class_weight, "bias": bias, "num_items": num_items}
        return _ops.fused_linear_cross_entropy(hidden, weight, target, **given, **self.options)

    def extra_repr(self) -> str:
        """Return the options."""
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class FusedLinearJSD(torch.nn.Module):
    """:func:`tilekern.ops.fused_linear_jsd`, with the arguments of Liger's class."""

    def __init__(
        self, jsd_beta: float = 0.5, ignore_index: int = -100, temperature: float = 1.0,
        accum_dtype: torch.dtype | None = None, *, wide_logits: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.jsd_beta, self.ignore_index = jsd_beta, ignore_index
        self.temperature, self.accum_dtype, self.wide_logits = temperature, accum_dtype, wide_logits

    def forward(
        self, student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
        shift_labels: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the divergence of two heads, each with inputs [..., hidden] and a weight [vocabulary, hidden]."""
        return _ops.fused_linear_jsd(
            student_input, student_weight, teacher_input, teacher_weight, shift_labels, self.jsd_beta,
            self.ignore_index, self.temperature, self.accum_dtype, wide_logits=self.wide_logits,
        )  # fmt: skip


class _GatedMLP(torch.nn.Module):
    """``down_proj(activation(gate_proj(x)) * up_proj(x))``, with the names of Llama's and Gemma's MLP.

    The projections are called as modules, so adapters, hooks and quantised layers keep working.
    """

    # Activations by their names in transformers, with the op's argument for each; the first is the default.
    activations: ClassVar[dict[str, Any]]

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.hidden_size, self.intermediate_size = config.hidden_size, config.intermediate_size
        bias = getattr(config, "mlp_bias", False)
        self.gate_proj = torch.nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.up_proj = torch.nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.down_proj = torch.nn.Linear(self.intermediate_size, self.hidden_size, bias=bias)
        name = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
        name = next(iter(self.activations)) if name is None else name
        if name not in self.activations:
            known = ", ".join(self.activations)
            raise ValueError(f"{type(self).__name__}: the activation must be one of {known}, got {name!r}")
        self.activation = self.activations[name]

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return the activation of ``gate`` times ``up``, [..., intermediate]."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., hidden] to [..., hidden]."""
        return self.down_proj(self.gated(self.gate_proj(x), self.up_proj(x)))


class SwiGLUMLP(_GatedMLP):
    """Llama's MLP with :func:`tilekern.ops.swiglu`, created from a configuration like ``LlamaMLP``."""

    activations: ClassVar = {"silu": None, "swish": None}

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return ``silu(gate) * up``."""
        return _ops.swiglu(gate, up)


class GEGLUMLP(_GatedMLP):
    """Gemma's MLP with :func:`tilekern.ops.geglu`, created from a configuration like ``GemmaMLP``."""

    activations: ClassVar = {"gelu_pytorch_tanh": True, "gelu_new": True, "gelu": False}

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return ``gelu(gate) * up``."""
        return _ops.geglu(gate, up, self.activation)


class _Tiled(_GatedMLP):
    """An MLP over shards of the tokens, like :func:`tilekern.ops.tiled_swiglu` and ``tiled_geglu``."""

    def __init__(self, config: Any, num_shards: int | None = None) -> None:
        super().__init__(config)
        self.num_shards = num_shards

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., tokens, hidden] to [..., tokens, hidden]."""
        return tiled(super().forward, x, self.num_shards, type(self).__name__)


class TiledSwiGLUMLP(_Tiled, SwiGLUMLP):
    """:class:`SwiGLUMLP` over shards of the tokens."""


class TiledGEGLUMLP(_Tiled, GEGLUMLP):
    """:class:`GEGLUMLP` over shards of the tokens."""


class FusedNeighborhoodAttention(torch.nn.Module):
    """Self-attention by :func:`tilekern.ops.fused_neighborhood_attention`, with the arguments of Liger's class."""

    def __init__(
        self, hidden_size: int, num_heads: int, kernel_size: int = 7, dilation: int = 1, bias: bool = True,
        dropout: float = 0.0, scale: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if hidden_size % num_heads:
            raise ValueError(f"FusedNeighborhoodAttention: {num_heads} heads do not divide a hidden size {hidden_size}")
        self.num_heads, self.kernel_size, self.dilation, self.scale = num_heads, kernel_size, dilation, scale
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            self.add_module(name, torch.nn.Linear(hidden_size, hidden_size, bias=bias))
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map [batch, tokens, hidden] to [batch, tokens, hidden]."""
        heads = (
            projection(hidden_states).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        found = _ops.fused_neighborhood_attention(*heads, self.kernel_size, self.dilation, self.scale)
        return self.out_proj(self.dropout(found.transpose(1, 2).flatten(2)))

    def extra_repr(self) -> str:
        """Return the neighbourhood."""
        return f"num_heads={self.num_heads}, kernel_size={self.kernel_size}, dilation={self.dilation}"


CLASSES = {
    name: found
    for name, found in list(globals().items())
    if isinstance(found, type) and found.__module__ == __name__ and not name.startswith("_")
}
