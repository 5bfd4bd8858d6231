"""Code that the kernels of few rows share: a tile's sums, activations, and the tiles that suit a number of rows."""

from __future__ import annotations

import cuda.tile as ct

from tilekern.kernels.geglu import by_tanh
from tilekern.kernels.swiglu import sigmoid
from tilekern.kernels.tiles import load, power_of_two
from tilekern.spec import ITEM_BYTES, Config, Problem, Value, cdiv
from tilekern.spec.targets import INTERPRETED, Target

# The rows that one tile holds; more rows read the weights again.
MOST_ROWS = 64
_LEAST_ROWS = 8
# Four warps share an instruction of 16 x 8 sums each; for smaller tiles the compiler took scalar units (sm_90, sm_100).
_LEAST_SUMS = 4 * 16 * 8
# Columns of a tile: those of one wgmma, fewer or more.
USUAL = 64
WIDTHS = (USUAL, 32, 16, 128)


def sums(x, weight, up, i, j, first, last, gated, tile_m, tile_n, tile_k, latency):
    """Return the sums of steps ``first`` to ``last`` of x @ weight^T and x @ up^T, [tile_n, tile_m] each."""
    total, factor = ct.zeros((tile_n, tile_m), ct.float32), ct.zeros((tile_n, tile_m), ct.float32)
    for step in range(first, last):
        tokens = load(x, (i, step), (tile_m, tile_k), True, latency, True).transpose()
        total = ct.mma(load(weight, (j, step), (tile_n, tile_k), True, latency, True), tokens, total)
        if ct.static_eval(gated):
            factor = ct.mma(load(up, (j, step), (tile_n, tile_k), True, latency, True), tokens, factor)
    return total, factor


def activated(z, gelu_tanh, silu):
    """Return gelu by tanh, then silu, of float32 tiles, or what of them is on."""
    if ct.static_eval(gelu_tanh):
        z = z * by_tanh(z)[0]
    if ct.static_eval(silu):
        z = z * sigmoid(z)
    return z


def tokens_of(rows: int, tile_n: int) -> int:
    """Return ``tile_m``: the rows padded to 8, 16, 32 or 64, or more if a tile of ``tile_n`` would be too small."""
    return max(min(MOST_ROWS, max(_LEAST_ROWS, power_of_two(rows))), _LEAST_SUMS // tile_n)


def count(problem: Problem, config: Config) -> int:
    """Count the tiles of the result."""
    return cdiv(problem["rows"], config["tile_m"]) * cdiv(problem["columns"], config["tile_n"])


def is_exact(problem: Problem, config: Config, target: Target) -> bool:
    """Tell whether matrix units would not round the inputs, as they do in float32."""
    return problem["dtype"] != "float32" or target == INTERPRETED


def has_tokens(problem: Problem, config: Config, target: Target) -> bool:
    """Tell whether ``tile_m`` is the one of the rows and ``tile_n``."""
    return bool(config["tile_m"] == tokens_of(problem["rows"], config["tile_n"]))


def fits_shared(problem: Problem, config: Config, target: Target) -> bool:
    """Tell whether shared memory holds two stages of operands."""
    across = config["tile_m"] + config["tile_n"] * (2 if problem.get("gated") else 1)
    stage = across * config["tile_k"] * ITEM_BYTES[problem["dtype"]]
    return bool(2 * stage * config["occupancy"] <= target.shared_bytes)


def config_of(rows: int, tile_n: int, **changes: Value) -> Config:
    """Return a config that a device function runs."""
    known: dict[str, Value] = {
        "implementation": "tile", "schedule": "block", "tile_m": tokens_of(rows, tile_n), "tile_n": tile_n,
        "tile_k": 128, "occupancy": 2, "num_worker_warps": 0, "latency": 0,
    }  # fmt: skip
    return Config(known | changes)


TOO_SMALL = "tokens are padded to 8, 16, 32 or 64, and a tile of fewer than 512 sums has no instruction"
TOO_LARGE = "two stages of operands exceed shared memory"
