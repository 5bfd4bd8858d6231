"""Errors of the interpreter."""

from __future__ import annotations

from tilekern.errors import TilekernError


class InterpreterError(TilekernError):
    """A kernel did what the compiler would refuse, what is a race, or what the interpreter does not know."""


class OutOfBounds(InterpreterError):  # noqa: N818 (the name says what happened)
    """A kernel touched an element outside an array."""
