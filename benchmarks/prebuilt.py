"""Bare launches: a record of the cache as a kernel object and its arguments, with none of the op layer around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilekern.errors import InputError
from tilekern.launcher import PrebuiltKernel, launch, prebuilt
from tilekern.runtime.dispatch import find
from tilekern.spec import Config, KernelSpec, Problem
from tilekern.targets import Target
from tuning.verify.check import launch_arguments, make_outputs


def kernel_of(spec: KernelSpec, problem: Problem, target: Target) -> tuple[PrebuiltKernel, Config]:
    """A kernel object that has not been launched yet, made from the cache's record, and its config.

    Raises:
        InputError: no cache holds the problem.
    """
    hit = find(spec, spec.bucketed(problem), target)
    if hit is None:
        raise InputError(f"no cache holds {spec.name} for {problem.key} on {target.key}; tune it first")
    config = Config(hit.record.artifacts["aligned"].config)
    return prebuilt(spec.device(problem, config).function, hit.record.artifacts, hit.load), config


def arguments_of(spec: KernelSpec, problem: Problem, config: Config, target: Target) -> tuple[int, tuple[Any, ...]]:
    """The number of blocks of a launch, and its arguments."""
    import torch

    implementation = spec.device(problem, config)
    blocks = implementation.grid(problem, target.sm_count)
    inputs = spec.inputs(problem, torch.Generator(device="cuda").manual_seed(0), "cuda")
    return blocks, launch_arguments(implementation, inputs, make_outputs(spec, problem, blocks, "cuda"))


def launcher_of(spec: KernelSpec, problem: Problem, target: Target) -> Callable[[], None]:
    """A function that does nothing but launch the kernel."""
    import torch

    kernel, config = kernel_of(spec, problem, target)
    blocks, arguments = arguments_of(spec, problem, config, target)
    grid, stream = (blocks,), torch.cuda.current_stream().cuda_stream
    return lambda: launch(stream, grid, kernel, arguments)


def sizes_of(spec: KernelSpec, problem: Problem) -> list[Any]:
    """A problem as ops hand it to dispatch: dtypes are torch's."""
    import torch

    return [getattr(torch, problem[d.name]) if d.kind == "dtype" else problem[d.name] for d in spec.dimensions]
