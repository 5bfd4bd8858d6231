"""Errors of the interpreter."""

from __future__ import annotations

from tilekern.errors import TilekernError


class InterpreterError(TilekernError):
    """A kernel does something that the compiler refuses, that is a race, or that the interpreter does not support."""


class OutOfBounds(InterpreterError):  # noqa: N818 (the name says what happened)
    """A kernel touched an element outside an array."""
