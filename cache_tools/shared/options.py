"""Options and arguments that several commands share."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from tilekern import __version__
from tilekern.cache import CacheError, Store, user_root

Work = Callable[..., Any]
# How each command, which takes it over from the group, is asked for help.
HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
version = click.version_option(__version__, prog_name="tilekern", message="%(prog)s %(version)s")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


class StoreType(click.ParamType):
    """A cache's folder on the command line."""

    name = "directory"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Store:  # noqa: ARG002
        """The store in a folder, which need not exist; a file is refused."""
        root = Path(_not_empty(value, param, "a folder"))
        if root.exists() and not root.is_dir():
            raise CacheError(f"{root} is a file; a cache is a folder")
        return Store(root)


class PlaceType(click.Path):
    """A cache's folder or a pack on the command line."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path, which must be one."""
        return super().convert(_not_empty(value, param, "a folder or a pack"), param, ctx)


def _not_empty(value: Any, param: click.Parameter | None, what: str) -> Any:
    """The value as it is; an empty one, as of a variable of the shell that is not set, would be this folder."""
    if value == "":
        name = param.opts[0] if isinstance(param, click.Option) else param.human_readable_name if param else "it"
        raise CacheError(f"{name} must name {what}, and is empty")
    return value


class Duration(click.ParamType):
    """An age on the command line, such as ``30d`` or ``12h``."""

    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # noqa: ARG002
        """The age in seconds."""
        found = re.fullmatch(r"([0-9]{1,9})([smhdw])", value)
        if not found:
            option = param.opts[0] if param else "an age"
            raise CacheError(f"{option} must be a number with one of s, m, h, d, w, such as 30d or 12h, got {value!r}")
        return float(int(found[1]) * _SECONDS[found[2]])


cache_dir = click.option(
    "--cache-dir",
    "store",
    type=StoreType(),
    default=lambda: str(user_root()),
    help="The cache (else TILEKERN_CACHE_DIR, else the user's cache folder).",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
target = click.option("--gpu", "--target", "target", help="Only of this GPU: its key, name or arch.")
toolkit = click.option("--toolkit", help="Only of this toolkit's key.")
all_layers = click.option(
    "--layers", "all_layers", is_flag=True, help="All layers of a lookup: the cache, TILEKERN_CACHE_PATH, packs."
)
plain_http = click.option(
    "--plain-http", is_flag=True, help="Talk to an OCI registry by HTTP; one on this machine always is."
)
dry_run = click.option("--dry-run", is_flag=True, help="Say what would go and how much that frees, and change nothing.")
confirmed = click.option("--yes", "-y", "confirmed", is_flag=True, help="Do not ask.")


def command(work: Work) -> click.Command:
    """A command of the function's name that also says the version."""
    return version(click.command()(work))


def with_filters(work: Work) -> Work:
    """Options that choose records by what they are of."""
    for option in (
        click.option("--provenance", help="Only measured, predicted or default ones."),
        click.option("--problem", help="Only of problems with these dimensions: rows=8192,dtype=bfloat16."),
        toolkit,
        target,
        click.option("--kernel", help="Only records of this kernel."),
    ):
        work = option(work)
    return work


def with_age_filters(work: Work) -> Work:
    """Options that choose records by their age."""
    stale = click.option("--stale", is_flag=True, help="Only those whose kernel's source has changed since.")
    older_than = click.option("--older-than", "older_than_s", type=Duration(), help="Only older ones: 30d, 12h.")
    return older_than(stale(work))
