"""Replacements for the forwards of decoder layers and attentions, which fuse neighbouring ops.

The model's own modules and functions run the steps one by one where a fused op would compute something else:

- a norm of another class
- a norm's forward or a rotation that was replaced
- hooks on a norm or on all modules
- DTensor and other subclasses of Tensor

Terms of two dtypes, as under autocast over float32, are added in the wider one, as torch adds them.
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
    TENSORS,
    bare_weights,
    constant_in_graphs,
    count_own,
    has_hooks,
    is_from,
    is_plain,
    linear_of,
    parameter_of,
    weight_of,
)
from tilekern.patch.projecting import projected
from tilekern.patch.rewriting import named_as, rewritten
from tilekern.patch.table import Norm

Function = Callable[..., Any]
_STAND_INS = replacements.__name__
_LAYER_NORM = torch.nn.LayerNorm.__module__


def fused_add_rms_norm(
    original: Function, norms: Collection[str], kinds: Mapping[str, Norm], whole: Function | None = None
) -> Function:
    """Fuse sums and norms in the ``forward`` of a decoder layer: a norm of the sum, a norm of one term, or both.

    Args:
        original: the forward.
        norms: attributes that hold norms.
        kinds: form of each norm class, by class name.
        whole: called first with the layer, its input, mask and angles, and a dictionary of further arguments; returns
            the layer's result, or None if the forward is to go on.
    """
    home = inspect.unwrap(original).__globals__["__name__"]

    def checked(norm: Any, residual: torch.Tensor, x: torch.Tensor) -> tuple[Any, float, float, str] | None:
        """Return a norm's arguments of the op; None if the op would not compute the same as norm and sum."""
        alike = residual.dtype == x.dtype and residual.shape == x.shape
        if not alike or type(residual) not in TENSORS or type(x) not in TENSORS:
            given = None
        else:
            given = given_of(norm, home, kinds)
        if given is None:
            count_own("fused_add_rms_norm_forward", _why(alike, norm, residual, x), True)
        return given

    def add_norm(residual: torch.Tensor, x: torch.Tensor, norm: Any) -> tuple[torch.Tensor, torch.Tensor]:
        residual, x = _of_one_dtype(residual, x)
        given = checked(norm, residual, x)
        if given is not None:
            return ops.fused_add_rms_norm(residual, x, *given)
        total = residual + x
        return total, norm(total)

    def norm_add(residual: torch.Tensor, x: torch.Tensor, norm: Any) -> torch.Tensor:
        given = checked(norm, residual, x)
        return residual + norm(x) if given is None else fused_rms_norm_add(residual, x, *given)

    def norm_add_norm(
        residual: torch.Tensor, x: torch.Tensor, norm: Any, following: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        given = checked(norm, residual, x)
        then = None if given is None else checked(following, residual, x)
        if given is None or then is None or given[1:] != then[1:]:
            return add_norm(residual, norm(x), following)
        return fused_rms_norm_add_rms_norm(residual, x, given[0], *then)

    ours = {
        patterns.ADD_NORM: add_norm, patterns.NORM_ADD: norm_add, patterns.NORM_ADD_NORM: norm_add_norm,
    }  # fmt: skip

    def change(function: ast.FunctionDef) -> int:
        number = patterns.sums_and_norms(function, norms)
        return number + patterns.whole(function) if whole is not None else number

    run = rewritten(original, change, ours if whole is None else {**ours, patterns.WHOLE: whole})
    return checkpointed(run) if is_checkpointing(original) else run


def layer_norm(original: Function, norms: Collection[str]) -> Function:
    """Replace each call of torch's LayerNorm in ``forward`` by the op; ``norms`` are the attributes that hold them.

    A sum right before the call of its norm is fused with it into one op.
    """
    run = rewritten(original, *_normed(norms))
    return checkpointed(run) if is_checkpointing(original) else run


def _normed(norms: Collection[str]) -> tuple[Callable[[ast.FunctionDef], int], dict[str, Function]]:
    """Return the change that :func:`layer_norm` makes to a forward, and the variables that the new text uses."""

    def given_of(norm: Any, x: Any) -> tuple[Any, Any, float] | None:
        """Return weight, bias and eps of a norm that the op computes; None for any other."""
        if type(x) not in TENSORS or not is_layer_norm(norm):
            return None
        weight, bias = parameter_of(norm, "weight"), parameter_of(norm, "bias")
        return (weight, bias, norm.eps) if replacements.are_normed_alike(x, weight, bias) else None

    def normed(norm: Any, x: Any) -> Any:
        given = given_of(norm, x)
        if given is not None:
            return layer_norm_op(x, *given)
        count_own("layer_norm_forward", _why(True, norm, x))
        return norm(x)

    def add_norm(residual: torch.Tensor, x: torch.Tensor, norm: Any) -> tuple[torch.Tensor, torch.Tensor]:
        residual, x = _of_one_dtype(residual, x)
        alike = residual.dtype == x.dtype and residual.shape == x.shape
        given = given_of(norm, x) if alike and type(residual) in TENSORS else None
        if given is not None:
            return fused_add_layer_norm(residual, x, *given)
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
        kind = replacements.kind_of(act, kinds) if type(x) in TENSORS else None
        known = [names[name] for name in others] if others else ()
        first, last = linear_of(up, known), linear_of(down, known)
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


def is_layer_norm(norm: Any) -> bool:
    """Return whether calling a norm only runs torch's LayerNorm over one dimension."""
    return (
        type(norm) is torch.nn.LayerNorm
        and len(norm.normalized_shape) == 1
        and "forward" not in norm.__dict__
        and not has_hooks(norm)
        and is_from(torch.nn.LayerNorm.forward, _LAYER_NORM)
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

    def by(self, rotation: Function, q: torch.Tensor, k: torch.Tensor, *angles: torch.Tensor) -> Any:
        """Return the results of the model's own function on q and k."""
        if self.single:
            return rotation(q, *angles, unsqueeze_dim=2), rotation(k, *angles, unsqueeze_dim=2)
        return rotation(q, k, *angles)

    def fits(self, q: torch.Tensor, k: torch.Tensor, angles: tuple[torch.Tensor, ...], tokens: int) -> int | None:
        """Return the size of heads; None unless the arguments are plain tensors of one dtype with angles of each token.

        ``tokens`` is the dimension of tokens in q and k.
        """
        if len(angles) != (1 if self.paired else 2):
            return None
        cos, sin = angles[0], angles[-1]
        if type(q) not in TENSORS or type(k) not in TENSORS or type(cos) not in TENSORS or type(sin) not in TENSORS:
            return None
        shape, given = q.shape, cos.shape
        if q.dtype != k.dtype or len(shape) != 4 or len(given) != 3 or cos.dtype != sin.dtype:
            return None
        size, width = shape[3], given[2]
        fits = width <= size and width % 2 == 0 if self.part else width == (size // 2 if self.paired else size)
        by_tokens = given[1] == shape[tokens] and (given[0] == 1 or given[0] == shape[0])
        return size if fits and by_tokens and cos.is_complex() == self.paired else None

    def angles(self, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines."""
        if self.paired:
            cos, sin = torch.view_as_real(given[0].resolve_conj()).movedim(-1, 0).contiguous()
            return cos, sin
        cos, sin = given
        return cos, -sin if self.back else sin


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
    tokens_first = turn.paired or turn.single
    home = names["__name__"]
    # transformers' own function or tilekern's stand-in, as the patch's digests say; with the kernels package it is not
    # a function.
    known = names[rotation]
    stand_in = make(known)

    def is_known() -> bool:
        return names[rotation] is known or is_from(names[rotation], home, _STAND_INS)

    def rotated(*given: Any, **options: Any) -> Any:
        return (stand_in if is_known() else names[rotation])(*given, **options)

    def fused(
        one: Any, other: Any, q: torch.Tensor, k: torch.Tensor, angles: tuple[torch.Tensor, ...], tokens: int,
        norm_last: bool = False,
    ) -> Any:  # fmt: skip
        """Return the rotated q and k, tokens before heads; None if the op would not compute the same as the model.

        ``tokens`` is the dimension of tokens in q and k: 1, or 2 behind the heads.
        """
        size = turn.fits(q, k, angles, tokens) if is_known() else None
        first = None if size is None else given_of(one, home, kinds)
        second = None if first is None else given_of(other, home, kinds)
        if first is None or second is None or first[1:] != second[1:] or not _fit(size, first[0], second[0]):
            return None
        weight, eps, offset, mode = first
        if turn.cast_back:
            if weight is not None and weight.dtype != q.dtype and mode != "gemma":
                return None
            mode = "none"
        width = angles[0].shape[2] if turn.part else None
        cos, sin = turn.angles(angles) if turn.paired or turn.back else angles
        if tokens == 2:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        return ops.qk_norm_rope(
            q, k, weight, second[0], cos, sin, eps, offset=offset, casting_mode=mode, rotary_dim=width,
            interleaved=turn.paired, norm_last=norm_last,
        )  # fmt: skip

    def turned(
        one: Any, other: Any, q: torch.Tensor, k: torch.Tensor, *angles: torch.Tensor, swapped: bool = False,
        behind: bool = False, norm_last: bool = False,
    ) -> Any:  # fmt: skip
        """Return the rotated q and k, in the layout of :class:`Turn`.

        With ``swapped`` or ``behind`` q and k are given with tokens before heads, and rotated with heads before tokens.
        The norms get the former if ``swapped``, and the latter if ``behind`` or ``norm_last``.
        """
        tokens = 1 if swapped or behind or tokens_first else 2
        made = fused(one, other, q, k, angles, tokens, norm_last)
        if made is not None:
            return made if tokens_first else (made[0].transpose(1, 2), made[1].transpose(1, 2))
        count_own("qk_norm_rope_forward", _why(True, one, q, k))
        if behind:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        if norm_last:
            q, k = rotated(q, k, *angles)
            return one(q), other(k)
        q, k = one(q), other(k)
        if swapped:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        return turn.by(rotated, q, k, *angles)

    def turned_alone(norm: Any, x: torch.Tensor, *angles: torch.Tensor) -> Any:
        if is_plain(x) and x.dim() == 4:
            # The op gets the two halves of the heads as q and k.
            q, k = x.tensor_split(2, 2)
            made = fused(norm, norm, q, k, angles, 1)
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


_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def projected_together(original: Function, **functions: Function) -> Function:
    """Replace the layers that make q, k and v from one input by one op, in the ``forward`` of an attention.

    Args:
        original: the forward.
        functions: other functions in place of those that it calls by their names.
    """
    return rewritten(original, patterns.projected, {patterns.PROJECTED: _projected, **functions})


def _projected(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the results of q_proj, k_proj and v_proj on the hidden states."""
    biases: list[torch.Tensor | None] = []
    weights = bare_weights(self, _PROJECTIONS, biases) if type(hidden_states) in TENSORS else None
    if weights is not None:
        return ops.projections(hidden_states, *weights, biases=biases)
    return projected([getattr(self, name) for name in _PROJECTIONS], hidden_states)


def _fit(size: int | None, weight: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Return whether the weights of the norms of q and k fit heads of a size and have one dtype, or both are None."""
    if weight is None or other is None:
        return weight is other
    return weight.shape == other.shape == (size,) and weight.dtype == other.dtype


def _why(alike: bool, norm: Any, *tensors: torch.Tensor) -> str:
    """Return in few words why an op is not fused with a norm; ``alike``: the tensors have one dtype and shape."""
    if not is_plain(*tensors):
        return SUBCLASS
    if not alike:
        return "terms of two dtypes, as under autocast" if len({x.dtype for x in tensors}) > 1 else SHAPES
    return "hooks" if has_hooks(norm) else "a norm, a rotation, shapes or dtypes that the op does not take"


def _of_one_dtype(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the terms of a sum in the dtype of the sum."""
    if first.dtype == second.dtype or not is_plain(first, second):
        return first, second
    dtype = torch.promote_types(first.dtype, second.dtype)
    return first.to(dtype), second.to(dtype)


def given_of(norm: Any, home: str, kinds: Mapping[str, Norm]) -> tuple[Any, float, float, str] | None:
    """Return weight, eps, offset and casting mode of a norm that :func:`is_known`; None for any other.

    The weight is a plain tensor, or None for a norm without one.
    """
    name = known_as(norm, home, kinds)
    if not name:
        return None
    form = kinds[name]
    weight = weight_of(form, norm)
    if weight is not None and type(weight) not in TENSORS:
        return None
    if "forward" in norm.__dict__:
        parallel.see_to_sums(norm)
    return weight, getattr(norm, form.eps), form.offset, form.casting_mode


def is_known(norm: Any, home: str, kinds: Collection[str]) -> bool:
    """Return whether a norm is :func:`known_as` one of ``kinds``."""
    return bool(known_as(norm, home, kinds))


def known_as(norm: Any, home: str, kinds: Collection[str]) -> str:
    """Return the class, one of ``kinds`` in ``home``, whose code a call of a norm runs; empty if it runs other code.

    The norm's class may inherit from it and have no method of its own except ``__init__``. Its forward, of the class or
    its own, must be that class's code or tilekern's stand-in for it, and a method ``_norm``, which it calls, the
    class's code. Output capturing stores the class's forward in the instance, and each may be replaced at any time.
    """
    kind = type(norm)
    name = kind.__name__ if kind.__module__ == home and kind.__name__ in kinds else _inherited(kind, home, kinds)
    if not name or has_hooks(norm):
        return ""
    forward, helper = kind.forward, getattr(kind, "_norm", None)
    if "forward" in norm.__dict__:
        forward = parallel.forward_of(norm)
    return name if is_from(forward, home, _STAND_INS) and (helper is None or is_from(helper, home)) else ""


@constant_in_graphs
def _inherited(kind: type, home: str, kinds: Collection[str]) -> str:
    """Return the name of the class in ``home`` that a class inherits all its code from; empty if there is none."""
    for base in kind.__mro__:
        if base.__module__ == home and base.__name__ in kinds:
            return base.__name__
        if any(callable(value) and name != "__init__" for name, value in vars(base).items()):
            break
    return ""
