"""The wrapper that transformers from 5.23 on puts around the forward of a layer, and of each class made of a layer's.

A class that is made of a layer's, as FSDP2 makes one for each module that it shards, holds the forward of that moment.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from tilekern.patch.digests import is_checkpointing
from tilekern.patch.wrapped import place_of

Function = Callable[..., Any]


def checkpointed(run: Function) -> Function:
    """``run`` inside the wrapper that transformers from 5.23 on puts around a layer's forward, for checkpoints.

    That wrapper works for a class whose ``forward`` it is. Where one module has it as a method of its own, the
    checkpoint is made here, as the wrapper makes it.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    @wraps(run)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        wanted = self.gradient_checkpointing and self.training and type(self).forward is not wrapper
        if wanted and getattr(vars(self).get(place_of(self, "forward")), "__func__", None) is wrapper:
            keeps = getattr(self, "_can_checkpoint_with_cache", False)
            # transformers calls it `cache` from 5.24 on.
            caches = () if keeps else ("cache", "past_key_values", "layer_past")
            none = {"use_cache": False, **dict.fromkeys(caches)}
            # By keyword alone: a layer need not have these, and may have been given them by place.
            kwargs |= {name: value for name, value in none.items() if name in kwargs}
            return self._gradient_checkpointing_func(partial(run, self, **kwargs), *args)
        return run(self, *args, **kwargs)

    made: Any = type("Layer", (GradientCheckpointingLayer,), {"forward": forward})
    wrapper: Function = made.forward
    return wrapper


def follow(owner: Any, name: str, before: Any, after: Any) -> None:
    """Exchange a method for the classes made of ``owner`` that hold, in a wrapper of theirs, the one that it had."""
    made_of: list[type] = type.__subclasses__(owner) if isinstance(owner, type) else []
    for kind in made_of:
        held = vars(kind).get(name)
        if held is None:
            follow(kind, name, before, after)
        elif wraps_around(held, before):
            wrapper = checkpointed(after)
            setattr(kind, name, wrapper)
            follow(kind, name, held, wrapper)


def wraps_around(function: Any, inner: Any) -> bool:
    """Whether a function is transformers' wrapper around another one, or ours, in which that one is deeper."""
    if not is_checkpointing(function):
        return False
    while (function := getattr(function, "__wrapped__", None)) is not None:
        if function is inner:
            return True
    return False
