"""NCCL by ctypes: sums and gathers over GPUs of one process.

The library comes with the wheel nvidia-nccl-cu13 (or -cu12), which torch's builds for CUDA bring too; without the wheel
the system's is taken.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tilekern.errors import CannotRun, ExtraMissing
from tilekern.runtime.driver import Stream

_NAME = "libnccl.so.2"
# From here on, calls that are captured and others may follow each other on one communicator.
_LEAST = (2, 13)
# By dtypes: the codes of ncclDataType_t.
_CODES = {"float16": 6, "float32": 7, "bfloat16": 9}
_SUM = 0
_INT, _SIZE, _POINTER = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p
# By functions: what they take. They return an error's number, but for those that return a text.
_TAKES: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (ctypes.POINTER(_INT),),
    "ncclCommInitAll": (ctypes.POINTER(_POINTER), _INT, ctypes.POINTER(_INT)),
    "ncclCommDestroy": (_POINTER,),
    "ncclCommAbort": (_POINTER,),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclAllReduce": (_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
    "ncclAllGather": (_POINTER, _POINTER, _SIZE, _INT, _POINTER, _POINTER),
    "ncclGetErrorString": (_INT,),
    "ncclGetLastError": (_POINTER,),
}
_TEXTS = ("ncclGetErrorString", "ncclGetLastError")


class Communicators:
    """A communicator for each of several GPUs; each call queues work on one stream of every GPU, or on none.

    They are destroyed with the last reference to them, and not before the graphs that hold captured calls: NCCL would
    wait for those.
    """

    def __init__(self, devices: Sequence[int]) -> None:
        """Connect GPUs, by their numbers in CUDA's order.

        Raises:
            ExtraMissing: NCCL is not installed.
            CannotRun: it is too old, cannot be loaded, or fails.
        """
        self._nccl, self._graphs = library(), 0
        self._is_over = self._has_failed = False
        self._handles: list[int | None] = []
        handles = (_POINTER * len(devices))()
        _check("ncclCommInitAll", self._nccl.ncclCommInitAll(handles, len(devices), (_INT * len(devices))(*devices)))
        self._handles = list(handles)

    def sum(self, streams: Sequence[Stream], addresses: Sequence[int], count: int, dtype: str) -> None:
        """Queue that ``count`` numbers of each GPU become the sums over all GPUs, the same bits on each."""
        self._group(
            "ncclAllReduce",
            [
                (address, address, count, _CODES[dtype], _SUM, handle, stream.handle)
                for address, handle, stream in zip(addresses, self._handles, streams, strict=True)
            ],
        )

    def gather(
        self, streams: Sequence[Stream], sources: Sequence[int], targets: Sequence[int], count: int, dtype: str
    ) -> None:  # fmt: skip
        """Queue that each GPU gets the ``count`` numbers of all GPUs, one behind the other."""
        self._group(
            "ncclAllGather",
            [
                (source, target, count, _CODES[dtype], handle, stream.handle)
                for source, target, handle, stream in zip(sources, targets, self._handles, streams, strict=True)
            ],
        )

    def _group(self, name: str, calls: Iterable[tuple[Any, ...]]) -> None:
        """Make a call for each GPU in a group, which NCCL starts when it ends.

        Raises:
            CannotRun: a call failed, now or before.
        """
        self.check()
        group = [("ncclGroupStart", ()), *((name, arguments) for arguments in calls), ("ncclGroupEnd", ())]
        # The group must end whatever fails in it; NCCL then starts nothing of it.
        errors = [(called, getattr(self._nccl, called)(*arguments)) for called, arguments in group]
        for called, error in errors:
            if error:
                text = _failure(called, error)
                self.abort()
                raise CannotRun(text)

    def check(self) -> None:
        """Raise an error if a call failed before.

        Raises:
            CannotRun: one did.
        """
        if self._has_failed:
            raise CannotRun("the GPUs no longer work together, since a call failed before; load the model again")

    def abort(self) -> None:
        """End what the GPUs run for NCCL, as one of them may wait for another that will never come."""
        if self._has_failed:
            return
        self._has_failed = True

        def abort(nccl: Any, handles: Iterable[int | None]) -> None:
            for handle in handles:
                nccl.ncclCommAbort(handle)

        # The last call returns when all graphs are gone, which may hold the caller's frame.
        arguments = (self._nccl, self._handles)
        threading.Thread(target=abort, args=arguments, name="tilekern-nccl-abort", daemon=True).start()

    def begin_graph(self) -> None:
        """Note that there is one more graph with captured calls."""
        self._graphs += 1

    def end_graph(self) -> None:
        """Note that such a graph is gone."""
        self._graphs -= 1
        if self._is_over and not self._graphs:
            self._destroy()

    def __del__(self) -> None:
        # Garbage in a circle ends in any order, so graphs may be left.
        self._is_over = True
        if not getattr(self, "_graphs", 1):
            self._destroy()

    def _destroy(self) -> None:
        handles, self._handles = [] if self._has_failed else self._handles, []
        with contextlib.suppress(TypeError):  # the interpreter may have ended before
            for handle in handles:
                self._nccl.ncclCommDestroy(handle)


@functools.cache
def library() -> Any:
    """Return NCCL.

    Raises:
        ExtraMissing: it is not installed.
        CannotRun: it is too old, or cannot be loaded.
    """
    nccl, version = _opened(), _INT()
    for name, takes in _TAKES.items():
        function = getattr(nccl, name, None)
        if function is None:
            raise CannotRun(f"NCCL is too old: it has no {name}; pip install 'tilekern[nccl]'")
        function.argtypes, function.restype = takes, ctypes.c_char_p if name in _TEXTS else _INT
    error = nccl.ncclGetVersion(ctypes.byref(version))
    found = _version(version.value)
    if error or found < _LEAST:
        least, shown = (".".join(map(str, numbers)) for numbers in (_LEAST, found))
        raise CannotRun(f"NCCL {shown} is too old, and {least} is needed; pip install 'tilekern[nccl]'")
    return nccl


def _version(code: int) -> tuple[int, int]:
    """Return the first two numbers of a version, whose code has two digits for the second from 2.9 on."""
    return divmod(code // 100, 100) if code >= 10000 else divmod(code // 100, 10)


def _opened() -> ctypes.CDLL:
    for file in _files():
        try:
            return ctypes.CDLL(file)
        except OSError as error:
            if os.path.exists(file):
                raise CannotRun(f"NCCL cannot be loaded: {error}") from None
    raise ExtraMissing("more than one GPU needs NCCL, which is not installed: pip install 'tilekern[nccl]'")


def _files() -> Iterator[str]:
    """Yield where NCCL may be: the wheel's file, and the name by which the system looks for it."""
    with contextlib.suppress(ModuleNotFoundError):  # no package of the folder nvidia is installed
        found = importlib.util.find_spec("nvidia.nccl")
        for folder in (found and found.submodule_search_locations) or ():
            yield os.path.join(folder, "lib", _NAME)
    yield _NAME


def _check(name: str, error: int) -> None:
    if error:
        raise CannotRun(_failure(name, error))


def _failure(name: str, error: int) -> str:
    """Return a line about a call that failed, with NCCL's own words."""
    texts = (library().ncclGetErrorString(error), library().ncclGetLastError(None))
    words = ": ".join(" ".join(text.decode(errors="replace").split()) for text in texts if text)
    return f"NCCL's {name} failed with error {error}: {words}; NCCL_DEBUG=WARN tells more"
