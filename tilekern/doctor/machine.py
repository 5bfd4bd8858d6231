"""GPUs, driver, packages, compilers and settings of this machine, and which are missing or out of range."""

from __future__ import annotations

import ctypes
import importlib
import os
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from tilekern.doctor.report import Report
from tilekern.errors import InputError, did_you_mean
from tilekern.runtime.requirements import (
    EXTRAS,
    NEEDS,
    TILEIRAS,
    asked_by,
    cuda_text,
    driver_cuda,
    driver_release,
    driver_unmet,
    extra_unmet,
    fits,
    installed,
    is_asked_for,
    package_unmet,
)
from tilekern.runtime.settings import SETTINGS, check_setting
from tilekern.spec.targets import HAS, Target, cuda_driver, here, of_driver, resolve

# Packages that run tilekern's ops or run beside them; shown if installed.
_FRIENDS = ("liger-kernel", "trl", "peft", "accelerate", "kernels")
_COMPILER = "nvidia-cuda-tileiras"
# Variables of other programs that change what runs.
_OTHER_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "LIGER_KERNEL_IMPL", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_DEVICE_BACKEND_AUTOLOAD", "HF_HUB_OFFLINE",
)  # fmt: skip
# The values of variables with such names are hidden.
_SECRETS = ("TOKEN", "SECRET", "PASSWORD")
# cuInit: there is no device, which a variable may have hidden.
NO_DEVICE = 100


@dataclass(frozen=True)
class Devices:
    """The GPUs of this process in CUDA's order; or why the driver gives none, with the error's number in ``code``.

    ``found`` is False without a driver.
    """

    found: bool
    gpus: tuple[Target, ...] = ()
    error: str | None = None
    code: int = 0


def devices() -> Devices:
    """Ask the driver, without making a context."""
    try:
        cuda = cuda_driver()
    except OSError:
        return Devices(False)
    try:
        return _asked(cuda)
    except AttributeError as error:
        return Devices(True, error=f"libcuda.so.1 is not a CUDA driver: {error}")


def _asked(cuda: Any) -> Devices:
    count = ctypes.c_int()
    code = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    if code:
        return Devices(True, error=_words(cuda, code), code=code)
    return Devices(True, tuple(of_driver(cuda, number) for number in range(count.value)))


def _words(cuda: Any, code: int) -> str:
    name = ctypes.c_char_p()
    try:
        known = cuda.cuGetErrorName(code, ctypes.byref(name)) == 0 and name.value
    except AttributeError:
        known = None
    return f"error {code} ({known.decode(errors='replace')})" if known else f"error {code}"


def tell_of_gpus(report: Report, listed: Devices, gpu: str) -> Target | None:
    """Report the GPUs and their driver.

    Returns:
        The GPU that ``gpu`` names, else the first one here; None if there is none.

    Raises:
        InputError: no GPU of that name is known.
    """
    cuda, release = driver_cuda(), driver_release()
    gpus = list(listed.gpus)
    if not gpus and listed.error is None:
        with report.looking_at("torch's GPU"):
            gpus = [target for target in [here()] if target is not None]
    number = 0
    for target, alike in groupby(gpus):
        last = number + len(list(alike)) - 1
        which = f"{number}" if last == number else f"{number} to {last}"
        figures = f"{target.arch}, {target.sm_count} SMs, {target.memory_gbs:,.0f} GB/s"
        report.say("" if number else "GPU", f"{which}: {target.name} ({figures}), key {target.key}")
        if target.capability not in HAS["kernels"]:
            report.complain(f"GPU {which} is of {target.arch}, and kernels run on sm_{HAS['kernels'].start} and newer")
        number = last + 1
    if not gpus:
        report.say("GPU", "none here" if listed.error is None else f"none: the driver says {listed.error}")
    _complain_of_gpus(report, listed)
    serves = f"serves CUDA {cuda_text(cuda)}" if cuda else "its version cannot be told"
    report.say("driver", f"{release or ''} {serves}".strip() if listed.found or release else "none here")
    if wrong := driver_unmet(cuda, release):
        report.complain(wrong)
    report.document |= {
        "gpus": [target.describe_whole() for target in gpus],
        "driver": {"release": release, "cuda": cuda and cuda_text(cuda), "error": listed.error},
    }
    if gpu != "auto":
        return resolve(gpu)
    return gpus[0] if gpus else None


def _complain_of_gpus(report: Report, listed: Devices) -> None:
    """Complain about a GPU that cannot be used, unless it was hidden on purpose."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    named = [] if visible == "-1" else [name for name in visible.split(",") if name.strip()]
    has_kernel_driver = os.path.exists("/proc/driver/nvidia")
    if not listed.found:
        if has_kernel_driver:
            report.complain(
                "an NVIDIA driver is loaded and its library libcuda.so.1 is not found: start the container with its "
                "GPUs (--gpus all), or install the driver's libraries"
            )
    elif listed.error is not None and listed.code != NO_DEVICE:
        report.complain(f"the driver gives no GPU, {listed.error}: see what nvidia-smi says, or restart the machine")
    elif len(named) > max(len(listed.gpus), sum(name.startswith("MIG") for name in named)):  # of slices CUDA gives one
        report.complain(
            f"CUDA_VISIBLE_DEVICES={visible} names {len(named)} GPUs, and the driver gives {len(listed.gpus)}: name "
            "GPUs that are here, each once"
        )
    elif not listed.gpus and not named and "CUDA_VISIBLE_DEVICES" not in os.environ and has_kernel_driver:
        report.complain("an NVIDIA driver is loaded and gives no GPU: see what nvidia-smi says")


def tell_of_packages(report: Report) -> None:
    """Report the packages that tilekern needs, and those that run beside it."""
    needs = {**NEEDS, **{name: wanted for extra in EXTRAS.values() for name, wanted in extra.items()}}
    versions = {name: installed(name) for name in (*needs, *_FRIENDS)}
    report.document["packages"] = {
        name: {"version": version, "needs": needs.get(name)} for name, version in versions.items()
    }
    report.say("packages", ", ".join(f"{name} {version}" for name, version in versions.items() if version))
    if absent := [extra for extra in EXTRAS if not is_asked_for(extra)]:
        report.say("", f"without the extras {', '.join(absent)}: pip install 'tilekern[{','.join(absent)}]'")
    for wrong in (*(package_unmet(name, wanted) for name, wanted in NEEDS.items()), *map(extra_unmet, EXTRAS)):
        if wrong:
            report.complain(wrong)
    kernels, asked = versions["kernels"], asked_by("transformers", "kernels").get("kernels")
    if kernels and asked and not fits(kernels, asked):
        # Only a choice of transformers is missing, and an index may not have the release that it asks for.
        report.say(
            "",
            f"use_kernels=True is not available: transformers {versions['transformers']} needs kernels{asked}, and "
            f"{kernels} is installed",
        )
    if installed("tilekern") is None and os.environ.get("TILEKERN_APPLY", "0") not in ("", "0"):
        report.complain("TILEKERN_APPLY is set, and tilekern is on a path and not installed, so that nothing reads it")


def tell_of_torch(report: Report, listed: Devices) -> None:
    """Report what torch says of the GPUs; without a GPU torch is not imported, since that takes seconds."""
    report.document["torch_cuda"] = None
    if not listed.gpus or installed("torch") is None:
        return
    torch = importlib.import_module("torch")
    built = torch.version.cuda
    report.document["torch_cuda"] = built
    if built is None:
        report.complain(f"torch {torch.__version__} is a build without CUDA: install one of https://pytorch.org")
    elif not torch.cuda.is_available():
        report.complain(f"torch {torch.__version__} (CUDA {built}) finds no GPU, and the driver has {len(listed.gpus)}")
    else:
        report.say("torch", f"CUDA {built}, {torch.cuda.device_count()} GPUs")


def tell_of_compilers(report: Report) -> None:
    """Report which compilers are installed."""
    from tilekern.compile.backend import backends
    from tilekern.compile.toolchain import toolkit

    found = toolkit() if installed("cuda-tile") else None
    lines = [
        f"tileiras {found.tileiras}"
        if found
        else "none, so a miss runs the model's own op (tilekern[compile] brings it)"
    ]
    versions = {"tileiras": found.tileiras if found else installed(_COMPILER)}
    for backend in backends():
        for name, needs in backend.needs.items():
            versions[name] = installed(name)
            lines.append(f"{backend.title} {versions[name] or 'is not installed'}")
            if versions[name] and (wrong := package_unmet(name, needs)):
                report.complain(wrong)
    report.say("compiler", "; ".join(lines))
    report.document["compilers"] = versions
    if found and not fits(found.tileiras, TILEIRAS):
        report.complain(
            f"tileiras {found.tileiras} is here, and tilekern needs {TILEIRAS}: pip install 'tilekern[compile]'"
        )


def tell_of_settings(report: Report) -> None:
    """Report the environment variables that are set: tilekern's own, each checked, and others that change what runs."""
    names = sorted(name for name in os.environ if name.startswith("TILEKERN_") or name in _OTHER_VARIABLES)
    values = {name: "..." if any(word in name for word in _SECRETS) else os.environ[name] for name in names}
    report.document["settings"] = values
    report.say("settings", ", ".join(f"{name}={value}" for name, value in values.items()) or "none")
    for name in (name for name in names if name.startswith("TILEKERN_")):
        if name not in SETTINGS:
            meant = did_you_mean(name, SETTINGS, cutoff=0.8) or "; docs/reference.md lists the settings"
            report.complain(f"{name} is not a setting of tilekern{meant}")
        else:
            try:
                check_setting(name)
            except InputError as error:
                report.complain(str(error))
