"""The compile stage: every distinct artifact of a sweep, over all cores, in disposable processes.

It may run beside the measure stage (:class:`Compiling`), which is handed each problem when all of its candidates were
compiled. Compilers then leave the cores to whoever else wants them: what times on the GPU is never kept waiting.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import os
import queue
import re
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from tilekern.compile.cubin import code_of
from tilekern.compile.toolchain import (
    Compiled,
    backends,
    compile_candidate,
    require_toolkit,
    toolkit,
)
from tilekern.errors import CompileFailed, CompileInterrupted, CompileTimeout, InputError
from tilekern.spec.targets import Target
from tilekern.tuning.compile.machine_code import read_machine_code
from tilekern.tuning.compile.order import Order, turns_of
from tilekern.tuning.compile.pool import Answer, Compile, Lost, compile_in_order, start_server
from tilekern.tuning.disposable import has_address_space
from tilekern.tuning.sweep.candidates import Candidate
from tilekern.tuning.sweep.folder import Sweep, during
from tilekern.tuning.sweep.plan import Named

__all__ = [
    "CompileSummary",
    "Compiling",
    "compile_all",
    "compile_one",
    "default_jobs",
    "settled",
    "start_server",
    "wanted",
    "work_s",
]

# How many workers a core may have.
MOST_JOBS = 4
TIMEOUT_S = 60.0
# What Python may take for a candidate on top of the compiler's time.
FRONTEND_TIMEOUT_S = 30.0
# Address space of one compiler; a usual compile takes 0.2 GiB.
MEMORY_BYTES = min(16 << 30, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
# How nice a compiler is beside the measure stage: it gets a tenth of a core that somebody else wants.
BESIDE_NICENESS = 10
# A compiler that came so near to its limit and failed has failed for memory.
_NEAR = 0.75
_SAYS_MEMORY = re.compile(r"out of memory|bad_alloc|MemoryError|cannot allocate memory", re.IGNORECASE)
# What a worker does for a candidate, in seconds of its line: lower it, compile it, and read what the machine code says.
_PARTS = ("frontend_s", "tileiras_s", "reading_s")
# Has candidates compiled, as :func:`tilekern.tuning.compile.pool.compile_in_order` does.
Pool = Callable[[Order, Compile, int, float, int], Iterator[Answer | Lost]]


@dataclass(frozen=True)
class CompileSummary:
    """The outcome of the compile stage.

    ``open`` are those that were kept from being compiled by what passes; the next run tries them again.
    ``tileiras_share`` is the compiler's part of the time that the cores were held, 0 to 1; ``work_share`` that of all
    the work (:func:`work_s`), which is what one core alone would have to do as well. ``reasons`` are those of what
    failed, with how often each occurred.
    """

    distinct: int
    compiled: int
    failed: int
    open: int
    seconds: float
    tileiras_share: float
    work_share: float
    reasons: dict[str, int] = field(default_factory=dict)


class Readiness:
    """Tells which problems may be measured: those all of whose artifacts were tried.

    Args:
        tell: called with each, once.
    """

    def __init__(self, tell: Callable[[Named], None]) -> None:
        self._tell = tell
        self._lacks: dict[Named, set[str]] = {}
        self._tried: set[str] = set()

    def list(self, named: Named, lacking: set[str]) -> None:
        """Know a problem, and the artifacts that were missing of it at first."""
        self._lacks[named] = lacking - self._tried
        self._look([named])

    def tried(self, artifact: str) -> None:
        """Know that an artifact was tried, whatever became of it."""
        self._tried.add(artifact)
        concerned = [named for named, lacking in self._lacks.items() if artifact in lacking]
        for named in concerned:
            self._lacks[named].discard(artifact)
        self._look(concerned)

    def _look(self, concerned: Sequence[Named]) -> None:
        for named in concerned:
            if not self._lacks[named]:
                del self._lacks[named]
                self._tell(named)


def wanted(
    sweep: Sweep, timeout_s: float = TIMEOUT_S, named: Sequence[Named] | None = None,
    listed: Callable[[Named, set[str]], None] = lambda _named, _lacking: None,
) -> Iterator[Candidate]:  # fmt: skip
    """The distinct artifacts missing from the sweep (:func:`settled`), one candidate of each, as they are listed.

    Args:
        sweep: the sweep.
        timeout_s: wall seconds that the compiler may take for one.
        named: the problems in the order to list them; the plan's where None.
        listed: called with each problem and the keys that are missing of it, before its candidates come.
    """
    settled_before = settled(sweep, timeout_s)
    known = set(settled_before)
    for kernel, problem in sweep.problems() if named is None else named:
        items = [item for item in sweep.candidates(kernel, problem) if not item.is_library]
        listed((kernel, problem), {item.artifact for item in items} - settled_before)
        for item in items:
            if item.artifact not in known:
                known.add(item.artifact)
                yield item


def settled(sweep: Sweep, timeout_s: float = TIMEOUT_S) -> set[str]:
    """The keys of the artifacts that need not be compiled.

    Failed ones are tried again by another toolkit, and those that ran out of time also where they are given more; open
    ones always.
    """
    tools = toolkit()
    return {
        key
        for key, line in sweep.compiled().items()
        if line["status"] == "ok"
        or (
            line["status"] == "failed"
            and line.get("gave_up_after_s", math.inf) >= timeout_s
            and (tools is None or _made_by(line, tools.key))
        )
    } - sweep.lost()


def _made_by(line: dict[str, Any], toolkit_key: str) -> bool:
    """Whether the compiler of a line is the one that would compile it now."""
    if "compiler" in line:
        return line["compiler"] in {backend.compiler() for backend in backends()}
    return bool(line.get("toolkit", {}).get("key") == toolkit_key)


@during("compile")
def compile_all(
    sweep: Sweep, jobs: int, timeout_s: float = TIMEOUT_S, progress: Callable[[int, int], None] | None = None,
    memory_bytes: int = MEMORY_BYTES, pool: Pool = compile_in_order, only: Collection[str] | None = None,
    beside: Readiness | None = None, turns: Mapping[Named, int] | None = None, is_over: threading.Event | None = None,
) -> CompileSummary:  # fmt: skip
    """Compile what is missing from the sweep; each result is journalled as it comes.

    Args:
        sweep: the sweep.
        jobs: how many candidates to compile at once.
        timeout_s: wall seconds that the compiler may take for one.
        progress: called with the number of finished ones and of all.
        memory_bytes: address space that the compiler may have for one.
        pool: where they are compiled: on this host, or by an executor's pool elsewhere.
        only: keys of the artifacts to keep to; None means all.
        beside: told which artifacts were tried, for the measure stage that runs at the same time; None where none does.
        turns: the turn of each problem; where None, kernels have turns if a measure stage runs at the same time.
        is_over: set when no more is to be compiled; what is at work is given up.

    Raises:
        ToolchainMissing: artifacts are missing and no compiler is installed.
    """
    order = _order(sweep, timeout_s, only, beside, turns, is_over)
    started = time.perf_counter()
    tileiras_s = busy_s = 0.0
    reasons: Counter[str] = Counter()
    left_open = finished = 0
    if order.take_in(1):
        tools = require_toolkit().describe()
        compiles = functools.partial(
            compile_one, target=sweep.target, timeout_s=timeout_s, memory_bytes=memory_bytes,
            niceness=BESIDE_NICENESS if beside else 0,
        )  # fmt: skip
        answers = pool(order, compiles, max(1, jobs), timeout_s + FRONTEND_TIMEOUT_S, memory_bytes)
        for finished, answer in enumerate(answers, 1):
            line = _lost_line(answer, timeout_s) if isinstance(answer, Lost) else answer.line
            if isinstance(answer, Answer) and answer.cubin is not None:
                line |= {"sha256": sweep.store(answer.cubin)}
            if line["status"] == "failed":
                reasons[line["reason"]] += 1
            left_open += line["status"] == "open"
            tileiras_s += line.get("tileiras_s", 0.0)
            busy_s += work_s(line)
            sweep.note("compiled", line | {"toolkit": tools})
            if beside:
                beside.tried(line["key"])
            if progress:
                progress(finished, len(order))
    seconds = time.perf_counter() - started
    held = seconds * max(1, min(jobs, len(order)))
    shares = tileiras_s / held, busy_s / held
    return CompileSummary(len(sweep.compiled()), finished, reasons.total(), left_open, seconds, *shares, dict(reasons))


def _order(
    sweep: Sweep, timeout_s: float, only: Collection[str] | None, beside: Readiness | None,
    turns: Mapping[Named, int] | None, is_over: threading.Event | None,
) -> Order:  # fmt: skip
    """The candidates to be compiled, as they are listed."""
    named = sweep.problems()
    if turns is None:
        turns = turns_of(named) if beside else {}
    listed = beside.list if beside else lambda _named, _lacking: None
    coming = wanted(sweep, timeout_s, sorted(named, key=lambda pair: turns.get(pair, 0)), listed)
    return Order((item for item in coming if only is None or item.artifact in only), turns, is_over)


class Compiling:
    """The compile stage in the background; problems come out of it as soon as they may be measured.

    Used as a context, it begins at its entry. At its exit the compilers are given up unless they are done; what they
    have made by then is in the journal.

    Args:
        compile: :func:`compile_all` with its sweep and all else but ``beside`` and ``is_over``.
        is_over: set when no more is to be compiled, by this too.
    """

    def __init__(self, compile: Callable[..., CompileSummary], is_over: threading.Event | None = None) -> None:
        self._compile, self._is_over = compile, is_over or threading.Event()
        # Problems that are ready, and None at the end.
        self._ready: queue.SimpleQueue[Named | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._summary: CompileSummary | None = None
        self._error: BaseException | None = None
        # When the last artifact was there, by the clock of ``time.perf_counter``.
        self.ended = 0.0

    def __enter__(self) -> Compiling:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._summary = self._compile(beside=Readiness(self._ready.put), is_over=self._is_over)
        except BaseException as error:  # noqa: BLE001 (raised again where problems are taken)
            self._error = error
        finally:
            self.ended = time.perf_counter()
            self._ready.put(None)

    def problems(self) -> Iterator[list[Named]]:
        """The problems as they become ready, those together that are so at the same time.

        Raises:
            TilekernError: the compile stage raised it; what came out before is whole.
        """
        is_last = False
        while not is_last:
            found = [self._ready.get()]
            while not self._ready.empty():
                found.append(self._ready.get())
            is_last = found[-1] is None
            if batch := [named for named in found if named is not None]:
                yield batch
        self.summary()

    def summary(self) -> CompileSummary:
        """The outcome of the stage, when it is over; raises as :meth:`problems` does."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._summary is not None, "a stage that is over has a summary or an error"
        return self._summary


def work_s(line: Mapping[str, Any]) -> float:
    """The time that a worker took for the candidate of a journal's line, in seconds."""
    return sum(float(line.get(part, 0.0)) for part in _PARTS)


def _line(item: Candidate) -> dict[str, Any]:
    line = {"key": item.artifact, "kernel": item.kernel, "variant": item.variant, "config": dict(item.config)}
    compiler = item.backend.compiler()
    return line | {"compiler": compiler} if compiler else line


def _lost_line(lost: Lost, timeout_s: float) -> dict[str, Any]:
    gave_up = {"gave_up_after_s": timeout_s} if lost.timed_out else {}
    return {**_line(lost.item), "status": "open" if lost.passing else "failed", "reason": lost.reason, **gave_up}


def compile_one(item: Candidate, target: Target, timeout_s: float, memory_bytes: int, niceness: int = 0) -> Answer:
    """Compile a candidate, in a worker: whatever it raises is what became of this candidate."""
    if niceness > os.getpriority(os.PRIO_PROCESS, 0):
        os.setpriority(os.PRIO_PROCESS, 0, niceness)  # of this thread, and of the compilers that it starts
    failed = {**_line(item), "status": "failed"}
    try:
        made = compile_candidate(item.spec, item.problem, item.config, target, item.variant, timeout_s=timeout_s)
        return Answer({**_line(item), "status": "ok", **_facts(made, target)}, made.cubin)
    except CompileTimeout as error:
        return Answer({**failed, "reason": str(error), "gave_up_after_s": timeout_s})
    except Exception as error:  # noqa: BLE001 (a bad cubin or a bug of the front end costs this candidate alone)
        reason = str(error) if isinstance(error, CompileFailed) else f"{type(error).__name__}: {error}"[:300]
        # A worker that could not have its whole limit says nothing of who took too much.
        if has_address_space(memory_bytes) and (_SAYS_MEMORY.search(reason) or _peak_bytes() > _NEAR * memory_bytes):
            # What the worker's children took at most is known for its whole life, so this one is of no more use.
            return Answer({**failed, "reason": f"took {memory_bytes / 2**30:.3g} GiB of memory: {reason}"}, worn=True)
        if isinstance(error, CompileInterrupted | OSError | MemoryError):
            return Answer({**failed, "status": "open", "reason": reason}, doubtful=True)
        return Answer({**failed, "reason": reason})


def compile_unless_same(
    item: Candidate, target: Target, timeout_s: float, memory_bytes: int, known: Mapping[str, str]
) -> Answer:
    """Compile a candidate, in a worker, unless it is lowered to the very bytecode that its artifact was assembled from.

    Args:
        item: the candidate.
        target: the GPU.
        timeout_s: as that of :func:`compile_one`.
        memory_bytes: as that of :func:`compile_one`.
        known: by an artifact's key, :attr:`tilekern.cache.Artifact.bytecode` of an artifact that was compiled before.

    Returns:
        The answer of :func:`compile_one`, or one whose status is ``same``.
    """
    bytecode = known.get(item.artifact)
    if bytecode is not None:
        with contextlib.suppress(Exception):  # compiling it says what is wrong
            made = item.spec.device(item.problem, item.config)
            if item.backend.lowered_digest(made, target, item.variant) == bytecode:
                return Answer({**_line(item), "status": "same"})
    return compile_one(item, target, timeout_s, memory_bytes)


def _facts(made: Compiled, target: Target) -> dict[str, Any]:
    started = time.perf_counter()
    code = code_of(made.cubin, made.symbol)
    facts: dict[str, Any] = {
        "symbol": made.symbol,
        "assumptions": made.assumptions,
        "resources": made.resources().as_dict(),
        "code_sha256": hashlib.sha256(code).hexdigest(),
        "machine_code": read_machine_code(code, target.capability).as_dict(),
    }
    facts |= {name: value for name in ("launch", "bytecode") if (value := getattr(made, name)) is not None}
    seconds = zip(_PARTS, (made.frontend_s, made.tileiras_s, time.perf_counter() - started), strict=True)
    return facts | dict(seconds)


def _peak_bytes() -> int:
    """The most memory that any process took that this one has waited for."""
    return 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss


def default_jobs() -> int:
    """One worker for each core that this process may use."""
    return len(os.sched_getaffinity(0))


def jobs_of(asked: int | None, cores: int | None = None) -> int:
    """How many workers to start: as many as asked for, else one for each core.

    Args:
        asked: what ``--jobs`` says.
        cores: how many cores a cluster has; those that this process may use where None.

    Raises:
        InputError: it is more than :data:`MOST_JOBS` for each core, which would take the memory and gain nothing.
    """
    at_hand = cores or default_jobs()
    if asked is not None and asked > MOST_JOBS * at_hand:
        where = "the cluster has" if cores else "this process may use"
        raise InputError(
            f"--jobs {asked} is too many for the {at_hand} cores that {where}: at most {MOST_JOBS} for each"
        )
    return asked or at_hand
