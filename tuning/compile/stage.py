"""The compile stage: compile each distinct artifact of a sweep once, on all cores, in disposable processes.

It may run beside the measure stage (:class:`Compiling`), which gets each problem when all of its candidates are
compiled. Compilers then run at a low priority, so that they do not delay the timing on the GPU.
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
from tilekern.runtime.workers.disposable import has_address_space
from tilekern.runtime.workers.pool import FRONTEND_TIMEOUT_S, MEMORY_BYTES, Answer, Compile, Lost
from tilekern.spec.targets import Target
from tilekern.tuning.compile.machine_code import read_machine_code
from tilekern.tuning.compile.order import Order, turns_of
from tilekern.tuning.compile.pool import compile_in_order
from tilekern.tuning.sweep.candidates import Candidate
from tilekern.tuning.sweep.folder import Sweep
from tilekern.tuning.sweep.plan import Named

# How many workers a core may have.
MOST_JOBS = 4
TIMEOUT_S = 60.0
# The niceness of a compiler beside the measure stage: it gets a tenth of a core that another process wants.
BESIDE_NICENESS = 10
# A compiler that failed after it took this share of its memory limit failed for memory.
_NEAR = 0.75
_SAYS_MEMORY = re.compile(r"out of memory|bad_alloc|MemoryError|cannot allocate memory", re.IGNORECASE)
# The fields of a line with a worker's seconds for a candidate: lower it, compile it, read its machine code.
_PARTS = ("frontend_s", "tileiras_s", "reading_s")
# Compiles candidates like :func:`tilekern.tuning.compile.pool.compile_in_order`.
Pool = Callable[[Order, Compile, int, float, int], Iterator[Answer | Lost]]


@dataclass(frozen=True)
class CompileSummary:
    """The outcome of the compile stage.

    ``open`` counts artifacts that a temporary failure kept from being compiled; the next run tries them again.
    ``tileiras_share`` is the compiler's share of the time that the cores were held, 0 to 1; ``work_share`` is the share
    of all work (:func:`work_s`), including work that a single core would do too. ``reasons`` counts the failures by
    reason.
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
    """Reports each problem when all of its artifacts were tried, so that it can be measured.

    Args:
        tell: called once with each problem.
    """

    def __init__(self, tell: Callable[[Named], None]) -> None:
        self._tell = tell
        self._lacks: dict[Named, set[str]] = {}
        self._tried: set[str] = set()

    def list(self, named: Named, lacking: set[str]) -> None:
        """Add a problem with its missing artifacts."""
        self._lacks[named] = lacking - self._tried
        self._look([named])

    def tried(self, artifact: str) -> None:
        """Note that an artifact was tried, with whatever result."""
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
    """Yield one candidate of each distinct artifact that is missing from the sweep (:func:`settled`).

    Args:
        sweep: the sweep.
        timeout_s: wall seconds that the compiler may take for one.
        named: the problems in the order to list them; by default the plan's.
        listed: called with each problem and its missing keys, before its candidates are yielded.
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
    """Return the keys of the artifacts that need not be compiled.

    Failed ones are tried again with another toolkit, or with more time if they ran out of it; open ones always.
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
    """Return whether today's compiler is the one of a line."""
    if "compiler" in line:
        return line["compiler"] in {backend.compiler() for backend in backends()}
    return bool(line.get("toolkit", {}).get("key") == toolkit_key)


def compile_all(
    sweep: Sweep, jobs: int, timeout_s: float = TIMEOUT_S, progress: Callable[[int, int], None] | None = None,
    memory_bytes: int = MEMORY_BYTES, pool: Pool = compile_in_order, only: Collection[str] | None = None,
    beside: Readiness | None = None, turns: Mapping[Named, int] | None = None, is_over: threading.Event | None = None,
) -> CompileSummary:  # fmt: skip
    """Compile the missing artifacts of the sweep, and journal each result when it comes.

    Args:
        sweep: the sweep.
        jobs: how many candidates to compile at once.
        timeout_s: wall seconds that the compiler may take for one.
        progress: called with the numbers of finished and of all artifacts.
        memory_bytes: address space that the compiler may have for one.
        pool: compiles them, on this host or elsewhere.
        only: keys of the artifacts to compile; by default all.
        beside: told which artifacts were tried, if a measure stage runs at the same time.
        turns: the turn of each problem; by default kernels have turns if a measure stage runs at the same time.
        is_over: set to stop; candidates at work are given up.

    Raises:
        ToolchainMissing: artifacts are missing and no compiler is installed.
    """
    with sweep.running("compile"):
        named = sweep.problems()
        if turns is None:
            turns = turns_of(named) if beside else {}
        listed = beside.list if beside else lambda _named, _lacking: None
        coming = wanted(sweep, timeout_s, sorted(named, key=lambda pair: turns.get(pair, 0)), listed)
        order = Order((item for item in coming if only is None or item.artifact in only), turns, is_over)
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
                line = _line_of(answer, sweep, timeout_s)
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
        return CompileSummary(
            len(sweep.compiled()), finished, reasons.total(), left_open, seconds, *shares, dict(reasons)
        )


def _line_of(answer: Answer | Lost, sweep: Sweep, timeout_s: float) -> dict[str, Any]:
    """Return what the journal says of an answer, whose cubin is stored."""
    if isinstance(answer, Lost):
        line = _line(answer.item) | {"status": "open" if answer.passing else "failed", "reason": answer.reason}
        return line | ({"gave_up_after_s": timeout_s} if answer.timed_out else {})
    return answer.line | ({"sha256": sweep.store(answer.cubin)} if answer.cubin is not None else {})


class Compiling:
    """The compile stage in the background, which yields problems as soon as they can be measured.

    Used as a context, it begins at its entry. At its exit unfinished compilers are given up; finished artifacts are in
    the journal.

    Args:
        compile: :func:`compile_all` with its sweep and all other arguments, except ``beside`` and ``is_over``.
        is_over: set to stop.
    """

    def __init__(self, compile: Callable[..., CompileSummary], is_over: threading.Event | None = None) -> None:
        self._compile, self._is_over = compile, _Stop(is_over)
        # Problems that can be measured, and None at the end.
        self._ready: queue.SimpleQueue[Named | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._summary: CompileSummary | None = None
        self._error: BaseException | None = None
        # When the last artifact was compiled, by ``time.perf_counter``.
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
        """Yield the problems as they become ready, in batches.

        Raises:
            TilekernError: the compile stage raised it; problems that came before are complete.
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
        """Wait for the end of the stage and return its outcome; raises like :meth:`problems`."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._summary is not None, "a stage that is over has a summary or an error"
        return self._summary


class _Stop(threading.Event):
    """Ends one stage; another event, as that of a spent budget, ends it too and is left to the stages behind it."""

    def __init__(self, other: threading.Event | None) -> None:
        super().__init__()
        self._other = other

    def is_set(self) -> bool:
        return super().is_set() or (self._other is not None and self._other.is_set())


def work_s(line: Mapping[str, Any]) -> float:
    """Return the seconds that a worker took for the candidate of a journal's line."""
    return sum(float(line.get(part, 0.0)) for part in _PARTS)


def _line(item: Candidate) -> dict[str, Any]:
    line = {"key": item.artifact, "kernel": item.kernel, "variant": item.variant, "config": dict(item.config)}
    compiler = item.backend.compiler()
    return line | {"compiler": compiler} if compiler else line


def compile_one(item: Candidate, target: Target, timeout_s: float, memory_bytes: int, niceness: int = 0) -> Answer:
    """Compile a candidate, in a worker; an error becomes the candidate's result."""
    if niceness > os.getpriority(os.PRIO_PROCESS, 0):
        os.setpriority(os.PRIO_PROCESS, 0, niceness)  # of this thread and of its compilers
    failed = {**_line(item), "status": "failed"}
    try:
        made = compile_candidate(item.spec, item.problem, item.config, target, item.variant, timeout_s=timeout_s)
        return Answer({**_line(item), "status": "ok", **_facts(made, target)}, made.cubin)
    except CompileTimeout as error:
        return Answer({**failed, "reason": str(error), "gave_up_after_s": timeout_s})
    except Exception as error:  # noqa: BLE001 (a bad cubin or a bug of the front end costs this candidate alone)
        reason = str(error) if isinstance(error, CompileFailed) else f"{type(error).__name__}: {error}"[:300]
        # The most memory that any process took that this one has waited for.
        peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        # A worker that could not have its whole limit does not tell which process took too much.
        if has_address_space(memory_bytes) and (_SAYS_MEMORY.search(reason) or peak_bytes > _NEAR * memory_bytes):
            # The peak stays for the worker's whole life, so it can take no other candidate.
            return Answer({**failed, "reason": f"took {memory_bytes / 2**30:.3g} GiB of memory: {reason}"}, worn=True)
        if isinstance(error, CompileInterrupted | OSError | MemoryError):
            return Answer({**failed, "status": "open", "reason": reason}, doubtful=True)
        return Answer({**failed, "reason": reason})


def compile_unless_same(
    item: Candidate, target: Target, timeout_s: float, memory_bytes: int, known: Mapping[str, str]
) -> Answer:
    """Compile a candidate like :func:`compile_one`, unless it has the same bytecode as an earlier artifact.

    Args:
        item: the candidate.
        target: the GPU.
        timeout_s: wall seconds of the compiler.
        memory_bytes: address space of the compiler.
        known: :attr:`tilekern.cache.Artifact.bytecode` of earlier artifacts by their keys.

    Returns:
        The answer of :func:`compile_one`, or one with the status ``same``.
    """
    bytecode = known.get(item.artifact)
    if bytecode is not None:
        with contextlib.suppress(Exception):  # compiling it reports the error
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


def default_jobs() -> int:
    """Return one worker for each core that this process may use."""
    return len(os.sched_getaffinity(0))


def jobs_of(asked: int | None, cores: int | None = None) -> int:
    """Return how many workers to start: ``asked``, or else one for each core.

    Args:
        asked: the value of ``--jobs``.
        cores: the cores of a cluster; by default those that this process may use.

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
