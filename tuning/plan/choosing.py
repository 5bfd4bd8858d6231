"""Makes the plan that a command line asks for: of models, files of a trace, the wanted list, named problems."""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilekern.cache import CacheError, read_wanted
from tilekern.cache.keys import parse_problem_key
from tilekern.compile.garbage import search_put_off
from tilekern.errors import InputError, did_you_mean
from tilekern.kernels import add_specs, all_specs, own_specs
from tilekern.runtime.recorder import Trace, tracing
from tilekern.runtime.rows import has_rows
from tilekern.spec import Config, KernelSpec, Problem, Value
from tilekern.spec.targets import Target, from_description
from tilekern.tuning.options import PlanRequest, described_alone
from tilekern.tuning.plan.beside import with_those_beside
from tilekern.tuning.plan.configs import BASE, config_in, path_named
from tilekern.tuning.plan.engine import plan_of_engine
from tilekern.tuning.plan.steps import Planned, Steps, dtype_named
from tilekern.tuning.sweep.plan import Named, PlanFile


@search_put_off()
def plan_of(request: PlanRequest, target: Target, root: Path) -> Planned:
    """Return the plan of a whole request, each problem once.

    Args:
        request: what is asked for.
        target: the GPU.
        root: the cache whose wanted list is meant.

    Raises:
        InputError: nothing is asked for, or one of them cannot be planned.
    """
    models = [_of_model(model, request, target) for model in request.models]
    plans = [plan_of_wanted(root, target) if p == WANTED else plan_of_file(Path(p), target) for p in request.plans]
    plans += [plan_of_problem(text, target) for text in request.problems]
    if request.steps.invariant:
        plans = list(map(_with_classes, plans))
    plans = [*models, *plans]
    if not plans:
        raise InputError(
            "name a model: a preset such as qwen3-8b, the path of a config.json, or a hub id; else give --plan or "
            "--problem"
        )
    problems = tuple(dict.fromkeys(problem for plan in plans for problem in plan.problems))
    return Planned(
        ", ".join(plan.name for plan in plans),
        _of_kernels(problems, request.kernels),
        tuple(dict.fromkeys(note for plan in plans for note in plan.notes)),
        tuple(models),
        sum((Counter(plan.launches) for plan in plans), Counter()),
        frozenset().union(*(plan.invariant for plan in plans)),
        tuple(dict.fromkeys(token for plan in plans for token in plan.tokens)),
    )


def _of_kernels(problems: tuple[Named, ...], kernels: Sequence[str]) -> tuple[Named, ...]:
    """Return the problems of some kernels, or all if none is named."""
    planned = sorted({kernel for kernel, _ in problems})
    if unknown := [kernel for kernel in kernels if kernel not in planned]:
        raise InputError(f"--kernels {unknown[0]!r:.60}: nothing of it is planned; planned: {', '.join(planned)}")
    return tuple(named for named in problems if named[0] in kernels) if kernels else problems


def _with_classes(plan: Planned) -> Planned:
    """Have all problems of a plan that was not traced inside ``tilekern.invariant()`` share classes."""
    named = plan.invariant or frozenset(p for p in plan.problems if has_rows(*p))
    return with_those_beside(replace(plan, invariant=named))


def plan_of_anything(model: Any, steps: Steps, target: Target, root: Path) -> Planned:
    """Return the plan of a model in any form, or of a traced step.

    Args:
        model: a preset's name, the path of a config.json or of a traced plan, a hub id, a configuration of transformers
            or its dictionary, a model, or a trace.
        steps: the steps of a model that are traced.
        target: the GPU.
        root: the cache whose wanted list is meant.

    Raises:
        InputError: the model is not known, its step cannot be traced, or the trace was made for another GPU.
    """
    if steps.call is not None and not hasattr(model, "named_modules"):
        raise InputError(
            f"a batch is what a model is given; pass the model with it, not a {type(model).__name__}, or tokens=… "
            "instead"
        )
    if steps.engine and (isinstance(model, Trace) or hasattr(model, "named_modules")):
        raise InputError(
            f"engine=True plans a model by its config; pass its name, path or config, not a {type(model).__name__}"
        )
    if isinstance(model, Trace):
        if model.target.key != target.key:
            raise InputError(f"the step was traced for {model.target.name}, not {target.name}; trace it for that GPU")
        known = own_specs()
        add_specs(*dict.fromkeys(spec.module for spec in model.specs.values() if spec not in known))
        named = frozenset(model.invariant)
        plan = Planned("traced step", tuple(model.problems), launches=model.launches, invariant=named)
        return _with_classes(plan) if steps.invariant else plan
    if isinstance(model, str | Path):
        described = "--engine" if steps.engine else None
        return plan_of(PlanRequest((str(model),), (), (), steps, described), target, root)
    if steps.engine:
        return plan_of_engine(model, steps, target)
    from tilekern.tuning.plan.models import plan_of_model  # which loads torch and transformers

    return plan_of_model(model, steps, target)


def _of_model(model: str, request: PlanRequest, target: Target) -> Planned:
    if model.lower() == BASE:
        from tilekern.tuning.plan.base import plan_of_base  # which loads torch and transformers

        return plan_of_base(request.steps, target)
    path = path_named(model)
    if path is None or "problems" not in config_in(path):
        if request.steps.engine:
            return plan_of_engine(model, request.steps, target)
        from tilekern.tuning.plan.models import plan_of_model  # which loads torch and transformers

        return plan_of_model(model, request.steps, target)
    if request.described:
        raise described_alone(request.described)
    plan = plan_of_file(path, target)
    return _with_classes(plan) if request.steps.invariant else plan


WANTED = "wanted"


def plan_of_file(path: Path, target: Target) -> Planned:
    """The plan that a trace wrote for a GPU (``tilekern.trace("plan.json")``).

    Raises:
        InputError: the file is missing or is not such a plan, or it was traced for another GPU.
    """
    file = PlanFile(path.parent, path.name)
    problems, plan = file.problems(), file.read()
    made_for = plan.target
    if made_for["key"] != target.key:
        own = from_description(made_for)
        raise InputError(
            f"{path} was traced for {own.name}, not {target.name}; pass --gpu {own.option}, or trace the "
            f"step with gpu={target.option!r}"
        )
    return Planned(str(path), tuple(problems), launches=plan.launches, invariant=plan.invariant)


def plan_of_wanted(root: Path, target: Target) -> Planned:
    """Plan the problems on a cache's wanted list for a GPU, with the parts of composites.

    Raises:
        InputError: nothing is wanted there for this GPU.
    """
    found: dict[Named, None] = {}
    for item in read_wanted(root):
        spec = all_specs().get(item["kernel"])
        problem = spec.problem_of(item["problem"]) if spec and item["target"].get("key") == target.key else None
        if spec and problem is not None:
            found.setdefault((spec.name, spec.bucketed(problem)))
    if not found:
        raise InputError(
            f"nothing is wanted for {target.name} in {root}; python -m tilekern.cache_tools wanted lists what is"
        )
    return Planned(WANTED, tuple(with_parts(found, target)))


def with_parts(problems: Iterable[Named], target: Target) -> list[Named]:
    """Add the parts that composites among some problems need, whichever config wins."""
    found, specs = Trace(target), all_specs()
    found.asked = dict.fromkeys(problems)
    composites = [(specs[kernel], problem) for kernel, problem in found.asked]
    composites = [(spec, problem) for spec, problem in composites if found.composites(spec, problem)]
    if composites:
        with tracing(found):
            for spec, problem in composites:
                found.take_apart(spec, problem)
    return found.problems


def parts_of(named: Named, config: Config, target: Target) -> list[Named]:
    """Return the problems of the parts that a config of a kernel launches; none if it is no composite."""
    found, (kernel, problem) = Trace(target), named
    spec = all_specs()[kernel]
    if not spec.implement(problem, config).composite:
        return []
    with tracing(found):
        found.take_apart(spec, problem, config)
    return [part for part in found.problems if part != named]


def plan_of_problem(text: str, target: Target) -> Planned:
    """Plan what a call of an op asks for, forward and backward, or a single problem of a kernel.

    Args:
        text: the name of an op of :mod:`tilekern.ops` or of a kernel, and sizes: ``rms_norm rows=8192,columns=4096,
            dtype=bfloat16``. Sizes of an op are those of its forward kernel. A dtype that is not named is ``dtype``, a
            flag that is not named is off.
        target: the GPU.

    Raises:
        InputError: there is no such op or kernel, or a size is missing, unknown, or not one that a call may have.
    """
    name, _, sizes = text.strip().partition(" ")
    spec = all_specs().get(f"{name}_forward") or all_specs().get(name)
    if spec is None:
        known = dict.fromkeys(name.removesuffix("_forward") for name in all_specs())
        meant = did_you_mean(name, known) or f"; known: {', '.join(known)}."
        raise InputError(
            f"--problem {text!r}: unknown op or kernel {name!r}{meant} A kernel of your own needs --specs MODULE"
        )
    try:
        problem = spec.problem(**_filled(spec, parse_problem_key(sizes.strip())))
    except (CacheError, ValueError) as error:
        raise InputError(f"--problem {text!r}: {error}") from None
    try:
        inputs = spec.inputs(problem, None, "meta")
    except RuntimeError as error:  # torch counts the bytes of tensors that have none, too
        raise InputError(f"--problem {text!r}: no tensor can be so large: {error}") from None
    found, op = Trace(target), _op(name)
    named = (spec.name, spec.bucketed(problem))
    with tracing(found):
        called = op is not None and inputs.keys() >= set(_needed(op))
        if called:
            # An op that refuses the inputs asks for nothing.
            with contextlib.suppress(ValueError):
                _call(op, inputs if name == spec.name else {key: inputs[key] for key in _needed(op)}, problem)
        # An op may have the very name of its kernel, so there is no other name for what no call asks for.
        if not called or (name == spec.name and named not in found.asked):
            found.plan(spec, problem)
            found.take_apart(spec, problem)
    if named not in found.asked:
        raise InputError(
            f"--problem {text!r}: a call of {name} cannot be made of these sizes; name the kernel, {spec.name}"
        )
    return Planned(text, tuple(found.problems))


def _op(name: str) -> Any:
    from tilekern import ops

    return getattr(ops, name) if name in ops.__all__ else None


def _needed(op: Any) -> list[str]:
    """Return the names of an op's required arguments."""
    return [name for name, taken in inspect.signature(op).parameters.items() if taken.default is taken.empty]


def _filled(spec: KernelSpec, sizes: Mapping[str, Value]) -> dict[str, Value]:
    """Fill in the flags and dtypes that a problem's text leaves out."""
    filled = dict(sizes)
    for dimension in spec.dimensions:
        if dimension.kind == "flag":
            filled.setdefault(dimension.name, False)
        elif dimension.kind == "dtype" and (given := sizes.get(dimension.name, sizes.get("dtype"))) is not None:
            filled[dimension.name] = dtype_named(given)
    return filled


def _call(op: Any, inputs: Mapping[str, Any], problem: Problem) -> None:
    """Call an op on the inputs of its forward kernel, and run its backward for all floating-point arguments."""
    import torch

    from tilekern.ops.operation import DECLARED

    declared = DECLARED.get(op.__name__)
    has_gradient = declared is None or not declared.no_gradient
    takes = inspect.signature(op).parameters
    arguments = {name: inputs[name] for name in takes if name in inputs}
    for value in arguments.values():
        if has_gradient and isinstance(value, torch.Tensor) and value.is_floating_point():
            value.requires_grad_()
    flags = {name: problem[name] for name in takes.keys() & problem.keys() if isinstance(takes[name].default, bool)}
    results = op(**arguments, **flags)
    slopes = [x for x in (results if isinstance(results, tuple) else (results,)) if x.requires_grad]
    torch.autograd.backward(slopes, [torch.empty_like(x) for x in slopes])
