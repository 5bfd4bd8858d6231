"""Write the keys and values of new tokens into a static cache, and count them: one launch, in place.

The number of tokens in the cache, which is the row of the first new one, is known by the GPU alone. All blocks must
read it before it changes. So each block adds 2^32 to it and gets the former number: its lower half is the row, its
upper half says how many blocks have it already. The last block takes all of that off again, and adds the new tokens.
Tokens outside of the room are counted, not written.

Layout: k and v [batch, kv_heads, tokens, head_dim], keys and values [batch, kv_heads, room, head_dim], any strides;
count [1] int64. ``advance`` is the number of new tokens, or 0 if the cache is to stay as it is: whoever times the
kernel launches it again and again.
"""

from __future__ import annotations

import math
from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.arrays import Arrays
from tilekern.kernels.families.tables import spec
from tilekern.kernels.tiles import ConstBool, ConstInt, grid_of, load, power_of_two
from tilekern.spec import Array, Config, Constraint, Dimension, Problem, ScalarParameter, Space, cdiv

# What a block adds to the count while the launch runs.
_BLOCK = 1 << 32
# A tile of more numbers needs more registers than a copy should.
_MOST = 4096


def _asked(count):
    """Return the former number of tokens, and above it how many blocks had asked for it."""
    # All that blocks tell each other is in this one number, so no other access needs an order.
    return ct.atomic_add(count, (0,), ct.full((), _BLOCK, ct.int64), memory_order=ct.MemoryOrder.RELAXED)


def _loaded(item, k, v, heads, tile_h, width, bounded):
    """Return a token's keys or values of some heads, and where they belong: cache, sequence, token, tile of heads."""
    steps, shape = ct.static_eval(cdiv(heads, tile_h)), ct.static_eval((1, tile_h, 1, width))
    # Of keys and values together, tileiras 13.4 loads one half when the other is about to be stored.
    cache, h, token = item % 2, item // 2 % steps, item // (2 * steps)
    b, t = token // k.shape[2], token % k.shape[2]
    if cache == 0:
        rows = load(k, (b, h, t, 0), shape, bounded, 0, False)
    else:
        rows = load(v, (b, h, t, 0), shape, bounded, 0, False)
    return rows, (cache, b, t, h)


def _stored(rows, place, held, keys, values, bounded):
    cache, b, t, h = place
    row = held.astype(ct.int32) + t
    if (row >= 0) & (row < keys.shape[2]):
        if cache == 0:
            ct.store(keys, (b, h, row, 0), rows, check_bounds=bounded, allow_tma=False)
        else:
            ct.store(values, (b, h, row, 0), rows, check_bounds=bounded, allow_tma=False)


@ct.kernel
def cache_rows(
    k, v, count, advance, keys, values, kv_heads: ConstInt, tile_h: ConstInt, width: ConstInt, bounded: ConstBool,
    persistent: ConstBool,
):  # fmt: skip
    """A token's keys or values of some heads a block, or resident blocks that loop; the layout is the module's."""
    # Its launch overlaps the end of the kernel that writes k and v, and the next one's launch the copy.
    ct.grid_dependency_control_wait()
    ct.grid_dependency_control_launch_dependents()
    if ct.static_eval(persistent):
        held = _asked(count)
        steps = k.shape[0] * k.shape[2] * ct.static_eval(2 * cdiv(kv_heads, tile_h))
        for n in range(ct.bid(0), steps, ct.num_blocks(0)):
            rows, place = _loaded(n, k, v, kv_heads, tile_h, width, bounded)
            _stored(rows, place, held, keys, values, bounded)
    else:
        # The rows are on their way while the count is.
        rows, place = _loaded(ct.bid(0), k, v, kv_heads, tile_h, width, bounded)
        held = _asked(count)
        _stored(rows, place, held, keys, values, bounded)
    blocks = ct.num_blocks(0)
    # A number below zero, of a cache from which too much was cropped, has all bits of the upper half set.
    if (held - held.astype(ct.int32).astype(ct.int64)) // _BLOCK == blocks - 1:
        added = ct.full((), advance, ct.int64) - ct.full((), blocks, ct.int64) * _BLOCK
        ct.atomic_add(count, (0,), added, memory_order=ct.MemoryOrder.RELAXED)


# ``rows`` are the new tokens of all sequences.
DIMENSIONS = (
    Dimension("rows", "bucketed"),
    *(Dimension(name, "exact") for name in ("kv_heads", "head_dim")),
    Dimension("dtype", "dtype"),
)
_NEW = ("batch", "kv_heads", "tokens", "head_dim")
_ARRAYS: Arrays = (
    Array("k", "dtype", _NEW),
    Array("v", "dtype", _NEW),
    Array("count", "int64", ("1",), aligned=False),
    ScalarParameter("advance", "int32", 0),
    Array("keys", "dtype", _NEW, "output"),
    Array("values", "dtype", _NEW, "output"),
)


def _sizes(problem: Problem) -> dict[str, int]:
    """Return sizes of inputs whose tokens fill their cache."""
    tokens = math.gcd(problem["rows"], 4)
    return {"batch": problem["rows"] // tokens, "tokens": tokens}


def _given(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    import torch

    return {"count": torch.zeros(1, dtype=torch.int64, device=device)}


def _constants(problem: Problem, config: Config) -> dict[str, Any]:
    width = power_of_two(problem["head_dim"])
    return {"width": width, "bounded": bool(problem["kv_heads"] % config["tile_h"]) or width != problem["head_dim"]}


def _config(problem: Problem, schedule: str, numbers: int) -> Config:
    """Return the config whose tiles are heads of that many numbers."""
    heads = max(1, numbers // power_of_two(problem["head_dim"]))
    tile_h = min(power_of_two(problem["kv_heads"]), heads)
    return Config(schedule=schedule, tile_h=tile_h, occupancy=1, num_worker_warps=0)


SPEC = spec(
    "cache_rows",
    "the rows of new tokens in a static cache of keys and values, which counts its tokens",
    DIMENSIONS,
    _ARRAYS,
    lambda k, v, count, advance: {"keys": k.double(), "values": v.double()},
    function=cache_rows,
    sizes=_sizes,
    constants=_constants,
    grid=lambda sizes, config, sm_count: grid_of(
        2 * sizes["rows"] * cdiv(sizes["kv_heads"], config["tile_h"]), config, sm_count
    ),
    space=Space(
        lambda problem: {
            "schedule": ["block"],
            "tile_h": [n for n in (1, 2, 4, 8, 16, 32) if n <= power_of_two(problem["kv_heads"])],
            "occupancy": [1],
            "num_worker_warps": [0],
        },
        (
            Constraint(
                "a tile of more than 4096 numbers spills",
                lambda problem, config, target: (
                    config["tile_h"] == 1 or config["tile_h"] * power_of_two(problem["head_dim"]) <= _MOST
                ),
            ),
        ),
    ),
    default=lambda problem, target: _config(problem, "block", 1024),
    generic=lambda problem: _config(problem, "persistent", 512),
    given=_given,
    flops=lambda problem: 2 * problem["rows"] * problem["kv_heads"] * problem["head_dim"],
    dependent=True,
    inputs_in_l2=True,
)
SPECS = (SPEC,)
