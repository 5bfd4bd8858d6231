"""State dicts that ``torch.save`` wrote, read without torch.

A file is a zip archive whose entries are not compressed: ``data.pkl``, and the bytes of each storage in ``data/KEY``.
The pickle is run here by the few opcodes that a state dict needs. A global in it is a name that is compared with known
ones, so no file can make this process import or call anything. The checksum of the pickle is compared; those of the
storages are not, since that would read the whole file.
"""

from __future__ import annotations

import pickletools
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from tilekern.errors import InputError
from tilekern.inference.host_tensors import ITEM_BYTES, HostTensor, MappedFile, Shape, size_bytes
from tilekern.inference.json_files import LARGEST_JSON_BYTES

# By the names of torch's storages.
_DTYPES = {
    "torch.BoolStorage": "bool", "torch.ByteStorage": "uint8", "torch.CharStorage": "int8",
    "torch.ShortStorage": "int16", "torch.IntStorage": "int32", "torch.LongStorage": "int64",
    "torch.HalfStorage": "float16", "torch.BFloat16Storage": "bfloat16", "torch.FloatStorage": "float32",
    "torch.DoubleStorage": "float64", "torch.ComplexFloatStorage": "complex64",
}  # fmt: skip
_ORDERED, _TENSOR, _PARAMETER = (
    "collections.OrderedDict", "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter"
)  # fmt: skip
_KNOWN = {_ORDERED, _TENSOR, _PARAMETER, *_DTYPES}
_ADVICE = "save model.state_dict() instead"
_LOCAL_HEADER, _LOCAL_HEADER_BYTES = b"PK\x03\x04", 30
_ENCRYPTED = 1
_ZIP_ERRORS = (
    zipfile.BadZipFile,
    OSError,
    ValueError,
    RuntimeError,
    struct.error,
    EOFError,
    LookupError,
    OverflowError,
)


def read_torch_file(file: MappedFile) -> dict[str, HostTensor]:
    """Return the tensors of a state dict, in its order; a dict with a state dict under ``model`` gives that one.

    Raises:
        InputError: the file is anything else, or is cut off, or a tensor in it is transposed or has gaps.
    """
    archive = _Archive(file)
    document = _unpickled(archive.pickle, str(file.path))
    if isinstance(document, dict) and isinstance(document.get("model"), dict):
        document = document["model"]
    if not isinstance(document, dict):
        raise InputError(f"{file.path} holds {_kind(document)}, which is not a state dict; {_ADVICE}")
    return {name: _read(archive, name, value) for name, value in document.items()}


def _read(archive: _Archive, name: Any, value: Any) -> HostTensor:
    what = f"{archive.file.path}: {name!r:.100}" if isinstance(name, str | int) else f"{archive.file.path}"
    if not isinstance(name, str) or not isinstance(value, _Tensor):
        raise InputError(f"{what} is {_kind(value)}, which is not a named tensor; {_ADVICE}")
    try:
        shape = msgspec.convert(value.shape, Shape)
    except msgspec.ValidationError as error:
        raise InputError(f"{what} has a wrong shape: {error}") from None
    if not _is_contiguous(shape, value.strides):
        raise InputError(f"{what} is transposed or has gaps; save it with .contiguous()")
    dtype, key, length = value.storage
    start, end = archive.span(f"data/{key}", what)
    if end - start != length * ITEM_BYTES[dtype]:
        raise InputError(f"{what} has a storage of {end - start} bytes, which are not {length!r:.30} of {dtype}")
    first = value.offset * ITEM_BYTES[dtype]
    if not 0 <= first <= first + size_bytes(dtype, shape) <= end - start:
        raise InputError(f"{what} lies outside of its storage of {end - start} bytes")
    return archive.file.tensor(name, dtype, shape, start + first)


def _is_contiguous(shape: tuple[int, ...], strides: tuple[Any, ...]) -> bool:
    if len(shape) != len(strides):
        return False
    if 0 in shape:
        return True
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


class _Archive:
    """The zip archive of a file, and where the bytes of its entries are."""

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        try:
            with zipfile.ZipFile(file.path) as archive:
                infos = archive.infolist()
        except _ZIP_ERRORS as error:
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"{file.path} is not a zip archive of torch.save, or is cut off: {reason}") from None
        self._infos = {info.filename: info for info in infos}
        folders = [name.removesuffix("data.pkl") for name in self._infos if name.endswith("/data.pkl")]
        if len(folders) != 1 or len(self._infos) != len(infos):
            raise InputError(f"{file.path} is not what torch.save writes: it must have one data.pkl, and no name twice")
        self._folder = folders[0]
        if self._folder + "byteorder" in self._infos and self._bytes("byteorder") != b"little":
            raise InputError(f"{file.path} is big-endian; save it on a little-endian machine")
        self.pickle = self._bytes("data.pkl")

    def span(self, name: str, what: str) -> tuple[int, int]:
        """Return where the bytes of an entry start and end in the file."""
        info = self._infos.get(self._folder + name)
        if info is None:
            raise InputError(f"{what} needs the entry {name!r:.100} of the archive, which is missing")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & _ENCRYPTED:
            raise InputError(f"{what} needs the entry {name!r:.100}, which must not be compressed or encrypted")
        start = info.header_offset
        local = self.file.map[start : start + _LOCAL_HEADER_BYTES] if start >= 0 else b""
        lengths = [int.from_bytes(local[at : at + 2], "little") for at in (26, 28)]
        first = start + _LOCAL_HEADER_BYTES + sum(lengths)
        if not (local.startswith(_LOCAL_HEADER) and info.compress_size == info.file_size <= len(self.file) - first):
            raise InputError(
                f"{what} needs the entry {name!r:.100}, which is not whole; copy or download the file again"
            )
        return first, first + info.file_size

    def _bytes(self, name: str) -> bytes:
        """Return a small entry, whose checksum is compared."""
        start, end = self.span(name, str(self.file.path))
        if end - start > LARGEST_JSON_BYTES:
            raise InputError(f"{self.file.path}: {name} is larger than {LARGEST_JSON_BYTES} bytes")
        data = self.file.map[start:end]
        if zlib.crc32(data) != self._infos[self._folder + name].CRC:
            raise InputError(f"{self.file.path}: {name} has another checksum; copy or download the file again")
        return data


class _Global(NamedTuple):
    name: str


class _Storage(NamedTuple):
    dtype: str
    key: str
    length: int


@dataclass(frozen=True, slots=True)
class _Tensor:
    storage: _Storage
    offset: int
    shape: tuple[Any, ...]
    strides: tuple[Any, ...]


def _kind(value: Any) -> str:
    """Return what a value of a pickle is, for a message."""
    return repr(value.name) if isinstance(value, _Global) else type(value).__name__.removeprefix("_")


def _unpickled(data: bytes, path: str) -> Any:
    """Return the value of a pickle of plain values and tensors.

    Raises:
        InputError: it has anything else.
    """
    machine = _Machine(path)
    try:
        for opcode, argument, _ in pickletools.genops(data):
            step = _STEPS.get(opcode.name)
            if step is None:
                raise InputError(f"{path} holds more than tensors (the pickle opcode {opcode.name}); {_ADVICE}")
            step(machine, argument)
        return machine.stack.pop()
    except (ValueError, LookupError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{path}: data.pkl is not a whole pickle of a state dict: {reason}") from None


class _Machine:
    """The stack, the marks and the memo of the pickle format."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def push_global(self, name: str) -> None:
        name = name.replace(" ", ".")
        if name not in _KNOWN:
            raise InputError(f"{self.path} holds {name!r:.100}, which is not a plain tensor; {_ADVICE}")
        self.stack.append(_Global(name))

    def pop(self, count: int) -> list[Any]:
        if not 0 <= count <= len(self.stack):
            raise IndexError("the stack is too short")
        values = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return values

    def pop_marked(self) -> list[Any]:
        return self.pop(len(self.stack) - self.marks.pop())

    def push_named_global(self, _: None) -> None:
        match self.pop(2):
            case [str(module), str(name)]:
                self.push_global(f"{module}.{name}")
            case _:
                raise ValueError("a global must be named by text")

    def push_storage(self, _: None) -> None:
        match self.stack.pop():
            case ("storage", _Global(name), str(key), str(), int(length)) if name in _DTYPES:
                self.stack.append(_Storage(_DTYPES[name], key, length))
            case _:
                raise ValueError("a reference from outside must be a storage")

    def append(self, values: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise ValueError("only a list can be appended to")
        self.stack[-1].extend(values)

    def set_items(self, values: list[Any]) -> None:
        keys = values[::2]
        if not isinstance(self.stack[-1], dict) or not all(isinstance(key, str | int) for key in keys):
            raise ValueError("only a dict has items, and their keys must be text or whole numbers")
        self.stack[-1].update(zip(keys, values[1::2], strict=True))

    def call(self, _: None) -> None:
        match self.pop(2):
            case [_Global(name), ()] if name == _ORDERED:
                self.stack.append({})
            case [_Global(name), (_Storage() as storage, int(offset), tuple(shape), tuple(strides), *_)] if (
                name == _TENSOR
            ):
                self.stack.append(_Tensor(storage, offset, shape, strides))
            case [_Global(name), (_Tensor() as tensor, *_)] if name == _PARAMETER:
                self.stack.append(tensor)
            case [function, _]:
                raise ValueError(f"wrong arguments of {_kind(function)}")

    def set_state(self, _: None) -> None:
        """Leave out the attributes of a dict: a state dict has ``_metadata``, the versions of its modules."""
        self.pop(1)
        if not isinstance(self.stack[-1], dict):
            raise ValueError("only a dict has a state")


def _push(machine: _Machine, argument: Any) -> None:
    machine.stack.append(argument)


def _memoize(machine: _Machine, argument: int | None) -> None:
    machine.memo[len(machine.memo) if argument is None else argument] = machine.stack[-1]


_STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda _machine, _argument: None),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"), _push),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), _memoize),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda machine, number: _push(machine, machine.memo[number])),
    "NONE": _push,
    "NEWTRUE": lambda machine, _: _push(machine, True),
    "NEWFALSE": lambda machine, _: _push(machine, False),
    "EMPTY_TUPLE": lambda machine, _: _push(machine, ()),
    "EMPTY_LIST": lambda machine, _: _push(machine, []),
    "EMPTY_DICT": lambda machine, _: _push(machine, {}),
    "MARK": lambda machine, _: machine.marks.append(len(machine.stack)),
    "TUPLE": lambda machine, _: _push(machine, tuple(machine.pop_marked())),
    "TUPLE1": lambda machine, _: _push(machine, tuple(machine.pop(1))),
    "TUPLE2": lambda machine, _: _push(machine, tuple(machine.pop(2))),
    "TUPLE3": lambda machine, _: _push(machine, tuple(machine.pop(3))),
    "APPEND": lambda machine, _: machine.append(machine.pop(1)),
    "APPENDS": lambda machine, _: machine.append(machine.pop_marked()),
    "SETITEM": lambda machine, _: machine.set_items(machine.pop(2)),
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop_marked()),
    "GLOBAL": _Machine.push_global,
    "STACK_GLOBAL": _Machine.push_named_global,
    "BINPERSID": _Machine.push_storage,
    "REDUCE": _Machine.call,
    "BUILD": _Machine.set_state,
}
