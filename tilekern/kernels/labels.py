"""Labels for the losses' kernels: as int32, counted, and checked against the vocabulary.

A label counts unless it is ``ignore_index``. A label that counts and is not from 0 to ``vocabulary`` - 1 is outside:
:func:`outside_label`, which makes the losses' kernels return NaN, replaces it, and ``seen`` gets :func:`word_of` the
label. That word is in the host's memory: the host reads it without waiting for the GPU (:mod:`tilekern.ops.labels`).
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.tables import spec
from tilekern.kernels.tiles import ConstInt
from tilekern.spec import Array, Config, Dimension, Problem, ScalarParameter, Space, cdiv

# A word holds the number of an op, which is not 0, times this, and a label of less than half of it.
SPAN = 1 << 48
_MOST = SPAN // 2 - 1
# The most labels that one block reads; the counts of several blocks need another launch to add them up. On an H200 one
# block takes 7.2 us for these and 11 for twice as many; 8 blocks and the sum take 5.7, and the host 7 us more.
_ONE_BLOCK = 8192


def outside_label(ignore_index):
    """Return the label that replaces those outside the vocabulary; it is not ``ignore_index``."""
    return ct.where(ignore_index == -1, -2, -1)


def word_of(op, label):
    """Return a label and its op as one number, which is never 0; labels of more than 47 bits are clamped."""
    return ct.full((), op, ct.int64) * SPAN + ct.minimum(ct.maximum(label.astype(ct.int64), -_MOST), _MOST)


@ct.kernel
def check_labels(target, ignore_index, vocabulary, op, labels, counted, seen, tile_n: ConstInt):
    """Resident blocks that loop over tiles; target and labels [rows], counted [blocks], seen [1]."""
    count = ct.zeros((tile_n,), ct.int32)
    lowest = ct.zeros((tile_n,), target.dtype)
    highest = ct.zeros((tile_n,), target.dtype)
    for tile in range(ct.bid(0), ct.cdiv(target.shape[0], tile_n), ct.num_blocks(0)):
        label = ct.load(target, (tile,), (tile_n,), padding_mode=ct.PaddingMode.ZERO, allow_tma=False)
        place = tile * tile_n + ct.arange(tile_n, dtype=ct.int32)
        counts = (label != ignore_index) & (place < target.shape[0])
        outside = counts & ((label < 0) | (label >= vocabulary))
        # By TMA on sm_90 (tileiras 13.4), the battery saw memory behind the labels written to.
        found = ct.where(outside, outside_label(ignore_index), label.astype(ct.int32))
        ct.store(labels, (tile,), found, allow_tma=False)
        count = count + ct.where(counts, 1, 0)
        lowest = ct.minimum(lowest, ct.where(outside, label, 0))
        highest = ct.maximum(highest, ct.where(outside, label, 0))
    ct.store(counted, (ct.bid(0),), ct.reshape(ct.sum(count, axis=0), (1,)).astype(ct.int64))
    low, high = ct.min(lowest, axis=0), ct.max(highest, axis=0)
    if (low != 0) | (high != 0):
        ct.atomic_xchg(seen, (0,), word_of(op, ct.where(high != 0, high, low)))


def _config(tile_n: int, warps: int) -> Config:
    return Config(schedule="persistent", tile_n=tile_n, num_worker_warps=warps)


_VOCABULARY = 151936
_ARRAYS = (
    Array("target", "label", ("rows",)),
    ScalarParameter("ignore_index", "int32", -100),
    ScalarParameter("vocabulary", "int32", _VOCABULARY),
    ScalarParameter("op", "int32", 1),
    Array("labels", "int32", ("rows",), "output"),
    Array("counted", "int64", ("blocks",), "output"),
    # Written only if a label is outside.
    Array("seen", "int64", ("1",)),
)


def _given(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    import torch

    dtype = torch.int64 if problem["wide"] else torch.int32
    target = torch.randint(_VOCABULARY, (problem["rows"],), generator=generator, device=device, dtype=dtype)
    target[3::7] = -100
    return {"target": target, "seen": torch.zeros(1, dtype=torch.int64, device=device)}


def reference(target: Any, ignore_index: int, vocabulary: int, op: int, seen: Any) -> dict[str, Any]:
    """Return the labels and how many count."""
    outside = (target != ignore_index) & ((target < 0) | (target >= vocabulary))
    labels = target.where(~outside, -2 if ignore_index == -1 else -1)
    return {"labels": labels.double(), "counted": (target != ignore_index).sum().double()}


SPEC = spec(
    "labels",
    "labels as int32, how many count, and whether one is outside the vocabulary",
    (Dimension("rows", "bucketed"), Dimension("wide", "flag")),
    _ARRAYS,
    reference,
    function=check_labels,
    sizes=lambda problem: {"label": "int64" if problem["wide"] else "int32"},
    grid=lambda sizes, config, sm_count: (
        1 if sizes["rows"] <= _ONE_BLOCK else min(cdiv(sizes["rows"], config["tile_n"]), sm_count)
    ),
    space=Space(lambda problem: {"schedule": ["persistent"], "tile_n": [1024, 2048], "num_worker_warps": [0, 8]}),
    default=lambda problem, target: _config(2048, 8) if problem["rows"] <= _ONE_BLOCK else _config(1024, 0),
    generic=lambda problem: _config(1024, 0),
    given=_given,
    results=lambda found: found | {"counted": found["counted"].sum()},
    flops=lambda problem: 4 * problem["rows"],
)

SPECS = (SPEC,)
