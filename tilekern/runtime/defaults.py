"""Compiles the default of a problem without a record, in one of the processes that want it, and stores it.

If the cache cannot be written, each process compiles it and runs it from memory. A step's other defaults are compiled
ahead of their calls (:mod:`tilekern.runtime.ahead`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping

from tilekern.cache import (
    FRESH,
    Address,
    CacheError,
    FolderLayer,
    Hit,
    Record,
    Store,
    freshness,
    user_root_if_any,
    why_kept,
)
from tilekern.cache.turns import turn
from tilekern.runtime.ahead import Ahead, Coming
from tilekern.runtime.records import compiled_default, tell_of_long, turn_of
from tilekern.spec import KernelSpec, Problem
from tilekern.spec.source import source_digest
from tilekern.spec.targets import Target
from tilekern.warning import warn_once

# The layer of defaults that this process has compiled; it has no files.
MEMORY = FolderLayer(os.devnull, "memory")
# The defaults that this process compiles ahead.
AHEAD = Ahead()


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
    if (coming := AHEAD.hit(spec, problem, target, MEMORY)) is not None:
        return coming, True
    root = user_root_if_any()
    with tell_of_long(spec, problem), turn(root, turn_of(spec, problem, target)) as waited:
        if waited and (found := find()):
            return found, False
        record, blobs = compiled_default(spec, problem, target)
        if root is not None:
            _keep(Store(root), record, blobs, anew=record.address in misfits)
        return Hit(record, MEMORY, True, True, blobs), True


def make_ahead(
    wanted: Iterable[tuple[KernelSpec, Problem]], target: Target, find: Callable[[KernelSpec, Problem], Hit | None],
    misfits: Collection[Address] = (),
) -> list[Coming]:  # fmt: skip
    """Begin to compile the defaults of problems at their buckets, for which :func:`made_default` will be called.

    Returns:
        Those that this process compiles, and no other one does.
    """
    root = user_root_if_any()

    def keep(record: Record, blobs: Mapping[str, bytes]) -> bool:
        return root is not None and _keep(Store(root), record, blobs, anew=record.address in misfits)

    return AHEAD.begin(wanted, target, lambda *named: find(*named) is not None, keep)


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


def _keep(store: Store, record: Record, blobs: Mapping[str, bytes], *, anew: bool) -> bool:
    """Store a record unless a better one is there; return whether the cache has one now."""
    try:
        # The tuner may have published a winner while the compiler ran.
        if anew or not why_kept(store, record, lambda _: source_digest(record.module)):
            store.write(record, blobs)
    except (CacheError, OSError) as error:
        warn_once(
            f"{error}; kernels that are compiled here run, and each process compiles them anew: set TILEKERN_CACHE_DIR "
            "to a folder that can be written, or tune before the job",
            about="a default that cannot be kept",
        )
        return False
    return True
