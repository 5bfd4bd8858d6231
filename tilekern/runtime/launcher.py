"""Turns artifacts into kernels for ``ct.launch``; the only file that knows cuda.tile's launcher hook.

``ct.launch`` asks its kernel object for a cubin at each signature that is new to it (the method ``_compile``).
:class:`PrebuiltKernel` answers with the strongest stored variant whose assumptions the signature implies; the choice is
made once for each kind of arguments. The method, and the program in its answer that gives the size of dynamic shared
memory, are private to cuda-tile 1.7 and guarded by contract tests.

The constants of a kernel are in its cubin. A launch passes none, since ``ct.launch`` would inspect each of them every
time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cuda.tile as ct
from cuda.tile._cext import TileDispatcher

from tilekern.errors import NoVariant, TilekernError
from tilekern.spec import ALIGNED, GENERIC, name_of

# The counts in an assumption, by the kind of argument.
_COUNTS: Mapping[str, tuple[str, ...]] = {
    "constant": (),
    "scalar": (),
    "array": ("ndim", "base_bytes", "stride_elements", "extent_elements"),
}


@dataclass(frozen=True)
class Variant:
    """A cubin that can be launched: its bytes, entry symbol and assumptions.

    ``launch`` (:class:`tilekern.cache.Launch`) is None if the cubin states its block and cluster itself.
    """

    name: str
    symbol: str
    assumptions: Sequence[Mapping[str, Any]]
    load: Callable[[], bytes]
    launch: Any = None


class SharedMemory:
    """The dynamic shared memory of a block, as the program of one constant that ``ct.launch`` runs at each launch."""

    def __init__(self, size: int) -> None:
        self.opcodes, self.op_attrs = ["Const"], [size]


class PrebuiltKernel(TileDispatcher):
    """A kernel object for ``ct.launch`` that returns stored cubins and never compiles.

    It is launched with the arrays and scalars of its function, in their order, and without the constants. A cubin that
    does not state its block and cluster is launched with the ``attributes``.

    The generic variant may have been compiled for other constants than the config has, since every implementation is
    correct on any grid.

    Args:
        function: the device function.
        variants: the cubins, the strongest first; all have the same ``launch``.
        otherwise: launched with arguments that no variant allows; None refuses them.
    """

    def __init__(self, function: Any, variants: Sequence[Variant], otherwise: PrebuiltKernel | None = None) -> None:
        self.name, self.otherwise = name_of(function), otherwise
        self.attributes = variants[0].launch if variants else None
        self.shared_bytes = self.attributes.shared_bytes if self.attributes else 0
        self._shared_memory = SharedMemory(self.shared_bytes) if self.shared_bytes else None
        annotations = function._annotated_function.parameter_annotations
        super().__init__(tuple(one for one in annotations if not one.constant))
        self.variants = [replace(one, assumptions=without_constants(one.assumptions)) for one in variants]

    def _compile(
        self,
        signature: Any,
        context: Any,  # noqa: ARG002
        compute_capability: Any = None,  # noqa: ARG002
    ) -> tuple[bytes, str, SharedMemory | None, tuple[()]]:
        for variant in self.variants:
            if implies(signature.parameters, variant.assumptions):
                return variant.load(), variant.symbol, self._shared_memory, ()
        raise NoVariant(
            f"{self.name}: none of the variants {', '.join(v.name for v in self.variants)} "
            f"allows the arguments {signature.parameters}"
        )


def prebuilt(
    function: Any, artifacts: Mapping[str, Any], load: Callable[[str], bytes], names: Sequence[str] = (ALIGNED, GENERIC)
) -> PrebuiltKernel:
    """Return the kernel of a record's artifacts.

    Args:
        function: the device function.
        artifacts: the artifacts by name.
        load: returns the cubin of an artifact.
        names: the artifacts to launch, the one with the strongest assumptions first; one or two.
    """
    first, *others = (
        Variant(name, one.symbol, one.assumptions, functools.partial(load, name), one.launch)
        for name, one in ((name, artifacts[name]) for name in names)
    )
    if all(first.launch == other.launch for other in others):
        return PrebuiltKernel(function, [first, *others])
    return PrebuiltKernel(function, [first], PrebuiltKernel(function, others))


def without_constants(assumptions: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return a variant's assumptions about the arrays and scalars of a launch.

    Raises:
        TilekernError: :func:`implies` cannot read an assumption.
    """
    for assumed in assumptions:
        if not _has_form(assumed):
            raise TilekernError(f"an artifact's assumption {assumed!r:.120} does not have the fields of one")
    return [assumed for assumed in assumptions if assumed["kind"] != "constant"]


def _has_form(assumed: Any) -> bool:
    if not isinstance(assumed, Mapping) or assumed.get("kind") not in _COUNTS:
        return False
    if assumed["kind"] == "array" and type(assumed.get("last_stride_one")) is not bool:
        return False
    is_typed = assumed["kind"] == "constant" or isinstance(assumed.get("dtype"), str)
    return is_typed and all(type(n) is int and n > 0 for n in map(assumed.get, _COUNTS[assumed["kind"]]))


def implies(parameters: Sequence[Any], assumptions: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the launcher's knowledge of the arguments implies a variant's assumptions."""
    return len(parameters) == len(assumptions) and all(map(_allows, parameters, assumptions))


def _allows(parameter: Any, assumed: Mapping[str, Any]) -> bool:
    kind = type(parameter).__name__.removesuffix("Constraint").lower()
    if kind != assumed["kind"]:
        return False
    if kind == "constant":
        return True
    if parameter.dtype.name != assumed["dtype"]:
        return False
    return kind == "scalar" or _allows_array(parameter, assumed)


def _allows_array(parameter: Any, assumed: Mapping[str, Any]) -> bool:
    ndim = assumed["ndim"]
    if parameter.ndim != ndim or parameter.index_dtype != ct.int32 or parameter.may_alias_internally:
        return False
    if any(bound is not None and bound < 0 for bound in parameter.stride_lower_bound_incl):
        return False
    if parameter.base_addr_divisible_by % assumed["base_bytes"]:
        return False
    if assumed["last_stride_one"] and parameter.stride_constant[-1] != 1:
        return False
    if parameter.shape_divisible_by[-1] % assumed["extent_elements"]:
        return False
    strides = zip(parameter.stride_constant[:-1], parameter.stride_divisible_by, strict=False)
    known = (divisor if constant is None else constant for constant, divisor in strides)
    return all(divisor % assumed["stride_elements"] == 0 for divisor in known)
