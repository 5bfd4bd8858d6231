"""Check the environment variables with a closed list of values, before a job starts rather than in one of its steps.

Nothing heavy is imported: this runs at the end of ``import torch`` where ``TILEKERN_APPLY`` is set.
"""

from __future__ import annotations

import difflib
import math
import os

from tilekern.errors import InputError
from tilekern.runtime.switches import switches_of

APPLY = "TILEKERN_APPLY"
AGAIN = "TILEKERN_LOOKUP_AGAIN_S"
_SWITCH = ("0", "1")
# The values that each variable may have; a variable that is empty counts as not set.
CHOICES: dict[str, tuple[str, ...]] = {
    "TILEKERN_ON_MISS": ("compile", "fallback", "error"),
    "TILEKERN_TRUST": ("any", "signed"),
    "TILEKERN_TRUST_SHARED": _SWITCH,
    "TILEKERN_WIDE_SUMS": _SWITCH,
    "TILEKERN_INTERPRET": _SWITCH,
}


def check_settings() -> None:
    """Refuse variables with unknown values.

    Raises:
        InputError: a variable of :data:`CHOICES` has another value, ``TILEKERN_LOOKUP_AGAIN_S`` is not a number of
            seconds, or ``TILEKERN_APPLY`` names unknown ops.
    """
    for name, known in CHOICES.items():
        value = os.environ.get(name, "")
        if value and value not in known:
            nearest = difflib.get_close_matches(value.strip().lower(), known, n=1)
            meant = f"; did you mean {nearest[0]}?" if nearest else ""
            raise InputError(f"{name}: unknown value {value!r}; known: {', '.join(known)}{meant}")
    seconds_of(os.environ.get(AGAIN, ""))
    asked_for()


def seconds_of(text: str) -> float | None:
    """The value of ``TILEKERN_LOOKUP_AGAIN_S``; None where it is empty.

    Raises:
        InputError: it is not a number of seconds.
    """
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise InputError(f"{AGAIN} must be a number of seconds, 0 for never, got {text!r}")
    return seconds


def asked_for() -> dict[str, bool] | None:
    """The arguments of ``tilekern.apply`` that ``TILEKERN_APPLY`` asks for; None where it is not set, empty or 0.

    Raises:
        InputError: it names unknown ops, or its words do not go together.
    """
    text = os.environ.get(APPLY, "").strip()
    if text in ("", "0"):
        return None
    try:
        return switches_of(text)
    except InputError as error:
        raise InputError(f"{APPLY}: {error}") from None
