"""The checkpointing wrapper around the forward of layers in transformers 5.23 and later.

Each subclass of a layer has the wrapper too. Subclasses made at run time (FSDP2 makes one for each module that it
shards) keep the forward that the layer's class had at that moment.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from tilekern.patch.bound_method import place_of
from tilekern.patch.digests import is_checkpointing

Function = Callable[..., Any]


def checkpointed(run: Function) -> Function:
    """Wrap ``run`` in transformers' checkpointing wrapper for layer forwards (5.23 and later).

    That wrapper only works as the ``forward`` of a class. If a single module has it as its own method, this function
    makes the same checkpoint itself.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    @wraps(run)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        wanted = self.gradient_checkpointing and self.training and type(self).forward is not wrapper
        if wanted and getattr(vars(self).get(place_of(self, "forward")), "__func__", None) is wrapper:
            keeps = getattr(self, "_can_checkpoint_with_cache", False)
            # transformers 5.24 and later call it `cache`.
            caches = () if keeps else ("cache", "past_key_values", "layer_past")
            none = {"use_cache": False, **dict.fromkeys(caches)}
            # Only keyword arguments are changed: a layer need not have these, and they may have been passed by
            # position.
            kwargs |= {name: value for name, value in none.items() if name in kwargs}
            return self._gradient_checkpointing_func(partial(run, self, **kwargs), *args)
        return run(self, *args, **kwargs)

    made: Any = type("Layer", (GradientCheckpointingLayer,), {"forward": forward})
    wrapper: Function = made.forward
    return wrapper


def wraps_around(function: Any, inner: Any) -> bool:
    """Return whether a function is transformers' wrapper, or ours, around another function at any depth."""
    if not is_checkpointing(function):
        return False
    while (function := getattr(function, "__wrapped__", None)) is not None:
        if function is inner:
            return True
    return False
