"""The replacement for PEFT's linear layers with LoRA: layer and adapter are one op, ``lora_linear``.

In modules that are patched the layers of q, k and v are one op together, and so is an MLP with SwiGLU, or its gate and
up. Some of the layers may have no adapter.

PEFT's own code runs where the op would compute something else:

- adapters that are disabled, merged, several, chosen for each row, or none
- variants of LoRA (DoRA and others), and adapters with a bias
- a layer that is not torch's or GPT-2's, as one of 4 bits; hooks on it or on parts of the adapter
- outside of autocast, adapters of another dtype than the layer's or float32
- DTensor and other subclasses of Tensor

``torch.nn.Dropout`` before an adapter is a part of the op, and draws what PEFT's code would. A module of another class,
or with hooks, is called, and its layer is an op by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilekern.ops.gated_mlp import lora_gated_mlp
from tilekern.ops.lora_linear import Adapted, are_served, lora_linears
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
# Of the modules that hold what an adapter runs, by its name.
PARTS = ("lora_A", "lora_B", "lora_dropout")
_DROPOUTS = (torch.nn.Identity, torch.nn.Dropout)
_ROWS = "adapters chosen for each row"
_ELSE = "hooks, a bias in the adapter, or a layer or weights of other classes than torch's"
# Why a layer is an op by itself.
DROPOUT = "a dropout other than torch.nn.Dropout below 1, in place, or with hooks"


def linear(original: Function) -> Function:
    """Replace ``forward(self, x, *args, **kwargs)`` of PEFT's linear layer with LoRA."""

    def forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # torch.compile fuses the sums of PEFT's code by itself.
        given = None if torch.compiler.is_compiling() else _ROWS if args or kwargs else _given_of(self, x)
        if isinstance(given, Adapted):
            return lora_linears(x, [given], _dropped(self, x, given.a) if given.rate is None else None)[0]
        if given:
            count_own(KERNEL, given, True)
        return original(self, x, *args, **kwargs)

    return forward


def projected(layers: Sequence[Any], x: Any) -> tuple[Any, ...]:
    """Return the result of each of some modules on ``x``, by one op if all are patched or bare."""
    given = _together(layers, x)
    return tuple(layer(x) for layer in layers) if given is None else lora_linears(x, given)


def gated_mlp(layers: Sequence[Any], x: Any) -> torch.Tensor | None:
    """Return the result of an MLP with SwiGLU if it is one op of its layers gate, up and down with their adapters."""
    given = _together(layers, x)
    return None if given is None else lora_gated_mlp(x, given)


def _together(layers: Sequence[Any], x: Any) -> list[Adapted] | None:
    """Return arguments of one op on ``x`` of all layers; None if there is no such op, or none has an adapter."""
    found: list[Adapted] = []
    if torch.compiler.is_compiling() or not any(map(is_ours, layers)):
        return None
    for layer in layers:
        given = _given_of(layer, x) if is_ours(layer) else _bare(layer)
        if not isinstance(given, Adapted) or given.rate is None:
            return None
        found.append(given)
    return found


def is_ours(layer: Any) -> bool:
    """Return whether calling a module only runs the replacement of PEFT's forward."""
    return is_from(forward_of(layer), __name__) and not has_hooks(layer)


def _bare(layer: Any) -> Adapted | None:
    """Return a layer without an adapter; None if calling it does more than a linear layer."""
    base = linear_of(layer)
    return None if base is None else Adapted(base[0], None, None, bias=base[1])


def _given_of(layer: Any, x: Any) -> Adapted | str | None:
    """Return the op's arguments after ``x``; why it would not compute the same, or None if no adapter runs."""
    if type(x) not in TENSORS:
        return SUBCLASS if active_of(layer) else None
    given = adapted_of(layer)
    if isinstance(given, Adapted) and not _are_alike(x, given):
        return "an adapter of another dtype than its layer's or float32, outside of autocast"
    return given


def _are_alike(x: torch.Tensor, given: Adapted) -> bool:
    """Return whether x and a layer have one dtype, or autocast casts them to one, and the op takes the adapter's."""
    dtypes = {one.dtype for one in (x, given.weight, given.bias) if one is not None}
    alike = len(dtypes) == 1 or (is_autocast(x) and torch.float64 not in dtypes)
    return alike and are_served(x, (given.a, given.b))


def adapted_of(layer: Any) -> Adapted | str | None:
    """Return a layer and the adapter that it runs; why the op would not compute the same, or None if none runs."""
    names = active_of(layer)
    if not names:
        return None
    if len(names) > 1 or names[0] in layer.lora_variant:
        return "several adapters or a variant of LoRA"
    parts, (name,) = layer.__dict__["_modules"], names
    base = linear_of(parts["base_layer"])
    a, b = (bare_weights(parts[factor], (name,)) for factor in ("lora_A", "lora_B"))
    scaling = layer.scaling[name]
    if base is None or a is None or b is None or type(scaling) not in (float, int):
        return _ELSE
    (a,), (b,), (weight, bias) = a, b, base
    if not weight.device == a.device == b.device:  # as ms-swift lets them be
        return _ELSE
    return Adapted(weight, a, b, scaling, bias, rate_of(parts["lora_dropout"].__dict__["_modules"][name]))


def active_of(layer: Any) -> list[str]:
    """Return the names of the adapters that a layer runs."""
    if layer.disable_adapters or layer.merged:
        return []
    factors = layer.__dict__["_modules"]["lora_A"].__dict__["_modules"]
    return [name for name in layer.active_adapters if name in factors]


def runs(layer: Any, adapter: str) -> bool:
    """Return whether a layer that has an adapter runs this one alone."""
    own = layer.__dict__
    if own["_disable_adapters"] or own["merged_adapters"] or adapter in own["lora_variant"]:
        return False
    active = layer._active_adapter
    return active in (adapter, [adapter])


def _dropped(layer: Any, x: torch.Tensor, a: Any) -> torch.Tensor:
    """Return what the factor ``a`` of the only adapter of a layer reads, by a call of its dropout."""
    (name,) = active_of(layer)
    # As PEFT, which casts before the dropout, under autocast too.
    made: torch.Tensor = layer.lora_dropout[name](x.to(a.dtype))
    return made


def rate_of(dropout: Any) -> float | None:
    """Return the rate at which an adapter's dropout draws now; None if calling it does something else."""
    kind = type(dropout)
    if kind not in _DROPOUTS or "forward" in dropout.__dict__ or has_hooks(dropout):
        return None
    if kind is torch.nn.Identity or not dropout.training:
        return 0.0
    rate: float = dropout.p
    return rate if 0 <= rate < 1 and not dropout.inplace else None


PATCH = Patch(
    LORA, "peft", HOME, "Linear.forward", linear,
    ("8c653014b3c8469bf0d6f133d0c2dfde50f3b022462ee94f211b2c8f622f1bd8",), releases="0.18.0 to 0.21.2",
)  # fmt: skip
