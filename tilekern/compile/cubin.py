"""Reads a cubin's ELF sections: registers, spills, shared memory, threads and code of a kernel."""

from __future__ import annotations

import dataclasses
import io
import struct
from dataclasses import dataclass
from typing import Any

# Attribute codes of the .nv.info sections, as `cuobjdump -elf` names them.
_FORMAT_SIZED_VALUE = 0x04
_FRAME_SIZE, _MIN_STACK_SIZE, _REGISTER_COUNT = 0x11, 0x12, 0x2F
_REQUIRED_THREADS, _MAX_THREADS, _PARAMETER = 0x10, 0x05, 0x17
# The bank that a launch writes the arguments to.
_ARGUMENTS = ".nv.constant0"


@dataclass(frozen=True)
class Resources:
    """The resources of an SM that one kernel of a cubin needs.

    Attributes:
        registers: 32-bit registers of a thread.
        stack_bytes: local memory of a thread; more than 0 means spills or indexed register arrays.
        shared_bytes: shared memory of a block; a cubin only states the static part.
        threads: threads of a block.
        code_bytes: machine code.
    """

    registers: int
    stack_bytes: int
    shared_bytes: int
    threads: int
    code_bytes: int

    def as_dict(self) -> dict[str, int]:
        """Return the resources as a record keeps them."""
        return dataclasses.asdict(self)


def read_resources(cubin: bytes, symbol: str) -> Resources:
    """Return the resources of kernel ``symbol`` in ``cubin``.

    Raises:
        ValueError: the cubin has no such kernel.
        ImportError: pyelftools (part of ``tilekern[compile]``) is not installed.
    """
    from elftools.elf.elffile import ELFFile

    elf = ELFFile(io.BytesIO(cubin))
    text = elf.get_section_by_name(f".text.{symbol}")
    if text is None:
        raise ValueError(f"the cubin holds no kernel {symbol}")
    symbols = enumerate(elf.get_section_by_name(".symtab").iter_symbols())
    index = next((at for at, one in symbols if one.name == symbol and one["st_info"]["type"] == "STT_FUNC"), None)
    if index is None:
        raise ValueError(f"the cubin's symbol table has no function {symbol}")
    whole = _attributes(elf.get_section_by_name(".nv.info"))
    own = _attributes(elf.get_section_by_name(f".nv.info.{symbol}"))
    shared = elf.get_section_by_name(f".nv.shared.{symbol}")
    return Resources(
        registers=_of_symbol(whole, _REGISTER_COUNT, index),
        stack_bytes=max(_of_symbol(whole, _FRAME_SIZE, index), _of_symbol(whole, _MIN_STACK_SIZE, index)),
        shared_bytes=int(shared["sh_size"]) if shared is not None else 0,
        threads=_threads(own),
        code_bytes=int(text["sh_size"]),
    )


def code_of(cubin: bytes, symbol: str) -> bytes:
    """Return the machine code of kernel ``symbol``."""
    from elftools.elf.elffile import ELFFile

    return bytes(ELFFile(io.BytesIO(cubin)).get_section_by_name(f".text.{symbol}").data())


def constants_of(cubin: bytes, symbol: str) -> list[tuple[str, bytes]]:
    """Return the data that kernel ``symbol`` reads beside its arguments: constants and global variables, by section."""
    from elftools.elf.elffile import ELFFile

    sections = ((section.name, section) for section in ELFFile(io.BytesIO(cubin)).iter_sections())
    return sorted(
        (name.removesuffix(f".{symbol}"), bytes(section.data()))
        for name, section in sections
        if name.startswith((".nv.constant", ".nv.global")) and not name.startswith(_ARGUMENTS)
    )


def parameter_bytes(cubin: bytes, symbol: str) -> list[int]:
    """Return the size of each parameter of kernel ``symbol``, in their order.

    Raises:
        ValueError: the cubin has no such kernel.
        ImportError: pyelftools (part of ``tilekern[compile]``) is not installed.
    """
    from elftools.elf.elffile import ELFFile

    section = ELFFile(io.BytesIO(cubin)).get_section_by_name(f".nv.info.{symbol}")
    if section is None:
        raise ValueError(f"the cubin holds no kernel {symbol}")
    found = {}
    for code, value in _attributes(section):
        if code == _PARAMETER:
            _, ordinal, _, flags = struct.unpack("<IHHI", value)
            found[ordinal] = flags >> 18
    return [found[ordinal] for ordinal in sorted(found)]


def _attributes(section: Any) -> list[tuple[int, bytes]]:
    """Return (code, value) of each attribute with a sized value; the other formats have nothing of use here."""
    data = section.data() if section is not None else b""
    found, at = [], 0
    while at + 4 <= len(data):
        form, code, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _FORMAT_SIZED_VALUE:
            found.append((code, data[at : at + size]))
            at += size
    return found


def _of_symbol(attributes: list[tuple[int, bytes]], code: int, index: int) -> int:
    for found, value in attributes:
        if found == code:
            symbol, number = struct.unpack("<II", value[:8])
            if symbol == index:
                return int(number)
    return 0


def _threads(attributes: list[tuple[int, bytes]]) -> int:
    values = dict(attributes)
    value = values.get(_REQUIRED_THREADS, values.get(_MAX_THREADS))
    if value is None:
        return 128
    x, y, z = struct.unpack("<III", value[:12])
    return int(x * y * z)
