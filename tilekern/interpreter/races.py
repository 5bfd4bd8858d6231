"""The state of a launch while it runs, and the check that its blocks do not race, nor with the launch before.

Blocks run one after another and are numbered in that order, so the running block has the greatest number yet. Each
storage that is stored to gets one int32 "owner" for each element: the number of the block that stored it, or FREE,
which is greater than any. So an element that another block has stored before is one that is smaller than the running
block's number: one minimum over what is stored finds it. Loads are written down and looked up when the launch is
over, when every owner is known: a load that came before the store of another block is a race as well.

A block that has made an acquiring atomic access may have waited for the others in a way that this check cannot see,
so what it does afterwards is not taken as a race.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from tilekern.interpreter.errors import InterpreterError

if TYPE_CHECKING:
    from tilekern.interpreter.arrays import Array

FREE = torch.iinfo(torch.int32).max


class Access(Protocol):
    """The elements of a storage that one operation touches."""

    def of(self, memory: torch.Tensor, scale: int = 1) -> torch.Tensor:
        """Those elements; with a scale, of a memory that has so many items for each element."""

    def fill(self, memory: torch.Tensor, value: int, scale: int) -> None:
        """Write one value to all of them."""

    def element(self, position: tuple[int, ...]) -> tuple[int, ...]:
        """The index into the array of the element at a position of the operation."""


@dataclass
class Launch:
    """A running launch: its kernel's name, its grid, and which block runs."""

    kernel: str
    grid: tuple[int, ...]
    check_races: bool
    order: tuple[int, ...]
    dependent: bool = False
    number: int = 0
    block: tuple[int, int, int] = (0, 0, 0)
    acquired: bool = False
    waited: bool = False
    granules: dict[int, int] = field(default_factory=dict)
    owners: dict[int, torch.Tensor] = field(default_factory=dict)
    loads: list[tuple[int, str, Array, Access]] = field(default_factory=list)

    def enter(self, number: int) -> None:
        """Make the block with this number in the order of execution the running one."""
        self.number = number
        self.block = self.block_of(number)
        self.acquired = self.waited = False

    def wait(self) -> None:
        """Note that the running block has waited for the launch before; where none runs beside, there is no need."""
        self.waited = True

    def _touched(self, operation: str, array: Array) -> None:
        if self.dependent and not self.waited:
            raise InterpreterError(
                f"kernel {self.kernel}: block {self.where()} touches array {array.name!r} ({operation}) before "
                "ct.grid_dependency_control_wait(), and the launch before may not have ended"
            )

    def block_of(self, number: int) -> tuple[int, int, int]:
        """The index of the block that runs as the so-manieth."""
        linear, (x, y, _) = self.order[number], self.sizes
        return linear % x, linear // x % y, linear // (x * y)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The grid with all three axes."""
        x, y, z = (*self.grid, 1, 1)[:3]
        return x, y, z

    def where(self, number: int | None = None) -> str:
        """The running block (or another), as messages name it."""
        block = self.block if number is None else self.block_of(number)
        return str(block[: len(self.grid)])

    def register(self, array: Array) -> None:
        """Note an argument: arrays that share a storage have owners of the smallest of their element sizes."""
        size = array.memory.element_size()
        self.granules[array.key] = min(size, self.granules.get(array.key, size))

    def loaded(self, operation: str, array: Array, access: Access) -> None:
        """Write a load down, to be looked up in :meth:`finish`."""
        self._touched(operation, array)
        if self.check_races and not self.acquired:
            self.loads.append((self.number, operation, array, access))

    def stored(self, operation: str, array: Array, access: Access) -> None:
        """Make the running block the owner of what it stores, unless another one is."""
        self._touched(operation, array)
        if not self.check_races or self.acquired:
            return
        scale = array.memory.element_size() // self.granules[array.key]
        owners = self.owners.get(array.key)
        if owners is None:
            items = array.memory.numel() * scale
            owners = self.owners[array.key] = torch.full((items,), FREE, dtype=torch.int32, device="cpu")
        found = access.of(owners, scale)
        if found.numel() and int(found.amin()) < self.number:
            position, other = _first(found < self.number, found, scale)
            raise InterpreterError(
                f"kernel {self.kernel}: blocks {self.where(other)} and {self.where()} both store element "
                f"{access.element(position)} of array {array.name!r} ({operation})"
            )
        access.fill(owners, self.number, scale)

    def finish(self) -> None:
        """Look up every load, now that it is known which block stored what."""
        for number, operation, array, access in self.loads:
            owners = self.owners.get(array.key)
            if owners is None:
                continue
            scale = array.memory.element_size() // self.granules[array.key]
            found = access.of(owners, scale)
            raced = (found != number) & (found != FREE)
            if bool(raced.any()):
                position, other = _first(raced, found, scale)
                raise InterpreterError(
                    f"kernel {self.kernel}: block {self.where(number)} reads element {access.element(position)} of "
                    f"array {array.name!r} ({operation}), which block {self.where(other)} stores in the same launch"
                )


def _first(wrong: torch.Tensor, owners: torch.Tensor, scale: int) -> tuple[tuple[int, ...], int]:
    position = tuple(operator.index(i) for i in wrong.nonzero()[0].tolist())
    return position if scale == 1 else position[:-1], int(owners[position])
