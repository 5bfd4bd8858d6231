"""Compiles the default of a problem without a record, in one of the processes that want it, and stores it.

If the cache cannot be written, each process compiles it and runs it from memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection

from tilekern.cache import (
    FRESH,
    Address,
    CacheError,
    FolderLayer,
    Hit,
    Record,
    Store,
    freshness,
    has_better,
    user_root_if_any,
)
from tilekern.cache.turns import turn
from tilekern.runtime.records import compiled_default, tell_of_long
from tilekern.spec import KernelSpec, Problem
from tilekern.spec.source import source_digest
from tilekern.spec.targets import Target
from tilekern.warning import warn_once

# The layer of defaults that this process has compiled; it has no files.
MEMORY = FolderLayer(os.devnull, "memory")


def made_default(
    spec: KernelSpec, problem: Problem, target: Target, find: Callable[[], Hit | None],
    misfits: Collection[Address] = (),
) -> tuple[Hit, bool]:  # fmt: skip
    """Return the default of a problem at its buckets, and whether it was compiled here.

    It is stored in the user's cache unless a better record is there whose address is not in ``misfits``. ``find`` looks
    it up again after another process may have compiled it.

    Raises:
        ToolchainMissing: no compiler is installed.
        CompileFailed: the compiler rejected it, or could not work (:class:`tilekern.errors.CompileInterrupted`).
        OSError: the compiler could not be run.
    """
    root = user_root_if_any()
    with tell_of_long(spec, problem), turn(root, f"{spec.name} {problem.key} {target.key}") as waited:
        if waited and (found := find()):
            return found, False
        record, blobs = compiled_default(spec, problem, target)
        if root is not None:
            _keep(Store(root), record, blobs, anew=record.address in misfits)
        return Hit(record, MEMORY, True, True, blobs), True


def default_in_cache(spec: KernelSpec, problem: Problem, target: Target, toolkit_key: str) -> Hit | None:
    """Return the default of today's source that another process stored in the user's cache, or None."""
    root = user_root_if_any()
    if root is None:
        return None
    layer = FolderLayer(root, "user")
    try:
        record = layer.read_record(target.key, toolkit_key, spec.name, dict(problem))
        if record.provenance != "default" or freshness(record, source_digest(spec.module)) != FRESH:
            return None
        return Hit(record, MEMORY, True, True, {digest: layer.read_blob(digest) for digest in record.digests})
    except CacheError:
        return None


def _keep(store: Store, record: Record, blobs: dict[str, bytes], *, anew: bool) -> None:
    try:
        # The tuner may have published a winner while the compiler ran.
        if anew or not has_better(store, record, lambda _: source_digest(record.module)):
            store.write(record, blobs)
    except (CacheError, OSError) as error:
        warn_once(
            f"{error}; kernels that are compiled here run, and each process compiles them anew: set TILEKERN_CACHE_DIR "
            "to a folder that can be written, or tune before the job",
            about="a default that cannot be kept",
        )
