"""Compiles the defaults that a step is about to ask for, on all cores at once, while the host goes on.

A call whose problem is among them waits for its aligned variant only. The generic variant, which few launches need, is
compiled after all aligned ones, at a low priority; the record is stored when both are there. Compiling happens in
disposable processes (:mod:`tilekern.runtime.workers`). What they do not bring is dropped, and its call compiles it
itself.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping

import msgspec

from tilekern.cache import Artifact, Hit, Layer, Record, user_root_if_any
from tilekern.cache.turns import free_turn
from tilekern.compile.toolchain import artifact_key, backend_of, compile_candidate, require_toolkit
from tilekern.errors import NoVariant, TilekernError
from tilekern.kernels import spec_named
from tilekern.runtime.records import LONG_S, artifact_of, launch_in, record_of, turn_of
from tilekern.runtime.workers.pool import FRONTEND_TIMEOUT_S, MEMORY_BYTES, Answer, Lost, compile_in_order
from tilekern.runtime.workers.server import Server
from tilekern.spec import ALIGNED, GENERIC, Config, KernelSpec, Problem
from tilekern.spec.source import source_digest
from tilekern.spec.targets import Target
from tilekern.warning import warn_once, warned_after

SERVER = Server("tilekern.runtime.workers.forked", "tilekern.runtime.ahead")
# Seconds that one compile may take.
_TIMEOUT_S = 120.0
# The niceness of compilers that no call waits for: the job's own host work goes first.
_LATER_NICENESS = 10
# How long the end of a process waits for its workers to be gone.
_PATIENCE_S = 5.0
_LOOK_EVERY_S = 1.0
_Key = tuple[str, Problem, str]
# Stores a record with its artifacts; returns whether it could.
Keep = Callable[[Record, Mapping[str, bytes]], bool]


@dataclasses.dataclass(frozen=True)
class _Item:
    """An artifact to compile, by the first problem that needs it."""

    kernel: str
    problem: Problem
    config: Config
    variant: str
    artifact: str


class Coming:
    """A default at work.

    Args:
        spec: the kernel.
        problem: its sizes, at their buckets.
        target: the GPU.
        end_turn: ends this process's turn to compile it.
    """

    def __init__(self, spec: KernelSpec, problem: Problem, target: Target, end_turn: Callable[[], None]) -> None:
        self.spec, self.problem, self.target = spec, problem, target
        self.configs = {ALIGNED: spec.default(problem, target), GENERIC: spec.generic(problem)}
        source = source_digest(spec.module)
        self.items = {}
        for variant, config in self.configs.items():
            key = artifact_key(spec.implement(problem, config), variant, target, source)
            self.items[variant] = _Item(spec.name, problem, config, variant, key)
        self.artifacts: dict[str, Artifact] = {}
        self.code: dict[str, bytes] = {}
        self.record: Record | None = None
        self._gone: set[str] = set()
        self._end_turn = end_turn

    @property
    def key(self) -> _Key:
        """The problem and the GPU."""
        return self.spec.name, self.problem, self.target.key

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes."""
        return all(map(self.is_settled, self.configs))

    @property
    def is_whole(self) -> bool:
        """Whether all variants have come."""
        return self.artifacts.keys() == self.configs.keys()

    def is_settled(self, variant: str) -> bool:
        """Return whether a variant has come, or does not come any more."""
        return variant in self.artifacts or variant in self._gone

    def take(self, variant: str, artifact: Artifact, code: bytes) -> None:
        """Take a compiled variant. With the aligned one there is a record, with both it is whole."""
        own = msgspec.structs.replace(artifact, config=dict(self.configs[variant]))
        self.code[variant], artifacts = code, self.artifacts | {variant: own}
        if ALIGNED in artifacts:
            known = artifacts if GENERIC in artifacts else artifacts | {GENERIC: self._expected()}
            tools = require_toolkit().describe()
            self.record = record_of(
                self.spec, self.problem, self.configs[ALIGNED], self.target, tools, known, "default"
            )
        self.artifacts = artifacts

    def _expected(self) -> Artifact:
        """Return what is known of the generic artifact before it is compiled: all that a launcher needs but its code.

        The key stands for the digest of the code.
        """
        item = self.items[GENERIC]
        kernel = self.spec.device(self.problem, item.config)
        backend = backend_of(kernel)
        return Artifact(
            sha256=item.artifact, size=0, symbol=backend.symbol(kernel, GENERIC) or "", config=dict(item.config),
            assumptions=backend.assumptions(kernel, GENERIC), resources={}, launch=launch_in(backend.launch(kernel)),
        )  # fmt: skip

    def blobs(self) -> dict[str, bytes]:
        """Return the code of the compiled variants by sha256."""
        return {artifact.sha256: self.code[variant] for variant, artifact in self.artifacts.items()}

    def leave(self, *variants: str) -> None:
        """Give up variants that have not come; calls compile them themselves."""
        self._gone |= set(variants) - self.artifacts.keys()
        if ALIGNED in self._gone or self.is_over:
            self.end_turn()

    def end_turn(self) -> None:
        """Let other processes have the turn, and this one's calls."""
        end, self._end_turn = self._end_turn, lambda: None
        end()


class _ComingHit(Hit):
    """The hit of a default whose generic variant may still be compiled; its record is whole once that is there."""

    _ahead: Ahead
    _coming: Coming

    def __init__(self, ahead: Ahead, coming: Coming, layer: Layer) -> None:
        for name, value in {"layer": layer, "exact_target": True, "exact_bucket": True, "fresh": True}.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_ahead", ahead)
        object.__setattr__(self, "_coming", coming)

    @property
    def record(self) -> Record:
        """The record as far as it is known."""
        assert self._coming.record is not None
        return self._coming.record

    def load(self, variant: str) -> bytes:
        """Return the artifact of a variant; wait for it, or compile it if it does not come.

        Raises:
            NoVariant: it cannot be compiled.
        """
        return self._ahead.code(self._coming, variant)

    def in_layer(self, layer: Layer) -> Hit:
        """Return the same of another layer."""
        return _ComingHit(self._ahead, self._coming, layer)


class Ahead:
    """The defaults that this process compiles ahead of its calls."""

    def __init__(self) -> None:
        self._begin_anew()
        # A child has neither the threads nor the processes: it compiles what it misses itself.
        os.register_at_fork(after_in_child=self._begin_anew)
        atexit.register(self._stop)

    def _begin_anew(self) -> None:
        self._changed = threading.Condition()
        self._coming: dict[_Key, Coming] = {}
        self._batches: list[_Batch] = []

    def get_ready(self) -> None:
        """Start the process that workers are forked from, so that it loads its modules meanwhile."""
        with contextlib.suppress(OSError):  # what is wrong is said when it is needed
            SERVER.start()

    def begin(
        self, wanted: Iterable[tuple[KernelSpec, Problem]], target: Target,
        is_here: Callable[[KernelSpec, Problem], bool], keep: Keep,
    ) -> list[Coming]:  # fmt: skip
        """Compile the defaults of problems, in the order of the calls, without waiting for any.

        Args:
            wanted: kernels and problems at their buckets, none of which a library runs.
            target: the GPU.
            is_here: whether a problem needs no default, since another process has stored its record meanwhile.
            keep: stores a whole record, or says why it cannot.

        Returns:
            Those that this process compiles; other processes have their turn at the rest.
        """
        root, begun = user_root_if_any(), []
        for spec, problem in wanted:
            key = spec.name, problem, target.key
            if key in self._coming:
                continue
            end_turn = free_turn(root, turn_of(spec, problem, target))
            if end_turn is None:
                continue
            if is_here(spec, problem):
                end_turn()
                continue
            self._coming[key] = coming = Coming(spec, problem, target, end_turn)
            begun.append(coming)
        if begun:
            self._batches = [batch for batch in self._batches if batch.is_alive]
            batch = _Batch(begun, target, functools.partial(self._keep, keep), self._changed)
            self._batches.append(batch)
            batch.start()
        return begun

    def _keep(self, keep: Keep, coming: Coming) -> None:
        """Store a whole default; if it cannot be stored, it waits for its call."""
        assert coming.record is not None
        if keep(coming.record, coming.blobs()):
            self._coming.pop(coming.key, None)

    def is_coming(self, spec: KernelSpec, problem: Problem, target: Target) -> bool:
        """Return whether the default of a problem is at work here."""
        return (spec.name, problem, target.key) in self._coming

    def hit(self, spec: KernelSpec, problem: Problem, target: Target, layer: Layer) -> Hit | None:
        """Return the default of a problem when its aligned variant is compiled; None if it is not coming."""
        coming = self._coming.get((spec.name, problem, target.key))
        if coming is None:
            return None
        with self._told_of_long():
            self._wait(lambda: coming.is_settled(ALIGNED))
        if ALIGNED not in coming.artifacts:
            coming.leave(*coming.configs)
        if coming.is_over:
            self._coming.pop(coming.key, None)
        return _ComingHit(self, coming, layer) if ALIGNED in coming.artifacts else None

    def code(self, coming: Coming, variant: str) -> bytes:
        """Return the code of a variant, with whose record a plan was made.

        Raises:
            NoVariant: it cannot be compiled.
        """
        for batch in self._batches:
            batch.order.urge(coming.items[variant])
        with self._told_of_long():
            self._wait(lambda: coming.is_settled(variant))
        if variant not in coming.code:
            try:
                made = compile_candidate(coming.spec, coming.problem, coming.configs[variant], coming.target, variant)
            except (TilekernError, OSError, MemoryError) as error:
                raise NoVariant(f"{coming.spec.name}: its {variant} variant could not be compiled ({error})") from None
            coming.code[variant] = made.cubin
        return coming.code[variant]

    def finish(self) -> None:
        """Wait until all that was begun is stored or given up."""
        self._wait(lambda: all(coming.is_over for coming in list(self._coming.values())))
        for batch in list(self._batches):
            batch.join()

    def _wait(self, is_so: Callable[[], bool]) -> None:
        with self._changed:
            # A thread that the end of the interpreter has stopped tells nobody.
            while not is_so() and any(batch.is_alive for batch in self._batches):
                self._changed.wait(_LOOK_EVERY_S)

    def _told_of_long(self) -> contextlib.AbstractContextManager[None]:
        count = sum(not coming.is_over for coming in list(self._coming.values()))
        return warned_after(
            LONG_S,
            f"compiling {count} kernels that no cache holds, on {len(os.sched_getaffinity(0))} cores; Ctrl-C stops it, "
            "and a tune of the model before the job makes it unnecessary",
            about="kernels that are compiled ahead",
        )

    def _stop(self) -> None:
        """Give up what is at work, at the end of the process; records are stored whole or not at all."""
        for batch in self._batches:
            batch.order.is_over.set()
        deadline = time.monotonic() + _PATIENCE_S
        for batch in self._batches:
            batch.join(max(0.0, deadline - time.monotonic()))


class _Order:
    """Hands out artifacts: the aligned ones in the order of the calls, then the generic ones."""

    def __init__(self, items: Iterable[_Item]) -> None:
        self.is_over = threading.Event()
        self._left = sorted(items, key=lambda item: item.variant == GENERIC)
        self._lock = threading.Lock()

    def take(self, before: _Item | None) -> _Item | None:  # noqa: ARG002
        """Return the next artifact, or None if there are no more."""
        with self._lock:
            return self._left.pop(0) if self._left else None

    def take_in(self, most: int) -> int:  # noqa: ARG002
        """Return 0: all are listed."""
        return 0

    def put_back(self, item: _Item) -> None:
        """Have an artifact taken again, first of all."""
        with self._lock:
            self._left.insert(0, item)

    def urge(self, item: _Item) -> None:
        """Have an artifact taken next, if it waits."""
        with self._lock:
            self._left.sort(key=lambda other: other.artifact != item.artifact)


class _Batch:
    """Defaults that one thread has compiled by workers."""

    def __init__(
        self, coming: list[Coming], target: Target, keep: Callable[[Coming], None], changed: threading.Condition
    ) -> None:  # fmt: skip
        self._coming, self._target, self._keep, self._changed = coming, target, keep, changed
        # Problems whose code is the same share an artifact.
        self._takers: dict[str, list[tuple[Coming, str]]] = {}
        items: dict[str, _Item] = {}
        for each in coming:
            for variant, item in each.items.items():
                items.setdefault(item.artifact, item)
                self._takers.setdefault(item.artifact, []).append((each, variant))
        self.order = _Order(items.values())
        self._jobs = min(len(items), len(os.sched_getaffinity(0)))
        self._thread = threading.Thread(target=self._work, name="tilekern compile", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether it is at work."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Begin; without a thread or a process everything is left to the calls."""
        try:
            self._thread.start()
        except RuntimeError as error:  # the process may have no more threads
            self._leave(error)

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for its end."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _work(self) -> None:
        try:
            compiles = functools.partial(compile_item, target=self._target)
            limit_s = _TIMEOUT_S + FRONTEND_TIMEOUT_S
            for answer in compile_in_order(SERVER, self.order, compiles, self._jobs, limit_s, MEMORY_BYTES):
                self._take(answer)
        except Exception as error:  # noqa: BLE001 (whatever keeps workers from compiling, the calls still can)
            self._leave(error)
        else:
            self._leave(None)

    def _take(self, answer: Answer | Lost) -> None:
        key = answer.item.artifact if isinstance(answer, Lost) else answer.line["key"]
        for coming, variant in self._takers[key]:
            if isinstance(answer, Lost) or answer.cubin is None:
                coming.leave(variant)
            else:
                coming.take(variant, answer.line["artifact"], answer.cubin)
                if coming.is_whole:
                    self._keep(coming)
                    coming.end_turn()
        with self._changed:
            self._changed.notify_all()

    def _leave(self, error: Exception | None) -> None:
        for coming in self._coming:
            coming.leave(*coming.configs)
        if error is not None:
            warn_once(
                f"no processes can compile kernels on all cores ({str(error) or type(error).__name__}); they are "
                "compiled one after another, when they are called",
                about="no compile workers",
            )
        with self._changed:
            self._changed.notify_all()


def compile_item(item: _Item, target: Target) -> Answer:
    """Compile an artifact, in a worker; without ``cubin`` in the answer it failed."""
    if item.variant == GENERIC and os.getpriority(os.PRIO_PROCESS, 0) < _LATER_NICENESS:
        os.setpriority(os.PRIO_PROCESS, 0, _LATER_NICENESS)
    try:
        made = compile_candidate(
            spec_named(item.kernel), item.problem, item.config, target, item.variant, timeout_s=_TIMEOUT_S
        )
        return Answer({"key": item.artifact, "artifact": artifact_of(made, item.config)}, made.cubin)
    except Exception:  # noqa: BLE001 (the call that compiles it once more says what is wrong)
        return Answer({"key": item.artifact})
