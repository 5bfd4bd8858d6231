"""What the lines of a sweep's journals must hold to be read; others are passed over as torn ones are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NUMBER = (int, float)
# The types of the fields that a line must have, and of those that it may have; of objects within it, the same.
_RESOURCES = dict.fromkeys(("registers", "stack_bytes", "shared_bytes", "threads", "code_bytes"), int)
_CHECK = {"passed": bool, "relative_error": _NUMBER, "elementwise_error": _NUMBER}
_TIMING = {"median_us": _NUMBER}
_TOOLKIT = {"key": str}
_NEEDS: Mapping[str, Mapping[str, Any]] = {
    "compiled": {"key": str, "status": str},
    "ok": {"sha256": str, "symbol": str, "code_sha256": str, "assumptions": object, "resources": _RESOURCES},
    "failed": {"reason": str},
    "measured": {"candidate": str},
    "quarantine": {"candidate": str, "reason": str},
    "gpu": {"gpu": str, "driver": str},
    "races": {"race": str, "kernel": str, "problem": str, "strategy": str, "untimed": dict},
    "skipped": {"skipped": str, "reason": str},
    "runs": {
        "run": str, "stage": str, "host": str, "process": int, "started": str, "seconds": _NUMBER, "ended": bool,
    },
}  # fmt: skip
_MAY: Mapping[str, Mapping[str, Any]] = {
    "compiled": {
        "kernel": str, "frontend_s": _NUMBER, "tileiras_s": _NUMBER, "reading_s": _NUMBER, "gave_up_after_s": _NUMBER,
        "machine_code": dict, "toolkit": _TOOLKIT,
    },
    "measured": {"check": _CHECK, "timing": _TIMING, "race": str, "code_sha256": str},
    "quarantine": {"libraries": dict},
    "races": {"seconds": dict, "gpu": dict},
}  # fmt: skip


def is_whole(journal: str, line: Mapping[str, Any]) -> bool:
    """Whether a line of a journal holds what its readers take from it, in the types that they take it in."""
    if not _has(line, _NEEDS[journal]):
        return False
    if journal == "compiled" and (line["status"] not in ("ok", "failed") or not _has(line, _NEEDS[line["status"]])):
        return False
    return all(line.get(name) is None or _is(line[name], form) for name, form in _MAY.get(journal, {}).items())


def _has(line: Mapping[str, Any], form: Mapping[str, Any]) -> bool:
    return all(name in line and _is(line[name], wanted) for name, wanted in form.items())


def _is(value: Any, form: Any) -> bool:
    return isinstance(value, dict) and _has(value, form) if isinstance(form, Mapping) else isinstance(value, form)
