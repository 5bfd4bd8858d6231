"""Arrays on a GPU: tilekern's own, and the facts of other libraries' arrays, by their protocols.

An array says where its elements are by ``__cuda_array_interface__`` (CuPy, numba, torch) or by DLPack (JAX and all of
these). Nothing is copied, and the host does not wait. By the interface nothing waits at all: a caller launches on a
stream on which the arrays are ready. By DLPack the array's library makes that stream wait for its work.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from tilekern.arrays import dlpack
from tilekern.errors import InputError, TilekernError
from tilekern.runtime.driver import LEGACY, Device, Fetched, Memory, Stream, device_of

# By the arrays' dtypes: how __cuda_array_interface__ spells them (bfloat16 as ml_dtypes does), and their bytes.
TYPESTRS = {
    "bfloat16": "<V2", "float16": "<f2", "float32": "<f4", "int8": "|i1", "int32": "<i4", "int64": "<i8",
    "uint8": "|u1",
}  # fmt: skip
ITEM_BYTES = {dtype: int(typestr[2:]) for dtype, typestr in TYPESTRS.items()}
_DTYPES = {typestr: dtype for dtype, typestr in TYPESTRS.items()}


class Form(NamedTuple):
    """What a launch is checked for, of one array; strides are in elements."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: int
    is_read_only: bool = False


class Interface:
    """An array as a launch takes it: cuda.tile asks for DLPack before ``__cuda_array_interface__``, which takes longer.

    It does not keep the array, whose caller does until the launch is queued.
    """

    __slots__ = ("__cuda_array_interface__",)

    def __init__(self, form: Form, address: int) -> None:
        item = ITEM_BYTES[form.dtype]
        self.__cuda_array_interface__ = {
            "shape": form.shape, "strides": tuple(stride * item for stride in form.strides),
            "typestr": TYPESTRS[form.dtype], "data": (address, form.is_read_only), "version": 3, "stream": None,
        }  # fmt: skip


class Array:
    """A view of memory on a GPU, which lives as long as its views.

    Other libraries take it by DLPack (``torch.from_dlpack``, ``cupy.from_dlpack``, ``jax.dlpack.from_dlpack``), whose
    streams then wait for the work on its own, or by ``__cuda_array_interface__`` (numba). Nothing is copied.

    Attributes:
        memory: the memory.
        dtype: ``bfloat16``, ``float16``, ``float32``, ``int8``, ``int32``, ``int64`` or ``uint8``.
        shape: the sizes.
        strides: the distances of neighbours along each axis, in elements.
        address: where the first element is.
    """

    __slots__ = ("__weakref__", "address", "dtype", "form", "interface", "memory", "shape", "strides")

    def __init__(
        self, memory: Memory, shape: Iterable[int], dtype: str, strides: Iterable[int] | None = None, offset: int = 0
    ) -> None:
        """Make a view of memory that begins ``offset`` elements after its start.

        Raises:
            InputError: the dtype is unknown, or the view would leave the memory.
        """
        if dtype not in TYPESTRS:
            raise InputError(f"unknown dtype {dtype!r:.40}; known: {', '.join(TYPESTRS)}")
        self.memory, self.shape, self.dtype = memory, tuple(shape), dtype
        self.strides = _contiguous(self.shape) if strides is None else tuple(strides)
        item = ITEM_BYTES[dtype]
        if len(self.strides) != len(self.shape) or min((*self.shape, *self.strides, offset, 0)) < 0:
            raise InputError(f"shape {self.shape}, strides {self.strides} and offset {offset} do not make a view")
        last = offset + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        if 0 not in self.shape and (last + 1) * item > memory.size_bytes:
            raise InputError(
                f"a view of shape {self.shape} and strides {self.strides} from element {offset} on ends after the "
                f"memory's {memory.size_bytes // item} elements of {dtype}"
            )
        self.address = memory.address + offset * item
        self.form = Form(dtype, self.shape, self.strides, memory.stream.device.number)
        self.interface = Interface(self.form, self.address)

    def __repr__(self) -> str:
        return f"<{self.dtype}{list(self.shape)} on GPU {self.form.device}>"

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Where the elements are, for other libraries; it says of no stream that they are ready on it."""
        return self.interface.__cuda_array_interface__

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's number for CUDA, and the GPU's."""
        return dlpack.CUDA, self.form.device

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Return a DLPack capsule of the same memory, which lives as long as its consumer's array.

        Args:
            stream: the driver's handle of the consumer's stream, which waits for the work on the memory's so far. 1 or
                None is the legacy default stream, 2 the thread's, and with -1 none waits.
            max_version: the newest DLPack that the consumer reads; from (1, 0) on the capsule has a version.
            dl_device: where the consumer wants it, as :meth:`__dlpack_device__` says it.
            copy: True asks for a copy.

        Raises:
            BufferError: a copy is asked for, or another device; or there is no such stream; or it cannot wait, since
                the memory's is being captured.
            DriverError: the driver does not know the stream.
        """
        if copy:
            raise BufferError("arrays are exported without a copy; copy what the consumer returns")
        if dl_device is not None and tuple(map(int, dl_device)) != self.__dlpack_device__():
            raise BufferError(f"{self!r} stays on its GPU, DLPack's device {self.__dlpack_device__()}, not {dl_device}")
        return dlpack.export(self.memory, self.form, self.address, stream, max_version)

    def view(self, shape: Iterable[int], strides: Iterable[int] | None = None, offset: int = 0) -> Array:
        """Return another view of the same memory that begins ``offset`` elements after this one.

        Raises:
            InputError: it would leave the memory.
        """
        before = (self.address - self.memory.address) // ITEM_BYTES[self.dtype]
        return Array(self.memory, shape, self.dtype, strides, before + offset)

    def moved(self, memory: Memory) -> Array:
        """Return the same view of other memory, which must be as large."""
        view = Array.__new__(Array)  # without the checks, which this one has passed
        view.memory, view.dtype, view.shape, view.strides = memory, self.dtype, self.shape, self.strides
        view.address = memory.address + self.address - self.memory.address
        view.form = Form(self.dtype, self.shape, self.strides, memory.stream.device.number)
        view.interface = Interface(view.form, view.address)
        return view

    def write(self, data: Any) -> None:
        """Copy a buffer with the bytes of all elements here, such as a mapped file; wait until it is done.

        Raises:
            InputError: the elements are not contiguous.
            ValueError: the buffer has another size.
        """
        self.memory.write(data, *self._bytes())

    def read(self) -> bytearray:
        """Return the bytes of contiguous elements, when the stream that the memory belongs to has come so far.

        Raises:
            InputError: the elements are not contiguous.
        """
        return self.memory.read(*self._bytes())

    def fetch(self) -> Fetched:
        """Queue a copy of the bytes of contiguous elements, at most 4096, to the host, and wait for nothing.

        Raises:
            InputError: the elements are not contiguous.
        """
        return self.memory.fetch(*self._bytes())

    def fill(self, byte: int = 0) -> None:
        """Queue on the memory's stream that all bytes of contiguous elements get a value.

        Raises:
            InputError: the elements are not contiguous.
        """
        self.memory.fill(byte, *self._bytes())

    def _bytes(self) -> tuple[int, int]:
        """Return where the elements begin in the memory, in bytes, and how many bytes they are."""
        dense = _contiguous(self.shape)
        if any(size > 1 and one != other for size, one, other in zip(self.shape, self.strides, dense, strict=True)):
            raise InputError(f"only contiguous elements are copied and filled; these have the strides {self.strides}")
        return self.address - self.memory.address, math.prod(self.shape) * ITEM_BYTES[self.dtype]


def empty(shape: Iterable[int], dtype: str, stream: Stream) -> Array:
    """Return an array with memory of the pool, for work on a stream; its values are whatever was there.

    Raises:
        InputError: the dtype is unknown, or a size is negative.
        DriverError: the GPU has no such memory left.
    """
    sizes = tuple(shape)
    if dtype not in TYPESTRS or min((*sizes, 0)) < 0:
        known = ", ".join(TYPESTRS)
        raise InputError(f"an array of {dtype!r:.40} with the shape {sizes} cannot be made; known dtypes: {known}")
    return Array(stream.memory(math.prod(sizes) * ITEM_BYTES[dtype]), sizes, dtype)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def form_of(array: Any, name: str, device: Device, stream: int) -> tuple[Form, Interface, int]:
    """Return the form of another library's array, what a launch takes for it, and its address.

    Args:
        array: the array.
        name: the parameter, for errors.
        device: the GPU of the launch.
        stream: the driver's handle of its stream.

    Raises:
        InputError: it is not an array in the memory of a GPU, or its dtype is one that no kernel takes, or its library
            refuses.
    """
    try:
        has_dlpack = hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__")
        interface = getattr(array, "__cuda_array_interface__", None)
        if isinstance(interface, dict) and not (has_dlpack and _has_hidden_stream(interface)):
            form, address = _by_interface(interface, name)
        elif has_dlpack:
            form, address = _by_dlpack(array, name, _stream_for_dlpack(device, stream))
            if isinstance(interface, dict):  # JAX's DLPack does not say so
                form = form._replace(is_read_only=True)
        else:
            raise InputError(
                f"{name} is {_kind(array)}, not an array on a GPU: it has neither __cuda_array_interface__ nor DLPack"
            )
    except TilekernError:
        raise
    except Exception as error:  # noqa: BLE001 (of any library, such as torch's for a tensor that requires gradients)
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"{name}, {_kind(array)}, cannot be read: {what}") from None
    return form, Interface(form, address), address


def _has_hidden_stream(interface: dict[str, Any]) -> bool:
    """Return whether users cannot know on which stream an array is ready, as with JAX's: DLPack makes a stream wait."""
    return "stream" not in interface and bool(interface["data"][1])


def _stream_for_dlpack(device: Device, stream: int) -> int | None:
    """Return a stream as ``__dlpack__`` takes it.

    A stream that is captured cannot wait for work outside, so that it is not named: JAX then waits on the host. Nor is
    -1 passed, DLPack's "do not wait": JAX takes it for a handle.
    """
    if stream in (0, LEGACY):
        return LEGACY
    return None if device.is_capturing(stream) else stream


def _kind(array: Any) -> str:
    return f"of type {type(array).__module__}.{type(array).__qualname__}"


def _by_interface(interface: dict[str, Any], name: str) -> tuple[Form, int]:
    address, is_read_only = interface["data"]
    typestr, shape = interface["typestr"], tuple(interface["shape"])
    dtype = _DTYPES.get(typestr)
    if dtype is None:
        raise InputError(f"{name} has elements of type {typestr!r:.20}; kernels take {', '.join(TYPESTRS)}")
    item, strides = ITEM_BYTES[dtype], interface.get("strides")
    if strides is not None and any(stride % item for stride in strides):
        raise InputError(f"{name} has strides of {strides} bytes, which are not whole elements of {dtype}")
    in_elements = _contiguous(shape) if strides is None else tuple(stride // item for stride in strides)
    number = device_of(address) if address else None
    if number is None and 0 not in shape:
        raise InputError(f"{name} is not in the memory of a GPU; copy it there first")
    return Form(dtype, shape, in_elements, -1 if number is None else number, bool(is_read_only)), address


def _by_dlpack(array: Any, name: str, stream: int | None) -> tuple[Form, int]:
    where, _ = array.__dlpack_device__()
    if int(where) not in (dlpack.CUDA, dlpack.MANAGED):
        raise InputError(f"{name}, {_kind(array)}, is not in the memory of a CUDA GPU; copy it there first")
    facts = dlpack.read(array, stream)
    if facts.dtype is None:
        raise InputError(f"{name} has elements of DLPack's type {facts.type_name}; kernels take {', '.join(TYPESTRS)}")
    strides = _contiguous(facts.shape) if facts.strides is None else facts.strides
    return Form(facts.dtype, facts.shape, strides, facts.device, facts.is_read_only), facts.address
