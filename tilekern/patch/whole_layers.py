"""Run a decoder layer as one op, where calling its modules would do no more than that op does.

The modules are looked at in each call, since hooks, adapters, other forwards and weights may come and go at any time.
Where one does more, the layer's forward goes on with its parts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from tilekern import ops
from tilekern.ops.decoder_layer import Numbers, Weights, decoder_layer
from tilekern.patch import context_parallel, layers, patterns, replacements
from tilekern.patch.attention import HEEDED
from tilekern.patch.guards import TENSORS, bare_weights, forward_of, has_global_hooks, has_hooks, is_from
from tilekern.patch.layers import given_of
from tilekern.patch.table import Norm
from tilekern.patch.told import ToldMask
from tilekern.runtime.switches import ATTENTIONS

Function = Callable[..., Any]
_HEEDED = HEEDED.union(patterns.CACHES) - {"cache_position"}
_NORMS = ("input_layernorm", "post_attention_layernorm")
_PROJECTIONS, _MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj", "down_proj")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# The parameters of a norm that is not there.
_NONE = {"weight": None}
# Where transformers' decorator is written that takes arguments by former names.
_RENAMES = "transformers.utils.deprecation"
_STAND_INS = (replacements.__name__, layers.__name__)
is_compiling = torch.compiler.is_compiling


class Parts(NamedTuple):
    """What the forms of a layer and of its parts say.

    Attributes:
        attention, mlp: the names of their classes.
        heads: attributes of the attention with norms of the heads of q and k; empty if it has none.
        rotation: name of the function that rotates.
        window: the expression of the window of the attention; empty without one.
    """

    attention: str
    mlp: str
    heads: tuple[str, ...]
    rotation: str
    window: str


# A window of an attention by its expression.
WINDOWS: dict[str, Function] = {
    "": lambda layer: None,  # noqa: ARG005
    "self.sliding_window": lambda layer: layer.sliding_window,
    "getattr(self.config, 'sliding_window', None)": lambda layer: getattr(layer.config, "sliding_window", None),
}


def decoder(original: Function, norms: Collection[str], kinds: Mapping[str, Norm], parts: Parts) -> Function:
    """Replace the ``forward`` of a decoder layer by one op; where that does not serve, fuse its sums and norms.

    Args:
        original: the forward.
        norms: attributes that hold norms.
        kinds: form of each norm class, by class name.
        parts: the other parts.
    """
    names = inspect.unwrap(original).__globals__
    home, window_of, gate_of = names["__name__"], WINDOWS[parts.window], replacements.gates_by("act_fn")

    def is_written(module: Any, name: str) -> bool:
        """Return whether calling a module only runs the forward of a class, as written or as replaced here."""
        kind = type(module)
        if kind.__name__ != name or kind.__module__ != home or has_hooks(module):
            return False
        forward = forward_of(module) if "forward" in module.__dict__ else kind.forward
        while is_from(forward, _RENAMES):
            forward = getattr(forward, "__wrapped__", None)
        return is_from(forward, home, *_STAND_INS)

    def look(self: Any) -> _Kept | None:
        """Return what the op reads of a layer; None if calling one of its modules would do more than the op."""
        modules = self.__dict__["_modules"]
        attention, mlp = modules["self_attn"], modules["mlp"]
        if not is_written(attention, parts.attention) or not is_written(mlp, parts.mlp):
            return None
        if bare_weights(attention, _PROJECTIONS, []) is None or bare_weights(attention, ("o_proj",)) is None:
            return None
        if bare_weights(mlp, _MLP) is None or gate_of(mlp) is not ops.swiglu:
            return None
        of_heads = [attention.__dict__["_modules"][name] for name in parts.heads]
        given = [given_of(norm, home, kinds) for norm in (*(modules[name] for name in _NORMS), *of_heads)]
        return None if None in given else _Kept(self, attention, mlp, parts.heads)

    known: WeakKeyDictionary[Any, _Kept] = WeakKeyDictionary()

    def whole(self: Any, x: Any, mask: Any, angles: Any, given: dict[str, Any]) -> torch.Tensor | None:
        if is_compiling() or not torch.is_grad_enabled() or type(x) not in TENSORS or not _is_alone(mask, x, given):
            return None
        is_changed = torch.nn.functional.scaled_dot_product_attention is not context_parallel.SDPA
        if is_changed or not is_from(names[parts.rotation], home, *_STAND_INS):
            return None
        kept = known.get(self)
        if kept is None or not kept.holds():
            kept = look(self)
            if kept is None:
                known.pop(self, None)
                return None
            known[self] = kept
        weights, (cos, sin), numbers = kept.weights(), angles, kept.numbers(window_of)
        if weights is None or numbers is None or not _fit(x, cos, sin, numbers.head_dim):
            return None
        starts, longest = given.get("cu_seq_lens_q"), given.get("max_length_q")
        if starts is None and mask is not None and len(mask.starts):
            starts, longest = mask.starts, mask.longest
        if starts is not None and x.shape[0] != 1:
            return None
        longest = longest if isinstance(longest, int) else None
        return decoder_layer(x, cos, sin, weights, numbers, starts, longest)

    return layers.fused_add_rms_norm(original, norms, kinds, whole)


class _Kept:
    """The parts of a layer whose calls were seen to do no more than the op, and what tells that this still holds."""

    def __init__(self, layer: Any, attention: Any, mlp: Any, heads: tuple[str, ...]) -> None:
        owned = (layer, (*_NORMS, "self_attn", "mlp")), (attention, (*_PROJECTIONS, "o_proj", *heads))
        places = [
            (one.__dict__["_modules"], name) for one, names in (*owned, (mlp, (*_MLP, "act_fn"))) for name in names
        ]
        found = {name: modules[name] for modules, name in places}
        self._places = []
        for modules, name in places:
            one: Any = modules[name]
            kind: Any = type(one)
            self._places.append((modules, name, one, kind, one.__dict__, one.__dict__.get("forward"), kind.forward))
        self._hooks = [one.__dict__[name] for one in found.values() for name in _HOOKS]
        of = {name: one.__dict__["_parameters"] for name, one in found.items()}
        by_norms = [(of[name], "weight") for name in heads] or [(_NONE, "weight")] * 2
        by_projections = [(of[name], kind) for kind in ("weight", "bias") for name in _PROJECTIONS]
        rest = [(of[name], "weight") for name in ("o_proj", _NORMS[1], *_MLP)]
        # In the order of the op's weights.
        self._weights = [(of[_NORMS[0]], "weight"), *by_projections, *by_norms, *rest]
        self._attention, self._norms = attention, [found[name] for name in (*_NORMS, *heads)]

    def holds(self) -> bool:
        """Return whether no module was exchanged, and none has hooks, another class or another forward."""
        if any(self._hooks) or has_global_hooks():
            return False
        for modules, name, one, kind, own, forward, of_kind in self._places:
            is_other = modules.get(name) is not one or type(one) is not kind or kind.forward is not of_kind
            # FSDP1 and weight_norm make plain attributes of parameters.
            if is_other or own.get("forward") is not forward or "weight" in own or "bias" in own:
                return False
        return True

    def weights(self) -> Weights | None:
        """Return the weights; None if one is no plain tensor."""
        found = [parameters[name] for parameters, name in self._weights]
        for weight in found:
            if weight is not None and type(weight) not in TENSORS:
                return None
        return Weights(*found)

    def numbers(self, window_of: Function) -> Numbers | None:
        """Return the numbers; None if attention is not ours, not causal or with dropout, or norms of heads differ."""
        attention = self._attention
        deterministic = ATTENTIONS.get(attention.config._attn_implementation)
        if deterministic is None or (attention.training and attention.attention_dropout):
            return None
        if not getattr(attention, "is_causal", True):
            return None
        first, second, *of_heads = [norm.variance_epsilon for norm in self._norms]
        heads = max(of_heads, default=0.0)
        if heads != min(of_heads, default=0.0):
            return None
        return Numbers(
            attention.head_dim, (first, heads, second), attention.scaling, window_of(attention), deterministic
        )


def _is_alone(mask: Any, x: torch.Tensor, given: Mapping[str, Any]) -> bool:
    """Return whether a layer has no cache, a mask that tells of sequences at most, and nothing else to heed."""
    for name in _HEEDED:
        if given.get(name) is not None:
            return False
    return mask is None or (type(mask) is ToldMask and mask.padding is None and mask.shape[3] == x.shape[1])


def _fit(x: torch.Tensor, cos: Any, sin: Any, size: int) -> bool:
    """Return whether angles are plain tensors that turn the heads of each token."""
    if type(cos) not in TENSORS or type(sin) not in TENSORS or x.dim() != 3:
        return False
    shape = cos.shape
    return shape == sin.shape and shape[-2:] == (x.shape[1], size) and len(shape) == 3 and shape[0] in (1, x.shape[0])
