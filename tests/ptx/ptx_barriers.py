"""The mbarriers of simulated blocks, and the bulk copies whose bytes they count.

A copy is asynchronous. Its bytes come when no thread can go on, in a random order of the copies that are on their way.
Until a thread has itself seen the phase end that counts them, it must not touch them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import numpy as np
from ptx_memory import GlobalMemory, SharedMemory, Who
from ptx_parser import PtxError

MBARRIER_BYTES = 8
_MOST_ARRIVALS = _MOST_BYTES = (1 << 20) - 1


class Mbarrier:
    """A barrier in shared memory, whose phase ends when all arrivals and all bytes that it expects have come.

    Attributes:
        phase: the number of phases that have ended.
        known: the threads that may use it: the one that has made it, and all after a barrier.
        seen: the number of phases that each thread has seen the end of.
        asleep: the threads that sleep until the phase ends.
        maker: the thread that has made it.
        is_fenced: whether copies may use it.
    """

    def __init__(self, count: int, maker: int, threads: int) -> None:
        self._count = self._pending = count
        # Bytes that have not come, and those of them that are on their way.
        self._expected = self._announced = 0
        self.phase = 0
        self.maker, self.known = maker, np.arange(threads) == maker
        self.seen = np.zeros(threads, np.int64)
        self.asleep = np.zeros(threads, bool)
        self.is_fenced = False

    def arrive(self, size: int, text: str) -> bool:
        """Let the phase expect more bytes, and one arrival less; return whether it has ended."""
        if self._pending == 0:
            raise PtxError(f"more threads arrive at an mbarrier than it counts: {text}")
        self._pending -= 1
        self._expected += size
        if self._expected > _MOST_BYTES:
            raise PtxError(f"an mbarrier expects {self._expected} bytes, more than it counts: {text}")
        return self._end_phase()

    def announce(self, size: int, text: str) -> None:
        """Note that bytes are on their way."""
        self._announced += size
        if self._announced > self._expected:
            raise PtxError(f"more bytes are copied than the mbarrier expects: {text}")

    def receive(self, size: int) -> bool:
        """Note that bytes have come; return whether the phase has ended."""
        self._announced -= size
        self._expected -= size
        return self._end_phase()

    def seen_by(self, phase: int, threads: Any) -> Any:
        """Return which threads have seen the end of a phase."""
        return self.seen[threads] > phase

    def _end_phase(self) -> bool:
        if self._pending or self._expected:
            return False
        self.phase, self._pending = self.phase + 1, self._count
        return True


class Copy(NamedTuple):
    """A bulk copy into the shared memory of a block, and which threads have seen its mbarrier's phase end."""

    block: int
    place: int
    source: int
    size: int
    barrier: Mbarrier
    seen_by: Callable[[Any], Any]
    text: str


class Barriers:
    """The mbarriers of a cluster by their places in shared memory, and its bulk copies."""

    def __init__(self, shared: SharedMemory, memory: GlobalMemory, threads: int, random: Random) -> None:
        self._shared, self._memory, self._threads, self._random = shared, memory, threads, random
        self._barriers: dict[int, Mbarrier] = {}
        self._copies: list[Copy] = []
        self._under_way: list[Copy] = []

    def make(self, addresses: Any, counts: Any, who: Who, text: str) -> None:
        """Make an mbarrier at each address, which is its thread's own until a barrier."""
        places = self._shared.take_for_barriers(addresses, MBARRIER_BYTES, who, text)
        for place, count, thread in zip(places.tolist(), counts.tolist(), who.threads.tolist(), strict=True):
            if not 0 < count <= _MOST_ARRIVALS:
                raise PtxError(f"an mbarrier cannot count {count} arrivals: {text}")
            self._barriers[place] = Mbarrier(count, thread, self._threads)

    def fence(self, running: Any) -> None:
        """Let copies use the mbarriers that some threads have made."""
        for barrier in self._barriers.values():
            barrier.is_fenced |= bool(running[barrier.maker])

    def publish(self, threads: Any) -> None:
        """Let threads that have met use the mbarriers that some of them may use."""
        for barrier in self._barriers.values():
            barrier.known[threads] |= barrier.known[threads].any()

    def arrive(self, addresses: Any, sizes: Any, who: Who, text: str) -> list[Mbarrier]:
        """Let threads arrive and expect bytes; return the mbarriers whose phase has ended."""
        barriers = self._at(addresses, who, text)
        return [one for one, size in zip(barriers, sizes.tolist(), strict=True) if one.arrive(size, text)]

    def see(self, addresses: Any, parities: Any, who: Who, text: str) -> Any:
        """Say which threads see that the last phase of a parity has ended; the others sleep until it does."""
        if (parities > 1).any():
            raise PtxError(f"the parity of a phase is 0 or 1: {text}")
        barriers = self._at(addresses, who, text)
        phases = np.array([one.phase for one in barriers])
        # Of the last two phases: the one that is under way has its number's parity.
        has_ended = phases % 2 != parities
        for one, thread, ended in zip(barriers, who.threads.tolist(), has_ended.tolist(), strict=True):
            if ended:
                one.seen[thread] = one.phase
            else:
                one.asleep[thread] = True
        return has_ended

    def copy(self, targets: Any, sources: Any, sizes: Any, addresses: Any, who: Who, text: str) -> None:
        """Start the copies of some threads."""
        for n, barrier in enumerate(self._at(addresses, who, text)):
            source, size = int(sources[n]), int(sizes[n])
            if not barrier.is_fenced:
                raise PtxError(f"no fence.mbarrier_init is between the mbarrier's init and a copy: {text}")
            self._memory.copied(source, size, text)
            barrier.announce(size, text)
            seen_by = functools.partial(barrier.seen_by, barrier.phase)
            place = self._shared.begin_copy(targets[n : n + 1], size, who.at(n), seen_by, text)
            copy = Copy(int(who.blocks[n]), place, source, size, barrier, seen_by, text)
            self._copies.append(copy)
            self._under_way.append(copy)

    def finish_copies(self) -> Mbarrier | None:
        """Let copies finish until a phase ends; return its mbarrier, None if no copy ends one."""
        while self._under_way:
            copy = self._under_way.pop(self._random.randrange(len(self._under_way)))
            self._shared.end_copy(copy.place, self._memory.copied(copy.source, copy.size, copy.text))
            if copy.barrier.receive(copy.size):
                return copy.barrier
        return None

    def end(self, block: int, text: str) -> None:
        """Hold the end of a block to its copies."""
        for copy in self._copies:
            if copy.block == block and not copy.seen_by(slice(None)).any():
                raise PtxError(f"a block ends with a copy for which no thread has waited: {copy.text}; {text}")

    def _at(self, addresses: Any, who: Who, text: str) -> list[Mbarrier]:
        """The mbarriers at some addresses, which the threads may use."""
        places = self._shared.places(addresses, MBARRIER_BYTES, who, text).tolist()
        barriers = [self._barriers.get(place) for place in places]
        for barrier, thread in zip(barriers, who.threads.tolist(), strict=True):
            if barrier is None:
                raise PtxError(f"there is no mbarrier that somebody has initialised: {text}")
            if not barrier.known[thread]:
                raise PtxError(f"no barrier is between an mbarrier's init by another thread and its use: {text}")
        return barriers
