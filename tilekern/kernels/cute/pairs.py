"""The kernels of :mod:`tilekern.kernels.families.losses` in CuTe DSL: their own formulas, and another loop over a row.

A row is spread over all threads of a cluster of blocks. A thread goes over its vectors of both matrices in steps, and
loads all vectors of a step before it computes with one: so many loads are on their way at once. It adds up what its
elements add to the loss; these sums go through the shuffles of a warp, then those of all warps of the cluster into the
memory of its first block, one of whose warps puts them together in a fixed order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import FunctionType
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute

from tilekern.compile.rebinding import Rebinder
from tilekern.kernels.cute.arguments import NUMERIC
from tilekern.kernels.cute.long_rows import LongRows, LongShare, number_of
from tilekern.kernels.cute.sharing import WARP, store_remote
from tilekern.kernels.cute.words import Part, Words, bare
from tilekern.kernels.families import losses as family
from tilekern.spec import ArrayParameter, ScalarParameter, python_of

# Elements of a vector that a thread computes with together: two are rounded to 16 bits by one instruction, and the
# intermediate results of more would take registers from the loads that are on their way.
_TOGETHER = 2


def _comparable(function: Callable[..., Part]) -> Callable[..., Elements]:
    """A function of parts, with a result that may be compared."""
    return lambda *given, **named: Elements(function(*given, **named).value)


class Elements(Part):
    """Elements of a row that may be compared with others; so may what is made of them."""

    def __lt__(self, other: Any) -> Elements:
        return Elements(self.value < bare(other))

    def __eq__(self, other: Any) -> Any:
        return Elements(self.value == bare(other))

    __hash__ = None


# Those of a part give parts, which Python compares by identity.
for _name, _operator in vars(Part).items():
    if isinstance(_operator, FunctionType) and _name != "__init__":
        setattr(Elements, _name, _comparable(_operator))


class WordsOfPairs(Words):
    """The words of cuTile that these formulas use beside those of all kernels."""

    exp2 = staticmethod(_comparable(Words.exp2))
    where = staticmethod(_comparable(Words.where))

    @staticmethod
    def abs(x: Part) -> Elements:
        """See ``ct.abs``."""
        return Elements(cute.math.abs(x.value))

    @staticmethod
    def bitcast(x: Part, dtype: Any) -> Elements:
        """See ``ct.bitcast``."""
        return Elements(x.value.bitcast(NUMERIC[dtype.name]))

    @staticmethod
    def maximum(x: Part, y: Any, *, propagate_nan: bool = False) -> Elements:
        """See ``ct.maximum``."""
        return Elements(cute.math.max(x.value, _vector_of(y, x.value), propagate_nan=propagate_nan))

    @staticmethod
    def minimum(x: Part, y: Any, *, propagate_nan: bool = False) -> Elements:
        """See ``ct.minimum``."""
        return Elements(cute.math.min(x.value, _vector_of(y, x.value), propagate_nan=propagate_nan))


def _vector_of(x: Any, like: Any) -> Any:
    """A part's vector; of a number one that has as many elements as another."""
    return bare(x) if isinstance(x, Part) else cute.full_like(like, x, Float32)


class PairLoss(LongRows):
    """The device function of one config.

    Args beside those of :class:`~tilekern.kernels.cute.sharing.Program`:
        columns: of a row; whole vectors.
        vector: elements of a vector.
        unroll: vectors of each matrix that a thread loads in a step.
        persistent: whether clusters go on with further rows.
        flags: the kernel's constants of which the formula depends.
    """

    def __init__(
        self, function: Any, parameters: tuple[ArrayParameter | ScalarParameter, ...], *, capability: int, block: int,
        cluster: int, columns: int, vector: int, unroll: int, persistent: bool, occupancy: int, **flags: bool,
    ) -> None:  # fmt: skip
        # Of the cuTile loop, which is not run.
        sizes = {"tile_n": vector, "tma": False}
        instead: dict[Any, Any] = {family.each_row: self._each_row}
        super().__init__(
            function, parameters, capability=capability, block=block, cluster=cluster, threads=block, rows=1,
            occupancy=occupancy, known={"columns": columns, "persistent": persistent, **sizes, **flags},
            instead=instead,
        )  # fmt: skip
        # The frame's copy has the words of all kernels alone.
        self._body = Rebinder(WordsOfPairs(capability), instead).function(python_of(function))
        self.persistent, width = persistent, block * cluster * vector * unroll
        self.steps, rest = divmod(columns, width)
        self.step, self.rest = LongShare(self, width, vector), LongShare(self, rest, vector)
        # Each warp's sum, twice.
        self.shape_of_sums = (self.slots, 2)

    # The loops.

    def _each_row(
        self, formula, first, second, slope, loss, gradient, scalars, columns, tile_n, persistent, tma
    ):  # fmt: skip
        # Then a formula meets values of one shape alone.
        given = tuple(self.in_all_elements(x) if isinstance(x, Part) else x for x in scalars)
        self.run((lambda *tiles: formula(*tiles, *given), first, second, loss, gradient), slope)

    def is_ignored(self, work: Any, factor: Any) -> Any:
        """Whether a row does not count."""
        return factor == 0.0

    def in_all_elements(self, number: Part) -> Elements:
        """A number as the elements that a thread computes with together have it."""
        return Elements(cute.full((_TOGETHER,), number.value, Float32))

    @cute.jit
    def store_zeros(self, work, number):
        """The results of a row that does not count."""
        _, _, _, loss, gradient = work
        of_loss = number_of(loss, number)
        if self.place == 0:
            of_loss[0] = Float32(0.0)
        if const_expr(gradient is not None):
            zeros = self.step.registers(gradient.numeric)
            zeros.fill(0.0)
            self.each_step(lambda share, start: share.put(gradient, (number,), None, start, zeros))

    @cute.jit
    def run_counted(self, work, number, factor, turn):
        """The results of a row that counts."""
        _, _, _, loss, _ = work
        of_loss = number_of(loss, number)
        sums = cute.make_rmem_tensor((_TOGETHER,), Float32)
        sums.fill(0.0)
        self.each_step(lambda share, start: self.take(work, number, factor, sums, share, start))
        total = self.over_row(sums.load().reduce(cute.ReductionOp.ADD, 0.0, 0), turn)
        if self.place == 0:
            of_loss[0] = total * factor

    @cute.jit
    def each_step(self, do: Callable):
        """Do something for each step over a row, given a thread's share and the column where the step begins."""
        for step in cutlass.range(self.steps):
            do(self.step, Int64(step) * self.step.columns)
        if const_expr(self.rest.chunks > 0):
            do(self.rest, Int64(self.steps * self.step.columns))

    # A step.

    def take(self, work: Any, number: Any, factor: Any, sums: Any, share: LongShare, start: Any) -> None:
        """Add a thread's vectors of a step to its sums, and store their gradient."""
        _, first, second, _, _ = work
        held = [share.held(x, (number,), None, start) for x in (first, second)]
        share.each(lambda chunk: self.take_vector(work, number, factor, sums, share, start, held, chunk))

    def take_vector(
        self, work: Any, number: Any, factor: Any, sums: Any, share: LongShare, start: Any, held: list[Any], chunk: int
    ) -> None:  # fmt: skip
        """The same for one vector, in the place of which its gradient comes."""
        formula, _, _, _, gradient = work
        for begin in range(chunk * share.vector, (chunk + 1) * share.vector, _TOGETHER):
            pieces = [cute.make_tensor(values.iterator + begin, cute.make_layout(_TOGETHER)) for values in held]
            added, derivative = formula(*(Elements(piece.load().to(Float32)) for piece in pieces))
            sums.store(sums.load() + added.value)
            if gradient is not None:
                pieces[0].store((derivative.value * factor).to(gradient.numeric))
        if gradient is not None:
            share.copy_vector(gradient, (number,), start, chunk, held[0], is_store=True)

    # The sum over a row.

    @cute.jit
    def over_row(self, value, turn):
        """The sum over all threads of a row, for the first of them.

        ``turn`` is 0 and 1 in turns: a fast warp may be at the next row while the first one reads the sums of this one.
        """
        value = cute.arch.warp_reduction(value, operator.add, threads_in_group=WARP)
        if const_expr(self.slots > 1):
            self.pass_on(value, self.rank * self.warps + self.lane // WARP, turn)
            if self.place < WARP:
                value = self.put_together(turn)
        return value

    @cute.jit
    def pass_on(self, value, slot, turn):
        """Bring each warp's sum into the memory of the first block."""
        sums = self.sums
        if self.lane % WARP == 0:
            if const_expr(self.cluster == 1):
                sums[slot, turn] = value
            else:
                store_remote(cute.domain_offset((slot, turn), sums).iterator, Int32(0), value)
        self.wait_for_all()

    def put_together(self, turn: Any) -> Any:
        """The sum of all warps' sums, for the lanes of a warp."""
        width = min(WARP, self.slots)
        total = Float32(0.0)
        for n in range(self.slots // width):
            total = total + self.sums[self.lane % width + n * width, turn]
        return cute.arch.warp_reduction(total, operator.add, threads_in_group=width)
