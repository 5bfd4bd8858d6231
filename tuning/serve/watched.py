"""A cache that the service watches: its wanted list as a queue, the costliest problems first, and what a miss costs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tilekern.cache import (
    PROVENANCES,
    CacheError,
    FolderLayer,
    Record,
    Store,
    lookup,
    read_misses,
    read_wanted,
    remove_wanted,
    wanted_name,
)
from tilekern.cache.folders import opened
from tilekern.compile.cubin import Resources, code_of
from tilekern.errors import InputError
from tilekern.kernels import all_specs
from tilekern.spec import ALIGNED, Config, Problem
from tilekern.spec.source import source_digest
from tilekern.spec.targets import Target
from tilekern.tuning.compile.machine_code import read_machine_code
from tilekern.tuning.predict.ranking import Prediction, predict, ranking
from tilekern.tuning.predict.roofline import launch_s
from tilekern.tuning.serve.history import Failures, History
from tilekern.tuning.sweep.candidates import Candidate, candidate
from tilekern.tuning.sweep.folder import Sweep, folder_in
from tilekern.tuning.sweep.holding import Holder, written
from tilekern.tuning.sweep.journal import Journal
from tilekern.tuning.sweep.plan import Named

# Time of the model's own op and of a default config over the roofline's, without a prediction. On the H200, torch's own
# ops take from 1.7 times (swiglu) to 24 times (qk_norm_rope).
OWN_OP, DEFAULT = 4.0, 1.5
ReadBlob = Callable[[str], bytes]


@dataclass(frozen=True)
class Lost:
    """The seconds that a launch loses, at least 0, and the basis of the estimate: ``predicted`` or ``roofline``."""

    seconds: float
    basis: str


def lost(
    kernel: str, problem: Problem, target: Target, sweep: Sweep, record: Record | None, read_blob: ReadBlob
) -> Lost:
    """Estimate the loss of one launch: the time of the current kernel, less that of the predicted winner.

    Args:
        kernel: the spec's name.
        problem: the problem.
        target: the GPU.
        sweep: may hold compiled candidates of the problem.
        record: the record that serves now; None for the model's own op.
        read_blob: returns an artifact of the record by its sha256.

    Raises:
        tilekern.cache.CacheError: the artifact cannot be read.
    """
    floor_s = launch_s(kernel, problem, target)
    try:
        known = ranking(sweep, kernel, problem, target)
    except InputError:  # the folder has no plan yet
        known = []
    best_s = known[0][1].seconds if known else floor_s
    if record is None:
        return Lost(max(0.0, OWN_OP * floor_s - best_s), "roofline")
    now = _predicted(kernel, problem, target, record, read_blob, known)
    if now is None:
        return Lost(max(0.0, DEFAULT * floor_s - best_s), "roofline")
    return Lost(max(0.0, now - best_s), "predicted" if known else "roofline")


def _predicted(
    kernel: str, problem: Problem, target: Target, record: Record, read_blob: ReadBlob,
    known: list[tuple[Candidate, Prediction]],
) -> float | None:  # fmt: skip
    """Return the predicted time of the record's config; None if it has no artifact to predict from."""
    item = candidate(kernel, problem, Config(record.config), ALIGNED, target)
    for other, said in known:
        if other.config == item.config:
            return said.seconds
    # If a library runs the config, the artifacts belong to another config.
    artifact = None if item.is_library else record.artifacts.get(ALIGNED)
    if artifact is None:
        return None
    code = read_machine_code(code_of(read_blob(artifact.sha256), artifact.symbol), target.capability)
    return predict(item, Resources(**artifact.resources), target, code).seconds


STATES = WAITING, FAILED, ELSEWHERE, UNKNOWN = "waiting", "failed", "elsewhere", "unknown"
NOTHING_LOST = Lost(0.0, "none")
MEASURED, PREDICTED = "measured", "predicted"


@dataclass(frozen=True)
class Item:
    """A wanted problem.

    Attributes:
        root: the cache's root.
        name: its name on the wanted list.
        kernel: the spec's name.
        problem: its values.
        target: the description of the GPU, with ``name`` and ``key``.
        created: when it was first asked for.
        reason: the job's reason.
        misses: how often jobs ran it untuned; at least 1.
        state: ``waiting``, ``failed`` (not tried now), ``elsewhere`` (for another GPU), ``unknown`` (this version of
            tilekern has no such kernel or problem).
        why: the reason for the state.
        lost: the loss of each run.
    """

    root: Path
    name: str
    kernel: str
    problem: Mapping[str, Any]
    target: Mapping[str, Any]
    created: str
    reason: str
    misses: int
    state: str = WAITING
    why: str = ""
    lost: Lost = NOTHING_LOST

    @property
    def cost_s(self) -> float:
        """Return the seconds that were lost so far."""
        return self.misses * self.lost.seconds

    @property
    def named(self) -> Named:
        """Return the kernel and the bucketed problem, as a sweep names them."""
        spec = all_specs()[self.kernel]
        return self.kernel, spec.bucketed(spec.problem(**self.problem))


class WatchedCache:
    """A cache whose wanted list the service works off.

    Args:
        root: the cache's root.
        target: the GPU to tune for.
        toolkit_key: the toolkit to compile with.
        goal: the provenance to reach: ``measured``, or ``predicted`` without the GPU.
    """

    def __init__(self, root: Path, target: Target, toolkit_key: str, goal: str) -> None:
        self.store = Store(root)
        self.root, self.target, self.goal = self.store.root, target, goal
        self.sweep = Sweep(folder_in(self.root, f"service-{target.key}-{toolkit_key}"))
        self.history = History(self.root / "service" / "history.jsonl")
        self.failures = Failures(self.root / "service" / "failed.jsonl")
        self._toolkit_key = toolkit_key
        self._layer = FolderLayer(self.root, str(self.root))
        self._costs: dict[Any, Lost] = {}

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep other services out of the cache.

        Raises:
            InputError: another service holds it, or it cannot be written.
        """
        folder = self.root / "service"
        with written(self.root), opened(self.root, folder.name, make=True):
            pass
        with Holder(folder, Journal(folder / "runs.jsonl", "run")).running("serve"):
            yield

    def settle(self) -> list[Item]:
        """Take items off the list that the cache already holds; return them."""
        done = [item for item in self._items() if item.state == WAITING and self.serves(item)]
        self.remove(done)
        return done

    def queue(self) -> list[Item]:
        """Return the wanted problems: the costliest first, those that cannot be tuned here or now last."""
        items = []
        for item in self._items():
            if item.state == WAITING and (why := self.failures.why(item.name, self._state(item))) is not None:
                item = replace(item, state=FAILED, why=why)  # noqa: PLW2901
            items.append(self._costed(item))
        return sorted(items, key=lambda item: (item.state != WAITING, -item.cost_s, item.created, item.name))

    def remove(self, items: list[Item]) -> None:
        """Take items off the list.

        Raises:
            tilekern.cache.CacheError: a file cannot be deleted.
        """
        if items:
            remove_wanted(self.root, [item.name for item in items])

    def serves(self, item: Item) -> bool:
        """Return whether the cache holds a record of an item that meets the goal."""
        return self.holds(item.named)

    def holds(self, named: Named) -> bool:
        """Return whether the cache holds a record of a problem that meets the goal."""
        return self._is_good(self._record(*named))

    def lend(self, named: Iterable[Named], store: Store) -> None:
        """Copy the cache's own records of problems, those that it has, into another cache."""
        for record in filter(None, (self._record(*pair) for pair in named)):
            with contextlib.suppress(CacheError):  # the layer reports a bad one
                store.write(record, {digest: self._layer.read_blob(digest) for digest in record.digests})

    def fail(self, item: Item, reason: str, *, passing: bool) -> None:
        """Note that an item cannot be tuned; it stays wanted.

        Raises:
            OSError: the note cannot be written.
        """
        self.failures.note(item.name, reason, self._state(item), passing=passing)
        self.history.note("failed", item.name, item.kernel, item.problem, reason=reason)

    def _items(self) -> Iterator[Item]:
        misses = read_misses(self.root)
        for wanted in read_wanted(self.root):
            name = wanted_name(wanted["kernel"], wanted["problem"], wanted["target"])
            item = Item(self.root, name, **wanted, misses=max(1, misses.get(name, 0)))
            yield self._placed(item)

    def _placed(self, item: Item) -> Item:
        if item.target.get("key") != self.target.key:
            return replace(item, state=ELSEWHERE, why=f"not for this GPU: wanted on {item.target.get('name')}")
        if item.kernel not in all_specs():
            why = f"no kernel {item.kernel} here; if it is your own, pass --specs MODULE"
            return replace(item, state=UNKNOWN, why=why)
        try:
            assert item.named
        except (TypeError, ValueError) as error:
            return replace(item, state=UNKNOWN, why=f"this version of tilekern has no such problem: {error}")
        return item

    def _state(self, item: Item) -> dict[str, str]:
        """Return the facts that a failure of an item depends on."""
        return {
            "source": source_digest(all_specs()[item.kernel].module),
            "toolkit": self._toolkit_key,
            "goal": self.goal,
        }

    def _costed(self, item: Item) -> Item:
        if item.state in (ELSEWHERE, UNKNOWN):
            return item
        kernel, problem = item.named
        record = self._record(kernel, problem)
        if self._is_good(record):
            return replace(item, state=UNKNOWN, why="the cache holds it; its file could not be taken off the list")
        try:
            journal = self.sweep.folder / "compiled.jsonl"
            key = (item.name, record and record.created, journal.stat().st_size if journal.exists() else 0)
            if key not in self._costs:
                for old in [old for old in self._costs if old[0] == item.name]:
                    del self._costs[old]
                self._costs[key] = lost(kernel, problem, self.target, self.sweep, record, self._layer.read_blob)
        except (CacheError, OSError):
            return item  # tuning it reports what is wrong
        except Exception as error:  # noqa: BLE001 (a spec's own formulas may fail on a problem, which must not stop others)
            return replace(item, state=UNKNOWN, why=f"{type(error).__name__}: {error}"[:300])
        return replace(item, lost=self._costs[key])

    def _is_good(self, record: Record | None) -> bool:
        return record is not None and PROVENANCES.index(record.provenance) <= PROVENANCES.index(self.goal)

    def _record(self, kernel: str, problem: Problem) -> Record | None:
        """Return the cache's own record of this very problem and GPU."""
        spec = all_specs()[kernel]
        hit = lookup(
            kernel, dict(problem), bucketed=(), target_key=self.target.key, arch=self.target.arch,
            toolkit_key=self._toolkit_key, source=source_digest(spec.module), layers=[self._layer],
        )  # fmt: skip
        return hit.record if hit is not None and hit.exact_target else None
