"""The method that patching a single model puts into the ``__dict__`` of its modules."""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple


class StandIn(NamedTuple):
    """A patch's replacement in one module: the function, the patched op, and the path of the original for messages.

    ``original`` is the function of a bound method that the module already had of its own, or None. ``retires`` means
    that only this model and its copies have the function. ``known`` is what it replaces, the method of the class.
    """

    function: Callable[..., Any]
    op: str
    where: str
    original: Callable[..., Any] | None
    retires: bool = False
    known: Callable[..., Any] | None = None


class Bound:
    """A stand-in bound to one module: a bound method with its own behaviour for copies and pickles.

    Python pickles a bound method by name. Unpickling would fix the class's current method in the module's ``__dict__``,
    and later patches of the class would not reach it. An unpickled ``Bound`` has no stand-in: each call looks up the
    class's method at that moment.
    """

    def __init__(self, instance: Any, name: str, stand_in: StandIn | None = None) -> None:
        self.__self__, self.method, self.stand_in = instance, name, stand_in

    @property
    def __func__(self) -> Callable[..., Any]:
        if self.stand_in is not None:
            return self.stand_in.function
        function: Callable[..., Any] = getattr(type(self.__self__), self.method)
        return function

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(MethodType(self.__func__, self.__self__))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the stand-in, or the class's method, on the module."""
        return self.__func__(self.__self__, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__func__, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Bound:
        copied = Bound(copy.deepcopy(self.__self__, memo), self.method, self.stand_in)
        COPIES.add(copied)
        return copied

    def __reduce__(self) -> tuple[type[Bound], tuple[Any, str]]:
        return Bound, (self.__self__, self.method)


# Methods of deep copies (PEFT copies single modules too) that the ledger has not noted yet.
COPIES: weakref.WeakSet[Bound] = weakref.WeakSet()


def place_of(instance: Any, name: str) -> str:
    """Return the attribute that holds an instance's method: accelerate's hooks move ``forward`` aside and call it."""
    own, aside = vars(instance), f"_old_{name}"
    return aside if "_hf_hook" in own and aside in own else name
