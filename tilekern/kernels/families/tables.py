"""Kernels of no family: their spec follows from a table of arrays, a few sizes, constants, a grid and a space.

Sizes and dtypes of arrays are dimensions of the problem, or among its ``sizes``: numbers and dtypes that follow from
it. The compiler knows the extent of an array's last axis where that is a dimension or a number, and not one of those.

A constant of the device function with the name of a dimension, of a size or of an axis of the config has that value;
``persistent`` says whether the schedule is. The spec gives the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tilekern.kernels import tiles
from tilekern.kernels.families.arrays import Arrays, bytes_of, drawn, tensors
from tilekern.spec import (
    Array,
    Config,
    Dimension,
    Implementation,
    KernelSpec,
    LibraryCall,
    Problem,
    Space,
    outputs_of,
    parameters_of,
    python_of,
)
from tilekern.spec.targets import Target

Sizes = Callable[[Problem], dict[str, Any]]
Table = Callable[[Problem], Arrays]
# The dimensions of a kernel over matrices of one dtype.
MATRIX = (Dimension("rows", "bucketed"), Dimension("columns", "exact"), Dimension("dtype", "dtype"))


def names_of(arrays: Arrays) -> tuple[str, ...]:
    """The names of the inputs, arrays and scalars, in their order."""
    return tuple(x.name for x in arrays if not isinstance(x, Array) or x.role == "input")


def _stated(arrays: Table, sizes: Sizes, problem: Problem) -> tuple[Arrays, Problem]:
    """The arrays of a problem, and the problem with all sizes of these."""
    known = problem.but(**sizes(problem))
    return arrays(known), known


def _implement(
    function: Any, stated: Any, dimensions: tuple[Dimension, ...], constants: Any, grid: Any, hints: Any,
    dependent: bool, library: Any, problem: Problem, config: Config,
) -> Implementation | LibraryCall:  # fmt: skip
    call: LibraryCall | None = library(problem, config)
    if call is not None:
        return call
    (arrays, known), chosen = stated(problem), function(problem, config)
    parameters, code = parameters_of(arrays, dimensions, known), python_of(chosen).__code__
    values = {**known, **config, "persistent": config["schedule"] == "persistent", **constants(known, config)}
    return Implementation(
        function=chosen,
        parameters=parameters,
        constants=tuple((name, values[name]) for name in code.co_varnames[len(parameters) : code.co_argcount]),
        grid=lambda real, sm_count: grid(real, config, sm_count),
        hints=hints(config),
        dependent=dependent,
    )


def _inputs(given: Any, arrays: Arrays, problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    special: dict[str, Any] = given(problem, generator, device)
    return drawn(tuple(x for x in arrays if x.name not in special), problem, generator, device) | special


def _bytes(arrays: Arrays, problem: Problem) -> int:
    """Of all arrays, but for single elements and those of which each block writes one."""
    return bytes_of([array for array in tensors(arrays) if not {"1", "blocks"}.issuperset(array.shape)], problem)


def _result_dtype(arrays: Arrays, problem: Problem) -> str:
    """The dtype of the first output that is not of whole numbers; float32 where all are."""
    dtypes = [array.dtype_in(problem) for array in tensors(arrays, "output")]
    return next((dtype for dtype in dtypes if not dtype.startswith("int")), "float32")


def spec(
    name: str, summary: str, dimensions: tuple[Dimension, ...], arrays: Table, reference: Callable[..., dict[str, Any]],
    *, function: Callable[[Problem, Config], Any], grid: Callable[[Problem, Config, int], int], space: Space,
    default: Callable[[Problem, Target], Config], generic: Callable[[Problem], Config],
    flops: Callable[[Problem], int], sizes: Sizes = lambda problem: {},
    constants: Callable[[Problem, Config], dict[str, Any]] = lambda problem, config: {},
    given: Callable[[Problem, Any, str], dict[str, Any]] = lambda problem, generator, device: {},
    library: Callable[[Problem, Config], LibraryCall | None] = lambda problem, config: None,
    hints: Callable[[Config], dict[str, int | None]] = tiles.hints, dependent: bool = False,
    bytes_moved: Callable[[Problem], int] | None = None, result_dtype: Callable[[Problem], str] | None = None,
    **more: Any,
) -> KernelSpec:  # fmt: skip
    """The spec of a kernel by its arrays.

    Args:
        arrays: problem with its sizes -> arrays and scalars in the order of the kernel, scalars with their samples.
        function: problem and config -> the device function, in the module where the spec stands.
        grid: real sizes, config and number of SMs -> number of blocks.
        sizes: problem -> what arrays and constants have beside the dimensions.
        constants: problem with its sizes, and config -> the constants that have no value of their name there.
        given: problem with its sizes, generator and device -> those inputs that are not normal numbers or samples.
        library: problem and config -> the library's call of a config that no device function runs.
        hints: config -> compiler hints.
        dependent: as :attr:`Implementation.dependent`.
        bytes_moved: as that of the spec, where it is not each array read or written once.
        result_dtype: as that of the spec, where it is not the first output's.
        more: other fields of the spec.
    """
    stated = functools.partial(_stated, arrays, sizes)
    return KernelSpec(
        name=name,
        summary=summary,
        module=function.__module__,
        dimensions=dimensions,
        space=space,
        implement=lambda problem, config: _implement(
            function, stated, dimensions, constants, grid, hints, dependent, library, problem, config
        ),
        default=default,
        generic=generic,
        inputs=lambda problem, generator, device: _inputs(given, *stated(problem), generator, device),
        outputs=lambda problem, blocks: outputs_of(stated(problem)[0])(stated(problem)[1], blocks),
        reference=reference,
        bytes_moved=bytes_moved or (lambda problem: _bytes(*stated(problem))),
        flops=flops,
        result_dtype=result_dtype or (lambda problem: _result_dtype(*stated(problem))),
        **more,
    )
