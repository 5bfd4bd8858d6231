"""Count instructions of a kernel's machine code, and the waits of its threads for memory.

An instruction takes 16 bytes on every architecture since sm_70. Its low 9 bits are the opcode; memory accesses have
their width in bits 73 to 75. Hardware does not track dependences, so bits 105 to 125 of each instruction have the
cycles until the next one, the barrier of six that it releases, and the barriers that it waits for (Jia et al. 2018,
arXiv:1804.06826, "Control information"). That is enough to count what costs time, in milliseconds and without a
disassembler. Backward branches separate loops from code that runs once.

``tests/tuning/test_machine_code.py`` holds opcodes, widths and branches against nvdisasm, and the counts against the
compiler's own remarks.
"""

from __future__ import annotations

import dataclasses
import itertools
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilekern.spec.targets import HAS

# The opcode without the three bits that tell registers, constants and immediates apart.
_OPCODE = 0x1FF
OPCODES = {
    "global_loads": {0x181: "LDG", 0x1AE: "LDGSTS"},
    "global_stores": {0x186: "STG"},
    "local_accesses": {0x183: "LDL", 0x187: "STL"},
    "shared_accesses": {0x184: "LDS", 0x188: "STS", 0x03B: "LDSM", 0x044: "STSM"},
    "bulk_loads": {0x1B4: "UTMALDG", 0x1BA: "UBLKCP"},
    "bulk_stores": {0x1B5: "UTMASTG"},
    # Products of half types on sm_80 and sm_120, sm_90, sm_100; of int8 on others than the last two, sm_90; of 8-bit
    # floats on sm_120, sm_90. On sm_100 those of 8-bit floats, UTCQMMA, have the opcode of half types.
    "products": {
        0x03C: "HMMA", 0x1F0: "HGMMA", 0x1EA: "UTCHMMA", 0x037: "IMMA", 0x1F1: "IGMMA", 0x07A: "QMMA", 0x1F3: "QGMMA",
    },
    "barriers": {0x11D: "BAR"},
    "float_operations": {
        0x008: "FSEL", 0x009: "FMNMX", 0x00B: "FSETP", 0x020: "FMUL", 0x021: "FADD", 0x023: "FFMA", 0x03E: "F2FP",
    },
}  # fmt: skip
_KIND = {opcode: kind for kind, opcodes in OPCODES.items() for opcode in opcodes}
_NOP, BRANCH = 0x118, 0x147
# The width field of a memory access (U8, S8, U16, S16, 32, 64, 128 bits) in bytes.
_WIDTHS = (1, 1, 2, 2, 4, 8, 16, 16)
_BARRIERS = range(6)
# A loop without any of these only waits or divides, and does not count.
_TRAFFIC = ("global_loads", "global_stores", "shared_accesses", "bulk_loads", "bulk_stores", "products")


@dataclass(frozen=True)
class Counts:
    """Counts of a piece of code, each instruction taken once.

    Attributes:
        instructions: all but padding.
        cycles: cycles from each instruction to the next, as the compiler set them, without waits.
        load_waits: times that a thread waits for a load from global memory that it issued since its last such wait:
            loads in flight together count once.
        load_bytes: the bytes that a thread loads from global memory through registers.
        store_bytes: the bytes that it stores there.
        others: by the names of :data:`OPCODES`.
    """

    instructions: int = 0
    cycles: int = 0
    load_waits: int = 0
    load_bytes: int = 0
    store_bytes: int = 0
    global_loads: int = 0
    global_stores: int = 0
    local_accesses: int = 0
    shared_accesses: int = 0
    bulk_loads: int = 0
    bulk_stores: int = 0
    products: int = 0
    barriers: int = 0
    float_operations: int = 0

    @classmethod
    def total(cls, parts: Iterable[Counts]) -> Counts:
        """Add up pieces."""
        rows = [dataclasses.astuple(part) for part in parts]
        return cls(*(sum(column) for column in zip(*rows, strict=True)))

    def as_dict(self) -> dict[str, int]:
        """Return the counts that are not 0, as a journal keeps them."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value}


@dataclass(frozen=True)
class MachineCode:
    """Counts of a kernel's whole code and of its innermost loops that touch memory or multiply."""

    whole: Counts
    loops: tuple[Counts, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the counts as a journal keeps them."""
        return {"whole": self.whole.as_dict(), "loops": [loop.as_dict() for loop in self.loops]}

    @classmethod
    def from_dict(cls, kept: Mapping[str, Any]) -> MachineCode:
        """Make the counts from the result of :meth:`as_dict`."""
        return cls(Counts(**kept["whole"]), tuple(Counts(**loop) for loop in kept["loops"]))


def read_machine_code(code: bytes, capability: int) -> MachineCode:
    """Count the instructions of one kernel's machine code.

    Args:
        code: its text section (:func:`tilekern.compile.cubin.code_of`).
        capability: compute capability as one number: 90 for sm_90.
    """
    halves = struct.unpack(f"<{len(code) // 16 * 2}Q", code[: len(code) // 16 * 16])
    lows, highs = halves[::2], halves[1::2]
    opcodes = [low & _OPCODE for low in lows]
    loops = [
        _count(opcodes, highs, start, end, repeated=True) for start, end in _loops(opcodes, lows, highs, capability)
    ]
    return MachineCode(_count(opcodes, highs, 0, len(opcodes), repeated=False), tuple(loops))


def branch_target(place: int, low: int, high: int, capability: int) -> int:
    """Return the index of the instruction to which the branch at index ``place`` goes."""
    offset = (((high & 0x3FFFF) << 64) | low) >> 34
    if offset >> 47:
        offset -= 1 << 48
    # Since sm_90 the offset, in words of 4 bytes, goes on in bits 16 to 23.
    words = (offset << 8) | (low >> 16 & 0xFF) if capability in HAS["wide_branches"] else offset
    return place + 1 + words // 4


def _loops(opcodes: Sequence[int], lows: Sequence[int], highs: Sequence[int], capability: int) -> list[tuple[int, int]]:
    """Return [start, end) of the innermost loops with traffic: loops without another one inside."""
    traffic = [0, *itertools.accumulate(_KIND.get(opcode) in _TRAFFIC for opcode in opcodes)]
    spans = set()
    for place, opcode in enumerate(opcodes):
        if opcode == BRANCH:
            start = branch_target(place, lows[place], highs[place], capability)
            if 0 <= start <= place and traffic[place + 1] > traffic[start]:
                spans.add((start, place + 1))
    found: list[tuple[int, int]] = []
    for start, end in sorted(spans, key=lambda span: (span[1] - span[0], span)):
        if all(end <= first or start >= last for first, last in found):
            found.append((start, end))
    return found


def _count(opcodes: Sequence[int], highs: Sequence[int], start: int, end: int, *, repeated: bool) -> Counts:
    totals = dict.fromkeys((field.name for field in dataclasses.fields(Counts)), 0)
    for opcode, high in zip(opcodes[start:end], highs[start:end], strict=True):
        totals["instructions"] += opcode != _NOP
        totals["cycles"] += high >> 41 & 0xF
        kind = _KIND.get(opcode)
        if kind is not None:
            totals[kind] += 1
            if kind == "global_loads":
                totals["load_bytes"] += _WIDTHS[high >> 9 & 7]
            elif kind == "global_stores":
                totals["store_bytes"] += _WIDTHS[high >> 9 & 7]
    return Counts(**totals | {"load_waits": _load_waits(opcodes[start:end], highs[start:end], repeated=repeated)})


def _load_waits(opcodes: Sequence[int], highs: Sequence[int], *, repeated: bool) -> int:
    """Return the waits of one pass; for a loop, of the second pass, which waits for the first pass's loads."""
    issued: dict[int, int] = {}
    last, waits = -1, 0
    for turn in range(2 if repeated else 1):
        waits = 0
        for place, (opcode, high) in enumerate(zip(opcodes, highs, strict=True), turn * len(opcodes)):
            waited = high >> 52 & 0x3F
            for barrier in _BARRIERS:
                if waited >> barrier & 1 and issued.pop(barrier, -1) > last:
                    last, waits = place, waits + 1
            released = high >> 46 & 7
            if released in _BARRIERS and _KIND.get(opcode) == "global_loads":
                issued[released] = place
    return waits
