"""Exchange a function of another library, and put it back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def exchange(owner: Any, name: str, make: Callable[[Any], Any], *, is_on: bool) -> None:
    """Put what ``make`` makes of a function of a class or module in its place, or the function back; once each.

    Args:
        owner: the class or module; where it does not define the name itself nothing happens.
        name: the function's, or the static method's.
        make: makes the stand-in, whose ``tilekern_original`` is the function then.
        is_on: whether the stand-in is wanted.
    """
    now = vars(owner).get(name)
    original = getattr(getattr(now, "__func__", now), "tilekern_original", None)
    if is_on and now is not None and original is None:
        made = make(getattr(owner, name))
        made.tilekern_original = now
        setattr(owner, name, staticmethod(made) if isinstance(now, staticmethod) else made)
    elif not is_on and original is not None:
        setattr(owner, name, original)
