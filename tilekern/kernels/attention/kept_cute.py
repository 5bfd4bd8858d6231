"""dk and dv of attention by tiles of keys, and dS for dq, in CuTe DSL for Hopper: search space and launches.

The device code is :mod:`tilekern.kernels.cute.attention_keys`: a block owns 128 keys, and streams queries through a
ring of ``stages`` tiles in shared memory.
"""

from __future__ import annotations

from typing import Any

from tilekern.kernels.families.cute_configs import NOT_INTERPRETED
from tilekern.spec import (
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

_KERNEL = "tilekern.kernels.cute.attention_keys:AttentionKeys"
# Elements of a head, keys of a block, queries of a stage.
DEPTH, KEYS, QUERIES = 128, 128, 64
# A warpgroup that loads, and one for each 64 keys.
_THREADS = 3 * 128
# Two copies of a stage's dS, one for each warpgroup, on their way to memory; the barrier of the block's own tiles.
_OTHER_BYTES = KEYS * QUERIES * 2 + 8
# The system's share of the shared memory of each block.
_RESERVED_BYTES = 1 << 10


def shared_bytes(stages: int) -> int:
    """Count the bytes of a block's k and v, and of stages: q, dout, lse, delta, two notes, two barriers."""
    return 2 * KEYS * DEPTH * 2 + stages * (2 * QUERIES * DEPTH * 2 + 2 * QUERIES * 4 + 4 * 8) + _OTHER_BYTES


def _is_served(problem: Problem) -> bool:
    """Return whether the device code serves a problem: whole groups of heads, half numbers, no options."""
    plain = not problem["capped"] and not problem["packed"] and problem["dtype"] != "float32"
    return bool(plain and problem["head_dim"] == DEPTH and problem["heads"] % problem["kv_heads"] == 0)


def _axes(problem: Problem) -> dict[str, list[Value]]:
    return {
        "implementation": ["cute"],
        "schedule": ["block"],
        "tile_m": [QUERIES],
        "tile_n": [KEYS],
        "num_worker_warps": [8],
        "stages": [3, 4] if _is_served(problem) else [],
    }


SPACE = Space(
    _axes,
    (
        NOT_INTERPRETED,
        Constraint("the matrix units of Hopper are needed", lambda problem, config, target: target.has_wgmma),
        Constraint(
            "the stages exceed the shared memory",
            lambda problem, config, target: shared_bytes(config["stages"]) + _RESERVED_BYTES <= target.shared_bytes,
        ),
    ),
)


def implement(
    function: Any, parameters: tuple[ArrayParameter | ScalarParameter, ...], problem: Problem, config: Config
) -> CuteKernel:
    """Return the kernel of a config of the space."""
    constants = {name: problem[name] for name in ("heads", "kv_heads", "apart", "causal")}
    owners = problem["heads" if problem["apart"] else "kv_heads"]
    return CuteKernel(
        function=function,
        kernel=_KERNEL,
        parameters=parameters,
        constants=(*constants.items(), ("stages", config["stages"])),
        grid=lambda sizes, sm_count: sizes["batch"] * owners * cdiv(sizes["keys"], KEYS),
        block=_THREADS,
        shared_bytes=shared_bytes(config["stages"]),
    )
