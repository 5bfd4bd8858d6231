"""GPU time of each op's forward, backward and both, for tilekern and its peers, beside a copy of the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.cases import METRICS, Case, Tensors
from benchmarks.clock import Entrant, Race
from benchmarks.environment import facts, require_gpu
from benchmarks.providers import OURS, Provider, load, one_line
from benchmarks.results import Results, Row
from tilekern.spec import TOLERANCES, Tolerance
from tuning.timing import Timing
from tuning.verifying import errors, within

COPY = "copy"


def measure(
    cases: Sequence[Case], names: Sequence[str], samples: int, say: Callable[[str], None] | None = None
) -> Results:
    """Time the providers of these names on all cases.

    Raises:
        InputError: there is no GPU, or no such provider.
        AssertionError: tilekern is wrong.
    """
    target = require_gpu()
    results = Results(facts())
    notes = results.run["notes"]
    providers = load(names, notes)
    race = Race(2 * target.l2_bytes)
    race.warm_clocks()
    for case in cases:
        if say:
            say(case.label)
        results.rows.extend(_measure_case(race, case, providers, samples, notes))
    _note_fallbacks(notes)
    return results


def _measure_case(race: Race, case: Case, providers: Sequence[Provider], samples: int, notes: list[str]) -> list[Row]:
    import torch

    torch._dynamo.reset()  # a function is compiled anew for at most eight sizes, then no more
    tensors = case.tensors("cuda")
    right = right_ones(case, tensors, providers, notes)
    rows: list[Row] = []
    for metric in METRICS:
        entrants = {provider.name: entrant(case, tensors, provider, metric) for provider in right}
        timings = race.run({**entrants, COPY: copy(case.bytes_of(metric))}, samples)
        notes.extend(
            f"{case.label} {metric}: {name} left out, it waits for the GPU" for name in entrants if name not in timings
        )
        rows.extend(rows_of(case.label, metric, timings))
        del entrants
    torch.cuda.empty_cache()
    return rows


def rows_of(label: str, metric: str, timings: dict[str, Timing]) -> list[Row]:
    """Rows of the times, and of each as a share of the copy's speed."""
    rows = []
    whole = timings[COPY].median_us
    for name, timing in timings.items():
        time_us, spread_us = round(timing.median_us, 3), round(timing.spread_us, 3)
        rows.append(Row("kernels", label, name, metric, time_us, "us", spread_us))
        if name != COPY:
            share = whole / timing.median_us
            spread = share * timing.spread_us / timing.median_us
            rows.append(Row("kernels", label, name, f"{metric}_share_of_copy", round(share, 4), "1", round(spread, 4)))
    return rows


def right_ones(case: Case, tensors: Tensors, providers: Sequence[Provider], notes: list[str]) -> list[Provider]:
    """Those providers that have the op and get it right; peers that do not are noted.

    Raises:
        AssertionError: tilekern is wrong.
    """
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
            notes.append(f"{case.label}: {provider.name} left out: {one_line(error)}")
    return right


def check(case: Case, tensors: Tensors, expected: Sequence[Any], provider: Provider) -> None:
    """Run a provider once, forward and backward, and judge all that it gives.

    Raises:
        AssertionError: an output or gradient is wrong.
    """
    tolerance = TOLERANCES[case.dtype]
    allowed = Tolerance(tolerance.relative * provider.slack, tolerance.elementwise * provider.slack)
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
    """Arguments of one's own, with the same strides, whose inputs ask for gradients."""
    inputs = tuple(x.detach().clone().requires_grad_() for x in tensors.inputs)
    return Tensors(inputs, tensors.constants, tuple(dy.clone() for dy in tensors.slopes))


def forward(case: Case, tensors: Tensors, provider: Provider) -> tuple[Any, ...]:
    """Call the op; its outputs as a tuple."""
    outputs = provider.calls[case.op](*tensors.inputs, *tensors.constants)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def backward(tensors: Tensors, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The gradients of the inputs."""
    import torch

    return torch.autograd.grad(outputs, tensors.inputs, tensors.slopes)


def entrant(case: Case, tensors: Tensors, provider: Provider, metric: str) -> Entrant:
    """An entrant with arguments of its own; for the backward alone the forward runs first, untimed."""
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
        return backward(mine, kept[0] if kept else forward(case, mine, provider))

    return Entrant(run, prepare)


def copy(moved: int) -> Entrant:
    """An entrant that copies as many bytes as must move, half of them read and half written."""
    import torch

    source = torch.randint(0, 255, (moved // 2,), dtype=torch.uint8, device="cuda")
    sink = torch.empty_like(source)
    return Entrant(lambda: sink.copy_(source))


def _note_fallbacks(notes: list[str]) -> None:
    """A fallback to torch must never pass for a kernel of ours."""
    import tilekern

    for kernel, counts in tilekern.stats().items():
        if counts["fallbacks"] or counts["compiled"] or counts["nearest"]:
            notes.append(f"tilekern {kernel}: {counts}")
