"""The plan that a command line asks for: of models, of files, of the wanted list, of named problems, or of several."""

from __future__ import annotations

from pathlib import Path

from tilekern.compile.garbage import search_put_off
from tilekern.errors import InputError
from tilekern.spec.targets import Target
from tilekern.tuning.options import PlanRequest, described_alone
from tilekern.tuning.plan.configs import path_named, read_json
from tilekern.tuning.plan.given import WANTED, plan_of_file, plan_of_problem, plan_of_wanted
from tilekern.tuning.plan.steps import Planned


@search_put_off()
def plan_of(request: PlanRequest, target: Target, root: Path) -> Planned:
    """All that is asked for, each problem once.

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
    )


def _of_model(model: str, request: PlanRequest, target: Target) -> Planned:
    """The plan of a model, or the one that a trace wrote into the file that stands in its place."""
    path = path_named(model)
    if path is None or "problems" not in read_json(path):
        from tilekern.tuning.plan.models import plan_of_model  # which loads torch and transformers

        return plan_of_model(model, request.steps, target)
    if request.described:
        raise described_alone(request.described)
    return plan_of_file(path, target)
