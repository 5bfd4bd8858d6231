"""The search space of the grouped products: that of one matrix product for an expert's part of the rows.

A tile's rows are stored through a view that ends with the expert's rows. On tcgen05 the compiler refuses to store such
a view by four warps, so eight work there. Units and where they hold their sums are those of
:mod:`tilekern.kernels.matmul.space`.
"""

from __future__ import annotations

from typing import Any

from tilekern.kernels.matmul.space import (
    Unit,
    elements,
    fits_shared,
    holds_sums,
    is_square_enough,
    is_tile,
    of_tiles,
    pipelines,
    sides,
    unit_of,
)
from tilekern.spec import ITEM_BYTES, Config, Constraint, Problem, Space, Value, cdiv
from tilekern.spec.targets import INTERPRETED, Target

# What torch's grouped product asks of strides and addresses.
_LIBRARY_BYTES = 16


def readable(x: Any) -> Any:
    """A tensor as torch's grouped product reads it: one of its last two strides is 1, the others whole 16 bytes.

    What is not so is copied. A row of its last axis is whole 16 bytes, as the library's constraint has it.
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
    """The experts, and the group of rows that are nobody's where there may be some."""
    return int(problem["experts"] + problem["partial"])


def _is_gradient(problem: Problem) -> bool:
    """Whether the sums run over rows, so that each expert has a whole matrix as its result."""
    return "inner_first" not in problem


def _extents(problem: Problem) -> tuple[int, int, int]:
    """Rows and columns of one expert's result, and the length of its sums, if all experts get the same."""
    rows, inner, columns = max(1, problem["rows"] // problem["experts"]), problem["inner"], problem["columns"]
    return (inner, columns, rows) if _is_gradient(problem) else (rows, columns, inner)


def tiles(problem: Problem, config: Config) -> int:
    """How many tiles a grid goes over, with places that may be empty."""
    tile_m, across = config["tile_m"], cdiv(problem["columns"], config["tile_n"])
    if _is_gradient(problem):
        return int(problem["experts"] * cdiv(problem["inner"], tile_m) * across)
    return int((problem["rows"] // tile_m + groups_of(problem)) * across)


def grid(problem: Problem, config: Config, sm_count: int) -> int:
    """Blocks to launch: one a tile, or as many as stay resident; each takes as many SMs as its cluster has."""
    steps, resident = tiles(problem, config), sm_count * config["occupancy"] // config["num_ctas"]
    return max(1, min(steps, resident)) if config["schedule"] == "persistent" else steps


def hints(config: Config) -> dict[str, int | None]:
    """The compiler hints of a config; 0 leaves a hint to the compiler."""
    return {name: config[name] or None for name in ("occupancy", "num_ctas", "num_worker_warps")}


def _axes(problem: Problem) -> dict[str, list[Value]]:
    m, n, _ = _extents(problem)
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
    """Whether tiles of 128 x 128 fill the GPU twice."""
    m, n, _ = _extents(problem)
    return min(m, n) >= 128 and problem["experts"] * cdiv(m, 128) * cdiv(n, 128) >= 2 * target.sm_count


def _has_library(problem: Problem) -> bool:
    """Whether torch's grouped product takes matrices of these sizes."""
    item = ITEM_BYTES[problem["dtype"]]
    return all(problem[name] * item % _LIBRARY_BYTES == 0 for name in ("inner", "columns"))


def _stands_for_library(problem: Problem, config: Config, target: Target) -> bool:
    first = {name: values[0] for name, values in _axes(problem).items() if name != "implementation"}
    return is_tile(config) or (_has_library(problem) and all(config[name] == first[name] for name in first))


def _is_exact(problem: Problem, config: Config, target: Target) -> bool:
    return problem["dtype"] != "float32" or target == INTERPRETED or not _has_library(problem)


def _is_wide_enough(problem: Problem, config: Config, target: Target) -> bool:
    least = 128 * 64 if unit_of(target) == "mma" else 128 * 128
    return elements(config) >= least or not _is_large(problem, target)


def _addresses_rows(problem: Problem, target: Target) -> bool:
    """Whether registers hold the addresses of gathered rows while others hold the sums."""
    return _gathers(problem) and unit_of(target) == "wgmma"


def _suits_depth(problem: Problem, config: Config, target: Target) -> bool:
    small, addresses = elements(config) <= 128 * 128, _addresses_rows(problem, target)
    if config["tile_k"] == 64:
        return small or not addresses
    if addresses or unit_of(target) == "mma":
        return bool(config["tile_k"] == 32)
    return config["tile_k"] == 128 and small and config["num_ctas"] == 1 and config["schedule"] == "persistent"


def _bands(problem: Problem, config: Config, target: Target) -> bool:
    return config["group_m"] == 8 or config["schedule"] == "persistent"


def _has_its_warps(problem: Problem, config: Config, target: Target) -> bool:
    unit, eight = unit_of(target), config["num_worker_warps"] == 8
    if unit == "tcgen05" and not _is_gradient(problem):
        return eight
    few = unit == "mma" or _addresses_rows(problem, target)
    return not eight or elements(config) >= (128 * 128 if few else 128 * 256)


def _clusters(problem: Problem, config: Config, target: Target) -> bool:
    large = _is_large(problem, target) and elements(config) >= 128 * 128 and not _gathers(problem)
    return config["num_ctas"] == 1 or (large and config["schedule"] == "persistent" and unit_of(target) != "mma")


SPACE = Space(
    _axes,
    (
        Constraint("torch takes no tile: one config stands for it, where rows are whole 16 bytes", _stands_for_library),
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
        of_tiles("bands of 8 rows of tiles; of 1 where blocks stay", _bands),
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
    """torch where it can and the host does not wait for it; else :func:`first_tile`.

    Torch's speed is known, on an H200 350 to 520 TFLOP/s in bfloat16; which tile is faster is for a race to say.
    """
    waits = problem["dtype"] == "float16"
    if target != INTERPRETED and _has_library(problem) and not waits:
        return Config({name: values[0] for name, values in _axes(problem).items()}).but(implementation="torch")
    return first_tile(problem, target)


def first_tile(problem: Problem, target: Target) -> Config:
    """The first tile of the unit's that gives each SM one, or the smallest."""
    m, n, _ = _extents(problem)
    unit = unit_of(target)
    fitting = [_config(*tile) for tile in _TILES[unit] if tile[0] in sides(m) and tile[1] in sides(n)]
    if unit == "mma" or _addresses_rows(problem, target):
        fitting = [config.but(schedule="block", tile_k=32) for config in fitting]
    elif unit == "tcgen05" and _is_gradient(problem):
        fitting = [config.but(num_worker_warps=0) for config in fitting]
    return next((config for config in fitting if tiles(problem, config) >= target.sm_count), fitting[-1])


def generic(problem: Problem) -> Config:
    """A small tile that any GPU holds, with loads of single elements, which eight warps share."""
    return _config(64, 64, 8).but(tile_k=32)
