"""Turns Python's garbage collection off: while only lasting objects are made, or while no tensor may be freed.

Such objects are modules, or a kernel's lowered form; a graph that is captured may not free the tensors of cycles.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def search_put_off() -> Iterator[None]:
    """Turn garbage collection off inside, unless it is off already.

    It scans new objects after every 700 of them. That took 30 % of cuda-tile's front end, and 7 % of the plan of a
    model, which loads torch and transformers.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
