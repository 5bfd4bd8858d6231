"""Record every attribute that a patch has changed, with its old value, and put it back.

Other libraries may hold a patched method when it is put back: hooks that keep a module's forward, casts around it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

from tilekern.patch.bound_method import COPIES, Bound, StandIn, place_of
from tilekern.patch.checkpointing import checkpointed, wraps_around
from tilekern.patch.table import ops_in
from tilekern.warning import warn

ABSENT = object()
# Where functions are written that patches, and checkpoints around them, put into classes.
_OWN = ("tilekern.", "transformers.")


@dataclass(frozen=True)
class Touch:
    """One changed attribute.

    ``where`` is its path, for messages. ``original`` is the value in the owner's own dictionary, or :data:`ABSENT`. For
    a method bound to a single instance it is the function, so that the ledger keeps no model alive. ``retires`` says
    that the replacement was made for this attribute alone: after undoing, it may be redirected to the original.
    ``bound`` returns the method of a single instance, if one was made, and ``known`` is what its class had then.
    """

    op: str
    where: str
    owner: Callable[[], Any]
    name: str
    original: Any
    replacement: Any
    is_bound: bool
    retires: bool = False
    bound: Callable[[], Bound | None] = lambda: None
    known: Any = None

    @property
    def ops(self) -> tuple[str, ...]:
        """The ops that the replacement serves, as in :class:`tilekern.patch.table.Patch`."""
        return ops_in(self.op)

    @property
    def module(self) -> str:
        """The name of the changed module, or of the module with the owner's class."""
        owner = self.owner()
        return owner.__name__ if isinstance(owner, ModuleType) else owner.__module__

    @property
    def place(self) -> str:
        """The attribute that holds it now."""
        return place_of(self.owner(), self.name) if self.is_bound else self.name

    @property
    def _now(self) -> Any:
        """The function that the attribute holds now."""
        found = vars(self.owner()).get(self.place)
        return getattr(found, "__func__", None) if self.is_bound else found

    @property
    def in_place(self) -> bool:
        """Whether the attribute still holds the replacement itself."""
        return self._now is self.replacement

    @property
    def still_runs(self) -> bool:
        """Whether the attribute holds the replacement, or a wrapper of it such as accelerate's casts."""
        return is_inside(self.replacement, self._now)

    @property
    def has_its_name(self) -> bool:
        """Whether the owner's name still leads to it; another library may have put its own class there."""
        return self._named is self.owner()

    @property
    def in_its_place(self) -> Any:
        """The function or class that was put in the place of the replacement or of its owner, or None."""
        return (None if self.has_its_name else self._named) if self.still_runs else self._now

    @property
    def hidden(self) -> Any:
        """The function that another library has put into an instance's class since, which does not run; or None."""
        now = getattr(type(self.owner()), self.name, None) if self.is_bound and self.known else None
        while now is not None and settled(now) is not settled(self.known):
            if not getattr(now, "__globals__", {}).get("__name__", "").startswith(_OWN):
                return now
            now = getattr(now, "__wrapped__", None)
        return None

    @property
    def _named(self) -> Any:
        """What the owner's name leads to."""
        owner = self.owner()
        if self.is_bound or isinstance(owner, ModuleType):
            return owner
        found: Any = sys.modules.get(owner.__module__)
        for name in owner.__qualname__.split("."):
            found = getattr(found, name, None)
        return found

    def undo(self) -> None:
        """Put back the original, or delete the attribute if there was none.

        A wrapper around the replacement stays and runs the original. Code that replaced the replacement is removed.
        """
        owner, place, now = self.owner(), self.place, self._now
        runs = self.still_runs
        if not runs:
            warn(f"{self.where} was replaced by something else after it was patched; the original is back")
        stays = runs and now is not self.replacement
        if self.is_bound:
            original = getattr(type(owner), self.name) if self.original is ABSENT else self.original
            bound = self.bound()
            if bound is not None:
                bound.stand_in = None
            if stays:
                exchange(now, self.replacement, original)
            elif self.original is not ABSENT or place != self.name:
                setattr(owner, place, MethodType(original, owner))
            elif place in vars(owner):
                delattr(owner, place)
            return
        if not (stays and self.retires):
            if self.original is not ABSENT:
                setattr(owner, self.name, self.original)
            elif self.name in vars(owner):
                delattr(owner, self.name)
            follow(owner, self.name, self.replacement, getattr(owner, self.name, None))
        if self.retires:
            retire(self.replacement, self.original if self.original is not ABSENT else getattr(owner, self.name))


class Ledger:
    """Changed attributes by owner and name; instances are held weakly. Callers hold the patcher's lock."""

    def __init__(self) -> None:
        self._touches: dict[tuple[int, str], Touch] = {}

    def __iter__(self) -> Iterator[Touch]:
        """Yield the changed attributes of living owners."""
        return (touch for _, touch in self._alive())

    def held(self, owner: Any, name: str) -> Touch | None:
        """Return the entry of an attribute, or None."""
        self.adopt()
        touch = self._touches.get((id(owner), name))
        return touch if touch is not None and touch.owner() is owner else None

    def put(
        self, op: str, where: str, owner: Any, name: str, replacement: Callable[..., Any], retires: bool = False
    ) -> None:
        """Set an attribute of a class or module; for ``retires`` see :class:`Touch`."""
        original = vars(owner).get(name, ABSENT)
        self._touches[id(owner), name] = Touch(op, where, lambda: owner, name, original, replacement, False, retires)
        before = getattr(owner, name, None)
        setattr(owner, name, replacement)
        follow(owner, name, before, replacement)

    def put_bound(self, instance: Any, name: str, given: StandIn, known: Callable[..., Any]) -> None:
        """Give an instance its own method instead of ``known``, its class's, which it may hold as a bound method.

        If a wrapper on the instance calls ``known``, the wrapper calls the replacement from then on. A wrapper that
        does not keep the wrapped function in a variable is left alone.
        """
        place = place_of(instance, name)
        before = vars(instance).get(place)
        # A method left by unpickling only calls the class's method, the same as having none.
        original = None if before is None or isinstance(before, Bound) else before.__func__
        if original is None or original is getattr(type(instance), name) or settled(original) is known:
            bound = Bound(instance, name, given._replace(original=original, known=known))
            setattr(instance, place, bound)
            self._note(bound)
        elif exchange(original, known, given.function):
            self._touches[id(instance), name] = Touch(
                given.op, given.where, weakref.ref(instance), name, known, given.function, True, given.retires,
                known=known,
            )  # fmt: skip

    def adopt(self) -> None:
        """Record the methods of deep copies of patched instances."""
        for bound in list(COPIES):
            instance = bound.__self__
            if bound.stand_in and vars(instance).get(place_of(instance, bound.method)) is bound:
                self._note(bound)
                COPIES.discard(bound)

    def _note(self, bound: Bound) -> None:
        given, instance, name = bound.stand_in, bound.__self__, bound.method
        assert given is not None
        self._touches[id(instance), name] = Touch(
            given.op, given.where, weakref.ref(instance), name, given.original or ABSENT, given.function, True,
            given.retires, weakref.ref(bound), given.known,
        )  # fmt: skip

    def undo_one(self, touch: Touch) -> None:
        """Put back one attribute of a living owner."""
        owner = touch.owner()
        touch.undo()
        del self._touches[id(owner), touch.name]

    def undo_all(self, touches: Collection[Touch]) -> None:
        """Put back attributes of living owners; replacements that shallow copies still hold are retired."""
        for touch in touches:
            self.undo_one(touch)
        held = {id(touch.replacement) for touch in self._touches.values()}
        for touch in touches:
            if touch.is_bound and touch.retires and id(touch.replacement) not in held:
                retire(touch.replacement, getattr(type(touch.owner()), touch.name))

    def undo(self, ops: Collection[str]) -> set[str]:
        """Put back every attribute that the ops changed; return the ops that had changed any."""
        alive = [(owner, touch) for owner, touch in self._alive() if not set(ops).isdisjoint(touch.ops)]
        self.undo_all([touch for _, touch in alive])
        return {op for _, touch in alive for op in touch.ops if op in ops}

    def _alive(self) -> list[tuple[Any, Touch]]:
        """Return the entries with their owners, which the list keeps alive; drop those of dead owners."""
        self.adopt()
        pairs = [(touch.owner(), touch) for touch in self._touches.values()]
        alive = [(owner, touch) for owner, touch in pairs if owner is not None]
        self._touches = {(id(owner), touch.name): touch for owner, touch in alive}
        return alive


def follow(owner: Any, name: str, before: Any, after: Any) -> None:
    """Exchange a method in the subclasses of ``owner`` that hold its previous value in transformers' wrapper."""
    made_of: list[type] = type.__subclasses__(owner) if isinstance(owner, type) else []
    for kind in made_of:
        held = vars(kind).get(name)
        if held is None:
            follow(kind, name, before, after)
        elif wraps_around(held, before):
            wrapper = checkpointed(after)
            setattr(kind, name, wrapper)
            follow(kind, name, held, wrapper)


def is_inside(function: Any, wrapper: Any) -> bool:
    """Return whether ``wrapper`` is the function or is known to call it.

    It is known from ``functools.wraps``, or from a bound method of the function in the wrapper's closure.
    """
    while wrapper is not None:
        wrapper = settled(wrapper)
        methods = (content(cell) for cell in getattr(wrapper, "__closure__", None) or ())
        bound = (x.__func__ for x in methods if isinstance(x, (MethodType, Bound)))
        if wrapper is function or any(settled(x) is function for x in bound):
            return True
        wrapper = getattr(wrapper, "__wrapped__", None)
    return False


def exchange(wrapper: Any, function: Any, other: Any) -> bool:
    """Make the wrapper around a function call another function; return whether this worked."""
    around: Any = None
    while wrapper is not None and wrapper is not function:
        wrapper, around = settled(getattr(wrapper, "__wrapped__", None)), wrapper
    if wrapper is None:
        return False
    cells = [cell for cell in getattr(around, "__closure__", None) or () if settled(content(cell)) is function]
    for cell in cells:
        cell.cell_contents = other
        around.__wrapped__ = other
    return bool(cells)


def content(cell: Any) -> Any:
    """Return the content of a closure's cell; None if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def retire(function: Any, original: Any) -> None:
    """Redirect a function to the original for good, also for hooks and wrappers that hold it."""
    if not isinstance(function, FunctionType):
        return
    code = _call_original.__code__
    function.__code__ = code.replace(co_name=function.__name__, co_freevars=function.__code__.co_freevars)
    function.__defaults__, function.__kwdefaults__ = None, {"_original": original}
    function.__wrapped__ = original  # type: ignore[attr-defined]
    function.retired_for = original  # type: ignore[attr-defined]


def _call_original(*args: Any, _original: Any, **kwargs: Any) -> Any:
    return _original(*args, **kwargs)


def settled(function: Any) -> Any:
    """Return the function that a retired one calls in the end, or any other function itself."""
    while isinstance(function, FunctionType) and hasattr(function, "retired_for"):
        function = function.retired_for
    return function
