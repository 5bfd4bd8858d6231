"""Count the tokens of sequences one further, between two steps of decoding that the host does not wait for.

For each row: ``new_positions[r] = positions[r] + 1``, where the next token belongs in a cache; ``places[r]``, the same
as the int32 that the kernels of decoding take; and ``lengths[r] = places[r] + 1``, the keys that the next token sees. A
sequence that has ended has a negative position. It keeps that, its place is -1, and its length is 0.

``new_positions`` may share the memory of ``positions``, as in :mod:`tilekern.kernels.adamw`. The tuner gives it memory
of its own, where a launch gives the same however often it is repeated.

Layout: positions and new_positions int64, places and lengths int32, all [rows].
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.arrays import Arrays
from tilekern.kernels.families.overlap import is_few, launch_next
from tilekern.kernels.families.tables import spec
from tilekern.kernels.tiles import ConstBool, ConstInt
from tilekern.spec import Array, Config, Dimension, Problem, Space, cdiv


@ct.kernel
def advance(positions, new_positions, places, lengths, tile_m: ConstInt, few: ConstBool):
    """Resident blocks that loop over tiles of rows; the layout is the module's."""
    # Its launch overlaps the end of the kernel before it, and the next kernel's its own.
    ct.grid_dependency_control_wait()
    launch_next(few)
    for tile in range(ct.bid(0), ct.cdiv(positions.shape[0], tile_m), ct.num_blocks(0)):
        # Of single numbers: wide accesses have code of their own for the last tile, five times as much in all.
        row = tile * tile_m + ct.arange(tile_m, dtype=ct.int32)
        position = ct.gather(positions, row)
        runs = position >= 0
        moved = ct.where(runs, position + 1, position)
        place = ct.where(runs, moved, -1).astype(ct.int32)
        ct.scatter(new_positions, row, moved)
        ct.scatter(places, row, place)
        ct.scatter(lengths, row, place + 1)


_ARRAYS: Arrays = (
    Array("positions", "int64", ("rows",)),
    Array("new_positions", "int64", ("rows",), "output"),
    Array("places", "int32", ("rows",), "output"),
    Array("lengths", "int32", ("rows",), "output"),
)


def _given(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """Draw positions of which some are negative."""
    import torch

    return {"positions": torch.randint(-2, 4096, (problem["rows"],), generator=generator, device=device)}


def reference(positions: Any) -> dict[str, Any]:
    """Return what follows from each position."""
    runs = positions >= 0
    moved = (positions + 1).where(runs, positions)
    place = moved.where(runs, -1)
    return {"new_positions": moved.double(), "places": place.double(), "lengths": (place + 1).double()}


def _config(tile_m: int) -> Config:
    return Config(schedule="persistent", tile_m=tile_m, num_worker_warps=0)


SPEC = spec(
    "advance",
    "the next positions of sequences, their places in a cache, and the keys that they see",
    (Dimension("rows", "bucketed"),),
    _ARRAYS,
    reference,
    function=advance,
    constants=lambda problem, config: {"few": is_few(problem["rows"])},
    grid=lambda sizes, config, sm_count: min(cdiv(sizes["rows"], config["tile_m"]), sm_count),
    space=Space(lambda problem: {"schedule": ["persistent"], "tile_m": [64, 128, 256], "num_worker_warps": [0]}),
    default=lambda problem, target: _config(128),
    generic=lambda problem: _config(128),
    given=_given,
    flops=lambda problem: 2 * problem["rows"],
    dependent=True,
)
SPECS = (SPEC,)
