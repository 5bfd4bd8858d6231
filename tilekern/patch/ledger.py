"""The list of every attribute that a patch has touched, with what stood there before."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from types import MethodType, ModuleType
from typing import Any

from tilekern.patch.bound import Bound, StandIn
from tilekern.patch.checkpointing import follow
from tilekern.warning import warn

ABSENT = object()


@dataclass(frozen=True)
class Touch:
    """One touched attribute.

    ``where`` is its path, for people. ``original`` is what the owner's own dictionary held, or :data:`ABSENT`; methods
    bound to a single instance are kept as their functions, so that nothing here keeps a model alive.
    """

    op: str
    where: str
    owner: Callable[[], Any]
    name: str
    original: Any
    replacement: Any
    is_bound: bool

    @property
    def module(self) -> str:
        """The module that is touched, or that holds the owner's class."""
        owner = self.owner()
        return owner.__name__ if isinstance(owner, ModuleType) else owner.__module__

    @property
    def in_place(self) -> bool:
        """Whether the replacement still stands where it was put."""
        found = vars(self.owner()).get(self.name)
        return (getattr(found, "__func__", None) if self.is_bound else found) is self.replacement

    @property
    def still_runs(self) -> bool:
        """Whether the replacement stands where it was put, or inside of what wraps it, as accelerate's casts do."""
        found = vars(self.owner()).get(self.name)
        found = getattr(found, "__func__", None) if self.is_bound else found
        while found is not None and found is not self.replacement:
            found = getattr(found, "__wrapped__", None)
        return found is not None

    def undo(self) -> None:
        """Put back what stood there, or delete the attribute where nothing did."""
        owner = self.owner()
        if not self.in_place:
            warn(f"{self.where} was replaced by something else after it was patched; the original is back")
        if self.original is not ABSENT:
            setattr(owner, self.name, MethodType(self.original, owner) if self.is_bound else self.original)
        elif self.name in vars(owner):
            delattr(owner, self.name)
        if not self.is_bound:
            follow(owner, self.name, self.replacement, getattr(owner, self.name, None))


class Ledger:
    """Touched attributes by owner and name; instances are held weakly. Callers hold the lock of the patcher."""

    def __init__(self) -> None:
        self._touches: dict[tuple[int, str], Touch] = {}

    def __iter__(self) -> Iterator[Touch]:
        """Those whose owners are alive."""
        return (touch for _, touch in self._alive())

    def held(self, owner: Any, name: str) -> Touch | None:
        """What is noted of an attribute, or None."""
        touch = self._touches.get((id(owner), name))
        return touch if touch is not None and touch.owner() is owner else None

    def put(self, op: str, where: str, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        """Set an attribute of a class or module."""
        original = vars(owner).get(name, ABSENT)
        self._touches[id(owner), name] = Touch(op, where, lambda: owner, name, original, replacement, False)
        before = getattr(owner, name, None)
        setattr(owner, name, replacement)
        follow(owner, name, before, replacement)

    def put_bound(self, op: str, where: str, instance: Any, name: str, replacement: Callable[..., Any]) -> None:
        """Give one instance a method of its own; a bound method that stood there must be one of this instance."""
        before = vars(instance).get(name)
        # What unpickling left calls the class's method, as having none does.
        original = None if before is None or isinstance(before, Bound) else before.__func__
        given = StandIn(replacement, op, where, original)
        setattr(instance, name, Bound(instance, name, given))
        self._note(instance, name, given)

    def adopt(self, instance: Any) -> None:
        """Note the methods that a deep copy of a patched instance came with."""
        for name, own in vars(instance).items():
            if isinstance(own, Bound) and own.__self__ is instance and own.stand_in and not self.held(instance, name):
                self._note(instance, name, own.stand_in)

    def _note(self, instance: Any, name: str, given: StandIn) -> None:
        original, owner = given.original or ABSENT, weakref.ref(instance)
        self._touches[id(instance), name] = Touch(given.op, given.where, owner, name, original, given.function, True)

    def undo_one(self, touch: Touch) -> None:
        """Put back one attribute, whose owner is alive."""
        owner = touch.owner()
        touch.undo()
        del self._touches[id(owner), touch.name]

    def undo(self, ops: Collection[str]) -> set[str]:
        """Put back every attribute that the ops touched, and say which of the ops had touched any."""
        undone = set()
        for _, touch in self._alive():
            if touch.op in ops:
                self.undo_one(touch)
                undone.add(touch.op)
        return undone

    def _alive(self) -> list[tuple[Any, Touch]]:
        """The touches with their owners, which the list keeps alive; those of owners that are gone are dropped."""
        pairs = [(touch.owner(), touch) for touch in self._touches.values()]
        alive = [(owner, touch) for owner, touch in pairs if owner is not None]
        self._touches = {(id(owner), touch.name): touch for owner, touch in alive}
        return alive
