"""Files in the format of safetensors.

A file is 8 bytes with the little-endian length of the header; the header, a JSON object of each tensor's dtype, shape
and offsets; and the tensors' bytes, which follow each other without holes.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from tilekern.errors import InputError
from tilekern.inference.host_tensors import Count, HostTensor, MappedFile, Shape, size_bytes
from tilekern.inference.json_files import LARGEST_JSON_BYTES, parse_object

_LENGTH_BYTES = 8
# Dtypes of less than a byte, F4 and F6, are left out.
_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip


class _Entry(msgspec.Struct):
    """A tensor in the header; offsets are counted from the header's end."""

    dtype: str
    shape: Shape
    data_offsets: tuple[Count, Count]


def read_safetensors(file: MappedFile) -> dict[str, HostTensor]:
    """Return the tensors of a file by name, in the order of their bytes.

    Raises:
        InputError: the file is not in the format of safetensors, or is cut off, or has a dtype of less than a byte.
    """
    start, header = _header(file)
    _check_metadata(file, header.pop("__metadata__", {}))
    entries = {name: _entry(file, name, fields) for name, fields in header.items()}
    in_order, end = sorted(entries.items(), key=lambda item: item[1].data_offsets), 0
    for name, entry in in_order:
        first, last = entry.data_offsets
        if first != end:
            problem = "overlaps another" if first < end else "leaves a hole before it"
            raise InputError(f"{file.path}: tensor {name!r:.100} {problem}: it starts at {first}, and must at {end}")
        end = last
    if start + end != len(file):
        raise InputError(f"{file.path} has {len(file)} bytes, and must have {start + end}; copy or download it again")
    return {
        name: file.tensor(name, _DTYPES[entry.dtype], entry.shape, start + entry.data_offsets[0])
        for name, entry in in_order
    }


def _header(file: MappedFile) -> tuple[int, dict[str, Any]]:
    """Return where the header ends, and the object in it."""
    length = int.from_bytes(file.map[:_LENGTH_BYTES], "little")
    start = _LENGTH_BYTES + length
    if len(file) < _LENGTH_BYTES or length > LARGEST_JSON_BYTES or start > len(file):
        raise InputError(
            f"{file.path} is not a safetensors file, or is cut off: its header would have {length} bytes, of "
            f"{len(file)} in the file and {LARGEST_JSON_BYTES} that the format allows"
        )
    data = file.map[_LENGTH_BYTES:start]
    if not data.startswith(b"{"):
        raise InputError(f"{file.path} is not a safetensors file: its header must begin with {{, got {data[:1]!r}")
    return start, parse_object(data, f"{file.path}: the header", _without_duplicates)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {name!r:.100} appears twice")
    return fields


def _check_metadata(file: MappedFile, metadata: Any) -> None:
    try:
        msgspec.convert(metadata, dict[str, str])
    except msgspec.ValidationError as error:
        raise InputError(f"{file.path}: __metadata__ must map text to text: {error}") from None


def _entry(file: MappedFile, name: str, fields: Any) -> _Entry:
    """Return a tensor's entry, checked but for its place among the others."""
    what = f"{file.path}: tensor {name!r:.100}"
    try:
        entry = msgspec.convert(fields, _Entry)
    except msgspec.ValidationError as error:
        raise InputError(f"{what} is not described as the format says: {error}") from None
    if entry.dtype not in _DTYPES:
        raise InputError(f"{what} has the dtype {entry.dtype!r:.40}; known are {', '.join(_DTYPES)}")
    first, last = entry.data_offsets
    if last - first != size_bytes(_DTYPES[entry.dtype], entry.shape):
        shape = f"{list(entry.shape)}"
        raise InputError(f"{what} has {last - first} bytes, which are not those of {entry.dtype} of shape {shape:.200}")
    return entry
