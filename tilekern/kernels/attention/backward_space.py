"""Tiles of attention's two backward kernels: the configs of the one that owns keys and of the one that owns queries."""

from __future__ import annotations

from tilekern.kernels.attention.problem import depth_of
from tilekern.spec import ITEM_BYTES, Config, Constraint, Problem, Space, Value
from tilekern.spec.targets import Target


def config_of(tile_m: int, tile_n: int, warps: int, schedule: str = "block") -> Config:
    """A config of the tile kernels, at one block an SM."""
    return Config(
        implementation="tile", schedule=schedule, tile_m=tile_m, tile_n=tile_n, occupancy=1, num_worker_warps=warps,
        latency=0,
    )  # fmt: skip


# Configs in the order in which the default tries them, until one fits; the last one fits everywhere.
_TRIED = {
    "keys": ((64, 128, 8), (64, 64, 8), (64, 64, 4), (32, 32, 8), (16, 16, 8)),
    "queries": ((128, 128, 8), (64, 64, 4), (32, 32, 8), (16, 16, 8)),
}
_SMALLEST = 16


def _axes(problem: Problem) -> dict[str, list[Value]]:
    # Products of float32 run on the ordinary units: few configs, since none is fast.
    plain = problem["dtype"] == "float32"
    small = plain or depth_of(problem) > 256
    tiles: list[Value] = [_SMALLEST, 32] if small else [64, 128] if depth_of(problem) <= 128 else [32, 64]
    return {
        "implementation": ["tile"],
        "schedule": ["block"],
        "tile_m": tiles,
        "tile_n": tiles,
        "occupancy": [1] if plain else [1, 2],
        "num_worker_warps": [4, 8],
        "latency": [0],
    }


def _fits_registers(problem: Problem, config: Config, target: Target, side: str) -> bool:
    rows, columns = (config[name] for name in ("tile_m", "tile_n"))
    sums = rows if side == "queries" else 2 * columns
    values = sums * depth_of(problem) + 2 * rows * columns
    # Blackwell's data-centre GPUs keep accumulators in tensor memory, which dk and dv of long heads do not fit.
    if target.has_tensor_memory:
        long = side == "keys" and depth_of(problem) > 128
        return bool(rows == columns == 32 if long else values <= 256 * 32 * config["num_worker_warps"])
    return bool(values <= 192 * 32 * config["num_worker_warps"])


def _fits_shared(problem: Problem, config: Config, target: Target, side: str) -> bool:
    own, other = (config[name] for name in (("tile_m", "tile_n") if side == "queries" else ("tile_n", "tile_m")))
    row = depth_of(problem) * ITEM_BYTES[problem["dtype"]]
    return bool((2 * own + 4 * other) * row * config["occupancy"] <= target.shared_bytes)


def _least(config: Config) -> bool:
    return bool(config["tile_m"] == config["tile_n"] == _SMALLEST and config["occupancy"] == 1)


def space_of(side: str) -> Space:
    """The space of the kernel whose blocks own tiles of ``side``."""
    constraints = (
        Constraint(
            "a warp's share of the sums, P and dS exceeds its registers",
            lambda problem, config, target: _least(config) or _fits_registers(problem, config, target, side),
        ),
        Constraint(
            "a block's own tiles and two stages of the others exceed its share of the shared memory",
            lambda problem, config, target: _least(config) or _fits_shared(problem, config, target, side),
        ),
        Constraint(
            "two blocks of 8 worker warps leave 80 registers to a thread",
            lambda problem, config, target: config["occupancy"] == 1 or config["num_worker_warps"] == 4,
        ),
    )
    return Space(_axes, constraints)


def _small_side(problem: Problem) -> int:
    """The side of a small tile that compiles in 3 s with packed rows, a window and a cap; eight warps share it."""
    return 32 if depth_of(problem) <= (64 if problem["dtype"] == "float32" else 128) else _SMALLEST


def _is_quick(problem: Problem, config: Config, target: Target) -> bool:
    """Whether a config compiles in 3 s: without large matrix units, products and packed rows are long code."""
    long = problem["dtype"] == "float32" or problem["packed"]
    wide = config["tile_m"] >= 64 and (depth_of(problem) <= 128 or target.has_wgmma)
    return bool(not long or wide or config["tile_m"] <= _small_side(problem))


def generic(problem: Problem) -> Config:
    """Small tiles that eight warps share, for any GPU and any layout."""
    return config_of(_small_side(problem), _small_side(problem), 8, "persistent")


def default(problem: Problem, target: Target, space: Space, side: str) -> Config:
    """The first of the tried configs that the space holds and that compiles in seconds."""
    sizes = {*_axes(problem)["tile_m"], _SMALLEST}
    tried = [config_of(m, n, warps) for m, n, warps in _TRIED[side] if {m, n} <= sizes]
    quick = [config for config in tried[:-1] if _is_quick(problem, config, target)] + tried[-1:]
    return next(config for config in quick if space.violated(problem, config, target) is None)
