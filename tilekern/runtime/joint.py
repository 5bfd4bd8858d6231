"""Several GPUs that run the same work side by side, each on its own numbers, driven by one process.

A joint stream stands for a stream of each GPU, and joint memory for as much memory on each, so that whoever queues work
need not know how many GPUs there are: an array's address, shape and reads are those of the first GPU, and a write goes
to all.

Kernels are queued GPU by GPU. Calls of NCCL, and graphs with such calls, make GPUs wait for each other, so they are
queued on all GPUs or on none. Other threads do so, since Ctrl-C interrupts the main thread alone and might leave a GPU
waiting for ever. Each graph is launched by a thread of its own: a launch may block until its GPU has run what was
queued before, which may wait for another GPU, and NVIDIA warns of launches from one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from tilekern.errors import InputError
from tilekern.runtime.driver import Device, Event, Fetched, Graph, Memory, Stream
from tilekern.runtime.nccl import Communicators


def each_of(stream: Stream) -> list[Stream]:
    """Return the streams that a joint stream stands for; of another stream, itself."""
    return stream.each if isinstance(stream, JointStream) else [stream]


class JointStream(Stream):
    """A stream of each of several GPUs, on which the same work is queued.

    Attributes:
        each: the streams, in the order of the GPUs.
        device: the first GPU.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        """Make a stream on each GPU, and connect the GPUs.

        Raises:
            InputError: a GPU is named twice, or they are not of one kind.
            ExtraMissing: NCCL is not installed.
            CannotRun: NCCL is too old, or fails.
        """
        if len({device.number for device in devices}) < len(devices):
            numbers = ", ".join(str(device.number) for device in devices)
            raise InputError(f"each GPU can take one part of a model, and these are named: {numbers}")
        for other in devices[1:]:
            # So that all run the same kernels, whose results have the same bits.
            if other.target != devices[0].target:
                raise InputError(f"the GPUs must be of one kind, and there are {devices[0]!r} and {other!r}")
        self.each = [device.stream() for device in devices]
        super().__init__(devices[0], self.each[0].handle)
        self._caller = ThreadPoolExecutor(1, "tilekern-nccl")
        self._launchers = ThreadPoolExecutor(len(devices), "tilekern-graphs")
        self._communicators = self._called(Communicators, [device.number for device in devices])
        # NCCL connects GPUs at the first call, so what it cannot do fails here.
        self.sum(self.memory(4), 0, 1, "float32")
        self.synchronize()

    def __del__(self) -> None:
        """Leave the end of each stream to itself."""

    def _called(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a function returns, called by a thread that Ctrl-C does not interrupt, and wait for it anyway."""
        call = self._caller.submit(function, *arguments)
        try:
            return call.result()
        finally:
            wait([call])

    def memory(self, size_bytes: int) -> Memory:
        """Return memory on each GPU."""
        return JointMemory([Memory(size_bytes, stream) for stream in self.each], self)

    def synchronize(self) -> None:
        """Wait until all queued work of all GPUs is done."""
        for stream in self.each:
            stream.synchronize()

    def wait(self, event: Event) -> None:
        """Queue on each GPU that later work waits for an event."""
        for stream in self.each:
            stream.wait(event)

    def sum(self, memory: Memory, first: int, count: int, dtype: str) -> None:
        """Queue that ``count`` numbers, from byte ``first`` on, become the sums over all GPUs."""
        addresses = [part.address + first for part in parts_of(memory)]
        self._called(self._communicators.sum, self.each, addresses, count, dtype)

    def gather(self, memory: Memory, first: int, to: Memory, to_first: int, count: int, dtype: str) -> None:
        """Queue that ``count`` numbers of each GPU, from byte ``first`` on, come to ``to`` on all, in their order."""
        sources = [part.address + first for part in parts_of(memory)]
        targets = [part.address + to_first for part in parts_of(to)]
        self._called(self._communicators.gather, self.each, sources, targets, count, dtype)

    def capture(self, body: Callable[[], object]) -> Graph:
        """Return what ``body`` queues on all GPUs as a graph of each."""
        graphs: list[Graph] = []

        def capture(streams: Sequence[Stream]) -> None:
            if streams:
                graphs.insert(0, streams[0].capture(lambda: capture(streams[1:])))
            else:
                body()

        capture(self.each)
        return JointGraph(self, graphs)

    def _launch(self, graphs: Sequence[Graph]) -> None:
        """Launch a graph on each GPU."""
        self._communicators.check()
        launches = [
            self._launchers.submit(graph.launch, stream) for graph, stream in zip(graphs, self.each, strict=True)
        ]
        if failed := [error for launch in launches if (error := launch.exception())]:
            self._communicators.abort()
            raise failed[0]


class JointGraph(Graph):
    """A graph of each GPU; :meth:`JointStream.capture` makes one."""

    def __init__(self, stream: JointStream, graphs: Sequence[Graph]) -> None:
        self._communicators, self._graphs = stream._communicators, list(graphs)
        self._communicators.begin_graph()

    def __del__(self) -> None:
        self._graphs.clear()
        self._communicators.end_graph()

    def launch(self, stream: Stream) -> None:
        """Queue the captured work on each GPU.

        Raises:
            CannotRun: a GPU did not take it, now or before.
        """
        assert isinstance(stream, JointStream)
        stream._called(stream._launch, self._graphs)


class JointMemory(Memory):
    """As many bytes on each of several GPUs; reads are those of the first.

    Attributes:
        each: the memory on each GPU.
    """

    def __init__(self, each: Sequence[Memory], stream: Stream) -> None:
        self.each, self.stream = list(each), stream
        self.size_bytes, self.address = each[0].size_bytes, each[0].address

    def __del__(self) -> None:
        """Leave the return of each part to itself."""

    def write(self, data: Any, first: int = 0, count: int | None = None) -> None:
        """Copy an object's buffer to each GPU, and wait until it is done."""
        for part in self.each:
            part.write(data, first, count)

    def read(self, first: int = 0, count: int | None = None) -> bytearray:
        """Return a copy of the first GPU's bytes."""
        return self.each[0].read(first, count)

    def fetch(self, first: int = 0, count: int | None = None) -> Fetched:
        """Queue a copy of the first GPU's bytes to the host's memory."""
        return self.each[0].fetch(first, count)

    def fill(self, byte: int = 0, first: int = 0, count: int | None = None) -> None:
        """Queue that bytes get a value on each GPU."""
        for part in self.each:
            part.fill(byte, first, count)


class Window(Memory):
    """Some bytes of other memory, which lives as long as they do."""

    def __init__(self, whole: Memory, first: int, count: int) -> None:
        self._of, self.stream = whole, whole.stream
        self.size_bytes, self.address = count, whole.address + first

    def __del__(self) -> None:
        """Leave the memory to what it is a part of."""


def parts_of(memory: Memory) -> list[Memory]:
    """Return the memory on each GPU."""
    assert isinstance(memory, JointMemory)
    return memory.each
