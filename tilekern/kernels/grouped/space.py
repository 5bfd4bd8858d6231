"""The spec of a grouped product; its search space is the one of a matrix product of an expert's part of the rows.

A tile's rows are stored through a view that ends with the expert's rows. On tcgen05 the compiler refuses to store such
a view by four warps, so eight work there. Units and where they hold their sums are those of
:mod:`tilekern.kernels.matmul.space`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from tilekern.kernels.families.arrays import Arrays, tensors
from tilekern.kernels.families.tables import Table, names_of, spec
from tilekern.kernels.grouped.routing import SLOTS, balanced, shuffled
from tilekern.kernels.matmul.space import (
    Unit,
    blocks,
    elements,
    fits_shared,
    hints,
    holds_sums,
    is_square_enough,
    is_tile,
    of_tiles,
    one_for_library,
    pipelines,
    sides,
    unit_of,
)
from tilekern.spec import (
    ITEM_BYTES,
    Array,
    Config,
    Constraint,
    Dimension,
    KernelSpec,
    LibraryCall,
    Problem,
    ScalarParameter,
    Space,
    Value,
    cdiv,
)
from tilekern.spec.targets import INTERPRETED, Target

# What torch's grouped product asks of strides and addresses.
_LIBRARY_BYTES = 16


def readable(x: Any) -> Any:
    """Copy a tensor unless torch's grouped product reads it: one of its last two strides is 1, others whole 16 bytes.

    A row of its last axis is whole 16 bytes, by the library's constraint.
    """
    strides = x.stride()
    unit = -1 if strides[-1] == 1 else -2
    others = [stride for axis, stride in enumerate(strides) if axis != x.dim() + unit]
    even = all(stride * x.element_size() % _LIBRARY_BYTES == 0 for stride in others)
    if strides[unit] == 1 and even and x.data_ptr() % _LIBRARY_BYTES == 0:
        return x
    import torch

    return x.clone(memory_format=torch.contiguous_format)


def groups_of(problem: Problem) -> int:
    """Count the experts, plus the group of rows without an expert if such rows are possible."""
    return int(problem["experts"] + problem.get("partial", False))


def is_gradient(problem: Problem) -> bool:
    """Return whether sums run over rows, so that each expert's result is a whole matrix: no flag tells of a weight."""
    return "inner_first" not in problem and "turned" not in problem


def extents(problem: Problem) -> tuple[int, int, int]:
    """Return rows and columns of one expert's result, and the length of its sums, if all experts get the same share."""
    rows, inner, columns = max(1, problem["rows"] // problem["experts"]), problem["inner"], problem["columns"]
    return (inner, columns, rows) if is_gradient(problem) else (rows, columns, inner)


def tiles(problem: Problem, config: Config) -> int:
    """Count the tiles of a grid, including places that may be empty."""
    tile_m, across = config["tile_m"], cdiv(problem["columns"], config["tile_n"])
    if is_gradient(problem):
        return int(problem["experts"] * cdiv(problem["inner"], tile_m) * across)
    return int((problem["rows"] // tile_m + groups_of(problem)) * across)


def _axes(problem: Problem) -> dict[str, list[Value]]:
    m, n, _ = extents(problem)
    return {
        "implementation": ["tile", "torch"],
        "schedule": ["persistent", "block"],
        "tile_m": sides(m),
        "tile_n": sides(n),
        "tile_k": [64, 32, 128],
        "group_m": [8, 1],
        "occupancy": [1],
        "num_ctas": [1, 2],
        "num_worker_warps": [0, 8],
        "latency": [0, 6],
    }


def _gathers(problem: Problem) -> bool:
    return any(bool(problem.get(name, False)) for name in ("gathered", "a_gathered", "b_gathered"))


def _is_large(problem: Problem, target: Target) -> bool:
    """Return whether tiles of 128 x 128 fill the GPU twice."""
    m, n, _ = extents(problem)
    return min(m, n) >= 128 and problem["experts"] * cdiv(m, 128) * cdiv(n, 128) >= 2 * target.sm_count


def _has_library(problem: Problem) -> bool:
    """Return whether torch's grouped product takes matrices of these sizes."""
    item = ITEM_BYTES[problem["dtype"]]
    return all(problem[name] * item % _LIBRARY_BYTES == 0 for name in ("inner", "columns"))


def _is_exact(problem: Problem, config: Config, target: Target) -> bool:
    return problem["dtype"] != "float32" or target == INTERPRETED or not _has_library(problem)


def _is_wide_enough(problem: Problem, config: Config, target: Target) -> bool:
    least = 128 * 64 if unit_of(target) == "mma" else 128 * 128
    return elements(config) >= least or not _is_large(problem, target)


def _addresses_rows(problem: Problem, target: Target) -> bool:
    """Return whether registers hold the addresses of gathered rows while other registers hold the sums."""
    return _gathers(problem) and unit_of(target) == "wgmma"


def _suits_depth(problem: Problem, config: Config, target: Target) -> bool:
    small, addresses = elements(config) <= 128 * 128, _addresses_rows(problem, target)
    if config["tile_k"] == 64:
        return small or not addresses
    if addresses or unit_of(target) == "mma":
        return bool(config["tile_k"] == 32)
    return config["tile_k"] == 128 and small and config["num_ctas"] == 1 and config["schedule"] == "persistent"


def _has_its_warps(problem: Problem, config: Config, target: Target) -> bool:
    unit, eight = unit_of(target), config["num_worker_warps"] == 8
    if unit == "tcgen05" and not is_gradient(problem):
        return eight
    few = unit == "mma" or _addresses_rows(problem, target)
    return not eight or elements(config) >= (128 * 128 if few else 128 * 256)


def _clusters(problem: Problem, config: Config, target: Target) -> bool:
    large = _is_large(problem, target) and elements(config) >= 128 * 128 and not _gathers(problem)
    return config["num_ctas"] == 1 or (large and config["schedule"] == "persistent" and unit_of(target) != "mma")


BANDS = of_tiles(
    "bands of 8 rows of tiles; of 1 where blocks stay",
    lambda problem, config, target: config["group_m"] == 8 or config["schedule"] == "persistent",
)
SPACE = Space(
    _axes,
    (
        one_for_library(_axes),
        Constraint(
            "torch's grouped product takes rows of whole 16 bytes",
            lambda problem, config, target: is_tile(config) or _has_library(problem),
        ),
        of_tiles("float32 products run on a GPU's scalar units, since TF32 would round the inputs", _is_exact),
        of_tiles("the sums exceed the registers of the warps that add, or tensor memory", holds_sums),
        of_tiles("two stages of operands exceed shared memory", fits_shared),
        of_tiles("a side of more than twice the other reads more operands for the same work", is_square_enough),
        of_tiles("a small tile on a large problem is bound by operand traffic", _is_wide_enough),
        of_tiles(
            "64 elements are the 128 bytes that TMA swizzles; 128 are for small tiles, 32 for units that read operands "
            "through registers, and for gathered rows on wgmma, whose addresses spill beside many sums",
            _suits_depth,
        ),
        BANDS,
        of_tiles("8 warps are for sums that are too many for 4, and for tcgen05, always", _has_its_warps),
        of_tiles("clusters are for large tiles of large problems, and for operands that TMA brings", _clusters),
        of_tiles("the latency hint gains a stage for Hopper's largest tiles alone", pipelines),
    ),
)


def _config(tile_m: int, tile_n: int, warps: int) -> Config:
    return Config(
        implementation="tile", schedule="persistent", tile_m=tile_m, tile_n=tile_n, tile_k=64, group_m=8, occupancy=1,
        num_ctas=1, num_worker_warps=warps, latency=0,
    )  # fmt: skip


# The best tiles first, with the warps that add.
_TILES: dict[Unit, tuple[tuple[int, int, int], ...]] = {
    "mma": ((128, 128, 8), (64, 128, 0), (64, 64, 0)),
    "wgmma": ((128, 256, 8), (128, 128, 0), (64, 128, 0), (64, 64, 0)),
    "tcgen05": ((128, 256, 8), (128, 128, 8), (64, 128, 8), (64, 64, 8)),
}


def default(problem: Problem, target: Target) -> Config:
    """Return torch if it takes the problem without making the host wait, else :func:`first_tile`.

    On an H200 torch reaches 350 to 520 TFLOP/s in bfloat16.
    """
    if target != INTERPRETED and _has_library(problem) and problem["dtype"] != "float16":
        return Config({name: values[0] for name, values in _axes(problem).items()}).but(implementation="torch")
    return first_tile(problem, target)


def first_tile(problem: Problem, target: Target) -> Config:
    """Return the unit's first tile that gives each SM one, or its smallest."""
    m, n, _ = extents(problem)
    unit = unit_of(target)
    fitting = [_config(*tile) for tile in _TILES[unit] if tile[0] in sides(m) and tile[1] in sides(n)]
    if unit == "mma" or _addresses_rows(problem, target):
        fitting = [config.but(schedule="block", tile_k=32) for config in fitting]
    elif unit == "tcgen05" and is_gradient(problem):
        fitting = [config.but(num_worker_warps=0) for config in fitting]
    return next((config for config in fitting if tiles(problem, config) >= target.sm_count), fitting[-1])


def generic(problem: Problem) -> Config:
    """Return a small tile that any GPU holds; eight warps share its loads of single elements."""
    return _config(64, 64, 8).but(tile_k=32)


# Arrays of the specs.

OFFSETS = Array("offsets", "int32", ("experts",), aligned=False)
# Arrays for gathered rows.
ORDER = (Array("order", "int32", ("rows",), aligned=False), ScalarParameter("slots", "int32", SLOTS))


def dimensions(*flags: str) -> tuple[Dimension, ...]:
    """Return the dimensions: sizes, flags and the dtype."""
    exact = (Dimension(name, "exact") for name in ("inner", "columns", "experts"))
    of_flags = (Dimension(flag, "flag") for flag in flags)
    return Dimension("rows", "bucketed"), *exact, *of_flags, Dimension("dtype", "dtype")


def values(
    dimensions: tuple[Dimension, ...], rows: int, inner: int, columns: int, experts: int, dtype: Any,
    on: Collection[str],
) -> dict[str, Any]:  # fmt: skip
    """Return the values of the dimensions in their order, with the flags in ``on`` set."""
    flags = {d.name: d.name in on for d in dimensions if d.kind == "flag"}
    return {"rows": rows, "inner": inner, "columns": columns, "experts": experts, **flags, "dtype": dtype}


def rows_in(is_gathered: bool) -> str:
    """Return the size of a matrix's rows; a gathered row serves :data:`SLOTS` slots."""
    return "tokens" if is_gathered else "rows"


def _given(more: Any, arrays: Arrays, problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """Draw equal shares, an order, and the kernel's own inputs."""
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
    """Make a spec from its arrays; ``call(problem)`` returns torch's grouped product, which takes the inputs."""
    return spec(
        name, summary, dimensions, arrays, reference,
        function=function,
        library=lambda problem, config: (
            None if is_tile(config) else LibraryCall(call(problem), names_of(arrays(problem)))
        ),
        sizes=lambda problem: {"tokens": cdiv(problem["rows"], SLOTS)},
        constants=constants,
        grid=lambda sizes, config, sm_count: blocks(tiles(sizes, config), config, sm_count),
        hints=hints,
        space=SPACE,
        default=default,
        generic=generic,
        given=lambda problem, generator, device: _given(given, arrays(problem), problem, generator, device),
        flops=lambda problem: 2 * problem["rows"] * problem["inner"] * problem["columns"],
        timed=("zipf",),
        **more,
    )  # fmt: skip
