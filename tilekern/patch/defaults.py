"""Change the defaults of a job that names neither attention nor optimizer.

``apply(attention=True)`` and ``apply(adamw=True)`` make tilekern's the default, for trainers whose code and options
you do not edit. An explicitly named implementation wins, and so does an optimizer option that tilekern does not
support.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

from tilekern.ops.adamw import AdamW as _OurAdamW
from tilekern.patch.attention import UNSERVED
from tilekern.patch.exchanging import exchange
from tilekern.patch.families import family_of
from tilekern.runtime.switches import IMPLEMENTATION
from tilekern.warning import warn_once

Function = Callable[..., Any]
_NAME = "get_correct_attn_implementation"
# Chooses the attention of a model if no implementation is named.
CHOICE = f"transformers.modeling_utils.PreTrainedModel.{_NAME}"


def attention_stand_in(is_on: bool) -> None:
    """Make ``attn_implementation="tilekern"`` the default of models created from now on, or undo this.

    It applies to models of the tested families that call transformers' attention functions with arguments that ours
    supports; others keep their default.
    """
    if is_on == is_attention_on():
        return
    from transformers import PreTrainedModel

    exchange(PreTrainedModel, _NAME, _choosing, is_on=is_on)


def is_attention_on() -> bool:
    """Return whether :func:`attention_stand_in` is in force."""
    modeling = sys.modules.get("transformers.modeling_utils")
    kind = getattr(modeling, "PreTrainedModel", None)
    return kind is not None and hasattr(vars(kind)[_NAME], "tilekern_original")


def _choosing(original: Function) -> Function:
    @functools.wraps(original)
    def choose(self: Any, requested_attention: str | None, *args: Any, **options: Any) -> Any:
        chosen = original(self, requested_attention, *args, **options)
        if requested_attention is not None or chosen not in ("sdpa", "eager"):
            return chosen
        homes = [kind.__module__ for kind in type(self).__mro__ if family_of(kind.__module__)]
        asks = getattr(self, "_supports_attention_backend", False) and homes
        return IMPLEMENTATION if asks and not _asks_for_more(homes[0]) else chosen

    return choose


class AdamW(_OurAdamW):
    """tilekern's optimizer with torch's signature: the choice of torch's implementation (foreach, fused) is ignored."""

    def __init__(self, *args: Any, foreach: bool | None = None, fused: bool | None = None, **options: Any) -> None:  # noqa: ARG002
        super().__init__(*args, **options)


@functools.cache
def _asks_for_more(home: str) -> bool:
    """Return whether attentions of a module pass arguments that ours does not support, such as chosen keys."""
    kinds: list[Any] = [
        kind for kind in vars(sys.modules[home]).values() if isinstance(kind, type) and kind.__module__ == home
    ]
    forwards = [
        inspect.unwrap(kind.forward) for kind in kinds if "Attention" in kind.__name__ and "forward" in vars(kind)
    ]
    # CPython stores the names of a call's keyword arguments as a constant in the caller's code.
    named = [
        name
        for forward in forwards
        for names in forward.__code__.co_consts
        if isinstance(names, tuple)
        for name in names
    ]
    return not set(named).isdisjoint(UNSERVED)


def adamw_stand_in(is_on: bool) -> None:
    """Make calls of ``torch.optim.AdamW`` create tilekern's, or undo this; subclasses stay as they are.

    The class's ``__new__`` chooses, so that code that imported the name earlier is served too.
    """
    kind = torch.optim.AdamW
    if is_on:
        kind.__new__ = _new
    elif vars(kind).get("__new__") is not None:
        # A deleted `__new__` does not bring the inherited one back: Python would refuse the constructor's arguments.
        kind.__new__ = _new_as_it_is


def is_adamw_on() -> bool:
    """Return whether :func:`adamw_stand_in` is in force."""
    return vars(torch.optim.AdamW).get("__new__") is _new


def _new(cls: type, *args: Any, **options: Any) -> Any:
    # Copies and pickles call it without arguments, to get an object of this class itself.
    if cls is not torch.optim.AdamW or not (args or options):
        return object.__new__(cls)
    reason = _unserved(args, options)
    if reason:
        warn_once(f"torch.optim.AdamW stays torch's: {reason}")
        return object.__new__(cls)
    return object.__new__(AdamW)


def _new_as_it_is(cls: type, *_: Any, **__: Any) -> Any:
    return object.__new__(cls)


def _unserved(args: tuple[Any, ...], options: dict[str, Any]) -> str:
    """Return why tilekern's optimizer does not accept the arguments of torch's; empty if it does."""
    try:
        given = inspect.signature(torch.optim.AdamW.__init__).bind_partial(None, *args, **options).arguments
    except TypeError:
        return ""  # the constructor raises a better error
    asked = [name for name in ("amsgrad", "capturable", "differentiable") if given.get(name)]
    if asked:
        return f"{asked[0]}=True was given"
    numbers = [given.get("lr"), *given.get("betas", ())]
    on_gpu = any(isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in numbers)
    return "lr or betas is a tensor on a GPU" if on_gpu else ""
