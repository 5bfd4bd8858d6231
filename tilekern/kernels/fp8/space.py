"""The GPUs that have e4m3, and the search space of products: tiles of twice the depth of those of half types.

On Hopper a step's sums are added to those before in registers, so a tile has half of the sums of one of bfloat16.
"""

from __future__ import annotations

from tilekern.errors import InputError
from tilekern.kernels.matmul.space import (
    elements,
    holds_sums,
    is_square_enough,
    is_tile,
    of_tiles,
    one_for_library,
    sides,
    unit_of,
)
from tilekern.spec import Config, Constraint, Problem, Space, Value, cdiv
from tilekern.spec.targets import Target

HAS_FP8 = Constraint(
    "8-bit floats need a GPU of sm_90 or newer", lambda problem, config, target: target.has_fp8
)  # fmt: skip


def check_target(target: Target) -> None:
    """Refuse a GPU for which no kernel of 8-bit floats compiles.

    Raises:
        InputError: it is older than sm_90.
    """
    if not target.has_fp8:
        raise InputError(f"{HAS_FP8.reason}; {target.name} is {target.arch}")


def threads(config: Config) -> int:
    """Return the threads that compute."""
    return 32 * int(config["num_worker_warps"] or 4)


def sizes_of(problem: Problem) -> tuple[int, int, int]:
    """Return the rows and columns of the result, and the length of the sums."""
    rows, inner, columns = problem["rows"], problem["inner"], problem["columns"]
    return (inner, columns, rows) if problem["over_rows"] else (rows, columns, inner)


def tiles(problem: Problem, config: Config) -> int:
    """Count the tiles of the result."""
    m, n, _ = sizes_of(problem)
    return cdiv(m, config["tile_m"]) * cdiv(n, config["tile_n"])


def _axes(problem: Problem) -> dict[str, list[Value]]:
    m, n, _ = sizes_of(problem)
    return {
        "implementation": ["tile", "torch"],
        "schedule": ["persistent", "block"],
        "tile_m": sides(m),
        "tile_n": sides(n),
        "tile_k": [128, 64],
        "group_m": [8, 16],
        "occupancy": [1, 2],
        "num_ctas": [1, 2],
        "num_worker_warps": [0, 8],
    }


def _library_takes(problem: Problem, config: Config, target: Target) -> bool:
    _, n, k = sizes_of(problem)
    fits = n % 16 == 0 and k % 16 == 0 and problem["dtype"] == "bfloat16"
    return is_tile(config) or fits


def _holds_both(problem: Problem, config: Config, target: Target) -> bool:
    """Return whether the registers hold the sums, and on Hopper those of a step beside them."""
    most = 64 * 256 if config["num_worker_warps"] else 32 * 128
    return unit_of(target) != "wgmma" or bool(elements(config) * config["occupancy"] <= most)


def _fits_shared(problem: Problem, config: Config, target: Target) -> bool:
    stage = (config["tile_m"] + config["tile_n"]) * config["tile_k"] // config["num_ctas"]
    return bool(2 * stage * config["occupancy"] <= target.shared_bytes)


def _is_large(problem: Problem, target: Target) -> bool:
    m, n, _ = sizes_of(problem)
    return min(m, n) >= 128 and cdiv(m, 128) * cdiv(n, 128) >= 2 * target.sm_count


def _suits_size(problem: Problem, config: Config, target: Target) -> bool:
    if _is_large(problem, target):
        least = 128 * 64 if unit_of(target) == "mma" else 128 * 128
        return elements(config) * config["num_ctas"] >= least
    return elements(config) <= 128 * 64 or 4 * tiles(problem, config) * config["num_ctas"] >= target.sm_count


def _shares(problem: Problem, config: Config, target: Target) -> bool:
    return config["occupancy"] == 1 or (elements(config) <= 128 * 64 and not _is_large(problem, target))


def _clusters(problem: Problem, config: Config, target: Target) -> bool:
    large = _is_large(problem, target) and elements(config) >= 128 * 128
    return config["num_ctas"] == 1 or (large and config["schedule"] == "persistent" and unit_of(target) != "mma")


# Products that scale the sums of each step hold them beside those before: so many of each in a thread.
_MOST_SUMS = 64
# Their tiles, the best first, with warps that scale.
STEP_TILES = ((128, 128, 8), (128, 64, 8), (64, 64, 0))


def sums(config: Config) -> int:
    """Count the sums of a tile."""
    return int(config["tile_m"] * config["tile_n"])


def holds_steps(problem: Problem, config: Config, target: Target) -> bool:
    """Tell whether registers hold the sums and those of a step; where operands go through them too, half as many."""
    held = sums(config) * config["occupancy"]
    return bool(held <= _MOST_SUMS * threads(config) and (unit_of(target) != "mma" or held <= 128 * 64))


HOLDS_STEPS = of_tiles(f"a thread holds {_MOST_SUMS} sums and as many of a step", holds_steps)
SPACE = Space(
    _axes,
    (
        HAS_FP8,
        one_for_library(_axes),
        Constraint("torch's product takes multiples of 16, and makes bfloat16", _library_takes),
        of_tiles("the sums exceed the registers of the warps that add, or tensor memory", holds_sums),
        of_tiles(
            "a thread on Hopper holds 64 sums and as many of a step, or 32 of the four warps that load too", _holds_both
        ),
        of_tiles("two stages of operands exceed shared memory", _fits_shared),
        of_tiles("a side of more than twice the other reads more operands for the same work", is_square_enough),
        of_tiles("a small tile on a large problem is bound by operands, a large one on a small idles SMs", _suits_size),
        of_tiles("a second block on an SM is for small tiles of small problems", _shares),
        of_tiles("clusters are for large tiles of large problems, and for operands that TMA brings", _clusters),
    ),
)
# With warps that scale; the first is for tensor memory.
_TILES = ((128, 256, 8), (128, 128, 8), (128, 64, 8), (64, 64, 0))


def _config(tile_m: int, tile_n: int, warps: int) -> Config:
    return Config(
        implementation="tile", schedule="persistent", tile_m=tile_m, tile_n=tile_n, tile_k=128, group_m=8, occupancy=1,
        num_ctas=1, num_worker_warps=warps,
    )  # fmt: skip


def default(problem: Problem, target: Target) -> Config:
    """Return the first tile that gives each SM one, or the smallest.

    Raises:
        InputError: the GPU is older than sm_90.
    """
    check_target(target)
    m, n, _ = sizes_of(problem)
    fitting = [_config(*tile) for tile in _TILES if tile[0] in sides(m) and tile[1] in sides(n)]
    fitting = [config for config in fitting if _holds_both(problem, config, target)]
    if unit_of(target) == "mma":
        wide = [_config(128, 64, 0)] if 128 in sides(m) else []
        fitting = [config.but(schedule="block", tile_k=64) for config in (*wide, _config(64, 64, 0))]
    if unit_of(target) == "tcgen05" and (problem["biased"] or problem["accumulated"]):
        # More than sums and scales spills on eight warps that hold 128 x 256.
        fitting = [config for config in fitting if elements(config) <= 128 * 128]
    return next((config for config in fitting if tiles(problem, config) >= target.sm_count), fitting[-1])


def generic(problem: Problem) -> Config:
    """Return a small tile that any GPU holds; eight warps share its loads of single elements."""
    return _config(64, 64, 8).but(tile_k=64)
