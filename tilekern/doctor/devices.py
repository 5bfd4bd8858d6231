"""Asks the CUDA driver for its GPUs without torch, so that the doctor shows them if torch is missing or broken."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from tilekern.spec.targets import Target, bandwidth, cuda_driver, seen

# Of CUdevice_attribute.
_SMS, _MAJOR, _MINOR, _CLOCK, _BUS, _L2, _THREADS, _SHARED, _REGISTERS = 16, 75, 76, 36, 37, 38, 39, 81, 82
# cuInit: there is no device, which a variable may have hidden.
NO_DEVICE = 100


@dataclass(frozen=True)
class Devices:
    """The GPUs of this process in CUDA's order; or why the driver gives none, with the error's number in ``code``.

    ``found`` is False without a driver.
    """

    found: bool
    gpus: tuple[Target, ...] = ()
    error: str | None = None
    code: int = 0


def devices() -> Devices:
    """Ask the driver, without making a context."""
    try:
        cuda = cuda_driver()
    except OSError:
        return Devices(False)
    try:
        return _asked(cuda)
    except AttributeError as error:
        return Devices(True, error=f"libcuda.so.1 is not a CUDA driver: {error}")


def _asked(cuda: Any) -> Devices:
    count = ctypes.c_int()
    code = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    if code:
        return Devices(True, error=_words(cuda, code), code=code)
    return Devices(True, tuple(_target(cuda, number) for number in range(count.value)))


def _target(cuda: Any, number: int) -> Target:
    name, device = ctypes.create_string_buffer(256), ctypes.c_int()
    cuda.cuDeviceGet(ctypes.byref(device), number)
    cuda.cuDeviceGetName(name, len(name), device)

    def figure(which: int) -> int:
        value = ctypes.c_int()
        return value.value if cuda.cuDeviceGetAttribute(ctypes.byref(value), which, device) == 0 else 0

    said = {
        "l2_bytes": figure(_L2),
        "threads": figure(_THREADS),
        "shared_bytes": figure(_SHARED),
        "registers": figure(_REGISTERS),
        "memory_gbs": bandwidth(figure(_CLOCK), figure(_BUS)),
    }
    text = name.value.decode(errors="replace").removeprefix("NVIDIA ").strip()
    return seen(text or "GPU", f"sm_{figure(_MAJOR)}{figure(_MINOR)}", max(1, figure(_SMS)), said)


def _words(cuda: Any, code: int) -> str:
    name = ctypes.c_char_p()
    try:
        known = cuda.cuGetErrorName(code, ctypes.byref(name)) == 0 and name.value
    except AttributeError:
        known = None
    return f"error {code} ({known.decode(errors='replace')})" if known else f"error {code}"
