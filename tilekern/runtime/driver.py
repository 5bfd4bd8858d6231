"""Asks the CUDA driver, by ctypes: which context is current, whether it takes a cubin, and the other :data:`LAUNCHER`.

cuda-tile's launcher for kernels that say their block and cluster is private to it (``launch_extended`` of 1.7, guarded
by a contract test). Where a new version of cuda-tile has it otherwise, this one stands in, a little slower.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tilekern.errors import CannotRun, InputError, NoVariant
from tilekern.runtime.launcher import PrebuiltKernel

# The variable that says who launches kernels of CuTe DSL: cuda-tile, or the driver alone.
LAUNCHER, CUDA_TILE, DRIVER = "TILEKERN_LAUNCHER", "cuda-tile", "driver"
# Of CUlaunchAttributeID.
_COOPERATIVE, _CLUSTER, _DEPENDENT = 2, 4, 6
# Of CUfunction_attribute: the most dynamic shared memory that a launch may ask for.
_MOST_SHARED = 8


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


def launcher() -> Callable[..., None]:
    """The function that launches kernels of CuTe DSL, as :data:`LAUNCHER` says.

    Raises:
        InputError: the variable is neither ``cuda-tile`` nor ``driver``.
    """
    asked = os.environ.get(LAUNCHER) or CUDA_TILE
    if asked == DRIVER:
        return launch
    if asked != CUDA_TILE:
        raise InputError(f"{LAUNCHER} must be {CUDA_TILE} or {DRIVER}, got {asked!r}")
    from cuda.tile._cext import launch_extended

    return launch_extended


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
    if not _is_here():
        return
    library = ctypes.c_void_p()
    _call("cuLibraryLoadData", ctypes.byref(library), cubin, None, None, 0, None, None, 0)
    _call("cuLibraryUnload", library)


def _is_here() -> bool:
    try:
        _driver()
    except CannotRun:
        return False
    return True


def launch(
    stream: int, grid: Sequence[int], block: Sequence[int], kernel: PrebuiltKernel, arguments: Sequence[Any], *,
    cooperative: bool = False, block_in_cluster_count: Sequence[int] | None = None,
    programmatic_dependent_launch: bool = False,
) -> None:  # fmt: skip
    """Queue a kernel; its parameters are those of ``launch_extended``.

    Raises:
        NoVariant: the kernel has no cubin that allows the arguments.
        CannotRun: the driver refuses the cubin or the launch.
    """
    given: list[tuple[int, Sequence[int]]] = []
    if cooperative:
        given.append((_COOPERATIVE, (1,)))
    if block_in_cluster_count is not None:
        given.append((_CLUSTER, _three(block_in_cluster_count)))
    if programmatic_dependent_launch:
        given.append((_DEPENDENT, (1,)))
    attributes = (_Attribute * max(1, len(given)))()
    for attribute, (number, values) in zip(attributes, given, strict=False):
        attribute.id = number
        for place, value in enumerate(values):
            attribute.value[place] = value
    shared_bytes = kernel.shared_bytes
    config = _Config(_triple(grid), _triple(block), shared_bytes, stream, attributes, len(given))
    passed = [value for argument in arguments for value in _passed(argument)]
    parameters = (ctypes.c_void_p * len(passed))(*map(ctypes.addressof, passed))
    function = _function(kernel, arguments)
    if shared_bytes:
        _allow_shared(function.value, _device(), shared_bytes)
    _call("cuLaunchKernelEx", ctypes.byref(config), function, parameters, None)


def _three(sizes: Sequence[int]) -> list[int]:
    return [*sizes, 1, 1][:3]


def _triple(sizes: Sequence[int]) -> Any:
    return (ctypes.c_uint * 3)(*_three(sizes))


def _passed(argument: Any) -> list[Any]:
    """A launch's values for an argument: of an array its address, its sizes and its strides in elements."""
    if isinstance(argument, float):
        return [ctypes.c_float(argument)]
    if isinstance(argument, int):
        return [ctypes.c_int32(argument)]
    numbers = (*argument.shape, *argument.stride())
    return [ctypes.c_void_p(argument.data_ptr()), *map(ctypes.c_int32, numbers)]


def _function(kernel: PrebuiltKernel, arguments: Sequence[Any]) -> ctypes.c_void_p:
    """The driver's kernel of the strongest variant that allows the arguments."""
    for variant in kernel.variants:
        if all(map(_allows, arguments, variant.assumptions)):
            return _loaded(variant.load, variant.symbol)
    raise NoVariant(f"{kernel.name}: none of its variants allows the arguments")


def _allows(argument: Any, assumed: Mapping[str, Any]) -> bool:
    if assumed["kind"] == "scalar":
        return isinstance(argument, float if assumed["dtype"] == "float32" else int)
    *leading, last = argument.stride()
    return (
        str(argument.dtype).removeprefix("torch.") == assumed["dtype"]
        and argument.dim() == assumed["ndim"]
        and argument.data_ptr() % assumed["base_bytes"] == 0
        and (last == 1 or not assumed["last_stride_one"])
        and argument.shape[-1] % assumed["extent_elements"] == 0
        and all(stride % assumed["stride_elements"] == 0 for stride in leading)
    )


@functools.lru_cache(maxsize=4096)
def _loaded(load: Callable[[], bytes], symbol: str) -> ctypes.c_void_p:
    """The driver's kernel of a cubin, which stays loaded."""
    library, function, cubin = ctypes.c_void_p(), ctypes.c_void_p(), load()
    _call("cuLibraryLoadData", ctypes.byref(library), cubin, None, None, 0, None, None, 0)
    _call("cuLibraryGetKernel", ctypes.byref(function), library, symbol.encode())
    return function


def _device() -> int:
    """The device of the current context."""
    device = ctypes.c_int()
    _call("cuCtxGetDevice", ctypes.byref(device))
    return device.value


@functools.lru_cache(maxsize=4096)
def _allow_shared(function: int, device: int, size: int) -> None:
    """Let a kernel be launched with so many bytes of dynamic shared memory: more than 48 KiB must be asked for."""
    _call("cuKernelSetAttribute", _MOST_SHARED, size, ctypes.c_void_p(function), device)


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
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CannotRun(f"the CUDA driver is missing: {error}") from None
