"""Methods that others have taken hold of: hooks that keep a module's forward, casts that are wrapped around it."""

from __future__ import annotations

from types import FunctionType, MethodType
from typing import Any

from tilekern.patch.bound_method import Bound


def place_of(instance: Any, name: str) -> str:
    """The attribute that holds an instance's method: accelerate's hooks move its forward aside, and call it there."""
    own, aside = vars(instance), f"_old_{name}"
    return aside if "_hf_hook" in own and aside in own else name


def is_inside(function: Any, wrapper: Any) -> bool:
    """Whether ``wrapper`` is a function, or calls it in the end, as far as it tells.

    It tells by what ``functools.wraps`` notes, or as it holds a method that is bound to the function.
    """
    while wrapper is not None:
        wrapper = settled(wrapper)
        methods = (content(cell) for cell in getattr(wrapper, "__closure__", None) or ())
        if wrapper is function or any(_is_bound_to(function, method) for method in methods):
            return True
        wrapper = getattr(wrapper, "__wrapped__", None)
    return False


def exchange(wrapper: Any, function: Any, other: Any) -> bool:
    """Have what is wrapped around a function call another one in its place; whether it does so now."""
    around = _around(function, wrapper)
    cells = [cell for cell in getattr(around, "__closure__", None) or () if settled(content(cell)) is function]
    for cell in cells:
        cell.cell_contents = other
        around.__wrapped__ = other
    return bool(cells)


def _around(function: Any, wrapper: Any) -> Any:
    """The wrapper directly around a function, or None."""
    while wrapper is not None:
        wrapper, outer = settled(getattr(wrapper, "__wrapped__", None)), wrapper
        if wrapper is function:
            return outer
    return None


def content(cell: Any) -> Any:
    """The content of a closure's cell; None of an empty one."""
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _is_bound_to(function: Any, method: Any) -> bool:
    return isinstance(method, (MethodType, Bound)) and settled(method.__func__) is function


def retire(function: Any, original: Any) -> None:
    """Have a function call another one from now on, whoever has taken hold of it.

    A bound method that a hook keeps, or a wrapper, cannot be found from the place where the function was put.
    """
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
    """The function that a retired one calls; any other is itself."""
    while isinstance(function, FunctionType) and hasattr(function, "retired_for"):
        function = function.retired_for
    return function
