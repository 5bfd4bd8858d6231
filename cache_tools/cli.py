"""Which commands there are. Each with --json prints one JSON document, which its help describes.

This is click and not typer, whose import and first call alone took half of the 0.4 s that `ls` may take.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module

import click

from tilekern.cache_tools.shared.options import HELP, version

_COMMANDS = (
    "clear", "diff", "keygen", "ls", "pack", "prune", "pull", "push", "repository", "revoke", "show", "sign", "stats",
    "unpack", "verify", "wanted", "wheel", "why",
)  # fmt: skip
_FILES = {"add": "unpack"} | {name: name for name in _COMMANDS}


class _Commands(Mapping[str, click.Command]):
    """The commands by name, of which each is imported when it is asked for: `ls` takes no longer for what others need.

    A group's own mapping, and not only its ``get_command``, since click suggests the names in it for a mistyped one.
    """

    def __getitem__(self, name: str) -> click.Command:
        file = _FILES[name]
        found: click.Command = getattr(import_module(f"tilekern.cache_tools.commands.{file}"), file)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(_FILES)

    def __len__(self) -> int:
        return len(_FILES)


@version
@click.group(commands=_Commands(), no_args_is_help=False, context_settings=HELP)
def app() -> None:
    """Look after a cache of tuned kernels."""
