"""Choose the largest of each row's logits by many blocks: a long row takes one block tens of microseconds.

``greedy_parts``: each stretch of ``STRETCH`` logits of a row leaves one int64, whose order is that of the choice: the
largest logit, NaN above all, the first of equal ones. The high 32 bits are the logit's float32 as a whole number of the
same order, the low ones are larger for smaller columns. ``greedy_join``: the column of a row's largest. Nothing is
rounded, so the tokens are those of ``greedy`` (:mod:`tilekern.kernels.sample`), which takes a launch less.

Layout: logits [rows, vocabulary], parts [rows, stretches] int64, ids [rows] int64.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.cross_entropy.tiles import columns_of, load_logits
from tilekern.kernels.families import vocabulary as family
from tilekern.kernels.families.tables import spec
from tilekern.kernels.sample import greedy_by_torch
from tilekern.kernels.tiles import ConstBool, each_step, grid_of
from tilekern.spec import Array, Config, Dimension, Problem, Space, cdiv

# 25 blocks a row for GPT-2, 75 for Qwen3: a block loads all of its logits at once, and a join all parts.
STRETCH = 2048
# A float32 as a whole number: that of every NaN, and what turns the order of negative ones.
_NAN, _LEAST = 0x7FFFFFFF, -(1 << 31)
# The low half of a part is this less the column.
_LAST, _MASK = 0x7FFFFFFF, 0xFFFFFFFF
# A step of a join reads a part for each thread of a block. This is below all parts.
_WIDTH = 128
_NONE = -(1 << 63)


def stretches_of(vocabulary: int) -> int:
    """Return the number of parts of a row."""
    return cdiv(vocabulary, STRETCH)


def _part(item, logits, parts):
    row, stretch = item // parts.shape[1], item % parts.shape[1]
    x = load_logits(logits, row, stretch, STRETCH, True, False)
    bits = ct.bitcast(x, ct.int32)
    key = ct.where(ct.isnan(x), _NAN, ct.where(bits < 0, _LEAST - bits, bits))
    # Beyond the vocabulary x is minus infinity, and the column is larger than that of any other.
    packed = (key.astype(ct.int64) << 32) | (_LAST - columns_of(stretch, STRETCH)).astype(ct.int64)
    ct.store(parts, (row, stretch), ct.reshape(ct.max(packed), (1, 1)), allow_tma=False)


@ct.kernel
def greedy_parts(logits, parts, persistent: ConstBool):
    """One stretch of a row a block, or resident blocks that loop."""
    # Its launch overlaps the end of the kernel before it, and the join's its own.
    ct.grid_dependency_control_wait()
    ct.grid_dependency_control_launch_dependents()
    each_step(_part, parts.shape[0] * parts.shape[1], persistent, (logits, parts))


def _join(row, parts, ids):
    best, begun = ct.full((_WIDTH,), _NONE, ct.int64), 0
    # Over ``range`` the compiler unrolls steps, and spills.
    while begun < parts.shape[1]:
        places = begun + ct.arange(_WIDTH, dtype=ct.int32)
        best = ct.maximum(best, ct.gather(parts, (row, places), padding_value=_NONE))
        begun = begun + _WIDTH
    ct.store(ids, (row,), ct.reshape(_LAST - (ct.max(best) & _MASK), (1,)))


@ct.kernel
def greedy_join(parts, ids, persistent: ConstBool):
    """One row a block, or resident blocks that loop."""
    # Its launch overlaps the end of the kernel that writes the parts.
    ct.grid_dependency_control_wait()
    ct.grid_dependency_control_launch_dependents()
    each_step(_join, ids.shape[0], persistent, (parts, ids))


def _halves(parts: Any) -> dict[str, Any]:
    """Return the logits that parts have found, and their places in the stretches."""
    import torch

    keys = parts >> 32
    bits = torch.where(keys < 0, _LEAST - keys, keys).to(torch.int32)
    return {"tops": bits.view(torch.float32).double(), "places": ((_LAST - (parts & _MASK)) % STRETCH).double()}


def reference_parts(logits: Any) -> dict[str, Any]:
    """Return the largest logit of each stretch, and its first place in it."""
    import torch

    count = stretches_of(logits.shape[1])
    pad = (0, count * STRETCH - logits.shape[1])
    stretches = torch.nn.functional.pad(logits, pad, value=float("-inf")).view(-1, STRETCH)
    places = greedy_by_torch(stretches)[:, None]
    tops = stretches.gather(1, places).view(-1, count)
    return {"tops": tops.double(), "places": places.view(-1, count).double()}


def reference_join(parts: Any) -> dict[str, Any]:
    """Return the column of each row's largest part."""
    return {"ids": (_LAST - (parts.amax(1) & _MASK)).double()}


def _drawn(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """Draw parts of which some have equal logits."""
    import torch

    rows, stretches = problem["rows"], problem["stretches"]
    keys = (4 * torch.randn((rows, stretches), generator=generator, device=device)).nan_to_num().clamp(-99, 99).long()
    columns = STRETCH * torch.arange(stretches, device=device) + torch.arange(rows, device=device)[:, None] % STRETCH
    return {"parts": (keys << 32) | (_LAST - columns)}


def _config(schedule: str) -> Config:
    return Config(schedule=schedule, num_worker_warps=0, occupancy=1)


_PARTS, _ROWS = Array("parts", "int64", ("rows", "stretches"), aligned=False), Dimension("rows", "bucketed")

PARTS = spec(
    "greedy_parts",
    "the largest logit of each stretch of each row, with its first place",
    (_ROWS, Dimension("vocabulary", "exact"), Dimension("dtype", "dtype")),
    (Array("logits", "dtype", family.LOGITS), Array("parts", "int64", _PARTS.shape, "output", aligned=False)),
    reference_parts,
    function=greedy_parts,
    sizes=lambda problem: {"stretches": stretches_of(problem["vocabulary"])},
    grid=lambda sizes, config, sm_count: grid_of(sizes["rows"] * stretches_of(sizes["vocabulary"]), config, sm_count),
    space=Space(lambda problem: {"schedule": ["block"], "num_worker_warps": [0, 8], "occupancy": [1]}),
    default=lambda problem, target: _config("block"),
    generic=lambda problem: _config("persistent"),
    flops=lambda problem: problem["rows"] * problem["vocabulary"],
    results=lambda outputs: _halves(outputs["parts"]),
    dependent=True,
    inputs_in_l2=True,
)
JOIN = spec(
    "greedy_join",
    "the place of the largest of each row's parts",
    (_ROWS, Dimension("stretches", "bucketed")),
    (_PARTS, Array("ids", "int64", family.ROWS, "output")),
    reference_join,
    function=greedy_join,
    grid=lambda sizes, config, sm_count: grid_of(sizes["rows"], config, sm_count),
    space=Space(lambda problem: {"schedule": ["block"], "num_worker_warps": [0], "occupancy": [1]}),
    default=lambda problem, target: _config("block"),
    generic=lambda problem: _config("persistent"),
    given=_drawn,
    flops=lambda problem: problem["rows"] * problem["stretches"],
    dependent=True,
    inputs_in_l2=True,
)
SPECS = (PARTS, JOIN)
