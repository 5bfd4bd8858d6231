"""The kernels of :mod:`tilekern.kernels.common.rows` in CuTe DSL: their own functions, with other loops around them.

``threads`` threads share a row, and a block has ``rows`` rows at work; a thread holds ``chunks`` vectors of 16 bytes of
each array in registers. With a ``cluster`` a row is spread over its blocks. Sums over a row go through shuffles, then
through shared memory, that of all blocks of the cluster. Sums over rows stay in registers to the end, in the order of
the rows, so that they have the same bits every time.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, const_expr, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

from tilekern.kernels.common import rows as family
from tilekern.kernels.cute.arguments import ALIGNED_BYTES, Argument, samples
from tilekern.kernels.cute.words import Part, Words
from tilekern.rebinding import Rebinder
from tilekern.spec import ArrayParameter, ScalarParameter, python_of

WARP = 32
# Reductions of a step, and values of each, for which there is shared memory.
_REDUCTIONS, _VALUES = 4, 2
_BITS = 8 * ALIGNED_BYTES


class Step:
    """A row at work: what formulas see of it, and which of its reductions is the next.

    ``turn`` is 0 and 1 in turns: a fast thread may be at the next row while a slow one reads the sums of this one.
    """

    def __init__(self, tiles: tuple[Part, ...], weights: tuple[Part, ...], turn: Any) -> None:
        self.tiles, self.weights, self.turn, self.reduction = tiles, weights, turn, 0


def parameter_in_kernel(parameter: Any, values: Any) -> Argument | Part:
    """A parameter as the kernel's function takes it: an array, or a scalar that all threads have."""
    return Argument(parameter, values) if isinstance(parameter, ArrayParameter) else Part(values)


class Rows:
    """The device function of one config.

    Args:
        function: the kernel in cuTile, whose formulas are compiled.
        parameters: its arrays and scalars.
        capability: of the GPU, as one number: 90 for sm_90.
        block: threads of a block.
        cluster: blocks over which a row is spread.
        columns: of a row; whole vectors.
        threads: those that share a row in a block.
        rows: rows that a block has at work at once.
        vector: elements of a vector.
        persistent: whether blocks go on with further rows.
        ahead: whether those load the next rows while they are at these.
        occupancy: blocks for which an SM must have registers; 0 for any number.
        flags: the kernel's constants that are no sizes.
    """

    def __init__(
        self, function: Any, parameters: tuple[ArrayParameter | ScalarParameter, ...], *, capability: int, block: int,
        cluster: int, columns: int, threads: int, rows: int, vector: int, persistent: bool, ahead: bool,
        occupancy: int, **flags: bool,
    ) -> None:  # fmt: skip
        self.parameters, self.sample = parameters, samples(parameters)
        self.block, self.cluster, self.columns, self.threads, self.rows = block, cluster, columns, threads, rows
        self.vector, self.persistent, self.ahead, self.occupancy = vector, persistent, ahead, occupancy
        self.chunks = math.ceil(columns / (threads * cluster * vector))
        self.warps = max(1, threads // WARP)
        self.slots = self.warps * cluster
        # Each block of a cluster gets a warp's sums from one of its threads.
        assert cluster <= min(WARP, threads), f"{threads} threads of a row cannot reach {cluster} blocks"
        # Of the cuTile loops, which are not run.
        sizes = {"tile_m": 1, "tile_n": columns, "chunks": 1, "long": False, "bounded": False, "tma": False}
        known = {"columns": columns, "persistent": persistent, **sizes, **flags}
        instead: dict[Any, Any] = {family.forward: self._forward, family.backward: self._backward}
        instead |= {family.add_up: self._add_up, family.largest: self._largest}
        taken = python_of(function).__code__
        names = taken.co_varnames[len(parameters) : taken.co_argcount]
        self._constants = {name: known[name] for name in names}
        self._body = Rebinder(Words(capability), instead).function(python_of(function))

    @cute.jit
    def __call__(self, arguments: tuple):
        """Make a kernel of it; the launch is another's, so that its grid does not count."""
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
        shape = (self.slots, _VALUES, self.rows, _REDUCTIONS, 2)
        memory = cute.arch.alloc_smem(Float32, math.prod(shape), alignment=ALIGNED_BYTES)
        self.sums = cute.make_tensor(memory, cute.make_layout(shape))
        if const_expr(self.cluster > 1):
            # Another block may write into this one's memory only when it runs.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        given = zip(self.parameters, arguments, strict=True)
        self._body(*(parameter_in_kernel(*pair) for pair in given), **self._constants)

    # The loops.

    def _forward(
        self, statistics, formula, inputs, weights, outputs, scalars, columns, tile_m, tile_n, chunks, persistent, long,
        bounded, tma, made=None, kept=(),
    ):  # fmt: skip
        self.run_forward(statistics, formula, inputs, weights, outputs, scalars, made, kept)

    def _backward(
        self, statistics, formula, share, inputs, weights, outputs, partial, sums, scalars, columns, tile_m, tile_n,
        chunks, long, bounded, tma,
    ):  # fmt: skip
        self.run_backward(statistics, formula, share, inputs, weights, outputs, partial, sums, scalars)

    @cute.jit
    def run_forward(self, statistics, formula, inputs, weights, outputs, scalars, made, kept):
        """One step of rows, or all that are this block's."""
        vectors = tuple(self.wide(self.held(weight, None, None)) for weight in weights)
        work = (statistics, formula, inputs, vectors, outputs, scalars, made, kept)
        now = self.rows_of(inputs, self.first, may_be_outside=self.persistent or self.rows > 1)
        if const_expr(self.persistent):
            turn = Int32(0)
            for step in cutlass.range(self.first, self.steps(inputs), self.stride):
                if const_expr(self.ahead):
                    following = self.rows_of(inputs, step + self.stride, may_be_outside=True)
                self.forward_step(work, now, step, turn)
                if const_expr(not self.ahead):
                    following = self.rows_of(inputs, step + self.stride, may_be_outside=True)
                self.move(following, now)
                turn = turn ^ 1
        else:
            self.forward_step(work, now, self.first, Int32(0))

    @cute.jit
    def forward_step(self, work, held, step, turn):
        """Outputs of one row for each group of threads, whose inputs are in registers."""
        statistics, formula, inputs, weights, outputs, scalars, made, kept = work
        row = step * self.rows + self.slot
        inside = row < inputs[0].values.rows if const_expr(self.rows > 1) else None
        tiles = tuple(self.wide(values) for values in held)
        if const_expr(len(kept) > 0):
            rounded = [self.rounded(array, part) for array, part in zip(kept, made(tiles), strict=True)]
            for array, values in zip(kept, rounded, strict=True):
                self.put(array, row, inside, 0, values)
            tiles = tuple(self.wide(values) for values in rounded)
        known = statistics(Step(tiles, weights, turn), self.columns, *scalars) + scalars
        for array, part in zip(outputs, formula(tiles, weights, known), strict=True):
            self.put(array, row, inside, 0, self.rounded(array, part))

    @cute.jit
    def run_backward(self, statistics, formula, share, inputs, weights, outputs, partial, sums, scalars):
        """All rows that are this block's, then its row of ``partial``."""
        vectors = tuple(self.wide(self.held(weight, None, None)) for weight in weights)
        totals = [self.registers(Float32) for _ in range(sums)]
        for total in totals:
            total.fill(0.0)
        turn = Int32(0)
        work = (statistics, formula, share, vectors, outputs, scalars, totals)
        now = self.rows_of(inputs, self.first, may_be_outside=True)
        for row in cutlass.range(self.first, self.steps(inputs), self.stride):
            if const_expr(self.ahead):
                following = self.rows_of(inputs, row + self.stride, may_be_outside=True)
            self.backward_step(work, now, row, turn)
            if const_expr(not self.ahead):
                following = self.rows_of(inputs, row + self.stride, may_be_outside=True)
            self.move(following, now)
            turn = turn ^ 1
        for n in cutlass.range_constexpr(sums):
            self.put(partial, self.first, None, n * self.columns, totals[n])

    @cute.jit
    def backward_step(self, work, held, row, turn):
        """Outputs of a row whose inputs are in registers, and its share of the sums."""
        statistics, formula, share, weights, outputs, scalars, totals = work
        tiles = tuple(self.wide(values) for values in held)
        known = statistics(Step(tiles, weights, turn), self.columns, *scalars) + scalars
        for array, part in zip(outputs, formula(tiles, weights, known), strict=True):
            self.put(array, row, None, 0, self.rounded(array, part))
        for total, part in zip(totals, share(tiles, weights, known), strict=True):
            total.store(total.load() + part.value)

    def steps(self, inputs: Any) -> Any:
        """How many steps take all rows."""
        return (inputs[0].values.rows + (self.rows - 1)) // self.rows

    def rows_of(self, inputs: Any, step: Any, *, may_be_outside: bool) -> list[Any]:
        """A thread's parts of a step's row, of each input; zeros of a row that is not there."""
        row = step * self.rows + self.slot
        inside = row < inputs[0].values.rows if may_be_outside else None
        return [self.held(x, row, inside) for x in inputs]

    def move(self, source: list[Any], target: list[Any]) -> None:
        """Copy registers."""
        for one, other in zip(source, target, strict=True):
            other.store(one.load())

    # Sums and maxima over a row.

    def _add_up(self, terms: Any, count: int, step: Step, known: Any, masked: bool) -> tuple[Part, ...]:
        shares = [part.value for part in terms(step.tiles, step.weights, known)]
        if masked:
            shares = [self.within(share, 0.0) for share in shares]
        return self.over_row(step, [share.reduce(cute.ReductionOp.ADD, 0.0, 0) for share in shares[:count]], "add")

    def _largest(self, term: Any, step: Step, known: Any) -> Part:
        value = self.within(term(step.tiles, step.weights, known).value, -math.inf)
        return self.over_row(step, [value.reduce(cute.ReductionOp.MAX, -math.inf, 0)], "max")[0]

    def within(self, value: Any, beyond: float) -> Any:
        """Elements of a row, with ``beyond`` behind its end."""
        if self.columns == self.chunks * self.threads * self.cluster * self.vector:
            return value
        inside = self.registers(Boolean)
        for c in range(self.chunks):
            for v in range(self.vector):
                inside[v, c] = self.column(c) < self.columns
        return cute.where(inside.load(), value, cute.full_like(value, beyond))

    def over_row(self, step: Step, values: Sequence[Any], how: str) -> tuple[Part, ...]:
        """Each thread's values put together over all threads of the row, in one exchange."""
        combine, neutral = {"add": (operator.add, 0.0), "max": (cute.arch.fmax, -math.inf)}[how]
        number, step.reduction = step.reduction, step.reduction + 1
        assert number < _REDUCTIONS, f"a row has more than {_REDUCTIONS} reductions"
        assert len(values) <= _VALUES, f"a reduction has more than {_VALUES} values"
        return tuple(Part(x) for x in self.exchange(values, combine, neutral, number, step.turn))

    @cute.jit
    def exchange(self, values, combine: Callable, neutral: float, number: int, turn):
        """The values of all threads of a row, put together in the order of the warps."""
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
            cute.arch.sync_threads()
        else:
            if in_warp < self.cluster:
                for n in cutlass.range_constexpr(len(mine)):
                    place = (self.rank * self.warps + warp, n, slot, number, turn)
                    store_remote(cute.domain_offset(place, sums).iterator, in_warp, mine[n])
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        totals = []
        for n in cutlass.range_constexpr(len(mine)):
            total = Float32(neutral)
            for i in cutlass.range_constexpr(self.slots):
                total = combine(total, sums[i, n, slot, number, turn])
            totals.append(total)
        return totals

    # Memory.

    def registers(self, dtype: Any) -> Any:
        """Registers for a thread's part of a row."""
        return cute.make_rmem_tensor((self.vector, self.chunks), dtype)

    def wide(self, values: Any) -> Part:
        """Registers as a part in float32."""
        return Part(values.load().to(Float32))

    def rounded(self, array: Argument, part: Part) -> Any:
        """A part in registers of an array's dtype."""
        values = self.registers(array.numeric)
        values.store(part.value.to(array.numeric))
        return values

    def column(self, chunk: int) -> Any:
        """The column of the first element of a thread's vector."""
        return (chunk * self.threads * self.cluster + self.place) * self.vector

    def may_end(self, chunk: int) -> bool:
        """Whether some thread's vector of a chunk is behind the end of the row."""
        return (chunk + 1) * self.threads * self.cluster * self.vector > self.columns

    @cute.jit
    def held(self, array, row, inside):
        """A thread's part of a row, or of a weight where the row is None; zeros where it is not inside."""
        values = self.registers(array.numeric)
        if const_expr(inside is not None or self.may_end(self.chunks - 1)):
            values.fill(0)
        self.copy(array, row, inside, 0, values, is_store=False)
        return values

    def put(self, array: Argument, row: Any, inside: Any, start: int, values: Any) -> None:
        """Store a thread's part of a row, ``start`` columns from the row's begin."""
        self.copy(array, row, inside, start, values, is_store=True)

    @cute.jit
    def copy(self, array, row, inside, start: int, values, is_store: bool):
        """Copy a thread's part of a row, if that is inside."""
        if const_expr(inside is None) or inside:
            self.copy_row(array, row, start, values, is_store)

    @cute.jit
    def copy_row(self, array, row, start: int, values, is_store: bool):
        """Copy what does not stand behind the end of the row."""
        for c in cutlass.range_constexpr(self.chunks):
            if const_expr(self.may_end(c)):
                if self.column(c) < self.columns:
                    self.copy_vector(array, row, start, c, values, is_store)
            else:
                self.copy_vector(array, row, start, c, values, is_store)

    def copy_vector(self, array: Argument, row: Any, start: int, chunk: int, values: Any, is_store: bool) -> None:
        """Copy one vector, 16 bytes at a time."""
        piece = min(self.vector, _BITS // array.numeric.width)
        atom = cute.make_copy_atom(
            cute.nvgpu.CopyUniversalOp(), array.numeric, num_bits_per_copy=piece * array.numeric.width
        )
        offset = Int64(0)
        if row is not None:
            # The variant's assumptions promise rows that begin at whole 16 bytes.
            offset = row * cute.assume(Int64(array.values.stride), divby=_BITS // array.numeric.width)
        for p in range(self.vector // piece):
            column = cute.assume(Int64(self.column(chunk) + start + p * piece), divby=piece)
            there = cute.make_tensor(array.values.address + (offset + column), cute.make_layout(piece))
            here = cute.make_tensor(values.iterator + (chunk * self.vector + p * piece), cute.make_layout(piece))
            cute.copy(atom, *((here, there) if is_store else (there, here)))


@dsl_user_op
def store_remote(address: Any, peer: Any, value: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Store a float32 at the place of ``address`` in another block of the cluster."""
    where = cute.arch.map_dsmem_ptr(address, peer, loc=loc, ip=ip).toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip)
    llvm.inline_asm(
        None, [where, Float32(value).ir_value(loc=loc, ip=ip)], "st.shared::cluster.f32 [$0], $1;", "r,f",
        has_side_effects=True, is_align_stack=False,
    )  # fmt: skip
