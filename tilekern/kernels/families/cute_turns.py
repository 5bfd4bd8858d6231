"""Rotations of heads in CuTe DSL: search space and launches.

The device code is :mod:`tilekern.kernels.cute.turns`: a block has ``threads`` threads, each of which takes ``together``
heads of one token. That of heads which turn by the angles of three positions, :mod:`tilekern.kernels.cute.positions`,
has the same space and the same launch.
"""

from __future__ import annotations

import dataclasses
import math

from tilekern.kernels.families.cute_configs import MOST_REGISTERS, NOT_INTERPRETED, is_cute, vector_of
from tilekern.spec import (
    ITEM_BYTES,
    Config,
    Constraint,
    CuteKernel,
    DeviceKernel,
    KernelSpec,
    LibraryCall,
    Problem,
    Space,
    Value,
    cdiv,
)
from tilekern.spec.targets import Target

_KERNEL = "tilekern.kernels.cute.turns:Turns"
_OF_POSITIONS = "tilekern.kernels.cute.positions:Positions"
# Registers that a thread needs for addresses, a head at work and the like.
_OWN_REGISTERS = 40


def _threads(problem: Problem) -> int:
    """Threads that share a head, one for each vector of a half; 0 where these are not whole ones."""
    threads, rest = divmod(problem["head_dim"] // 2, vector_of(problem))
    return int(threads) if rest == 0 else 0


def _axes(problem: Problem) -> dict[str, list[Value]]:
    threads = _threads(problem)
    return {
        "implementation": ["cute"],
        "schedule": ["block"],
        "threads": [n for n in (64, 128, 256, 512) if 0 < threads <= n],
        "together": [n for n in (1, 2, 4, 8) if problem["heads"] % n == 0],
        # Blocks for which an SM must have registers. Where these may be any number, 0, the compiler saves registers at
        # the expense of loads on their way.
        "occupancy": [1, 0],
    }


def _fits_registers(problem: Problem, config: Config, target: Target) -> bool:
    # Of both halves: the heads as they are stored, and the cosines and sines in float32.
    of_halves = 2 * vector_of(problem)
    held = of_halves * (config["together"] * _read_bytes(problem) / 4 + 2)
    return bool(_OWN_REGISTERS + held <= min(target.registers // config["threads"], MOST_REGISTERS))


def _read_bytes(problem: Problem) -> int:
    """Bytes of an element of the heads that are read."""
    sizes = [ITEM_BYTES[problem[name]] for name in ("dtype", "angle_dtype")]
    return max(sizes) if problem["inverse"] else sizes[0]


SPACE = Space(
    _axes,
    (NOT_INTERPRETED, Constraint("what a thread holds of its heads exceeds its registers", _fits_registers)),
)


def implement(spec: KernelSpec, problem: Problem, config: Config) -> DeviceKernel | LibraryCall:
    """How a config of the space runs; any other one as ``spec``, which has cuTile's alone, says."""
    if not is_cute(config):
        return spec.implement(problem, config)
    made = spec.device(problem, spec.generic(problem))
    heads, kv_heads, together = problem["heads"], problem["kv_heads"], config["together"]
    # As many heads of k as of q, where that divides them.
    kv_together = math.gcd(kv_heads, together)
    at_once = config["threads"] // _threads(problem)

    def grid(sizes: Problem, sm_count: int) -> int:
        tokens = sizes["batch"] * sizes["tokens"]
        steps = heads // together, kv_heads // kv_together
        return max(1, sum(cdiv(tokens * n, at_once) for n in steps))

    return CuteKernel(
        function=made.function,
        kernel=_KERNEL,
        parameters=made.parameters,
        constants=(
            ("heads", heads),
            ("kv_heads", kv_heads),
            ("half", problem["head_dim"] // 2),
            ("vector", vector_of(problem)),
            ("together", together),
            ("kv_together", kv_together),
            ("full", problem["full"]),
            ("inverse", problem["inverse"]),
            ("occupancy", config["occupancy"]),
        ),
        grid=grid,
        block=config["threads"],
        dependent=made.dependent,
    )


def implement_positions(
    spec: KernelSpec, problem: Problem, config: Config
) -> DeviceKernel | LibraryCall:  # fmt: skip
    """As :func:`implement`, for angles of three positions, which both halves of a head share."""
    made = implement(spec, problem.but(full=False), config)
    return dataclasses.replace(made, kernel=_OF_POSITIONS) if isinstance(made, CuteKernel) else made
