"""Make a cache of artificial records of any size, on which ``cache_tools ls`` is timed."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tilekern.cache import SCHEMA, Artifact, Record, Store
from tilekern.kernels import spec_named
from tilekern.spec.source import source_digest
from tilekern.spec.targets import resolve

_BLOB = b"no cubin"
_CREATED = "2026-01-31T12:00:00+00:00"


def fill(root: Path, records: int) -> None:
    """Write records of one kernel that differ in their columns; they share one blob."""
    digest = hashlib.sha256(_BLOB).hexdigest()
    store = Store(root)
    for number in range(records):
        store.write(_record(number, digest), {digest: _BLOB})


def _record(number: int, digest: str) -> Record:
    spec, target = spec_named("swiglu_forward"), resolve("H200")
    problem = spec.problem(rows=8192, columns=128 * (number + 1), dtype="bfloat16")
    config = dict(spec.default(problem, target))
    artifact = Artifact(digest, len(_BLOB), "none", config, [], {"registers": 64, "spill_bytes": 0})
    digest_today = source_digest(spec.module)
    return Record(
        schema=SCHEMA, kernel=spec.name, module=spec.module, problem=dict(problem), target=target.describe(),
        toolkit={"key": "made-up", "tileiras": "0", "cuda_tile": "0"},
        source_digest=digest_today, space_digest=digest_today,
        provenance="default", config=config, artifacts={"aligned": artifact, "generic": artifact}, measurement=None,
        prediction=None, check=None, runners_up=[], candidates=1, failed=0, created=_CREATED, created_by="benchmarks",
    )  # fmt: skip
