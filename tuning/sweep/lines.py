"""The fields that lines of a sweep's journals must have; lines without them are skipped."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from types import FunctionType, NoneType
from typing import Any

from tilekern.spec import Problem
from tilekern.tuning.compile.machine_code import MachineCode

_DIGEST = re.compile("[0-9a-f]{64}")
# The race's name for the copy of as many bytes as the problem must move.
COPY = "copy"


def _is_error(value: Any) -> bool:
    """Return whether a value is a number; the error of a wrong candidate may be infinite or NaN."""
    if not isinstance(value, int | float):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def _is_number(value: Any) -> bool:
    return _is_error(value) and math.isfinite(value)


def _is_time(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and _is_number(value)


def _is_machine_code(value: Any) -> bool:
    """Return whether it counts today's kinds of instructions; another version of tilekern may have others."""
    try:
        code = MachineCode.from_dict(value)
    except (TypeError, KeyError):
        return False
    return all(type(count) is int for part in (code.whole, *code.loops) for count in vars(part).values())


def _is_digest(value: Any) -> bool:
    """Return whether a value is a sha256, which can name no other file than an artifact's."""
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def _all(form: Any) -> Callable[[Any], bool]:
    """Return the form of an object whose values have one form."""
    return lambda value: isinstance(value, dict) and all(_is(one, form) for one in value.values())


# The form of each field: types, a function that tells, or an object with the forms of its fields. A field whose name
# ends with a question mark may be missing.
_RESOURCES = dict.fromkeys(("registers", "stack_bytes", "shared_bytes", "threads", "code_bytes"), _is_count)
_CHECK = {"passed": bool, "relative_error": _is_error, "elementwise_error": _is_error}
_TIMING = {
    "median_us": _is_time, "spread_us?": _is_number, "samples": _is_count, "left?": str, "behind?": _is_number,
    "on?": _all(_is_time),
}  # fmt: skip
_FORMS: Mapping[str, Mapping[str, Any]] = {
    "compiled": {
        "key": str, "status": str, "kernel?": str, "frontend_s?": _is_number, "tileiras_s?": _is_number,
        "reading_s?": _is_number, "gave_up_after_s?": _is_number,
        "machine_code?": _is_machine_code, "toolkit?": {"key": str},
    },
    "ok": {"sha256": _is_digest, "symbol": str, "code_sha256": str, "assumptions": object, "resources": _RESOURCES,
        "bytecode?": _is_digest,},
    # The compiler, or the check, rejected it. What kept a candidate from being tried, and passes, leaves it open.
    "failed": {"reason": str}, "open": {"reason": str},
    "measured": {"candidate": str, "check?": _CHECK, "timing?": _TIMING, "race?": str, "code_sha256?": str},
    "quarantine": {"candidate": str, "reason": str, "libraries?": dict},
    "gpu": {"gpu": str, "driver": str},
    "races": {
        "race": str, "kernel": str, "problem": str, "strategy": str, "untimed": _all((str, NoneType)),
        "seconds?": _all(_is_number), "gpu?": dict, "followers?": _all(str),
    },
    "chosen": {
        "chosen": str, "of": str, "race": str, "candidate?": str,
        "step?": {"token_us": _is_time, "otherwise_us": _is_time, "tried": _is_count},
    },
    "skipped": {"skipped": str, "reason": str},
    "signatures": {"signed": str, "signature": str},
    "runs": {
        "run": str, "stage": str, "host": str, "process": _is_count, "started": str, "seconds": _is_number,
        "ended": bool,
    },
}  # fmt: skip


def copy_key(kernel: str, problem: Problem) -> str:
    """Return the journal's key for the copy of as many bytes as a problem must move."""
    return f"{COPY}|{kernel}|{problem.key}"


def is_copy(key: str) -> bool:
    """Return whether a line of that key is about a copy, not a candidate."""
    return key.startswith(f"{COPY}|")


def not_in(problem: str, step: object) -> str:
    """Return the journal's key for a problem, named ``kernel|problem``, that a step does not launch."""
    return f"{problem} not in {step}"


def is_whole(journal: str, line: Mapping[str, Any]) -> bool:
    """Return whether a line of a journal has the fields that are read, in their types."""
    if not _has(line, _FORMS[journal]):
        return False
    if journal == "gpu":  # printed as it is, whatever else it names
        return _all(str)(line)
    if journal == "chosen":
        return ("candidate" in line) == ("step" in line)
    return journal != "compiled" or (line["status"] in ("ok", "failed", "open") and _has(line, _FORMS[line["status"]]))


def _has(line: Mapping[str, Any], form: Mapping[str, Any]) -> bool:
    return all(
        _is(line[name], wanted) if (name := field.removesuffix("?")) in line else name != field
        for field, wanted in form.items()
    )


def _is(value: Any, form: Any) -> bool:
    if isinstance(form, Mapping):
        return isinstance(value, dict) and _has(value, form)
    return form(value) if isinstance(form, FunctionType) else isinstance(value, form)
