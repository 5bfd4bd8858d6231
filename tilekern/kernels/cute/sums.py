"""Sums down the columns of a float32 matrix in CuTe DSL, with other loops than cuTile's.

Adjacent lanes share a row of a block's columns, one vector of 16 bytes each. The block's threads, and the blocks of a
cluster, are spread over the rows. A thread has the loads of several rows in flight before it adds up the first one.
Then shuffles combine the lanes of a warp that have the same columns; all warps store their sums in the shared memory of
the cluster's first block, where one thread for each column adds them up. Each step has a fixed order.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute

from tilekern.kernels import column_sum as family
from tilekern.kernels.cute.arguments import ALIGNED_BYTES
from tilekern.kernels.cute.sharing import WARP, Program, store_remote
from tilekern.spec import ArrayParameter, ScalarParameter

_VECTOR = 8 * ALIGNED_BYTES // Float32.width


class ColumnSum(Program):
    """The device function of one config.

    Args besides those of :class:`~tilekern.kernels.cute.sharing.Program`:
        columns: columns of the matrix; whole vectors.
        width: columns of a block; at most one for each thread, and one vector for each lane of a warp.
        loads: rows that a thread has in flight at the same time.
    """

    def __init__(
        self, function: Any, parameters: tuple[ArrayParameter | ScalarParameter, ...], *, capability: int, block: int,
        cluster: int, columns: int, width: int, loads: int,
    ) -> None:  # fmt: skip
        # The other constants belong to the cuTile loop, which does not run.
        known = {"columns": columns, "tile_m": loads, "tile_n": width, "latency": 0, "tma": False}
        threads = width // _VECTOR
        self.columns, self.width, self.loads, self.in_block = columns, width, loads, block // WARP
        super().__init__(
            function, parameters, capability=capability, block=block, cluster=cluster, threads=threads,
            rows=block // threads, occupancy=0, known=known, instead={family.sum_columns: self._sum_columns},
        )  # fmt: skip
        # For each column of a block, a sum of each warp of the cluster.
        self.shape_of_sums = (width, self.in_block * cluster)

    def _sum_columns(self, x, y, columns, tile_m, tile_n, latency, tma):
        self.run(x, y)

    @cute.jit
    def run(self, x, y):
        """Sum all rows of a cluster's columns."""
        total = cute.make_rmem_tensor((_VECTOR,), Float32)
        total.fill(0.0)
        self.add_rows(x, total)
        self.gather(total)
        self.store(y)

    @cute.jit
    def add_rows(self, x, total):
        """Add up a thread's rows of a vector of columns."""
        rows, column = x.sizes[0], self.first * self.width + self.lane * _VECTOR
        if const_expr(self.columns % self.width != 0):
            rows = Int32(cutlass.select_(column < self.columns, rows, Int32(0)))
        distance = self.rows * self.cluster
        for row in cutlass.range(self.rank * self.rows + self.slot, rows, distance * self.loads):
            values = cute.make_rmem_tensor((_VECTOR, self.loads), Float32)
            values.fill(0.0)
            for n in cutlass.range_constexpr(self.loads):
                if row + n * distance < rows:
                    self.load(x, row + n * distance, column, values[None, n])
            for n in cutlass.range_constexpr(self.loads):
                total.store(total.load() + values[None, n].load())

    def load(self, x: Any, row: Any, column: Any, values: Any) -> None:
        """Load a vector of a row."""
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), Float32, num_bits_per_copy=8 * ALIGNED_BYTES)
        offset = x.row((row,)) + cute.assume(Int64(column), divby=_VECTOR)
        cute.copy(atom, cute.make_tensor(x.address + offset, cute.make_layout(_VECTOR)), values)

    @cute.jit
    def gather(self, total):
        """Store the sums of each warp in the memory of the cluster's first block."""
        thread = self.slot * self.threads + self.lane
        place, sums = self.rank * self.in_block + thread // WARP, self.sums
        for v in cutlass.range_constexpr(_VECTOR):
            value = self.over_alike(total[v])
            if thread % WARP < self.threads:
                where = (self.lane * _VECTOR + v, place)
                if const_expr(self.cluster == 1):
                    sums[where] = value
                else:
                    store_remote(cute.domain_offset(where, sums).iterator, Int32(0), value)
        self.wait_for_all()

    @cute.jit
    def store(self, y):
        """Add up the sums of all warps; each thread with a column stores its sum."""
        place, sums = self.slot * self.threads + self.lane, self.sums
        column = self.first * self.width + place
        there = cute.make_tensor(y.address + column, cute.make_layout(1))
        if (self.rank == 0) & (place < self.width) & (column < self.columns):
            total = pairwise([sums[place, n] for n in range(self.in_block * self.cluster)])
            there[0] = total.to(there.element_type)


def pairwise(values: list[Any]) -> Any:
    """Return the sum of values, in pairs so that few additions wait for one another; their number is a power of two."""
    while len(values) > 1:
        values = [one + other for one, other in zip(values[::2], values[1::2], strict=True)]
    return values[0]
