"""Load kernels before the first step, and forget them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tilekern.cache import Layer, default_layers
from tilekern.kernels import all_specs, spec_named
from tilekern.runtime import dispatch
from tilekern.runtime.recorder import Trace, tracing
from tilekern.spec import KernelSpec, Problem, Value
from tilekern.spec.targets import Target, here
from tilekern.warning import warn_once

if TYPE_CHECKING:
    import torch

# Bucketed sizes of the inputs that kernels are loaded with; a multiple of the sizes that aligned variants assume.
_SMALL = 64
Exact = tuple[str, tuple[Value, ...]]


def warmup_all_kernels(
    model: torch.nn.Module | None = None, *, device: torch.device | str | int | None = None
) -> dict[str, int]:
    """Launch each kernel that the caches hold for a GPU once, on small inputs, so that no step has to load it.

    Nothing is compiled: a stale or bad record is skipped. Without a CUDA GPU this warns and does nothing. With
    ``TILEKERN_INTERPRET=1`` there is nothing to load.

    Args:
        model: only load kernels that a training step of the model, patched or not, asks for; None means all.
        device: the CUDA device; None means torch's current one.

    Returns:
        ``kernels`` that were launched, and records ``skipped``.

    Raises:
        InputError: ``model`` is not a module, it has no configuration, or its step cannot be traced.
    """
    if model is not None:
        from tilekern.patch.guards import require_module
        from tilekern.patch.stepping import core_of

        require_module("warmup_all_kernels", model)
        core_of(model)
    counts = {"kernels": 0, "skipped": 0}
    if dispatch.interpreting():
        return counts
    import torch

    if not torch.cuda.is_available():
        warn_once("warmup_all_kernels found no CUDA GPU here and did nothing")
        return counts
    place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
    place = torch.device("cuda", torch.cuda.current_device() if place.index is None else place.index)
    target = here(place.index)
    assert target is not None
    asked = None if model is None else asked_by(model, target)
    for spec, problem in problems_for(target, default_layers()):
        if asked is not None and exact_part(spec, problem) not in asked:
            continue
        found = dispatch.find(spec, problem, target)
        plan = dispatch.plan_for(spec, place, *sizes_of(spec, problem)) if found is not None else None
        if plan is not None:
            launch_small(spec, problem, plan, place, target.sm_count)
        counts["skipped" if plan is None else "kernels"] += 1
    torch.cuda.synchronize(place)
    return counts


def clear_autotune_cache() -> None:
    """Forget the plans and kernels of this process: the next calls look the cache up again. No file is touched."""
    dispatch.forget()


def problems_for(target: Target, layers: Sequence[Layer]) -> Iterator[tuple[KernelSpec, Problem]]:
    """Yield each problem that a layer has a record of, for this GPU or for another one of its arch, once."""
    seen: set[tuple[str, Problem]] = set()
    places = [(layer, key) for layer in layers for key in layer.targets() if key.startswith(f"{target.arch}-")]
    for layer, key in places:
        for toolkit in layer.toolkits(key):
            for spec in all_specs().values():
                for values in layer.problems(key, toolkit, spec.name):
                    problem = spec.problem_of(values)
                    if problem is not None and (spec.name, problem) not in seen:
                        seen.add((spec.name, problem))
                        yield spec, problem


def launch_small(spec: KernelSpec, problem: Problem, plan: dispatch.Plan, device: torch.device, sm_count: int) -> None:
    """Launch a plan's kernel on inputs of at most 64 rows or tokens, with a grid for these; do not count the launch.

    Do nothing for a library's kernel.
    """
    import torch

    if spec.is_library(problem, plan.config):
        return
    sizes = {d.name: min(problem[d.name], _SMALL) for d in spec.dimensions if d.kind == "bucketed"}
    if "batch" in sizes:
        sizes["batch"] = 1
    small = problem.but(**sizes)
    implementation = spec.device(small, plan.config)
    own = copy.copy(plan)
    own.blocks = implementation.grid(small, sm_count)
    own.grid = (own.blocks,)
    generator = torch.Generator(device=device).manual_seed(0)
    arrays = spec.inputs(small, generator, str(device))
    for name, (shape, dtype) in spec.outputs(small, own.blocks).items():
        arrays[name] = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
    own.launch(device.index, *(arrays[parameter.name] for parameter in implementation.parameters))


def sizes_of(spec: KernelSpec, problem: Problem) -> list[Any]:
    """Return a problem in the form that ops pass to dispatch, with torch's dtypes."""
    import torch

    return [getattr(torch, problem[d.name]) if d.kind == "dtype" else problem[d.name] for d in spec.dimensions]


def asked_by(model: torch.nn.Module, target: Target) -> set[Exact]:
    """Return the problems that a training step of a model asks for, for any number of tokens.

    Raises:
        InputError: the model has no configuration, or its step cannot be traced.
    """
    from tilekern.patch.stepping import Batch, step_as_it_is

    with tracing(Trace(target)) as found:
        step_as_it_is(model, Batch(1, _SMALL))
    return {exact_part(spec_named(kernel), problem) for kernel, problem in found.problems}


def exact_part(spec: KernelSpec, problem: Problem) -> Exact:
    """Return a kernel's name and the sizes that a record must match exactly: not bucketed sizes, dtypes and flags."""
    return spec.name, tuple(problem[d.name] for d in spec.dimensions if d.kind == "exact")
