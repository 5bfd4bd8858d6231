"""GPUs for the engine: the stub of the driver, whose memory is the host's, and the interpreter in place of their SMs.

Also NCCL between them: a call in a graph is a meeting, to which the threads come that launch the graphs.
"""

import ctypes
import math
import threading

import torch

from tilekern.arrays import Array
from tilekern.runtime import driver
from tilekern.runtime.plans import InterpretedPlan
from tilekern.spec.targets import INTERPRETED

TORCH = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "int8", "int32", "int64", "uint8")}


def tensor_of(array):
    """An array's elements as a tensor that shares their memory."""
    if not isinstance(array, Array):
        return array
    reach = 1 + sum((size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True))
    item = TORCH[array.dtype].itemsize
    if 0 in array.shape:
        return torch.empty(array.shape, dtype=TORCH[array.dtype])
    raw = (ctypes.c_char * (reach * item)).from_address(array.address)
    return torch.frombuffer(raw, dtype=TORCH[array.dtype]).as_strided(array.shape, array.strides)


class Interpreted(InterpretedPlan):
    """A plan of the default config, which is interpreted when the stream runs, or when its graph does."""

    capturing = {}

    def queue(self, stream, *arguments):
        # A graph knows addresses alone, so memory that is dropped serves later launches of a capture.
        seen = [tensor_of(argument) for argument in arguments]

        def run():
            self.launch(0, *seen)

        queued(stream, run)


def queued(stream, run):
    """Do something now, or add it to the graph of a stream, by its handle."""
    launches = Interpreted.capturing.get(stream)
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
    Interpreted.capturing[stream.handle], stream.captured = launches, memory = [], driver.GraphMemory(stream)
    try:
        body()
    finally:
        del Interpreted.capturing[stream.handle]
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
        calls: the names of the functions that were called.
        alive: the handles of communicators that are not destroyed.
    """

    FUNCTIONS = {
        "ncclGetVersion": "p", "ncclCommInitAll": "pip", "ncclCommDestroy": "p", "ncclCommAbort": "p",
        "ncclGroupStart": "", "ncclGroupEnd": "", "ncclAllReduce": "ppziipp", "ncclAllGather": "ppzipp",
    }  # fmt: skip
    TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int, "z": ctypes.c_size_t}
    DTYPES = {6: torch.float16, 7: torch.float32, 9: torch.bfloat16}

    def __init__(self):
        self.fails, self.calls, self.alive, self._group = {}, [], set(), None
        for name, types in self.FUNCTIONS.items():
            setattr(self, name, self._door(name, [self.TYPES[kind] for kind in types]))
        self.ncclGetErrorString = lambda error: b"internal error"
        self.ncclGetLastError = lambda handle: b"what\nhappened"

    def _door(self, name, types):
        function = getattr(self, f"_{name[4:]}")

        def called(*arguments):
            self.calls.append(name)
            return self.fails.get(name) or function(*arguments) or 0

        return ctypes.CFUNCTYPE(ctypes.c_int, *types)(called)

    def _GetVersion(self, to):
        ctypes.c_int.from_address(to).value = 22809

    def _CommInitAll(self, handles, count, numbers):
        self.devices = [ctypes.c_int.from_address(numbers + 4 * at).value for at in range(count)]
        for at in range(count):
            ctypes.c_void_p.from_address(handles + 8 * at).value = 100 + at
            self.alive.add(100 + at)

    def _CommDestroy(self, handle):
        self.alive.remove(handle)

    _CommAbort = _CommDestroy

    def _GroupStart(self):
        self._group = []

    def _GroupEnd(self):
        group, self._group = self._group, None
        assert {handle for _, _, handle, _ in group} == self.alive
        (kind,) = {kind for kind, _, _, _ in group}  # all GPUs ask for the same

        def compute():
            self._compute(kind, [buffers for _, buffers, _, _ in group])

        are_capturing = {stream in Interpreted.capturing for _, _, _, stream in group}
        if are_capturing == {False}:
            compute()
            return
        assert are_capturing == {True}, "some GPUs capture, and others do not"
        meeting = Meeting(len(group), compute)
        for _, _, _, stream in group:
            queued(stream, meeting)

    def _AllReduce(self, source, target, count, dtype, operation, handle, stream):
        assert operation == 0
        self._group.append((("sum", count, dtype), (source, target), handle, stream))

    def _AllGather(self, source, target, count, dtype, handle, stream):
        self._group.append((("gather", count, dtype), (source, target), handle, stream))

    def _compute(self, kind, buffers):
        name, count, code = kind
        dtype = self.DTYPES[code]

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
