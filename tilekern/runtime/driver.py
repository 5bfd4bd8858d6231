"""Ask the CUDA driver, by ctypes: make a context current, and tell whether it takes a cubin."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from tilekern.errors import CannotRun
from tilekern.spec.targets import cuda_driver


def enter_context(device: int) -> bool:
    """Make a device's primary context current in a thread that has no context; whether it had none.

    Autograd's threads begin without one. torch makes one current at the first allocation that asks the driver for
    memory, and a thread whose first work is a launch has made none.
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
    """The context that torch uses on a device, retained for as long as the process lives."""
    ordinal, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuDeviceGet", ctypes.byref(ordinal), device)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
    return context


def check_accepts(cubin: bytes) -> None:
    """Have the driver load a cubin and drop it again; nothing is asked where there is no driver.

    Raises:
        CannotRun: the driver refuses it: it is older than the compiler that made the cubin, for example.
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
    """The driver's own words for an error, behind a colon; nothing where it has none."""
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
