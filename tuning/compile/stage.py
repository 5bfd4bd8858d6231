"""The compile stage: every distinct artifact of a sweep, over all cores, in disposable processes."""

from __future__ import annotations

import functools
import hashlib
import math
import os
import re
import resource
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tilekern.cubin import code_of, read_resources
from tilekern.errors import CompileFailed, CompileTimeout, InputError
from tilekern.targets import Target
from tilekern.toolchain import Compiled, compile_candidate, require_toolkit, toolkit
from tuning.compile.machine_code import read_machine_code
from tuning.compile.order import Order
from tuning.compile.pool import Answer, Compile, Lost, compile_in_order, start_server
from tuning.sweep.candidates import Candidate
from tuning.sweep.folder import Sweep, during

__all__ = ["CompileSummary", "compile_all", "default_jobs", "settled", "start_server", "wanted", "work_s"]

# How many workers a core may have.
MOST_JOBS = 4
TIMEOUT_S = 60.0
# What Python may take for a candidate on top of the compiler's time.
FRONTEND_TIMEOUT_S = 30.0
# Address space of one compiler; a usual compile takes 0.2 GiB.
MEMORY_BYTES = min(16 << 30, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
# A compiler that came so near to its limit and failed has failed for memory.
_NEAR = 0.75
_SAYS_MEMORY = re.compile(r"out of memory|bad_alloc|MemoryError|cannot allocate memory", re.IGNORECASE)
_KILLED = re.compile(r"\bsignal 9\b")
# What a worker does for a candidate, in seconds of its line: lower it, compile it, and read what the machine code says.
_PARTS = ("frontend_s", "tileiras_s", "reading_s")
# Has candidates compiled, as :func:`tuning.compile.pool.compile_in_order` does.
Pool = Callable[[Order, Compile, int, float, int], Iterator[Answer | Lost]]


@dataclass(frozen=True)
class CompileSummary:
    """What the compile stage did.

    ``tileiras_share`` is the compiler's part of the time that the cores were held, 0 to 1; ``work_share`` that of all
    the work (:func:`work_s`), which is what one core alone would have to do as well.
    """

    distinct: int
    compiled: int
    failed: int
    seconds: float
    tileiras_share: float
    work_share: float


def wanted(sweep: Sweep, timeout_s: float = TIMEOUT_S) -> Iterator[Candidate]:
    """The distinct artifacts that the sweep lacks (:func:`settled`), one candidate of each, as they are listed."""
    known = settled(sweep, timeout_s)
    for kernel, problem in sweep.problems():
        for item in sweep.candidates(kernel, problem):
            if item.artifact not in known and not item.is_library:
                known.add(item.artifact)
                yield item


def settled(sweep: Sweep, timeout_s: float = TIMEOUT_S) -> set[str]:
    """The keys of the artifacts that need not be compiled.

    What failed is tried again by another toolkit, and what ran out of time also where it is given more.
    """
    tools = toolkit()
    return {
        key
        for key, line in sweep.compiled().items()
        if line["status"] == "ok"
        or (line.get("gave_up_after_s", math.inf) >= timeout_s and (tools is None or _made_by(line, tools.key)))
    } - sweep.lost()


def _made_by(line: dict[str, Any], toolkit_key: str) -> bool:
    return bool(line.get("toolkit", {}).get("key") == toolkit_key)


@during("compile")
def compile_all(
    sweep: Sweep, jobs: int, timeout_s: float = TIMEOUT_S, progress: Callable[[int, int], None] | None = None,
    memory_bytes: int = MEMORY_BYTES, pool: Pool = compile_in_order, only: Collection[str] | None = None,
) -> CompileSummary:  # fmt: skip
    """Compile what the sweep lacks; each result is journalled as it comes.

    Args:
        sweep: the sweep.
        jobs: how many candidates to compile at once.
        timeout_s: wall seconds that the compiler may take for one.
        progress: called with the number of finished ones and of all.
        memory_bytes: address space that the compiler may have for one.
        pool: where they are compiled: on this host, or by an executor's pool elsewhere.
        only: keys of the artifacts to keep to; None means all.

    Raises:
        ToolchainMissing: artifacts are lacking and no compiler is installed.
    """
    order = Order(item for item in wanted(sweep, timeout_s) if only is None or item.artifact in only)
    started = time.perf_counter()
    tileiras_s = busy_s = 0.0
    failed = 0
    if order.take_in(1):
        tools = require_toolkit().describe()
        compile_one = functools.partial(_compile, target=sweep.target, timeout_s=timeout_s, memory_bytes=memory_bytes)
        answers = pool(order, compile_one, max(1, jobs), timeout_s + FRONTEND_TIMEOUT_S, memory_bytes)
        for finished, answer in enumerate(answers, 1):
            line = _lost_line(answer, timeout_s) if isinstance(answer, Lost) else answer.line
            if isinstance(answer, Answer) and answer.cubin is not None:
                line |= {"sha256": sweep.store(answer.cubin)}
            failed += line["status"] == "failed"
            tileiras_s += line.get("tileiras_s", 0.0)
            busy_s += work_s(line)
            sweep.note("compiled", line | {"toolkit": tools})
            if progress:
                progress(finished, len(order))
    seconds = time.perf_counter() - started
    held = seconds * max(1, min(jobs, len(order)))
    return CompileSummary(len(sweep.compiled()), len(order), failed, seconds, tileiras_s / held, busy_s / held)


def work_s(line: Mapping[str, Any]) -> float:
    """What a worker took for the candidate of a line of the journal, in seconds."""
    return sum(float(line.get(part, 0.0)) for part in _PARTS)


def _line(item: Candidate) -> dict[str, Any]:
    return {"key": item.artifact, "kernel": item.kernel, "variant": item.variant, "config": dict(item.config)}


def _lost_line(lost: Lost, timeout_s: float) -> dict[str, Any]:
    gave_up = {"gave_up_after_s": timeout_s} if lost.timed_out else {}
    return {**_line(lost.item), "status": "failed", "reason": lost.reason, **gave_up}


def _compile(item: Candidate, target: Target, timeout_s: float, memory_bytes: int) -> Answer:
    """Compile a candidate, in a worker: whatever it raises is what became of this candidate."""
    failed = {**_line(item), "status": "failed"}
    try:
        made = compile_candidate(item.spec, item.problem, item.config, target, item.variant, timeout_s=timeout_s)
        return Answer({**_line(item), "status": "ok", **_facts(made, target)}, made.cubin)
    except CompileTimeout as error:
        return Answer({**failed, "reason": str(error), "gave_up_after_s": timeout_s})
    except Exception as error:  # noqa: BLE001 (a bad cubin or a bug of the front end costs this candidate alone)
        reason = str(error) if isinstance(error, CompileFailed) else f"{type(error).__name__}: {error}"[:300]
        if _SAYS_MEMORY.search(reason) or _peak_bytes() > _NEAR * memory_bytes:
            # What the worker's children took at most is known for its whole life, so this one is of no more use.
            return Answer({**failed, "reason": f"took {memory_bytes / 2**30:.3g} GiB of memory: {reason}"}, worn=True)
        return Answer({**failed, "reason": reason}, doubtful=bool(_KILLED.search(reason)))


def _facts(made: Compiled, target: Target) -> dict[str, Any]:
    started = time.perf_counter()
    code = code_of(made.cubin, made.symbol)
    facts = {
        "symbol": made.symbol,
        "assumptions": made.assumptions,
        "resources": read_resources(made.cubin, made.symbol).as_dict(),
        "code_sha256": hashlib.sha256(code).hexdigest(),
        "machine_code": read_machine_code(code, target.capability).as_dict(),
    }
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
