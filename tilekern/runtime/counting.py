"""``tilekern.stats()``: what happened to every kernel, those that nobody has asked for among them."""

from __future__ import annotations

from tilekern.kernels import all_specs
from tilekern.runtime import dispatch


def stats() -> dict[str, dict[str, int]]:
    """The counters of every kernel by name: hits, nearest, misses, fallbacks, compiled, launches.

    Kernels of tilekern's are all there from the start, with zeros; those of others are from when they are asked for.
    """
    none = dict.fromkeys(dispatch.COUNTED, 0)
    return {name: dict(none) for name in sorted(all_specs())} | dispatch.stats()
