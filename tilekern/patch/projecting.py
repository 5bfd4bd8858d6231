"""Linear layers that share their input, of whichever kind: one op if there is one for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilekern.patch import adapters, fp8


def projected(layers: Sequence[Any], x: Any) -> tuple[Any, ...]:
    """Return the result of each of some modules on ``x``."""
    return fp8.projected(layers, x) or adapters.projected(layers, x)
