"""Sums over rows with loads far ahead: rows are copied into a ring in shared memory, without passing through registers.

Thread 0 of a block makes the GPU copy whole rows (``cp.async.bulk``) into the ring's stages; each stage has a barrier
in shared memory (mbarrier) that signals when the whole row has arrived. Since registers do not hold later rows, the
blocks of the sum over ``partial``, which is launched next, fit beside these blocks from the start.
"""

from __future__ import annotations

import functools
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import cpasync

from tilekern.kernels.cute.arguments import ALIGNED_BYTES
from tilekern.kernels.cute.rows import Rows
from tilekern.kernels.cute.sharing import wide
from tilekern.kernels.families.cute_ring import row_bytes
from tilekern.spec import ArrayParameter, ScalarParameter


class StagedRow:
    """A row in shared memory; a thread reads its parts of it like from an array."""

    def __init__(self, numeric: Any, address: Any) -> None:
        self.numeric, self.address = numeric, address

    def row(self, place: tuple[Any, ...]) -> Any:
        """Return the start of the row, the only one."""
        return Int64(0)


class Ring(Rows):
    """The device function of one config.

    Args besides those of :class:`~tilekern.kernels.cute.sharing.Program`:
        columns: columns of a row; whole vectors.
        vector: elements of a vector.
        stages: the number of rows in the ring.
        early: whether a stage is refilled before the outputs of its row are computed, instead of after.
        flags: the kernel's constants that are not sizes.
    """

    def __init__(
        self, function: Any, parameters: tuple[ArrayParameter | ScalarParameter, ...], *, capability: int, block: int,
        cluster: int, columns: int, vector: int, stages: int, early: bool, occupancy: int, **flags: bool,
    ) -> None:  # fmt: skip
        super().__init__(
            function, parameters, capability=capability, block=block, cluster=cluster, columns=columns, threads=block,
            rows=1, vector=vector, persistent=True, ahead=True, occupancy=occupancy, **flags,
        )  # fmt: skip
        self.stages, self.early, self.stage_bytes = stages, early, row_bytes(parameters, columns)
        assert self.slots > 1, "the threads of a single warp meet at no barrier, which a stage's refill must wait for"

    @cute.jit
    def run_backward(self, statistics, formula, share, inputs, weights, outputs, partial, sums, scalars):
        """Process this block's rows, then store its row of ``partial``."""
        # The next launch waits for this kernel's end by itself, if it is launched early at all.
        cute.arch.griddepcontrol_launch_dependents()
        self.prepare()
        read = self.columns * sum(x.numeric.width for x in inputs) // 8
        assert read == self.stage_bytes, f"a stage has {self.stage_bytes} bytes, a row of each input {read}"
        rows = inputs[0].sizes[0]
        for stage in cutlass.range_constexpr(self.stages):
            self.fetch(inputs, self.first + stage * self.stride, Int32(stage), rows)
        vectors = tuple(wide(self.share.held(weight, (), None, 0)) for weight in weights)
        totals = [self.share.registers(Float32) for _ in range(sums)]
        for total in totals:
            total.fill(0.0)
        work = (statistics, formula, share, vectors, outputs, scalars, totals)
        stage, phase, turn = Int32(0), Int32(0), Int32(0)
        for row in cutlass.range(self.first, rows, self.stride, unroll=1):
            cute.arch.mbarrier_wait(self.barriers + stage, phase)
            held = self.read_stage(inputs, stage)
            # After the exchange in the sums over the row, all threads have read their parts.
            refill = functools.partial(self.fetch, inputs, row + self.stages * self.stride, stage, rows)
            if const_expr(self.early):
                self.backward_step(work, held, row, turn, refill)
            else:
                self.backward_step(work, held, row, turn)
                refill()
            is_last = stage == self.stages - 1
            stage = Int32(cutlass.select_(is_last, Int32(0), stage + 1))
            phase = Int32(cutlass.select_(is_last, phase ^ 1, phase))
            turn = turn ^ 1
        for n in cutlass.range_constexpr(sums):
            self.share.put(partial, (self.first,), None, n * self.columns, totals[n])

    @cute.jit
    def prepare(self):
        """Make one barrier for each stage; only thread 0 arrives on it."""
        self.barriers = cute.arch.alloc_smem(Int64, self.stages, alignment=8)
        self.memory = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=128)
        if self.lane == 0:
            for stage in cutlass.range_constexpr(self.stages):
                cute.arch.mbarrier_init(self.barriers + stage, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

    @cute.jit
    def fetch(self, inputs, row, stage, rows):
        """Start the copy of a row of each input into a stage, if that row exists."""
        if (self.lane == 0) & (row < rows):
            barrier = self.barriers + stage
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.stage_bytes)
            for x, address in zip(inputs, self.staged(inputs, stage), strict=True):
                self.copy_row(x, row, address, barrier)

    def copy_row(self, array: Any, row: Any, target: Any, barrier: Any) -> None:
        """Start the copy of a row."""
        bits, layout = self.columns * array.numeric.width, cute.make_layout(self.columns)
        atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), array.numeric, num_bits_per_copy=bits)
        source = cute.make_tensor(array.address + array.row((row,)), layout)
        cute.copy(atom, source, cute.make_tensor(target, layout), mbar_ptr=barrier)

    def staged(self, inputs: Any, stage: Any) -> list[Any]:
        """Return the rows of all inputs in a stage."""
        places, offset = [], stage * self.stage_bytes
        for x in inputs:
            address = self.memory + cute.assume(offset, divby=ALIGNED_BYTES)
            places.append(cute.recast_ptr(address, dtype=x.numeric))
            offset = offset + self.columns * x.numeric.width // 8
        return places

    def read_stage(self, inputs: Any, stage: Any) -> list[Any]:
        """Read a thread's parts of a stage's rows into registers."""
        rows = [StagedRow(x.numeric, place) for x, place in zip(inputs, self.staged(inputs, stage), strict=True)]
        return [self.share.held(row, (), None, 0) for row in rows]
