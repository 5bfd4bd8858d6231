"""Run a decoder layer as one op, where calling its modules would do no more than that op does.

The modules are looked at in each call, since hooks, adapters, other forwards and weights may come and go at any time.
Where one does more, the layer's forward goes on with its parts, and :func:`why_apart` says why.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from tilekern.ops.decoder_layer import Numbers, Weights, decoder_layer
from tilekern.ops.layer_products import TORCH, Products
from tilekern.ops.lora_linear import Adapted, Adapter
from tilekern.patch import adapters, context_parallel, fp8, layers, patterns, replacements
from tilekern.patch.attention import HEEDED, attend
from tilekern.patch.guards import (
    SUBCLASS,
    TENSORS,
    ZERO,
    bare_weights,
    forward_of,
    has_global_hooks,
    has_hooks,
    hooks_are_of,
    is_from,
    parameter_of,
)
from tilekern.patch.layers import given_of
from tilekern.patch.table import Norm
from tilekern.patch.told import ToldMask
from tilekern.warning import warn_once

Function = Callable[..., Any]
_HEEDED = HEEDED.union(patterns.CACHES) - {"cache_position"}
_PROJECTIONS, _MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj", "down_proj")
_UNBIASED = ("o_proj", *_MLP)
# In the order of the op's adapters.
_LINEAR = *_PROJECTIONS, *_UNBIASED
_PARAMETERS = ("weight", "bias")
# Where transformers' decorator is written that takes arguments by former names.
_RENAMES = "transformers.utils.deprecation"
# Where transformers' hooks are written that collect outputs; they stay when nobody asks for any.
_COLLECTS = "transformers.utils.output_capturing"
_STAND_INS = (replacements.__name__, layers.__name__)
is_compiling = torch.compiler.is_compiling
# What was seen of a layer's modules when its forward last looked.
_known: WeakKeyDictionary[Any, _Seen] = WeakKeyDictionary()
# Why a layer that trains ran its parts when it was last called.
_apart: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
_MORE = "hooks, another class, or a forward or parameters of its own"
_UNSERVED = "nothing up to its attention learns, several dtypes, no kernel, a dispatch mode or the invariant mode"


def calls_of(model: torch.nn.Module) -> dict[str, int]:
    """Return by its path how many calls of each layer of a model ran as one op, since one of its parts changed."""
    found = ((name, _known.get(module)) for name, module in model.named_modules())
    return {name: seen.calls for name, seen in found if seen is not None and seen.calls}


def why_apart(model: torch.nn.Module) -> dict[str, str]:
    """Return by its path why a layer of a model ran its parts in its last call that trained, if it did."""
    return {name: _apart[module] for name, module in model.named_modules() if module in _apart}


class _ApartError(Exception):
    """Why a layer runs its parts."""


class Parts(NamedTuple):
    """What the forms of a layer and of its parts say.

    Attributes:
        norms: attributes of the layer with norms before and behind its attention, and before and behind its MLP; empty
            for one that it lacks.
        norm: the form of all norms.
        attention, mlp: the names of their classes.
        heads: attributes of the attention with norms of the heads of q and k; empty if it has none.
        rotation: name of the function that rotates.
        handed: the expressions of window and soft cap of the attention; empty for one that it lacks.
    """

    norms: tuple[str, str, str, str]
    norm: Norm
    attention: str
    mlp: str
    heads: tuple[str, ...]
    rotation: str
    handed: tuple[str, ...]

    def places(self) -> tuple[tuple[str, str] | None, ...]:
        """Return module and parameter of each of the op's weights, in their order; None if the layer lacks it."""
        before, behind, before_mlp, behind_mlp = ((name, "weight") if name else None for name in self.norms)
        projections = ((name, kind) for kind in _PARAMETERS for name in _PROJECTIONS)
        heads = tuple((name, "weight") for name in self.heads) or (None, None)
        mlp = ((name, "weight") for name in _MLP)
        return before, *projections, *heads, ("o_proj", "weight"), behind, before_mlp, behind_mlp, *mlp


# A number that an attention is handed, by its expression.
NUMBERS: dict[str, Function | None] = {
    "": None,
    "self.attn_logit_softcapping": lambda layer: layer.attn_logit_softcapping,
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
    home, places, gate_of = names["__name__"], parts.places(), replacements.gates_by("act_fn")
    attentions, handed = names["ALL_ATTENTION_FUNCTIONS"], [NUMBERS[expression] for expression in parts.handed]

    def look(self: Any) -> _Seen:
        """Return what the op asks of a layer; calling one of its modules must do no more than the op."""
        modules = self.__dict__["_modules"]
        attention, mlp = modules["self_attn"], modules["mlp"]
        for module, kind in ((attention, parts.attention), (mlp, parts.mlp)):
            if not _is_written(module, home, kind, attends=module is attention):
                raise _ApartError(f"{kind}: {_MORE}")
        linears = *((attention, name) for name in (*_PROJECTIONS, "o_proj")), *((mlp, name) for name in _MLP)
        products = fp8.products_of([owner.__dict__["_modules"][name] for owner, name in linears])
        if products is None:
            for owner, name in linears:
                _check_linear(owner, name)
        gate = gate_of(mlp)
        of_heads = [attention.__dict__["_modules"][name] for name in parts.heads]
        given = [given_of(norm, home, kinds) for norm in (*(modules[name] for name in parts.norms if name), *of_heads)]
        if gate is None or None in given:
            raise _ApartError(f"its activation or a norm: {_MORE}")
        return _Seen(self, parts, replacements.ACTIVATIONS[gate], products or TORCH)

    def whole(self: Any, x: Any, mask: Any, angles: Any, given: dict[str, Any]) -> torch.Tensor | None:
        if is_compiling() or not torch.is_grad_enabled():
            return None
        try:
            starts, longest = _sequences(x, mask, given)
            is_changed = torch.nn.functional.scaled_dot_product_attention is not context_parallel.SDPA
            if is_changed or not is_from(names[parts.rotation], home, *_STAND_INS):
                raise _ApartError("context parallelism, or another rotation")
            seen = _known.get(self)
            modules = seen and seen.modules(self)
            if not seen or not modules:
                _known.pop(self, None)
                _say_how_to_gather(self)
                seen = look(self)
                modules = seen.modules(self)
                if not modules:
                    raise _ApartError(_MORE)
                _known[self] = seen
            weights, (cos, sin) = _weights(modules, places, seen.products.tensors), angles
            numbers = _numbers(modules, parts, handed, attentions, seen.activation)
            adapted = _adapters(modules, seen.adapted) if seen.adapted else ()
            _check_angles(x, cos, sin, numbers.head_dim)
            made = decoder_layer(x, cos, sin, weights, numbers, starts, longest, adapted, seen.products)
            if made is None:
                raise _ApartError(_UNSERVED)
        except _ApartError as error:
            _apart[self] = str(error)
            return None
        if _apart:
            _apart.pop(self, None)
        seen.calls += 1
        return made

    return layers.fused_add_rms_norm(original, norms, kinds, whole)


class _Places(NamedTuple):
    """The name of a layer's adapter, and the names by which its modules are found."""

    adapter: str
    layer: str
    a: str
    b: str
    dropout: str


def _say_how_to_gather(layer: Any) -> None:
    """Warn once if ZeRO-3 gathers each module of a layer on its own."""
    mlp = layer.mlp
    if has_hooks(mlp) and hooks_are_of(mlp, ZERO):
        kind = type(layer)
        warn_once(
            f"DeepSpeed gathers each module of {kind.__name__} on its own, so that its kernels run one by one, or not "
            f'at all; "leaf_module": {{"classes": ["{kind.__module__}.{kind.__qualname__}"]}} under '
            """"zero_optimization" in DeepSpeed's config has it gather a layer, which then runs as one op"""
        )


class _Seen:
    """The classes, forwards and norms' helpers of a layer's modules whose calls were seen to do no more than the op.

    It holds no module: modules that are exchanged, and their weights, are free at once.

    Attributes:
        activation: that of the MLP.
        products: those of the linear layers.
        adapted: the adapter of each linear layer that has one.
        calls: how many calls ran as one op.
    """

    def __init__(self, layer: Any, parts: Parts, activation: str, products: Products) -> None:
        norms = filter(None, parts.norms)
        owned = ("", (*norms, "self_attn", "mlp")), ("self_attn", (*_PROJECTIONS, "o_proj", *parts.heads))
        self._places: list[tuple[str, str, str, str, type, Any, Any]] = []
        self.adapted: dict[str, _Places] = {}
        found, self.activation, self.products, self.calls = {"": layer}, activation, products, 0

        def see(owner: str, group: str, name: str, key: str) -> None:
            found[key] = one = _held(found[owner], group)[name]
            # False, which no forward is, if its own is no method of it: each call may then do something else.
            helper = getattr(type(one), "_norm", None)
            self._places.append((owner, group, name, key, type(one), forward_of(one) or False, helper))

        for owner, names in (*owned, ("mlp", (*_MLP, "act_fn"))):
            for name in names:
                one = found[owner].__dict__["_modules"][name]
                if not adapters.is_ours(one):
                    see(owner, "", name, name)
                    continue
                (adapter,) = adapters.active_of(one)
                own = self.adapted[name] = _Places(adapter, *(f"{name}.{part}" for part in ("", *adapters.PARTS)))
                see(owner, "", name, own.layer)
                # It is found as one without an adapter is.
                see(own.layer, "", "base_layer", name)
                for part, key in zip(adapters.PARTS, own[2:], strict=True):
                    see(own.layer, part, adapter, key)

    def modules(self, layer: Any) -> dict[str, Any] | None:
        """Return the modules by name; None if calling one of them now does something else."""
        if has_global_hooks():
            return None
        found = {"": layer}
        for owner, group, name, key, kind, forward, helper in self._places:
            held = found[owner].__dict__["_modules"]
            if group:
                held = held[group].__dict__["_modules"]
            found[key] = one = held.get(name)
            if type(one) is not kind:
                return None
            own = one.__dict__
            # Module.compile() leaves the last.
            if (
                (own["_forward_hooks"] and not _collects_nothing(name == "self_attn", own)) or own["_forward_pre_hooks"]
                or own["_backward_hooks"] or own["_backward_pre_hooks"]
                or "_compiled_call_impl" in own
                or (forward_of(one) if "forward" in own else kind.forward) is not forward
                or (helper is not None and kind._norm is not helper)
            ):  # fmt: skip
                return None
        for places in self.adapted.values():
            if not adapters.runs(found[places.layer], places.adapter):
                return None
        return found


def _is_written(module: Any, home: str, name: str, *, attends: bool) -> bool:
    """Return whether calling a module only runs the forward of a class, as written or as replaced here."""
    kind = type(module)
    if kind.__name__ != name or kind.__module__ != home:
        return False
    if has_hooks(module) and (has_global_hooks() or not _collects_nothing(attends, module.__dict__)):
        return False
    forward = forward_of(module) if "forward" in module.__dict__ else kind.forward
    while is_from(forward, _RENAMES):
        forward = getattr(forward, "__wrapped__", None)
    return is_from(forward, home, *_STAND_INS)


def _collects_nothing(attends: bool, own: Mapping[str, Any]) -> bool:
    """Return whether a module's hooks only collect weights of attention, of which ours makes none.

    Args:
        attends: whether the module is an attention.
        own: its attributes.
    """
    if not attends or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
        return False
    for hook in own["_forward_hooks"].values():
        if not is_from(hook, _COLLECTS):
            return False
        names, cells = hook.__code__.co_freevars, hook.__closure__ or ()
        if "index" not in names or cells[names.index("index")].cell_contents != 1:
            return False
    return True


def _held(module: Any, group: str) -> dict[str, Any]:
    """Return the modules in a module, or in a group of them."""
    held: dict[str, Any] = module.__dict__["_modules"]
    return held[group].__dict__["_modules"] if group else held


def _check_linear(owner: Any, name: str) -> None:
    """Raise unless calling a module of another one is a linear layer's product, with an adapter's or without."""
    if bare_weights(owner, (name,), []) is not None:
        return
    layer = owner.__dict__["_modules"][name]
    given = (adapters.adapted_of(layer) or "adapters that are disabled or merged") if adapters.is_ours(layer) else _MORE
    if not isinstance(given, Adapted) or given.rate is None:
        raise _ApartError(f"{name}: {adapters.DROPOUT if isinstance(given, Adapted) else given}")


def _adapters(modules: Mapping[str, Any], adapted: Mapping[str, _Places]) -> list[Adapter | None]:
    """Return linear layers' adapters, without biases, with numbers as scales, and of plain tensors."""
    found: list[Adapter | None] = []
    for name in _LINEAR:
        places = adapted.get(name)
        if places is None:
            found.append(None)
            continue
        first, second = modules[places.a], modules[places.b]
        scaling, rate = modules[places.layer].scaling[places.adapter], adapters.rate_of(modules[places.dropout])
        if rate is None:
            raise _ApartError(f"{name}: {adapters.DROPOUT}")
        biases = parameter_of(first, "bias"), parameter_of(second, "bias")
        if biases != (None, None) or type(scaling) not in (float, int):
            raise _ApartError(f"{name}: an adapter with a bias, or a scale that is a tensor")
        a, b = parameter_of(first, "weight"), parameter_of(second, "weight")
        if type(a) not in TENSORS or type(b) not in TENSORS:
            raise _ApartError(f"{name}: {SUBCLASS}")
        found.append(Adapter(a, b, scaling, a.shape[0], rate))
    return found


def _weights(
    modules: Mapping[str, Any], places: Iterable[tuple[str, str] | None], tensors: Collection[type]
) -> Weights:
    """Return the weights at some places, of some classes; there must be no bias that the op lacks."""
    try:
        # FSDP1 makes plain attributes of parameters.
        found = [
            place
            and (own[place[1]] if place[1] in (own := modules[place[0]].__dict__) else own["_parameters"][place[1]])
            for place in places
        ]
        for name in _UNBIASED:
            own = modules[name].__dict__
            if "bias" in own or own["_parameters"]["bias"] is not None:
                raise _ApartError(f"{name}: a bias")
    except KeyError:
        raise _ApartError("a weight that is a buffer") from None
    for weight in found:
        if weight is not None and type(weight) not in tensors:
            raise _ApartError(SUBCLASS)
    return Weights(*found)


def _numbers(
    modules: Mapping[str, Any], parts: Parts, handed: Iterable[Function | None], attentions: Mapping[str, Any],
    activation: str,
) -> Numbers:  # fmt: skip
    """Return the numbers; attention must be ours, causal and without dropout, and norms of one launch alike."""
    attention = modules["self_attn"]
    # Others may wrap what is registered, as sequence parallelism does.
    function = attentions.get(attention.config._attn_implementation)
    if function is None or getattr(function, "func", None) is not attend:
        raise _ApartError('its attention is not "tilekern"')
    if (attention.training and attention.attention_dropout) or not getattr(attention, "is_causal", True):
        raise _ApartError("its attention has a dropout, or is not causal")
    norm = parts.norm
    eps = [getattr(modules[name], norm.eps) if name else 0.0 for name in (*parts.norms, *parts.heads)]
    first, behind, second, last, *of_heads = eps
    of_head = max(of_heads, default=0.0)
    if of_head != min(of_heads, default=0.0) or (parts.norms[1] and behind != second):
        raise _ApartError("its norms have several eps")
    window_of, softcap_of = handed
    window, softcap = window_of and window_of(attention), softcap_of and softcap_of(attention)
    (deterministic,) = function.args
    return Numbers(
        attention.head_dim, (first, of_head, second, last), attention.scaling, window, deterministic, softcap,
        norm.offset, norm.casting_mode == "llama", activation,
    )  # fmt: skip


def _sequences(x: Any, mask: Any, given: Mapping[str, Any]) -> tuple[Any, int | None]:
    """Return where packed sequences start, and how long the longest is, if that is known.

    A layer must have a plain input, no cache, a mask that tells of sequences at most, and nothing else to heed.
    """
    if type(x) not in TENSORS:
        raise _ApartError(SUBCLASS)
    for name in _HEEDED:
        if given.get(name) is not None:
            raise _ApartError(f"it is given {name}")
    told = mask is None or (type(mask) is ToldMask and mask.padding is None and mask.shape[3] == x.shape[1])
    if not told:
        raise _ApartError("a mask that hides more than other sequences and tokens behind the last")
    starts, longest = given.get("cu_seq_lens_q"), given.get("max_length_q")
    if starts is None and mask is not None and len(mask.starts):
        starts, longest = mask.starts, mask.longest
    if starts is not None and x.shape[0] != 1:
        raise _ApartError("packed sequences in several rows")
    return starts, longest if isinstance(longest, int) else None


def _check_angles(x: torch.Tensor, cos: Any, sin: Any, size: int) -> None:
    """Raise unless angles are plain tensors that turn the heads of each token."""
    fit = type(cos) in TENSORS and type(sin) in TENSORS and x.dim() == len(cos.shape) == 3
    if not fit or cos.shape != sin.shape or cos.shape[1:] != (x.shape[1], size) or cos.shape[0] not in (1, x.shape[0]):
        raise _ApartError("angles of another class or shape")
