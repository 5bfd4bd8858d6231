"""The CUDA driver by ctypes: devices, memory from a pool, streams, events and graphs, without torch.

A device has one primary context, which torch, CuPy and JAX use too. Each call here makes it current, and restores
another device's afterwards. ctypes needs nothing but ``libcuda.so.1``; cuda-bindings would add 30 MB and 0.14 s to a
start.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from tilekern.errors import CannotRun, DriverError
from tilekern.spec.targets import cuda_driver, of_driver

_INT, _SIZE, _ADDRESS, _HANDLE = ctypes.c_int, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_void_p
# Of CUresult, CUstream_flags, CUstreamCaptureMode and CUpointer_attribute.
_NO_MEMORY, _NON_BLOCKING, _RELAXED, _ORDINAL = 2, 1, 2, 9
# The handle of the legacy default stream.
LEGACY = 1
# Sizes are rounded up to these, so that blocks of the pool fit later requests: from 1 MiB on to the driver's own unit.
_SMALL, _LARGE = 512, 2 << 20
# The size of the host's pages to which small results are fetched; they are kept, as locking pages takes long.
_PAGES = 4096


def enter_context(device: int) -> bool:
    """Make a device's primary context current in a thread without one; return whether it had none.

    Autograd's threads start without a context. torch sets one at the first allocation from the driver, so a thread that
    launches first has none.
    """
    try:
        if _current_context() is not None:
            return False
        _call("cuCtxSetCurrent", _primary_context(device))
    except CannotRun:
        return False
    return True


def _current_context() -> int | None:
    context = _HANDLE()
    _call("cuCtxGetCurrent", ctypes.byref(context))
    return context.value


@functools.cache
def _primary_context(device: int) -> ctypes.c_void_p:
    """Return the context that torch uses on a device, retained for the life of the process."""
    ordinal, context = _INT(), _HANDLE()
    _call("cuDeviceGet", ctypes.byref(ordinal), device)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
    return context


def check_accepts(cubin: bytes) -> None:
    """Have the driver load and unload a cubin; without a driver do nothing.

    Raises:
        CannotRun: the driver refuses it, for example because it is older than the compiler that made the cubin.
    """
    try:
        _driver()
    except CannotRun:
        return
    library = _HANDLE()
    _call("cuLibraryLoadData", ctypes.byref(library), cubin, None, None, 0, None, None, 0)
    _call("cuLibraryUnload", library)


@functools.cache
def device(number: int = 0) -> Device:
    """Return a GPU of this process by its number in CUDA's order, the same object each time.

    Raises:
        CannotRun: there is no driver, no such GPU, or the driver refuses it.
    """
    return Device(number)


class Device:
    """A GPU; :func:`device` returns it.

    Attributes:
        number: its number in CUDA's order.
        target: what is known of it, as ``--gpu`` names it.
    """

    def __init__(self, number: int) -> None:
        count = _INT()
        _call("cuInit", 0)
        _call("cuDeviceGetCount", ctypes.byref(count))
        if not 0 <= number < count.value:
            raise CannotRun(f"there is no GPU {number}: the driver gives {count.value}, counted from 0")
        self.number, self.target = number, of_driver(_driver(), number)
        self._context = _primary_context(number)
        self._ask_current = _driver().cuCtxGetCurrent  # each launch calls it
        self._free: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._pages: list[int] = []
        self._streams: set[int] = set()
        self._loans: list[Loan] = []
        self._settling = threading.Lock()

    def __repr__(self) -> str:
        return f"<GPU {self.number}: {self.target.name}>"

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make its context current, and restore another one afterwards; if there was none, it stays."""
        if self.is_current or enter_context(self.number):
            yield
            return
        _call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            _call("cuCtxPopCurrent_v2", ctypes.byref(_HANDLE()))

    @property
    def is_current(self) -> bool:
        """Whether its context is the current one of this thread."""
        context = _HANDLE()
        self._ask_current(ctypes.byref(context))
        return context.value == self._context.value

    def stream(self) -> Stream:
        """Make a stream, which does not wait for the default stream."""
        handle = _HANDLE()
        with self.current():
            _call("cuStreamCreate", ctypes.byref(handle), _NON_BLOCKING)
        assert handle.value is not None
        self._streams.add(handle.value)
        return Stream(self, handle.value)

    def is_capturing(self, stream: int) -> bool:
        """Return whether a stream of any library, by its handle, is being captured."""
        status = _INT()
        with self.current():
            _call("cuStreamIsCapturing", _HANDLE(stream), ctypes.byref(status))
        return bool(status.value)

    def synchronize(self) -> None:
        """Wait for all work on the device."""
        with self.current():
            _call("cuCtxSynchronize")

    def free_bytes(self) -> int:
        """Return how much memory the driver has left; the pool's is not included."""
        free, total = _SIZE(), _SIZE()
        with self.current():
            _call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def pooled_bytes(self) -> int:
        """Return how much memory waits in the pool."""
        self._settle()
        return sum(size * len(blocks) for (_, size), blocks in self._free.items())

    def trim(self) -> None:
        """Wait for the device, and give the pool's memory back to the driver."""
        self._settle()
        with self.current():
            _call("cuCtxSynchronize")
            for blocks in list(self._free.values()):
                while blocks:
                    _call("cuMemFree_v2", _ADDRESS(blocks.pop()))

    def keep(self, loan: Loan) -> None:
        """Keep the memory of a loan until it is over, as is seen when the pool is used."""
        self._settle()
        self._loans.append(loan)

    def _settle(self) -> None:
        """Drop the loans that are over, which gives their memory back to the pool."""
        # A second call, of another thread or of what is dropped here, leaves it to the first.
        if not self._loans or not self._settling.acquire(blocking=False):
            return
        try:
            for loan in list(self._loans):
                if loan.is_over():
                    self._loans.remove(loan)
                    loan.end()
        finally:
            self._settling.release()

    def _take(self, size: int, stream: int) -> int:
        """Return the address of a block that is free for work on a stream."""
        blocks = self._free[stream, size]
        if blocks:
            return blocks.pop()
        address = _ADDRESS()
        with self.current():
            try:
                _call("cuMemAlloc_v2", ctypes.byref(address), _SIZE(size))
            except DriverError as error:
                if error.code != _NO_MEMORY or not self.pooled_bytes():
                    raise
                self.trim()
                _call("cuMemAlloc_v2", ctypes.byref(address), _SIZE(size))
        return address.value

    def _take_pages(self) -> int:
        """Return the address of pages of the host that the GPU writes without the host's help."""
        if self._pages:
            return self._pages.pop()
        address = _HANDLE()
        with self.current():
            _call("cuMemHostAlloc", ctypes.byref(address), _SIZE(_PAGES), 0)
        assert address.value is not None
        return address.value

    def _give(self, address: int, size: int, stream: int) -> None:
        """Take a block back for work on a stream; free that of a stream which garbage in a circle has ended first."""
        if stream in self._streams:
            self._free[stream, size].append(address)
            return
        with contextlib.suppress(CannotRun, TypeError), self.current():
            _call("cuMemFree_v2", _ADDRESS(address))

    def _end(self, stream: int) -> None:
        """Free a stream's blocks, which waits for its work, and destroy it."""
        self._streams.discard(stream)
        with self.current():
            for key in [key for key in self._free if key[0] == stream]:
                for address in self._free.pop(key):
                    _call("cuMemFree_v2", _ADDRESS(address))
            _call("cuStreamDestroy_v2", _HANDLE(stream))


class Loan(Protocol):
    """Refers to a memory that another library uses."""

    def is_over(self) -> bool:
        """Return whether the library is done with the memory."""

    def end(self) -> None:
        """Drop what the library needed beside the memory; called once."""


class Memory:
    """Bytes on a GPU, which return to the pool when nothing refers to them any more.

    The pool gives them out again for the same stream only, whose order keeps later work behind earlier work. If other
    streams use them too, :meth:`lend` them the memory, or wait for those before you drop it.

    Raises:
        DriverError: the GPU has no such memory left.
    """

    # Other streams that use it, by their handles.
    _borrowers: frozenset[int] = frozenset()

    def __init__(self, size_bytes: int, stream: Stream) -> None:
        unit = _SMALL if size_bytes < 1 << 20 else _LARGE
        self.size_bytes, self.stream = size_bytes, stream
        self._whole = max(1, -(-size_bytes // unit)) * unit
        self._graph = stream.captured
        if self._graph is not None:
            self.address = self._graph.take(self._whole)
        else:
            stream.device._settle()  # not in a capture, in which nothing may wait
            self.address = stream.device._take(self._whole, stream.handle)

    def __del__(self) -> None:
        # An interpreter that ends may have dropped everything already; the driver then frees all.
        if not hasattr(self, "address"):
            return
        if self._borrowers:
            with contextlib.suppress(CannotRun, TypeError):
                self._await_borrowers()
        if self._graph is not None:
            self._graph.give(self.address, self._whole)
        else:
            self.stream.device._give(self.address, self._whole, self.stream.handle)

    def lend(self, handle: int) -> None:
        """Queue that a stream of any library, by its handle, waits for the work on this memory's so far.

        When the memory is dropped, later work on it waits for that stream.
        """
        event = self.stream.record()
        with self.stream.device.current():
            _call("cuStreamWaitEvent", _HANDLE(handle), event.handle, 0)
        self._borrowers |= {handle}

    def _await_borrowers(self) -> None:
        """Keep later work on the memory behind that of other streams, which may be gone, except the default one."""
        stream, device = self.stream, self.stream.device
        if self._borrowers != {LEGACY} or stream.handle not in device._streams:
            device.synchronize()
        elif stream.captured is not None:
            Event(device, LEGACY).synchronize()
        else:
            stream.wait(Event(device, LEGACY))

    def write(self, data: Any, first: int = 0, count: int | None = None) -> None:
        """Copy an object's buffer, which may be read-only, to ``count`` bytes from ``first`` on; wait until it is done.

        Raises:
            ValueError: the buffer has another size.
        """
        count = self.size_bytes if count is None else count
        with _Buffer(data) as buffer:
            if buffer.len != count:
                raise ValueError(f"the data has {buffer.len} bytes, and the array {count}")
            self._copy("cuMemcpyHtoDAsync_v2", _ADDRESS(self.address + first), _HANDLE(buffer.buf), count)

    def read(self, first: int = 0, count: int | None = None) -> bytearray:
        """Return a copy of bytes in the host's memory, made when the stream has come so far."""
        out = bytearray(self.size_bytes if count is None else count)
        target = (ctypes.c_char * len(out)).from_buffer(out)
        self._copy("cuMemcpyDtoHAsync_v2", target, _ADDRESS(self.address + first), len(out))
        return out

    def fetch(self, first: int = 0, count: int | None = None) -> Fetched:
        """Queue a copy of bytes to the host's memory; nothing waits for it before :meth:`Fetched.result`."""
        return Fetched(self, first, self.size_bytes if count is None else count)

    def _copy(self, call: str, target: Any, source: Any, count: int) -> None:
        if count:
            with self.stream.device.current():
                _call(call, target, source, _SIZE(count), _HANDLE(self.stream.handle))
        self.stream.synchronize()

    def fill(self, byte: int = 0, first: int = 0, count: int | None = None) -> None:
        """Queue that bytes get a value."""
        count = self.size_bytes if count is None else count
        if count:
            with self.stream.device.current():
                handle = _HANDLE(self.stream.handle)
                address = _ADDRESS(self.address + first)
                _call("cuMemsetD8Async", address, ctypes.c_ubyte(byte), _SIZE(count), handle)


class GraphMemory:
    """The memory of a graph: blocks that are dropped in its capture serve its later launches, which run in order.

    They return to the device's pool when the graph and all arrays in them are gone.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._blocks: list[tuple[int, int]] = []
        self._free: dict[int, list[int]] = defaultdict(list)

    def take(self, size: int) -> int:
        """Return the address of a block that no later launch of the graph uses."""
        if self._free[size]:
            return self._free[size].pop()
        address = self._stream.device._take(size, self._stream.handle)
        self._blocks.append((address, size))
        return address

    def give(self, address: int, size: int) -> None:
        """Take a block back."""
        self._free[size].append(address)

    def __del__(self) -> None:
        for address, size in self._blocks:
            self._stream.device._give(address, size, self._stream.handle)


class Fetched:
    """Bytes on their way to the host; :meth:`Memory.fetch` makes one."""

    def __init__(self, memory: Memory, first: int, count: int) -> None:
        if count > _PAGES:
            raise ValueError(f"at most {_PAGES} bytes are fetched at once, not {count}")
        stream = memory.stream
        self._device, self._count = stream.device, count
        self._pages = self._device._take_pages()
        with self._device.current():
            target, source = _HANDLE(self._pages), _ADDRESS(memory.address + first)
            _call("cuMemcpyDtoHAsync_v2", target, source, _SIZE(count), _HANDLE(stream.handle))
        self._event = stream.record()

    def result(self) -> bytes:
        """Wait for the bytes, and return them.

        Raises:
            DriverError: work before the copy failed.
        """
        self._event.synchronize()
        return ctypes.string_at(self._pages, self._count)

    def __del__(self) -> None:
        if hasattr(self, "_event"):
            with contextlib.suppress(CannotRun, TypeError):
                self._event.synchronize()  # the copy may still be written
                self._device._pages.append(self._pages)


class Stream:
    """A queue of work on a device; :meth:`Device.stream` makes one.

    Attributes:
        device: its device.
        handle: the driver's handle as a number, which other libraries take.
        captured: the memory of the running capture; None if nothing is captured.
    """

    def __init__(self, device: Device, handle: int) -> None:
        self.device, self.handle = device, handle
        self.captured: GraphMemory | None = None

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the version of this protocol and the handle."""
        return 0, self.handle

    def __del__(self) -> None:
        with contextlib.suppress(CannotRun, TypeError):  # the driver or the interpreter may have ended before
            self.device._end(self.handle)

    def synchronize(self) -> None:
        """Wait until all queued work is done.

        Raises:
            DriverError: some of it failed.
        """
        with self.device.current():
            _call("cuStreamSynchronize", _HANDLE(self.handle))

    def memory(self, size_bytes: int) -> Memory:
        """Return memory for work on this stream.

        Raises:
            DriverError: the GPU has no such memory left.
        """
        return Memory(size_bytes, self)

    def record(self) -> Event:
        """Return an event that happens when the work queued so far is done."""
        return Event(self.device, self.handle)

    def wait(self, event: Event) -> None:
        """Queue that later work waits for an event of any stream."""
        with self.device.current():
            _call("cuStreamWaitEvent", _HANDLE(self.handle), event.handle, 0)

    def capture(self, body: Callable[[], object]) -> Graph:
        """Return what ``body`` queues on this stream as a graph; nothing of it runs now.

        Memory that is allocated on the stream meanwhile belongs to the graph, and serves its later launches when it is
        dropped; keep arrays from before as long as the graph.
        """
        if self.captured is not None:
            raise CannotRun("this stream is being captured already; end that capture first")
        graph = _HANDLE()
        with self.device.current():
            # Relaxed, so that memory may be allocated and code loaded meanwhile.
            _call("cuStreamBeginCapture_v2", _HANDLE(self.handle), _RELAXED)
            self.captured = GraphMemory(self)
            try:
                body()
            except BaseException:
                with contextlib.suppress(DriverError):  # what has failed inside may have ended it
                    _call("cuStreamEndCapture", _HANDLE(self.handle), ctypes.byref(graph))
                    _call("cuGraphDestroy", graph)
                self.captured = None
                raise
            memory, self.captured = self.captured, None
            _call("cuStreamEndCapture", _HANDLE(self.handle), ctypes.byref(graph))
            return Graph(self.device, graph, memory)


class Event:
    """A moment in a stream's work; :meth:`Stream.record` makes one."""

    def __init__(self, device: Device, stream: int) -> None:
        self.handle, self._device = _HANDLE(), device
        with device.current():
            _call("cuEventCreate", ctypes.byref(self.handle), 0)
            _call("cuEventRecord", self.handle, _HANDLE(stream))

    def __del__(self) -> None:
        if self.handle.value is not None:
            with contextlib.suppress(CannotRun, TypeError):
                _call("cuEventDestroy_v2", self.handle)

    def synchronize(self) -> None:
        """Wait for it."""
        with self._device.current():
            _call("cuEventSynchronize", self.handle)

    def ms_since(self, first: Event) -> float:
        """Wait for it, and return the milliseconds between an earlier event and this one."""
        self.synchronize()
        found = ctypes.c_float()
        with self._device.current():
            _call("cuEventElapsedTime", ctypes.byref(found), first.handle, self.handle)
        return found.value


class Graph:
    """Captured work that can be launched again and again; :meth:`Stream.capture` makes one."""

    def __init__(self, device: Device, graph: ctypes.c_void_p, memory: GraphMemory) -> None:
        self._device, self._memory, self._handle = device, memory, _HANDLE()
        try:
            _call("cuGraphInstantiateWithFlags", ctypes.byref(self._handle), graph, ctypes.c_uint64(0))
        finally:
            _call("cuGraphDestroy", graph)

    def __del__(self) -> None:
        if self._handle.value is not None:
            with contextlib.suppress(CannotRun, TypeError):
                _call("cuGraphExecDestroy", self._handle)

    def launch(self, stream: Stream) -> None:
        """Queue the captured work on a stream."""
        with self._device.current():
            _call("cuGraphLaunch", self._handle, _HANDLE(stream.handle))


class _Buffer(ctypes.Structure):
    """The buffer of a Python object, also of a read-only one such as a mapped file, as its address and length."""

    _fields_ = (
        ("buf", _HANDLE), ("obj", ctypes.py_object), ("len", ctypes.c_ssize_t), ("itemsize", ctypes.c_ssize_t),
        ("readonly", _INT), ("ndim", _INT), ("format", ctypes.c_char_p), ("shape", _HANDLE), ("strides", _HANDLE),
        ("suboffsets", _HANDLE), ("internal", _HANDLE),
    )  # fmt: skip

    def __init__(self, data: Any) -> None:
        super().__init__()
        self._data = data

    def __enter__(self) -> _Buffer:
        # 0 asks for contiguous bytes, and raises if the object has none.
        ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(self._data), ctypes.byref(self), 0)
        return self

    def __exit__(self, *_: object) -> None:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(self))


def device_of(address: int) -> int | None:
    """Return the number of the GPU whose memory an address is in; None if it is in none's."""
    number = _INT()
    try:
        _call("cuPointerGetAttribute", ctypes.byref(number), _ORDINAL, _ADDRESS(address))
    except DriverError:
        return None
    return number.value


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the driver.

    Raises:
        CannotRun: there is no driver, or it is too old to have the function.
        DriverError: the function failed.
    """
    function = getattr(_driver(), name, None)
    if function is None:
        raise CannotRun(f"the CUDA driver is too old: it has no {name}")
    if error := function(*arguments):
        name_of_error, text = (_text(of, error) for of in ("cuGetErrorName", "cuGetErrorString"))
        known = f" ({name_of_error})" if name_of_error else ""
        said = f": {text}" if text else ""
        raise DriverError(f"the CUDA driver's {name} failed with error {error}{known}{said}", error)


def _text(function_name: str, error: int) -> str:
    """Return the driver's name or text of an error; empty if it has none."""
    words, function = ctypes.c_char_p(), getattr(_driver(), function_name, None)
    if function is None or function(error, ctypes.byref(words)) or not words.value:
        return ""
    return words.value.decode(errors="replace")


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return cuda_driver()
    except OSError as error:
        raise CannotRun(f"the CUDA driver is missing ({error}); install the NVIDIA driver, r580 or newer") from None
