"""Calls the CUDA driver by ctypes: makes a context current, and checks that it accepts a cubin."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from tilekern.errors import CannotRun
from tilekern.spec.targets import cuda_driver


def enter_context(device: int) -> bool:
    """Make a device's primary context current in a thread without one; return whether it had none.

    Autograd's threads start without a context. torch sets one at the first allocation from the driver, so a thread that
    launches first has none.
    """
    try:
        context = ctypes.c_void_p()
        _call("cuCtxGetCurrent", ctypes.byref(context))
        if context.value is not None:
            return False
        _call("cuCtxSetCurrent", _primary_context(device))
    except CannotRun:
        return False
    return True


@functools.cache
def _primary_context(device: int) -> ctypes.c_void_p:
    """Return the context that torch uses on a device, retained for the life of the process."""
    ordinal, context = ctypes.c_int(), ctypes.c_void_p()
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
    library = ctypes.c_void_p()
    _call("cuLibraryLoadData", ctypes.byref(library), cubin, None, None, 0, None, None, 0)
    _call("cuLibraryUnload", library)


def _call(name: str, *arguments: Any) -> None:
    function = getattr(_driver(), name, None)
    if function is None:
        raise CannotRun(f"the CUDA driver is too old: it has no {name}")
    if error := function(*arguments):
        raise CannotRun(f"the CUDA driver's {name} failed with error {error}{_words(error)}")


def _words(error: int) -> str:
    """Return the driver's text for an error after a colon; empty if it has none."""
    words, function = ctypes.c_char_p(), getattr(_driver(), "cuGetErrorString", None)
    if function is None or function(error, ctypes.byref(words)) or not words.value:
        return ""
    return f": {words.value.decode(errors='replace')}"


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return cuda_driver()
    except OSError as error:
        raise CannotRun(f"the CUDA driver is missing: {error}") from None
