"""Note the kernels behind a figure with their sources' digests; every run notes them, the report compares them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import tilekern
from benchmarks.providers import OURS
from benchmarks.results import Results, Row
from tilekern.cache.packs.pack import Pack
from tilekern.errors import InputError
from tilekern.kernels import spec_named
from tilekern.spec.source import source_digest

# Benchmarks that time tilekern's kernels; the other benchmarks time its Python code.
OF_KERNELS = (
    "kernels", "kernels_sweep", "experts", "train", "train_families", "train_profile", "parallel", "host", "decode",
    "inference", "exchange", "fp8", "longest",
)  # fmt: skip
# Counters that rise when a kernel's record serves a call, instead of torch's own operations.
_SERVED = ("hits", "nearest", "compiled", "launches")
_DIGITS = 8
# Of a digest, in results.
_KEPT = 12


@functools.cache
def digest_today(kernel: str) -> str | None:
    """Return the current digest of a kernel's source, or None if the kernel does not exist."""
    try:
        return source_digest(spec_named(kernel).module)[:_KEPT]
    except InputError:
        return None


@functools.cache
def _carried_over() -> dict[str, set[str]]:
    """Return by kernel the digests of sources from which the records of the packs were carried over to today's."""
    # The report's alone: processes that are timed do not load the tuner.
    from tilekern.tuning.carrying import HISTORY

    found: dict[str, set[str]] = {}
    for path in (Path(tilekern.__file__).parent / "prebuilt").glob("*.pack"):
        pack = Pack(path)
        for address in pack.records:
            record = pack.read_record(address)
            if record.source_digest[:_KEPT] == digest_today(record.kernel):
                history = (record.measurement or {}).get(HISTORY, ())
                found.setdefault(record.kernel, set()).update(one["source_digest"][:_KEPT] for one in history)
    return found


def is_of_today(kernel: str, digest: str) -> bool:
    """Return whether a digest is of a kernel's source, or of one whose records have the same machine code today."""
    return digest == digest_today(kernel) or digest in _carried_over().get(kernel, ())


def digests(kernels: Iterable[str]) -> dict[str, str]:
    """Return today's digest of each of these kernels that exists, in the order of their names."""
    found = {kernel: digest_today(kernel) for kernel in sorted(set(kernels))}
    return {kernel: digest for kernel, digest in found.items() if digest is not None}


@contextlib.contextmanager
def kernels_used() -> Iterator[list[str]]:
    """Yield a list; after the block it contains the names of the kernels that served calls in the block."""
    from tilekern.runtime import dispatch

    before = dispatch.stats()
    used: list[str] = []
    try:
        yield used
    finally:
        used += kernels_since(before)


def kernels_since(before: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return the names of the kernels that served calls after these counts of ``tilekern.stats``."""
    from tilekern.runtime import dispatch

    return [
        kernel
        for kernel, counts in dispatch.stats().items()
        if any(counts[name] > before.get(kernel, {}).get(name, 0) for name in _SERVED)
    ]


def with_sources(rows: Sequence[Row], kernels: Iterable[str]) -> list[Row]:
    """Return the rows; tilekern's rows get the digests of these kernels."""
    found = digests(kernels)
    return [replace(row, sources=found) if row.provider.startswith(OURS) else row for row in rows]


def described(results: Results, case: str) -> str:
    """Say which source tilekern's rows of a case measured, and whether it is still today's."""
    rows = [row for row in results.rows if row.case == case and row.provider.startswith(OURS)]
    sources = next((row.sources for row in rows if row.sources), {})
    commit = str(results.run["commit"])[:7]
    if sources:
        changed = [kernel for kernel, digest in sources.items() if not is_of_today(kernel, digest)]
        return _joined(sources) + (f", **stale**: {', '.join(changed)} changed" if changed else "")
    return f"digest not recorded (commit {commit})" if results.benchmark in OF_KERNELS else f"commit {commit}"


def _joined(sources: Mapping[str, str]) -> str:
    """Return the first digits of one kernel's digest, or of a digest over several digests."""
    if len(sources) == 1:
        return f"`{next(iter(sources.values()))[:_DIGITS]}`"
    text = "".join(f"{kernel}={digest}\n" for kernel, digest in sorted(sources.items()))
    return f"`{hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]}`"
