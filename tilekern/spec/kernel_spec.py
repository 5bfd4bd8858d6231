"""Kernels declared as data, read by the tuner, the compiler, dispatch, the interpreter and the benchmarks.

A :class:`KernelSpec` states a kernel's problem dimensions, its search space, how a (problem, config) pair is launched,
its reference and the bytes it must move. Nothing here imports torch or touches a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from tilekern.spec.points import Config, Problem, Value
from tilekern.spec.space import Space

if TYPE_CHECKING:
    from tilekern.spec.targets import Target

# The largest size that a problem's key can have in a cache's paths.
_LARGEST = 10**18 - 1
DTYPES = ("bfloat16", "float16", "float32")
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int8": 1, "int32": 4, "int64": 8, "float8_e4m3fn": 1}
ALIGNED, GENERIC = "aligned", "generic"
# A record's artifact of the kernel that gives a row the same bits at every number of rows, if that is not the winner's.
INVARIANT = "invariant"


def variant_of(artifact: str) -> str:
    """Return the variant that a record's artifact is compiled as, by the artifact's name in the record."""
    return ALIGNED if artifact == INVARIANT else artifact


@dataclass(frozen=True)
class Dimension:
    """One dimension of a problem.

    ``exact`` values are part of the key as they are; ``bucketed`` ones are rounded up to a power of two;
    ``dtype`` is one of :data:`DTYPES`; ``flag`` is a bool.
    """

    name: str
    kind: Literal["exact", "bucketed", "dtype", "flag"]


def bucket(size: int) -> int:
    """Return the bucket of a size: the least power of two that is not below it (1 for 0)."""
    return 1 << max(0, size - 1).bit_length()


def cdiv(numerator: int, denominator: int) -> int:
    """Return the quotient rounded up."""
    return -(-numerator // denominator)


@dataclass(frozen=True)
class ArrayParameter:
    """An array that a device function takes: its name, dtype, rank, and whether it is read or written.

    ``extent`` is the size of the last axis if the problem fixes it: the compiler uses wide loads only if it knows that
    no vector crosses the end of a row. An array that is not ``aligned`` may have any base and any strides with a last
    stride of 1, in the aligned variant too; for example, its rows are as long as an odd sequence.
    ``shape`` is for checks of callers: an axis is None if the problem does not tell its size, and all are if the spec
    does not state its arrays. A ``constant`` may be read before the launch before has ended.
    """

    name: str
    dtype: str
    ndim: int
    extent: int | None = None
    role: Literal["input", "output"] = "input"
    aligned: bool = True
    shape: tuple[int | None, ...] | None = field(default=None, compare=False, repr=False)
    constant: bool = field(default=False, compare=False, repr=False)


@dataclass(frozen=True)
class ScalarParameter:
    """A scalar given at launch time; ``dtype`` is ``float32`` or ``int32``.

    ``sample`` is the value to check and time the kernel with if its family draws the inputs.
    """

    name: str
    dtype: str
    sample: float | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Array:
    """An array that a kernel takes, stated once for all of its problems.

    Attributes:
        name: the parameter of the device function.
        dtype: a dtype, the dimension that has it, or two dimensions with ``*`` between (what torch promotes them to).
        shape: a size for each axis: a number, a dimension, or ``blocks`` for the number of blocks, optionally with a
            factor before it (``2*columns``) or a divisor after it (``head_dim/2``). No sizes is one element.
        role: ``scratch`` is written for another kernel to read, and is not a result.
        aligned: as that of :class:`ArrayParameter`.
        nonnegative: whether the kernel returns NaN for negative numbers, as for a probability; tests and the tuner draw
            none.
        flag: the dimension that says whether the array exists. If it does not, the kernel takes one element with as
            many axes instead, and does not read it.
        constant: whether a dependent kernel reads it before it waits. A caller sees to it that the launch right before
            does not write it, as weights are written by none while a model runs.
    """

    name: str
    dtype: str
    shape: tuple[str, ...]
    role: Literal["input", "output", "scratch"] = "input"
    aligned: bool = True
    nonnegative: bool = False
    flag: str | None = None
    constant: bool = False

    def is_in(self, problem: Problem) -> bool:
        """Return whether a problem has the array."""
        return self.flag is None or bool(problem[self.flag])

    def dtype_in(self, problem: Problem) -> str:
        """Return its dtype in a problem."""
        dtypes = {problem.get(part, part) for part in self.dtype.split("*")}
        return str(dtypes.pop()) if len(dtypes) == 1 else "float32"

    def shape_in(self, problem: Problem, blocks: int = 1) -> tuple[int, ...]:
        """Return its shape in a problem that runs on a number of blocks."""
        if not self.is_in(problem):
            return (1,) * len(self.shape)
        sizes = {**problem, "blocks": blocks}
        return tuple(times * int(sizes.get(name, name)) // by for name, times, by in map(size_of, self.shape))


def outputs_of(
    arrays: Iterable[Array | ScalarParameter],
) -> Callable[[Problem, int], dict[str, tuple[tuple[int, ...], str]]]:
    """Return the :attr:`KernelSpec.outputs` of some arrays."""
    written = [array for array in arrays if isinstance(array, Array) and array.role != "input"]
    return lambda problem, blocks: {a.name: (a.shape_in(problem, blocks), a.dtype_in(problem)) for a in written}


def parameters_of(
    arrays: Iterable[Array | ScalarParameter], dimensions: Iterable[Dimension], problem: Problem
) -> tuple[ArrayParameter | ScalarParameter, ...]:
    """Return the :attr:`DeviceKernel.parameters` of some arrays."""
    kinds = {dimension.name: dimension.kind for dimension in dimensions}

    def size(text: str) -> int | None:
        """Return the size of an axis; that of inputs for checks is no size of the problem."""
        name, times, by = size_of(text)
        known = int(name) if name.isdigit() else problem[name] if name in kinds else None
        return times * known // by if isinstance(known, int) else None

    def parameter(array: Array) -> ArrayParameter:
        last, is_there = size_of(array.shape[-1])[0] if array.shape else "", array.is_in(problem)
        extent = array.shape_in(problem)[-1] if is_there and (kinds.get(last) == "exact" or last.isdigit()) else None
        role: Literal["input", "output"] = "input" if array.role == "input" else "output"
        # Nothing divides the stride of rows of one element.
        aligned = array.aligned and (is_there or len(array.shape) < 2)
        axes = array.shape or ("1",)
        shape = tuple(map(size, axes)) if is_there else (1,) * len(axes)
        return ArrayParameter(
            array.name, array.dtype_in(problem), len(shape), extent, role, aligned, shape, array.constant
        )

    return tuple(array if isinstance(array, ScalarParameter) else parameter(array) for array in arrays)


def python_of(function: Any) -> Any:
    """Return the Python function inside a device function; any other function as it is."""
    return getattr(function, "_pyfunc", function)


def name_of(function: Any) -> str:
    """Return the name of a device function."""
    return str(python_of(function).__name__)


def module_of(function: Any) -> str:
    """Return the dotted name of a device function's module."""
    return str(python_of(function).__module__)


def size_of(text: str) -> tuple[str, int, int]:
    """Return the dimension, the factor and the divisor of a size of :class:`Array`."""
    whole, _, by = text.partition("/")
    times, star, name = whole.rpartition("*")
    return name, int(times) if star else 1, int(by or 1)


@dataclass(frozen=True)
class DeviceKernel:
    """How one config of a spec runs as a kernel: what every backend needs that compiles one.

    Attributes:
        function: the device function in cuTile that takes the arrays and scalars.
        parameters: the arrays and scalars by the device function's own names and in its order.
        constants: compile-time constants by name.
        grid: returns the number of blocks for real sizes and a number of SMs.
        dependent: whether it waits for its predecessor by itself (``grid_dependency_control_wait``), so that it may be
            launched before that has ended (programmatic dependent launch). Before it waits it reads constants alone.
    """

    # The backend that compiles it (:mod:`tilekern.compile.backend`), and whether it launches kernels of other specs.
    backend: ClassVar[str]
    makes_artifact: ClassVar[bool] = True
    composite: ClassVar[bool] = False

    function: Any
    parameters: tuple[ArrayParameter | ScalarParameter, ...]
    constants: tuple[tuple[str, int | float | bool], ...]
    grid: Callable[[Problem, int], int]
    dependent: bool = field(default=False, kw_only=True)

    @property
    def constant_arrays(self) -> frozenset[str]:
        """The names of the arrays that it may read before it waits."""
        return frozenset(p.name for p in self.parameters if isinstance(p, ArrayParameter) and p.constant)


@dataclass(frozen=True)
class Implementation(DeviceKernel):
    """How one config of a spec runs in cuTile: fields of :class:`DeviceKernel`, and compiler hints.

    The constants come after the parameters in the device function's signature, in their order. The implementation of a
    spec's generic config must be right on any one-dimensional grid (a loop over its work in steps of the grid), since
    it is launched on the aligned one's.
    """

    backend: ClassVar[str] = "cutile"

    hints: Mapping[str, int | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Compare the names of parameters and constants with the function's own parameters (1 us).

        Raises:
            TypeError: they differ, or their order does.
        """
        code = getattr(python_of(self.function), "__code__", None)
        if code is None:
            return
        given = (*(parameter.name for parameter in self.parameters), *(name for name, _ in self.constants))
        taken = code.co_varnames[: code.co_argcount]
        if given != taken:
            place = next(n for n, (one, other) in enumerate(zip_longest(given, taken)) if one != other)
            at = [repr(names[place]) if place < len(names) else "nothing more" for names in (taken, given)]
            raise TypeError(
                f"{code.co_name}: parameter {place + 1} of the kernel is {at[0]}, its implementation gives {at[1]}; "
                "name the arrays and scalars, then the constants, as the kernel does and in its order"
            )


@dataclass(frozen=True)
class CuteKernel(DeviceKernel):
    """How one config of a spec runs as a kernel of CuTe DSL; the generic variant beside it is cuTile's.

    It may compile the formulas of ``function``, and its grid is whole clusters.

    Attributes beside those of :class:`DeviceKernel`:
        kernel: its class as ``module:Class``, imported only to compile. It is called with ``function``, ``parameters``,
            and by their names the GPU's ``capability``, ``block``, ``cluster`` and the ``constants``.
        block: threads of a block.
        cluster: blocks of a cluster; 1 for none.
        cooperative: whether all blocks must be resident at once.
        shared_bytes: dynamic shared memory of a block, beside what its cubin says.
    """

    backend: ClassVar[str] = "cute"

    kernel: str
    block: int
    cluster: int = 1
    cooperative: bool = False
    shared_bytes: int = 0


@dataclass(frozen=True)
class LibraryCall:
    """One config of a spec that a library runs (cuBLAS, cuDNN, a sequence of such calls); it makes no artifact.

    The config's ``implementation`` names the library (:mod:`tilekern.compile.library`).

    Attributes:
        call: takes the inputs and returns a tuple of new tensors in the order of the spec's outputs.
        inputs: the names of the inputs, in the order of the call's arguments.
        composite: whether it launches kernels of other specs too; then ``call`` takes a function like
            :func:`tilekern.runtime.dispatch.plan_for` before its inputs.
        updates: the input that the call overwrites with its result and returns.
    """

    backend: ClassVar[str] = "library"
    makes_artifact: ClassVar[bool] = False

    call: Callable[..., tuple[Any, ...]]
    inputs: tuple[str, ...]
    composite: bool = False
    updates: str | None = None

    def grid(self, problem: Problem, sm_count: int) -> int:  # noqa: ARG002
        """Return 0: the library chooses its own grids."""
        return 0

    def bound(self, plan_for: Callable[..., Any], *, in_place: bool = False) -> Callable[..., tuple[Any, ...]]:
        """Return the function of only the inputs; unless ``in_place``, it does not change them."""
        call = functools.partial(self.call, plan_for) if self.composite else self.call
        if in_place or self.updates is None:
            return call
        place = self.inputs.index(self.updates)
        return lambda *given: call(*given[:place], given[place].clone(), *given[place + 1 :])


@dataclass(frozen=True)
class Tolerance:
    """Allowed error: ``relative`` of the norm of the whole output, ``elementwise`` of each element."""

    relative: float
    elementwise: float

    def times(self, factor: float) -> Tolerance:
        """Return the tolerance, wider by a factor."""
        return Tolerance(self.relative * factor, self.elementwise * factor)


# Bounds on ||out - ref|| / ||ref|| and on max|out - ref| / (max|ref| + tiny): a few units in the last place of the
# stored dtype; float32 allows for the order of a sum over some ten thousand terms. tfloat32 is for float32 results of
# products whose two operands have 10 bits of mantissa; a GPU may cut the others off instead of rounding.
TOLERANCES = {
    "bfloat16": Tolerance(relative=4e-3, elementwise=1.6e-2),
    "float16": Tolerance(relative=6e-4, elementwise=2e-3),
    "float32": Tolerance(relative=2e-6, elementwise=1e-5),
    "tfloat32": Tolerance(relative=2e-3, elementwise=4e-3),
}


@dataclass(frozen=True)
class Follower:
    """A kernel that ops launch right after another, on an output of that.

    Candidates are timed together with it, since they decide how many rows they leave and how soon it can begin.

    Attributes:
        kernel: the name of its spec, which has one input array.
        array: the output of the other kernel that it reads.
        dimensions: (problem of the other kernel, its number of blocks) -> its own dimensions by name, with real sizes;
            None if it does not follow so many blocks.
    """

    kernel: str
    array: str
    dimensions: Callable[[Problem, int], dict[str, Value] | None]


@dataclass(frozen=True)
class KernelSpec:
    """A kernel: its dimensions, search space, implementations, inputs, reference and costs.

    Attributes:
        name: unique name, part of the cache's paths.
        summary: one line for people.
        module: dotted name of the module with the device code; its source is digested.
        dimensions: the problem's dimensions, in the order of its key.
        space: the search space.
        implement: (problem, config) -> how it runs; the problem may have real or bucketed sizes.
        default: (problem, target) -> the heuristic config, always inside the space's constraints.
        generic: problem -> the config of the generic variant, chosen to compile fast and run anywhere.
        inputs: (problem, torch generator, device) -> arguments by name for every input array and scalar; imports torch,
            and draws only by ``torch.randn`` and ``torch.rand``, which the tuner's checks replace.
        outputs: (problem, number of blocks) -> (shape, dtype) by name for every output array.
        reference: arguments by name -> expected results by name in float64; imports torch.
        results: outputs by name -> results comparable with the reference (identity unless partial sums are stored).
        bytes_moved: problem -> bytes that must move through device memory (each input read and output written once).
        flops: problem -> floating-point operations.
        result_dtype: problem -> dtype that sets the tolerance, a key of :data:`TOLERANCES`.
        roundings: how many times a result is rounded to that dtype on the way; widens the tolerance.
        inputs_in_l2: whether it runs right after the kernel that wrote its inputs, and is timed with them in L2.
        streamed: whether its launches follow one another in real use, each with other weights or keys, as in decoding:
            they are timed in a row, over copies of the inputs that no L2 holds.
        follower: the kernel that every op launches right after it, if any.
        arrays: the device function's arrays and scalars, in its order.
        variations: other inputs of the same problem by name, for what changes the time without being part of the
            problem, such as how evenly rows are spread over experts. Like ``inputs``, but only those that differ. All
            are checked.
        timed: the variations on which candidates are timed beside ``inputs``; they are ranked by their worst loss
            against the fastest on each.
    """

    name: str
    summary: str
    module: str
    dimensions: tuple[Dimension, ...]
    space: Space
    implement: Callable[[Problem, Config], DeviceKernel | LibraryCall]
    default: Callable[[Problem, Target], Config]
    generic: Callable[[Problem], Config]
    inputs: Callable[[Problem, Any, str], dict[str, Any]]
    outputs: Callable[[Problem, int], dict[str, tuple[tuple[int, ...], str]]]
    reference: Callable[..., dict[str, Any]]
    bytes_moved: Callable[[Problem], int]
    flops: Callable[[Problem], int]
    result_dtype: Callable[[Problem], str]
    results: Callable[[dict[str, Any]], dict[str, Any]] = dict
    roundings: int = 1
    inputs_in_l2: bool = False
    streamed: bool = False
    follower: Follower | None = None
    arrays: tuple[Array | ScalarParameter, ...] = ()
    variations: Mapping[str, Callable[[Problem, Any, str], dict[str, Any]]] = field(default_factory=dict, hash=False)
    timed: tuple[str, ...] = ()

    def problem(self, **values: Value) -> Problem:
        """Return a problem with real sizes, checked against the dimensions.

        Raises:
            ValueError: a dimension is missing or unknown, or its kind does not allow the value.
        """
        names = [dimension.name for dimension in self.dimensions]
        if set(values) != set(names):
            wrong = {"missing": [n for n in names if n not in values], "unknown": [n for n in values if n not in names]}
            said = " and ".join(f"{', '.join(found)} {what}" for what, found in wrong.items() if found)
            raise ValueError(f"{self.name}: expected the dimensions {', '.join(names)}: {said}")
        for dimension in self.dimensions:
            _check(self.name, dimension, values[dimension.name])
        return Problem({name: values[name] for name in names})

    def with_flags_off(self, values: Mapping[str, Value]) -> dict[str, Value]:
        """Return values of dimensions, with flags that are left out off."""
        return {dimension.name: False for dimension in self.dimensions if dimension.kind == "flag"} | dict(values)

    def problem_of(self, values: Mapping[str, Value]) -> Problem | None:
        """Return a record's problem by today's spec, or None if its dimensions were different."""
        try:
            return self.problem(**values)
        except (TypeError, ValueError):
            return None

    def device(self, problem: Problem, config: Config) -> DeviceKernel:
        """Return the implementation of a config that runs a device function.

        Raises:
            TypeError: a library runs the config.
        """
        implementation = self.implement(problem, config)
        if isinstance(implementation, LibraryCall):
            raise TypeError(f"{self.name} {config.key} is a library's call, which has no device function")
        return implementation

    def parameters(self, problem: Problem) -> tuple[ArrayParameter | ScalarParameter, ...]:
        """Return the parameters of the device function, by :attr:`arrays`."""
        return parameters_of(self.arrays, self.dimensions, problem)

    def is_library(self, problem: Problem, config: Config) -> bool:
        """Return whether the config makes no artifact, so that there is nothing to compile."""
        return not self.implement(problem, config).makes_artifact

    def tolerance(self, problem: Problem) -> Tolerance:
        """Return the error that a result of the problem may have."""
        return TOLERANCES[self.result_dtype(problem)].times(self.roundings)

    def bucketed(self, problem: Problem) -> Problem:
        """Return the problem whose record serves ``problem``: bucketed dimensions rounded to their bucket."""
        changes = {d.name: bucket(problem[d.name]) for d in self.dimensions if d.kind == "bucketed"}
        return problem.but(**changes)


def _check(kernel: str, dimension: Dimension, value: Value) -> None:
    if dimension.kind == "dtype":
        if value not in DTYPES:
            raise ValueError(f"{kernel}: {dimension.name} must be one of {', '.join(DTYPES)}, got {value!r}")
    elif dimension.kind == "flag":
        if not isinstance(value, bool):
            raise ValueError(f"{kernel}: {dimension.name} must be True or False, got {value!r}")
    elif isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST:
        raise ValueError(f"{kernel}: {dimension.name} must be a whole number from 1 to {_LARGEST}, got {value!r:.40}")
