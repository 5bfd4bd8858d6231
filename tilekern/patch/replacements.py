"""Replacements for functions of Hugging Face models; each is made from the function that it replaces.

The original runs whenever the kernel would compute something else: another activation, a subclass of Tensor (DTensor
and the like), shapes that need broadcasting.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from tilekern import ops
from tilekern.ops import few_rows
from tilekern.ops.activation import activation as activation_op
from tilekern.ops.geglu import geglu
from tilekern.ops.layer_norm import layer_norm
from tilekern.ops.linear import product
from tilekern.ops.llama4_rope import llama4_rope
from tilekern.ops.qwen2vl_mrope import qwen2vl_mrope
from tilekern.ops.registration import is_autocast
from tilekern.patch import adapters, fp8
from tilekern.patch.guards import (
    SHAPES,
    SUBCLASS,
    TENSORS,
    bare_weights,
    count_own,
    is_ordinary,
    is_plain,
    parameter_of,
    weight_of,
)
from tilekern.patch.projecting import projected
from tilekern.patch.rewriting import named_as
from tilekern.patch.table import PLAIN, Norm

Function = Callable[..., Any]
_NORM, _LAYER_NORM = "rms_norm_forward", "layer_norm_forward"
_GEGLU_TANH = partial(geglu, tanh=True)
_GATED_TANH = ("gated", "gelu_tanh")
ACTIVATIONS: dict[Function, str] = {ops.swiglu: "silu", geglu: "gelu", _GEGLU_TANH: "gelu_tanh"}


def rms_norm(original: Function, norm: Norm = PLAIN) -> Function:
    """Replace ``forward(self, hidden_states)`` of a norm with ``weight`` [columns], or without one."""
    eps, offset, casting_mode = norm.eps, norm.offset, norm.casting_mode

    def forward(self: Any, hidden_states: torch.Tensor) -> Any:
        if type(hidden_states) is not torch.Tensor:
            count_own(_NORM, SUBCLASS)
            return original(self, hidden_states)
        return ops.rms_norm(hidden_states, parameter_of(self, "weight"), self.variance_epsilon)

    def forward_with_options(self: Any, hidden_states: torch.Tensor) -> Any:
        if type(hidden_states) is not torch.Tensor:
            count_own(_NORM, SUBCLASS)
            return original(self, hidden_states)
        return ops.rms_norm(hidden_states, weight_of(norm, self), getattr(self, eps), offset, casting_mode)

    return named_as(forward if norm == PLAIN else forward_with_options, original)


def rms_norm_by_helper(original: Function, norm: Norm) -> Function:
    """Like :func:`rms_norm`, for a norm that computes by its method ``_norm``, which subclasses may override."""
    names = inspect.unwrap(original).__globals__
    eps, offset, casting_mode = norm.eps, norm.offset, norm.casting_mode

    def forward(self: Any, hidden_states: torch.Tensor) -> Any:
        written = getattr(type(self)._norm, "__globals__", None) is names
        if not written or type(hidden_states) is not torch.Tensor:
            count_own(_NORM, SUBCLASS if written else "a subclass with a _norm of its own")
            return original(self, hidden_states)
        return ops.rms_norm(hidden_states, weight_of(norm, self), getattr(self, eps), offset, casting_mode)

    return named_as(forward, original)


def rms_norm_gated(original: Function) -> Function:
    """Replace ``forward(self, hidden_states, gate)`` of a norm whose result is multiplied by ``silu(gate)``.

    The two steps are two ops; the second computes in float32 as well.
    """

    def forward(self: Any, hidden_states: torch.Tensor, gate: torch.Tensor) -> Any:
        x, weight = hidden_states, self.weight
        alike = is_plain(x, gate, weight) and gate.shape == x.shape and gate.dtype == x.dtype == weight.dtype
        if not alike or self.activation not in ("silu", "swish"):
            count_own(_NORM, SHAPES if not alike else "another activation")
            return original(self, x, gate)
        return ops.swiglu(gate, ops.rms_norm(x, weight, self.variance_epsilon))

    return named_as(forward, original)


def layer_norm_unbiased(original: Function) -> Function:
    """Replace ``forward(self, hidden_states)`` of a layer norm with ``weight`` [columns] and no bias, rounded last."""

    def forward(self: Any, hidden_states: torch.Tensor) -> Any:
        if type(hidden_states) is not torch.Tensor:
            count_own(_LAYER_NORM, SUBCLASS)
            return original(self, hidden_states)
        if self.weight.shape == hidden_states.shape[-2:]:
            return by_heads(hidden_states, self.weight, self.variance_epsilon)
        if self.weight.shape != hidden_states.shape[-1:]:
            count_own(_LAYER_NORM, SHAPES)
            return original(self, hidden_states)
        normal = layer_norm(hidden_states, self.weight, None, self.variance_epsilon)
        return normal.to(hidden_states.dtype)

    return named_as(forward, original)


def by_heads(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return a layer norm over the last dimension, with weights that also vary over other dimensions; rounds last."""
    ones = torch.ones(x.shape[-1], dtype=torch.float32, device=x.device)
    return (layer_norm(x, ones, None, eps) * weight).to(x.dtype)


def layer_norm_from_1(original: Function) -> Function:
    """Replace ``forward(self, input)`` of a layer norm that scales by ``weight + 1``; ``weight`` is [columns]."""

    def forward(self: Any, hidden_states: torch.Tensor) -> Any:
        x, weight, bias = hidden_states, self.weight, self.bias
        if type(x) is not torch.Tensor or weight is None or not are_normed_alike(x, weight, bias):
            count_own(_LAYER_NORM, SHAPES if type(x) is torch.Tensor else SUBCLASS)
            return original(self, x)
        return layer_norm(x, weight + 1.0, bias, self.eps)

    return named_as(forward, original)


def layer_norm_alone(original: Function) -> Function:
    """Replace ``forward(self, hidden_states)`` of a layer norm without weight and bias, whose eps is 1e-5."""

    def forward(self: Any, hidden_states: torch.Tensor) -> Any:
        if type(hidden_states) is not torch.Tensor or hidden_states.shape[-1:] != self.normalized_shape:
            count_own(_LAYER_NORM, SHAPES if type(hidden_states) is torch.Tensor else SUBCLASS)
            return original(self, hidden_states)
        return layer_norm(hidden_states, None, None, 1e-5)

    return named_as(forward, original)


def are_normed_alike(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> bool:
    """Return whether torch's layer norm of ``x`` over the last dimension equals the op's, in the same dtype."""
    # Under autocast layer norms return float32.
    if x.dtype != torch.float32 and is_autocast(x):
        return False
    size, dtype = x.shape[-1:], x.dtype
    for part in (weight, bias):
        if part is not None and (type(part) not in TENSORS or part.dtype != dtype or part.shape != size):
            return False
    return True


def gated_mlp(
    original: Function, activation: str = "act_fn",
    layers: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"), dropout: str = "",
) -> Function:  # fmt: skip
    """Replace ``forward(self, x)`` of an MLP whose layers make gate, up and the result.

    Args:
        activation: attribute that holds the activation; empty for ``torch.nn.functional.silu``.
        layers: attributes that hold the layers.
        dropout: attribute with the dropout rate of the result in training; empty without dropout.
    """
    gate_of = gates_by(activation)
    first, second, last = layers

    def forward(self: Any, x: torch.Tensor) -> Any:
        gate = gate_of(self)
        if gate is None or type(x) is not torch.Tensor:
            _count_gate(gate)
            return original(self, x)
        weights = bare_weights(self, layers)
        if weights is None:
            made = (getattr(self, first), getattr(self, second), getattr(self, last))
            y = fp8.gated_mlp(made, ACTIVATIONS[gate], x)
            y = adapters.gated_mlp(made, x) if y is None and gate is ops.swiglu else y
            y = made[2](gate(*projected(made[:2], x))) if y is None else y
        elif gate is ops.swiglu:
            y = ops.gated_mlp(x, *weights)
        elif gate is _GEGLU_TANH and few_rows.is_served(x, *weights) and few_rows.is_tuned(x, weights[0], *_GATED_TANH):
            y = product(ops.gated_linear(x, weights[0], weights[1], "gelu_tanh"), weights[2])
        else:
            y = product(gate(product(x, weights[0]), product(x, weights[1])), weights[2])
        return torch.nn.functional.dropout(y, getattr(self, dropout), self.training) if dropout else y

    return named_as(forward, original)


def joined_mlp(
    original: Function, activation: str = "activation_fn", layers: tuple[str, str] = ("gate_up_proj", "down_proj")
) -> Function:
    """Replace ``forward`` of an MLP whose first layer makes gate and up, concatenated."""
    gate_of = gates_by(activation)
    first, last = layers

    def forward(self: Any, hidden_states: torch.Tensor) -> Any:
        gate = gate_of(self)
        if gate is None or type(hidden_states) is not torch.Tensor:
            _count_gate(gate)
            return original(self, hidden_states)
        made = (getattr(self, first), getattr(self, last))
        y = fp8.gated_mlp(made, ACTIVATIONS[gate], hidden_states)
        return made[1](gate(*made[0](hidden_states).chunk(2, dim=-1))) if y is None else y

    return named_as(forward, original)


def multiplied_mlp(original: Function) -> Function:
    """Replace the forward of Falcon-H1's MLP, which multiplies the gate before its activation, and the result."""
    gate_of = gates_by("act_fn")

    def forward(self: Any, x: torch.Tensor) -> Any:
        if gate_of(self) is not ops.swiglu or type(x) is not torch.Tensor:
            _count_gate(None if gate_of(self) is not ops.swiglu else ops.swiglu)
            return original(self, x)
        up, gate = self.up_proj(x), self.gate_proj(x)  # in the order of the model, as dropouts of adapters draw
        return self.down_proj(ops.swiglu(gate, up, self.gate_multiplier)) * self.down_multiplier

    return named_as(forward, original)


def _count_gate(gate: Function | None) -> None:
    """Count a call that runs an MLP's own code; ``gate`` is the op of its gate, or None if no op has it."""
    count_own("swiglu_forward", "an activation without an op, or with hooks" if gate is None else SUBCLASS)


def gates_by(activation: str) -> Callable[[Any], Function | None]:
    """Return a function from a module to the op that computes ``activation(gate) * up``, or None if no op does."""
    gated = gates()

    def gate_of(module: Any) -> Function | None:
        if not activation:
            return ops.swiglu
        function = module.__dict__["_modules"].get(activation)
        op = gated.get(type(function))
        return None if op is None or not is_ordinary(function) else op

    return gate_of


def gates() -> dict[type, Function]:
    """Return the op that computes ``activation(gate) * up``, for each class of activations that has one."""
    from transformers.activations import GELUActivation, GELUTanh, NewGELUActivation, SiLUActivation

    return {
        **dict.fromkeys((SiLUActivation, torch.nn.SiLU), ops.swiglu),
        **dict.fromkeys((GELUTanh, NewGELUActivation), _GEGLU_TANH),
        GELUActivation: geglu,
    }


def activation(original: Function, kind: str) -> Function:
    """Replace ``forward(self, x)`` of an activation."""

    def forward(self: Any, x: torch.Tensor) -> Any:
        if type(x) is not torch.Tensor:
            count_own("activation_forward", SUBCLASS)
            return original(self, x)
        return activation_op(x, kind)

    return named_as(forward, original)


def kind_of(module: Any, known: Mapping[type, str]) -> str | None:
    """Return the activation of :func:`tilekern.ops.activation` that a module's call computes; None if there is none."""
    kind = type(module)
    name = {"none": "gelu", "tanh": "gelu_tanh"}.get(module.approximate) if kind is torch.nn.GELU else known.get(kind)
    return None if name is None or not is_ordinary(module) else name


def kinds() -> dict[type, str]:
    """Return the activation of :func:`tilekern.ops.activation` that all instances of a class compute, by class."""
    from transformers import activations

    return {
        activations.GELUActivation: "gelu",
        **dict.fromkeys(
            (
                activations.AccurateGELUActivation,
                activations.FastGELUActivation,
                activations.GELUTanh,
                activations.NewGELUActivation,
            ),
            "gelu_tanh",
        ),
        activations.QuickGELUActivation: "quick_gelu",
        **dict.fromkeys((activations.SiLUActivation, torch.nn.SiLU), "silu"),
        torch.nn.ReLU: "relu",
        activations.ReLUSquaredActivation: "relu2",
    }


def rope(
    original: Function, angles: str = "twice", *, part: bool = False, pairs: bool = False, back: bool = False,
    cast_back: bool = False,
) -> Function:  # fmt: skip
    """Replace ``apply_rotary_pos_emb`` of q and k by cos and sin [batch or 1, tokens, size].

    q and k are [batch, heads, tokens, head_dim] with ``unsqueeze_dim`` 1, [batch, tokens, heads, head_dim] with 2.

    Args:
        original: the rotation.
        angles: layout of a head's angles in cos and sin: ``twice`` (one half after the other), ``in a row`` (each twice
            in a row), ``once``, or ``whole`` (one angle for each number of a head).
        part: whether only the first ``size`` numbers of each head are rotated.
        pairs: whether pairs (x[2i], x[2i + 1]) are rotated, not halves.
        back: whether to rotate by the negative angles.
        cast_back: whether the results are cast to the dtypes of q and k.
    """

    def turn(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        size = cos.shape[-1]
        if pairs and angles == "twice":
            cos, sin = cos[..., : size // 2], sin[..., : size // 2]
        sin, width = -sin if back else sin, size if part else None
        return ops.rope(q, k, cos, sin, twice=angles == "twice" and not pairs, rotary_dim=width, interleaved=pairs)

    def fits(size: int, width: int) -> bool:
        if part:
            return width <= size and width % 2 == 0
        return (2 * width if angles == "once" else width) == size

    turned = _turning(original, turn, fits)
    return _cast_back(turned) if cast_back else turned


rope_back = partial(rope, back=True)
rope_cast_back = partial(rope, cast_back=True)
rope_part = partial(rope, part=True)
rope_pairs = partial(rope, part=True, pairs=True)
rope_pairs_cast_back = partial(rope, part=True, pairs=True, cast_back=True)
rope_pairs_in_a_row = partial(rope, angles="in a row", pairs=True, cast_back=True)
rope_part_in_a_row = partial(rope, angles="in a row", part=True, pairs=True)
rope_whole = partial(rope, angles="whole")
rope_whole_cast_back = partial(rope, angles="whole", cast_back=True)


def rope_of_patches(original: Function) -> Function:
    """Like :func:`rope_whole_cast_back`, for q and k [patches, heads, head_dim], cos and sin [patches, head_dim]."""

    def of_one_batch(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, _: int = 1) -> Any:
        return tuple(x[None] for x in original(q[0], k[0], cos[0], sin[0]))

    turned = rope_whole_cast_back(of_one_batch)

    def apply_rotary_pos_emb_vision(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        if not is_plain(q, k, cos, sin) or q.dim() != 3 or k.dim() != 3 or cos.dim() != 2:
            _count_rope(q)
            return original(q, k, cos, sin)
        q, k = turned(q[None], k[None], cos[None], sin[None], 2)
        return q[0], k[0]

    return apply_rotary_pos_emb_vision


def rope_alone(original: Function) -> Function:
    """Like :func:`rope_whole`, for a rotation of one tensor, q or k."""
    return _one_by_one(original, rope_whole)


def rope_pairs_alone(original: Function) -> Function:
    """Replace GPT-J's rotation of one tensor [batch, tokens, heads, head_dim] in pairs (x[2i], x[2i + 1]).

    Its sines come before its cosines, each [batch, tokens, head_dim / 2].
    """

    def both(apart: Function) -> Function:
        return _turning(apart, partial(ops.rope, interleaved=True), lambda size, angles: 2 * angles == size)

    turned = _one_by_one(lambda x, cos, sin, _: original(x, sin, cos), both)

    def apply_rotary_pos_emb(tensor: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor) -> Any:
        return turned(tensor, cos, sin, 2)

    return apply_rotary_pos_emb


def _one_by_one(original: Function, pair: Callable[[Function], Function]) -> Function:
    """Return a rotation of one tensor: ``pair`` makes one for two tensors, which here are the halves of its heads."""
    turned = pair(lambda q, k, *more: (original(q, *more), original(k, *more)))

    def apply_rotary_pos_emb(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1) -> Any:
        if type(x) is not torch.Tensor or x.dim() != 4 or unsqueeze_dim not in (1, 2) or x.shape[unsqueeze_dim] < 2:
            _count_rope(x)
            return original(x, cos, sin, unsqueeze_dim)
        return torch.cat(turned(*x.tensor_split(2, unsqueeze_dim), cos, sin, unsqueeze_dim), unsqueeze_dim)

    return apply_rotary_pos_emb


def rope_once(original: Function) -> Function:
    """Like :func:`rope`, with angles [batch or 1, tokens, head_dim / 2] that are stored once."""
    return _named(original, rope(_unplaced(original), "once"))


def rope_pairs_apart(original: Function) -> Function:
    """Like :func:`rope`, for pairs (x[2i], x[2i + 1]) whose results are stored as halves, as :func:`rope`'s are."""

    def turn(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        q, k = (x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in (q, k))
        return ops.rope(q, k, cos, sin, twice=True)

    return _named(original, _turning(_unplaced(original), turn, lambda size, angles: angles == size))


def rope_multimodal(original: Function) -> Function:
    """Replace a rotation by angles [3, batch, tokens, head_dim]; each section uses one of a token's positions."""

    def apply_multimodal_rotary_pos_emb(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mrope_section: Any,
        unsqueeze_dim: int = 1,
    ) -> Any:  # fmt: skip
        if cos.dim() != 4 or not _is_usual(q, k, cos[0], unsqueeze_dim) or cos.shape[3] != q.shape[3]:
            _count_rope(q)
            return original(q, k, cos, sin, mrope_section, unsqueeze_dim)
        return qwen2vl_mrope(q, k, cos, sin, mrope_section, unsqueeze_dim)

    return apply_multimodal_rotary_pos_emb


def rope_complex(original: Function, *, by_heads: bool = False) -> Function:
    """Replace a rotation of pairs of q and k [batch, tokens, heads, head_dim] by complex angles.

    The angles are [batch or 1, tokens, head_dim / 2]. With ``by_heads``, q and k are [batch, heads, tokens, head_dim].
    """

    def apply_rotary_emb(xq: torch.Tensor, xk: torch.Tensor, freqs_cis: torch.Tensor) -> Any:
        if not _is_complex(xq, xk, freqs_cis, 2 if by_heads else 1):
            _count_rope(xq)
            return original(xq, xk, freqs_cis)
        if not by_heads:
            return llama4_rope(xq, xk, freqs_cis)
        q, k = llama4_rope(xq.transpose(1, 2), xk.transpose(1, 2), freqs_cis.to(xq.device))
        return q.transpose(1, 2), k.transpose(1, 2)

    return apply_rotary_emb


rope_complex_by_heads = partial(rope_complex, by_heads=True)


def rope_complex_of_patches(original: Function) -> Function:
    """Like :func:`rope_complex`, with complex angles [tokens, 1, head_dim / 2], for Llama 4's vision encoder."""

    def vision_apply_rotary_emb(query: torch.Tensor, key: torch.Tensor, freqs_ci: torch.Tensor) -> Any:
        angles = freqs_ci.transpose(0, 1)
        if not _is_complex(query, key, angles, 1) or len(angles) > 1:
            _count_rope(query)
            return original(query, key, freqs_ci)
        return llama4_rope(query, key, angles.to(query.device))

    return vision_apply_rotary_emb


def _count_rope(x: torch.Tensor) -> None:
    count_own("rope", SHAPES if type(x) is torch.Tensor else SUBCLASS)


def _is_complex(q: torch.Tensor, k: torch.Tensor, angles: torch.Tensor, tokens: int) -> bool:
    """Return whether the arguments have the usual form; ``tokens`` is the dimension of tokens in q and k."""
    usual = is_plain(q, k, angles) and angles.is_complex() and _is_usual(q, k, angles, 3 - tokens)
    return usual and 2 * angles.shape[2] == q.shape[3]


def _unplaced(original: Function) -> Function:
    """Return a rotation that passes ``unsqueeze_dim`` by keyword, since its place may have another use."""

    def apply_rotary_pos_emb(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        return original(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)

    return apply_rotary_pos_emb


def _named(original: Function, turned: Function) -> Function:
    """Return ``turned``, with an unused ``position_ids`` argument if the original has one."""
    if "position_ids" not in inspect.signature(original).parameters:
        return turned

    def apply_rotary_pos_emb(
        q: Any, k: Any, cos: Any, sin: Any,
        position_ids: Any = None,  # noqa: ARG001 (callers may pass it)
        unsqueeze_dim: int = 1,
    ) -> Any:  # fmt: skip
        return turned(q, k, cos, sin, unsqueeze_dim)

    return apply_rotary_pos_emb


def _turning(original: Function, turn: Function, fits: Callable[[int, int], bool]) -> Function:
    """Return a rotation by ``turn`` of q and k [batch, heads, tokens, head_dim], if the sizes of heads and angles fit.

    Pixtral's angles [tokens, head_dim] get a batch dimension if ``unsqueeze_dim`` is 0.
    """

    def apply_rotary_pos_emb(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> Any:
        if unsqueeze_dim == 0 and cos.dim() == 2 and q.dim() == k.dim() == 4:
            return apply_rotary_pos_emb(q, k, cos[None], sin[None])
        if not _is_usual(q, k, cos, unsqueeze_dim) or not fits(q.shape[3], cos.shape[2]):
            _count_rope(q)
            return original(q, k, cos, sin, unsqueeze_dim)
        if unsqueeze_dim == 1:
            return turn(q, k, cos, sin)
        q, k = turn(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2)

    return apply_rotary_pos_emb


def _cast_back(turned: Function) -> Function:
    def apply_rotary_pos_emb(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> Any:
        new_q, new_k = turned(q, k, cos, sin, unsqueeze_dim)
        return new_q.to(q.dtype), new_k.to(k.dtype)

    return apply_rotary_pos_emb


def _is_usual(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, unsqueeze_dim: int) -> bool:
    """Return whether the arguments have the usual form: broadcasting only over heads and the batch of cos and sin."""
    if type(q) is not torch.Tensor or unsqueeze_dim not in (1, 2) or q.dtype != k.dtype:
        return False
    shape, others, angles = q.shape, k.shape, cos.shape
    if len(shape) != 4 or len(others) != 4 or len(angles) != 3:
        return False
    tokens = 3 - unsqueeze_dim
    same = shape[0] == others[0] and shape[tokens] == others[tokens] and shape[3] == others[3]
    return same and angles[0] in (1, shape[0]) and angles[1] == shape[tokens]
