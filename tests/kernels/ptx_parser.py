"""Reads the text of a PTX kernel into a list of instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass

WARP = 32
# Where the shared memory of a block begins: small numbers, as of a pointer that is zero, are outside of it.
SHARED_BASE = 1024
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_ENTRY = re.compile(r"\.entry\s+[\w$]+\s*\((?P<parameters>[^)]*)\)(?P<directives>[^{]*)\{(?P<body>.*)\}", re.DOTALL)
_PARAMETER = re.compile(r"\.param\s+\.(\w+).*?([\w$]+)$", re.DOTALL)
_THREADS = re.compile(r"\.reqntid\s+(\d+)(?:\s*,\s*1)*\s*$", re.MULTILINE)
_SHARED = re.compile(r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.([bsuf]\d+)\s+([\w$]+)\s*(?:\[(\d*)\])?$")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*)$", re.DOTALL)
_LABEL = re.compile(r"([\w$]+)\s*:")
_GUARD = re.compile(r"@(!?)(%?[\w$]+)\s+")
_IGNORED = {".loc", ".pragma", ".file"}


class PtxError(Exception):
    """The text is not PTX that the interpreter knows, or running it did what a GPU does not allow."""


@dataclass(frozen=True)
class Instruction:
    """``@!%p1 ld.global.v2.b32 {%r1, %r2}, [%rd1+8]`` has the guard ``("%p1", True)`` and two operands."""

    text: str
    opcode: str
    operands: tuple[str, ...]
    guard: tuple[str, bool] | None = None


@dataclass(frozen=True)
class Program:
    """A kernel.

    Attributes:
        threads: of a block.
        parameters: the type of each by its name, in order.
        registers: bits of each by its name; a predicate has one.
        shared: the address of each shared variable in its block, from :data:`SHARED_BASE` on.
        shared_bytes: bytes of shared memory of a block.
        instructions: in the order of the text.
        labels: the index of the instruction that a label stands before.
    """

    threads: int
    parameters: dict[str, str]
    registers: dict[str, int]
    shared: dict[str, int]
    shared_bytes: int
    instructions: list[Instruction]
    labels: dict[str, int]


def parse(text: str) -> Program:
    """Read a module that has one kernel.

    Raises:
        PtxError: it has none or several, or declares what the interpreter does not know.
    """
    text = _COMMENT.sub("", text)
    entry = _ENTRY.search(text)
    if entry is None or text.count(".entry") != 1:
        raise PtxError("the text must have exactly one .entry")
    threads = _THREADS.search(entry["directives"].strip())
    if threads is None:
        raise PtxError("the kernel must say the threads of its one-dimensional block: .reqntid 128, 1, 1")
    shared: dict[str, int] = {}
    end = SHARED_BASE
    for statement in text[: entry.start()].split(";"):
        if ".shared" in statement:
            end = _add_shared(statement.strip(), shared, end)
    registers: dict[str, int] = {}
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for piece in entry["body"].split(";"):
        # A brace at the begin opens or closes a scope, as those of inline assembly.
        statement = piece.strip().lstrip("{} \t\n")
        while label := _LABEL.match(statement):
            labels[label[1]] = len(instructions)
            statement = statement[label.end() :].lstrip("{} \t\n")
        if statement.startswith(".reg"):
            _add_registers(statement, registers)
        elif statement.startswith(".shared"):
            end = _add_shared(statement, shared, end)
        elif statement.startswith("."):
            if statement.split()[0] not in _IGNORED:
                raise PtxError(f"unknown directive: {statement}")
        elif statement:
            instructions.append(_instruction(" ".join(statement.split())))
    parameters = dict(_parameter(piece) for piece in entry["parameters"].split(",") if piece.strip())
    return Program(int(threads[1]), parameters, registers, shared, end - SHARED_BASE, instructions, labels)


def _parameter(text: str) -> tuple[str, str]:
    match = _PARAMETER.match(text.strip())
    if match is None:
        raise PtxError(f"unknown parameter: {text.strip()}")
    return match[2], match[1]


def _add_shared(statement: str, shared: dict[str, int], end: int) -> int:
    """Place a shared variable behind the others; return its end."""
    match = _SHARED.search(statement)
    if match is None or match[4] == "":
        raise PtxError(f"unknown declaration of shared memory: {statement}")
    item = int(match[2][1:]) // 8
    alignment = int(match[1] or item)
    shared[match[3]] = -(-end // alignment) * alignment
    return shared[match[3]] + item * int(match[4] or 1)


def _add_registers(statement: str, registers: dict[str, int]) -> None:
    match = _REGISTERS.match(statement)
    if match is None:
        raise PtxError(f"unknown declaration of registers: {statement}")
    bits = 1 if match[1] == "pred" else int(match[1][1:])
    for declared in match[2].split(","):
        name, _, count = declared.strip().partition("<")
        names = [f"{name}{n}" for n in range(int(count.rstrip(">")))] if count else [name]
        for each in names:
            if registers.setdefault(each, bits) != bits:
                raise PtxError(f"{each} is declared twice")


def _instruction(text: str) -> Instruction:
    guard, rest = None, text
    if match := _GUARD.match(text):
        guard, rest = (match[2], match[1] == "!"), text[match.end() :]
    opcode, _, operands = rest.partition(" ")
    return Instruction(text, opcode, tuple(_split(operands)), guard)


def _split(operands: str) -> list[str]:
    """Split at the commas outside of braces."""
    pieces, depth = [""], 0
    for character in operands:
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += character
    return [piece.strip() for piece in pieces if piece.strip()]
