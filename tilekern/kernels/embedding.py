"""Look up the rows of a table, as a model's first layer does: ``out[r] = weight[ids[r]]``.

If ``positioned``, the row of the token's position in a second table is added, as in GPT-2:
``out[r] = weight[ids[r]] + position_weight[positions[r]]``, in float32 and rounded once, which is torch's sum of two
embeddings in any dtype. So the bits depend on no config.

The problem knows the width of the tables, but not how many rows they have; each has at least one. An id or a position
outside of its table makes its row of ``out`` zeros: the kernel reads row 0 in its place and drops what it has read, so
nothing outside of a table is ever read, whatever the padding of a tile does.

Layout: ids int64 and positions int32 [rows], weight [vocabulary, columns], position_weight [positions, columns], out
[rows, columns].
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.arrays import ROWS, Arrays
from tilekern.kernels.families.overlap import is_few, launch_next
from tilekern.kernels.families.tables import MATRIX, flags_of, spec
from tilekern.kernels.tiles import ConstBool, ConstInt, each_step, grid_of_tiles, load, power_of_two
from tilekern.spec import Array, Config, Problem, Space, Value, cdiv


def _row(numbers, r, table):
    """Return the row of the table that ``numbers[r]`` names, or 0, and whether it names one."""
    number = ct.load(numbers, (r,), ())
    there = (number >= 0) & (number < table.shape[0])
    return ct.where(there, number, 0).astype(ct.int32), there


def _step(item, ids, weight, positions, position_weight, out, columns, tile_n, bounded, positioned):
    across, shape = ct.static_eval(cdiv(columns, tile_n)), ct.static_eval((1, tile_n))
    r, c = item // across, item % across
    row, there = _row(ids, r, weight)
    if ct.static_eval(positioned):
        place, is_known = _row(positions, r, position_weight)
        there = there & is_known
        added = load(position_weight, (place, c), shape, bounded, 0, False).astype(ct.float32)
        tile = load(weight, (row, c), shape, bounded, 0, False).astype(ct.float32)
        tile = (tile + added).astype(out.dtype)
    else:
        tile = load(weight, (row, c), shape, bounded, 0, False)
    tile = ct.where(there, tile, ct.zeros(shape, out.dtype))
    ct.store(out, (r, c), tile, check_bounds=bounded, allow_tma=False)


@ct.kernel
def embedding(
    ids, weight, positions, position_weight, out, columns: ConstInt, tile_n: ConstInt, bounded: ConstBool,
    persistent: ConstBool, positioned: ConstBool, few: ConstBool,
):  # fmt: skip
    """A piece of a row a block, or resident blocks that loop; the layout is the module's."""
    # Its launch overlaps the end of the kernel that chooses the tokens, and the next kernel's its own.
    ct.grid_dependency_control_wait()
    launch_next(few)
    each_step(
        _step, ids.shape[0] * ct.static_eval(cdiv(columns, tile_n)), persistent,
        (ids, weight, positions, position_weight, out, columns, tile_n, bounded, positioned),
    )  # fmt: skip


_ARRAYS: Arrays = (
    Array("ids", "int64", ("rows",)),
    Array("weight", "dtype", ("vocabulary", "columns")),
    Array("positions", "int32", ("rows",), flag="positioned"),
    Array("position_weight", "dtype", ("positions", "columns"), flag="positioned"),
    Array("out", "dtype", ROWS, "output"),
)


def _given(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """Draw orders of the tables' rows: each is read once, as if it had left the cache."""
    import torch

    def order(dtype: Any) -> Any:
        return torch.randperm(problem["rows"], generator=generator, device=device).to(dtype)

    known = {"ids": order(torch.int64)}
    return known | {"positions": order(torch.int32)} if problem["positioned"] else known


def looked_up(numbers: Any, table: Any) -> tuple[Any, Any]:
    """Return by torch the rows of a table that numbers of any shape name, and which of them are in it, [..., 1]."""
    there = (numbers >= 0) & (numbers < len(table))
    return table[numbers.long().where(there, 0)], there[..., None]


def embedded(ids: Any, weight: Any, positions: Any, position_weight: Any) -> Any:
    """Return the result by torch, for ids of any shape; positions are None if there are none."""
    rows, there = looked_up(ids, weight)
    if positions is not None:
        added, is_known = looked_up(positions, position_weight)
        rows, there = rows + added, there & is_known
    return rows.where(there, 0)


def reference(ids: Any, weight: Any, positions: Any, position_weight: Any, positioned: bool) -> dict[str, Any]:
    """Return the formula in float64."""
    found = embedded(ids, weight.double(), positions if positioned else None, position_weight.double())
    return {"out": found}


def _axes(problem: Problem) -> dict[str, list[Value]]:
    width = power_of_two(problem["columns"])
    return {
        "schedule": ["block", "persistent"],
        "tile_n": sorted({min(width, n) for n in (256, 512, 1024, 2048, 4096)}),
        "occupancy": [4, 8],
        "num_worker_warps": [0],
    }


def _config(problem: Problem, schedule: str, tile_n: int, occupancy: int) -> Config:
    width = min(tile_n, power_of_two(problem["columns"]))
    return Config(schedule=schedule, tile_n=width, occupancy=occupancy, num_worker_warps=0)


SPEC = spec(
    "embedding",
    "rows of a table by ids, with or without those of a second table by positions",
    (*MATRIX, *flags_of(("positioned",))),
    _ARRAYS,
    reference,
    function=embedding,
    # With these names the compiler does not know how many rows the tables have.
    sizes=lambda problem: {"vocabulary": problem["rows"], "positions": problem["rows"]},
    constants=lambda problem, config: {
        "bounded": problem["columns"] % config["tile_n"] != 0,
        "few": is_few(problem["rows"]),
    },
    grid=grid_of_tiles,
    space=Space(_axes),
    # Threads of a tile of 1024 load 16 bytes each.
    default=lambda problem, target: _config(problem, "block", 1024, 8),
    generic=lambda problem: _config(problem, "persistent", 256, 1),
    given=_given,
    arrays=_ARRAYS,
    flops=lambda problem: problem["rows"] * problem["columns"],
    dependent=True,
)
SPECS = (SPEC,)
