"""The wrapper that transformers from 5.23 on puts around the forward of a layer, and of each class made of a layer's.

A class that is made of a layer's, as FSDP2 makes one for each module that it shards, holds the forward of that moment.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from tilekern.patch.bound_method import place_of
from tilekern.patch.digests import is_checkpointing

Function = Callable[..., Any]


def checkpointed(run: Function) -> Function:
    """Put ``run`` into the wrapper that transformers from 5.23 on puts around a layer's forward, for checkpoints.

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


def wraps_around(function: Any, inner: Any) -> bool:
    """Return whether a function is transformers' wrapper, or ours, with another function inside at any depth."""
    if not is_checkpointing(function):
        return False
    while (function := getattr(function, "__wrapped__", None)) is not None:
        if function is inner:
            return True
    return False
