"""The commands of ``python -m tilekern.tune``, one file each, with a click command named ``command``."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import click

# Words that are no model but a command of their own, in the module of that name; each is imported when it is meant.
COMMANDS = ("preflight", "publish", "refresh", "report", "serve", "status")


def command_named(name: str) -> click.Command:
    """Return the command of a name: one of :data:`COMMANDS`, or ``tune``."""
    found: click.Command = import_module(f"tilekern.tuning.commands.{name}").command
    return found
