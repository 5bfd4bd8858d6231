"""Gradients of normed and rotated heads (:mod:`tilekern.kernels.families.normed_rotations`) in CuTe DSL.

The kernel's own formula is compiled, with another loop around it. Several threads of a warp share a head; each holds
the same 16 bytes of both halves, so both numbers of a rotated pair are in one thread. The heads of all tokens are rows
in memory order. All blocks go over them side by side, and a thread loads its next rows while it computes one. A block
works on q or on k, in the ratio of their heads, so that a thread holds one weight and its sums. The sums stay in
registers to the end, and are then added up in a fixed order.
"""

from __future__ import annotations

import operator
from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute

from tilekern.kernels.cute.arguments import Argument
from tilekern.kernels.cute.sharing import WARP, Program, Share, wide
from tilekern.kernels.cute.words import Part
from tilekern.kernels.families import normed_rotations as family
from tilekern.kernels.families.rotations import write_halves
from tilekern.spec import ArrayParameter, ScalarParameter


class Step:
    """A thread's part of a step loaded ahead: the first head's place, angles, and heads in their stored dtype."""

    def __init__(self, share: Share, arrays: tuple[Argument, ...], turns: tuple[Argument, ...], together: int) -> None:
        self._place = cute.make_rmem_tensor((3,), Int32)
        self.angles = [share.registers(turn.numeric) for turn in turns]
        self.heads = [[[share.registers(x.numeric) for _ in range(2)] for x in arrays] for _ in range(together)]

    def keep(self, place: tuple[Any, ...]) -> None:
        """Keep a place in registers."""
        for axis, index in enumerate(place):
            self._place[axis] = index

    def kept(self) -> tuple[Any, ...]:
        """Return the place in registers."""
        return tuple(self._place[axis] for axis in range(3))


class Heads(Program):
    """The device function of one config.

    Args besides those of :class:`~tilekern.kernels.cute.sharing.Program`:
        heads: heads of q.
        kv_heads: heads of k.
        half: elements of half a head; a power-of-two number of vectors.
        vector: elements of a vector.
        together: heads of a token that a thread takes in one step, if q or k has that many.
        ahead: steps with loads in flight.
    """

    def __init__(
        self, function: Any, parameters: tuple[ArrayParameter | ScalarParameter, ...], *, capability: int, block: int,
        cluster: int, heads: int, kv_heads: int, half: int, vector: int, together: int, ahead: int, occupancy: int,
    ) -> None:  # fmt: skip
        # Constants of the cuTile loops, which do not run.
        tiles = {"tile_t": 1, "tile_h": 1, "tile_hk": 1, "width": half, "whole": True, "unrolled": False}
        known = {"heads": heads, "kv_heads": kv_heads, "half": half, **tiles, "bounded": False, "tma": False}
        instead: dict[Any, Any] = {family.each_step_with_sums: self._each_step_with_sums}
        instead |= {family.over_heads: self._over_heads, family.read_weight: self._read_weight}
        instead |= {write_halves: self._write_halves}
        threads = half // vector
        super().__init__(
            function, parameters, capability=capability, block=block, cluster=cluster, threads=threads,
            rows=block // threads, occupancy=occupancy, known=known, instead=instead,
        )  # fmt: skip
        self.heads, self.kv_heads, self.half, self.together, self.ahead = heads, kv_heads, half, together, ahead
        self.in_warp, self.in_block, self.share = WARP // threads, block // WARP, Share(self, half, vector)
        # Each warp's sums for a weight.
        self.shape_of_sums = (2 * half, self.in_block)

    # The loop.

    def _each_step_with_sums(self, read, angles, pull, q, k, turns, partial, sizes, form):
        self.run(pull, q, k, turns, partial, form)

    @cute.jit
    def run(self, pull, q, k, turns, partial, form):
        """Process this block's rows of q or of k; then store its row of ``partial``."""
        blocks, heads = self.stride, self.heads + self.kv_heads
        of_q = cutlass.max(cutlass.min((2 * self.heads * blocks + heads) // (2 * heads), blocks - 1), 1)
        if self.first < of_q:
            self.run_one(pull, q, turns, partial, form, self.heads, self.first, of_q, 0)
        else:
            self.run_one(pull, k, turns, partial, form, self.kv_heads, self.first - of_q, blocks - of_q, 1)

    @cute.jit
    def run_one(self, pull, work, turns, partial, form, heads, block, blocks, which):
        """Do :meth:`run` for q or for k: ``work`` belongs to it, and the block is one of its ``blocks``."""
        arrays, y, weight = work
        together = self.together_of(heads)
        sizes = (*arrays[0].sizes[:2], heads)
        rows, at_once = sizes[0] * sizes[1] * heads, self.in_warp * together
        # If so, either all rows of a warp exist or none.
        is_whole = heads % at_once == 0
        weights = tuple(wide(self.share.held(weight, (), None, start)) for start in self.starts)
        totals = [self.share.registers(Float32) for _ in range(2)]
        for total in totals:
            total.fill(0.0)
        warp, group = self.slot // self.in_warp, self.slot % self.in_warp
        first, stride = (block * self.in_block + warp) * at_once, blocks * self.in_block * at_once
        if first < rows:
            onward = self.place_of(stride * self.ahead, sizes)
            steps = [Step(self.share, arrays, turns, together) for _ in range(self.ahead)]
            for n in cutlass.range_constexpr(self.ahead):
                row = first + n * stride + group
                # A thread without a row loads an existing row, and stores nothing.
                steps[n].keep(self.place_of(Int32(cutlass.select_(row < rows, row, first)), sizes))
                self.load_angles(steps[n], turns)
                for u in cutlass.range_constexpr(together):
                    self.load_head(steps[n], u, arrays)
            for start in cutlass.range(first, rows, stride * self.ahead):
                for n in cutlass.range_constexpr(self.ahead):
                    row = start + n * stride + group
                    inside = None if const_expr(is_whole and n == 0) else row < rows
                    place = steps[n].kept()
                    steps[n].keep(self.moved(place, onward, row + stride * self.ahead < rows, sizes))
                    # Registers are read before the next loads go into them.
                    angles = tuple(wide(values) for values in steps[n].angles)
                    self.load_angles(steps[n], turns)
                    for u in cutlass.range_constexpr(together):
                        tiles = tuple(tuple(wide(half) for half in halves) for halves in steps[n].heads[u])
                        self.load_head(steps[n], u, arrays)
                        sums = tuple(Part(total.load()) for total in totals)
                        at = ((place[0], place[1], place[2] + u * self.in_warp), inside)
                        self.add(totals, pull(y, tiles, weights, angles, sums, at, None, form), inside)
        self.store_sums(partial, totals, which)

    @property
    def starts(self) -> tuple[int, int]:
        """Return the starts of a head's halves."""
        return 0, self.half

    def together_of(self, heads: int) -> int:
        """Return the heads of a token that a thread takes in one step."""
        most = self.together
        while most > 1 and heads % (self.in_warp * most):
            most //= 2
        return most

    # Places: the batch entry, the token and the head of a row.

    def place_of(self, row: Any, sizes: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the place of a row."""
        _, tokens, heads = sizes
        token = row // heads
        return token // tokens, token % tokens, row % heads

    def moved(
        self, place: tuple[Any, ...], by: tuple[Any, ...], is_there: Any, sizes: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """Return ``place`` advanced by the offset ``by`` if that row exists, else ``place``."""
        (b, t, h), (bs, ts, hs), (_, tokens, heads) = place, by, sizes
        carry = Int32(h + hs >= heads)
        h = h + hs - carry * heads
        t = t + ts + carry
        carry = Int32(t >= tokens)
        found = b + bs + carry, t - carry * tokens, h
        return tuple(Int32(cutlass.select_(is_there, *pair)) for pair in zip(found, place, strict=True))

    # Loads and stores.

    def load_angles(self, step: Step, turns: tuple[Argument, ...]) -> None:
        """Load the angles of a later step."""
        b, t, _ = step.kept()
        for array, values in zip(turns, step.angles, strict=True):
            place = (cutlass.min(b, array.sizes[0] - 1), t)
            self.share.copy(array, place, None, 0, values, is_store=False)

    def load_head(self, step: Step, number: int, arrays: tuple[Argument, ...]) -> None:
        """Load one head of a later step."""
        b, t, h = step.kept()
        for array, halves in zip(arrays, step.heads[number], strict=True):
            for values, start in zip(halves, self.starts, strict=True):
                place = (b, t, h + number * self.in_warp)
                self.share.copy(array, place, None, start, values, is_store=False)

    def _read_weight(self, weight, form):
        return weight

    def _write_halves(self, y, one, other, place, form):
        at, inside = place
        for part, start in zip((one, other), self.starts, strict=True):
            self.share.put(y, at, inside, start, self.share.rounded(y, part))

    # Sums.

    def _over_heads(self, one, other):
        shares = [part.value.reduce(cute.ReductionOp.ADD, 0.0, 0) for part in (one, other)]
        return tuple(map(Part, self.exchange(shares, operator.add, 0.0, 0, 0)))

    @cute.jit
    def add(self, totals, sums, inside):
        """Store the sums with a head's share, if the head exists."""
        if const_expr(inside is None) or inside:
            for total, part in zip(totals, sums, strict=True):
                total.store(part.value)

    @cute.jit
    def store_sums(self, partial, totals, which: int):
        """Add up all threads' sums for a weight into a row of ``partial``; the other weight's sums are zero."""
        sums, warp, size = self.sums, self.slot // self.in_warp, 2 * self.half
        for total, start in zip(totals, self.starts, strict=True):
            for v in cutlass.range_constexpr(self.share.vector):
                value = self.over_alike(total[v, 0])
                if self.slot % self.in_warp == 0:
                    sums[start + self.share.column(0) + v, warp] = value
        cute.arch.sync_threads()
        row = partial.address + partial.row((self.first,))
        for column in cutlass.range(self.slot * self.threads + self.lane, size, self.block):
            total = Float32(0.0)
            for i in cutlass.range_constexpr(self.in_block):
                total = total + sums[column, i]
            cute.make_tensor(row + which * size + column, cute.make_layout(1))[0] = total
            cute.make_tensor(row + (1 - which) * size + column, cute.make_layout(1))[0] = Float32(0.0)
