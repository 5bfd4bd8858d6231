"""Gradients of normed and rotated heads in CuTe DSL: search space and launches.

The device code is :mod:`tilekern.kernels.cute.heads`: the threads of a warp share heads, a block has ``warps`` of them,
a thread takes ``together`` heads of a token in one step, and ``ahead`` steps are loaded ahead.
"""

from __future__ import annotations

from typing import Any

from tilekern.kernels.families.cute_configs import MOST_REGISTERS, NOT_INTERPRETED, WARP, vector_of
from tilekern.kernels.tiles import grid_of, power_of_two
from tilekern.spec import (
    ITEM_BYTES,
    ArrayParameter,
    Config,
    Constraint,
    CuteKernel,
    Problem,
    ScalarParameter,
    Space,
    Value,
    cdiv,
)
from tilekern.spec.targets import Target

_KERNEL = "tilekern.kernels.cute.heads:Heads"
# Registers of a thread for addresses and the like.
_OWN_REGISTERS = 24
# Heads that an SM's warps have in flight, counting the heads that each warp takes at once: fewer leave the memory idle,
# and more gain nothing.
_LEAST_LOADS, _MOST_LOADS = 12, 24


def _threads(problem: Problem) -> int:
    """Return the threads that share a head, one a vector of a half; 0 unless a half is 2^n whole vectors."""
    threads, rest = divmod(problem["head_dim"] // 2, vector_of(problem))
    return threads if rest == 0 and 1 <= threads == power_of_two(threads) <= WARP else 0


def _axes(problem: Problem) -> dict[str, list[Value]]:
    return {
        "implementation": ["cute"],
        "schedule": ["persistent"],
        "warps": [4, 8] if _threads(problem) else [],
        "together": [1, 2],
        "ahead": [1, 2],
        # One block of 8 warps equals two of 4, and four of 4 equal two of 8; their grids would need sums of sizes that
        # no other config needs.
        "occupancy": [2, 3],
    }


def _registers(problem: Problem, config: Config) -> int:
    # For both halves in float32: x, dz and its product with the weight, the weight and its sums; then the values loaded
    # ahead, in their stored dtype.
    of_halves = 2 * vector_of(problem)
    loaded = config["together"] * 2 * ITEM_BYTES[problem["dtype"]] + ITEM_BYTES[problem["angle_dtype"]]
    return int(_OWN_REGISTERS + of_halves * (5 + config["ahead"] * loaded / 4))


def _fits_registers(problem: Problem, config: Config, target: Target) -> bool:
    most = target.registers // (WARP * config["warps"] * config["occupancy"])
    return _registers(problem, config) <= min(most, MOST_REGISTERS)


def _has_enough_loads(config: Config) -> bool:
    loads = config["warps"] * config["occupancy"] * config["together"] * config["ahead"]
    return bool(_LEAST_LOADS <= loads <= _MOST_LOADS)


SPACE = Space(
    _axes,
    (
        NOT_INTERPRETED,
        Constraint(
            "threads take several heads of a token where its heads are that many steps of a warp",
            lambda problem, config, target: (
                config["together"] == 1 or problem["heads"] % (WARP // _threads(problem) * config["together"]) == 0
            ),
        ),
        Constraint(
            f"the warps of an SM load {_LEAST_LOADS} to {_MOST_LOADS} steps of heads ahead",
            lambda problem, config, target: _has_enough_loads(config),
        ),
        Constraint(
            "what a thread holds of its heads exceeds its registers at this occupancy",
            _fits_registers,
        ),
    ),
)


def implement(
    function: Any, parameters: tuple[ArrayParameter | ScalarParameter, ...], dependent: bool, problem: Problem,
    config: Config,
) -> CuteKernel:  # fmt: skip
    """Return the kernel of a config of the space."""
    at_once = config["warps"] * (WARP // _threads(problem)) * config["together"]

    def grid(sizes: Problem, sm_count: int) -> int:
        tokens = sizes["batch"] * sizes["tokens"]
        steps = sum(cdiv(tokens * sizes[heads], at_once) for heads in ("heads", "kv_heads"))
        # At least one block is for q, and one for k.
        return max(2, grid_of(steps, config, sm_count))

    return CuteKernel(
        function=function,
        kernel=_KERNEL,
        parameters=parameters,
        constants=(
            ("heads", problem["heads"]),
            ("kv_heads", problem["kv_heads"]),
            ("half", problem["head_dim"] // 2),
            ("vector", vector_of(problem)),
            ("together", config["together"]),
            ("ahead", config["ahead"]),
            ("occupancy", config["occupancy"]),
        ),
        grid=grid,
        block=WARP * config["warps"],
        dependent=dependent,
    )
