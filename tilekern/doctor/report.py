"""The doctor's report: lines for people, a document for programs, and what is wrong."""

from __future__ import annotations

import contextlib
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tilekern.errors import TilekernWarning

# Warnings reported for one part, since a cache may have hundreds of bad files.
_MOST_WARNINGS = 5


class Report:
    """The findings: ``lines`` of a label and text for people, ``document`` for programs, and what is ``wrong``."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.document: dict[str, Any] = {}
        self.wrong: list[str] = []

    def say(self, label: str, text: str) -> None:
        """Add a line; an empty label continues the one before."""
        self.lines.append((label, _printable(text)))

    def complain(self, text: str) -> None:
        """Add what is wrong and how to fix it."""
        text = _printable(" ".join(str(text).split()))
        if text not in self.wrong:
            self.wrong.append(text)

    @contextlib.contextmanager
    def looking_at(self, what: str, raising: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Report errors, but for those to be raised, and warnings of the block as wrong."""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                yield
            except raising:
                raise
            except Exception as error:  # noqa: BLE001 (the rest of the report is still useful)
                self.complain(f"{what} cannot be inspected: {type(error).__name__}: {error}")
        messages = [str(one.message) for one in said if isinstance(one.message, TilekernWarning)]
        for message in messages[:_MOST_WARNINGS]:
            self.complain(message)
        if len(messages) > _MOST_WARNINGS:
            self.complain(f"{len(messages) - _MOST_WARNINGS} more like it")

    def text(self, width: int) -> str:
        """Return the report for people, at most ``width`` columns wide."""
        indent = max(len(label) for label, _ in self.lines) + 2
        lines = []
        for label, text in self.lines:
            lines += _wrapped(text, label.ljust(indent), " " * indent, width)
        if not self.wrong:
            return "\n".join([*lines, "nothing is wrong"])
        lines.append(f"{len(self.wrong)} wrong:")
        for number, text in enumerate(self.wrong, 1):
            lines += _wrapped(text, f"{number:>3}. ", "     ", width)
        return "\n".join(lines)


def _wrapped(text: str, first: str, further: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, max(width, len(further) + 20), initial_indent=first, subsequent_indent=further,
        break_long_words=False, break_on_hyphens=False,
    ) or [first.rstrip()]  # fmt: skip


def _printable(text: str) -> str:
    """Return a text that is safe to print, with ~ for the home, whose path has the user's name."""
    with contextlib.suppress(RuntimeError, OSError, KeyError):
        home = str(Path.home())
        if len(home) > 1:
            text = text.replace(home, "~")
    return "".join(character if character.isprintable() else "?" for character in text)
