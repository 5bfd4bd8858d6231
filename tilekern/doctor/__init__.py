"""``python -m tilekern.doctor [MODEL]``: report what is installed, which caches are read, and what would serve a model.

The report is one screen to paste into a bug report. It works without torch, a GPU, the network or any of tilekern's
dependencies: each part is inspected separately, and a part that fails is reported as wrong.
"""

from __future__ import annotations

import platform

from tilekern import __version__
from tilekern.doctor.caches import tell_of_caches
from tilekern.doctor.devices import devices
from tilekern.doctor.machine import (
    tell_of_compilers,
    tell_of_gpus,
    tell_of_packages,
    tell_of_settings,
    tell_of_torch,
)
from tilekern.doctor.report import Report
from tilekern.doctor.serving import require_model, tell_of_model
from tilekern.runtime.requirements import PYTHON, fits


def examine(model: str | None = None, gpu: str = "auto") -> Report:
    """Inspect this machine, and look up what would serve a model.

    Args:
        model: a preset, the path of a config.json or of a folder with one, or a hub id.
        gpu: the GPU, as for ``--gpu``; ``auto`` is the first one here.

    Raises:
        InputError: the model or the GPU is not known.
    """
    if model is not None:
        require_model(model)
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
        tell_of_model(report, model, target)
    report.document |= {"wrong": report.wrong, "ok": not report.wrong}
    return report
