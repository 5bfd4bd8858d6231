"""Time the steps of a token in a disposable process: a candidate that breaks it costs itself and some seconds."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tilekern.arrays import ArrayPlan, plan
from tilekern.arrays import device as device_numbered
from tilekern.cache import Artifact
from tilekern.inference.rehearsal import Rehearsal, TokenStep
from tilekern.runtime import dispatch
from tilekern.runtime.driver import Device, Graph
from tilekern.runtime.launcher import prebuilt
from tilekern.runtime.plans import plan_of
from tilekern.runtime.workers import disposable
from tilekern.spec import Config, KernelSpec, Problem
from tilekern.tuning.rehearse.descent import StepFailed
from tilekern.tuning.sweep.plan import Named

# Time limits in seconds: to start, with the weights of the largest models, and for a few graphs of a token.
START_S, SAMPLES_S = 300.0, 60.0
# How long to wait for the exit code of a process that died.
_PATIENCE_S = 5.0
_READY, _ANSWER, _FAILED = "ready", "answer", "failed"


@dataclass(frozen=True)
class Kernel:
    """A candidate that a step can launch: its config, and its artifacts by the variants' names."""

    key: str
    config: Config
    artifacts: Mapping[str, Artifact]


Way = Mapping[Named, Kernel]


class Stage:
    """Times one step on a GPU of this host (:class:`tilekern.tuning.rehearse.descent.Meter`).

    As a context, it ends its process.

    Args:
        step: the step.
        cubins: all artifacts that its kernels have, by sha256.
        cache: the cache that serves the problems which no way names.
        device: the GPU, as ``CUDA_VISIBLE_DEVICES`` names it.
    """

    def __init__(self, step: TokenStep, cubins: Mapping[str, bytes], cache: Path, device: str) -> None:
        self._arguments = step, cubins, str(cache), device
        self._process: Any = None
        self._connection: Connection

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def samples(self, ways: Sequence[Way], count: int) -> list[list[float]]:
        """Return times of the step in us; a process that was lost before is replaced.

        Raises:
            StepFailed: the process failed, died or gave no answer.
        """
        found: list[list[float]] = self._asked("samples", ways, count)
        return found

    def launched(self, way: Way) -> Collection[Named]:
        """Return the problems that the step launches in a way; raises as :meth:`samples`."""
        found: Collection[Named] = self._asked("launched", way)
        return found

    def _asked(self, method: str, *arguments: Any) -> Any:
        """Return what a method of :class:`Answers` returns in the process."""
        if self._process is None:
            self._start()
        with contextlib.suppress(OSError):  # one that is dead shows when it is waited for
            self._connection.send((method, *arguments))
        return self._answer(SAMPLES_S)

    def _start(self) -> None:
        context = get_context("spawn")
        self._obituary = disposable.Obituary()
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, *self._arguments), daemon=True)
        self._process.start()
        theirs.close()
        self._answer(START_S)

    def _answer(self, limit_s: float) -> Any:
        if not self._connection.poll(limit_s):
            self._end()
            raise StepFailed(f"no answer within {limit_s:g} s")
        try:
            kind, value = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(_PATIENCE_S)
            process, how = self._process, self._obituary
            self._end()
            raise StepFailed(f"the process died ({how.of(process)})") from None
        if kind == _FAILED:
            self._end()
            raise StepFailed(value)
        return value

    def _end(self) -> None:
        if self._process is not None:
            self._connection.close()
            disposable.end(self._process)
            self._process = None


def serve(connection: Connection, step: TokenStep, cubins: Mapping[str, bytes], cache: str, device: str) -> None:
    """Answer the parent until it hangs up; a failure ends the process, since it may have spoilt the GPU's state."""
    disposable.begin()
    os.environ["TILEKERN_CACHE_DIR"] = cache
    os.environ["CUDA_VISIBLE_DEVICES"] = device
    try:
        answers = Answers(step, cubins)
        connection.send((_READY, None))
        while True:
            try:
                method, *arguments = connection.recv()
            except (EOFError, OSError):  # the parent has hung up, or is gone
                return
            connection.send((_ANSWER, getattr(answers, method)(*arguments)))
    except Exception as error:  # noqa: BLE001 (whatever it is, it ends this process and nothing else)
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
        connection.send((_FAILED, reason))


class Answers:
    """A step on the first GPU, in the ways that are asked for.

    Args:
        step: the step.
        cubins: the artifacts by sha256.
    """

    def __init__(self, step: TokenStep, cubins: Mapping[str, bytes]) -> None:
        dispatch.set_invariant(on=False)  # that mode has other launches, and winners of its own
        self._cubins = cubins
        self._rehearsal = Rehearsal(step, device_numbered(0).stream())
        self._plans: dict[tuple[str, Problem], ArrayPlan] = {}
        # The way that was timed last as the first of several, which the next question is likely to begin with.
        self._kept: tuple[Way, Graph, frozenset[Named]] | None = None

    def samples(self, ways: Sequence[Way], count: int) -> list[list[float]]:
        """Return times of the step in each way, in us, taken in turn."""
        first, _ = self._kept_for(ways[0])
        graphs = [first, *(self._capture(way)[0] for way in ways[1:])]
        return self._rehearsal.samples(graphs, count)

    def launched(self, way: Way) -> frozenset[Named]:
        """Return the problems that the step launches in a way."""
        return self._kept_for(way)[1]

    def _kept_for(self, way: Way) -> tuple[Graph, frozenset[Named]]:
        if self._kept is None or self._kept[0] != way:
            self._kept = None  # so that its arrays go before others come
            self._kept = way, *self._capture(way)
        return self._kept[1:]

    def _capture(self, way: Way) -> tuple[Graph, frozenset[Named]]:
        """Return the graph of a way, and the problems that it launches."""
        asked: set[Named] = set()
        graph = self._rehearsal.capture(functools.partial(self._find, way, asked))
        return graph, frozenset(asked)

    def _find(self, way: Way, asked: set[Named], spec: KernelSpec, *, device: Device, **sizes: Any) -> ArrayPlan:
        """Return the plan of a problem's kernel in a way, or else of its record in the cache; note the problem."""
        problem = spec.problem(**spec.with_flags_off(sizes))
        named = spec.name, spec.bucketed(problem)
        asked.add(named)
        kernel = way.get(named)
        if kernel is None:
            return plan(spec, device=device, **sizes)
        if (kernel.key, problem) not in self._plans:
            implementation = spec.device(problem, kernel.config)
            load = lambda name: self._cubins[kernel.artifacts[name].sha256]  # noqa: E731
            launched = prebuilt(implementation.function, kernel.artifacts, load)
            made = plan_of(launched, implementation, kernel.config, problem, device.target)
            self._plans[kernel.key, problem] = ArrayPlan(spec, problem, device, made)
        return self._plans[kernel.key, problem]
