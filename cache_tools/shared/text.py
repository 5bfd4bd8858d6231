"""Numbers with units, for people, and JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import click

from tilekern.cache import Outline, Record


def print_json(document: Any) -> None:
    """Print one JSON document."""
    click.echo(json.dumps(document, indent=1))


def size(size_bytes: float) -> str:
    """Bytes for people: ``512 B``, ``34.5 KiB``."""
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} GiB"


def age(seconds: float) -> str:
    """An age for people: ``45s``, ``12m``, ``5h``, ``30d``."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f}{unit}"
    return f"{seconds:.0f}s"


def count(number: int, thing: str) -> str:
    """A number with its noun: ``1 record``, ``2 records``."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def number(document: dict[str, Any] | None, name: str) -> float | None:
    """The number that ``document`` has under ``name``; None where it has none, or one that no time or size can be."""
    value = (document or {}).get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def time_us_of(record: Record | Outline) -> float | None:
    """Microseconds that a record's winner takes: measured, else predicted, else None."""
    measured = number(record.measurement, "median_us")
    return number(record.prediction, "time_us") if measured is None else measured


def gain_of(record: Record | Outline) -> float | None:
    """How many times faster than the default config, where both were timed."""
    return _gain(record.measurement, "median_us")


def predicted_gain_of(record: Record | Outline) -> float | None:
    """How many times faster than the default config it was predicted to be, where both were predicted."""
    return _gain(record.prediction, "time_us")


def _gain(facts: dict[str, Any] | None, of: str) -> float | None:
    own, default = number(facts, of), number(facts, "default_us")
    return default / own if own and default else None


def plain(value: Any) -> str:
    """A value on one line, with nothing in it that a terminal would obey."""
    if isinstance(value, str):
        return value if value.isprintable() else json.dumps(value)
    return json.dumps(value)
