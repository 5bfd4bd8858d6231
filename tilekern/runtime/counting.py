"""``tilekern.stats()``: the counters of every kernel."""

from __future__ import annotations

from tilekern.kernels import all_specs
from tilekern.runtime import dispatch


def stats() -> dict[str, dict[str, int]]:
    """Return the counters of every kernel by name: hits, nearest, misses, fallbacks, compiled, launches.

    tilekern's own kernels are always included; users' kernels only after they were asked for.
    """
    none = dict.fromkeys(dispatch.COUNTED, 0)
    return {name: dict(none) for name in sorted(all_specs())} | dispatch.stats()
