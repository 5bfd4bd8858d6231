"""The configs that served tilekern's kernels in this process, where that was not a config measured for the problem."""

from __future__ import annotations

from collections.abc import Iterator

_ODD = ("fallbacks", "misses", "compiled", "nearest")


def doubts() -> Iterator[str]:
    """A line for each kernel that did not always hit, and for each record that was hit and not measured.

    A fallback to torch must never pass for a kernel of ours, nor a default, which an earlier process may have compiled
    on a miss, for what the tuner chose.
    """
    import tilekern
    from tilekern.runtime import dispatch

    for kernel, counts in tilekern.stats().items():
        if any(counts[name] for name in _ODD):
            yield f"tilekern {kernel}: {counts}"
    for (kernel, problem), record in dispatch.resolved().items():
        if record is not None and record.provenance != "measured":
            yield f"tilekern {kernel} {problem.key}: the config is {record.provenance}, and not measured"
