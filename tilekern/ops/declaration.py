"""An op's declaration, and what follows from it; :mod:`tilekern.ops.writing` makes text of that."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tilekern.spec import Array, KernelSpec

Function = Callable[..., Any]
# Types of arguments in torch's schema language.
_KINDS = {
    "torch.Tensor": "Tensor", "torch.Tensor | None": "Tensor?", "float": "float", "float | None": "float?",
    "int": "SymInt", "int | None": "SymInt?", "bool": "bool", "str": "str", "str | None": "str?",
}  # fmt: skip


@dataclass(frozen=True)
class Parts:
    """The parts of an op that it brings itself, in place of written ones.

    ``arguments`` are those of the formula, ``slopes`` the gradients of the results, ``saved`` the arguments and results
    that the backward reads, ``scalars`` the arguments that are not tensors. Gradients are a tuple, or a tensor where
    there is one, each once and in the order of the arguments.

    Attributes:
        check: (*arguments); raises ValueError where they do not fit.
        find: (graded, *arguments) -> a tuple of the forward's plan, the backward's and whatever the launches use, or
            None where torch must do the work.
        launch: (plans, *arguments) -> the results.
        launch_backward: (plans, needs, *slopes, *saved, *scalars) -> the gradients; ``needs`` says for each argument
            whether it needs one.
        fake: (*arguments) -> results without values, for tracing.
        fallback_backward: (*slopes, *saved, *scalars) -> the gradients by torch, which is what runs where the backward
            has no kernel.
        absent: (needs, *slopes, *saved, *scalars) -> the gradients where a slope is None. Without it zeros stand in.
        rest: (*arguments) -> the results that are kept, as a tuple, where the formula gives the others.
        otherwise: (*arguments, *options) -> what the caller gets of a call that ``unless`` leaves to other ops.
        between: () -> what the launches of one call hand on to its backward, behind the plans. Calls without a gradient
            have none, and neither have those of torch's dispatcher, where each direction stands for itself.
    """

    check: Function | None = None
    find: Function | None = None
    launch: Function | None = None
    launch_backward: Function | None = None
    fake: Function | None = None
    fallback_backward: Function | None = None
    absent: Function | None = None
    rest: Function | None = None
    otherwise: Function | None = None
    between: Function | None = None

    def named(self) -> dict[str, Function]:
        """Those that there are, by their names."""
        return {name: function for name, function in vars(self).items() if function is not None}


@dataclass(frozen=True, kw_only=True, eq=False)
class Declaration:
    """An op; the fields are what :func:`tilekern.ops.operation.operation` takes."""

    formula: Function
    name: str
    forward: KernelSpec
    backward: KernelSpec | None = None
    sums: tuple[str, ...] = ()
    ungraded: tuple[str, ...] = ()
    named_gradients: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    backward_flags: Mapping[str, str] = field(default_factory=dict)
    key: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    strided: bool = False
    arrays: tuple[Array, ...] = ()
    kept: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    unless: str = ""
    constants: Mapping[str, float] = field(default_factory=dict)
    gathered: int | None = None
    parts: Parts = field(default_factory=Parts)

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        """The formula's."""
        return inspect.signature(self.formula)

    @functools.cached_property
    def kinds(self) -> dict[str, str]:
        """The type of each argument in torch's schema language."""
        said = {name: parameter.annotation for name, parameter in self.signature.parameters.items()}
        found = {name: kind if isinstance(kind, str) else inspect.formatannotation(kind) for name, kind in said.items()}
        if unknown := [name for name, kind in found.items() if kind not in _KINDS]:
            raise TypeError(f"{self.name}: the type of {unknown[0]} must be one of {', '.join(_KINDS)}")
        served = {name: kind for name, kind in found.items() if name not in self.options}
        # What is left to others where it is None, or has a constant then, never comes here as None.
        return {name: _KINDS[kind].rstrip("?" * self.is_left(name)) for name, kind in served.items()}

    def is_left(self, name: str) -> bool:
        """Whether calls in which a tensor is None are left to other ops, or a constant stands for it."""
        return f"{name} is None" in self.unless or name in self.constants

    @property
    def title(self) -> str:
        """The name of the op's autograd function."""
        return "".join(part.capitalize() for part in self.name.split("_"))

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the arguments."""
        return tuple(self.kinds)

    @functools.cached_property
    def tensors(self) -> tuple[str, ...]:
        """The arguments that are tensors; the first is never None."""
        return tuple(name for name, kind in self.kinds.items() if kind.startswith("Tensor"))

    @functools.cached_property
    def sharded(self) -> tuple[str, ...]:
        """The tensors of which each rank has a part, where they are DTensors: those of the first one's shape."""
        shape = self.inputs[self.tensors[0]].shape
        return tuple(name for name, array in self.inputs.items() if array.shape == shape)

    @functools.cached_property
    def shared(self) -> tuple[str, ...]:
        """The other tensors, which all ranks have.

        Raises:
            TypeError: one stands before a tensor that is sharded.
        """
        if self.tensors[: len(self.sharded)] != self.sharded:
            raise TypeError(f"{self.name}: tensors of the shape of {self.tensors[0]} must come first")
        return self.tensors[len(self.sharded) :]

    @functools.cached_property
    def optional(self) -> frozenset[str]:
        """The tensors that may be None."""
        return frozenset(name for name, kind in self.kinds.items() if kind == "Tensor?")

    @functools.cached_property
    def scalars(self) -> tuple[str, ...]:
        """The arguments that are not tensors."""
        return tuple(name for name in self.arguments if name not in self.tensors)

    @functools.cached_property
    def inputs(self) -> dict[str, Array]:
        """The forward's array of each tensor."""
        arrays = {array.name: array for array in self.arrays or arrays_of(self.forward, "input")}
        if missing := [name for name in self.tensors if name not in arrays]:
            raise TypeError(f"{self.name}: no array is called {missing[0]}")
        return {name: arrays[name] for name in self.tensors}

    @functools.cached_property
    def outputs(self) -> dict[str, Array]:
        """The forward's array of each result."""
        arrays = [array for array in self.arrays if array.role == "output"]
        return {array.name: array for array in arrays or arrays_of(self.forward, "output")}

    @property
    def results(self) -> tuple[str, ...]:
        """All results, those that are kept last."""
        return tuple(self.outputs)

    @property
    def shown(self) -> tuple[str, ...]:
        """The results that a caller gets."""
        return tuple(name for name in self.results if name not in self.kept)

    @property
    def slopes(self) -> tuple[str, ...]:
        """The gradients that come in."""
        return tuple(f"d{name}" for name in self.shown)

    @property
    def specs(self) -> tuple[KernelSpec, ...]:
        """The specs of the directions that have a kernel."""
        return (self.forward,) if self.backward is None else (self.forward, self.backward)

    @functools.cached_property
    def saved(self) -> tuple[str, ...]:
        """The arguments and results that the backward reads: all arguments where it is autograd's of the formula."""
        if self.reads or self.backward is None:
            return self.reads or (() if self.parts.fallback_backward else self.tensors)
        known = (*self.tensors, *self.results)
        return tuple(a.name for a in arrays_of(self.backward, "input") if a.name in known)

    @property
    def backward_arguments(self) -> tuple[str, ...]:
        """Names of what the backward reads."""
        return (*self.slopes, *self.saved, *self.scalars)

    @property
    def registered_backward_arguments(self) -> tuple[str, ...]:
        """Names of what the registered backward takes: where gradients are apart, which arguments need one, too."""
        return (*self.backward_arguments, *(["needs"] if self.apart else []))

    @functools.cached_property
    def gradients(self) -> dict[str, str]:
        """The name of each tensor's gradient, for those that get one."""
        graded = [name for name in self.tensors if name not in self.ungraded]
        return {name: self.named_gradients.get(name, f"d{name}") for name in graded}

    @property
    def made(self) -> tuple[str, ...]:
        """The gradients that the backward makes, each once; one that is a slope as it came in is there already."""
        return tuple(dict.fromkeys(name for name in self.gradients.values() if name not in self.slopes))

    @functools.cached_property
    def stand_ins(self) -> dict[str, str]:
        """For each tensor what the backward has of its shape, if possible of its dtype: itself where it is saved."""
        arrays = {f"d{name}": replace(array, name=f"d{name}") for name, array in self.outputs.items()}
        arrays |= self.outputs | self.inputs
        at_hand = [arrays[name] for name in (*self.saved, *self.slopes)]
        found = {}
        for name, array in self.inputs.items():
            alike = [other for other in at_hand if other.shape == array.shape]
            alike.sort(key=lambda other: (other.name != name, other.dtype != array.dtype))
            if not alike:
                raise TypeError(f"{self.name}: nothing that the backward reads has the shape of {name}; save it")
            found[name] = alike[0].name
        return found

    @property
    def schema(self) -> str:
        """The op in torch's schema language."""
        given = ", ".join(f"{kind} {name}" for name, kind in self.kinds.items())
        return f"{self.name}({given}) -> {_several(self.results)}"

    @property
    def backward_schema(self) -> str:
        """Its backward in the same."""
        kinds = self.kinds | ({"needs": "bool[]"} if self.apart else {})
        given = ", ".join(f"{kinds.get(name, 'Tensor')} {name}" for name in self.registered_backward_arguments)
        return f"{self.name}_backward({given}) -> {_several(self.made)}"


def _several(names: tuple[str, ...]) -> str:
    return "Tensor" if len(names) == 1 else f"({', '.join('Tensor' for _ in names)})"


def arrays_of(spec: KernelSpec, *roles: str) -> tuple[Array, ...]:
    """The arrays of a spec that have one of the roles."""
    return tuple(array for array in spec.arrays if isinstance(array, Array) and array.role in roles)
