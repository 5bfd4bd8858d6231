"""Reports the records that would serve a model's training step, as a preflight finds them, and missing ones."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING

from tilekern.doctor.report import Report
from tilekern.errors import InputError
from tilekern.spec.targets import Target

if TYPE_CHECKING:
    from tilekern.tuning.preflight import Preflight


def require_model(name: str) -> None:
    """Refuse the name of an unknown model before anything slow runs.

    Raises:
        InputError: it is neither a preset, nor a path, nor formed like a hub id.
    """
    with contextlib.suppress(ImportError):  # reported with the packages
        from tilekern.tuning.plan.configs import require_model_name

        require_model_name(name)


def tell_of_model(report: Report, model: str, target: Target | None) -> None:
    """Report what would serve a model's training step on a GPU.

    Raises:
        InputError: the model is not known.
    """
    if target is None:
        report.say("model", f"{model}: not checked without a GPU; name the job's GPU by --gpu")
        return
    try:
        found = _preflight(report, model, target)
    except ImportError as error:
        report.complain(f"{model} cannot be traced: {error}")
        return
    if found is None:
        return
    report.document["model"] = found.as_json()
    counts = ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in found.counts().items() if number)
    report.say("model", f"{found.model} on {target.name}: {len(found.needs)} problems: {counts}")
    by_kernel: dict[str, Counter[str]] = {}
    for need in found.needs:
        state = f"{need.state.replace('_', ' ')}{', stale' if need.is_stale else ''}"
        by_kernel.setdefault(need.kernel, Counter())[state] += 1
    # Kernels with exact records only are in the counts above.
    rest = {kernel: states for kernel, states in by_kernel.items() if set(states) != {"exact"}}
    told = [f"{kernel} {', '.join(f'{n} {state}' for state, n in states.items())}" for kernel, states in rest.items()]
    if told:
        report.say("", "; ".join(told))
    if found.missing and report.document.get("compilers", {}).get("tileiras") is None:
        report.complain(
            f"{len(found.missing)} of {len(found.needs)} problems of {found.model} have no record, and no compiler is "
            "installed, so the model's own ops run; on a machine with tilekern[compile] run "
            f"python -m tilekern.tune {model} --gpu {target.option}"
        )


def _preflight(report: Report, model: str, target: Target) -> Preflight | None:
    """Return the model's needs, as a preflight with its default lengths finds them."""
    from tilekern.cache import user_root
    from tilekern.tuning.options import PlanRequest
    from tilekern.tuning.plan.choosing import plan_of
    from tilekern.tuning.plan.steps import Steps
    from tilekern.tuning.preflight import preflight_of

    found: list[Preflight] = []
    bad: list[InputError] = []
    with report.looking_at(f"the model {model}"):
        try:
            found.append(
                preflight_of(plan_of(PlanRequest((model,), (), (), Steps(), None), target, user_root()), target)
            )
        except InputError as error:
            bad.append(error)
    if bad:
        raise bad[0]
    return found[0] if found else None
