"""The doctor's report: lines for people, a document for programs, and what is wrong."""

from __future__ import annotations

import contextlib
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tilekern.errors import TilekernWarning

# Of one part: a cache may have hundreds of bad files.
_MOST_WARNINGS = 5


class Report:
    """What the doctor found: ``lines`` of a label and text for people, ``document`` for programs, and ``wrong``."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.document: dict[str, Any] = {}
        self.wrong: list[str] = []

    def say(self, label: str, text: str) -> None:
        """Add a line; text that goes on under the same label leaves that empty."""
        self.lines.append((label, _printable(text)))

    def complain(self, text: str) -> None:
        """Add what is wrong, with the way to mend it."""
        text = _printable(" ".join(str(text).split()))
        if text not in self.wrong:
            self.wrong.append(text)

    @contextlib.contextmanager
    def looking_at(self, what: str) -> Iterator[None]:
        """Have a part that cannot be looked at be what is wrong, and its warnings too."""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                yield
            except Exception as error:  # noqa: BLE001 (whatever is broken here, the rest is still worth a look)
                self.complain(f"{what} cannot be looked at: {type(error).__name__}: {error}")
        messages = [str(one.message) for one in said if isinstance(one.message, TilekernWarning)]
        for message in messages[:_MOST_WARNINGS]:
            self.complain(message)
        if len(messages) > _MOST_WARNINGS:
            self.complain(f"{len(messages) - _MOST_WARNINGS} more like it")

    def text(self, width: int) -> str:
        """The report for people, at most so many columns wide."""
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
    """A text that a terminal prints as it is, with ~ for the home, which has the user's name in it."""
    with contextlib.suppress(RuntimeError, OSError, KeyError):
        home = str(Path.home())
        if len(home) > 1:
            text = text.replace(home, "~")
    return "".join(character if character.isprintable() else "?" for character in text)
