"""The state of a launch while it runs, and the check for races between its blocks and with the launch before.

Blocks run one after another, each in phases that are numbered in the order of execution. A phase ends where an atomic
access orders memory. A block that acquires an element has seen all phases of the blocks that released it before, and
all that these have seen.

Each storage that is stored to gets an int32 "owner" per element: the number of the phase that stored it, or FREE, which
is greater than any number. An owner smaller than the running block's first phase means that another block has stored
the element; one minimum over a store finds it. Loads are recorded and checked at the end of the launch, when all owners
are known: a load before another block's store is also a race, unless one of the two phases has seen the other.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from tilekern.interpreter.errors import InterpreterError

if TYPE_CHECKING:
    from tilekern.interpreter.arrays import Array, Box, Points

FREE = torch.iinfo(torch.int32).max


@dataclass(frozen=True)
class Phase:
    """A part of a block's run: the block's position in execution order, and the phases of others that it has seen."""

    number: int
    seen: frozenset[int] = frozenset()


@dataclass
class Launch:
    """A running launch: its kernel's name, its grid, and which block runs."""

    kernel: str
    grid: tuple[int, ...]
    check_races: bool
    order: tuple[int, ...]
    dependent: bool = False
    constants: frozenset[str] = frozenset()
    number: int = 0
    block: tuple[int, int, int] = (0, 0, 0)
    waited: bool = False
    granules: dict[int, int] = field(default_factory=dict)
    owners: dict[int, torch.Tensor] = field(default_factory=dict)
    loads: list[tuple[int, str, Array, Box | Points]] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    first: int = 0
    released: dict[tuple[int, int], frozenset[int]] = field(default_factory=dict)

    def enter(self, number: int) -> None:
        """Make the block at position ``number`` in execution order the running block."""
        self.number = number
        self.block = self.block_of(number)
        self.waited = False
        self.first = len(self.phases)
        self.phases.append(Phase(number))

    def ordered(self, array: Array, offsets: list[int], *, acquires: bool, releases: bool) -> None:
        """Record an atomic access that orders memory: what it sees, and what later ones see by it."""
        now = len(self.phases) - 1
        seen = self.phases[now].seen
        for offset in offsets:
            place = array.key, offset * array.memory.element_size()
            known = self.released.get(place, frozenset())
            if releases:
                self.released[place] = known | self.phases[now].seen | frozenset(range(self.first, now + 1))
            if acquires:
                seen = seen | known
        self.phases.append(Phase(self.number, seen))

    def wait(self) -> None:
        """Record that the running block has waited for the previous launch."""
        self.waited = True

    def launch_next(self) -> None:
        """Refuse to launch the next kernel before this one has waited; launches run one after another here anyway.

        The next kernel waits for this one alone, which may end before its predecessor unless all its blocks wait.
        """
        if self.dependent and not self.waited:
            raise InterpreterError(
                f"kernel {self.kernel}: block {self.where()} calls ct.grid_dependency_control_launch_dependents() "
                "before ct.grid_dependency_control_wait(); wait first: the next kernel only waits for this one"
            )

    def _is_constant(self, array: Array) -> bool:
        return array.name.partition(".")[0] in self.constants

    def _touched(self, operation: str, array: Array, *, may_be_constant: bool = False) -> None:
        if self.dependent and not self.waited and not (may_be_constant and self._is_constant(array)):
            raise InterpreterError(
                f"kernel {self.kernel}: block {self.where()} touches array {array.name!r} ({operation}) before "
                "ct.grid_dependency_control_wait(), and the launch before may not have ended"
            )

    def block_of(self, number: int) -> tuple[int, int, int]:
        """Return the index of the block at position ``number`` in execution order."""
        linear, (x, y, _) = self.order[number], self.sizes
        return linear % x, linear // x % y, linear // (x * y)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The grid with all three axes."""
        x, y, z = (*self.grid, 1, 1)[:3]
        return x, y, z

    def where(self, number: int | None = None) -> str:
        """Name the running block, or the block at position ``number``, in a message."""
        block = self.block if number is None else self.block_of(number)
        return str(block[: len(self.grid)])

    def register(self, array: Array) -> None:
        """Record an argument; arrays that share a storage have owners of their smallest element size."""
        size = array.memory.element_size()
        self.granules[array.key] = min(size, self.granules.get(array.key, size))

    def loaded(self, operation: str, array: Array, access: Box | Points) -> None:
        """Record a load for :meth:`finish`; a constant may be loaded before the wait."""
        self._touched(operation, array, may_be_constant=True)
        if self.check_races:
            self.loads.append((len(self.phases) - 1, operation, array, access))

    def stored(self, operation: str, array: Array, access: Box | Points) -> None:
        """Make the running block the owner of the elements; refuse elements that another block owns."""
        self._touched(operation, array)
        if self._is_constant(array):
            raise InterpreterError(
                f"kernel {self.kernel}: block {self.where()} stores to array {array.name!r} ({operation}), which is a "
                "constant by its spec"
            )
        if not self.check_races:
            return
        scale = array.memory.element_size() // self.granules[array.key]
        owners = self.owners.get(array.key)
        if owners is None:
            items = array.memory.numel() * scale
            owners = self.owners[array.key] = torch.full((items,), FREE, dtype=torch.int32, device="cpu")
        found = access.of(owners, scale)
        if found.numel() and int(found.amin()) < self.first:
            position, other = _first(found < self.first, found, scale)
            raise InterpreterError(
                f"kernel {self.kernel}: blocks {self._block_in(other)} and {self.where()} both store element "
                f"{access.element(position)} of array {array.name!r} ({operation})"
            )
        access.fill(owners, len(self.phases) - 1, scale)

    def finish(self) -> None:
        """Check every recorded load against the final owners."""
        for phase, operation, array, access in self.loads:
            owners = self.owners.get(array.key)
            if owners is None:
                continue
            scale = array.memory.element_size() // self.granules[array.key]
            found = access.of(owners, scale)
            raced = (found != phase) & (found != FREE)
            if bool(raced.any()):
                free = [other for other in found[raced].unique().tolist() if not self._is_ordered(phase, other)]
                raced &= torch.isin(found, torch.tensor(free, dtype=found.dtype, device="cpu"))
            if bool(raced.any()):
                position, other = _first(raced, found, scale)
                raise InterpreterError(
                    f"kernel {self.kernel}: block {self._block_in(phase)} reads element {access.element(position)} of "
                    f"array {array.name!r} ({operation}), which block {self._block_in(other)} stores in the same launch"
                )

    def _is_ordered(self, one: int, other: int) -> bool:
        """Return whether two phases are of one block, or one has seen the other."""
        a, b = self.phases[one], self.phases[other]
        return a.number == b.number or other in a.seen or one in b.seen

    def _block_in(self, phase: int) -> str:
        return self.where(self.phases[phase].number)


def _first(wrong: torch.Tensor, owners: torch.Tensor, scale: int) -> tuple[tuple[int, ...], int]:
    position = tuple(operator.index(i) for i in wrong.nonzero()[0].tolist())
    return position if scale == 1 else position[:-1], int(owners[position])
