"""Tensors in the host's memory: views of files that are mapped to read."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from tilekern import spec
from tilekern.errors import InputError

# By the dtypes that checkpoints have, under torch's names.
ITEM_BYTES = spec.ITEM_BYTES | {
    "bool": 1, "uint8": 1, "uint16": 2, "int16": 2, "uint32": 4, "uint64": 8, "float64": 8, "complex64": 8,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
# Torch has at most 64 dimensions. The limits keep products of sizes small where a file is wrong.
Shape = Annotated[tuple[Count, ...], msgspec.Meta(max_length=64)]
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class HostTensor:
    """A tensor of a checkpoint, in rows without gaps.

    Attributes:
        name: its name in the checkpoint, which is printable.
        dtype: its dtype under torch's name, one of :data:`ITEM_BYTES`.
        shape: its sizes.
        data: its bytes, little-endian and read-only; of the mapped file, until the checkpoint is closed.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def size_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return how many bytes a tensor has."""
    return math.prod(shape) * ITEM_BYTES[dtype]


class MappedFile:
    """A file that is mapped to read; the data of its tensors lasts until it is closed."""

    def __init__(self, path: Path) -> None:
        """Map the file.

        Raises:
            InputError: it is missing, is empty, cannot be read, or is the pointer that Git LFS leaves in its place.
        """
        if not os.path.isfile(path):
            raise InputError(f"{path} is not a file" if os.path.exists(path) else f"{path} is missing")
        try:
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_size == 0:
                    raise InputError(f"{path} is empty")
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from None
        self.path = path
        self._views: list[memoryview] = []
        if self.map[: len(_LFS_POINTER)] == _LFS_POINTER:
            self.close()
            raise InputError(f"{path} is only a pointer of Git LFS; get the file itself with `git lfs pull`")

    def __len__(self) -> int:
        return len(self.map)

    def tensor(self, name: str, dtype: str, shape: tuple[int, ...], start: int) -> HostTensor:
        """Return the tensor whose bytes begin at ``start``; the caller has checked that they are in the file.

        Raises:
            InputError: the name is not printable, so it would break the lines of messages.
        """
        if not name.isprintable():
            raise InputError(f"{self.path}: the name of a tensor must be printable, got {name!r:.100}")
        with memoryview(self.map) as whole:
            self._views.append(whole[start : start + size_bytes(dtype, shape)])
        return HostTensor(name, dtype, shape, self._views[-1])

    def close(self) -> None:
        """Release the tensors' data and unmap the file; views of the data keep it mapped until they are gone."""
        for view in self._views:
            with contextlib.suppress(BufferError):
                view.release()
        with contextlib.suppress(BufferError):
            self.map.close()
