"""Measure GPU time and memory of each op's forward, backward and both, for tilekern, its peers and a copy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.cases import Case, Tensors
from benchmarks.clock import Entrant, Race
from benchmarks.environment import facts, require_gpu
from benchmarks.providers import OURS, Provider, load, one_line
from benchmarks.results import Results, Row
from benchmarks.served import doubts
from benchmarks.sources import kernels_used, with_sources
from benchmarks.suites import sweep_cases
from tilekern.errors import InputError
from tilekern.spec import TOLERANCES
from tilekern.tuning.measure.timing import Timing
from tilekern.tuning.plan.configs import config_named
from tilekern.tuning.verify.check import errors, within

COPY, PRODUCTS = "copy", "products alone"
MIB = 1 << 20
Keep = Callable[[str, Results], None]


@dataclass(frozen=True)
class Effort:
    """The effort of a measurement: samples of each figure, and the seconds after which fewer are taken."""

    samples: int = 80
    seconds: float = 6.0


def measure(cases: Sequence[Case], names: Sequence[str], effort: Effort, keep: Keep) -> Results:
    """Time the named providers on all cases; ``keep`` gets each case and the results before it.

    Raises:
        InputError: there is no GPU, or no such provider.
        AssertionError: tilekern is wrong.
    """
    return _measure([(case.label, case) for case in cases], "kernels", names, effort, keep)


def sweep(
    model: str, tokens: Sequence[int], ops: Sequence[str], names: Sequence[str], effort: Effort, keep: Keep
) -> Results:  # fmt: skip
    """Time the providers on a model's ops over token counts; a case's name is its op and count.

    Raises:
        InputError: there is no GPU, or no such provider.
        AssertionError: tilekern is wrong.
    """
    name, config = config_named(model)
    named = [(f"{case.op} {count} tokens", case) for count, case in sweep_cases(config, tokens, ops)]
    return _measure(named, "kernels_sweep", names, effort, keep, model=name)


def write_plan(path: Path, cases: Sequence[Case], gpu: str) -> list[str]:
    """Write the plan of the problems that tilekern needs in these cases; return notes on cases that are not in it.

    Raises:
        InputError: the GPU is unknown, or no problem is needed.
    """
    ours = load([OURS], [])[0]
    return plan_of(path, [(case, ours) for case in cases], gpu)


def plan_of(path: Path, calls: Sequence[tuple[Case, Provider]], gpu: str) -> list[str]:
    """Do the same for pairs of a case and tilekern's calls for it."""
    from tilekern import trace

    notes: list[str] = []
    with trace(path, gpu=gpu) as found:
        for case, ours in calls:
            if case.op not in ours.calls:
                notes.append(f"{case.label} is not in the plan: tilekern has no {case.op}")
                continue
            before = found.fallbacks.total()
            mine = clone(case.tensors("meta"))
            backward(mine, forward(case, mine, ours))
            if found.fallbacks.total() > before:
                notes.append(f"{case.label}: torch's own operations run")
    return notes


def _measure(
    cases: Sequence[tuple[str, Case]], benchmark: str, names: Sequence[str], effort: Effort, keep: Keep, **more: str
) -> Results:  # fmt: skip
    target = require_gpu()
    results = Results(facts() | more)
    notes = results.run["notes"]
    providers = load(names, notes)
    race = Race(2 * target.l2_bytes)
    race.warm_clocks()
    for name, case in cases:
        keep(name, results)
        rows = _measure_case(race, case, providers, effort, notes)
        results.rows.extend(replace(row, benchmark=benchmark, case=name) for row in rows)
    notes.extend(doubts())
    return results


def _measure_case(race: Race, case: Case, providers: Sequence[Provider], effort: Effort, notes: list[str]) -> list[Row]:
    import torch

    torch._dynamo.reset()  # torch.compile recompiles a function for at most eight sizes
    tensors = case.tensors("cuda")
    with kernels_used() as used:
        right = right_ones(case, tensors, providers, notes)
        torch.cuda.empty_cache()  # of the references
        rows = timed_rows(race, case, tensors, right, effort, notes)
        rows.extend(memory_row(case, tensors, provider) for provider in right)
    torch.cuda.empty_cache()
    return with_sources(rows, used)


def timed_rows(
    race: Race, case: Case, tensors: Tensors, right: Sequence[Provider], effort: Effort, notes: list[str]
) -> list[Row]:  # fmt: skip
    """Return the times of these providers, which take turns with a copy or with the products alone."""
    rows: list[Row] = []
    for metric in case.metrics:
        entrants = {provider.name: entrant(case, tensors, provider, metric) for provider in right}
        beside = {} if case.flops_of(metric) else {COPY: copy(case.bytes_of(metric))}
        if case.products and metric == "forward_backward":
            beside[PRODUCTS] = Entrant(functools.partial(case.products, tensors))
        timings = race.run({**entrants, **beside}, effort.samples, effort.seconds)
        for name, one in entrants.items():
            if name not in timings:
                notes.append(f"{case.label} {metric}: {name} left out, too few samples")
            elif one.waits:
                notes.append(f"{case.label} {metric}: {name} waits for the GPU; its time holds the host's work")
        rows.extend(rows_of(case, metric, timings))
        del entrants
    return rows


def rows_of(case: Case, metric: str, timings: dict[str, Timing]) -> list[Row]:
    """Return rows of the times and of rates: bytes or operations a second, and a share of the copy's speed."""
    rows = []
    for name, timing in timings.items():
        time_us, spread = timing.median_us, timing.spread_us / timing.median_us
        rows.append(Row("kernels", case.label, name, metric, round(time_us, 3), "us", round(timing.spread_us, 3)))
        figures = {}
        if PRODUCTS in timings and name != PRODUCTS:
            figures["products_time", "1"] = time_us / timings[PRODUCTS].median_us
        if flops := case.flops_of(metric):
            figures[f"{metric}_rate", "TFLOP/s"] = flops / time_us / 1e6
        else:
            figures[f"{metric}_rate", "TB/s"] = case.bytes_of(metric) / time_us / 1e6
            if name != COPY:
                figures[f"{metric}_share_of_copy", "1"] = timings[COPY].median_us / time_us
        rows.extend(
            Row("kernels", case.label, name, what, round(value, 4), unit, round(value * spread, 4))
            for (what, unit), value in figures.items()
        )
    return rows


def memory_row(case: Case, tensors: Tensors, provider: Provider) -> Row:
    """Return the peak of memory in forward and backward above the inputs and the returned gradients."""
    import torch

    mine = clone(tensors)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradients = backward(mine, forward(case, mine, provider))
    torch.cuda.synchronize()
    own = {x.untyped_storage().data_ptr() for x in (*mine.inputs, *mine.slopes)}  # gradients may be written over them
    given = sum(x.numel() * x.element_size() for x in gradients if x.untyped_storage().data_ptr() not in own)
    extra = max(0, torch.cuda.max_memory_allocated() - before - given)
    return Row("kernels", case.label, provider.name, "extra_peak", round(extra / MIB, 2), "MiB")


def right_ones(case: Case, tensors: Tensors, providers: Sequence[Provider], notes: list[str]) -> list[Provider]:
    """Return the providers that have the op and compute it correctly; note the peers that fail.

    Raises:
        AssertionError: tilekern is wrong.
        InputError: a peer has left the GPU unusable.
    """
    import torch

    expected = case.expected(tensors)
    right = []
    for provider in providers:
        if case.op not in provider.calls:
            continue
        try:
            check(case, tensors, expected, provider)
            right.append(provider)
        except Exception as error:
            if provider.name == OURS:
                raise
            if isinstance(error, torch.AcceleratorError):
                said = f"{case.label}: {provider.name} ends what this process can do on the GPU: {one_line(error)}"
                raise InputError(f"{said}; leave it out with --providers") from error
            notes.append(f"{case.label}: {provider.name} left out: {one_line(error)}")
    return right


def check(case: Case, tensors: Tensors, expected: Sequence[Any], provider: Provider) -> None:
    """Run a provider once, forward and backward, and judge all its results.

    Raises:
        AssertionError: an output or gradient is wrong.
    """
    allowed = TOLERANCES[case.dtype].times(case.roundings * provider.slack)
    mine = clone(tensors)
    outputs = forward(case, mine, provider)
    found = [output.detach().clone() for output in outputs]  # a backward in place may overwrite them
    found += backward(mine, outputs)
    for number, (actual, reference) in enumerate(zip(found, expected, strict=True)):
        relative, elementwise = errors(actual, reference)
        assert within(relative, elementwise, allowed), (
            f"{provider.name} is wrong: {case.label}, result {number}: relative error {relative:.2e}, "
            f"elementwise {elementwise:.2e}, allowed {allowed}"
        )


def clone(tensors: Tensors) -> Tensors:
    """Copy arguments, with the same strides; the inputs require gradients."""
    inputs = tuple(x.detach().clone().requires_grad_() for x in tensors.inputs)
    return Tensors(inputs, tensors.constants, tuple(dy.clone() for dy in tensors.slopes))


def forward(case: Case, tensors: Tensors, provider: Provider) -> tuple[Any, ...]:
    """Call the op; return its outputs as a tuple."""
    outputs = provider.calls[case.op](*tensors.inputs, *tensors.constants)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def backward(tensors: Tensors, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the gradients of the inputs."""
    import torch

    return torch.autograd.grad(outputs, tensors.inputs, tensors.slopes)


def entrant(case: Case, tensors: Tensors, provider: Provider, metric: str) -> Entrant:
    """Return an entrant with its own arguments; for the backward alone the forward runs first, untimed."""
    mine = clone(tensors)
    kept: list[tuple[Any, ...]] = []

    def prepare() -> None:
        kept.clear()
        for own, whole in zip((*mine.inputs, *mine.slopes), (*tensors.inputs, *tensors.slopes), strict=True):
            own.data.copy_(whole)
        if metric == "backward":
            kept.append(forward(case, mine, provider))

    def run() -> Any:
        if metric == "forward":
            return forward(case, mine, provider)
        return backward(mine, kept.pop() if kept else forward(case, mine, provider))

    return Entrant(run, prepare)


def copy(moved: int, device: str = "cuda") -> Entrant:
    """Return an entrant that copies the bytes that must move: half of them are read, half written."""
    import torch

    source = torch.randint(0, 255, (moved // 2,), dtype=torch.uint8, device=device)
    sink = torch.empty_like(source)
    return Entrant(lambda: sink.copy_(source))
