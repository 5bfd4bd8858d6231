"""Records the problems that a step asks for, by running it on meta tensors: ``tilekern.trace()``.

A running trace answers instead of dispatch: it notes the spec and the sizes that an op asks for, and returns a plan
that has the default config's grid and launches nothing. So a trace has what a job asks for, with any step. Two things
depend on which config wins, and are traced for all of them: the parts of a composite, and the sums of a gradient with
one row for each block of a grid.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tilekern.cache.files import write_whole
from tilekern.errors import InputError, needing
from tilekern.runtime import dispatch
from tilekern.runtime.plans import Plan
from tilekern.runtime.rows import has_rows
from tilekern.spec import Config, KernelSpec, LibraryCall, Problem
from tilekern.spec.targets import Target, resolve

FORMAT = 1
Named = tuple[str, Problem]
_only = threading.Lock()


@contextlib.contextmanager
def trace(path: str | Path | None = None, *, gpu: str = "auto", real: bool = False) -> Iterator[Trace]:
    """Record the problems that the steps inside ask for, so that they can be tuned before a job runs them::

        with tilekern.trace("plan.json", gpu="H200"):
            model(input_ids=ids, labels=ids).loss.backward()

    On meta tensors (``torch.device("meta")``) nothing is launched and no GPU is needed. Code that branches on their
    values gets the answers of an ordinary batch: ``all()`` and comparisons are true, ``any()`` is false.

    Args:
        path: the file for the plan, as JSON with the target and the problems; written at the end.
        gpu: the GPU of the job: ``auto`` (the one here), a name, an arch, a key or figures.
        real: also record what tensors on devices ask for. Their steps run as usual, by the plans in the caches; an op
            without a plan runs torch's operations, and its backward is not traced.

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
    if not real:
        with needing("tilekern.trace"):
            import torch  # noqa: F401 (whose meta tensors it traces)
    with tracing(Trace(target, real=real)) as found:
        yield found
    if path is not None:
        found.write(Path(path))


@contextlib.contextmanager
def tracing(found: Trace) -> Iterator[Trace]:
    """Let a trace answer instead of dispatch.

    Raises:
        InputError: another trace runs.
    """
    if not _only.acquire(blocking=False):
        raise InputError("a trace runs already in this process; end it before another one begins")
    try:
        if found.real:
            dispatch.forget()  # plans in dictionaries would not be seen
        dispatch.trace_by(found)
        with contextlib.nullcontext() if found.real else ordinary_values():
            yield found
    finally:
        dispatch.trace_by(None)
        _only.release()


class Trace:
    """The problems that were asked for so far.

    Args:
        target: the GPU with the defaults and grids to use.
        real: whether tensors on devices are traced too.
        lacking: names of kernels that have no plan, so that the model's own ops run.

    Attributes:
        asked: the problems that the steps asked for, at their buckets, in order.
        others: the problems that they would ask for if other configs won.
        fallbacks: calls that took torch's own operations, by kernel; only of steps on meta tensors.
        patches: the code of functions that replace a model's, with the ops of their patches.
        invariant: the problems that were asked for inside ``tilekern.invariant()`` and whose results are rows of
            tokens, so that their kernels should be of one bit class.
        specs: the specs of all problems, by name.
        stands_for: the type of device whose autocast counts for meta tensors.
        askers: the patches whose code asked for each problem, or else the ops. A plan that dispatch returns again has
            only the first.
    """

    def __init__(self, target: Target, *, real: bool = False, lacking: Collection[str] = ()) -> None:
        self.target, self.real, self._lacking = target, real, lacking
        self.asked: dict[Named, None] = {}
        self.others: dict[Named, None] = {}
        self._needed: set[Named] = set()
        self.fallbacks: Counter[str] = Counter()
        self.invariant: dict[Named, None] = {}
        self._launches: dict[bool, Counter[Named]] = {False: Counter(), True: Counter()}
        self.patches: dict[CodeType, str] = {}
        self.specs: dict[str, KernelSpec] = {}
        self.stands_for = "cuda"
        self.askers: defaultdict[Named, set[str]] = defaultdict(set)
        self._into = self.asked
        self._times = 1
        self._grids: dict[Named, frozenset[int]] = {}
        self._composites: dict[Named, list[Config]] = {}
        self._defaults: dict[Named, tuple[Config, int]] = {}

    @property
    def problems(self) -> list[Named]:
        """All problems, each once."""
        return list(self.asked | self.others)

    @property
    def dispensable(self) -> list[Named]:
        """Problems of ``asked`` for which something else runs unless a record of them was measured."""
        return [named for named in self.asked if named not in self._needed]

    @property
    def launches(self) -> Counter[Named]:
        """Launches of each problem by steps on meta tensors, in the mode that launches it more often.

        A layer that stands for others like it counts once for each of them (:meth:`repeated`).
        """
        return self._launches[False] | self._launches[True]

    def count(self, spec: KernelSpec, problem: Problem, times: int) -> None:
        """Count launches of a problem of real sizes."""
        self._launches[dispatch.is_invariant()][spec.name, spec.bucketed(problem)] += times

    @property
    def times(self) -> int:
        """How often a launch counts; 0 for problems that count only if another config wins."""
        return 0 if self._into is self.others else self._times

    @contextlib.contextmanager
    def repeated(self, times: int) -> Iterator[None]:
        """Count each launch inside, and in its backward, ``times`` times."""
        before, self._times = self._times, times
        try:
            yield
        finally:
            self._times = before

    def plan(self, spec: KernelSpec, problem: Problem | None, *, dispensable: bool = False) -> TracedPlan | None:
        """Note a problem of real sizes and return its traced plan; None if it has none."""
        if problem is None or spec.name in self._lacking:
            return None
        self.note(spec, problem, dispensable=dispensable)
        return TracedPlan(self, spec, problem)

    def see(self, spec: KernelSpec, problem: Problem, plan: Plan | None) -> None:
        """Note a problem with its plan from dispatch, if any."""
        self.note(spec, problem)
        self.take_apart(spec, problem)
        if plan is not None:
            plan.blocks = self.blocks(spec, problem, plan.blocks)

    def take_apart(self, spec: KernelSpec, problem: Problem, only: Config | None = None) -> None:
        """Note the parts of a problem in each composite config, or in one, on inputs that the spec makes."""
        for config in self.composites(spec, problem) if only is None else [only]:
            call, inputs = spec.implement(problem, config), _on_meta(spec, problem)
            assert isinstance(call, LibraryCall)
            with self.aside():
                call.bound(dispatch.plan_for)(*(inputs[name] for name in call.inputs))

    def composites(self, spec: KernelSpec, problem: Problem) -> list[Config]:
        """Return the configs of a problem that are composites."""
        wanted = spec.bucketed(problem)
        if (spec.name, wanted) not in self._composites and not _may_be_composite(spec, wanted):
            self._composites[spec.name, wanted] = []
        if (spec.name, wanted) not in self._composites:
            ways = ((config, spec.implement(problem, config)) for config in spec.space.candidates(wanted, self.target))
            found = [config for config, way in ways if way.composite]
            self._composites[spec.name, wanted] = found
        return self._composites[spec.name, wanted]

    def default(self, spec: KernelSpec, problem: Problem) -> tuple[Config, int]:
        """Return the default config of a problem of real sizes, and its number of blocks; 1 for a library's call."""
        named = spec.name, problem
        if named not in self._defaults:
            config = spec.default(spec.bucketed(problem), self.target)
            implementation, blocks = spec.implement(problem, config), 1
            if implementation.makes_artifact:
                blocks = self.blocks(spec, problem, implementation.grid(problem, self.target.sm_count))
            self._defaults[named] = config, blocks
        return self._defaults[named]

    def blocks(self, spec: KernelSpec, problem: Problem, count: int) -> int:
        """Return the size of a grid; it knows the sizes under other configs if a problem uses it."""
        return Blocks(count, lambda: self.grids(spec, problem))

    def grids(self, spec: KernelSpec, problem: Problem) -> frozenset[int]:
        """Return the sizes of the grid of a problem of real sizes under all configs that are kernels."""
        named = spec.name, problem
        if named not in self._grids:
            ways = (spec.implement(problem, c) for c in spec.space.candidates(spec.bucketed(problem), self.target))
            grids = (way.grid(problem, self.target.sm_count) for way in ways if way.makes_artifact)
            self._grids[named] = frozenset(grids)
        return self._grids[named]

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Note problems that are asked for inside as needed only if another config wins."""
        before, self._into = self._into, self.others
        try:
            yield
        finally:
            self._into = before

    def write(self, path: Path) -> None:
        """Write the plan to a file.

        Raises:
            InputError: nothing was asked for, or the file cannot be written.
        """
        if not self.asked:
            raise InputError(
                f"{path} is not written, since no problem was asked for; patch the model, and run its step on meta "
                "tensors (or on a GPU, with real=True)"
            )
        try:
            plan = document(self.target, "traced step", self.problems, self.launches, self.invariant)
            write_whole(path, json.dumps(plan, indent=1).encode())
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}") from None

    def note(self, spec: KernelSpec, problem: Problem, *, dispensable: bool = False) -> None:
        """Note that a problem of real sizes is asked for, by a call that can do without it if ``dispensable``."""
        named = spec.name, spec.bucketed(problem)
        self._into.setdefault(named)
        if not dispensable:
            self._needed.add(named)
        if dispatch.is_invariant() and has_rows(*named):
            self.invariant.setdefault(named)
        self.specs[spec.name] = spec
        if asker := self._asker():
            self.askers[named].add(asker)
        for name, size in problem.items():
            if isinstance(size, Blocks):
                for other in size.others():
                    self.others.setdefault((spec.name, spec.bucketed(problem.but(**{name: other}))))

    def _asker(self) -> str | None:
        """Return the op of the innermost patch on the stack, else the outermost op, else None."""
        frame: FrameType | None = sys._getframe(1)
        op = None
        while frame is not None:
            if frame.f_code in self.patches:
                return self.patches[frame.f_code]
            op = _op_of(frame) or op
            frame = frame.f_back
        return op


def _may_be_composite(spec: KernelSpec, problem: Problem) -> bool:
    """Return whether an implementation of a problem is a composite; one config of each tells, allowed or not."""
    for space in (spec.space, *spec.space.beside):
        axes = space.axes(problem)
        if not all(axes.values()):
            continue  # without a point
        first = {name: values[0] for name, values in axes.items()}
        configs = [first | {"implementation": name} for name in axes.get("implementation", ())] or [first]
        if any(spec.implement(problem, Config(config)).composite for config in configs):
            return True
    return False


def _on_meta(spec: KernelSpec, problem: Problem) -> dict[str, Any]:
    """Return inputs of a problem without values; they are drawn on the CPU if the spec reads where sequences begin."""
    try:
        return spec.inputs(problem, None, "meta")
    except NotImplementedError:
        import torch

        drawn = spec.inputs(problem, torch.Generator().manual_seed(0), "cpu")
        return {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in drawn.items()}


def _op_of(frame: FrameType) -> str | None:
    """Return the op that a frame's code belongs to, by its declaration (:mod:`tilekern.ops.operation`) or module."""
    if (made := frame.f_globals.get("__op__")) is not None:
        return str(made)
    package, _, module = str(frame.f_globals.get("__name__")).rpartition(".")
    return module if package == "tilekern.ops" else None


class Blocks(int):
    """The number of blocks of a grid; ``others()`` returns the numbers under other configs."""

    others: Callable[[], frozenset[int]]

    def __new__(cls, count: int, others: Callable[[], frozenset[int]]) -> Blocks:
        """Make a count with its others."""
        made = super().__new__(cls, count)
        made.others = others
        return made

    def __neg__(self) -> Blocks:
        """Return the negative, as in a quotient that is rounded up."""
        return Blocks(-int(self), lambda: frozenset(-count for count in self.others()))

    def __floordiv__(self, by: int) -> Blocks:
        """Return a share of the blocks, also under other configs."""
        return Blocks(int(self) // by, lambda: frozenset(count // by for count in self.others()))


class TracedPlan(Plan):
    """The plan of the default config, which launches nothing; for a composite it runs every config for its parts."""

    __slots__ = ("_problem", "_spec", "_times", "_trace")

    def __init__(self, trace: Trace, spec: KernelSpec, problem: Problem) -> None:
        self._trace, self._spec, self._problem = trace, spec, problem
        # A backward is launched after the layer that asked for its plan has ended.
        self._times = trace.times
        (self.config, self.blocks), self.launches = trace.default(spec, problem), 0
        self.grid = (self.blocks,)

    def launch(self, device: int, *arguments: Any) -> None:  # noqa: ARG002
        """Count the launch, and do nothing."""
        self._trace.count(self._spec, self._problem, self._times)

    def run(self, device: int, inputs: tuple[Any, ...], allocate: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:  # noqa: ARG002
        """Return the outputs of the default config without values; run the other composites too."""

        def results(config: Config) -> tuple[Any, ...]:
            implementation = self._spec.implement(self._problem, config)
            if isinstance(implementation, LibraryCall):
                return implementation.bound(dispatch.plan_for)(*inputs)
            return allocate()

        self._trace.count(self._spec, self._problem, self._times)
        with self._trace.aside():
            for config in self._trace.composites(self._spec, self._problem):
                if config != self.config:
                    results(config)
        with self._trace.repeated(self._times):
            return results(self.config)


def document(
    target: Target, model: str, problems: Sequence[Named], launches: Mapping[Named, int] | None = None,
    invariant: Iterable[Named] = (),
) -> dict[str, Any]:  # fmt: skip
    """Return a plan as JSON: the model, the GPU, the problems, how often a step launches each, as far as known, and
    which of them need a kernel of one bit class.
    """
    counts, classed = launches or {}, set(invariant)
    items = [
        {"kernel": kernel, "problem": dict(problem)}
        | ({"launches": counts[kernel, problem]} if (kernel, problem) in counts else {})
        | ({"invariant": True} if (kernel, problem) in classed else {})
        for kernel, problem in problems
    ]
    return {"format": FORMAT, "target": target.describe_whole(), "model": model, "problems": items}


def products_cast(kind: str) -> contextlib.AbstractContextManager[Any]:
    """Have matrix products of meta tensors cast as autocast does on a type of device, while that is on."""
    from tilekern.runtime.ordinary import ProductsCast

    return ProductsCast(kind)


def ordinary_values() -> contextlib.AbstractContextManager[Any]:
    """Have yes-or-no questions about the values of meta tensors answered as for an ordinary batch.

    Models ask whether a mask is all ones, or positions all run on, before they leave the mask out: ``all`` and
    comparisons of single values are so, ``any`` and ``!=`` are not. Any other question raises, as it does on meta.
    """
    from tilekern.runtime.ordinary import OrdinaryValues

    return OrdinaryValues()
