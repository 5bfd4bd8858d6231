"""The spec of a grouped product: all that does not depend on which of the two matrices has the experts' rows."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from tilekern.kernels.families.arrays import Arrays, tensors
from tilekern.kernels.families.tables import Table, names_of, spec
from tilekern.kernels.grouped.routing import SLOTS, balanced, shuffled
from tilekern.kernels.grouped.space import SPACE, default, generic, grid, hints
from tilekern.kernels.matmul.space import is_tile
from tilekern.spec import Array, Config, Dimension, KernelSpec, LibraryCall, Problem, ScalarParameter, cdiv

OFFSETS = Array("offsets", "int32", ("experts",), aligned=False)
# Of rows that are read where they are.
ORDER = (Array("order", "int32", ("rows",), aligned=False), ScalarParameter("slots", "int32", SLOTS))


def dimensions(*flags: str) -> tuple[Dimension, ...]:
    """Sizes, flags and the dtype."""
    exact = (Dimension(name, "exact") for name in ("inner", "columns", "experts"))
    of_flags = (Dimension(flag, "flag") for flag in flags)
    return Dimension("rows", "bucketed"), *exact, *of_flags, Dimension("dtype", "dtype")


def values(
    dimensions: tuple[Dimension, ...], rows: int, inner: int, columns: int, experts: int, dtype: Any,
    on: Collection[str],
) -> dict[str, Any]:  # fmt: skip
    """The values of the dimensions in their order, with the flags that ``on`` names set."""
    flags = {d.name: d.name in on for d in dimensions if d.kind == "flag"}
    return {"rows": rows, "inner": inner, "columns": columns, "experts": experts, **flags, "dtype": dtype}


def rows_in(is_gathered: bool) -> str:
    """The size of the rows of a matrix: of :data:`SLOTS` slots each where they are gathered."""
    return "tokens" if is_gathered else "rows"


def _given(more: Any, arrays: Arrays, problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """Equal shares, an order, and ``more`` of this kernel."""
    is_gathered = any(array.name == "order" for array in tensors(arrays))
    order = {"order": shuffled(problem["rows"], generator, device)} if is_gathered else {}
    return {"offsets": balanced(problem, device), **order, **more(problem, generator, device)}


def grouped_spec(
    name: str, summary: str, dimensions: tuple[Dimension, ...], arrays: Table, reference: Callable[..., dict[str, Any]],
    *, function: Callable[[Problem, Config], Any], call: Callable[[Problem], Callable[..., tuple[Any, ...]]],
    constants: Callable[[Problem, Config], dict[str, Any]] = lambda problem, config: {},
    given: Callable[[Problem, Any, str], dict[str, Any]] = lambda problem, generator, device: {},
    **more: Any,
) -> KernelSpec:  # fmt: skip
    """The spec by its arrays; ``call`` gives torch's grouped product of a problem, which takes its inputs."""
    return spec(
        name, summary, dimensions, arrays, reference,
        function=function,
        library=lambda problem, config: (
            None if is_tile(config) else LibraryCall(call(problem), names_of(arrays(problem)))
        ),
        sizes=lambda problem: {"tokens": cdiv(problem["rows"], SLOTS)},
        constants=constants,
        grid=grid,
        hints=hints,
        space=SPACE,
        default=default,
        generic=generic,
        given=lambda problem, generator, device: _given(given, arrays(problem), problem, generator, device),
        flops=lambda problem: 2 * problem["rows"] * problem["inner"] * problem["columns"],
        timed=("zipf",),
        **more,
    )  # fmt: skip
