"""The environment variables, and checks of their values before a job starts rather than in one of its steps.

Nothing heavy is imported: this runs at the end of ``import torch`` if ``TILEKERN_APPLY`` is set.
"""

from __future__ import annotations

import math
import os

from tilekern.errors import InputError, did_you_mean
from tilekern.runtime.switches import switches_of

APPLY = "TILEKERN_APPLY"
AGAIN = "TILEKERN_LOOKUP_AGAIN_S"
_SWITCH = ("0", "1")
# The allowed values of variables with a closed list; an empty variable counts as not set.
CHOICES: dict[str, tuple[str, ...]] = {
    "TILEKERN_ON_MISS": ("compile", "fallback", "error"),
    "TILEKERN_TRUST": ("any", "signed"),
    "TILEKERN_TRUST_SHARED": _SWITCH,
    "TILEKERN_WIDE_SUMS": _SWITCH,
    "TILEKERN_INTERPRET": _SWITCH,
    "TILEKERN_INVARIANT": (*_SWITCH, "strict"),
}
# All variables; those of the last line may have any value.
SETTINGS = (
    *CHOICES, AGAIN, APPLY,
    "TILEKERN_CACHE_DIR", "TILEKERN_CACHE_PATH", "TILEKERN_SPECS", "TILEKERN_TRUST_ROOTS",
)  # fmt: skip


def check_settings() -> None:
    """Check all variables; raise as :func:`check_setting` does."""
    for name in SETTINGS:
        check_setting(name)


def check_setting(name: str) -> None:
    """Refuse an unknown value of a variable.

    Raises:
        InputError: a variable of :data:`CHOICES` has another value, ``TILEKERN_LOOKUP_AGAIN_S`` is not a number of
            seconds, or ``TILEKERN_APPLY`` names unknown ops.
    """
    value = os.environ.get(name, "")
    known = CHOICES.get(name, (value,))
    if value and value not in known:
        raise InputError(f"{name}: unknown value {value!r}; known: {', '.join(known)}{did_you_mean(value, known)}")
    if name == AGAIN:
        seconds_of(value)
    elif name == APPLY:
        asked_for()


def seconds_of(text: str) -> float | None:
    """Return the value of ``TILEKERN_LOOKUP_AGAIN_S``; None if it is empty.

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
    """Return the arguments of ``tilekern.apply`` that ``TILEKERN_APPLY`` asks for; None if it is not set, empty or 0.

    Raises:
        InputError: it names unknown ops, or its words contradict each other.
    """
    text = os.environ.get(APPLY, "").strip()
    if text in ("", "0"):
        return None
    try:
        return switches_of(text)
    except InputError as error:
        raise InputError(f"{APPLY}: {error}") from None
