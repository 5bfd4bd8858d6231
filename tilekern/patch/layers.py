"""Replacements for the forwards of decoder layers and attentions, which fuse neighbouring ops.

The model's own modules and functions run the steps one by one where a fused op would compute something else:

- a norm of another class
- a norm's forward or a rotation that was replaced
- hooks on a norm or on all modules
- DTensor and other subclasses of Tensor
- terms of two dtypes
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tilekern import ops
from tilekern.ops.activation import activation
from tilekern.ops.fused_add_layer_norm import fused_add_layer_norm
from tilekern.ops.fused_rms_norm_add import fused_rms_norm_add
from tilekern.ops.fused_rms_norm_add_rms_norm import fused_rms_norm_add_rms_norm
from tilekern.ops.layer_norm import layer_norm as layer_norm_op
from tilekern.patch import parallel, patterns, replacements
from tilekern.patch.checkpointing import checkpointed
from tilekern.patch.digests import is_checkpointing
from tilekern.patch.guards import (
    SHAPES,
    SUBCLASS,
    constant_in_graphs,
    count_own,
    has_hooks,
    is_as_written,
    is_bare_linear,
    is_from,
    is_plain,
)
from tilekern.patch.rewriting import named_as, rewritten
from tilekern.patch.table import Norm

Function = Callable[..., Any]


def fused_add_rms_norm(original: Function, norms: Collection[str], kinds: Mapping[str, Norm]) -> Function:
    """Fuse sums and norms in the ``forward`` of a decoder layer: a norm of the sum, a norm of one term, or both.

    Args:
        original: the forward.
        norms: attributes that hold norms.
        kinds: form of each norm class, by class name.
    """
    home = inspect.unwrap(original).__globals__["__name__"]

    def options_of(norm: Any, residual: torch.Tensor, x: torch.Tensor) -> tuple[float, float, str] | None:
        """Return a norm's eps, offset and casting mode; None if the op would not compute the same as norm and sum."""
        alike = residual.dtype == x.dtype and residual.shape == x.shape
        if not alike or not is_plain(residual, x) or not _is_ordinary(norm, home, kinds):
            count_own("fused_add_rms_norm_forward", _why(alike, norm, residual, x))
            return None
        parallel.see_to_sums(norm)
        kind = kinds[class_of(norm, home, kinds)]
        return getattr(norm, kind.eps), kind.offset, kind.casting_mode

    def weight_of(norm: Any) -> torch.Tensor | None:
        weight: torch.Tensor | None = kinds[class_of(norm, home, kinds)].weight_of(norm)
        return weight

    def add_norm(residual: torch.Tensor, x: torch.Tensor, norm: Any) -> tuple[torch.Tensor, torch.Tensor]:
        options = options_of(norm, residual, x)
        if options is not None:
            return ops.fused_add_rms_norm(residual, x, weight_of(norm), *options)
        total = residual + x
        return total, norm(total)

    def norm_add(residual: torch.Tensor, x: torch.Tensor, norm: Any) -> torch.Tensor:
        options = options_of(norm, residual, x)
        return residual + norm(x) if options is None else fused_rms_norm_add(residual, x, weight_of(norm), *options)

    def norm_add_norm(
        residual: torch.Tensor, x: torch.Tensor, norm: Any, following: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        options = options_of(norm, residual, x)
        if options is None or options != options_of(following, residual, x):
            return add_norm(residual, norm(x), following)
        return fused_rms_norm_add_rms_norm(residual, x, weight_of(norm), weight_of(following), *options)

    ours = {
        patterns.ADD_NORM: add_norm, patterns.NORM_ADD: norm_add, patterns.NORM_ADD_NORM: norm_add_norm,
    }  # fmt: skip
    run = rewritten(original, partial(patterns.sums_and_norms, norms=norms), ours)
    return checkpointed(run) if is_checkpointing(original) else run


def layer_norm(original: Function, norms: Collection[str]) -> Function:
    """Replace each call of torch's LayerNorm in ``forward`` by the op; ``norms`` are the attributes that hold them.

    A sum right before the call of its norm is fused with it into one op.
    """
    run = rewritten(original, *_normed(norms))
    return checkpointed(run) if is_checkpointing(original) else run


def _normed(norms: Collection[str]) -> tuple[Callable[[ast.FunctionDef], int], dict[str, Function]]:
    """Return the change that :func:`layer_norm` makes to a forward, and the variables that the new text uses."""

    def is_served(norm: Any, x: Any) -> bool:
        return is_layer_norm(norm) and is_plain(x) and replacements.are_normed_alike(x, norm.weight, norm.bias)

    def normed(norm: Any, x: Any) -> Any:
        if is_served(norm, x):
            return layer_norm_op(x, norm.weight, norm.bias, norm.eps)
        count_own("layer_norm_forward", _why(True, norm, x))
        return norm(x)

    def add_norm(residual: torch.Tensor, x: torch.Tensor, norm: Any) -> tuple[torch.Tensor, torch.Tensor]:
        alike = residual.dtype == x.dtype and residual.shape == x.shape
        if alike and is_plain(residual) and is_served(norm, x):
            return fused_add_layer_norm(residual, x, norm.weight, norm.bias, norm.eps)
        total = residual + x
        return total, normed(norm, total)

    def change(function: ast.FunctionDef) -> int:
        return patterns.add_norm(function, norms) + patterns.normed(function, norms)

    return change, {patterns.NORMED: normed, patterns.ADD_NORM: add_norm}


def layer_norm_per_head(original: Function) -> Function:
    """Replace ``forward(self, hidden_states)`` of a module whose ``norms`` are torch's bias-free LayerNorms, per head.

    ``hidden_states`` is [batch, heads, tokens, size].
    """

    def forward(self: Any, hidden_states: torch.Tensor) -> Any:
        x, norms = hidden_states, list(self.norms)
        known = is_plain(x) and x.dim() == 4 and x.shape[1] == len(norms) and all(map(is_layer_norm, norms))
        alike = known and all(norm.eps == norms[0].eps and norm.bias is None for norm in norms)
        if not alike or not all(replacements.are_normed_alike(x, norm.weight, None) for norm in norms):
            count_own("layer_norm_forward", SHAPES)
            return original(self, x)
        return replacements.by_heads(x, torch.stack([norm.weight for norm in norms])[:, None], norms[0].eps)

    return named_as(forward, original)


def mlp(
    original: Function, linears: Collection[str], activations: Collection[str], others: Collection[str] = (),
    norms: Collection[str] = (),
) -> Function:  # fmt: skip
    """Replace two linear layers and the activation between them by one op, in the ``forward`` of an MLP without a gate.

    With dropout after the activation only the activation is an op.

    Args:
        original: the forward.
        linears: attributes that hold linear layers.
        activations: attributes that hold activations.
        others: names of further classes of linear layers that compute the same as torch's.
        norms: attributes that hold torch's LayerNorm; their calls are replaced as by :func:`layer_norm`.
    """
    names, kinds = inspect.unwrap(original).__globals__, replacements.kinds()

    def run(up: Any, act: Any, down: Any, x: Any, dropout: float = 0.0) -> Any:
        kind = replacements.kind_of(act, kinds) if is_plain(x) else None
        known = [names[name] for name in others]
        first, last = _linear(up, known), _linear(down, known)
        if kind is not None and first is not None and last is not None and not dropout:
            return ops.mlp(x, *first, *last, kind)
        count_own("activation_forward", _why_apart(kind, first, last, x))
        value = up(x)
        value = act(value) if kind is None or not is_plain(value) else activation(value, kind)
        return down(torch.nn.functional.dropout(value, dropout) if dropout else value)

    change_norms, variables = _normed(norms)

    def change(function: ast.FunctionDef) -> int:
        found = patterns.mlp(function, linears, activations)
        return found + change_norms(function) if found and norms else found

    run_all = rewritten(original, change, {**variables, patterns.MLP: run})
    return checkpointed(run_all) if is_checkpointing(original) else run_all


def _why_apart(kind: str | None, first: Any, last: Any, x: Any) -> str:
    """Return why an MLP's parts run one by one; ``first`` or ``last`` is None if it is not a bare linear layer."""
    if kind is None:
        return "an activation without an op, or with hooks" if is_plain(x) else SUBCLASS
    return "a linear layer with an adapter, hooks or another forward" if first is None or last is None else "dropout"


def _linear(layer: Any, known: Collection[type]) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Return the weight [out, in] and the bias of a linear layer of torch, of GPT-2 or of another known class."""
    kind = type(layer)
    transposed = (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")
    if not (transposed or kind is torch.nn.Linear or kind in known) or not is_as_written(layer):
        return None
    return layer.weight.t() if transposed else layer.weight, layer.bias


def is_layer_norm(norm: Any) -> bool:
    """Return whether calling a norm only runs torch's LayerNorm over one dimension."""
    return (
        type(norm) is torch.nn.LayerNorm
        and len(norm.normalized_shape) == 1
        and "forward" not in norm.__dict__
        and is_from(torch.nn.LayerNorm.forward, torch.nn.LayerNorm.__module__)
        and not has_hooks(norm)
    )


@dataclass(frozen=True)
class Turn:
    """A rotation, described by arguments of the op that is fused with norms.

    Attributes:
        part: only as many numbers of each head as cos has are rotated.
        back: rotates by the negative angles.
        cast_back: the results have the dtypes of q and k.
        paired: rotates pairs by complex angles.
        single: q and k are rotated in a call each.

    With ``paired`` or ``single`` q and k are [batch, tokens, heads, head_dim], else [batch, heads, tokens, head_dim].
    """

    part: bool = False
    back: bool = False
    cast_back: bool = False
    paired: bool = False
    single: bool = False

    def placed(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` with tokens before heads, or convert such a result back."""
        return x if self.paired or self.single else x.transpose(1, 2)

    def by(self, rotation: Function, q: torch.Tensor, k: torch.Tensor, *angles: torch.Tensor) -> Any:
        """Return the results of the model's own function on q and k."""
        if self.single:
            return rotation(q, *angles, unsqueeze_dim=2), rotation(k, *angles, unsqueeze_dim=2)
        return rotation(q, k, *angles)

    def fits(self, q: torch.Tensor, k: torch.Tensor, angles: tuple[torch.Tensor, ...]) -> bool:
        """Return whether the arguments are plain tensors of one dtype with angles for each token."""
        known = len(angles) == (1 if self.paired else 2) and is_plain(q, k, *angles)
        if not known or q.dtype != k.dtype or q.dim() != 4 or angles[0].dim() != 3:
            return False
        batch, tokens, size = q.shape[0], q.shape[1 if self.paired or self.single else 2], q.shape[3]
        width = angles[0].shape[2]
        fits = width <= size and width % 2 == 0 if self.part else width == (size // 2 if self.paired else size)
        alike = angles[0].dtype == angles[-1].dtype and angles[0].is_complex() == self.paired
        return fits and alike and angles[0].shape[0] in (1, batch) and angles[0].shape[1] == tokens

    def angles(self, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines."""
        if self.paired:
            cos, sin = torch.view_as_real(given[0].resolve_conj()).movedim(-1, 0).contiguous()
            return cos, sin
        cos, sin = given
        return cos, -sin if self.back else sin

    def options(self, norm: Norm, angles: tuple[torch.Tensor, ...]) -> dict[str, Any]:
        """Return the op's options."""
        return {
            "offset": norm.offset,
            "casting_mode": "none" if self.cast_back else norm.casting_mode,
            "rotary_dim": angles[0].shape[2] if self.part else None,
            "interleaved": self.paired,
        }


# The rotations that are fused with norms, by the function that makes their stand-ins.
TURNS: dict[Function, Turn] = {
    replacements.rope: Turn(),
    replacements.rope_back: Turn(back=True),
    replacements.rope_part: Turn(part=True),
    replacements.rope_cast_back: Turn(cast_back=True),
    replacements.rope_complex: Turn(cast_back=True, paired=True),
    replacements.rope_alone: Turn(single=True),
}


def qk_norm_rope(
    original: Function, norms: Collection[str], kinds: Mapping[str, Norm], rotation: str, make: Function
) -> Function:
    """Replace the norms of each head of q and k and their rotation by one op, in the ``forward`` of an attention.

    Args:
        original: the forward.
        norms: attributes that hold norms.
        kinds: form of each norm class, by class name.
        rotation: name of the function that rotates.
        make: makes that function's stand-in; a key of :data:`TURNS`.
    """
    names, turn = inspect.unwrap(original).__globals__, TURNS[make]
    home = names["__name__"]
    # transformers' own function or tilekern's stand-in, as the patch's digests say; with the kernels package it is not
    # a function.
    known = names[rotation]
    stand_in = make(known)

    def is_known() -> bool:
        return names[rotation] is known or is_from(names[rotation], home, replacements.__name__)

    def rotated(*given: Any, **options: Any) -> Any:
        return (stand_in if is_known() else names[rotation])(*given, **options)

    def fused(
        one: Any, other: Any, q: torch.Tensor, k: torch.Tensor, angles: tuple[torch.Tensor, ...],
        norm_last: bool = False,
    ) -> Any:  # fmt: skip
        """Return the rotated q and k; None if the op would not compute the same as the norms and the rotation."""
        ordinary = is_known() and _is_ordinary(one, home, kinds) and _is_ordinary(other, home, kinds)
        if not ordinary or not turn.fits(q, k, angles):
            return None
        norm = kinds[class_of(one, home, kinds)]
        if norm != kinds[class_of(other, home, kinds)] or not _alike(one, other, q, norm, turn):
            return None
        parallel.see_to_sums(one, other)
        weights, eps = (norm.weight_of(one), norm.weight_of(other)), getattr(one, norm.eps)
        options, angles = turn.options(norm, angles), turn.angles(angles)
        q, k = turn.placed(q), turn.placed(k)
        q, k = ops.qk_norm_rope(q, k, *weights, *angles, eps, norm_last=norm_last, **options)
        return turn.placed(q), turn.placed(k)

    def turned(
        one: Any, other: Any, q: torch.Tensor, k: torch.Tensor, *angles: torch.Tensor, swapped: bool = False,
        norm_last: bool = False,
    ) -> Any:  # fmt: skip
        made = fused(one, other, q, k, angles, norm_last)
        if made is not None:
            return made
        count_own("qk_norm_rope_forward", _why(True, one, q, k))
        if norm_last:
            q, k = rotated(q, k, *angles)
            return one(q), other(k)
        if swapped:
            q, k = one(q.transpose(1, 2)).transpose(1, 2), other(k.transpose(1, 2)).transpose(1, 2)
        else:
            q, k = one(q), other(k)
        return turn.by(rotated, q, k, *angles)

    def turned_alone(norm: Any, x: torch.Tensor, *angles: torch.Tensor) -> Any:
        if is_plain(x) and x.dim() == 4:
            # The op gets the two halves of the heads as q and k.
            q, k = x.tensor_split(2, 2)
            made = fused(norm, norm, q, k, angles)
            if made is not None:
                return torch.cat(made, 2)
        count_own("qk_norm_rope_forward", _why(True, norm, x))
        return rotated(norm(x), *angles, unsqueeze_dim=2)

    change = partial(patterns.qk_norm_rope, norms=norms, rotation=rotation)
    variables = {
        patterns.TURNED: turned, patterns.TURNED_ALONE: turned_alone, patterns.ROTATED: rotated,
        patterns.PROJECTED: _projected,
    }  # fmt: skip
    return rewritten(original, change, variables)


def _projected(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the results of q_proj, k_proj and v_proj on the hidden states."""
    layers = (self.q_proj, self.k_proj, self.v_proj)
    if is_plain(hidden_states) and all(map(is_bare_linear, layers)):
        return ops.projections(hidden_states, *(layer.weight for layer in layers))
    return tuple(layer(hidden_states) for layer in layers)


def _alike(one: Any, other: Any, q: torch.Tensor, norm: Norm, turn: Turn) -> bool:
    """Return whether two norms of a form fit the heads of q, have the same eps, and give the op's dtype."""
    if getattr(one, norm.eps) != getattr(other, norm.eps):
        return False
    weights = norm.weight_of(one), norm.weight_of(other)
    if weights[0] is None or weights[1] is None:
        return weights[0] is weights[1]
    fits = all(weight.shape == q.shape[3:] and weight.dtype == weights[0].dtype for weight in weights)
    return fits and (weights[0].dtype == q.dtype or norm.casting_mode == "gemma" or not turn.cast_back)


def _why(alike: bool, norm: Any, *tensors: torch.Tensor) -> str:
    """Return in few words why an op is not fused with a norm; ``alike``: the tensors have one dtype and shape."""
    if not is_plain(*tensors):
        return SUBCLASS
    if not alike:
        return "terms of two dtypes, as under autocast" if len({x.dtype for x in tensors}) > 1 else SHAPES
    return "hooks" if has_hooks(norm) else "a norm, a rotation, shapes or dtypes that the op does not take"


def _is_ordinary(norm: Any, home: str, kinds: Collection[str]) -> bool:
    """Return whether a norm :func:`is_known`, with a plain weight or none."""
    weight = getattr(norm, "weight", None)
    return is_known(norm, home, kinds) and (weight is None or is_plain(weight))


def is_known(norm: Any, home: str, kinds: Collection[str]) -> bool:
    """Return whether calling a norm computes exactly what its class, one of ``kinds`` in ``home``, was written to do.

    Its forward, of the class or its own, must be that class's code or tilekern's stand-in for it. Output capturing
    stores the class's forward in the instance, and either may be replaced at any time.
    """
    ordinary = class_of(norm, home, kinds) and not has_hooks(norm)
    return bool(ordinary) and is_from(parallel.forward_of(norm), home, replacements.__name__)


def class_of(norm: Any, home: str, kinds: Collection[str]) -> str:
    """Return the name of a norm's class if it is one of ``kinds`` in ``home``, or of the one that it inherits from.

    Empty for other classes, and for a subclass with methods of its own except ``__init__``.
    """
    kind = type(norm)
    return kind.__name__ if kind.__module__ == home and kind.__name__ in kinds else _inherited(kind, home, kinds)


@constant_in_graphs
def _inherited(kind: type, home: str, kinds: Collection[str]) -> str:
    for base in kind.__mro__:
        if base.__module__ == home and base.__name__ in kinds:
            return base.__name__
        if any(callable(value) and name != "__init__" for name, value in vars(base).items()):
            break
    return ""
