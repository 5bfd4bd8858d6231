"""Which problems a step asks for, found by running it on meta tensors: ``tilekern.trace()``.

While a trace runs it answers in the place of dispatch: it notes the spec and the sizes that an op asks for, and gives a
plan that has the default config's grid and launches nothing. So what is traced is what a job asks for, whoever wrote
its step. Two things that follow from which config wins are traced for all of them: the parts of a composite, and the
sums of a gradient whose rows are as many as the grid has blocks.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tilekern.cache.files import write_whole
from tilekern.errors import InputError
from tilekern.runtime import dispatch
from tilekern.runtime.plans import Plan
from tilekern.spec import Config, KernelSpec, LibraryCall, Problem
from tilekern.spec.targets import Target, resolve

FORMAT = 1
Named = tuple[str, Problem]
_only = threading.Lock()


@contextlib.contextmanager
def trace(path: str | Path | None = None, *, gpu: str = "auto", real: bool = False) -> Iterator[Trace]:
    """Note which problems the steps inside ask for, so that they can be tuned before a job runs them::

        with tilekern.trace("plan.json", gpu="H200"):
            model(input_ids=ids, labels=ids).loss.backward()

    On meta tensors (``torch.device("meta")``) kernels launch nothing, and no GPU is needed. What code asks of their
    values is answered as for an ordinary batch: ``all()`` and comparisons are true, ``any()`` is not.

    Args:
        path: where the plan is written at the end, as JSON with the target and the problems.
        gpu: the GPU that the job will run on: ``auto`` (the one here), a name, an arch or a key.
        real: note what tensors on devices ask for, too. Their steps run as ever, by the plans that the caches have; an
            op that has none runs torch's operations, and its backward is not traced.

    Yields:
        The trace, whose ``problems`` grow.

    Raises:
        InputError: there is no such GPU, another trace runs, or the plan would be empty or cannot be written.
    """
    target = dispatch.here() if gpu == "auto" else resolve(gpu)
    if target is None:
        raise InputError("trace: this machine has no CUDA GPU; name one, for example gpu='H200'")
    if path is not None and not Path(path).absolute().parent.is_dir():
        raise InputError(f"trace: {Path(path).parent} is not a folder; make it before the step runs")
    with tracing(Trace(target, real=real)) as found:
        yield found
    if path is not None:
        found.write(Path(path))


@contextlib.contextmanager
def tracing(found: Trace) -> Iterator[Trace]:
    """Have a trace answer in the place of dispatch.

    Raises:
        InputError: another one does.
    """
    if not _only.acquire(blocking=False):
        raise InputError("a trace runs already in this process; end it before another one begins")
    try:
        if found.real:
            dispatch.forget()  # a plan that is found in a dictionary is not seen
        dispatch.trace_by(found)
        with contextlib.nullcontext() if found.real else ordinary_values():
            yield found
    finally:
        dispatch.trace_by(None)
        _only.release()


class Trace:
    """The problems that were asked for so far.

    Args:
        target: the GPU whose defaults and grids are taken.
        real: whether tensors on devices are of interest.

    Attributes:
        asked: problems that the steps asked for, at their buckets, in order.
        others: those that they would ask for if other configs won.
        fallbacks: calls that took torch's own operations, by kernel; of steps on meta tensors alone.
        patches: the code of functions that stand in for a model's, with the ops of their patches.
        launches: how often each problem was launched by steps on meta tensors. A layer that stands for others like it
            counts as often as there are of them (:meth:`repeated`).
        specs: the specs of all problems, by name.
        askers: by whom each problem was asked for: the patch whose code called, or else the op that was called. A plan
            that dispatch gives again has the first one alone.
    """

    def __init__(self, target: Target, *, real: bool = False) -> None:
        self.target, self.real = target, real
        self.asked: dict[Named, None] = {}
        self.others: dict[Named, None] = {}
        self.fallbacks: Counter[str] = Counter()
        self.launches: Counter[Named] = Counter()
        self.patches: dict[CodeType, str] = {}
        self.specs: dict[str, KernelSpec] = {}
        self.askers: defaultdict[Named, set[str]] = defaultdict(set)
        self._into = self.asked
        self._times = 1
        self._grids: dict[Named, frozenset[int]] = {}
        self._composites: dict[Named, list[Config]] = {}

    @property
    def problems(self) -> list[Named]:
        """All of them, each once."""
        return list(self.asked | self.others)

    @property
    def times(self) -> int:
        """How many launches one launch stands for; 0 for problems that count only if another config wins."""
        return 0 if self._into is self.others else self._times

    @contextlib.contextmanager
    def repeated(self, times: int) -> Iterator[None]:
        """Count each launch inside, and of the backward of it, so many times."""
        before, self._times = self._times, times
        try:
            yield
        finally:
            self._times = before

    def plan(self, spec: KernelSpec, problem: Problem | None) -> TracedPlan | None:
        """Note a problem of real sizes, and give the plan that stands for its own; None for what is not a problem."""
        if problem is None:
            return None
        self._note(spec, problem)
        return TracedPlan(self, spec, problem)

    def see(self, spec: KernelSpec, problem: Problem, plan: Plan | None) -> None:
        """Note a problem that dispatch has given a plan, or none."""
        self._note(spec, problem)
        self.take_apart(spec, problem)
        if plan is not None:
            plan.blocks = self.blocks(spec, problem, plan.blocks)

    def take_apart(self, spec: KernelSpec, problem: Problem) -> None:
        """Note the parts of a problem in each of its configs that is a composite, on inputs that the spec makes."""
        for config in self.composites(spec, problem):
            call, inputs = _call_of(spec, problem, config), spec.inputs(problem, None, "meta")
            with self.aside():
                call.bound(dispatch.plan_for)(*(inputs[name] for name in call.inputs))

    def composites(self, spec: KernelSpec, problem: Problem) -> list[Config]:
        """The configs of a problem that are composites."""
        wanted = spec.bucketed(problem)
        if (spec.name, wanted) not in self._composites:
            ways = ((config, spec.implement(problem, config)) for config in spec.space.candidates(wanted, self.target))
            found = [config for config, way in ways if isinstance(way, LibraryCall) and way.composite]
            self._composites[spec.name, wanted] = found
        return self._composites[spec.name, wanted]

    def blocks(self, spec: KernelSpec, problem: Problem, count: int) -> int:
        """The size of a grid, which knows those of other configs wherever it is asked for as a size."""
        return Blocks(count, lambda: self._other_grids(spec, problem))

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Problems that are asked for inside count only if another config wins."""
        before, self._into = self._into, self.others
        try:
            yield
        finally:
            self._into = before

    def write(self, path: Path) -> None:
        """Put the plan into a file.

        Raises:
            InputError: nothing was asked for, or the file cannot be written.
        """
        if not self.asked:
            raise InputError(
                f"{path} is not written, since no problem was asked for: patch the model, and run its step on meta "
                "tensors (or on a GPU, with real=True)"
            )
        try:
            plan = document(self.target, "traced step", self.problems, self.launches)
            write_whole(path, json.dumps(plan, indent=1).encode())
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}") from None

    def _note(self, spec: KernelSpec, problem: Problem) -> None:
        named = spec.name, spec.bucketed(problem)
        self._into.setdefault(named)
        self.specs[spec.name] = spec
        if asker := self._asker():
            self.askers[named].add(asker)
        for name, size in problem.items():
            if isinstance(size, Blocks):
                for other in size.others():
                    self.others.setdefault((spec.name, spec.bucketed(problem.but(**{name: other}))))

    def _asker(self) -> str | None:
        """The op of the innermost patch that is being called, else the outermost op; None where neither is."""
        frame: FrameType | None = sys._getframe(1)
        op = None
        while frame is not None:
            if frame.f_code in self.patches:
                return self.patches[frame.f_code]
            op = _op_of(frame) or op
            frame = frame.f_back
        return op

    def _other_grids(self, spec: KernelSpec, problem: Problem) -> frozenset[int]:
        named = spec.name, problem
        if named not in self._grids:
            ways = (spec.implement(problem, c) for c in spec.space.candidates(spec.bucketed(problem), self.target))
            grids = (way.grid(problem, self.target.sm_count) for way in ways if not isinstance(way, LibraryCall))
            self._grids[named] = frozenset(grids)
        return self._grids[named]


def _op_of(frame: FrameType) -> str | None:
    """The op that a frame's code is of: made of its declaration (:mod:`tilekern.ops.operation`), or of its module."""
    if (made := frame.f_globals.get("__op__")) is not None:
        return str(made)
    package, _, module = str(frame.f_globals.get("__name__")).rpartition(".")
    return module if package == "tilekern.ops" else None


class Blocks(int):
    """The number of blocks of a grid; ``others()`` are the numbers that it might be too."""

    others: Callable[[], frozenset[int]]

    def __new__(cls, count: int, others: Callable[[], frozenset[int]]) -> Blocks:
        """A count with its others."""
        made = super().__new__(cls, count)
        made.others = others
        return made

    def __neg__(self) -> Blocks:
        """Less than nothing, on the way to a quotient that is rounded up."""
        return Blocks(-int(self), lambda: frozenset(-count for count in self.others()))

    def __floordiv__(self, by: int) -> Blocks:
        """A share of the blocks, of those that it might be too."""
        return Blocks(int(self) // by, lambda: frozenset(count // by for count in self.others()))


class TracedPlan(Plan):
    """The plan of the default config, which launches nothing; of a composite it runs every config for its parts."""

    __slots__ = ("_problem", "_spec", "_times", "_trace")

    def __init__(self, trace: Trace, spec: KernelSpec, problem: Problem) -> None:
        self._trace, self._spec, self._problem = trace, spec, problem
        # A backward is launched when the layer that asked for its plan is left.
        self._times = trace.times
        self.config, self.launches, self.blocks = spec.default(spec.bucketed(problem), trace.target), 0, 1
        implementation = spec.implement(problem, self.config)
        if not isinstance(implementation, LibraryCall):
            self.blocks = trace.blocks(spec, problem, implementation.grid(problem, trace.target.sm_count))
        self.grid = (self.blocks,)

    def launch(self, device: int, *arguments: Any) -> None:  # noqa: ARG002
        """Count the launch, and do nothing."""
        self._trace.launches[self._spec.name, self._spec.bucketed(self._problem)] += self._times

    def run(self, device: int, inputs: tuple[Any, ...], allocate: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:  # noqa: ARG002
        """The outputs for the default config, of which nothing is computed; the other composites run too."""

        def results(config: Config) -> tuple[Any, ...]:
            is_library = self._spec.is_library(self._problem, config)
            if not is_library:
                return allocate()
            return _call_of(self._spec, self._problem, config).bound(dispatch.plan_for)(*inputs)

        self._trace.launches[self._spec.name, self._spec.bucketed(self._problem)] += self._times
        with self._trace.aside():
            for config in self._trace.composites(self._spec, self._problem):
                if config != self.config:
                    results(config)
        with self._trace.repeated(self._times):
            return results(self.config)


def _call_of(spec: KernelSpec, problem: Problem, config: Config) -> LibraryCall:
    way = spec.implement(problem, config)
    assert isinstance(way, LibraryCall)
    return way


def document(
    target: Target, model: str, problems: Sequence[Named], launches: Mapping[Named, int] | None = None
) -> dict[str, Any]:  # fmt: skip
    """Return a plan as JSON: the model, the GPU, the problems, and how often a step launches each, as far as known."""
    counts = launches or {}
    items = [
        {"kernel": kernel, "problem": dict(problem)}
        | ({"launches": counts[kernel, problem]} if (kernel, problem) in counts else {})
        for kernel, problem in problems
    ]
    return {"format": FORMAT, "target": target.describe_whole(), "model": model, "problems": items}


def ordinary_values() -> contextlib.AbstractContextManager[Any]:
    """Have yes-or-no questions about the values of meta tensors answered as for an ordinary batch.

    Models ask whether a mask is all ones, or positions all run on, before they leave the mask out: ``all`` and
    comparisons of single values are so, ``any`` and ``!=`` are not. Any other question raises, as it does on meta.
    """
    from tilekern.runtime.ordinary import OrdinaryValues

    return OrdinaryValues()
