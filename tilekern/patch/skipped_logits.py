"""Placeholder for logits that were not made: an output with it can be moved, but its logits cannot be used.

A trainer's wrappers may move, cast, pickle and gather an output without reading it. Reading a value or a shape raises
:class:`tilekern.errors.LogitsSkipped`, which says how to get logits.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import torch

from tilekern.errors import LogitsSkipped

_SAYS = (
    "there are no logits, as tilekern computed the loss without them; call the model with skip_logits=False, or apply "
    "tilekern without fused_linear_cross_entropy"
)
# Tensor methods that move or cast whole outputs.
_PASSING = {"to", "cpu", "cuda", "detach", "clone", "contiguous", "float", "half", "bfloat16", "double"}
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_REFUSED = (
    "len", "getitem", "setitem", "contains", "bool", "float", "int", "index", "array", "eq", "ne", "lt", "le", "gt",
    "ge", "neg", "pos", "abs", "invert", *_BINARY, *(f"r{name}" for name in _BINARY),
)  # fmt: skip
_GATHER = "torch.nn.parallel.scatter_gather"


class _Named(type):
    """Metaclass whose repr explains the problem: other libraries' errors show the type of an unsuitable object."""

    def __repr__(cls) -> str:
        return f"<logits that were skipped: {_SAYS}>"


class SkippedLogits(metaclass=_Named):
    """The class of :data:`SKIPPED`, its only instance, which stands for logits of any shape."""

    _only: SkippedLogits | None = None
    # TRL's models with a value head widen logits that are not of float32, and hand them on.
    dtype = torch.float32

    def __new__(cls, *_: Any) -> SkippedLogits:
        """Return the instance; DataParallel calls its type to make the gathered output of the replicas."""
        if cls._only is None:
            cls._only = super().__new__(cls)
        return cls._only

    def __getattr__(self, name: str) -> Any:
        if name not in _PASSING:
            refuse()
        return lambda *_, **__: self

    def __iter__(self) -> Iterator[Any]:
        """Return an empty iterator for DataParallel, which iterates over the replicas' outputs of unknown type."""
        if sys._getframe(1).f_globals.get("__name__") != _GATHER:
            refuse()
        return iter(())

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> NoReturn:
        refuse()

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return repr(type(self))

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return SkippedLogits, ()


def refuse(*_: Any, **__: Any) -> NoReturn:
    """Raise an error that says how to get logits.

    Raises:
        LogitsSkipped: always.
    """
    raise LogitsSkipped(_SAYS)


for _name in _REFUSED:
    setattr(SkippedLogits, f"__{_name}__", refuse)

SKIPPED = SkippedLogits()
