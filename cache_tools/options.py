"""Options and arguments that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from cache_tools.selection import parse_duration
from tilekern.cache import CacheError, Store, user_root

Command = Callable[..., Any]


class StoreType(click.ParamType):
    """A cache's folder on the command line."""

    name = "directory"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Store:  # noqa: ARG002
        """The store in a folder, which need not exist; a file is refused."""
        root = Path(value)
        if root.exists() and not root.is_dir():
            raise CacheError(f"{root} is a file; a cache is a folder")
        return Store(root)


class Duration(click.ParamType):
    """An age on the command line, such as ``30d`` or ``12h``."""

    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # noqa: ARG002
        """The age in seconds."""
        return parse_duration(value)


cache_dir = click.option(
    "--cache-dir",
    "store",
    type=StoreType(),
    default=lambda: str(user_root()),
    help="The cache (else TILEKERN_CACHE_DIR, else the user's cache folder).",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
target = click.option("--target", help="Only of this GPU: its key, name or arch.")
toolkit = click.option("--toolkit", help="Only of this toolkit's key.")


def with_filters(command: Command) -> Command:
    """Options that choose records by what they are of."""
    for option in (
        click.option("--provenance", help="Only measured, predicted or default ones."),
        toolkit,
        target,
        click.option("--kernel", help="Only records of this kernel."),
    ):
        command = option(command)
    return command


def with_age_filters(command: Command) -> Command:
    """Options that choose records by their age."""
    command = click.option("--stale", is_flag=True, help="Only those whose kernel's source has changed since.")(command)
    older_than = click.option("--older-than", "older_than_s", type=Duration(), help="Only older ones: 30d, 12h.")
    return older_than(command)
