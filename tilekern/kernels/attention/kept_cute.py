"""dk and dv of attention by tiles of keys, and dS for dq, in CuTe DSL for Hopper: search space and launches.

The device code is :mod:`tilekern.kernels.cute.attention_keys`, and for heads of 256
:mod:`tilekern.kernels.cute.attention_keys_wide`: a block owns some keys, and streams queries through a ring of
``stages`` tiles in shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
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

# A warpgroup that loads, and two that compute.
_THREADS = 3 * 128
# Descriptors of q, dout, k and v; the last two only if no registers hold all of k and v.
DESCRIPTORS, DESCRIPTOR_BYTES = 4, 128
# The system's share of the shared memory of each block.
_RESERVED_BYTES = 1 << 10


@dataclass(frozen=True)
class _Form:
    """How heads of one size are computed.

    Attributes:
        kernel: the class of the device code.
        queries: queries of a tile.
        keys: keys of a block.
        held: columns of k and v in registers.
        copied_bytes: bytes of P on its way from one warpgroup to the other.
        stages: counts of tiles in the ring to choose from.
    """

    kernel: str
    queries: int
    keys: int
    held: int
    copied_bytes: int
    stages: tuple[int, ...]


_CUTE = "tilekern.kernels.cute"
# By the elements of a head.
_FORMS = {
    64: _Form(f"{_CUTE}.attention_keys:AttentionKeys", 64, 128, 64, 0, (4, 6)),
    128: _Form(f"{_CUTE}.attention_keys:AttentionKeys", 64, 128, 0, 0, (3, 4)),
    256: _Form(f"{_CUTE}.attention_keys_wide:WideAttentionKeys", 32, 64, 192, 32 * 64 * 4, (5, 6)),
}


def shared_bytes(depth: int, stages: int) -> int:
    """Count the bytes of what a block of heads of ``depth`` elements has in shared memory.

    They are k and v, P on its way, descriptors, barriers, and for each stage q, dout, lse, delta, notes and two
    barriers.
    """
    form = _FORMS[depth]
    owned = 2 * form.keys * (depth - form.held) * 2
    notes = 1 + form.keys // 64
    stage = 2 * form.queries * depth * 2 + 2 * form.queries * 4 + (notes + 2) * 8
    return owned + form.copied_bytes + DESCRIPTORS * DESCRIPTOR_BYTES + stages * stage + 9 * 8


def _is_served(problem: Problem) -> bool:
    """Return whether the device code serves a problem: whole groups of heads, half numbers, not packed."""
    whole = problem["heads"] % problem["kv_heads"] == 0
    return problem["head_dim"] in _FORMS and whole and not problem["packed"] and problem["dtype"] != "float32"


def _axes(problem: Problem) -> dict[str, list[Value]]:
    form = _FORMS.get(problem["head_dim"], _FORMS[128])
    return {
        "implementation": ["cute"],
        "schedule": ["block"],
        "tile_m": [form.queries],
        "tile_n": [form.keys],
        "num_worker_warps": [8],
        "stages": list(form.stages) if _is_served(problem) else [],
    }


SPACE = Space(
    _axes,
    (
        NOT_INTERPRETED,
        Constraint("the matrix units of Hopper are needed", lambda problem, config, target: target.has_wgmma),
        Constraint(
            "the stages exceed the shared memory",
            lambda problem, config, target: (
                shared_bytes(problem["head_dim"], config["stages"]) + _RESERVED_BYTES <= target.shared_bytes
            ),
        ),
    ),
)


def implement(
    function: Any, parameters: tuple[ArrayParameter | ScalarParameter, ...], problem: Problem, config: Config
) -> CuteKernel:
    """Return the kernel of a config of the space."""
    form = _FORMS[problem["head_dim"]]
    given = {name: problem[name] for name in ("heads", "kv_heads", "apart", "causal", "capped")}
    chosen = {name: config[name] for name in ("tile_m", "tile_n", "stages")}
    owners = problem["heads" if problem["apart"] else "kv_heads"]
    return CuteKernel(
        function=function,
        kernel=form.kernel,
        parameters=parameters,
        constants=tuple((given | chosen | {"depth": problem["head_dim"], "held": form.held}).items()),
        grid=lambda sizes, sm_count: sizes["batch"] * owners * cdiv(sizes["keys"], form.keys),
        block=_THREADS,
        shared_bytes=shared_bytes(problem["head_dim"], config["stages"]),
    )
