"""Heads turned by their tokens' angles (:mod:`tilekern.kernels.rope`) in CuTe DSL.

The kernel's own formula is compiled, with another division of work around it. A thread has the same 16 bytes of both
halves of a few heads of one token, so that numbers which turn together are in one thread, and loads the token's angles
once for all of them. It has one step and no loop: few instructions precede its first load, and all its loads are in
flight at once. The first blocks compute q, the others k.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, const_expr, cute

from tilekern.kernels.cute.arguments import Argument
from tilekern.kernels.cute.sharing import Program, Share, wide
from tilekern.kernels.families import rotations as family
from tilekern.spec import ArrayParameter, ScalarParameter


class Turns(Program):
    """The device function of one config.

    Args beside those of :class:`~tilekern.kernels.cute.sharing.Program`:
        heads: of q.
        kv_heads: of k.
        half: elements of half a head: whole vectors.
        vector: elements of a vector.
        together: heads of q that a thread takes of one token; they divide all of them.
        kv_together: the same for k.
        full: whether each half of a head has its own angles.
        inverse: whether heads are turned back.
        occupancy: blocks for which an SM must have registers. Where it is 0 the compiler saves registers: it puts some
            loads behind the arithmetic of others.
    """

    def __init__(
        self, function: Any, parameters: tuple[ArrayParameter | ScalarParameter, ...], *, capability: int, block: int,
        cluster: int, heads: int, kv_heads: int, half: int, vector: int, together: int, kv_together: int, full: bool,
        inverse: bool, occupancy: int,
    ) -> None:  # fmt: skip
        # Of the cuTile loops, which are not run.
        tiles = {"tile_t": 1, "tile_h": 1, "tile_hk": 1, "width": half, "whole": True, "unrolled": False}
        tiles |= {"bounded": False, "latency": 0, "tma": False}
        known = {"heads": heads, "kv_heads": kv_heads, "half": half, "full": full, "inverse": inverse, **tiles}
        threads = half // vector
        super().__init__(
            function, parameters, capability=capability, block=block, cluster=cluster, threads=threads,
            rows=block // threads, occupancy=occupancy, known=known,
            instead={family.each_step: self._each_step, family.write_halves: self._write_halves},
        )  # fmt: skip
        # Steps of a token, each of one thread's heads, and these heads.
        self.of_q, self.of_k = (heads // together, together), (kv_heads // kv_together, kv_together)
        self.full, self.starts, self.share = full, (0, half), Share(self, half, vector)

    # Which heads are a thread's.

    def _each_step(self, read, angles, turn, q, k, turns, sums, sizes, form):
        self.run(turn, q, k, turns, form)

    @cute.jit
    def run(self, turn, q, k, turns, form):
        """The heads of q, or those of k, that are this block's."""
        steps = steps_of(q, self.of_q)
        # Blocks of q need not wait for a division.
        if self.first * self.rows < steps:
            self.run_one(turn, q, turns, form, self.of_q, self.first)
        else:
            blocks = (steps + self.rows - 1) // self.rows
            self.run_one(turn, k, turns, form, self.of_k, self.first - blocks)

    @cute.jit
    def run_one(self, turn, work, turns, form, steps, block):
        """As :meth:`run`: ``work`` is of q or of k, for which this is the block of that number."""
        step = block * self.rows + self.slot
        is_there = step < steps_of(work, steps)
        if const_expr(self.block % self.threads != 0):
            # The last threads are too few for a head.
            is_there = is_there & (self.slot < self.rows)
        if is_there:
            self.run_step(turn, work, turns, form, steps, step)

    @cute.jit
    def run_step(self, turn, work, turns, form, steps, step):
        """Turn a thread's heads, which are as far apart as a token has steps: those of a warp lie side by side."""
        (array,), y, weights = work
        apart, together = steps
        batch, _, tokens, _ = array.sizes
        token, head, b = step // apart, step % apart, Int32(0)
        if batch > 1:
            # Where there is one batch entry no load waits for this division.
            b = token // tokens
        t = token - b * tokens
        places = [(b, head + n * apart, t) for n in range(together)]
        heads = [self.loaded(array, place, self.starts) for place in places]
        angles = tuple(wide(x) for turned in turns for x in self.angles_of(turned, b, t))
        for place, halves in zip(places, heads, strict=True):
            turn(y, (tuple(map(wide, halves)),), weights, angles, (), place, None, form)

    # Loads and stores.

    def loaded(self, array: Argument, place: tuple[Any, ...], starts: tuple[int, ...]) -> list[Any]:
        """A thread's share of a row from each start on, as it is stored."""
        return [self.share.held(array, place, None, start) for start in starts]

    def angles_of(self, array: Argument, b: Any, t: Any) -> list[Any]:
        """A token's cosines or sines for each half of a head: its own, or those of the first half."""
        place = (cutlass.min(b, array.sizes[0] - 1), t)
        loaded = self.loaded(array, place, self.starts if self.full else self.starts[:1])
        return [loaded[0], loaded[-1]]

    def _write_halves(self, y, one, other, place, form, tma):
        for part, start in zip((one, other), self.starts, strict=True):
            self.share.put(y, place, None, start, self.share.rounded(y, part))


def steps_of(work: tuple[Any, ...], steps: tuple[int, int]) -> Any:
    """Steps of all tokens of q or of k."""
    batch, _, tokens, _ = work[0][0].sizes
    return batch * tokens * steps[0]
