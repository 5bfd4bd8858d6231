"""Kernels of few rows let the next kernel be launched while they still run (programmatic dependent launch).

Decoding a token is a chain of small kernels, each of which would begin with idle memory. A kernel that lets its
successor be launched early has either waited for its own predecessor by itself (``grid_dependency_control_wait``), or
is launched only after that has ended. A successor that is launched early waits for this kernel's end by itself, before
it reads or writes anything.

With many rows, as in training, blocks that wait would take room from blocks that run. So the constant ``few`` follows
from the problem. It is not an axis of the config: a kernel that is timed alone gains nothing by it.
"""

from __future__ import annotations

import math

import cuda.tile as ct

from tilekern.spec import bucket

# As many as the products of few rows take (:mod:`tilekern.kernels.skinny`).
_MOST_ROWS = 64


def is_few(*sizes: int) -> bool:
    """Return whether a problem has few rows; ``sizes`` are its bucketed dimensions, real or at their buckets."""
    return math.prod(map(bucket, sizes)) <= _MOST_ROWS


def launch_next(few):
    """Let the next kernel be launched from now on if there are ``few`` rows."""
    if ct.static_eval(few):
        ct.grid_dependency_control_launch_dependents()
