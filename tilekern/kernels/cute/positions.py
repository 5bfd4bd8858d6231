"""Heads turned by the angles of three positions (:mod:`tilekern.kernels.qwen2vl_mrope`) in CuTe DSL.

The frequencies of a position, its section, are consecutive, and in models whole vectors: a thread's angles are of the
position of its first frequency, and it loads them as a vector, as it does in :mod:`tilekern.kernels.cute.turns`. A
thread in whose vector a section ends then loads each angle again, of its own position.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute

from tilekern.kernels.cute.arguments import Argument
from tilekern.kernels.cute.turns import Turns
from tilekern.kernels.cute.words import bare


class Positions(Turns):
    """The device function of one config; as that of :class:`Turns`."""

    def _each_step(self, read, angles, turn, q, k, turns, sums, sizes, form):
        _, time, height, _ = form
        # The first frequencies of the second and of the third position.
        self.edges = bare(time), bare(time + height)
        super()._each_step(read, angles, turn, q, k, turns, sums, sizes, form)

    def position_of(self, frequency: Any) -> Any:
        """The number of a frequency's position."""
        return sum(Int32(cutlass.select_(frequency >= edge, 1, 0)) for edge in self.edges)

    def angles_of(self, array: Argument, b: Any, t: Any) -> list[Any]:
        """A token's cosines or sines, the same for both halves of a head."""
        token = (cutlass.min(b, array.sizes[1] - 1), t)
        first = self.share.column(0)
        position, last = self.position_of(first), self.position_of(first + self.share.vector - 1)
        values = self.share.held(array, (position, *token), None, 0)
        self.load_mixed(array, token, first, values, position != last)
        return [values]

    @cute.jit
    def load_mixed(self, array, token, first, values, is_mixed):
        """Load each angle of a vector in which a section ends."""
        if is_mixed:
            self.load_each(array, token, first, values)

    def load_each(self, array: Argument, token: tuple[Any, ...], first: Any, values: Any) -> None:
        """Load the angles of a vector, each of its frequency's position."""
        for v in range(self.share.vector):
            offset = array.row((self.position_of(first + v), *token)) + first + v
            values[v] = cute.make_tensor(array.address + offset, cute.make_layout(1))[0]
