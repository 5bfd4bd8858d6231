"""The search space of matrix products: tiles for each matrix unit and problem, and the heuristic.

Three kinds of matrix unit differ in the place of a tile's sums and in the threads that add them:

    mma       sm_80 to sm_89, sm_120: registers; operands go through registers too
    wgmma     sm_90: registers of one or two groups of 4 warps; operands in shared memory, by TMA
    tcgen05   sm_100 to sm_110: tensor memory; operands in shared memory, by TMA
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from tilekern.kernels.tiles import power_of_two
from tilekern.spec import ITEM_BYTES, Config, Constraint, Problem, Space, Value, cdiv
from tilekern.spec.targets import INTERPRETED, Target

Unit = Literal["mma", "wgmma", "tcgen05"]
# The most sums in a thread that leave registers for other values; above it the compiler's code spilled.
_SUMS_A_THREAD = {"mma": 64, "wgmma": 128}
_TENSOR_MEMORY = 128 * 512
_SIDES = (64, 128, 256)


def unit_of(target: Target) -> Unit:
    """Return the kind of matrix unit that the compiler uses on a target."""
    if target.has_wgmma:
        return "wgmma"
    return "tcgen05" if target.has_tensor_memory else "mma"


def sizes_of(problem: Problem) -> tuple[int, int, int]:
    """Return the rows and columns of the result, and the length of the sums."""
    rows, inner, columns = problem["rows"], problem["inner"], problem["columns"]
    return (inner, columns, rows) if problem["a_transposed"] else (rows, columns, inner)


def is_tile(config: Config) -> bool:
    """Tell whether a device function, not a library, runs the config."""
    return bool(config["implementation"] == "tile")


def of_tiles(reason: str, holds: Callable[[Problem, Config, Target], bool]) -> Constraint:
    """Make a constraint on configs that a device function runs."""
    return Constraint(reason, lambda problem, config, target: not is_tile(config) or holds(problem, config, target))


def one_for_library(axes: Callable[[Problem], dict[str, list[Value]]]) -> Constraint:
    """Make a constraint that leaves a library, which takes no tile, one config: the first value of each axis."""
    return Constraint(
        "a library takes no tile: one config stands for it",
        lambda problem, config, target: (
            is_tile(config)
            or all(config[name] == values[0] for name, values in axes(problem).items() if name != "implementation")
        ),
    )


def tiles(problem: Problem, config: Config) -> int:
    """Count the tiles of the result."""
    m, n, _ = sizes_of(problem)
    return cdiv(m, config["tile_m"]) * cdiv(n, config["tile_n"])


def blocks(steps: int, config: Config, sm_count: int) -> int:
    """Count the blocks to launch: one a tile, or as many as stay resident; each takes an SM for each of its cluster."""
    resident = sm_count * config["occupancy"] // config["num_ctas"]
    return max(1, min(steps, resident)) if config["schedule"] == "persistent" else steps


def hints(config: Config) -> dict[str, int | None]:
    """Return the compiler hints of a config; 0 leaves a hint to the compiler."""
    return {name: config[name] or None for name in ("occupancy", "num_ctas", "num_worker_warps")}


def sides(size: int) -> list[Value]:
    """Return the sides of tiles that suit a size of the result."""
    return [side for side in _SIDES if side <= max(_SIDES[0], power_of_two(size))]


def _axes(problem: Problem) -> dict[str, list[Value]]:
    m, n, _ = sizes_of(problem)
    return {
        "implementation": ["tile", "cublas"],
        "schedule": ["persistent", "block"],
        "tile_m": sides(m),
        "tile_n": sides(n),
        "tile_k": [64, 32, 128],
        "group_m": [8, 1, 16],
        "occupancy": [1, 2],
        "num_ctas": [1, 2],
        "num_worker_warps": [0, 8],
        "latency": [0, 6],
        # The addend is added after an epilogue, so sums can begin with it only without an epilogue.
        "sums_begin": ["zero", "addend"]
        if problem["accumulated"] and not problem["gelu_tanh"] and not problem["silu"]
        else ["zero"],
    }


def elements(config: Config) -> int:
    """Count the sums of a tile on one SM."""
    return int(config["tile_m"] * config["tile_n"] // config["num_ctas"])


def _is_large(problem: Problem, target: Target) -> bool:
    """Return whether tiles of 128 x 128 fill the GPU twice."""
    m, n, _ = sizes_of(problem)
    return min(m, n) >= 128 and cdiv(m, 128) * cdiv(n, 128) >= 2 * target.sm_count


def _is_exact(problem: Problem, config: Config, target: Target) -> bool:
    return problem["dtype"] != "float32" or target == INTERPRETED


def holds_sums(problem: Problem, config: Config, target: Target) -> bool:
    """Tell whether the adding warps' registers, or tensor memory, hold the sums."""
    unit, sums = unit_of(target), elements(config) * config["occupancy"]
    if unit == "tcgen05":
        return bool(sums <= _TENSOR_MEMORY)
    return bool(sums <= 32 * (config["num_worker_warps"] or 4) * _SUMS_A_THREAD[unit])


def fits_shared(problem: Problem, config: Config, target: Target) -> bool:
    """Tell whether shared memory holds two stages of operands."""
    column = (config["tile_m"] + config["tile_n"]) * ITEM_BYTES[problem["dtype"]] // config["num_ctas"]
    return bool(2 * column * config["tile_k"] * config["occupancy"] <= target.shared_bytes)


def is_square_enough(problem: Problem, config: Config, target: Target) -> bool:
    """Tell whether no side of the tile is more than twice the other."""
    small, large = sorted((config["tile_m"], config["tile_n"]))
    return bool(large <= 2 * small)


def _is_wide_enough(problem: Problem, config: Config, target: Target) -> bool:
    least = 128 * 64 if unit_of(target) == "mma" else 128 * 128
    return elements(config) >= least or not _is_large(problem, target)


def _fills_the_gpu(problem: Problem, config: Config, target: Target) -> bool:
    return elements(config) <= 128 * 64 or 4 * tiles(problem, config) * config["num_ctas"] >= target.sm_count


def _suits_depth(problem: Problem, config: Config, target: Target) -> bool:
    if config["tile_k"] == 64:
        return True
    if unit_of(target) == "mma":
        return bool(config["tile_k"] == 32)
    small = config["num_ctas"] == 1 and elements(config) <= 128 * 128
    return small and config["tile_k"] == 128 and config["schedule"] == "persistent"


def _bands(problem: Problem, config: Config, target: Target) -> bool:
    down = cdiv(sizes_of(problem)[0], config["tile_m"])
    if config["group_m"] == 16:
        return config["tile_m"] <= 128 and down > 8 and config["schedule"] == "persistent"
    return config["group_m"] == 8 or (1 < down <= 8 and config["schedule"] == "persistent")


def _needs_warps(problem: Problem, config: Config, target: Target) -> bool:
    if not config["num_worker_warps"]:
        return True
    if unit_of(target) == "mma":
        return elements(config) >= 128 * 128
    return elements(config) >= 128 * 256 and (unit_of(target) == "wgmma" or config["schedule"] == "persistent")


def _shares_an_sm(problem: Problem, config: Config, target: Target) -> bool:
    small = not _is_large(problem, target) and elements(config) <= 128 * 64
    return config["occupancy"] == 1 or (small and config["schedule"] == "persistent")


def _clusters(problem: Problem, config: Config, target: Target) -> bool:
    large = _is_large(problem, target) and elements(config) >= 128 * 128
    return config["num_ctas"] == 1 or (large and config["schedule"] == "persistent" and unit_of(target) != "mma")


def pipelines(problem: Problem, config: Config, target: Target) -> bool:
    """Tell whether the latency hint is unset, or gains a stage."""
    deep = unit_of(target) == "wgmma" and elements(config) >= 128 * 256
    return not config["latency"] or deep


SPACE = Space(
    _axes,
    (
        one_for_library(_axes),
        of_tiles("float32 products run on a GPU's scalar units, since TF32 would round the inputs", _is_exact),
        of_tiles("the sums exceed the registers of the warps that add, or tensor memory", holds_sums),
        of_tiles("two stages of operands exceed shared memory", fits_shared),
        of_tiles("a side of more than twice the other reads more operands for the same work", is_square_enough),
        of_tiles("a small tile on a large problem is bound by operand traffic", _is_wide_enough),
        of_tiles("a large tile on a small problem leaves three quarters of the SMs idle", _fills_the_gpu),
        of_tiles(
            "64 elements are the 128 bytes that TMA swizzles; 128 are for small tiles in a large shared memory, 32 for "
            "units that read operands through registers",
            _suits_depth,
        ),
        of_tiles(
            "bands of 8 rows of tiles; of 16 where that is up to 2048 rows, of 1 where there are 2 to 8 in all",
            _bands,
        ),
        of_tiles("8 warps are for tiles whose sums or epilogue are too much for 4", _needs_warps),
        of_tiles("a second block on an SM is for small tiles of small problems", _shares_an_sm),
        of_tiles("clusters are for large tiles of large problems, and for operands that TMA brings", _clusters),
        of_tiles("the latency hint gains a stage for Hopper's largest tiles alone", pipelines),
    ),
)


def _config(tile_m: int, tile_n: int, warps: int) -> Config:
    return Config(
        implementation="tile", schedule="persistent", tile_m=tile_m, tile_n=tile_n, tile_k=64, group_m=8,
        occupancy=1, num_ctas=1, num_worker_warps=warps, latency=0, sums_begin="zero",
    )  # fmt: skip


# The best tiles first, with the warps that add. The loop over tiles leaves mma's operands too few registers.
_TILES: dict[Unit, tuple[tuple[int, int, int], ...]] = {
    "mma": ((128, 128, 8), (64, 128, 0), (64, 64, 0)),
    "wgmma": ((128, 256, 8), (128, 128, 0), (64, 128, 0), (64, 64, 0)),
    "tcgen05": ((128, 256, 0), (128, 128, 0), (64, 128, 0), (64, 64, 0)),
}


def default(problem: Problem, target: Target) -> Config:
    """Return cuBLAS for float32, else the unit's first tile that gives each SM one, or its smallest."""
    if problem["dtype"] == "float32" and target != INTERPRETED:
        return Config({name: values[0] for name, values in _axes(problem).items()}).but(implementation="cublas")
    m, n, _ = sizes_of(problem)
    unit = unit_of(target)
    fitting = [_config(*tile) for tile in _TILES[unit] if tile[0] in sides(m) and tile[1] in sides(n)]
    if unit == "mma":
        fitting = [config.but(schedule="block", tile_k=32) for config in fitting]
    elif problem["accumulated"] and (problem["gelu_tanh"] or problem["silu"]):
        # With this many sums the compiler takes 4 s for four warps of tcgen05, and 2 s for eight.
        fitting = [config.but(num_worker_warps=8) if elements(config) >= 128 * 256 else config for config in fitting]
    return next((config for config in fitting if tiles(problem, config) >= target.sm_count), fitting[-1])


def generic(problem: Problem) -> Config:
    """Return a small tile that any GPU holds; eight warps share its loads of single elements."""
    return _config(64, 64, 8).but(tile_k=32)
