"""Cross entropy of rows of logits, loss and gradient in one launch, in CuTe DSL: cuTile's formulas in other loops.

A row is spread over all threads of a cluster of blocks, which hold it in registers in its stored dtype: it is read from
memory once, and its gradient is computed from the registers. A thread finds the maximum of its share and the sum of
exponentials relative to it; a warp combines the results of its threads. The results of all warps go to all blocks of
the cluster in one exchange, and each warp combines them in the same order.

A thread reads only its own columns, the target's logit included, and reads all of them before it stores one: so
``dlogits`` may be the memory of ``logits``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, const_expr, cute

from tilekern.compile.rebinding import Rebinder
from tilekern.kernels.cross_entropy import fused as family
from tilekern.kernels.cross_entropy import tiles
from tilekern.kernels.cross_entropy.problem import PLAIN
from tilekern.kernels.cute.arguments import Argument
from tilekern.kernels.cute.sharing import WARP, Program, Share, store_remote
from tilekern.kernels.cute.words import Part, Words, bare
from tilekern.spec import ArrayParameter, ScalarParameter


class LongShare(Share):
    """A thread's share of a long row, whose vectors are at constant distances from one address."""

    def column(self, chunk: int) -> Any:
        """Return the column in 64 bits, so that the compiler knows that no sum overflows."""
        program = self._program
        return Int64(program.place * self.vector) + chunk * program.threads * program.cluster * self.vector


class LongRows(Program):
    """A loop over rows, each with a number that says whether it counts.

    A subclass defines ``is_ignored(work, number)``, and for a row ``store_zeros(work, row)`` and
    ``run_counted(work, row, number, turn)``. ``turn`` alternates between 0 and 1: a fast thread may be at the next row
    while a slow one reads the values exchanged for this one.
    """

    # Whether clusters process further rows.
    persistent: bool
    is_ignored: Callable[[Any, Any], Any]
    store_zeros: Callable[[Any, Any], None]
    run_counted: Callable[[Any, Any, Any, Any], None]

    @cute.jit
    def run(self, work, numbers):
        """Run one row, or all rows of this cluster; ``numbers`` [rows] holds their numbers."""
        rows, turn = numbers.sizes[0], Int32(0)
        if const_expr(not self.persistent):
            self.run_row(work, self.first, number_of(numbers, self.first)[0], turn)
        elif self.first < rows:
            number = number_of(numbers, self.first)[0]
            for row in cutlass.range(self.first, rows, self.stride):
                # Then the loads of the next row need not wait for a number.
                following = number_of(numbers, cutlass.min(row + self.stride, rows - 1))[0]
                self.run_row(work, row, number, turn)
                # An ignored row has no exchange.
                turn = turn ^ (1 - Int32(self.is_ignored(work, number)))
                number = following

    @cute.jit
    def run_row(self, work, row, number, turn):
        """Store the results of a row."""
        if self.is_ignored(work, number):
            self.store_zeros(work, row)
        else:
            self.run_counted(work, row, number, turn)


def number_of(array: Argument, place: Any) -> Any:
    """Return the element at a place of an array, as a tensor of one element."""
    return cute.make_tensor(array.address + place, cute.make_layout(1))


class Row:
    """A row being computed; formulas take it instead of the row's number.

    Attributes:
        number: the row's number.
        held: a thread's share of its logits; the gradient overwrites it.
        is_class: whether its label is a class.
        is_mine: whether this thread stores the loss: the thread with the target's logit, if the target is a class.
        turn: the turn of the exchange, 0 or 1.
    """

    def __init__(self, number: Any, held: Any, is_class: Any, is_mine: Any, turn: Any) -> None:
        self.number, self.held, self.is_class, self.is_mine, self.turn = number, held, is_class, is_mine, turn

    def forget(self) -> None:
        """Make the compiler widen vectors again: float32 copies would take twice the registers."""
        if self.held.element_type.width == Float32.width:
            return
        # The compiler does not know that this is zero, since grids have one axis.
        _, zero, _ = cute.arch.block_idx()
        words = cute.recast_tensor(self.held, Int32)
        for n in range(cute.size(words)):
            words[n] = words[n] + zero

    def wide(self, chunk: int) -> Part:
        """Return a vector in float32."""
        return Part(self.held[None, chunk].load().to(Float32))


class Columns:
    """The columns of a thread's vector, for comparison with a label."""

    def __init__(self, first: Any, count: int) -> None:
        self._first, self._count = first, count

    def __eq__(self, label: Any) -> Any:
        found, offset = cute.make_rmem_tensor((self._count,), Boolean), label - self._first
        for v in range(self._count):
            found[v] = offset == v
        return Part(found.load())

    __hash__ = None


class WordsOfLosses(Words):
    """The cuTile functions that these formulas use besides :class:`Words`; a tile (1, 1) is a number.

    Args:
        program: the program whose shares of rows are stored.
        capability: compute capability of the GPU as one number: 90 for sm_90.
    """

    def __init__(self, program: FusedLoss, capability: int) -> None:
        super().__init__(capability)
        self._program = program

    @staticmethod
    def full(shape: tuple[int, ...], value: float, dtype: Any) -> Part:
        """See ``ct.full``."""
        return Part(Float32(value))

    @staticmethod
    def zeros(shape: tuple[int, ...], dtype: Any) -> Part:
        """See ``ct.zeros``."""
        return Part(Float32(0.0))

    @staticmethod
    def log2(x: Part) -> Part:
        """See ``ct.log2``."""
        return Part(cute.math.log2(x.value))

    @staticmethod
    def isnan(x: Part) -> Part:
        """See ``ct.isnan``."""
        return Part(x.value != x.value)

    @staticmethod
    def where(condition: Part, x: Any, y: Any) -> Part:
        """See ``ct.where``."""
        if isinstance(condition.value, Boolean):
            return Part(Float32(cutlass.select_(condition.value, *(Float32(bare(one)) for one in (x, y)))))
        return Words.where(condition, x, y)

    def store(
        self, array: Argument, place: tuple[Row, int], tile: Part, *, check_bounds: bool, allow_tma: bool
    ) -> None:
        """See ``ct.store``; the place has the number of a thread's vector."""
        row, chunk = place
        row.held[None, chunk].store(tile.value)
        self._program.share.copy_vector(array, (row.number,), 0, chunk, row.held, is_store=True)


class FusedLoss(LongRows):
    """The device function of one config.

    Args besides those of :class:`~tilekern.kernels.cute.sharing.Program`:
        columns: columns of a row; whole vectors.
        vector: elements of a vector.
        persistent: whether clusters process further rows.
    """

    def __init__(
        self, function: Any, parameters: tuple[ArrayParameter | ScalarParameter, ...], *, capability: int, block: int,
        cluster: int, columns: int, vector: int, persistent: bool, occupancy: int,
    ) -> None:  # fmt: skip
        # Constants of the cuTile loops, which do not run.
        sizes = {"tile_n": vector, "unroll": 1, "tma": False}
        known = {"columns": columns, "persistent": persistent, **sizes, **PLAIN}
        super().__init__(
            function, parameters, capability=capability, block=block, cluster=cluster, threads=block, rows=1,
            occupancy=occupancy, known=known, instead={family.each_row: self._each_row},
        )  # fmt: skip
        self.columns, self.persistent, self.share = columns, persistent, LongShare(self, columns, vector)
        instead: dict[Any, Any] = {tiles.target_logit: self._target_logit, tiles.scan_row: self._scan_row}
        instead |= {tiles.store_row: self._store_row, tiles.load_logits: self._load_logits}
        instead |= {tiles.columns_of: self._columns_of}
        formulas: Any = (tiles.exponential, tiles.store_loss, family.gradient_of_row, tiles.store_gradient)
        copies = map(Rebinder(WordsOfLosses(self, capability), instead).function, formulas)
        self._exponential, self._store_loss, self._gradient_of_row, self._store_gradient = copies
        # For each warp a maximum and a sum, twice.
        self.shape_of_sums = (self.slots, 2, 2)

    # The loop.

    def _each_row(
        self, logits, target, scale, ignore_index, loss, lse, dlogits, tile_n, unroll, persistent, options
    ):  # fmt: skip
        self.run((logits, scale, ignore_index.value, loss, lse, dlogits, options), target)

    def is_ignored(self, work: Any, label: Any) -> Any:
        """Return whether a row's label is the ignored one."""
        return label == work[2]

    @cute.jit
    def store_zeros(self, work, number):
        """Store the results of an ignored row."""
        _, _, _, loss, lse, dlogits, _ = work
        of_loss, of_lse = number_of(loss, number), number_of(lse, number)
        if self.place == 0:
            of_loss[0] = Float32(0.0)
            of_lse[0] = Float32(0.0)
        zeros = self.share.registers(dlogits.numeric)
        zeros.fill(0.0)
        self.share.put(dlogits, (number,), None, 0, zeros)

    @cute.jit
    def run_counted(self, work, number, label, turn):
        """Store the results of a row that is not ignored."""
        logits, scale, _, loss, lse, dlogits, options = work
        held, vector = self.share.registers(logits.numeric), self.share.vector
        # Elements beyond the end of the row add nothing to a sum of exponentials.
        held.fill(-math.inf)
        self.share.copy(logits, (number,), None, 0, held, is_store=False)
        is_class = (label >= 0) & (label < self.columns)
        holder = Int32(cutlass.select_(is_class, label // vector % (self.threads * self.cluster), Int32(0)))
        row = Row(number, held, is_class, self.place == holder, turn)
        factor = Part(number_of(scale, number)[0])
        found = self._store_loss(logits, loss, lse, row, label, vector, 1, options)
        shift, factors = self._gradient_of_row(factor, found, options)
        row.forget()
        self.share.each(
            lambda chunk: self._store_gradient(
                logits, dlogits, row, chunk, label, shift, factors, vector, False, options
            )
        )

    # Functions of a row that formulas call.

    @cute.jit
    def _target_logit(self, logits, row, label, softcap, capped):
        """Return the target's logit, or 0 in threads that do not hold it."""
        value = cute.make_rmem_tensor((1,), Float32)
        value[0] = Float32(cutlass.select_(row.is_class, Float32(0.0), Float32(tiles.NAN)))
        there = number_of(logits, logits.row((row.number,)) + label)
        if row.is_class & row.is_mine:
            value[0] = there[0].to(Float32)
        return Part(value[0])

    def _load_logits(self, logits, row, c, tile_n, bounded, tma):
        return row.wide(c)

    def _columns_of(self, c, tile_n):
        return Columns(Int32(self.share.column(c)), tile_n)

    @cute.jit
    def _store_row(self, array, row, value):
        there = number_of(array, row.number)
        if row.is_mine:
            there[0] = value.value

    def _scan_row(self, logits, row, tile_n, unroll, options):
        top, total = Float32(tiles.LOWEST), Float32(0.0)
        for chunk in range(self.share.chunks):
            top = cute.arch.fmax(top, row.wide(chunk).value.reduce(cute.ReductionOp.MAX, tiles.LOWEST, 0))
        row.forget()
        for chunk in range(self.share.chunks):
            total = total + self._exponential(row.wide(chunk) - top).value.reduce(cute.ReductionOp.ADD, 0.0, 0)
        top, total = self.over_row(*self.over_warp([(top, total)], WARP), row.turn)
        return Part(top), Part(total), None

    def over_warp(self, found: list[Any], width: int) -> tuple[Any, Any]:
        """Combine maxima, and sums of exponentials relative to each, over ``width`` lanes of a warp."""
        top = found[0][0]
        for other, _ in found[1:]:
            top = cute.arch.fmax(top, other)
        top = cute.arch.warp_reduction(top, cute.arch.fmax, threads_in_group=width)
        total = Float32(0.0)
        for other, part in found:
            total = total + part * self._exponential(Part(other - top)).value
        return top, cute.arch.warp_reduction(total, operator.add, threads_in_group=width)

    @cute.jit
    def over_row(self, top, total, turn):
        """Combine the results of all warps of the cluster like :meth:`over_warp`; all get the same values."""
        warp, in_warp, sums = self.lane // WARP, self.lane % WARP, self.sums
        slot = self.rank * self.warps + warp
        if const_expr(self.cluster == 1):
            if in_warp == 0:
                sums[slot, 0, turn] = top
                sums[slot, 1, turn] = total
        elif in_warp < self.cluster:
            store_remote(cute.domain_offset((slot, 0, turn), sums).iterator, in_warp, top)
            store_remote(cute.domain_offset((slot, 1, turn), sums).iterator, in_warp, total)
        self.wait_for_all()
        width = min(WARP, self.slots)
        slots = [in_warp % width + n * width for n in range(self.slots // width)]
        return self.over_warp([(sums[slot, 0, turn], sums[slot, 1, turn]) for slot in slots], width)
