"""Make records whose bytes all follow from a few numbers, so that a reader can detect a wrong answer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from tilekern.cache import SCHEMA, Artifact, Hit, Layer, Record, lookup
from tilekern.cache.keys import Value

KERNEL, SOURCE = "sample", hashlib.sha256(b"source").hexdigest()
TARGET = {"key": "sm_90-h200-132", "name": "H200", "arch": "sm_90"}
TOOLKIT = {"key": "tileiras-13.4.92", "tileiras": "13.4.92"}
VARIANTS = ("aligned", "generic")


def content(number: int, version: int, variant: str, size_bytes: int = 6000) -> bytes:
    """Return the bytes of an artifact."""
    seed = hashlib.sha256(f"{number} {version} {variant}".encode()).digest()
    return (seed * (size_bytes // len(seed) + 1))[:size_bytes]


def problem(number: int) -> dict[str, Value]:
    """Return a problem by its number, from 0."""
    return {"rows": 8192, "columns": 128 * (number + 1), "dtype": "bfloat16"}


def sample(number: int, version: int, size_bytes: int = 6000, **changes: Any) -> tuple[Record, dict[str, bytes]]:
    """Return the record of one version of a problem, and its blobs."""
    blobs, artifacts = {}, {}
    for variant in VARIANTS:
        data = content(number, version, variant, size_bytes)
        digest = hashlib.sha256(data).hexdigest()
        resources = {"registers": 64, "spill_bytes": 0, "shared_bytes": 1024}
        artifacts[variant] = Artifact(digest, len(data), "sample_kernel", {"occupancy": 4}, [{"base": 16}], resources)
        blobs[digest] = data
    fields: dict[str, Any] = {
        "schema": SCHEMA, "kernel": KERNEL, "module": "tilekern.kernels.sample", "problem": problem(number),
        "target": dict(TARGET), "toolkit": dict(TOOLKIT), "source_digest": SOURCE, "space_digest": SOURCE,
        "provenance": "measured",
        "config": {"occupancy": 4, "version": version}, "artifacts": artifacts,
        "measurement": {"median_us": 37.8 + number, "default_us": 124.0, "spread_us": 0.4},
        "prediction": {"time_us": 40.0}, "check": {"relative": 0.001},
        "runners_up": [{"config": {"occupancy": 2}, "median_us": 38.1 + number}],
        "candidates": version + 1, "failed": 0, "created": "2026-08-01T12:00:00+00:00", "created_by": "benchmarks",
    }  # fmt: skip
    return Record(**{**fields, **changes}), blobs


def find(layers: Sequence[Layer], number: int) -> Hit | None:
    """Look up one of the problems; no other size serves it."""
    return lookup(
        KERNEL, problem(number), bucketed=[], target_key=TARGET["key"], arch="sm_90", toolkit_key=TOOLKIT["key"],
        source=SOURCE, layers=layers,
    )  # fmt: skip


def fault_of(hit: Hit, number: int) -> str | None:
    """Return the fault of a hit on a problem, or None: a hit must be one complete version with its own blobs."""
    version = hit.record.config.get("version")
    size_bytes = hit.record.artifacts[VARIANTS[0]].size if VARIANTS[0] in hit.record.artifacts else 0
    if not isinstance(version, int) or hit.record != sample(number, version, size_bytes)[0]:
        return f"the record of problem {number} is not one that was written: {hit.record!r:.300}"
    wrong = [variant for variant in VARIANTS if hit.load(variant) != content(number, version, variant, size_bytes)]
    return f"problem {number}, version {version}: wrong bytes of {', '.join(wrong)}" if wrong else None


def counted(counts: Mapping[str, int]) -> str:
    """Return counts as readable text."""
    return ", ".join(f"{number:,} {what}" for what, number in counts.items())
