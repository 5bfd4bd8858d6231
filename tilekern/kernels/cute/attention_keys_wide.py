"""dk and dv of attention by tiles of keys, and dS for dq, for heads of 256: a warpgroup adds up dv, another one dk.

A block owns 64 keys. The first warpgroup computes P from S^T = k q^T, hands it in float32 to the second one through
shared memory, and adds up dv += P^T dout. The second computes dP^T = v dout^T and dS, stores it, and adds up
dk += dS^T q. Each has most of its left operand, k or v, in registers, and takes 32 queries a step.

A step's product with k or v starts together with the sums of the step before, so that P and dS are computed beside
these sums: the matrix units wait only while P and dS are rounded.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, const_expr, cute
from cutlass.cute.nvgpu import warpgroup

from tilekern.kernels.cute.attention_keys import AttentionKeys
from tilekern.kernels.cute.sharing import WARP

# Warps, and threads, of a warpgroup.
_WARPS, _THREADS = 4, 128


class WideAttentionKeys(AttentionKeys):
    """The device function of one config."""

    @property
    def copied_bytes(self) -> int:
        """Return the bytes of P on its way to the other warpgroup."""
        return 4 * 64 * self.rows

    def make_barriers(self) -> None:
        """Also make those of P, for each pair of warps: that it is there, and that it has been read."""
        super().make_barriers()
        for n in range(2 * _WARPS):
            cute.arch.mbarrier_init(self.loaded + 1 + n, 1)

    @cute.jit
    def consume(self, k, v, dk, dv, kept):
        """Add up dv in one warpgroup, dk in the other."""
        self.part, warp = Int32(0), self.warp % _WARPS
        self.products()
        self.there, self.read = self.loaded + 1 + warp, self.loaded + 1 + _WARPS + warp
        # A thread's elements of P, 4 at a time side by side with those of other threads.
        place = self.copies + cute.assume((warp * WARP + self.lane) * 4, divby=4)
        self.handed = cute.make_tensor(place, cute.make_layout((4, self.rows // 8), stride=(1, 4 * _THREADS)))
        if self.warp < 2 * _WARPS:
            self.add_weights(k, dv)
        else:
            self.add_gradients(v, dk, kept)

    @cute.jit
    def add_weights(self, k, dv):
        """Compute P and hand it over; add up dv."""
        own, sums, scores, weights = self.owned(k, 0), self.sums(), self.scores(), self.left()
        slopes = self.scores() if const_expr(self.capped) else scores
        sums.fill(0.0)
        cute.recast_tensor(weights, Int32).fill(0)
        stage, phase, before = Int32(0), Int32(0), Int32(0)
        for n in cutlass.range(self.steps, unroll=1):
            self.start_step(scores, own, self.q, stage, phase, sums, weights, self.dout_t, before)
            self.weigh(scores, scores, slopes, stage)
            # The other warpgroup has read the P before.
            cute.arch.mbarrier_wait(self.read, n % 2 ^ 1)
            self.slope(slopes, scores)
            cute.autovec_copy(cute.make_tensor(slopes.iterator, cute.make_layout(self.handed.shape)), self.handed)
            self.tell(self.there)
            self.end_step(n, before)
            weights.store(scores.load().to(self.half))
            before = stage
            stage, phase = self.following(stage, phase)
        self.add_last(sums, weights, self.dout_t, before)
        self.store(dv, sums, Float32(1.0))

    @cute.jit
    def add_gradients(self, v, dk, kept):
        """Compute dS from the P that is handed over, and store it; add up dk."""
        # Bytes from a key to the next in a unit of dS.
        pitch = 2 * Int32(kept.row((0, 0, 1)))
        own, sums, pulled, gradients = self.owned(v, 1), self.sums(), self.scores(), self.left()
        weights = cute.make_rmem_tensor(4, Float32)
        sums.fill(0.0)
        cute.recast_tensor(gradients, Int32).fill(0)
        stage, phase, before = Int32(0), Int32(0), Int32(0)
        for n in cutlass.range(self.steps, unroll=1):
            self.start_step(pulled, own, self.dout, stage, phase, sums, gradients, self.q_t, before)
            delta = self.rows_of(self.stages + stage)
            cute.arch.mbarrier_wait(self.there, n % 2)
            for j in cutlass.range_constexpr(self.rows // 8):
                cute.autovec_copy(self.handed[None, j], weights)
                for i in cutlass.range_constexpr(4):
                    pulled[4 * j + i] = weights[i] * (pulled[4 * j + i] - delta[j * 2 + i % 2])
            self.tell(self.read)
            self.end_step(n, before)
            gradients.store(pulled.load().to(self.half))
            self.keep(gradients, self.notes[1, stage], pitch)
            before = stage
            stage, phase = self.following(stage, phase)
        self.add_last(sums, gradients, self.q_t, before)
        self.store(dk, sums, self.scale)

    @cute.jit
    def start_step(self, products, own, right, stage, phase, sums, left, sums_right, before):
        """Compute a step's product, and start the sums of the step before: of zeros, at the first."""
        cute.arch.mbarrier_wait(self.full + stage, phase)
        self.start(products, own, right[None, None, None, stage])
        self.add(sums, left, sums_right[None, None, None, before])
        warpgroup.wait_group(1)

    @cute.jit
    def end_step(self, n, before):
        """Wait for the sums of the step before, and free its stage."""
        warpgroup.wait_group(0)
        if n > 0:
            self.tell(self.empty + before)

    @cute.jit
    def add_last(self, sums, left, right, before):
        """Compute the sums of the last step."""
        if self.steps > 0:
            self.add(sums, left, right[None, None, None, before])
            warpgroup.wait_group(0)
