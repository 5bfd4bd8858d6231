"""Rows that threads share: the frame of a kernel, a thread's share of a row, and exchanges between threads.

Sums over a row go through shuffles, then through the shared memory of all blocks of a cluster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

from tilekern.compile.rebinding import Rebinder
from tilekern.kernels.cute.arguments import ALIGNED_BYTES, Argument, samples
from tilekern.kernels.cute.words import Part, Words
from tilekern.spec import ArrayParameter, ScalarParameter, python_of

WARP = 32
_BITS = 8 * ALIGNED_BYTES


def parameter_in_kernel(parameter: Any, values: Any) -> Argument | Part:
    """Return a parameter in the form that the kernel's function takes: an array, or a scalar shared by all threads."""
    return Argument(parameter, values) if isinstance(parameter, ArrayParameter) else Part(values)


class Program:
    """A cuTile kernel with other loops around its formulas.

    Args:
        function: the kernel in cuTile, whose formulas are compiled.
        parameters: its arrays and scalars.
        capability: compute capability of the GPU as one number: 90 for sm_90.
        block: threads of a block.
        cluster: blocks over which a row is spread.
        threads: threads that share a row in a block.
        rows: rows that a block computes at the same time.
        occupancy: blocks that must fit into an SM's registers; 0 for any number.
        known: values of the function's constants, and possibly others.
        instead: the loops, by the cuTile functions that they replace.
    """

    # Reductions of a row, and values of each, that have shared memory.
    reductions, values = 1, 1

    def __init__(
        self, function: Any, parameters: tuple[ArrayParameter | ScalarParameter, ...], *, capability: int, block: int,
        cluster: int, threads: int, rows: int, occupancy: int, known: Mapping[str, Any], instead: Mapping[Any, Any],
    ) -> None:  # fmt: skip
        self.parameters, self.sample = parameters, samples(parameters)
        self.block, self.cluster, self.threads, self.rows = block, cluster, threads, rows
        self.occupancy = occupancy
        self.warps = max(1, threads // WARP)
        self.slots = self.warps * cluster
        # The number of float32 values in shared memory; a subclass may change it.
        self.shape_of_sums: tuple[int, ...] = (self.slots, self.values, rows, self.reductions, 2)
        # Each block of a cluster gets a warp's sums from one of its threads.
        assert cluster <= min(WARP, threads), f"{threads} threads of a row cannot reach {cluster} blocks"
        taken = python_of(function).__code__
        names = taken.co_varnames[len(parameters) : taken.co_argcount]
        self._constants = {name: known[name] for name in names}
        self._body = Rebinder(Words(capability), instead).function(python_of(function))

    @cute.jit
    def __call__(self, arguments: tuple):
        """Compile it as a kernel; cuTile's launcher launches it, so the grid here has no effect."""
        self.kernel(arguments).launch(
            grid=(self.cluster, 1, 1),
            block=(self.block, 1, 1),
            cluster=(self.cluster, 1, 1) if const_expr(self.cluster > 1) else None,
            min_blocks_per_mp=self.occupancy,
            # Else the compiler asks the driver how much shared memory there is.
            preferred_smem_carveout=0,
        )

    @cute.kernel
    def kernel(self, arguments: tuple):
        """Run the cuTile kernel's function with this class' loops."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        self.lane, self.slot, self.rank = thread % self.threads, thread // self.threads, Int32(0)
        self.first, self.stride = block, blocks
        if const_expr(self.cluster > 1):
            self.rank = cute.arch.block_idx_in_cluster()
            self.first, self.stride = block // self.cluster, blocks // self.cluster
        self.place = self.rank * self.threads + self.lane
        memory = cute.arch.alloc_smem(Float32, math.prod(self.shape_of_sums), alignment=ALIGNED_BYTES)
        self.sums = cute.make_tensor(memory, cute.make_layout(self.shape_of_sums))
        if const_expr(self.cluster > 1):
            # Another block may write into this block's memory only after this block has started.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        given = zip(self.parameters, arguments, strict=True)
        self._body(*(parameter_in_kernel(*pair) for pair in given), **self._constants)

    def wait_for_all(self) -> None:
        """Wait for all threads of the cluster, and for what they have written."""
        if self.cluster == 1:
            cute.arch.sync_threads()
        else:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    def over_alike(self, value: Any) -> Any:
        """Return the sum over the threads of a warp that have the same columns of different rows."""
        distance = self.threads
        while distance < WARP:
            value = value + cute.arch.shuffle_sync_bfly(value, offset=distance)
            distance *= 2
        return value

    @cute.jit
    def exchange(self, values, combine: Callable, neutral: float, number: int, turn):
        """Combine the values of all threads of a row, in the order of the warps.

        ``turn`` alternates between 0 and 1: a fast thread may be at the next row while a slow one reads this row's
        sums.
        """
        width = min(WARP, self.threads)
        mine = [cute.arch.warp_reduction(value, combine, threads_in_group=width) for value in values]
        if const_expr(self.slots == 1):
            return mine
        warp, in_warp = self.lane // WARP, self.lane % WARP
        sums, slot = self.sums, self.slot
        if const_expr(self.cluster == 1):
            if in_warp == 0:
                for n in cutlass.range_constexpr(len(mine)):
                    sums[warp, n, slot, number, turn] = mine[n]
        elif in_warp < self.cluster:
            for n in cutlass.range_constexpr(len(mine)):
                place = (self.rank * self.warps + warp, n, slot, number, turn)
                store_remote(cute.domain_offset(place, sums).iterator, in_warp, mine[n])
        self.wait_for_all()
        totals = []
        for n in cutlass.range_constexpr(len(mine)):
            total = Float32(neutral)
            for i in cutlass.range_constexpr(self.slots):
                total = combine(total, sums[i, n, slot, number, turn])
            totals.append(total)
        return totals


class Share:
    """A thread's share of some columns of a row: vectors in registers, ``chunks`` of them.

    Args:
        program: the program whose threads share the columns.
        columns: whole vectors.
        vector: elements of a vector.
    """

    def __init__(self, program: Program, columns: int, vector: int) -> None:
        self._program, self.columns, self.vector = program, columns, vector
        self.chunks = math.ceil(columns / (program.threads * program.cluster * vector))

    def registers(self, dtype: Any) -> Any:
        """Make registers for the share."""
        return cute.make_rmem_tensor((self.vector, self.chunks), dtype)

    def rounded(self, array: Argument, part: Part) -> Any:
        """Return a part in registers of an array's dtype."""
        values = self.registers(array.numeric)
        values.store(part.value.to(array.numeric))
        return values

    def column(self, chunk: int) -> Any:
        """Return the column of the first element of a thread's vector."""
        program = self._program
        return (chunk * program.threads * program.cluster + program.place) * self.vector

    def may_end(self, chunk: int) -> bool:
        """Return whether some thread's vector of a chunk is past the end of the columns."""
        program = self._program
        return (chunk + 1) * program.threads * program.cluster * self.vector > self.columns

    @cute.jit
    def held(self, array, place, inside, start):
        """Load the share of the row at a place (:meth:`Argument.row`); zeros if the row is not ``inside``.

        The columns begin at ``start``.
        """
        values = self.registers(array.numeric)
        if const_expr(inside is not None or self.may_end(self.chunks - 1)):
            values.fill(0)
        self.copy(array, place, inside, start, values, is_store=False)
        return values

    def put(self, array: Argument, place: tuple[Any, ...], inside: Any, start: Any, values: Any) -> None:
        """Store the share in a row's columns from ``start`` on."""
        self.copy(array, place, inside, start, values, is_store=True)

    @cute.jit
    def copy(self, array, place, inside, start, values, is_store: bool):
        """Copy the share of a row, if it is ``inside``."""
        if const_expr(inside is None) or inside:
            self.each(lambda chunk: self.copy_vector(array, place, start, chunk, values, is_store))

    @cute.jit
    def each(self, do: Callable):
        """Call a function for each chunk whose vector is not past the end of the columns."""
        for c in cutlass.range_constexpr(self.chunks):
            if const_expr(self.may_end(c)):
                if self.column(c) < self.columns:
                    do(c)
            else:
                do(c)

    def copy_vector(
        self, array: Argument, place: tuple[Any, ...], start: Any, chunk: int, values: Any, is_store: bool
    ) -> None:  # fmt: skip
        """Copy one vector, 16 bytes at a time."""
        piece = min(self.vector, _BITS // array.numeric.width)
        atom = cute.make_copy_atom(
            cute.nvgpu.CopyUniversalOp(), array.numeric, num_bits_per_copy=piece * array.numeric.width
        )
        offset = array.row(place)
        for p in range(self.vector // piece):
            column = cute.assume(Int64(self.column(chunk) + start + p * piece), divby=piece)
            there = cute.make_tensor(array.address + (offset + column), cute.make_layout(piece))
            here = cute.make_tensor(values.iterator + (chunk * self.vector + p * piece), cute.make_layout(piece))
            cute.copy(atom, *((here, there) if is_store else (there, here)))


def wide(values: Any) -> Part:
    """Return registers as a part in float32."""
    return Part(values.load().to(Float32))


@dsl_user_op
def store_remote(address: Any, peer: Any, value: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Store a float32 at ``address`` in another block of the cluster."""
    where = cute.arch.map_dsmem_ptr(address, peer, loc=loc, ip=ip).toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip)
    llvm.inline_asm(
        None, [where, Float32(value).ir_value(loc=loc, ip=ip)], "st.shared::cluster.f32 [$0], $1;", "r,f",
        has_side_effects=True, is_align_stack=False,
    )  # fmt: skip
