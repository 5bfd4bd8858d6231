"""Make the spec of a kernel from a table of arrays, sizes, constants, a grid and a space.

Sizes and dtypes of arrays are dimensions of the problem, or among its ``sizes``: numbers and dtypes that follow from
it. The compiler knows the extent of an array's last axis if that is a dimension or a number, and not one of ``sizes``.

A constant of the device function takes the value of the dimension, the size or the axis of the config with its name;
``persistent`` tells whether the schedule is persistent. The spec gives the others. The families make their specs with
:func:`spec`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilekern.kernels import tiles
from tilekern.kernels.families.arrays import Arrays, bytes_of, drawn, tensors
from tilekern.kernels.families.cute_configs import is_cute
from tilekern.spec import (
    Array,
    Config,
    CuteKernel,
    Dimension,
    Implementation,
    KernelSpec,
    LibraryCall,
    Problem,
    Space,
    module_of,
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
    """Return the names of the inputs, arrays and scalars, in their order."""
    return tuple(x.name for x in arrays if not isinstance(x, Array) or x.role == "input")


def flags_of(names: tuple[str, ...]) -> tuple[Dimension, ...]:
    """Return dimensions that are True or False."""
    return tuple(Dimension(name, "flag") for name in names)


def dimensions_of(arrays: Arrays, flags: tuple[str, ...]) -> tuple[Dimension, ...]:
    """Return rows, columns, their dtype, the weights' dtype if it differs, and flags."""
    weighted = any(array.dtype == "weight_dtype" for array in tensors(arrays))
    return (*MATRIX, *([Dimension("weight_dtype", "dtype")] if weighted else []), *flags_of(flags))


def _bytes(arrays: Arrays, problem: Problem) -> int:
    """Return the bytes of all arrays except single elements and those with one element for each block."""
    return bytes_of([array for array in tensors(arrays) if not {"1", "blocks"}.issuperset(array.shape)], problem)


def spec(
    name: str, summary: str, dimensions: tuple[Dimension, ...], table: Arrays | Table,
    reference: Callable[..., dict[str, Any]], *, function: Any, grid: Callable[[Problem, Config, int], int],
    space: Space, default: Callable[[Problem, Target], Config], generic: Callable[[Problem], Config],
    flops: Callable[[Problem], int], sizes: Sizes = lambda problem: {},
    constants: Callable[[Problem, Config], dict[str, Any]] = lambda problem, config: {},
    given: Callable[[Problem, Any, str], dict[str, Any]] = lambda problem, generator, device: {},
    library: Callable[[Problem, Config], LibraryCall | None] = lambda problem, config: None,
    cute: Callable[..., CuteKernel] | None = None,
    hints: Callable[[Config], dict[str, int | None]] = tiles.hints, dependent: bool = False, **more: Any,
) -> KernelSpec:  # fmt: skip
    """Return the spec of a kernel.

    Args:
        table: arrays and scalars in the order of the kernel, scalars with their samples; or a function that returns
            them for a problem with its sizes.
        function: the device function, or (problem, config) -> the device function; it, or the lambda, stands in the
            spec's module.
        grid: real sizes, config and number of SMs -> number of blocks.
        sizes: problem -> sizes and dtypes that arrays and constants use besides the dimensions.
        constants: (problem with its sizes, config) -> the constants without a dimension, size or axis of the same name.
        given: (problem with its sizes, generator, device) -> the inputs that are not normal numbers or samples.
        library: (problem, config) -> the library's call of a config without a device function.
        cute: (device function, parameters, problem, config) -> the kernel of a config that CuTe DSL compiles.
        hints: config -> compiler hints.
        dependent: see :attr:`Implementation.dependent`.
        more: further fields of the spec; they replace the fields that follow from the arrays.
    """

    def stated(problem: Problem) -> tuple[Arrays, Problem]:
        known = problem.but(**sizes(problem))
        return (table(known) if callable(table) else table), known

    def implement(problem: Problem, config: Config) -> Implementation | CuteKernel | LibraryCall:
        if call := library(problem, config):
            return call
        (arrays, known), chosen = stated(problem), function
        if python_of(function) is function:
            chosen = function(problem, config)
        parameters, code = parameters_of(arrays, dimensions, known), python_of(chosen).__code__
        if cute and is_cute(config):
            return cute(chosen, parameters, problem, config)
        values = {**known, **config, "persistent": config["schedule"] == "persistent", **constants(known, config)}
        names = code.co_varnames[len(parameters) : code.co_argcount]
        return Implementation(
            function=chosen,
            parameters=parameters,
            constants=tuple((name, values[name]) for name in names if name in values),
            grid=lambda real, sm_count: grid(real, config, sm_count),
            hints=hints(config),
            dependent=dependent,
        )

    def inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
        arrays, known = stated(problem)
        special = given(known, generator, device)
        return drawn(tuple(x for x in arrays if x.name not in special), known, generator, device) | special

    def result_dtype(problem: Problem) -> str:
        """Return the dtype of the first floating-point output; float32 if all outputs are integers."""
        arrays, known = stated(problem)
        dtypes = [array.dtype_in(known) for array in tensors(arrays, "output")]
        return next((dtype for dtype in dtypes if not dtype.startswith("int")), "float32")

    fields: dict[str, Any] = {
        "module": module_of(function),
        "outputs": lambda problem, blocks: outputs_of(stated(problem)[0])(stated(problem)[1], blocks),
        "bytes_moved": lambda problem: _bytes(*stated(problem)),
        "result_dtype": result_dtype,
    }
    return KernelSpec(
        name=name, summary=summary, dimensions=dimensions, space=space, implement=implement, default=default,
        generic=generic, inputs=inputs, reference=reference, flops=flops, **fields | more,
    )  # fmt: skip
