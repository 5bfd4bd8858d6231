"""Report kernels that this process served with a config not measured for the problem."""

from __future__ import annotations

from collections.abc import Iterator

_ODD = ("fallbacks", "misses", "compiled", "nearest")


def doubts() -> Iterator[str]:
    """Return a line for each kernel with a miss, and for each record that was hit but not measured.

    A fallback to torch must not count as our kernel. A default config, which an earlier process may have compiled on a
    miss, must not count as the tuner's choice.
    """
    import tilekern
    from tilekern.runtime import dispatch

    for kernel, counts in tilekern.stats().items():
        if any(counts[name] for name in _ODD):
            yield f"tilekern {kernel}: {counts}"
    for (kernel, problem), record in dispatch.resolved().items():
        if record is not None and record.provenance != "measured":
            yield f"tilekern {kernel} {problem.key}: the config is {record.provenance}, and not measured"
