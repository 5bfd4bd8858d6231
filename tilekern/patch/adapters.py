"""The replacement for PEFT's linear layers with LoRA: layer and adapter are one op, ``lora_linear``.

The layers of q, k and v are one op together, and so are those of gate and up, in modules that are patched.

PEFT's own code runs where the op would compute something else:

- adapters that are disabled, merged, several, chosen for each row, or none
- variants of LoRA (DoRA and others), and adapters with a bias
- a layer that is not torch's or GPT-2's, as one of 4 bits; hooks on it or on parts of the adapter
- outside of autocast, adapters of another dtype than the layer's: PEFT then multiplies in float32
- DTensor and other subclasses of Tensor
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilekern.ops.lora_linear import Adapted, lora_linears
from tilekern.ops.registration import is_autocast
from tilekern.patch.guards import (
    SUBCLASS,
    TENSORS,
    bare_weights,
    count_own,
    forward_of,
    has_hooks,
    is_from,
    linear_of,
)
from tilekern.patch.table import Patch
from tilekern.runtime.switches import LORA

Function = Callable[..., Any]
# The module of PEFT's layers, and the name by which their calls are counted.
HOME, KERNEL = "peft.tuners.lora.layer", "lora_linear"
_ROWS = "adapters chosen for each row"
_ELSE = "hooks, a bias in the adapter, or a layer or weights of other classes than torch's"


def linear(original: Function) -> Function:
    """Replace ``forward(self, x, *args, **kwargs)`` of PEFT's linear layer with LoRA."""

    def forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # torch.compile fuses the sums of PEFT's code by itself.
        given = None if torch.compiler.is_compiling() else _ROWS if args or kwargs else _given_of(self, x)
        if isinstance(given, Adapted):
            return lora_linears(x, [given], _dropped(self, x))[0]
        if given:
            count_own(KERNEL, given, True)
        return original(self, x, *args, **kwargs)

    return forward


def projected(layers: Sequence[Any], x: Any) -> tuple[Any, ...]:
    """Return the result of each of some modules on ``x``, by one op if all are patched layers without dropout."""
    if not torch.compiler.is_compiling() and all(map(_is_ours, layers)):
        given = [_given_of(layer, x) for layer in layers]
        adapted = [each for each in given if isinstance(each, Adapted)]
        if len(adapted) == len(layers) and not any(map(_drops, layers)):
            return lora_linears(x, adapted)
    return tuple(layer(x) for layer in layers)


def _is_ours(layer: Any) -> bool:
    """Return whether calling a module only runs the replacement of PEFT's forward."""
    return is_from(forward_of(layer), __name__) and not has_hooks(layer)


def _given_of(layer: Any, x: Any) -> Adapted | str | None:
    """Return the op's arguments after ``x``; why it would not compute the same, or None if no adapter runs."""
    names = active_of(layer)
    if not names:
        return None
    if len(names) > 1 or names[0] in layer.lora_variant:
        return "several adapters or a variant of LoRA"
    if type(x) not in TENSORS:
        return SUBCLASS
    parts, (name,) = layer.__dict__["_modules"], names
    base = linear_of(parts["base_layer"])
    a, b = (bare_weights(parts[factor], (name,)) for factor in ("lora_A", "lora_B"))
    scaling = layer.scaling[name]
    if base is None or a is None or b is None or type(scaling) not in (float, int):
        return _ELSE
    (a,), (b,), (weight, bias) = a, b, base
    dtypes = {given.dtype for given in (x, weight, a, b, bias) if given is not None}
    if len(dtypes) > 1 and (not is_autocast(x) or torch.float64 in dtypes):
        return "an adapter of another dtype than its layer's, outside of autocast"
    return Adapted(weight, a, b, scaling, bias)


def active_of(layer: Any) -> list[str]:
    """Return the names of the adapters that a layer runs."""
    if layer.disable_adapters or layer.merged:
        return []
    factors = layer.__dict__["_modules"]["lora_A"].__dict__["_modules"]
    return [name for name in layer.active_adapters if name in factors]


def _dropped(layer: Any, x: torch.Tensor) -> torch.Tensor | None:
    """Return what the only adapter of a layer reads if it is not ``x`` itself."""
    return _dropout_of(layer)(x) if _drops(layer) else None


def _drops(layer: Any) -> bool:
    """Return whether the only adapter of a layer reads something else than the layer, as after a dropout."""
    dropout = _dropout_of(layer)
    kind = type(dropout)
    idle = kind is torch.nn.Identity or (kind is torch.nn.Dropout and not (dropout.training and dropout.p))
    return not idle or has_hooks(dropout)


def _dropout_of(layer: Any) -> Any:
    (name,) = active_of(layer)
    return layer.__dict__["_modules"]["lora_dropout"][name]


PATCH = Patch(
    LORA, "peft", HOME, "Linear.forward", linear,
    ("8c653014b3c8469bf0d6f133d0c2dfde50f3b022462ee94f211b2c8f622f1bd8",), releases="0.18.0 to 0.21.2",
)  # fmt: skip
