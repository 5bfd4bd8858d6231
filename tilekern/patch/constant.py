"""The mark of functions that torch.compile calls while it traces, and whose results are constants of its graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Function = TypeVar("Function", bound=Callable[..., object])


def constant_in_graphs(function: Function) -> Function:
    """What ``torch.compiler.assume_constant_result`` does, and no more.

    That one imports ``torch._dynamo`` to set this attribute: 0.9 s of each ``import tilekern.patch``, and 3 s where
    there is no bytecode yet.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
