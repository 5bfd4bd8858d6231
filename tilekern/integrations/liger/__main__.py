"""``python -m tilekern.integrations.liger``: list Liger-Kernel's functions, with the op that serves each."""

from __future__ import annotations

import sys

import click

from tilekern import __version__
from tilekern.integrations.liger import binding, left, served
from tilekern.warning import command_line, flush, invoke, one_line, tell


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="tilekern", message="%(prog)s %(version)s")
def command() -> None:
    """Print Liger-Kernel's functions, each with the op of tilekern that serves it."""
    try:
        stays = left()
    except ImportError as error:
        raise click.ClickException(f"Liger-Kernel cannot be imported: {error}") from None
    click.echo(f"liger-kernel {binding.version()}")
    for name in binding.all_functions():
        op = "Liger's own" if name in stays else served()[name]
        click.echo(f"{name:48} {op}")


@command_line("python -m tilekern.integrations.liger")
def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code, 2 if Liger-Kernel is not installed."""
    try:
        invoke(command, arguments, "python -m tilekern.integrations.liger")
        flush()
    except click.ClickException as error:
        tell(f"tilekern: {one_line(error.format_message())}", err=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
