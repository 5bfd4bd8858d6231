"""Options and arguments that several commands share."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from tilekern.cache import CacheError, Store, user_root
from tilekern.cache_tools.shared.selection import Selection
from tilekern.warning import versioned

Work = Callable[..., Any]
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


class StoreType(click.ParamType):
    """A cache's folder on the command line."""

    name = "directory"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Store:  # noqa: ARG002
        """Return the store in a folder, which need not exist; refuse a file."""
        root = Path(_not_empty(value, param, "a folder"))
        if root.exists() and not root.is_dir():
            raise CacheError(f"{root} is a file; a cache is a folder")
        return Store(root)


class PathType(click.Path):
    """A path on the command line, which must not be empty.

    Args:
        what: what it names, for the error.
        options: as of ``click.Path``.
    """

    def __init__(self, what: str, **options: Any) -> None:
        super().__init__(path_type=Path, **options)
        self._what = what

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path."""
        return super().convert(_not_empty(value, param, self._what), param, ctx)


def _not_empty(value: Any, param: click.Parameter | None, what: str) -> Any:
    # An empty value, as of an unset shell variable, would mean the current folder.
    if value == "":
        name = param.opts[0] if isinstance(param, click.Option) else param.human_readable_name if param else "it"
        raise CacheError(f"{name} must name {what}, and is empty")
    return value


class Duration(click.ParamType):
    """An age on the command line, such as ``30d`` or ``12h``."""

    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # noqa: ARG002
        """Return the age in seconds."""
        match = re.fullmatch(r"([0-9]{1,9})([smhdw])", value)
        if not match:
            option = param.opts[0] if param else "an age"
            raise CacheError(f"{option} must be a number with one of s, m, h, d, w, such as 30d or 12h, got {value!r}")
        return float(int(match[1]) * _SECONDS[match[2]])


FILE = PathType("a file")
FOLDER = PathType("a folder", file_okay=False)
PLACE = PathType("a folder or a pack")
cache_dir = click.option(
    "--cache-dir",
    "store",
    type=StoreType(),
    default=lambda: str(user_root()),
    help="The cache; default TILEKERN_CACHE_DIR, else the user's cache folder.",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
all_layers = click.option(
    "--layers", "all_layers", is_flag=True, help="All layers of a lookup: the cache, TILEKERN_CACHE_PATH, packs."
)
plain_http = click.option(
    "--plain-http", is_flag=True, help="Use HTTP for an OCI registry; always so for one on this machine."
)
key_file = click.option("--key", "key_file", required=True, type=FILE, help="The private key that `keygen` wrote.")
dry_run = click.option("--dry-run", is_flag=True, help="Say what would be removed, and change nothing.")
confirmed = click.option("--yes", "-y", "confirmed", is_flag=True, help="Do not ask.")
_FILTERS = {
    "kernel": click.option("--kernel", help="Only records of this kernel."),
    "target": click.option(
        "--gpu", "--target", "target", help="Only records of this GPU: its key, name or arch; --target is deprecated."
    ),
    "toolkit": click.option("--toolkit", help="Only records of the toolkit with this key."),
    "problem": click.option("--problem", help="Only problems with these dimensions: rows=8192,dtype=bfloat16."),
    "provenance": click.option("--provenance", help="Only measured, predicted or default records."),
    "older_than_s": click.option("--older-than", "older_than_s", type=Duration(), help="Only older ones: 30d, 12h."),
    "stale": click.option("--stale", is_flag=True, help="Only records whose kernel's source has changed since."),
}


def command(work: Work) -> click.Command:
    """Make a command of the function's name, with --version."""
    return versioned(click.command()(work))


def with_filters(*names: str) -> Callable[[Work], Work]:
    """Add options that choose records, all of them by default; the command gets them as one ``selection``."""
    names = names or tuple(_FILTERS)

    def decorate(work: Work) -> Work:
        @functools.wraps(work)
        def run(**options: Any) -> Any:
            return work(selection=Selection(**{name: options.pop(name) for name in names}), **options)

        for name in reversed(names):
            run = _FILTERS[name](run)
        return run

    return decorate
