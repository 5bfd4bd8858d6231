"""The compile stage: every distinct artifact of a sweep, over all cores, in disposable processes."""

from __future__ import annotations

import hashlib
import math
import os
import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import forkserver, get_context
from typing import Any

from tilekern.cubin import code_of, read_resources
from tilekern.errors import CompileFailed, CompileTimeout
from tilekern.targets import Target
from tilekern.toolchain import compile_candidate, require_toolkit
from tuning.sweep import Candidate, Sweep, candidates

TIMEOUT_S = 60.0
# A group is one task of the pool. Large ones lower less often, small ones leave no core idle at the end.
MOST_IN_GROUP = 8


@dataclass(frozen=True)
class CompileSummary:
    """What the compile stage did.

    ``tileiras_share`` is the compiler's part of the time that the cores were held, 0 to 1.
    """

    distinct: int
    compiled: int
    failed: int
    seconds: float
    tileiras_share: float


def wanted(sweep: Sweep, timeout_s: float = TIMEOUT_S) -> dict[str, Candidate]:
    """One candidate for each distinct artifact that has not been compiled yet, nor given up after as much time."""
    done = {key for key, line in sweep.compiled().items() if line.get("gave_up_after_s", math.inf) >= timeout_s}
    found: dict[str, Candidate] = {}
    target = sweep.target
    for kernel, problem in sweep.problems():
        for item in candidates(kernel, problem, target):
            if item.artifact not in done and not item.is_library:
                found.setdefault(item.artifact, item)
    return found


def compile_all(
    sweep: Sweep, jobs: int, timeout_s: float = TIMEOUT_S, progress: Callable[[int, int], None] | None = None
) -> CompileSummary:
    """Compile what the sweep lacks; each result is journalled as it comes.

    Raises:
        ToolchainMissing: artifacts are lacking and no compiler is installed.
    """
    todo = list(wanted(sweep, timeout_s).values())
    started = time.perf_counter()
    compiler_s = failed = 0.0
    if todo:
        tools = require_toolkit().describe()
        for finished, (line, cubin) in enumerate(_results(todo, sweep.target, jobs, timeout_s), 1):
            if cubin is not None:
                line |= {"sha256": sweep.store(cubin), "toolkit": tools}
            failed += line["status"] == "failed"
            compiler_s += line.get("tileiras_s", 0.0)
            sweep.note("compiled", line)
            if progress:
                progress(finished, len(todo))
    seconds = time.perf_counter() - started
    share = compiler_s / (seconds * min(jobs, max(1, len(todo)))) if todo else 0.0
    return CompileSummary(len(sweep.compiled()), len(todo), int(failed), seconds, share)


Result = tuple[dict[str, Any], bytes | None]


def _groups(todo: list[Candidate], jobs: int) -> list[list[Candidate]]:
    """Candidates that differ in hints alone, together: a worker lowers their device function once."""
    most = max(1, min(MOST_IN_GROUP, len(todo) // (8 * jobs)))
    groups: dict[Any, list[Candidate]] = {}
    for item in todo:
        implementation = item.spec.device(item.problem, item.config)
        key = (implementation.function, implementation.constants, implementation.parameters, item.variant)
        groups.setdefault(key, []).append(item)
    split = [group[at : at + most] for group in groups.values() for at in range(0, len(group), most)]
    # Long compiles first, so that no core waits for the last one: large tiles unroll into much code.
    return sorted(split, key=lambda group: -_tile_elements(group[0]))


def _tile_elements(item: Candidate) -> int:
    return math.prod(
        value for name, value in item.config.items() if name.startswith("tile_") and isinstance(value, int)
    )


def _results(todo: list[Candidate], target: Target, jobs: int, timeout_s: float) -> Iterator[Result]:
    """Results as they finish. A worker that dies takes its pool along: what was in flight is tried again, alone."""
    waiting, suspects = list(reversed(_groups(todo, jobs))), []
    while waiting:
        with _pool(jobs) as pool:
            running: dict[Future[list[Result]], list[Candidate]] = {}
            try:
                while waiting or running:
                    while waiting and len(running) < 2 * jobs:
                        group = waiting.pop()
                        running[pool.submit(_compile_group, group, target, timeout_s)] = group
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        results = future.result()
                        del running[future]
                        yield from results
            except BrokenProcessPool:
                suspects += [item for group in running.values() for item in group]
    for item in suspects:
        with _pool(1) as pool:
            try:
                yield pool.submit(_compile, item, target, timeout_s).result()
            except BrokenProcessPool:
                yield {"key": item.artifact, "status": "failed", "reason": "the compile worker died"}, None


def start_server() -> None:
    """Start the process that workers are forked from, unless it runs; it loads its modules while others work."""
    get_context("forkserver").set_forkserver_preload(["tuning.forked"])
    forkserver.ensure_running()


def _pool(jobs: int) -> ProcessPoolExecutor:
    start_server()
    return ProcessPoolExecutor(jobs, mp_context=get_context("forkserver"), initializer=_start_worker)


def _start_worker() -> None:
    # Leaving Ctrl-C to the parent keeps the workers' tracebacks off the terminal.
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _compile_group(group: list[Candidate], target: Target, timeout_s: float) -> list[Result]:
    return [_compile(item, target, timeout_s) for item in group]


def _compile(item: Candidate, target: Target, timeout_s: float) -> Result:
    line: dict[str, Any] = {"key": item.artifact, "kernel": item.kernel, "variant": item.variant}
    line["config"] = dict(item.config)
    try:
        made = compile_candidate(item.spec, item.problem, item.config, target, item.variant, timeout_s=timeout_s)
    except CompileTimeout as error:
        return {**line, "status": "failed", "reason": str(error), "gave_up_after_s": timeout_s}, None
    except CompileFailed as error:
        return {**line, "status": "failed", "reason": str(error)}, None
    line |= {
        "status": "ok",
        "symbol": made.symbol,
        "assumptions": made.assumptions,
        "resources": read_resources(made.cubin, made.symbol).as_dict(),
        "code_sha256": hashlib.sha256(code_of(made.cubin, made.symbol)).hexdigest(),
        "frontend_s": made.frontend_s,
        "tileiras_s": made.tileiras_s,
    }
    return line, made.cubin


def default_jobs() -> int:
    """One worker for each core that this process may use."""
    return len(os.sched_getaffinity(0))
