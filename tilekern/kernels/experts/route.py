"""Sort the slots of a layer of experts by expert, in a stable order, by two launches.

The first launch counts each expert's slots in each part of ``PART`` slots. The second adds up the counts of all parts,
which gives the ends of the experts' rows, and the counts of the parts before its own, which gives its first row of each
expert; its slots follow from there. Both take ``chunk`` slots at a time, as rows of a matrix [chunk, experts] of zeros
and ones. The host does not wait and nothing is atomic: the order is the same in every run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.arrays import Arrays
from tilekern.kernels.families.tables import spec
from tilekern.kernels.grouped.routing import drawn_experts
from tilekern.kernels.tiles import ConstInt, power_of_two
from tilekern.spec import Array, Config, Constraint, Dimension, KernelSpec, Problem, ScalarParameter, Space, Value, cdiv

# Slots of one block.
PART = 512
# With more experts, a matrix of ones and zeros for 16 slots is long code.
MOST_EXPERTS = 256
_MOST_ELEMENTS = 8192
# Parts whose counts are read at the same time.
_ROWS = 8


def _chosen(ids, step, chunk, width, experts):
    """Return for ``chunk`` slots: ones at chosen experts [chunk, width], the expert or -1, and which slots exist."""
    number = ct.load(ids, (step,), (chunk,), padding_mode=ct.PaddingMode.ZERO, allow_tma=False)
    is_slot = step * chunk + ct.arange(chunk, dtype=ct.int32) < ids.shape[0]
    expert = ct.where(is_slot & (number >= 0) & (number < experts), number, -1).astype(ct.int32)
    lane = ct.reshape(ct.arange(width, dtype=ct.int32), (1, width))
    return ct.where(ct.reshape(expert, (chunk, 1)) == lane, 1, 0), expert, is_slot


def _earlier(expert, chunk):
    """Count for each slot the tile's earlier slots with its expert; in pairs, as a scan of a matrix is long code."""
    number = ct.arange(chunk, dtype=ct.int32)
    is_before = ct.reshape(number, (1, chunk)) < ct.reshape(number, (chunk, 1))
    is_same = ct.reshape(expert, (1, chunk)) == ct.reshape(expert, (chunk, 1))
    return ct.sum(ct.where(is_before & is_same, 1, 0), axis=1)


@ct.kernel
def route_count(ids, experts, counts, width: ConstInt, chunk: ConstInt, part: ConstInt):
    """Count the slots of each part that chose each expert; ids [slots], counts [parts, width]."""
    steps = ct.cdiv(ids.shape[0], chunk)
    for number in range(ct.bid(0), ct.cdiv(ids.shape[0], part), ct.num_blocks(0)):
        total = ct.zeros((chunk, width), ct.int32)
        for step in range(number * (part // chunk), ct.minimum((number + 1) * (part // chunk), steps)):
            ones, _, _ = _chosen(ids, step, chunk, width, experts)
            total = total + ones
        ct.store(counts, (number, 0), ct.sum(total, axis=0, keepdims=True), allow_tma=False)


@ct.kernel
def route_place(ids, counts, experts, offsets, order, ranks, chosen, width: ConstInt, chunk: ConstInt, part: ConstInt):
    """Store the row of each slot, the slot and the expert of each row, and the ends of the experts' rows.

    ids, order, ranks and chosen [slots], counts [parts, width], offsets [experts].
    """
    steps = ct.cdiv(ids.shape[0], chunk)
    for number in range(ct.bid(0), ct.cdiv(ids.shape[0], part), ct.num_blocks(0)):
        total, before = ct.zeros((_ROWS, width), ct.int32), ct.zeros((_ROWS, width), ct.int32)
        # Sums of each step would be twice as much code.
        for step in range(ct.cdiv(counts.shape[0], _ROWS)):
            found = ct.load(counts, (step, 0), (_ROWS, width), padding_mode=ct.PaddingMode.ZERO, allow_tma=False)
            is_before = step * _ROWS + ct.arange(_ROWS, dtype=ct.int32) < number
            total = total + found
            before = before + ct.where(ct.reshape(is_before, (_ROWS, 1)), found, 0)
        total, before = ct.sum(total, axis=0, keepdims=True), ct.sum(before, axis=0, keepdims=True)
        ends = ct.cumsum(total, axis=1)
        if number == 0:
            ct.store(offsets, (0,), ct.reshape(ends, (width,)), allow_tma=False)
        first = ends - total + before
        # Slots without an expert come after all others.
        behind = ct.sum(total) + number * part - ct.sum(before)
        for step in range(number * (part // chunk), ct.minimum((number + 1) * (part // chunk), steps)):
            ones, expert, is_slot = _chosen(ids, step, chunk, width, experts)
            is_left = is_slot & (expert < 0)
            rank = ct.where(is_left, behind, ct.sum(ones * first, axis=1)) + _earlier(expert, chunk)
            place = step * chunk + ct.arange(chunk, dtype=ct.int32)
            ct.scatter(order, rank, place, mask=is_slot)
            ct.scatter(chosen, rank, ct.where(is_left, experts, expert), mask=is_slot)
            ct.store(ranks, (step,), rank, allow_tma=False)
            first = first + ct.sum(ones, axis=0, keepdims=True)
            behind = behind + ct.sum(ct.where(is_left, 1, 0))


def parts(rows: int) -> int:
    """Count the parts of the slots."""
    return cdiv(rows, PART)


def width_of(experts: int) -> int:
    """Return the columns of the matrix of ones and of the counts; those beyond the experts are zeros.

    Fewer than 32 leave threads without an element and are longer code; with 32, rows of counts are aligned.
    """
    return max(32, power_of_two(experts))


def _axes(problem: Problem) -> dict[str, list[Value]]:
    width = width_of(problem["experts"])
    return {
        "schedule": ["persistent"],
        "chunk": [n for n in (16, 32, 64) if n == 16 or n * width <= _MOST_ELEMENTS],
        "num_worker_warps": [0, 8],
    }


def _config(problem: Problem, elements: int, warps: int) -> Config:
    chunk = max(16, min(32, elements // width_of(problem["experts"])))
    return Config(schedule="persistent", chunk=chunk, num_worker_warps=warps)


def _sizes(problem: Problem) -> dict[str, Any]:
    return {
        "id": "int64" if problem["wide"] else "int32",
        "parts": parts(problem["rows"]),
        "width": width_of(problem["experts"]),
        "part": PART,
        # With this name the compiler does not know the extent.
        "ends": problem["experts"],
    }


def _count_inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    import torch

    ids = drawn_experts(problem["rows"], problem["experts"], generator, device)
    return {"ids": ids if problem["wide"] else ids.to(torch.int32), "experts": problem["experts"]}


def counted(ids: Any, experts: int) -> Any:
    """Count by torch the slots of each part that chose each expert, [parts, width]."""
    import torch

    known = ids.long().where((ids >= 0) & (ids < experts), -1)
    padded = torch.nn.functional.pad(known, (0, -len(ids) % PART), value=-1).view(-1, PART)
    return (padded[..., None] == torch.arange(width_of(experts), device=ids.device)).sum(1)


def routed(ids: Any, experts: int) -> tuple[Any, Any, Any, Any]:
    """Return (offsets, order, ranks, experts of rows) of slots, int32, by torch; the host does not wait."""
    import torch

    ids = ids.reshape(-1).long()
    ids = torch.where((ids < 0) | (ids >= experts), experts, ids)
    chosen, order = torch.sort(ids, stable=True)
    ends = torch.arange(experts, device=ids.device)
    offsets = torch.searchsorted(chosen, ends, right=True)
    ranks = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=ids.device))
    offsets, order, ranks, chosen = (x.to(torch.int32) for x in (offsets, order, ranks, chosen))
    return offsets, order, ranks, chosen


def _placed(ids: Any, counts: Any, experts: int) -> dict[str, Any]:
    return dict(zip(_NAMES, (x.double() for x in routed(ids, experts)), strict=True))


def _place_inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    import torch

    given = _count_inputs(problem, generator, device)
    return given | {"counts": counted(**given).to(torch.int32)}


_DIMENSIONS = (Dimension("rows", "bucketed"), Dimension("experts", "exact"), Dimension("wide", "flag"))
_SPACE = Space(
    _axes,
    (
        Constraint(
            f"more than {_MOST_ELEMENTS} elements of ones and zeros spill",
            lambda problem, config, target: (
                config["chunk"] == 16 or config["chunk"] * width_of(problem["experts"]) <= _MOST_ELEMENTS
            ),
        ),
    ),
)
_NAMES = ("offsets", "order", "ranks", "chosen")
_IDS, _NUMBER, _COUNTS = Array("ids", "id", ("rows",)), ScalarParameter("experts", "int32"), ("parts", "width")


def _spec(
    name: str, summary: str, function: Any, arrays: Arrays, reference: Callable[..., dict[str, Any]], given: Any,
    flops: int, **more: Any,
) -> KernelSpec:  # fmt: skip
    """Return the spec of a launch, with ``flops`` operations for each slot and expert."""
    return spec(
        name, summary, _DIMENSIONS, lambda problem: arrays, reference,
        function=lambda problem, config: function,
        sizes=_sizes,
        grid=lambda sizes, config, sm_count: max(1, min(parts(sizes["rows"]), 4 * sm_count)),
        space=_SPACE,
        default=lambda problem, target: _config(problem, 1024, 0),
        generic=lambda problem: _config(problem, 1024, 0),
        given=given,
        flops=lambda problem: flops * problem["rows"] * problem["experts"],
        **more,
    )  # fmt: skip


COUNT = _spec(
    "route_count",
    "how many slots of each part of 512 chose each expert",
    route_count,
    (_IDS, _NUMBER, Array("counts", "int32", _COUNTS, "output")),
    lambda ids, experts: {"counts": counted(ids, experts).double()},
    _count_inputs,
    1,
)
PLACE = _spec(
    "route_place",
    "slots sorted by expert, stable: offsets, the slot of each row, the row of each slot",
    route_place,
    (
        _IDS,
        Array("counts", "int32", _COUNTS),
        _NUMBER,
        *(Array(name, "int32", ("ends",) if name == "offsets" else ("rows",), "output") for name in _NAMES),
    ),
    _placed,
    _place_inputs,
    3,
    inputs_in_l2=True,
)

SPECS = (COUNT, PLACE)
