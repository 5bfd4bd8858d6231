"""An op's declaration, and the names that follow from it; :mod:`tilekern.ops.writing` turns it into code."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tilekern.errors import NoVariant
from tilekern.kernels import column_sum
from tilekern.ops import registration
from tilekern.ops.dtensors import by_shards, is_dtensor
from tilekern.runtime import dispatch
from tilekern.spec import Array, KernelSpec, bucket

Function = Callable[..., Any]
_OVERRIDES = (
    "check", "find", "launch", "launch_backward", "fake", "fallback_backward", "absent", "rest", "otherwise",
)  # fmt: skip
# Types of arguments in torch's schema language.
_KINDS = {
    "Tensor": "Tensor", "Tensor | None": "Tensor?", "float": "float", "float | None": "float?",
    "int": "SymInt", "int | None": "SymInt?", "bool": "bool", "str": "str", "str | None": "str?", "dtype": "ScalarType",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class Declaration:
    """An op.

    Arguments and results below are tuples of tensor names. The fields from ``check`` on are functions. ``check`` to
    ``fallback_backward`` replace generated functions; the generated code calls the others. In their signatures:

    - ``arguments`` are the formula's arguments.
    - ``slopes`` are the gradients of the results.
    - ``saved`` are the arguments and results that the backward reads.
    - ``scalars`` are the arguments that are not tensors.

    Gradients are a tuple, or a tensor if there is only one, each once and in the order of the arguments.

    Attributes:
        formula: the op in torch's own operations, which also gives its signature and its documentation.
        forward, backward: the specs, with their arrays unless the launches are given. Without a backward the gradients
            are torch's.
        name: the op's name; empty means the formula's name.
        sums: vectors whose gradients the backward leaves as ``partial`` [blocks, ...], one after the other, to be added
            up by ``column_sum``. Nothing is added up if none of them needs a gradient.
        ungraded: tensors without a gradient; if one needs it, the formula runs.
        gradients: names of gradients that are not ``d<argument>``: two arguments may share a gradient, and a result's
            gradient may be passed on unchanged.
        flags: values of the specs' flags, and of dtypes that no tensor has: expressions of the scalars and of whether
            optional tensors are None. A result's gradient is cast to the dtype that the backward takes.
        backward_flags: flags that differ in the backward.
        key: further expressions that plans depend on.
        shapes: expressions that plans depend on instead of the shapes of some tensors.
        served: an expression of the arguments; if it is false, torch must do the work.
        no_gradient: what to do where a gradient is needed; if it is given, the op has none, and this is part of its
            error. Without it, only an op whose results are all integers has no gradient; then none is refused.
        apart: arguments whose gradients have plans of their own; ``graded`` is then a tuple that says which of them
            need a gradient. The registered backward of such an op only computes the requested gradients.
        updates: tensors that the op writes in place, which are not among its results.
        strided: results have the strides of the tensors with the same shape; otherwise they are contiguous.
        arrays: the tensors and the results, if they are not the forward's arrays.
        kept: the last results, if only the backward uses them. The formula does not return them.
        reads: the arguments and results that the backward reads, if its arrays do not say.
        options: the last arguments of the function, with defaults, that the op itself does not have.
        unless: an expression of the arguments and options; if it is true, ``otherwise`` is called instead of the op. A
            tensor that it tests (``weight is None``) is never None in the op itself.
        gathered: if not None, the op accepts DTensors; those of the first one's shape may be sharded. It is the number
            of last dimensions that each rank must have whole, as in :func:`tilekern.ops.dtensors.by_shards`.
        check: (*arguments); raises ValueError if they do not fit.
        find: (graded, *arguments) -> the forward's plan, the backward's, and anything else that the launches use, as a
            tuple; None if torch must do the work.
        launch: (plans, *arguments) -> the results.
        launch_backward: (plans, needs, *slopes, *saved, *scalars) -> the gradients; ``needs`` says for each argument
            whether it needs one.
        fake: (*arguments) -> results without values, for tracing.
        fallback_backward: (*slopes, *saved, *scalars) -> the gradients by torch, used if the backward has no kernel.
        absent: (needs, *slopes, *saved, *scalars) -> the gradients if a slope is None. Without it zeros stand in.
        rest: (*arguments) -> the results that are kept, as a tuple, if the formula gave the others.
        otherwise: (*arguments, *options) -> the result of a call that ``unless`` leaves to other ops.
    """

    formula: Function
    forward: KernelSpec
    backward: KernelSpec | None = None
    name: str = ""
    sums: tuple[str, ...] = ()
    ungraded: tuple[str, ...] = ()
    gradients: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    backward_flags: Mapping[str, str] = field(default_factory=dict)
    key: tuple[str, ...] = ()
    shapes: Mapping[str, str] = field(default_factory=dict)
    served: str = ""
    no_gradient: str = ""
    apart: tuple[str, ...] = ()
    updates: tuple[str, ...] = ()
    strided: bool = False
    arrays: tuple[Array, ...] = ()
    kept: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    unless: str = ""
    gathered: int | None = None
    check: Function | None = None
    find: Function | None = None
    launch: Function | None = None
    launch_backward: Function | None = None
    fake: Function | None = None
    fallback_backward: Function | None = None
    absent: Function | None = None
    rest: Function | None = None
    otherwise: Function | None = None

    def __post_init__(self) -> None:
        """Complete the name, and the names of the gradients of the tensors that get one."""
        object.__setattr__(self, "name", self.name or self.formula.__name__)
        graded = [name for name in self.tensors if name not in self.ungraded and self.is_differentiable]
        object.__setattr__(self, "gradients", {name: self.gradients.get(name, f"d{name}") for name in graded})

    @property
    def overrides(self) -> dict[str, Function]:
        """The functions given in the declaration, by name."""
        found = {name: getattr(self, name) for name in _OVERRIDES}
        return {name: function for name, function in found.items() if function is not None}

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        """The formula's signature."""
        return inspect.signature(self.formula)

    @functools.cached_property
    def kinds(self) -> dict[str, str]:
        """The type of each argument in torch's schema language."""
        served: dict[str, str] = {}
        for name, parameter in self.signature.parameters.items():
            kind = parameter.annotation
            kind = (kind if isinstance(kind, str) else inspect.formatannotation(kind)).replace("torch.", "")
            if kind not in _KINDS:
                raise TypeError(f"{self.name}: the type of {name} must be one of {', '.join(_KINDS)}")
            if name not in self.options:
                served[name] = kind
        # If the argument is None, the call goes to other ops.
        return {name: _KINDS[kind].rstrip("?" * (f"{name} is None" in self.unless)) for name, kind in served.items()}

    @functools.cached_property
    def is_differentiable(self) -> bool:
        """Whether the op has a gradient."""
        return not self.no_gradient and any("int" not in array.dtype for array in self.outputs.values())

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
        """The tensors that may be sharded if they are DTensors: those of the first one's shape."""
        shape = self.inputs[self.tensors[0]].shape
        return tuple(name for name, array in self.inputs.items() if array.shape == shape)

    @functools.cached_property
    def shared(self) -> tuple[str, ...]:
        """The other tensors, which are whole on each rank.

        Raises:
            TypeError: a shared tensor precedes a sharded one.
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
        """All results, kept ones last."""
        return tuple(self.outputs)

    @property
    def shown(self) -> tuple[str, ...]:
        """The results that a caller gets."""
        return tuple(name for name in self.results if name not in self.kept)

    @property
    def slopes(self) -> tuple[str, ...]:
        """The incoming gradients."""
        return tuple(f"d{name}" for name in self.shown)

    @property
    def specs(self) -> tuple[KernelSpec, ...]:
        """The specs of the directions that have a kernel."""
        return (self.forward,) if self.backward is None else (self.forward, self.backward)

    @functools.cached_property
    def saved(self) -> tuple[str, ...]:
        """The arguments and results that the backward reads; all arguments if autograd differentiates the formula."""
        if self.reads or self.backward is None:
            return self.reads or (() if self.fallback_backward else self.tensors)
        known = (*self.tensors, *self.results)
        return tuple(a.name for a in arrays_of(self.backward, "input") if a.name in known)

    @property
    def backward_arguments(self) -> tuple[str, ...]:
        """Arguments of the backward."""
        return (*self.slopes, *self.saved, *self.scalars)

    @property
    def registered_backward_arguments(self) -> tuple[str, ...]:
        """Arguments of the registered backward; if gradients are apart, also which of them are needed."""
        return (*self.backward_arguments, *(["needs"] if self.apart else []))

    @property
    def made(self) -> tuple[str, ...]:
        """The gradients that the backward computes, each once, except one that is passed on from a result."""
        return tuple(dict.fromkeys(name for name in self.gradients.values() if name not in self.slopes))

    @functools.cached_property
    def stand_ins(self) -> dict[str, str]:
        """For each tensor one of its shape that the backward has, preferably the tensor itself or one of its dtype."""
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
        own = {name: f"Tensor({mark}!)" for name, mark in zip(self.updates, "abcdefgh", strict=False)}
        given = ", ".join(f"{kind} {name}" for name, kind in (self.kinds | own).items())
        return f"{self.name}({given}) -> {_several(self.results)}"

    @property
    def backward_schema(self) -> str:
        """The backward in torch's schema language."""
        kinds = self.kinds | ({"needs": "bool[]"} if self.apart else {})
        given = ", ".join(f"{kinds.get(name, 'Tensor')} {name}" for name in self.registered_backward_arguments)
        return f"{self.name}_backward({given}) -> {_several(self.made)}"


def _several(names: tuple[str, ...]) -> str:
    return "Tensor" if len(names) == 1 else f"({', '.join('Tensor' for _ in names)})"


def arrays_of(spec: KernelSpec, *roles: str) -> tuple[Array, ...]:
    """Return the arrays of a spec that have one of the roles."""
    return tuple(array for array in spec.arrays if isinstance(array, Array) and array.role in roles)


def names_of(op: Declaration) -> dict[str, Any]:
    """Return the global names of an op's code, with a new memo."""
    names: dict[str, Any] = {
        "__op__": op.name,  # for a trace of a step, which looks at frames
        "torch": torch, "FORWARD": op.forward, "BACKWARD": op.backward, "SUM": column_sum.SPEC, "formula": op.formula,
        "known": dispatch.memo(), "keep": dispatch.keep, "plan_for": dispatch.plan_for,
        "count_fallback": dispatch.count_fallback, "refused": dispatch.refused, "NoVariant": NoVariant,
        "empty": torch.empty, "empty_like": torch.empty_like,
        "float32": torch.float32, "is_compiling": torch.compiler.is_dynamo_compiling,
        "is_grad_enabled": torch.is_grad_enabled, "modes": registration.modes, "bucket": bucket,
        "transforms": registration.transforms, "Tensor": Tensor, "by_shards": by_shards,
        "is_dtensor": is_dtensor,
    }  # fmt: skip
    for helper in (
        registration.Rows, registration.as_rows, registration.by_autograd, registration.check_tensors,
        registration.differentiable_once, registration.fresh, registration.other,
        registration.promoted, registration.readable, registration.uncast,
        registration.viewed,
    ):  # fmt: skip
        names[helper.__name__] = helper
    return names | op.overrides
