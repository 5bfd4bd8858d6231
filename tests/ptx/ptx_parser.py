"""Reads the text of a PTX kernel into a list of instructions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

WARP = 32
# Where the shared memory of a block begins: small numbers, as of a pointer that is zero, are outside of it.
SHARED_BASE = 1024
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_ENTRY = re.compile(r"\.entry\s+[\w$]+\s*\((?P<parameters>[^)]*)\)(?P<directives>[^{]*)\{(?P<body>.*)\}", re.DOTALL)
_PARAMETER = re.compile(r"\.param\s+\.(\w+).*?([\w$]+)$", re.DOTALL)
_THREADS = re.compile(r"\.reqntid\s+(\d+)(?:\s*,\s*1)*\s*$", re.MULTILINE)
_DYNAMIC = re.compile(r"\.extern\s+\.shared\s+(?:\.align\s+(\d+)\s+)?\.([bsuf]\d+)\s+([\w$]+)\s*\[\s*\]$")
_SHARED = re.compile(r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.([bsuf]\d+)\s+([\w$]+)\s*(?:\[(\d*)\])?$")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*)$", re.DOTALL)
_LABEL = re.compile(r"([\w$]+)\s*:")
_GUARD = re.compile(r"@(!?)(%?[\w$]+)\s+")
_NAME = re.compile(r"%?[\w$]+")
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
        shared_bytes: bytes of shared memory of a block, beside those of the variables that its launch sizes.
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
    variables = _Shared()
    for statement in text[: entry.start()].split(";"):
        if ".shared" in statement:
            variables.add(statement.strip())
    registers: dict[str, int] = {}
    labels: dict[str, int] = {}
    statements: list[tuple[tuple[int, ...], str]] = []
    for around, statement in _statements(entry["body"]):
        if label := _LABEL.fullmatch(statement):
            if labels.setdefault(_in_scope(label[1], around), len(statements)) != len(statements):
                raise PtxError(f"the label {label[1]} stands twice")
        elif statement.startswith(".reg"):
            _add_registers(statement, around, registers)
        elif statement.startswith(".shared"):
            variables.add(statement)
        elif not statement.startswith("."):
            statements.append((around, " ".join(statement.split())))
        elif statement.split()[0] not in _IGNORED:
            raise PtxError(f"unknown directive: {statement}")
    declared = {*registers, *labels}
    instructions = [_instruction(statement, around, declared) for around, statement in statements]
    parameters = dict(_parameter(piece) for piece in entry["parameters"].split(",") if piece.strip())
    shared, size = variables.placed()
    return Program(int(threads[1]), parameters, registers, shared, size, instructions, labels)


def _statements(body: str) -> Iterator[tuple[tuple[int, ...], str]]:
    """The statements and labels of a body, each with the numbers of the braces around it, as inline assembly has them.

    Only a brace at the begin opens or closes a scope: others are around operands.
    """
    around: tuple[int, ...] = ()
    count = 0
    for piece in body.split(";"):
        rest = piece.strip()
        while rest:
            end = 1
            if rest[0] == "{":
                count += 1
                around += (count,)
            elif rest[0] == "}":
                around = around[:-1]
            else:
                label = _LABEL.match(rest)
                end = len(rest) if label is None else label.end()
                yield around, rest[:end]
            rest = rest[end:].lstrip()


def _in_scope(name: str, around: tuple[int, ...]) -> str:
    """A name that is not that of another scope."""
    return f"{name}@{around[-1]}" if around else name


def _parameter(text: str) -> tuple[str, str]:
    match = _PARAMETER.match(text.strip())
    if match is None:
        raise PtxError(f"unknown parameter: {text.strip()}")
    return match[2], match[1]


class _Shared:
    """The shared variables of a block, one behind the other; those that the launch sizes are behind all of them."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._end = SHARED_BASE
        self._dynamic: dict[str, int] = {}

    def add(self, statement: str) -> None:
        """Place a variable."""
        if dynamic := _DYNAMIC.search(statement):
            self._dynamic[dynamic[3]] = int(dynamic[1] or int(dynamic[2][1:]) // 8)
            return
        match = _SHARED.search(statement)
        if match is None or match[4] == "":
            raise PtxError(f"unknown declaration of shared memory: {statement}")
        item = int(match[2][1:]) // 8
        place = _aligned(self._end, int(match[1] or item))
        self._places[match[3]], self._end = place, place + item * int(match[4] or 1)

    def placed(self) -> tuple[dict[str, int], int]:
        """The address of each variable, and the bytes before those that the launch sizes."""
        begin = _aligned(self._end, max(self._dynamic.values(), default=1))
        return self._places | dict.fromkeys(self._dynamic, begin), begin - SHARED_BASE


def _aligned(address: int, alignment: int) -> int:
    return -(-address // alignment) * alignment


def _add_registers(statement: str, around: tuple[int, ...], registers: dict[str, int]) -> None:
    match = _REGISTERS.match(statement)
    if match is None:
        raise PtxError(f"unknown declaration of registers: {statement}")
    bits = 1 if match[1] == "pred" else int(match[1][1:])
    for declared in match[2].split(","):
        name, _, count = declared.strip().partition("<")
        names = [f"{name}{n}" for n in range(int(count.rstrip(">")))] if count else [name]
        for each in names:
            if registers.setdefault(_in_scope(each, around), bits) != bits:
                raise PtxError(f"{each} is declared twice")


def _instruction(text: str, around: tuple[int, ...], declared: set[str]) -> Instruction:
    """An instruction, its names those that the innermost scope declares."""

    def own(match: re.Match[str]) -> str:
        scopes = (_in_scope(match[0], around[:depth]) for depth in range(len(around), 0, -1))
        return next((name for name in scopes if name in declared), match[0])

    guard, rest = None, text
    if match := _GUARD.match(text):
        guard, rest = (_NAME.sub(own, match[2]), match[1] == "!"), text[match.end() :]
    opcode, _, operands = rest.partition(" ")
    return Instruction(text, opcode, tuple(_NAME.sub(own, each) for each in _split(operands)), guard)


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
