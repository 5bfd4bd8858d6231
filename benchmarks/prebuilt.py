"""Make bare launches from a record of the cache: a kernel object and its arguments, without the op layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilekern.errors import InputError
from tilekern.runtime.dispatch import find
from tilekern.runtime.launcher import prebuilt
from tilekern.runtime.plans import Plan, plan_of
from tilekern.spec import Config, KernelSpec, Problem
from tilekern.spec.targets import Target
from tilekern.tuning.verify import check


def bare_plan(spec: KernelSpec, problem: Problem, target: Target) -> Plan:
    """Return the plan of the cache's record, with a kernel object that has not been launched yet.

    Raises:
        InputError: no cache has the problem.
    """
    hit = find(spec, spec.bucketed(problem), target)
    if hit is None:
        raise InputError(f"no cache holds {spec.name} for {problem.key} on {target.key}; tune it first")
    config = Config(hit.record.artifacts["aligned"].config)
    implementation = spec.device(problem, config)
    kernel = prebuilt(implementation.function, hit.record.artifacts, hit.load)
    return plan_of(kernel, implementation, config, problem, target)


def arguments_of(spec: KernelSpec, problem: Problem, plan: Plan) -> tuple[Any, ...]:
    """Return the arguments of a plan's launch: random inputs, and outputs."""
    import torch

    inputs = spec.inputs(problem, torch.Generator(device="cuda").manual_seed(0), "cuda")
    outputs = check.make_outputs(spec, problem, plan.blocks, "cuda")
    return check.arguments_of(spec.device(problem, plan.config), inputs, outputs)


def launcher_of(spec: KernelSpec, problem: Problem, target: Target) -> Callable[[], None]:
    """Return a function that only calls cuda.tile's launch, without the plan's other steps."""
    import cuda.tile as ct
    import torch

    plan, stream = bare_plan(spec, problem, target), torch.cuda.current_stream().cuda_stream
    arguments = arguments_of(spec, problem, plan)
    return lambda: ct.launch(stream, plan.grid, plan._kernel, arguments)
