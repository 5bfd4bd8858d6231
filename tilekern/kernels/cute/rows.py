"""The kernels of :mod:`tilekern.kernels.families.rows` in CuTe DSL: the same functions in other loops.

``threads`` threads share a row, and a block processes ``rows`` rows at a time; a thread holds ``chunks`` vectors of 16
bytes of each array in registers. With a ``cluster`` a row is spread over its blocks. Sums over rows stay in registers
to the end, in the order of the rows, so that their bits are the same every time.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, const_expr, cute

from tilekern.kernels.cute.sharing import Program, Share, wide
from tilekern.kernels.cute.words import Part
from tilekern.kernels.families import rows as family
from tilekern.spec import ArrayParameter, ScalarParameter


class Step:
    """A row being computed: its tiles and weights, its turn, and the number of its next reduction."""

    def __init__(self, tiles: tuple[Part, ...], weights: tuple[Part, ...], turn: Any) -> None:
        self.tiles, self.weights, self.turn, self.reduction = tiles, weights, turn, 0


class Rows(Program):
    """The device function of one config.

    Args besides those of :class:`~tilekern.kernels.cute.sharing.Program`:
        columns: columns of a row; whole vectors.
        vector: elements of a vector.
        persistent: whether blocks process further rows.
        ahead: whether persistent blocks load the next rows while they compute the current ones.
        flags: the kernel's constants that are not sizes.
    """

    reductions, values = 4, 2

    def __init__(
        self, function: Any, parameters: tuple[ArrayParameter | ScalarParameter, ...], *, capability: int, block: int,
        cluster: int, columns: int, threads: int, rows: int, vector: int, persistent: bool, ahead: bool,
        occupancy: int, **flags: bool,
    ) -> None:  # fmt: skip
        # Constants of the cuTile loops, which do not run.
        sizes = {"tile_m": 1, "tile_n": columns, "chunks": 1, "long": False, "bounded": False, "tma": False}
        known = {"columns": columns, "persistent": persistent, **sizes, **flags}
        instead: dict[Any, Any] = {family.forward: self._forward, family.backward: self._backward}
        instead |= {family.add_up: self._add_up, family.largest: self._largest}
        super().__init__(
            function, parameters, capability=capability, block=block, cluster=cluster, threads=threads, rows=rows,
            occupancy=occupancy, known=known, instead=instead,
        )  # fmt: skip
        self.columns, self.persistent, self.ahead = columns, persistent, ahead
        self.share = Share(self, columns, vector)

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
        """Process one step of rows, or all rows of this block."""
        vectors = tuple(wide(self.share.held(weight, (), None, 0)) for weight in weights)
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
        """Compute the outputs of one row for each group of threads; the inputs are in registers."""
        statistics, formula, inputs, weights, outputs, scalars, made, kept = work
        row = step * self.rows + self.slot
        inside = row < inputs[0].sizes[0] if const_expr(self.rows > 1) else None
        tiles = tuple(wide(values) for values in held)
        if const_expr(len(kept) > 0):
            rounded = [self.share.rounded(array, part) for array, part in zip(kept, made(tiles), strict=True)]
            for array, values in zip(kept, rounded, strict=True):
                self.share.put(array, (row,), inside, 0, values)
            tiles = tuple(wide(values) for values in rounded)
        known = statistics(Step(tiles, weights, turn), self.columns, *scalars) + scalars
        for array, part in zip(outputs, formula(tiles, weights, known), strict=True):
            self.share.put(array, (row,), inside, 0, self.share.rounded(array, part))

    @cute.jit
    def run_backward(self, statistics, formula, share, inputs, weights, outputs, partial, sums, scalars):
        """Process this block's rows, then store its row of ``partial``."""
        vectors = tuple(wide(self.share.held(weight, (), None, 0)) for weight in weights)
        totals = [self.share.registers(Float32) for _ in range(sums)]
        for total in totals:
            total.fill(0.0)
        work = (statistics, formula, share, vectors, outputs, scalars, totals)
        # Rows change places in the code, which moves no registers.
        buffers = [self.empty_row(inputs) for _ in range(2 if self.ahead else 1)]
        count, turn = len(buffers), Int32(0)
        self.load_row(inputs, self.first, buffers[0])
        for start in cutlass.range(self.first, self.steps(inputs), count * self.stride, unroll=1):
            for n in cutlass.range_constexpr(count):
                row = start + n * self.stride
                if row < inputs[0].sizes[0]:
                    if const_expr(self.ahead):
                        self.load_row(inputs, row + self.stride, buffers[1 - n])
                    self.backward_step(work, buffers[n], row, turn)
                    if const_expr(not self.ahead):
                        self.load_row(inputs, row + self.stride, buffers[0])
                turn = turn ^ 1
        for n in cutlass.range_constexpr(sums):
            self.share.put(partial, (self.first,), None, n * self.columns, totals[n])

    @cute.jit
    def backward_step(self, work, held, row, turn, meanwhile: Callable = lambda: None):
        """Compute the outputs of a row with inputs in registers, and its share of the sums.

        ``meanwhile`` is called after the threads' exchange in the sums over the row.
        """
        statistics, formula, share, weights, outputs, scalars, totals = work
        tiles = tuple(wide(values) for values in held)
        known = statistics(Step(tiles, weights, turn), self.columns, *scalars) + scalars
        meanwhile()
        for array, part in zip(outputs, formula(tiles, weights, known), strict=True):
            self.share.put(array, (row,), None, 0, self.share.rounded(array, part))
        for total, part in zip(totals, share(tiles, weights, known), strict=True):
            total.store(total.load() + part.value)

    def steps(self, inputs: Any) -> Any:
        """Return the number of steps for all rows."""
        return (inputs[0].sizes[0] + (self.rows - 1)) // self.rows

    def rows_of(self, inputs: Any, step: Any, *, may_be_outside: bool) -> list[Any]:
        """Load a thread's parts of a step's row, for each input; zeros if the row does not exist."""
        row = step * self.rows + self.slot
        inside = row < inputs[0].sizes[0] if may_be_outside else None
        return [self.share.held(x, (row,), inside, 0) for x in inputs]

    def empty_row(self, inputs: Any) -> list[Any]:
        """Make registers for a thread's parts of a row; zeros beyond the end of the columns, where no load writes."""
        values = [self.share.registers(x.numeric) for x in inputs]
        if self.share.may_end(self.share.chunks - 1):
            for one in values:
                one.fill(0)
        return values

    @cute.jit
    def load_row(self, inputs, row, values):
        """Load a thread's parts of a row, if it exists."""
        if row < inputs[0].sizes[0]:
            for x, one in zip(inputs, values, strict=True):
                self.share.copy(x, (row,), None, 0, one, is_store=False)

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
        """Return elements of a row, and ``beyond`` for elements past its end."""
        share = self.share
        if not share.may_end(share.chunks - 1):
            return value
        inside = share.registers(Boolean)
        for c in range(share.chunks):
            for v in range(share.vector):
                inside[v, c] = share.column(c) < self.columns
        return cute.where(inside.load(), value, cute.full_like(value, beyond))

    def over_row(self, step: Step, values: Sequence[Any], how: str) -> tuple[Part, ...]:
        """Combine each thread's values over all threads of the row, in one exchange."""
        combine, neutral = {"add": (operator.add, 0.0), "max": (cute.arch.fmax, -math.inf)}[how]
        number, step.reduction = step.reduction, step.reduction + 1
        assert number < self.reductions, f"a row has more than {self.reductions} reductions"
        assert len(values) <= self.values, f"a reduction has more than {self.values} values"
        return tuple(Part(x) for x in self.exchange(values, combine, neutral, number, step.turn))
