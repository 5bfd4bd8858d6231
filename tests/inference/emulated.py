"""GPUs for the engine: the stub of the driver, whose memory is the host's, and the interpreter in place of their SMs.

Also NCCL between them: a call in a graph is a meeting, to which the threads come that launch the graphs.
"""

import ctypes
import math
import threading

import torch

from tilekern.arrays.views import TYPESTRS
from tilekern.runtime import driver
from tilekern.runtime.plans import InterpretedPlan
from tilekern.spec.targets import INTERPRETED

TORCH = {typestr: getattr(torch, name) for name, typestr in TYPESTRS.items()}


def tensor_of(array):
    """An array's elements as a tensor that shares their memory."""
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is None:
        return array
    shape, dtype = interface["shape"], TORCH[interface["typestr"]]
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    strides = [stride // dtype.itemsize for stride in interface["strides"]]
    reach = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    raw = (ctypes.c_char * (reach * dtype.itemsize)).from_address(interface["data"][0])
    return torch.frombuffer(raw, dtype=dtype).as_strided(shape, strides)


# What graphs that are being captured run, by the handles of their streams.
CAPTURING = {}


class Interpreted(InterpretedPlan):
    """A plan of the default config, which is interpreted when the stream runs, or when its graph does."""

    def queue(self, stream, *arguments):
        # A graph knows addresses alone, so memory that is dropped serves later launches of a capture.
        seen = [tensor_of(argument) for argument in arguments]

        def run():
            self.launch(0, *seen)

        queued(stream, run)


def queued(stream, run):
    """Do something now, or add it to the graph of a stream, by its handle."""
    launches = CAPTURING.get(stream)
    run() if launches is None else launches.append(run)


# Threads that launch graphs take turns: the interpreter runs one kernel at a time.
TURN = threading.Condition()


class Recorded:
    """A graph: launches in their order, and the memory of their arrays."""

    def __init__(self, launches, memory):
        self._launches, self._memory = launches, memory

    def launch(self, stream):  # noqa: ARG002
        with TURN:
            for run in self._launches:
                run()


def capture(stream, body):
    CAPTURING[stream.handle], stream.captured = launches, memory = [], driver.GraphMemory(stream)
    try:
        body()
    finally:
        del CAPTURING[stream.handle]
        stream.captured = None
    return Recorded(launches, memory)


class Meeting:
    """A call of NCCL in graphs: each GPU waits there for the others, and the last one computes."""

    def __init__(self, gpus, compute):
        self._gpus, self._compute, self._came = gpus, compute, 0

    def __call__(self):
        wanted = (self._came // self._gpus + 1) * self._gpus
        self._came += 1
        if self._came == wanted:
            self._compute()
            TURN.notify_all()
        assert TURN.wait_for(lambda: self._came >= wanted, timeout=60), "a GPU did not come"


class Nccl:
    """NCCL on the host's memory, whose functions are called through C's types.

    Attributes:
        fails: errors by the names of functions, which fail from then on.
        calls, threads: the names of the functions that were called, and the threads that did.
        alive: the handles of communicators that are not destroyed.
    """

    def __init__(self):
        self.fails, self.calls, self.threads, self.alive = {}, [], set(), set()
        self._group, self._cliques = None, {}
        pointer, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
        for function, name, *types in (
            (self._get_version, "GetVersion", pointer),
            (self._init_all, "CommInitAll", pointer, number, pointer),
            (self.alive.remove, "CommDestroy", pointer),
            (self.alive.remove, "CommAbort", pointer),
            (self._start, "GroupStart"),
            (self._end, "GroupEnd"),
            (self._sum, "AllReduce", pointer, pointer, size, number, number, pointer, pointer),
            (self._gather, "AllGather", pointer, pointer, size, number, pointer, pointer),
        ):
            setattr(self, f"nccl{name}", self._door(function, f"nccl{name}", types))
        self.ncclGetErrorString = lambda _: b"internal error"
        self.ncclGetLastError = lambda _: b"what\nhappened"

    def _door(self, function, name, types):
        def called(*arguments):
            self.calls.append(name)
            self.threads.add(threading.current_thread())
            failed = self.fails.get(name)
            return failed or function(*arguments) or 0

        return ctypes.CFUNCTYPE(ctypes.c_int, *types)(called)

    def _get_version(self, to):
        ctypes.c_int.from_address(to).value = 22809

    def _init_all(self, handles, count, numbers):
        self.devices = [ctypes.c_int.from_address(numbers + 4 * at).value for at in range(count)]
        clique = range(100 + len(self._cliques), 100 + len(self._cliques) + count)
        for at, handle in enumerate(clique):
            ctypes.c_void_p.from_address(handles + 8 * at).value = handle
            self._cliques[handle] = set(clique)
        self.alive |= set(clique)

    def _start(self):
        self._group = []

    def _end(self):
        group, self._group = self._group, None
        handles = {handle for _, _, handle, _ in group}
        assert handles == self._cliques[min(handles)] <= self.alive, "a group has a call of each GPU"
        (kind,) = {kind for kind, _, _, _ in group}  # all GPUs ask for the same

        def compute():
            self._compute(kind, [buffers for _, buffers, _, _ in group])

        are_capturing = {stream in CAPTURING for _, _, _, stream in group}
        if are_capturing == {False}:
            compute()
            return
        assert are_capturing == {True}, "some GPUs capture, and others do not"
        meeting = Meeting(len(group), compute)
        for _, _, _, stream in group:
            queued(stream, meeting)

    def _sum(self, source, target, count, dtype, operation, handle, stream):
        assert operation == 0
        self._group.append((("sum", count, dtype), (source, target), handle, stream))

    def _gather(self, source, target, count, dtype, handle, stream):
        self._group.append((("gather", count, dtype), (source, target), handle, stream))

    def _compute(self, kind, buffers):
        name, count, code = kind
        dtype = {6: torch.float16, 7: torch.float32, 9: torch.bfloat16}[code]

        def numbers(address, length):
            raw = (ctypes.c_char * (length * dtype.itemsize)).from_address(address)
            return torch.frombuffer(raw, dtype=dtype)

        given = [numbers(source, count).clone() for source, _ in buffers]
        for _, target in buffers:
            if name == "sum":
                numbers(target, count).copy_(sum(given))
            else:
                numbers(target, count * len(given)).copy_(torch.cat(given))


def interpreted(spec, device, target, problem):
    config = spec.default(problem, INTERPRETED)
    if spec.is_library(problem, config):
        config = spec.generic(problem)
    implementation = spec.device(problem, config)
    return Interpreted(implementation, config, implementation.grid(problem, INTERPRETED.sm_count))


def read(array):
    """A contiguous array's elements, when its stream has come so far."""
    assert math.prod(array.shape)
    return tensor_of(array).clone()
