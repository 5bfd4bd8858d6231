"""Measure host time of op calls: Python, autograd and dispatch, with tensors so small that the GPU always waits.

The unavoidable parts of each op's forward are timed too: a bare launch of its kernel, and torch's allocation of its
results.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.cases import Part, SpecCase, Tensors, small_cases
from benchmarks.environment import facts, require_gpu, version_of
from benchmarks.kernels import Keep, backward, clone, forward, right_ones
from benchmarks.prebuilt import launcher_of
from benchmarks.providers import OURS, Provider, load
from benchmarks.results import Results, Row
from benchmarks.sources import kernels_used, with_sources
from tilekern.spec.targets import Target
from tilekern.tuning.measure.timing import Timing

NAMES = (OURS, "liger-triton", "torch")
ALLOCATION = "allocation"
CALLS, BATCHES = 1000, 11


def measure(names: Sequence[str], keep: Keep, calls: int = CALLS, batches: int = BATCHES) -> Results:
    """Time a bare launch, the allocation of the results, the lookup, and each provider's passes, per call.

    Args:
        names: of :data:`NAMES`.
        keep: called after each case with its label and the results so far, so that an interrupted run keeps them.
        calls: calls in each batch.
        batches: batches that count.

    Raises:
        InputError: there is no GPU, or a kernel is missing from the cache.
    """
    target = require_gpu()
    results = Results(facts())
    providers = load(names, results.run["notes"])
    for case in small_cases():
        tensors = case.tensors("cuda")
        rows = []
        with kernels_used() as used:
            todo = _ours_alone(case.forward, target) | _allocation(tensors)
            for provider in right_ones(case, tensors, providers, results.run["notes"]):
                todo |= _calls(case, tensors, provider)
            for (name, metric), timing in host_times(todo, calls, batches).items():
                time_us, spread_us = round(timing.median_us, 3), round(timing.spread_us, 3)
                rows.append(Row("host", case.label, name, metric, time_us, "us", spread_us))
        results.rows.extend(with_sources(rows, used))
        keep(case.label, results)
    return results


# Make a number of calls.
Batch = Callable[[int], None]


def repeat(call: Callable[[], Any]) -> Batch:
    """Make a batch of calls."""

    def run(calls: int) -> None:
        for _ in range(calls):
            call()

    return run


def repeat_without_gradients(call: Callable[[], Any]) -> Batch:
    """Make a batch of calls under one ``torch.no_grad``, like an evaluation loop."""
    import torch

    return torch.no_grad()(repeat(call))


def host_times(todo: Mapping[Any, Batch], calls: int, batches: int) -> dict[Any, Timing]:
    """Return the host time of a call of each: means over a batch of calls; median and spread over batches, in turns."""
    import torch

    means: dict[Any, list[float]] = {name: [] for name in todo}
    for batch in range(batches + 1):
        for name, run in todo.items():
            torch.cuda.synchronize()
            started = time.perf_counter_ns()
            run(calls)
            mean_us = (time.perf_counter_ns() - started) / calls / 1000
            if batch:  # the first one warms up
                means[name].append(mean_us)
    torch.cuda.synchronize()
    return {name: Timing.of(times) for name, times in means.items()}


def _ours_alone(part: Part, target: Target) -> dict[tuple[str, str], Batch]:
    """Time the bare launch of the forward's kernel, and the lookup of its plan."""
    import torch

    from tilekern.patch.warmup import sizes_of
    from tilekern.runtime.dispatch import plan_for

    spec, problem = part
    device, sizes = torch.device("cuda", torch.cuda.current_device()), sizes_of(spec, problem)
    return {
        (f"ct.launch {version_of('cuda-tile')}", "launch"): repeat(launcher_of(spec, problem, target)),
        (OURS, "lookup"): repeat(lambda: plan_for(spec, device, *sizes)),
    }


def _allocation(tensors: Tensors) -> dict[tuple[str, str], Batch]:
    """Time torch's allocation of the forward's results, which every implementation pays for besides its launch."""
    import torch

    like = [torch.empty_like(x) for x in tensors.slopes]

    def allocate() -> None:
        for x in like:
            torch.empty_like(x)

    return {(f"torch {version_of('torch')}", ALLOCATION): repeat(allocate)}


def _calls(case: SpecCase, tensors: Tensors, provider: Provider) -> dict[tuple[str, str], Batch]:
    plain, tracked = clone(tensors), clone(tensors)
    for x in plain.inputs:
        x.requires_grad_(False)
    call = provider.calls[case.op]

    return {
        (provider.name, "forward_no_grad"): repeat_without_gradients(
            functools.partial(call, *plain.inputs, *plain.constants)
        ),
        (provider.name, "forward"): repeat(functools.partial(call, *tracked.inputs, *tracked.constants)),
        (provider.name, "forward_backward"): repeat(lambda: backward(tracked, forward(case, tracked, provider))),
    }
