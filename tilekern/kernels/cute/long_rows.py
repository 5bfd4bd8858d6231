"""Rows so long that all threads of a cluster of blocks share each of them; those that do not count are not read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
from cutlass import Int32, Int64, const_expr, cute

from tilekern.kernels.cute.arguments import Argument
from tilekern.kernels.cute.sharing import Program, Share


class LongShare(Share):
    """A thread's share of a long row, whose vectors are at constant distances from one address."""

    def column(self, chunk: int) -> Any:
        """As that of any share; in 64 bits, of which the compiler knows that no sum of them overflows."""
        program = self._program
        return Int64(program.place * self.vector) + chunk * program.threads * program.cluster * self.vector


class LongRows(Program):
    """A loop over rows, each with a number that says whether it counts.

    A subclass says so by ``is_ignored(work, number)``, and what is done with a row by ``store_zeros(work, row)`` or
    ``run_counted(work, row, number, turn)``. ``turn`` is 0 and 1 in turns: a fast thread may be at the next row while a
    slow one reads what was exchanged for this one.
    """

    # Whether clusters go on with further rows.
    persistent: bool
    is_ignored: Callable[[Any, Any], Any]
    store_zeros: Callable[[Any, Any], None]
    run_counted: Callable[[Any, Any, Any, Any], None]

    @cute.jit
    def run(self, work, numbers):
        """One row, or all that are this cluster's; ``numbers`` [rows] has that of each."""
        rows, turn = numbers.sizes[0], Int32(0)
        if const_expr(not self.persistent):
            self.run_row(work, self.first, number_of(numbers, self.first)[0], turn)
        elif self.first < rows:
            number = number_of(numbers, self.first)[0]
            for row in cutlass.range(self.first, rows, self.stride):
                # Then the loads of the next row wait for no number.
                following = number_of(numbers, cutlass.min(row + self.stride, rows - 1))[0]
                self.run_row(work, row, number, turn)
                # A row that does not count has no exchange.
                turn = turn ^ (1 - Int32(self.is_ignored(work, number)))
                number = following

    @cute.jit
    def run_row(self, work, row, number, turn):
        """The results of a row."""
        if self.is_ignored(work, number):
            self.store_zeros(work, row)
        else:
            self.run_counted(work, row, number, turn)


def number_of(array: Argument, place: Any) -> Any:
    """The number that so many others are before, as a tensor of one element."""
    return cute.make_tensor(array.address + place, cute.make_layout(1))
