"""The ops that serve Liger's functions, each called with the arguments of Liger's function.

A row is a function with Liger's parameters that calls tilekern's op. If the op does not support an argument, the row
raises :class:`NotServed` before it computes anything, and the call runs Liger's own function. Rows also correct
differences from Liger: results have Liger's dtype, a loss over no rows is 0, targets and angles get no gradient.
Liger's ``in_place`` is a permission, which the ops do not use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tilekern import ops as _modules
from tilekern.ops.dtensors import is_dtensor

Pair = tuple[torch.Tensor, torch.Tensor]
Losses = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
# Ops that are exported automatically are attributes of the package once it is imported.
ops: Any = _modules
# In float32 a term ``torch.tensor(1e-8) * log`` vanishes beside a loss.
_NO_EPS = 1e-8
# Liger also accepts these numbers for casting modes.
_CASTING_MODES: dict[str | int, str] = {0: "llama", 1: "gemma", -1: "none"}


class NotServed(Exception):  # noqa: N818 (it is not an error: the call goes to Liger)
    """The op does not support a call; the message names the arguments."""


@dataclass(frozen=True)
class Function:
    """A row of the table.

    Attributes:
        name: the class's name in ``liger_kernel.ops``.
        op: the op's name in ``tilekern.ops``.
        call: takes the arguments of that class's ``apply``.
        dispatched: the function's name in ``liger_kernel.functional``, or None if it is not there.
        dtensors: the number of first arguments that may be DTensors, all of them or none; 0 if DTensors are not
            accepted.
    """

    name: str
    op: str
    call: Callable[..., Any]
    dispatched: str | None
    dtensors: int = 0


TABLE: dict[str, Function] = {}


def _serves(
    name: str, op: str, dispatched: str | None = None, dtensors: int = 0
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def enter(call: Callable[..., Any]) -> Callable[..., Any]:
        TABLE[name] = Function(name, op, call, dispatched, dtensors)
        return call

    return enter


def _only(**unserved: Any) -> None:
    """Raise :class:`NotServed` with the names of the arguments that are given."""
    if given := [name for name, value in unserved.items() if value]:
        raise NotServed(", ".join(sorted(given)))


def _alike(x: torch.Tensor, y: torch.Tensor) -> Pair:
    """Return a loss's input and its target, without gradient, in one dtype, as kernels of two matrices require."""
    if y.requires_grad:
        y = y.detach()
    if x.dtype != y.dtype:
        wide = torch.promote_types(x.dtype, y.dtype)
        x, y = x.to(wide), y.to(wide)
    return x, y


def _rows_that_count(target: torch.Tensor, ignore_index: int, weight: torch.Tensor | None) -> torch.Tensor:
    """Return the divisor of Liger's mean; 1 if no row counts, since the sum is then 0."""
    counts = target != ignore_index
    if weight is None:
        return counts.sum().clamp(min=1)
    found = (weight.detach().float()[target.clamp(0, weight.shape[0] - 1)] * counts).sum()
    return found.where(counts.any(), 1)


@_serves("LigerRMSNormFunction", "rms_norm", dispatched="rms_norm", dtensors=1)
def _rms_norm(
    X: torch.Tensor, W: torch.Tensor | None, eps: float, offset: float = 0.0, casting_mode: str | int = "llama",
    in_place: bool = True, row_mode: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    if is_dtensor(X):
        # Liger's norm returns all rows on every rank, not a DTensor, and accepts DTensors as their gradient.
        weight = W.full_tensor() if W is not None and is_dtensor(W) else W
        y = _rms_norm(X.full_tensor(), weight, eps, offset, casting_mode)
        if y.requires_grad:
            y.register_hook(lambda dy: dy.full_tensor() if is_dtensor(dy) else dy)
        return y
    return ops.rms_norm(X, W, eps, offset, _mode(X, W, casting_mode)).to(X.dtype)


@_serves("LigerFusedAddRMSNormFunction", "fused_add_rms_norm", dispatched="fused_add_rms_norm", dtensors=2)
def _fused_add_rms_norm(
    X: torch.Tensor, R: torch.Tensor, W: torch.Tensor, eps: float, offset: float = 0.0,
    casting_mode: str | int = "llama", in_place: bool = False,
) -> Pair:  # fmt: skip
    total, y = ops.fused_add_rms_norm(R, X, W, eps, offset, _mode(X, W, casting_mode))
    return y.to(X.dtype), total


def _mode(x: torch.Tensor, weight: torch.Tensor | None, casting_mode: str | int) -> str | int:
    """Return the casting mode's name; in float32 nothing is cast, so the three modes are the same."""
    if x.dtype == torch.float32 and (weight is None or weight.dtype == torch.float32):
        return "llama"
    return _CASTING_MODES.get(casting_mode, casting_mode)


@_serves("LigerLayerNormFunction", "layer_norm", dispatched="layer_norm", dtensors=1)
def _layer_norm(X: torch.Tensor, W: torch.Tensor, B: torch.Tensor, eps: float) -> torch.Tensor:
    return ops.layer_norm(X, W, B, eps).to(X.dtype)


@_serves("LigerGroupNormFunction", "group_norm", dtensors=1)
def _group_norm(
    X: torch.Tensor, affine_scaling_weight: torch.Tensor, affine_shifting_bias: torch.Tensor, num_channels: int,
    num_groups: int, eps: float,
) -> torch.Tensor:  # fmt: skip
    weights = (affine_scaling_weight, affine_shifting_bias)
    return ops.group_norm(X, *weights, num_channels, num_groups, eps).to(X.dtype)


@_serves("LigerPolyNormFunction", "poly_norm", dtensors=1)
def _poly_norm(
    X: torch.Tensor, W: torch.Tensor, B: torch.Tensor, eps: float = 1e-6, in_place: bool = True
) -> torch.Tensor:
    return ops.poly_norm(X, W, B, eps).to(X.dtype)


@_serves("LigerDyTFunction", "dyt", dtensors=1)
def _dyt(x: torch.Tensor, alpha: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None) -> torch.Tensor:
    return ops.dyt(x, alpha, gamma, beta).to(x.dtype)


@_serves("LigerSiLUMulFunction", "swiglu", dispatched="swiglu", dtensors=2)
def _swiglu(
    a: torch.Tensor, b: torch.Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0
) -> torch.Tensor:
    return ops.swiglu(a, b, float(gate_multiplier), float(down_multiplier))


@_serves("LigerFusedGateUpSiLUMulFunction", "swiglu", dtensors=1)
def _fused_gate_up(y: torch.Tensor, in_place: bool = False) -> torch.Tensor:
    if y.shape[-1] % 2:
        raise ValueError(f"fused gate-up input must have an even last dimension, got {list(y.shape)}")
    return ops.swiglu(*y.chunk(2, -1))


@_serves("LigerMLPFunction", "gated_mlp")
def _gated_mlp(
    input: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor, down_weight: torch.Tensor,
    gate_multiplier: float = 1.0, down_multiplier: float = 1.0,
) -> torch.Tensor:  # fmt: skip
    if gate_multiplier == down_multiplier == 1:
        return ops.gated_mlp(input, gate_weight, up_weight, down_weight)
    gate, up = (torch.nn.functional.linear(input, weight) for weight in (gate_weight, up_weight))
    return torch.nn.functional.linear(_swiglu(gate, up, gate_multiplier, down_multiplier), down_weight)


@_serves("LigerGELUMulFunction", "geglu", dispatched="geglu")
def _geglu(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return ops.geglu(a, b, tanh=True)


@_serves("LigerSoftmaxFunction", "softmax", dispatched="softmax")
def _softmax(input_: torch.Tensor) -> torch.Tensor:
    return ops.softmax(input_)


@_serves("LigerSparsemaxFunction", "sparsemax")
def _sparsemax(x: torch.Tensor, dim: int) -> torch.Tensor:
    return ops.sparsemax(x, dim)


@_serves("LigerFusedNeighborhoodAttentionFunction", "fused_neighborhood_attention")
def _neighborhood_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kernel_size: int = 7, dilation: int = 1,
    scale: float | None = None,
) -> torch.Tensor:  # fmt: skip
    return ops.fused_neighborhood_attention(query, key, value, kernel_size, dilation, scale)


@_serves("LigerRopeFunction", "rope", dispatched="rope")
def _rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, position_ids: torch.Tensor | None = None,
    unsqueeze_dim: int = 1, rotary_dim: int | None = None,
) -> Pair:  # fmt: skip
    size = q.shape[-1]
    rotary = min(cos.shape[-1], size) if rotary_dim is None else rotary_dim
    rotary -= rotary % 2  # in a head of odd size the last number is not rotated
    # Liger reads only the first half of the angles, as tilekern does with ``twice``.
    width = rotary if cos.shape[-1] == rotary else rotary // 2
    angles = [_without_heads(x, unsqueeze_dim)[..., :width] for x in (cos, sin)]
    q_out, k_out = ops.rope(q, k, *angles, twice=True, rotary_dim=None if rotary == size else rotary)
    return q_out.to(q.dtype), k_out.to(k.dtype)


def _without_heads(angles: torch.Tensor, dim: int) -> torch.Tensor:
    """Return angles as [batch, tokens, size], without a heads dimension of size 1; other shapes are returned as is."""
    if angles.dim() != 4:
        return angles
    return angles.squeeze(dim) if angles.shape[dim] == 1 else angles.squeeze(1)


@_serves("LigerLlama4RopeFunction", "llama4_rope")
def _llama4_rope(q: torch.Tensor, k: torch.Tensor, freqs_cis: torch.Tensor, BLOCK_SIZE: int | None = None) -> Pair:
    _only(**{"a real freqs_cis": not freqs_cis.is_complex()})
    return ops.llama4_rope(q, k, freqs_cis.detach()[..., : q.shape[1], :])


@_serves("LigerQwen2VLMRopeFunction", "qwen2vl_mrope")
def _qwen2vl_mrope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mrope_section: list[int],
    unsqueeze_dim: int = 1,
) -> Pair:  # fmt: skip
    # Liger expects [batch, heads, tokens, head_dim] for any unsqueeze_dim.
    q_out, k_out = ops.qwen2vl_mrope(q, k, cos, sin, mrope_section)
    return q_out.to(q.dtype), k_out.to(k.dtype)


@_serves("LigerCrossEntropyFunction", "cross_entropy", dispatched="cross_entropy")
def _cross_entropy(
    _input: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int = -100,
    lse_square_scale: float = 0.0, label_smoothing: float = 0.0, reduction: str = "mean", softcap: float | None = None,
    return_z_loss: bool = False, return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
) -> Losses:  # fmt: skip
    divided = reduction == "mean" and (weight is None or not lse_square_scale)
    found = ops.cross_entropy(
        _input, target, None if weight is None else weight.detach(), ignore_index=ignore_index,
        reduction="sum" if divided else reduction, label_smoothing=label_smoothing, softcap=softcap,
        z_loss=lse_square_scale, in_place=True, return_z_loss=return_z_loss,
        return_token_accuracy=return_token_accuracy, return_predicted_tokens=return_predicted_tokens,
        z_loss_by_rows=True,
    )  # fmt: skip
    loss, z_loss, *others = _with_others(found)
    if divided:
        rows = _rows_that_count(target, ignore_index, weight)
        loss, z_loss = loss / rows, None if z_loss is None else z_loss / rows
    return loss.to(_input.dtype), None if z_loss is None else z_loss.to(_input.dtype), *others


def _with_others(found: Any) -> Losses:
    """Return the loss, z-loss, accuracy and predicted tokens, as Liger does; None for missing ones."""
    if isinstance(found, torch.Tensor):
        return found, None, None, None
    return found.loss, found.z_loss, found.token_accuracy, found.predicted_tokens


@_serves(
    "LigerFusedLinearCrossEntropyFunction", "fused_linear_cross_entropy", dispatched="fused_linear_cross_entropy"
)  # fmt: skip
def _fused_linear_cross_entropy(
    _input: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None,
    ce_weight: torch.Tensor | None = None, ignore_index: int = -100, lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0, reduction: str = "mean", softcap: float | None = None, return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None, use_token_scaling: bool = False, return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False, ce_impl: str | None = None, ce_mode: str | None = None,
    chunk_mem_const: int = 1,
) -> Losses:  # fmt: skip
    _only(ce_impl=ce_impl, ce_mode=ce_mode, accum_dtype=accum_dtype not in (None, torch.float32, weight.dtype))
    divided = reduction == "mean" and (ce_weight is None or not lse_square_scale)
    found = ops.fused_linear_cross_entropy(
        _input, weight, target, class_weight=None if ce_weight is None else ce_weight.detach(),
        ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing, softcap=softcap,
        z_loss=lse_square_scale, wide_sums=accum_dtype == torch.float32, bias=bias,
        num_items=_rows_that_count(target, ignore_index, ce_weight) if divided else None,
        use_token_scaling=use_token_scaling, return_z_loss=return_z_loss, return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens, z_loss_by_rows=True,
    )  # fmt: skip
    loss, z_loss, *others = _with_others(found)
    return loss, None if z_loss is None else z_loss.to(_input.dtype), *others


@_serves("LigerFusedLinearScaledCrossEntropyFunction", "linear_log_probs")
def _scaled_cross_entropy(
    _input: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, temperature: float = 1.0,
    ignore_index: int = -100, m_tiles_per_cluster: int = 1, return_entropy: bool = False,
    selected_token_ids: torch.Tensor | None = None,
) -> torch.Tensor | Pair:  # fmt: skip
    _only(selected_token_ids=selected_token_ids is not None)
    log_probs, entropy = ops.linear_log_probs(
        _input, weight, target, temperature=temperature, ignore_index=ignore_index
    )
    return (-log_probs, entropy.to(_input.dtype)) if return_entropy else -log_probs


@_serves("LigerJSDFunction", "jsd", dispatched="jsd")
def _jsd(
    _input: torch.Tensor, target: torch.Tensor, shift_labels: torch.Tensor | None = None, beta: float = 0.5,
    ignore_index: int = -100, jsd_impl: str | None = None, jsd_mode: str | None = None,
) -> torch.Tensor:  # fmt: skip
    _only(jsd_impl=jsd_impl, jsd_mode=jsd_mode)
    return ops.jsd(*_alike(_input, target), shift_labels, beta, ignore_index).to(_input.dtype)


@_serves("LigerFusedLinearJSDFunction", "fused_linear_jsd", dispatched="fused_linear_jsd")
def _fused_linear_jsd(
    student_input: torch.Tensor, student_weight: torch.Tensor, teacher_input: torch.Tensor,
    teacher_weight: torch.Tensor, shift_labels: torch.Tensor | None = None, jsd_beta: float = 0.5,
    ignore_index: int = -100, temperature: float = 1.0, accum_dtype: torch.dtype | None = None,
    jsd_impl: str | None = None, jsd_mode: str | None = None,
) -> torch.Tensor:  # fmt: skip
    _only(
        jsd_impl=jsd_impl, jsd_mode=jsd_mode,
        accum_dtype=accum_dtype not in (None, torch.float32, student_weight.dtype),
    )  # fmt: skip
    sums = torch.float32 if accum_dtype == torch.float32 else None
    heads = (student_input, student_weight, teacher_input, teacher_weight)
    return ops.fused_linear_jsd(*heads, shift_labels, jsd_beta, ignore_index, temperature, sums, wide_logits=True)


@_serves("LigerKLDivLossFunction", "kl_div", dispatched="kl_div")
def _kl_div(
    y_pred: torch.Tensor, y_true: torch.Tensor, reduction: str = "batchmean", log_target: bool = False,
    eps: float = 1e-10,
) -> torch.Tensor:  # fmt: skip
    _only(eps=eps > _NO_EPS and not log_target)
    return ops.kl_div(*_alike(y_pred, y_true), reduction, log_target).float()


@_serves("LigerTVDLossFunction", "tvd")
def _tvd(
    p: torch.Tensor, q: torch.Tensor, shift_labels: torch.Tensor | None = None, reduction: str = "batchmean",
    ignore_index: int = -100,
) -> torch.Tensor:  # fmt: skip
    return ops.tvd(*_alike(p, q), shift_labels, reduction, ignore_index)
