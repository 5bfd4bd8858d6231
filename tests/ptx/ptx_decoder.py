"""Makes functions of the instructions of a kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from ptx_cluster import SPECIAL, Cluster, Step
from ptx_memory import Who
from ptx_operations import TYPES, UNSIGNED, Type, literal, operation
from ptx_parser import Instruction, Program, PtxError, parse

_CACHING = ("L1::", "L2::")
_HINTS = {"ca", "cg", "cs", "lu", "nc", "wb", "wt", "weak", "volatile"}
_COUNTS = {"v2": 2, "v4": 4, "v8": 8}

Read = Callable[[Cluster], Any]


@functools.lru_cache(maxsize=64)
def decoded(ptx: str) -> tuple[Program, list[Step]]:
    """The kernel, and what each of its instructions does."""
    program = parse(ptx)
    registers = {name: n for n, name in enumerate(program.registers)}
    steps = [_Decoder(program, registers, pc, each).step() for pc, each in enumerate(program.instructions)]
    return program, [*steps, _run_over]


def _run_over(_: Cluster) -> None:
    raise PtxError("a thread runs over the end of the kernel")


class _Decoder:
    """Makes the step of one instruction."""

    def __init__(self, program: Program, registers: dict[str, int], pc: int, instruction: Instruction) -> None:
        self.program, self.registers, self.pc = program, registers, pc
        self.instruction, self.text = instruction, instruction.text
        self.operands = instruction.operands
        self.name, *self.modifiers = instruction.opcode.split(".")

    def step(self) -> Step:
        """The step, of the threads that the guard lets do it."""
        control = {"bra": self._branch, "ret": self._end, "exit": self._end, "bar": self._bar, "barrier": self._barrier}
        if self.name in control:
            return control[self.name](self._chosen())
        if self.instruction.opcode == "mbarrier.try_wait.parity.shared.b64":
            return self._try_wait()
        makers = {
            "ld": self._load, "st": self._store, "mov": self._move, "shfl": self._shuffle, "mapa": self._mapa,
            "mbarrier": self._mbarrier, "fence": self._fence, "cp": self._copy, "griddepcontrol": self._nothing,
        }  # fmt: skip
        return self._guarded(makers.get(self.name, self._compute)())

    # Guards.

    def _chosen(self) -> Callable[[Cluster], Any]:
        """The threads, of those that run, that do a guarded instruction."""
        if self.instruction.guard is None:
            return Cluster.running
        predicate, negated = self.instruction.guard
        read = self._read(predicate, "pred")

        def chosen(cluster: Cluster) -> Any:
            holds = read(cluster)
            holds = ~holds if negated else holds
            return holds if cluster.mask is None else holds & cluster.mask

        return chosen

    def _guarded(self, step: Step) -> Step:
        if self.instruction.guard is None:
            return step
        chosen = self._chosen()

        def guarded(cluster: Cluster) -> None:
            outer, inner = cluster.mask, chosen(cluster)
            if inner.any():
                cluster.mask = outer if outer is None and inner.all() else inner
                try:
                    step(cluster)
                finally:
                    cluster.mask = outer

        return guarded

    # Control.

    def _branch(self, chosen: Callable[[Cluster], Any]) -> Step:
        target, following = self.program.labels.get(self.operands[0]), self.pc + 1
        if target is None:
            raise PtxError(f"the label is missing: {self.text}")
        if self.instruction.guard is None:
            return lambda _: target
        if "uni" not in self.modifiers:
            return lambda cluster: cluster.part(chosen(cluster), target, following)

        def branch(cluster: Cluster) -> int:
            threads = chosen(cluster)
            cluster.check_uniform(threads, self.text)
            return cluster.part(threads, target, following)

        return branch

    def _end(self, chosen: Callable[[Cluster], Any]) -> Step:
        return lambda cluster: cluster.end(chosen(cluster), self.pc + 1, self.text)

    def _bar(self, chosen: Callable[[Cluster], Any]) -> Step:
        if self.modifiers != ["sync"] or self.operands != ("0",):
            raise self._unknown()
        return lambda cluster: cluster.wait_for_block(chosen(cluster), self.pc + 1)

    def _barrier(self, chosen: Callable[[Cluster], Any]) -> Step:
        scope, what, *more = [*self.modifiers, "", ""][:2] + self.modifiers[2:]
        following, is_relaxed = self.pc + 1, "relaxed" in more
        if scope == "cluster" and what == "arrive" and not set(more) - {"aligned", "release", "relaxed"}:
            return lambda cluster: cluster.arrive_at_cluster(chosen(cluster), is_relaxed, self.text)
        if scope == "cluster" and what == "wait" and not set(more) - {"aligned", "acquire"}:
            return lambda cluster: cluster.wait_for_cluster(chosen(cluster), following, self.text)
        raise self._unknown()

    def _nothing(self) -> Step:
        """Nothing, of what orders whole kernels."""
        if self.modifiers not in (["wait"], ["launch_dependents"]):
            raise self._unknown()
        return lambda _: None

    # Registers.

    def _unknown(self) -> PtxError:
        return PtxError(f"unknown instruction: {self.text}")

    def _read(self, operand: str, kind: str) -> Read:
        """The numbers of an operand."""
        bits, decode = TYPES[kind].bits, TYPES[kind].decode
        read = self._read_bits(operand, bits)
        return lambda cluster: decode(read(cluster))

    def _read_bits(self, operand: str, bits: int) -> Read:
        """The bits of an operand, the low ones of a wider register."""
        if operand in self.registers:
            register, text, declared = self.registers[operand], self.text, self.program.registers[operand]
            if declared < bits or (declared > bits and bits == 1):
                raise PtxError(f"{operand} has {declared} bits, not {bits}: {text}")

            def read(cluster: Cluster) -> Any:
                if cluster.known[register] is not True:
                    cluster.check_known(register, text)
                return cluster.registers[register]

            if declared == bits:
                return read
            return lambda cluster: read(cluster).astype(UNSIGNED[bits])
        if operand in SPECIAL:
            return lambda cluster: cluster.special[operand].astype(UNSIGNED[bits], copy=False)
        try:
            value = literal(str(self.program.shared.get(operand, operand)), bits)
        except ValueError:
            raise PtxError(f"unknown operand {operand}: {self.text}") from None
        return lambda _: value

    def _write(self, operand: str, kind: Type) -> Callable[[Cluster, Any], None]:
        """Write numbers into a register; a wider one is filled up with zeros or the sign."""
        if operand == "_":
            return lambda *_: None
        register, declared = self.registers.get(operand), self.program.registers.get(operand, 0)
        if register is None or declared < kind.bits or (declared > kind.bits and kind.dtype is None):
            raise PtxError(f"{operand} cannot be written: {self.text}")
        encode, wide = kind.encode, UNSIGNED[declared]
        if declared == kind.bits:
            return lambda cluster, value: cluster.write(register, encode(value))
        return lambda cluster, value: cluster.write(register, value.astype(wide))

    def _compute(self) -> Step:
        """Arithmetic."""
        found = operation(self.instruction.opcode, len(self.operands) - 1)
        if found is None:
            raise self._unknown()
        function = found.function
        write = self._write(self.operands[0], TYPES[found.result])
        reads = [self._read(*pair) for pair in zip(self.operands[1:], found.arguments, strict=True)]
        if len(reads) == 2:
            x, y = reads
            return lambda cluster: write(cluster, function(x(cluster), y(cluster)))
        return lambda cluster: write(cluster, function(*[read(cluster) for read in reads]))

    def _move(self) -> Step:
        """A copy, also of several registers into one or of one into several, the low bits first."""
        kind = self.modifiers[-1]
        if len(self.modifiers) != 1 or len(self.operands) != 2:
            raise self._unknown()
        into, of = map(_listed, self.operands)
        if len(into) == len(of) == 1:
            read, write = self._read(of[0], kind), self._write(into[0], TYPES[kind])
            return lambda cluster: write(cluster, read(cluster))
        parts = max(len(into), len(of))
        whole, part = TYPES[kind], TYPES[f"b{TYPES[kind].bits // parts}"]
        if len(into) == 1:
            reads, write = [self._read_bits(name, part.bits) for name in of], self._write(into[0], whole)

            def join(cluster: Cluster) -> None:
                values = np.stack(np.broadcast_arrays(*[read(cluster) for read in reads]), -1)
                write(cluster, whole.decode(values.view(UNSIGNED[whole.bits]).reshape(-1)))

            return join
        read, writes = self._read_bits(of[0], whole.bits), [self._write(name, part) for name in into]

        def take_apart(cluster: Cluster) -> None:
            values = read(cluster).view(part.dtype).reshape(-1, parts)
            for n, write in enumerate(writes):
                write(cluster, np.ascontiguousarray(values[:, n]))

        return take_apart

    def _shuffle(self) -> Step:
        """A value of another lane of the warp."""
        if self.modifiers[:1] != ["sync"] or self.modifiers[2:] != ["b32"] or len(self.operands) != 5:
            raise self._unknown()
        into, _, predicate = self.operands[0].partition("|")
        write = self._write(into, TYPES["b32"])
        write_predicate = self._write(predicate or "_", TYPES["pred"])
        value, by, limits, names = [self._read_bits(operand, 32) for operand in self.operands[1:]]
        mode, text = self.modifiers[1], self.text
        if mode not in ("up", "down", "bfly", "idx"):
            raise self._unknown()

        def shuffle(cluster: Cluster) -> None:
            lanes, running = cluster.lanes, cluster.running()
            if cluster.mask is not None and not (lanes.member(names(cluster), running) | ~running).all():
                raise PtxError(f"threads that a shuffle names do not run it: {text}")
            source, is_inside = _source(mode, lanes.lane, by(cluster).astype(int), limits(cluster).astype(int))
            if not (lanes.exists(source) | ~running).all():
                raise PtxError(f"a shuffle takes the value of a lane that is not there: {text}")
            places = np.minimum(lanes.first + source, cluster.count - 1)
            write(cluster, np.broadcast_to(value(cluster), cluster.count)[places])
            write_predicate(cluster, is_inside)

        return shuffle

    # Memory.

    def _access(self) -> tuple[str, str, int]:
        """The space, type and count of a load or store."""
        *words, kind = self.modifiers
        count = 1
        if words and words[-1] in _COUNTS:
            count = _COUNTS[words.pop()]
        spaces = [word for word in words if word not in _HINTS and not word.startswith(_CACHING)]
        if len(spaces) != 1 or spaces[0] not in ("param", "global", "shared", "shared::cta", "shared::cluster"):
            raise self._unknown()
        if kind not in TYPES or TYPES[kind].bits < 8 or kind.endswith("x2"):
            raise self._unknown()
        return spaces[0], kind, count

    def _address(self, operand: str, bits: int) -> Read:
        """The addresses of ``[register+8]`` in the threads that run."""
        base, _, offset = operand.strip("[]").replace(" ", "").partition("+")
        read, plus = self._read_bits(base, bits), int(offset or 0)
        signed = f"i{bits // 8}"
        return lambda cluster: cluster.of_running(read(cluster).view(signed).astype(np.int64) + plus)

    def _load(self) -> Step:
        space, kind, count = self._access()
        writes = [self._write(name, TYPES[kind]) for name in _listed(self.operands[0])]
        if len(writes) != count:
            raise self._unknown()
        if space == "param":
            return self._load_parameter(kind, writes[0])
        dtype, decode, text = UNSIGNED[TYPES[kind].bits], TYPES[kind].decode, self.text
        address = self._address(self.operands[1], 64 if space == "global" else 32)

        def load(cluster: Cluster) -> None:
            addresses = address(cluster)
            if space == "global":
                values = cluster.memory.load(addresses, dtype, count, cluster.of_running(cluster.block), text)
            else:
                values = cluster.shared.load(addresses, dtype, count, self._who(cluster, addresses, space), text)
            for n, write in enumerate(writes):
                write(cluster, decode(cluster.spread(values[:, n])))

        return load

    def _load_parameter(self, kind: str, write: Callable[[Cluster, Any], None]) -> Step:
        name, decode, dtype = self.operands[1].strip("[]"), TYPES[kind].decode, UNSIGNED[TYPES[kind].bits]
        declared = self.program.parameters.get(name)
        if declared is None or TYPES[declared].bits != TYPES[kind].bits:
            raise self._unknown()
        return lambda cluster: write(cluster, decode(cluster.parameters[name].view(dtype)))

    def _store(self) -> Step:
        space, kind, count = self._access()
        reads = [self._read_bits(name, TYPES[kind].bits) for name in _listed(self.operands[1])]
        if len(reads) != count or space == "param":
            raise self._unknown()
        address, text = self._address(self.operands[0], 64 if space == "global" else 32), self.text

        def store(cluster: Cluster) -> None:
            addresses = address(cluster)
            values = np.stack([cluster.of_running(read(cluster)) for read in reads], -1)
            if space == "global":
                cluster.memory.store(addresses, values, cluster.of_running(cluster.block), text)
            else:
                cluster.shared.store(addresses, values, self._who(cluster, addresses, space), text)

        return store

    def _who(self, cluster: Cluster, addresses: Any, space: str) -> Who:
        """The threads that access shared memory."""
        if space != "shared::cluster" and (addresses >> 24).any():
            raise PtxError(f"an address of another block needs shared::cluster: {self.text}")
        return cluster.who()

    def _mapa(self) -> Step:
        """The address of another block's shared memory."""
        if self.modifiers != ["shared::cluster", "u32"]:
            raise self._unknown()
        write = self._write(self.operands[0], TYPES["u32"])
        address, rank = [self._read_bits(operand, 32) for operand in self.operands[1:]]

        def mapa(cluster: Cluster) -> None:
            ranks, addresses = cluster.of_running(rank(cluster)), cluster.of_running(address(cluster))
            write(cluster, cluster.spread(cluster.shared.address_in(addresses, ranks)))

        return mapa

    # Barriers in shared memory, and copies.

    def _mbarrier(self) -> Step:
        """The init of an mbarrier, or an arrival that expects bytes, whose state nobody may read."""
        opcode = self.instruction.opcode
        if opcode == "mbarrier.init.shared.b64" and len(self.operands) == 2:
            return self._make_barrier(*self.operands)
        if opcode == "mbarrier.arrive.expect_tx.shared.b64" and len(self.operands) == 3:
            return self._arrive(*self.operands[1:])
        raise self._unknown()

    def _make_barrier(self, place: str, count: str) -> Step:
        address, read = self._address(place, 32), self._read_bits(count, 32)

        def make(cluster: Cluster) -> None:
            addresses = address(cluster)
            who = self._who(cluster, addresses, "shared")
            cluster.barriers.make(addresses, cluster.of_running(read(cluster)), who, self.text)

        return make

    def _arrive(self, place: str, size: str) -> Step:
        address, read = self._address(place, 32), self._read_bits(size, 32)

        def arrive(cluster: Cluster) -> None:
            addresses = address(cluster)
            who = self._who(cluster, addresses, "shared")
            cluster.wake(cluster.barriers.arrive(addresses, cluster.of_running(read(cluster)), who, self.text))

        return arrive

    def _try_wait(self) -> Step:
        """Whether a phase has ended; threads that it tells that it has not go on when it has, and must ask again."""
        if self.instruction.guard is not None or not 3 <= len(self.operands) <= 4:
            raise self._unknown()
        write, following = self._write(self.operands[0], TYPES["pred"]), self.pc + 1
        address, parity = self._address(self.operands[1], 32), self._read_bits(self.operands[2], 32)

        def wait(cluster: Cluster) -> int:
            addresses = address(cluster)
            who = self._who(cluster, addresses, "shared")
            has_ended = cluster.barriers.see(addresses, cluster.of_running(parity(cluster)), who, self.text)
            write(cluster, cluster.spread(has_ended))
            return cluster.sleep(cluster.running() & ~cluster.spread(has_ended), following)

        return wait

    def _fence(self) -> Step:
        if self.modifiers != ["mbarrier_init", "release", "cluster"]:
            raise self._unknown()
        return lambda cluster: cluster.barriers.fence(cluster.running())

    def _copy(self) -> Step:
        """A bulk copy from global into shared memory, whose bytes an mbarrier counts."""
        modifiers = ["async", "bulk", "shared::cluster", "global", "mbarrier::complete_tx::bytes"]
        if self.modifiers != modifiers or len(self.operands) != 4:
            raise self._unknown()
        target, source = self._address(self.operands[0], 32), self._address(self.operands[1], 64)
        size, barrier = self._read_bits(self.operands[2], 32), self._address(self.operands[3], 32)

        def copy(cluster: Cluster) -> None:
            barriers = barrier(cluster)
            who = self._who(cluster, barriers, "shared::cluster")
            sizes = cluster.of_running(size(cluster))
            cluster.barriers.copy(target(cluster), source(cluster), sizes, barriers, who, self.text)

        return copy


def _listed(operand: str) -> list[str]:
    """The names of a list in braces, or the one name."""
    return [name.strip() for name in operand.strip("{}").split(",")]


def _source(mode: str, lane: Any, by: Any, limits: Any) -> tuple[Any, Any]:
    """The lane whose value each lane takes, its own where the other is outside; and whether that is inside."""
    by, clamp, segment = by & 31, limits & 31, (limits >> 8) & 31
    first, last = lane & segment, (lane & segment) | (clamp & ~segment)
    other = {"up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": first | (by & ~segment)}[mode]
    inside = other >= last if mode == "up" else other <= last
    return np.where(inside, other, lane), inside
