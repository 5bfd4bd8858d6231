"""``python -m tilekern.doctor [MODEL]``: report what is installed, which caches are read, and what would serve a model.

The report is one screen to paste into a bug report. It works without torch, a GPU, the network or any of tilekern's
dependencies: each part is inspected separately, and a part that fails is reported as wrong.
"""

from __future__ import annotations

import contextlib
import platform
import shlex
from collections import Counter

from tilekern import __version__
from tilekern.doctor.caches import tell_of_caches
from tilekern.doctor.machine import (
    devices,
    tell_of_compilers,
    tell_of_gpus,
    tell_of_packages,
    tell_of_settings,
    tell_of_torch,
)
from tilekern.doctor.report import Report
from tilekern.errors import InputError, needing
from tilekern.runtime.requirements import PYTHON, fits
from tilekern.spec.targets import Target


def examine(model: str | None = None, gpu: str = "auto", *, autocast: bool = False) -> Report:
    """Inspect this machine, and look up what would serve a model.

    Args:
        model: a preset, the path of a config.json or of a folder with one, or a hub id.
        gpu: the GPU, as for ``--gpu``; ``auto`` is the first one here.
        autocast: whether the model trains weights of float32 under autocast to bfloat16.

    Raises:
        InputError: the model or the GPU is not known.
    """
    if model is not None:
        with contextlib.suppress(ImportError):  # reported with the packages
            from tilekern.tuning.plan.configs import require_model_name

            require_model_name(model)
    report = Report()
    python = platform.python_version()
    report.say(
        "tilekern", f"{__version__}, python {python}, {platform.system()} {platform.release()} {platform.machine()}"
    )
    report.document |= {"tilekern": __version__, "python": python, "platform": platform.platform()}
    if not fits(python, PYTHON):
        report.complain(f"python {python} runs this, and tilekern needs {PYTHON}")
    listed = devices()
    target = tell_of_gpus(report, listed, gpu)
    with report.looking_at("the installed packages"):
        tell_of_packages(report)
    with report.looking_at("torch"):
        tell_of_torch(report, listed)
    with report.looking_at("the compilers"):
        tell_of_compilers(report)
    report.document["caches"] = []
    with report.looking_at("the caches"):
        tell_of_caches(report, target)
    with report.looking_at("the settings"):
        tell_of_settings(report)
    report.document["model"] = None
    if model is not None:
        tell_of_model(report, model, target, autocast=autocast)
    report.document |= {"wrong": report.wrong, "ok": not report.wrong}
    return report


def tell_of_model(report: Report, model: str, target: Target | None, *, autocast: bool) -> None:
    """Report what would serve a model's training step on a GPU.

    Raises:
        InputError: the model is not known.
    """
    if target is None:
        report.say("model", f"{model}: not checked without a GPU; name the job's GPU by --gpu")
        return
    try:
        with needing("tracing a model"):
            from tilekern.cache import user_root
            from tilekern.runtime.data_packages import install_or
            from tilekern.tuning.options import PlanRequest
            from tilekern.tuning.plan.choosing import plan_of
            from tilekern.tuning.plan.steps import steps_of
            from tilekern.tuning.preflight import MISSING, preflight_of, share_line
    except ImportError as error:
        report.complain(f"{model} cannot be traced: {error}")
        return
    found = None
    with report.looking_at(f"the model {model}", raising=(InputError,)):
        request = PlanRequest((model,), (), (), steps_of(autocast=autocast), "--autocast" if autocast else None)
        found = preflight_of(plan_of(request, target, user_root()), target)
    if found is None:
        return
    report.document["model"] = found.as_json()
    counts = ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in found.counts().items() if number)
    report.say("model", f"{found.model} on {target.name}: {len(found.needs)} problems: {counts}")
    share = share_line(found)
    if share is not None:
        report.say("", share)
    by_kernel: dict[str, Counter[str]] = {}
    for need in found.needs:
        state = f"{need.state.replace('_', ' ')}{', stale' if need.is_stale else ''}"
        by_kernel.setdefault(need.kernel, Counter())[state] += 1
    # Kernels with exact records only are in the counts above, and missing ones in the share if there is one.
    told = {"exact"} if share is None else {"exact", MISSING}
    rest = {kernel: states for kernel, states in by_kernel.items() if not told.issuperset(states)}
    lines = [f"{kernel} {', '.join(f'{n} {state}' for state, n in states.items())}" for kernel, states in rest.items()]
    if lines:
        report.say("", "; ".join(lines))
    if found.missing and report.document.get("compilers", {}).get("tileiras") is None:
        command = f"python -m tilekern.tune {shlex.quote(str(model))} --gpu {target.option}{' --autocast' * autocast}"
        report.complain(
            f"{len(found.missing)} of {len(found.needs)} problems of {found.model} have no record, and no compiler is "
            f"installed, so the model's own ops, or other kernels of the same op, run; {install_or(target)}on "
            f"a machine with tilekern[compile] run {command}"
        )
