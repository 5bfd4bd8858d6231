"""The search space of ``early_linear``: the tiles of ``matmul``, blocks that share an SM, and second tiles."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

from tilekern.kernels.matmul import product as matmul
from tilekern.kernels.matmul import space as single
from tilekern.kernels.skinny.tiles import is_exact
from tilekern.spec import ITEM_BYTES, Config, Constraint, Problem, Space, Value, cdiv
from tilekern.spec.targets import INTERPRETED, Target

# A thread of a block with a second tile adds up to 160 numbers; one of ``matmul`` has 128 at most.
_SUMS_A_THREAD = 160
# The most sums of a single tile.
_LARGEST = 128 * 256
# A second tile is for results of which a block then has this share of the work at most.
_SHARE = 0.8
# Sums of so few terms take less time than storing them.
_SHALLOW = 256


def count(problem: Problem, config: Config) -> int:
    """Count the blocks' shares of the result."""
    return cdiv(problem["rows"], config["tile_m"]) * cdiv(problem["columns"], _width(config))


def _width(config: Config) -> int:
    return int(config["tile_n"] + config["more_n"])


def _sums(config: Config) -> int:
    """Count the sums of a block's share."""
    return int(config["tile_m"]) * _width(config)


def _axes(problem: Problem) -> dict[str, list[Value]]:
    return {
        "schedule": ["block", "persistent"],
        "tile_m": single.sides(problem["rows"]),
        "tile_n": single.sides(problem["columns"]),
        "more_n": [0, 64, 32],
        "tile_k": [64, 32, 128],
        "group_m": [8, 1, 16],
        "occupancy": [1, 2],
        "num_worker_warps": [0, 8],
        "latency": [0, 6],
    }


def _of_matmul(problem: Problem) -> Problem:
    """Return the problem of ``matmul`` with the same result."""
    return problem.but(a_transposed=False, b_transposed=True, silu=False, accumulated=False)


def _alone(config: Config) -> Config:
    """Return a config of ``matmul`` as one without a second tile."""
    return Config(
        schedule=config["schedule"], tile_m=config["tile_m"], tile_n=config["tile_n"], more_n=0,
        tile_k=config["tile_k"], group_m=config["group_m"], occupancy=config["occupancy"],
        num_worker_warps=config["num_worker_warps"], latency=config["latency"],
    )  # fmt: skip


def generic(problem: Problem) -> Config:
    """Return a small tile that any GPU holds, on any grid; eight warps share its loads of single elements."""
    return _alone(matmul.SPEC.generic(_of_matmul(problem)))


Holds = Callable[[Problem, Config, Target], bool]


def _of_all(reason: str, holds: Holds) -> Constraint:
    """Make a constraint on configs beside the generic one, which serves what no other does."""
    return Constraint(
        reason, lambda problem, config, target: config == generic(problem) or holds(problem, config, target)
    )


def _of_single(constraint: Constraint) -> Constraint:
    """Return a constraint of ``matmul`` for configs without a second tile."""

    def holds(problem: Problem, config: Config, target: Target) -> bool:
        if config["more_n"] or _shares_an_sm(problem, config, target):
            return True
        known = config.but(implementation="tile", num_ctas=1, sums_begin="zero")
        return constraint.holds(_of_matmul(problem), known, target)

    return _of_all(constraint.reason, holds)


def _of_pairs(reason: str, holds: Holds) -> Constraint:
    """Make a constraint on configs with a second tile."""
    return Constraint(reason, lambda problem, config, target: not config["more_n"] or holds(problem, config, target))


def _shares_an_sm(problem: Problem, config: Config, target: Target) -> bool:
    """Tell whether a block stores its tile while another on its SM multiplies; persistent blocks of 128 x 128 spill."""
    large = config.but(tile_m=128, tile_n=128)
    if config["occupancy"] != 2 or not target.has_tma or count(problem, large) < 2 * target.sm_count:
        return False
    usual = config.but(tile_k=64, group_m=8, num_worker_warps=0, latency=0)
    small = problem["inner"] <= _SHALLOW and _sums(config) == 64 * 128
    return config == usual and (small or config == large.but(schedule="block"))


def _loops(problem: Problem, config: Config, target: Target) -> bool:
    """Tell whether blocks loop for a reason; for ``matmul`` tiles of 128 elements of depth always do."""
    if config["tile_k"] == 128:
        return True
    resident = target.sm_count * config["occupancy"]
    return bool(config["schedule"] == "block" or count(problem, config) > resident or target == INTERPRETED)


def _is_alone(problem: Problem, config: Config, target: Target) -> bool:
    return bool(config["schedule"] == "block" and config["group_m"] == 8 and config["occupancy"] == 1)


def _is_worth_it(problem: Problem, config: Config, target: Target) -> bool:
    """Tell whether all blocks run at once, and each has less to do than in any way of single tiles that do so."""
    if target == INTERPRETED:
        return True
    sides = itertools.product(single.sides(problem["rows"]), single.sides(problem["columns"]))
    singles = (config.but(tile_m=m, tile_n=n, more_n=0) for m, n in sides)
    at_once = [_sums(one) for one in singles if count(problem, one) <= target.sm_count and _sums(one) <= _LARGEST]
    most = _SHARE * min(at_once, default=math.inf)
    return target.has_tma and count(problem, config) <= target.sm_count and _sums(config) <= most


def _holds_sums(problem: Problem, config: Config, target: Target) -> bool:
    if target.has_tensor_memory:
        return bool(config["tile_m"] >= 128)
    return _sums(config) <= 32 * int(config["num_worker_warps"] or 4) * _SUMS_A_THREAD


def _fits_shared(problem: Problem, config: Config, target: Target) -> bool:
    numbers = 2 * (config["tile_m"] + _width(config)) * config["tile_k"] + _sums(config)
    return bool(numbers * ITEM_BYTES[problem["dtype"]] <= target.shared_bytes)


SPACE = Space(
    _axes,
    (
        _of_all("float32 products run on a GPU's scalar units, since TF32 would round the inputs", is_exact),
        _of_all("blocks loop if there are more tiles than stay resident", _loops),
        *map(_of_single, single.SPACE.constraints),
        _of_pairs("a second tile is narrower", lambda problem, config, target: config["more_n"] < config["tile_n"]),
        _of_pairs("blocks with a second tile run all at once, each on an SM of its own", _is_alone),
        _of_pairs(
            "a second tile pays where TMA brings operands, and no SM then has as much to do as by single tiles",
            _is_worth_it,
        ),
        _of_pairs("the sums exceed the registers of the warps that add; tensor memory takes 128 rows", _holds_sums),
        _of_pairs("two stages of operands and the result exceed shared memory", _fits_shared),
        _of_pairs(
            "64 elements are the 128 bytes that TMA swizzles; 128 are for small tiles",
            lambda problem, config, target: (
                config["tile_k"] == 64 or (config["tile_k"] == 128 and _sums(config) <= 64 * 128)
            ),
        ),
        _of_pairs(
            "eight warps are two groups of Hopper's four, with 64 rows each",
            lambda problem, config, target: config["num_worker_warps"] == (8 if config["tile_m"] >= 128 else 0),
        ),
    ),
)


def _pairs(problem: Problem) -> Iterator[Config]:
    """Yield a config of each second tile."""
    for m, n, more in itertools.product(single.sides(problem["rows"]), single.sides(problem["columns"]), (64, 32)):
        yield Config(
            schedule="block", tile_m=m, tile_n=n, more_n=more, tile_k=64, group_m=8, occupancy=1,
            num_worker_warps=8 if m in (128, 256) else 0, latency=0,
        )  # fmt: skip


def default(problem: Problem, target: Target) -> Config:
    """Return the second tile that leaves a block the least to do, or the default of ``matmul`` if none pays."""
    if not is_exact(problem, generic(problem), target):
        return generic(problem)
    if target != INTERPRETED:
        pairs = [config for config in _pairs(problem) if SPACE.violated(problem, config, target) is None]
        if pairs:
            return min(pairs, key=_sums)
    found = _alone(matmul.SPEC.default(_of_matmul(problem), target))
    return found if _loops(problem, found, target) else found.but(schedule="block")
