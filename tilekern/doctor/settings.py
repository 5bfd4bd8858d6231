"""The settings in the environment: tilekern's own, each checked, and those of others that change what runs."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable

from tilekern.doctor.report import Report
from tilekern.errors import InputError, TilekernError

_YES_NO = ("", "0", "1")
# Variables of others that change what runs.
_OTHERS = (
    "CUDA_VISIBLE_DEVICES", "LIGER_KERNEL_IMPL", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_DEVICE_BACKEND_AUTOLOAD", "HF_HUB_OFFLINE",
)  # fmt: skip
# The values of variables with such names are not shown.
_SECRETS = ("TOKEN", "SECRET", "PASSWORD")


def _one_of(*values: str) -> Callable[[str], object]:
    def check(said: str) -> None:
        if said not in values:
            raise InputError(f"must be one of {', '.join(value or 'nothing' for value in values)}, got {said!r}")

    return check


def _apply(said: str) -> None:
    from tilekern.runtime.switches import switches_of

    if said.strip() not in ("", "0"):
        switches_of(said)


def _look_again(_: str) -> None:
    from tilekern.runtime.provisional import interval_s

    interval_s()


# All variables of tilekern's, and the check of those whose values are not any text.
SETTINGS: dict[str, Callable[[str], object] | None] = {
    "TILEKERN_APPLY": _apply,
    "TILEKERN_CACHE_DIR": None,
    "TILEKERN_CACHE_PATH": None,
    "TILEKERN_INTERPRET": _one_of(*_YES_NO),
    "TILEKERN_LOOKUP_AGAIN_S": _look_again,
    "TILEKERN_ON_MISS": _one_of("compile", "fallback", "error"),
    "TILEKERN_SPECS": None,
    "TILEKERN_TRUST": _one_of("", "any", "signed"),
    "TILEKERN_TRUST_ROOTS": None,
    "TILEKERN_TRUST_SHARED": _one_of(*_YES_NO),
    "TILEKERN_WIDE_SUMS": _one_of(*_YES_NO),
}


def tell_of_settings(report: Report) -> None:
    """Tell of the variables that are set."""
    names = sorted(name for name in os.environ if name.startswith("TILEKERN_") or name in _OTHERS)
    said = {name: "..." if any(word in name for word in _SECRETS) else os.environ[name] for name in names}
    report.document["settings"] = said
    report.say("settings", ", ".join(f"{name}={value}" for name, value in said.items()) or "none")
    for name in names:
        if not name.startswith("TILEKERN_"):
            continue
        if name not in SETTINGS:
            nearest = difflib.get_close_matches(name, SETTINGS, n=1, cutoff=0.8)
            meant = f"did you mean {nearest[0]}?" if nearest else "docs/reference.md has those that are"
            report.complain(f"{name} is not a setting of tilekern; {meant}")
        elif check := SETTINGS[name]:
            try:
                check(os.environ[name])
            except TilekernError as error:
                text = str(error)
                report.complain(text if text.startswith(name) else f"{name}: {text}")
            except ImportError:
                continue  # what is missing is complained of as a package
