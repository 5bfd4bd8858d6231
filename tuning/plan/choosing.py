"""Makes the plan that a command line asks for: of models, files, the wanted list and named problems."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from tilekern.compile.garbage import search_put_off
from tilekern.errors import InputError
from tilekern.kernels import add_specs, own_specs
from tilekern.runtime.recorder import Trace
from tilekern.spec.targets import Target
from tilekern.tuning.options import PlanRequest, described_alone
from tilekern.tuning.plan.configs import path_named, read_json
from tilekern.tuning.plan.given import WANTED, plan_of_file, plan_of_problem, plan_of_wanted
from tilekern.tuning.plan.steps import Planned, Steps


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
    plans = [*models]
    plans += [plan_of_wanted(root, target) if p == WANTED else plan_of_file(Path(p), target) for p in request.plans]
    plans += [plan_of_problem(text, target) for text in request.problems]
    if not plans:
        raise InputError(
            "name a model: a preset such as qwen3-8b, the path of a config.json, or a hub id; else give --plan or "
            "--problem"
        )
    return Planned(
        ", ".join(plan.name for plan in plans),
        tuple(dict.fromkeys(problem for plan in plans for problem in plan.problems)),
        tuple(dict.fromkeys(note for plan in plans for note in plan.notes)),
        tuple(models),
        sum((Counter(plan.launches) for plan in plans), Counter()),
    )


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
    if isinstance(model, Trace):
        if model.target.key != target.key:
            raise InputError(f"the step was traced for {model.target.name}, not {target.name}; trace it for that GPU")
        known = own_specs()
        add_specs(*dict.fromkeys(spec.module for spec in model.specs.values() if spec not in known))
        return Planned("traced step", tuple(model.problems), launches=model.launches)
    if isinstance(model, str | Path):
        return plan_of(PlanRequest((str(model),), (), (), steps, None), target, root)
    from tilekern.tuning.plan.models import plan_of_model  # which loads torch and transformers

    return plan_of_model(model, steps, target)


def _of_model(model: str, request: PlanRequest, target: Target) -> Planned:
    path = path_named(model)
    if path is None or "problems" not in read_json(path):
        from tilekern.tuning.plan.models import plan_of_model  # which loads torch and transformers

        return plan_of_model(model, request.steps, target)
    if request.described:
        raise described_alone(request.described)
    return plan_of_file(path, target)
