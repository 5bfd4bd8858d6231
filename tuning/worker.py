"""What runs in a disposable measuring process: check candidates, then time them in interleaved rounds."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tilekern.launcher import PrebuiltKernel, Variant, launch, may_depend
from tilekern.spec import LibraryCall, Problem
from tilekern.targets import Target
from tuning.sweep import Candidate, Sweep
from tuning.timing import Stopwatch, Timing
from tuning.verifying import Check, compare, expected_results, launch_arguments, make_outputs, odd_problem

# (rounds, keep those within this factor of the leader): a race by elimination; the default config always stays.
STAGES = ((5, 1.4), (10, 1.12), (30, 1.04), (40, 1.0))
# No round of the later stages begins after a race has taken this long: a step of a whole loss takes tens of
# milliseconds, and its spread is as small after fifteen rounds as after a hundred.
LONGEST_RACE_S = 4.0
SEED = 20251


@dataclass(frozen=True)
class Entrant:
    """A candidate with its compiled artifact's journal line."""

    candidate: Candidate
    compiled: dict[str, Any]


class Bench:
    """Runs the candidates of one problem on the GPU at hand."""

    def __init__(self, sweep: Sweep, target: Target, kernel: str, problem: Problem) -> None:
        import torch

        self._torch, self._sweep, self._target, self._problem = torch, sweep, target, problem
        from tilekern.kernels import spec_named

        self._spec = spec_named(kernel)
        self._odd = odd_problem(self._spec, problem)
        self._generator = torch.Generator(device="cuda").manual_seed(SEED)
        self._odd_inputs = self._spec.inputs(self._odd, self._generator, "cuda")
        self._expected = expected_results(self._spec, self._odd, self._odd_inputs)
        self._inputs: dict[str, Any] | None = None
        self._outputs: dict[Any, Any] = {}

    def kernel(self, entrant: Entrant) -> Any:
        """The launchable kernel of an entrant; None where a library runs it."""
        item, line = entrant.candidate, entrant.compiled
        if item.is_library:
            return None
        function = self._spec.device(item.problem, item.config).function
        variant = Variant(item.variant, line["symbol"], line["assumptions"], lambda: self._sweep.cubin(line["sha256"]))
        return PrebuiltKernel(function, [variant])

    def check(self, entrant: Entrant) -> Check:
        """Run an entrant twice on odd sizes with poisoned outputs: right, and the same bits both times.

        A problem with a flag ``deterministic`` that is off asks for no such promise.
        """
        torch = self._torch
        kernel = self.kernel(entrant)
        first = self._run(kernel, entrant, self._odd, self._odd_inputs)
        check = compare(self._spec, self._odd, first, self._expected)
        if not check.passed:
            return check
        if not self._problem.get("deterministic", True):
            return check
        again = self._run(kernel, entrant, self._odd, self._odd_inputs)
        if any(not torch.equal(first[name], again[name]) for name in first):
            return Check(False, check.relative_error, check.elementwise_error, "two runs on the same inputs differ")
        return check

    def _shared_outputs(self, blocks: int) -> dict[str, Any]:
        """Outputs of the full size, the same for all entrants: each writes all of them."""
        found = {}
        for name, kind in self._spec.outputs(self._problem, blocks).items():
            if (name, kind) not in self._outputs:
                shape, dtype = kind
                self._outputs[name, kind] = self._torch.empty(shape, dtype=getattr(self._torch, dtype), device="cuda")
            found[name] = self._outputs[name, kind]
        return found

    def _run(self, kernel: Any, entrant: Entrant, problem: Problem, inputs: dict[str, Any]) -> dict[str, Any]:
        blocks = self._blocks(entrant, problem)
        outputs = make_outputs(self._spec, problem, blocks, "cuda") if blocks else {}
        run = self._launch(kernel, entrant, problem, inputs, outputs)
        given = run()
        self._torch.cuda.synchronize()
        return outputs if given is None else dict(zip(self._spec.outputs(problem, 1), given, strict=True))

    def _blocks(self, entrant: Entrant, problem: Problem) -> int:
        """The grid of an entrant; 0 where a library runs it."""
        if entrant.candidate.is_library:
            return 0
        return self._spec.device(problem, entrant.candidate.config).grid(problem, self._target.sm_count)

    def _launch(
        self, kernel: Any, entrant: Entrant, problem: Problem, inputs: dict[str, Any], outputs: dict[str, Any]
    ) -> Any:
        """A function that launches and fills the outputs; a library's gives outputs of its own."""
        implementation = self._spec.implement(problem, entrant.candidate.config)
        if isinstance(implementation, LibraryCall):
            from tilekern.dispatch import plan_for

            call, given = implementation.bound(plan_for), [inputs[name] for name in implementation.inputs]
            return lambda: call(*given)
        blocks = implementation.grid(problem, self._target.sm_count)
        arguments = launch_arguments(implementation, inputs, outputs)
        dependent = may_depend(implementation, self._target)
        return lambda: launch(_stream(), (blocks,), kernel, arguments, dependent=dependent)

    def prepare(self, entrant: Entrant) -> Any:
        """A function that launches the entrant at full size."""
        if self._inputs is None:
            self._inputs = self._spec.inputs(self._problem, self._generator, "cuda")
        blocks = self._blocks(entrant, self._problem)
        outputs = self._shared_outputs(blocks) if blocks else {}
        return self._launch(self.kernel(entrant), entrant, self._problem, self._inputs, outputs)

    def copy(self) -> Any:
        """A function that copies as many bytes as the problem must move, half read and half written."""
        torch = self._torch
        size = max(1, self._spec.bytes_moved(self._problem) // 2)
        source = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda")
        sink = torch.empty_like(source)
        return lambda: sink.copy_(source)


def _stream() -> int:
    import torch

    return int(torch.cuda.current_stream().cuda_stream)


def race(watch: Stopwatch, launches: dict[str, Any], stay: Sequence[str]) -> dict[str, Timing]:
    """Time launches in interleaved rounds and drop those that cannot win; a timing for every entrant."""
    deadline = time.perf_counter() + LONGEST_RACE_S
    samples: dict[str, list[float]] = {name: [] for name in launches}
    alive = list(launches)
    watch.round([launches[name] for name in alive] * 2)
    for stage, (rounds, factor) in enumerate(STAGES):
        for _ in range(rounds):
            if stage > 1 and time.perf_counter() > deadline:
                break
            for name, time_us in zip(alive, watch.round([launches[name] for name in alive]), strict=True):
                samples[name].append(time_us)
        medians = {name: statistics.median(samples[name]) for name in alive}
        best = min(value for name, value in medians.items() if name != "copy")
        alive = [name for name in alive if medians[name] <= best * factor or name in stay]
    return {name: Timing.of(times) for name, times in samples.items()}


def serve(connection: Connection, folder: str, target: Target) -> None:
    """Answer the parent's tasks until it hangs up; each step is announced before it is taken."""
    watch: Stopwatch | None = None
    sweep = Sweep(Path(folder))
    os.environ["TILEKERN_CACHE_DIR"] = str(sweep.cache)
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        if watch is None:
            connection.send(("begin", "start of CUDA"))
            watch = Stopwatch(2 * target.l2_bytes)
            watch.warm_clocks()
        _measure(connection, watch, sweep, target, *task)
        connection.send(("done", None))


def _measure(
    connection: Connection, watch: Stopwatch, sweep: Sweep, target: Target, kernel: str, problem: Problem,
    unchecked: list[Entrant], checked: list[Entrant], stay: list[str],
) -> None:  # fmt: skip
    connection.send(("begin", "inputs"))
    bench = Bench(sweep, target, kernel, problem)
    racing = list(checked)
    for entrant in unchecked:
        connection.send(("begin", entrant.candidate.key))
        check = _checked(bench, entrant)
        connection.send(("checked", (entrant.candidate.key, check)))
        if check.passed and entrant.candidate.variant == "aligned":
            racing.append(entrant)
    if not racing:
        return
    launches = {}
    for entrant in racing:
        connection.send(("begin", entrant.candidate.key))
        launches[entrant.candidate.key] = bench.prepare(entrant)
        watch.round([launches[entrant.candidate.key]])
    launches["copy"] = bench.copy()
    connection.send(("begin", "race"))
    connection.send(("timed", race(watch, launches, ["copy", *stay])))


def _checked(bench: Bench, entrant: Entrant) -> Check:
    import torch

    try:
        return bench.check(entrant)
    except torch.AcceleratorError:
        raise  # the CUDA context is gone: this process must go too
    except Exception as error:  # noqa: BLE001 (what a launch can raise is open; the reason goes into the journal)
        return Check(False, float("inf"), float("inf"), f"{type(error).__name__}: {error}".splitlines()[0][:300])
