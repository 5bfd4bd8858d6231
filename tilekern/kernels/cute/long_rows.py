"""Long rows, each shared by all threads of a cluster of blocks; rows that do not count are not read."""

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
        """Return the column in 64 bits, where the compiler knows that no sum overflows."""
        program = self._program
        return Int64(program.place * self.vector) + chunk * program.threads * program.cluster * self.vector


class LongRows(Program):
    """A loop over rows, each with a number that says whether it counts.

    A subclass defines ``is_ignored(work, number)``, and for a row ``store_zeros(work, row)`` and
    ``run_counted(work, row, number, turn)``. ``turn`` alternates between 0 and 1: a fast thread may be at the next row
    while a slow one reads the values exchanged for this one.
    """

    # Whether clusters go on with further rows.
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
                # Then the loads of the next row wait for no number.
                following = number_of(numbers, cutlass.min(row + self.stride, rows - 1))[0]
                self.run_row(work, row, number, turn)
                # A row that does not count has no exchange.
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
