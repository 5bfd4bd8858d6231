"""The threads of a cluster of blocks at work: their registers, where each of them is, and the barriers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any

import numpy as np
from ptx_barriers import Barriers, Mbarrier
from ptx_memory import GlobalMemory, SharedMemory, Who
from ptx_parser import WARP, Program, PtxError

# What a step gives that takes threads apart or makes them wait; any other one gives the next step, or None for the one
# behind it.
PARTED = -1
_FAR = 1 << 60
_AT_BLOCK, _AT_CLUSTER, _ASLEEP = 1, 2, 3
SPECIAL = (
    "%tid.x", "%ntid.x", "%ctaid.x", "%nctaid.x", "%laneid", "%cluster_ctarank", "%cluster_ctaid.x",
    "%cluster_nctarank", "%cluster_nctaid.x", "%clusterid.x", "%nclusterid.x", "%ctaid.y",
)  # fmt: skip

Step = Callable[["Cluster"], "int | None"]


class Cluster:
    """The threads of a cluster at work.

    Attributes:
        mask: which threads run; None for all.
        registers: the bits of each register in all threads.
        known: the threads that have written each register: True for all, None for no thread.
    """

    def __init__(
        self, program: Program, steps: Sequence[Step], parameters: dict[str, Any], memory: GlobalMemory, grid: int,
        cluster: int, first: int, dynamic_bytes: int, random: Random,
    ) -> None:  # fmt: skip
        self.program, self.steps, self.parameters, self.memory = program, steps, parameters, memory
        self.count, self.cluster = program.threads * cluster, cluster
        warps = -(-program.threads // WARP)
        self.shared = SharedMemory(program.shared_bytes + dynamic_bytes, cluster, warps)
        self.barriers = Barriers(self.shared, memory, self.count, random)
        self.registers: list[Any] = [None] * len(program.registers)
        self.known: list[Any] = [None] * len(program.registers)
        self.mask: Any = None
        self.rank, thread = np.divmod(np.arange(self.count), program.threads)
        self.block, self.warp, self.thread = first + self.rank, thread // WARP, np.arange(self.count)
        self.lanes = Lanes(cluster, program.threads)
        numbers = (
            thread, program.threads, self.block, grid, thread % WARP, self.rank, self.rank, cluster, cluster,
            first // cluster, grid // cluster, 0,
        )  # fmt: skip
        self.special = {
            name: np.full(self.count, number, np.uint32) for name, number in zip(SPECIAL, numbers, strict=True)
        }
        self._pcs = np.zeros(self.count, np.int64)
        self._waiting = np.zeros(self.count, np.int8)
        self._ended = np.zeros(self.count, bool)
        # Of the cluster's barrier: who has arrived and not passed, how often each has arrived, how often all have.
        self._pending = np.zeros(self.count, bool)
        self._arrivals = np.zeros(self.count, np.int64)
        self._phases, self._is_relaxed = 0, False

    def run(self) -> None:
        """Run all threads to their end."""
        while not self._ended.all():
            ready = ~self._ended & (self._waiting == 0)
            if not ready.any():
                barrier = self.barriers.finish_copies()
                if barrier is None:
                    raise PtxError(f"deadlock: {self._stuck()}")
                self.wake([barrier])
                continue
            pcs = np.where(ready, self._pcs, _FAR)
            pc = int(pcs.min())
            mask = pcs == pc
            self.mask = None if mask.all() else mask
            self._advance(pc, _FAR if self.mask is None else int(pcs[~mask].min()))

    def _advance(self, pc: int, meeting: int) -> None:
        """Run some threads until they part, wait, or meet others."""
        steps = self.steps
        while pc < meeting:
            following = steps[pc](self)
            if following is None:
                pc += 1
            elif following != PARTED:
                pc = following
            else:
                return
        self._pcs[self.running()] = pc

    def _stuck(self) -> str:
        """Say who waits where."""
        waiting = np.unique(self._pcs[self._waiting > 0]) - 1
        texts = "; ".join(self.program.instructions[pc].text for pc in waiting)
        return f"{int((self._waiting > 0).sum())} threads wait at {texts}; {int(self._ended.sum())} have ended"

    def running(self) -> Any:
        """Return which threads run, as an array."""
        return np.ones(self.count, bool) if self.mask is None else self.mask

    def of_running(self, values: Any) -> Any:
        """The values of the threads that run, of values of all threads or one for all of them."""
        if len(values) != self.count:
            values = np.repeat(values, self.count)
        return values if self.mask is None else values[self.mask]

    def spread(self, values: Any) -> Any:
        """An array over all threads, with values of those that run."""
        if self.mask is None:
            return np.ascontiguousarray(values)
        everywhere = np.zeros(self.count, values.dtype)
        everywhere[self.mask] = values
        return everywhere

    def who(self) -> Who:
        """The threads that run."""
        return Who(*map(self.of_running, (self.rank, self.warp, self.thread)))

    def check_known(self, register: int, text: str) -> None:
        """Raise if a thread that runs has not written a register."""
        known = self.known[register]
        if known is None or not known[self.running()].all():
            raise PtxError(f"a register is read that was not written: {text}")

    def write(self, register: int, bits: Any) -> None:
        """Write a register of the threads that run."""
        if len(bits) != self.count:
            bits = np.repeat(bits, self.count)
        if self.mask is not None:
            known = self.known[register]
            bits = np.where(self.mask, bits, bits.dtype.type(0) if known is None else self.registers[register])
            if known is not True:
                self.known[register] = self.mask if known is None else known | self.mask
        else:
            self.known[register] = True
        self.registers[register] = bits

    # Control: each takes the threads that do it, of those that run, and gives the next step of all that run.

    def part(self, chosen: Any, target: int, otherwise: int) -> int:
        """Send some threads to one step, and the rest of those that run to another."""
        running = self.running()
        if not chosen.any():
            return otherwise
        if (chosen == running).all():
            return target
        self._pcs[running] = otherwise
        self._pcs[chosen] = target
        return PARTED

    def check_uniform(self, chosen: Any, text: str) -> None:
        """Raise if threads of one warp take both ways of a branch that says that they do not."""
        warps = self.rank * self.count + self.warp
        if np.isin(warps[chosen], warps[self.running() & ~chosen]).any():
            raise PtxError(f"threads of a warp part at a branch that is uniform: {text}")

    def end(self, chosen: Any, following: int, text: str) -> int:
        """End some threads."""
        self._pcs[self.running()] = following
        self._ended |= chosen
        for block in np.flatnonzero(self._of_blocks(self._ended).all(axis=1)):
            if self._of_blocks(chosen)[block].any():
                self.shared.end(block, text)
                self.barriers.end(block, text)
        self._finish_phase()
        return PARTED

    def wait_for_block(self, chosen: Any, following: int) -> int:
        """Let some threads wait for the other threads of their block."""
        self._pcs[self.running()] = following
        self._waiting[chosen] = _AT_BLOCK
        waiting = self._of_blocks(self._waiting)
        there = (waiting == _AT_BLOCK).all(axis=1)
        waiting[there] = 0
        for block in np.flatnonzero(there):
            self.shared.block_barrier(block)
            self.barriers.publish(self.rank == block)
        return PARTED if self.mask is not None or not there.all() else following

    def arrive_at_cluster(self, chosen: Any, is_relaxed: bool, text: str) -> None:
        """Let some threads arrive at the cluster's barrier."""
        if (self._pending & chosen).any():
            raise PtxError(f"a thread arrives again before it has waited: {text}")
        self._pending |= chosen
        self._arrivals[chosen] += 1
        self._is_relaxed |= is_relaxed
        self._finish_phase()

    def wait_for_cluster(self, chosen: Any, following: int, text: str) -> int:
        """Let some threads wait until all of the cluster have arrived."""
        if (chosen & ~self._pending).any():
            raise PtxError(f"a thread waits before it has arrived: {text}")
        self._pcs[self.running()] = following
        self._pending[chosen] = False
        late = chosen & (self._arrivals > self._phases)
        self._waiting[late] = _AT_CLUSTER
        return PARTED if late.any() or self.mask is not None else following

    def sleep(self, chosen: Any, following: int) -> int:
        """Let some threads sleep until the phase of their mbarrier ends."""
        self._pcs[self.running()] = following
        self._waiting[chosen] = _ASLEEP
        return PARTED if chosen.any() else following

    def wake(self, barriers: Iterable[Mbarrier]) -> None:
        """Wake the threads that sleep at mbarriers."""
        for barrier in barriers:
            self._waiting[barrier.asleep] = 0
            barrier.asleep[:] = False

    def _finish_phase(self) -> None:
        """Let those go who wait at the cluster's barrier, once all threads that have not ended have arrived."""
        there = self._arrivals[~self._ended]
        if len(there) and there.min() > self._phases:
            self._phases += 1
            self._waiting[(self._waiting == _AT_CLUSTER) & (self._arrivals <= self._phases)] = 0
            self.shared.cluster_barrier(not self._is_relaxed)
            if not self._is_relaxed:
                for block in range(self.cluster):
                    self.barriers.publish(self.rank == block)
            self._is_relaxed = False

    def _of_blocks(self, values: Any) -> Any:
        """An array over all threads as a row for each block."""
        return values.reshape(self.cluster, -1)


class Lanes:
    """Where each thread's lane of a warp is in an array over all threads."""

    def __init__(self, cluster: int, threads: int) -> None:
        self.rank, thread = np.divmod(np.arange(cluster * threads), threads)
        self.lane, self._threads = thread % WARP, threads
        self.first = self.rank * threads + thread - self.lane

    def member(self, names: Any, running: Any) -> Any:
        """Whether all lanes that a mask names are running; those that a small block does not have are not asked for."""
        lanes = np.arange(WARP)
        places = self.first[:, None] + lanes
        there = places < ((self.rank + 1) * self._threads)[:, None]
        named = (np.broadcast_to(names, len(self.lane))[:, None] >> lanes.astype(np.uint32)) & np.uint32(1) != 0
        return (~(named & there) | running[np.minimum(places, len(running) - 1)]).all(axis=1)

    def exists(self, lane: Any) -> Any:
        """Return whether a block has a lane."""
        return self.first + lane < (self.rank + 1) * self._threads
