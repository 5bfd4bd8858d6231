"""The versions of packages and of the NVIDIA driver that tilekern needs, and checks of the installed ones.

The doctor (:mod:`tilekern.doctor`) shows all of them; a process calls :func:`unmet` before its first launch.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
from importlib import metadata
from pathlib import Path

from tilekern.spec.targets import cuda_driver
from tilekern.warning import warn_once

# The dependencies of pyproject.toml, which a test compares; every process needs them.
NEEDS = {
    "cuda-tile": ">=1.7,<1.8",
    "platformdirs": ">=4",
    "filelock": ">=3.12",
    "msgspec": ">=0.20",
}
# The extras: models and tuning, command lines, prompts as text. One is asked for if its first package is installed.
EXTRAS = {
    "torch": {"torch": ">=2.9", "transformers": ">=5,<6", "numpy": ">=1.26"},
    "tools": {"click": ">=8.1", "rich": ">=13"},
    "text": {"tokenizers": ">=0.22"},
}
# The extra `compile`: the tile compiler, and its parts in the same range. Older ones reject most kernels (launches that
# wait for the kernel before, loads without checks of bounds, sm_90); cuda-tile asks for less than 13.5.
TILEIRAS = ">=13.4,<13.5"
PYTHON = ">=3.11"
# cuda-tile launches by functions of CUDA 13.0, which drivers have since r580.
LEAST_CUDA, LEAST_DRIVER = 13000, "r580"
_NUMBER = re.compile(r"\d+")
# A name, its extras, and the range.
_REQUIREMENT = re.compile(r"([\w.-]+)\s*(?:\[[^]]*\])?\s*\(?([^)]*)\)?\s*")


def installed(name: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return metadata.version(name)
    except (metadata.PackageNotFoundError, ValueError, OSError):
        return None


def fits(version: str, wanted: str) -> bool:
    """Return whether a version is in a range such as ``>=1.7,<1.8``; a version without a number counts as inside."""
    found = _numbers(version)
    if not found:
        return True
    for part in filter(None, wanted.replace(" ", "").split(",")):
        sign = part.rstrip("0123456789.*abrcdevpost+")
        bound = _numbers(part)
        length = max(len(found), len(bound))
        here, there = (numbers + [0] * (length - len(numbers)) for numbers in (found, bound))
        if (
            (sign == ">=" and here < there)
            or (sign == "<" and here >= there)
            or (sign == "<=" and here > there)
            or (sign == ">" and here <= there)
            or (sign == "!=" and here == there)
            or (sign == "==" and here[: len(bound)] != bound)
        ):
            return False
    return True


def _numbers(version: str) -> list[int]:
    """Return the numbers of a release: 2.13.0 of 2.13.0a0+cu130."""
    release = re.search(r"\d+(?:\.\d+)*", version)
    return [int(number) for number in _NUMBER.findall(release[0])] if release else []


def asked_by(name: str, extra: str | None = None) -> dict[str, str]:
    """Return the ranges that an installed distribution requires, or those under one of its extras, by name."""
    found = {}
    with contextlib.suppress(metadata.PackageNotFoundError, OSError):
        for line in metadata.requires(name) or ():
            wanted, _, condition = line.partition(";")
            matched = _REQUIREMENT.fullmatch(wanted.strip())
            is_asked = re.search(rf"extra\s*==\s*['\"]{extra}['\"]", condition) if extra else not condition
            if matched and is_asked:
                found[matched[1]] = matched[2].replace(" ", "")
    return found


def driver_cuda() -> int | None:
    """Return the CUDA version that the driver supports, 13000 for 13.0; None without a driver or if unknown."""
    with contextlib.suppress(OSError, AttributeError):
        number = ctypes.c_int()
        if cuda_driver().cuDriverGetVersion(ctypes.byref(number)) == 0 and number.value > 0:
            return number.value
    return None


def driver_release(proc: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Return the driver's release, ``580.95.05``; None if unknown."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", proc.read_text())
        if found:
            return found[1]
    return None


def cuda_text(version: int) -> str:
    """Return a CUDA version for people: 13.0 for 13000."""
    return f"{version // 1000}.{version % 1000 // 10}"


def driver_unmet(cuda: int | None, release: str | None) -> str | None:
    """Return what is wrong with a driver and how to fix it; None if it is new enough or unknown."""
    if cuda is None or cuda >= LEAST_CUDA:
        return None
    what = f"driver {release}" if release else "the driver"
    return (
        f"{what} serves CUDA {cuda_text(cuda)}, and kernels need CUDA {cuda_text(LEAST_CUDA)}: "
        f"update the NVIDIA driver to {LEAST_DRIVER} or newer"
    )


def is_asked_for(extra: str) -> bool:
    """Return whether the first package of an extra is installed."""
    return installed(next(iter(EXTRAS[extra]))) is not None


def extra_unmet(extra: str) -> str | None:
    """Return what is wrong with an extra that is asked for, and how to fix it; None if nothing is."""
    if not is_asked_for(extra):
        return None
    for name, wanted in EXTRAS[extra].items():
        if installed(name) is None:
            return f"{name} is not installed: pip install 'tilekern[{extra}]'"
        if wrong := package_unmet(name, wanted):
            return wrong
    return None


def package_unmet(name: str, wanted: str) -> str | None:
    """Return what is wrong with an installed package and how to fix it; None if its version is right."""
    version = installed(name)
    if version is None:
        return f"{name} is not installed: pip install '{name}{wanted}'"
    return _version_unmet(name, version, wanted)


def _version_unmet(name: str, version: str, wanted: str) -> str | None:
    if not fits(version, wanted):
        return f"{name} {version} is installed, and tilekern needs {wanted}: pip install '{name}{wanted}'"
    return None


@functools.cache
def unmet(*, has_torch: bool = True) -> str | None:
    """Return what keeps this machine from launching kernels, with the version that is needed, or None.

    A driver or a cuda-tile out of range would fail in the launch with a message that names neither. A torch or
    transformers out of range only causes a warning, if arrays are torch's: reading their versions takes milliseconds.
    """
    wrong = driver_unmet(driver_cuda(), driver_release())
    wanted = {**NEEDS, **EXTRAS["torch"]}
    for name in ("cuda-tile", *(("torch", "transformers") if has_torch else ())):
        version = installed(name)
        said = None if version is None else _version_unmet(name, version, wanted[name])
        if said is not None and name == "cuda-tile":
            wrong = wrong or said
        elif said is not None:
            warn_once(said)
    return wrong
