"""Times again the winners of another toolkit or driver, with their runners-up, not the whole space.

A refresh is a sweep whose plan limits each problem to a few configs. Beside the plan lies ``refresh.json``: the records
as they were, and what else was found, so that the folder can be carried to the GPU like any other.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilekern.cache import DATED, STALE, CacheError, FolderLayer, Layer, Record, Store, freshness
from tilekern.cache.files import TEMPORARY_SUFFIX, read_whole, write_whole
from tilekern.errors import InputError
from tilekern.kernels import all_specs
from tilekern.spec import INVARIANT, Config, KernelSpec, Problem
from tilekern.spec.source import source_digest
from tilekern.spec.targets import Target
from tilekern.tuning.measure.stage import is_composite
from tilekern.tuning.publishing import Known, Winner
from tilekern.tuning.sweep.folder import CONTENTS, RESULTS, Sweep
from tilekern.tuning.sweep.holding import LOCK, written
from tilekern.tuning.sweep.plan import PLAN

MODEL = "refresh"
# Of refresh.json, which holds whole records.
_LARGEST = 2**28


@dataclass(frozen=True)
class Stale:
    """A measured record that cannot be timed again, and why: its problem needs a whole tune."""

    record: Record
    reason: str


@dataclass
class Survey:
    """The measured records of a target: ``outdated`` ones with the configs to time again, the old winner first.

    ``unknown`` are kernels of the folders' records that this process has no spec of.
    """

    outdated: list[tuple[Record, list[Config]]] = field(default_factory=list)
    current: list[tuple[Record, Layer]] = field(default_factory=list)
    stale: list[Stale] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)


def survey(
    layers: Sequence[Layer], target: Target, toolkit_key: str | None, driver: str | None, *, top: int, everything: bool
) -> Survey:
    """Sort the measured records of a target by whether today's toolkit and driver made them.

    Args:
        layers: where to look for records.
        target: the GPU.
        toolkit_key: the toolkit of today; None where there is none here, which makes no record outdated.
        driver: the driver of today; None where there is none here, which makes no record outdated.
        top: how many of a record's runners-up to time again.
        everything: take records of today's toolkit and driver for outdated, too.
    """
    found = Survey()
    for layer in layers:
        if isinstance(layer, FolderLayer):
            for toolkit in layer.toolkits(target.key):
                found.unknown |= set(layer.kernels(target.key, toolkit)) - all_specs().keys()
    for kernel, spec in all_specs().items():
        by_problem = _measured(layers, target, kernel)
        for problem in sorted(
            by_problem, key=lambda p: [(v, "") if isinstance(v, int) else (0, str(v)) for v in p.values()]
        ):
            records = by_problem[problem]
            valid = [pair for pair in records if _stale(pair[0], spec) is None]
            if not valid:
                newest = _newest(records)[0]
                found.stale.append(Stale(newest, _stale(newest, spec) or ""))
                continue
            current = [
                (record, layer)
                for record, layer in valid
                if toolkit_key in (None, record.toolkit["key"])
                and driver in (None, (record.measurement or {}).get("driver"))
            ]
            if current and not everything:
                found.current.append(_newest(current))
                continue
            record = _newest(current or valid)[0]
            if configs := _configs(record, spec, target, top):
                found.outdated.append((record, configs))
            else:
                found.stale.append(Stale(record, "its configs are not in the search space any more"))
    return found


def _measured(layers: Sequence[Layer], target: Target, kernel: str) -> dict[Any, list[tuple[Record, Layer]]]:
    found: dict[Any, list[tuple[Record, Layer]]] = {}
    for layer in layers:
        for toolkit_key in layer.toolkits(target.key):
            for problem in layer.problems(target.key, toolkit_key, kernel):
                with contextlib.suppress(CacheError):
                    record = layer.read_record(target.key, toolkit_key, kernel, problem)
                    if record.measurement:
                        found.setdefault(Problem(problem), []).append((record, layer))
    return found


def _stale(record: Record, spec: KernelSpec) -> str | None:
    """Return why timing a record's configs again would prove nothing about today's kernel; None if it would."""
    worth = freshness(record, source_digest(spec.module))
    if worth == STALE:
        return "it was made from another version of the kernel's source"
    if worth == DATED:
        return "the search space has changed since, so that a few of its configs say nothing of the best"
    try:
        spec.problem(**record.problem)
    except (TypeError, ValueError) as error:
        return f"its problem is not one that the kernel has today: {error}"
    return None


def _newest(records: Iterable[tuple[Record, Layer]]) -> tuple[Record, Layer]:
    return max(records, key=lambda pair: pair[0].created)


def _configs(record: Record, spec: KernelSpec, target: Target, top: int) -> list[Config]:
    """Return the configs of the winner, the first runners-up, the best kernel, the invariant one, and the default.

    Those that today's space does not have are left out; none are returned if only the default is left.
    """
    problem = spec.problem(**record.problem)
    default = spec.default(problem, target)
    known = {config: config for config in [default, *spec.space.candidates(problem, target)]}
    offered = [record.config, *(one.get("config") for one in record.runners_up[:top] if isinstance(one, dict))]
    if record.best_kernel:
        offered.append(record.best_kernel.config)
    if same := (record.measurement or {}).get(INVARIANT):
        offered.append(same["config"])
    found = []
    for values in offered:
        with contextlib.suppress(TypeError):  # values that no config can have
            found.append(known.get(Config(values)))
    kept = [config for config in found if config is not None]
    return list(dict.fromkeys([*kept, default])) if kept else []


@dataclass(frozen=True)
class Change:
    """Outcome for one record.

    ``same_us`` is today's time of the old config, or None, for which ``reason`` says why;
    ``after`` is the new record, None where nothing could be timed. Times are medians in microseconds.
    """

    before: Record
    after: Record | None
    same_us: float | None
    reason: str

    @property
    def before_us(self) -> float:
        """Return the old winner's old time."""
        return float((self.before.measurement or {})["median_us"])

    @property
    def after_us(self) -> float | None:
        """Return the new winner's time."""
        return float((self.after.measurement or {})["median_us"]) if self.after else None

    @property
    def unchanged(self) -> bool:
        """Return whether the old config won again."""
        return self.after is not None and Config(self.after.config) == Config(self.before.config)

    def as_json(self) -> dict[str, Any]:
        """Return the change as ``--json`` prints it; ``change``: the new winner's time over the old one's, minus 1."""
        after = self.after
        return {
            "kernel": self.before.kernel,
            "problem": self.before.problem,
            "before": _told(self.before),
            "same_config_us": self.same_us,
            "same_config_reason": self.reason or None,
            "after": _told(after) if after else None,
            "change": round(self.after_us / self.before_us - 1, 4) if self.after_us else None,
            "unchanged": self.unchanged,
        }


def _told(record: Record) -> dict[str, Any]:
    measurement = record.measurement or {}
    return {
        "config": record.config,
        "median_us": measurement["median_us"],
        "toolkit": record.toolkit["key"],
        "driver": measurement.get("driver"),
    }


class Refresh:
    """A sweep folder that is a refresh.

    Args:
        folder: the folder.
        carried: whether it is measured whoever compiled it (:meth:`tilekern.tuning.sweep.folder.Sweep.carried`).
    """

    def __init__(self, folder: Path, *, carried: bool = False) -> None:
        self.sweep = Sweep.carried(folder) if carried else Sweep(folder)
        self._path = folder / "refresh.json"

    @property
    def unfinished(self) -> bool:
        """Return whether the folder holds a refresh whose records are not published yet."""
        return (self.sweep.folder / PLAN).exists() and self._path.exists() and not self._read()["finished"]

    @property
    def toolkit_key(self) -> str | None:
        """Return the toolkit that it was begun with."""
        found = self._read()["toolkit"]
        return None if found is None else str(found)

    @property
    def stale(self) -> list[dict[str, Any]]:
        """Return the records that need a whole tune: ``kernel``, ``problem`` and ``reason``."""
        return list(self._read()["stale"])

    @property
    def current(self) -> int:
        """Return how many records were of today's toolkit and driver."""
        return int(self._read()["current"])

    def begin(self, found: Survey, target: Target, toolkit_key: str | None) -> None:
        """Plan the refresh of a survey, in place of an older refresh in the folder.

        Winners of today that composites may launch go into the sweep's own cache.

        Raises:
            InputError: the folder contains a tuning sweep, is held by another run, cannot be written, or
                can be written by others.
        """
        folder = self.sweep.folder
        self.sweep.require_own()
        if not self._path.exists() and (others := _contents(folder)):
            if PLAN in others:
                raise InputError(f"{folder} contains a tuning sweep, not a refresh; pass another --sweep folder")
            raise InputError(f"{folder} contains {others[0]}, which is not of a refresh; pass another --sweep folder")
        limits = {(r.kernel, Problem(r.problem)): configs for r, configs in found.outdated}
        classed = [(r.kernel, Problem(r.problem)) for r, _ in found.outdated if INVARIANT in (r.measurement or {})]
        with written(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with self.sweep.holder.locked():
                _clear(folder)
                self._write({
                    "finished": False,
                    "toolkit": toolkit_key,
                    "before": [record.to_json() for record, _ in found.outdated],
                    "stale": [stale_json(stale) for stale in found.stale],
                    "current": len(found.current),
                })  # fmt: skip
                if any(is_composite(*named, configs) for named, configs in limits.items()):
                    store = Store(self.sweep.cache)
                    for record, layer in found.current:
                        with contextlib.suppress(CacheError):  # the layer reports a bad one
                            store.write(record, {digest: layer.read_blob(digest) for digest in record.digests})
                # Last: a folder without a plan is begun anew, whatever else a run that was killed has left in it.
                self.sweep.begin(target, MODEL, list(limits), limits, invariant=classed)

    def finish(self, found: Sequence[Winner]) -> list[Change]:
        """Note that the winners are published; return the changes in the plan's order."""
        changes = list(self._changes(found))
        self._write(self._read() | {"finished": True, "changes": [change.as_json() for change in changes]})
        return changes

    def _changes(self, found: Iterable[Winner]) -> Iterator[Change]:
        after = {(winner.kernel, winner.problem): winner.record for winner in found}
        known = Known.of(self.sweep)
        for text in self._read()["before"]:
            before = Record.from_json(text)
            items = self.sweep.candidates(before.kernel, Problem(before.problem))
            old = next((item for item in items[:-1] if item.config == Config(before.config)), None)
            timing = known.timings(items).get(old) if old else None
            reason = "it is not in the search space any more" if old is None else known.why_untimed(old)
            new = after.get((before.kernel, Problem(before.problem)))
            yield Change(before, new, timing["median_us"] if timing else None, "" if timing else reason)

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(read_whole(self._path, _LARGEST)[0])
        except (CacheError, ValueError, RecursionError) as error:
            raise InputError(f"{self._path} cannot be read: {error}") from None
        is_whole = isinstance(found, dict) and {"finished", "toolkit", "before", "stale", "current"} <= found.keys()
        before = found["before"] if is_whole else None
        if not isinstance(before, list) or not all(isinstance(text, str) for text in before):
            said = "is damaged, or another version of tilekern wrote it; remove the folder and refresh again"
            raise InputError(f"{self._path} {said}")
        return found

    def _write(self, content: Mapping[str, Any]) -> None:
        with written(self.sweep.folder):
            write_whole(self._path, json.dumps(content, indent=1).encode())


def stale_json(stale: Stale) -> dict[str, Any]:
    """Return a stale record as ``--json`` prints it."""
    return {"kernel": stale.record.kernel, "problem": stale.record.problem, "reason": stale.reason}


def _contents(folder: Path) -> list[str]:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(name for name in names if name != LOCK and not name.endswith(TEMPORARY_SUFFIX))


def _clear(folder: Path) -> None:
    """Remove what an older refresh left; the plan first, without which the folder is not a sweep."""
    for name in (*CONTENTS, RESULTS):
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
