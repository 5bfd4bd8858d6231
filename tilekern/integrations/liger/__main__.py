"""``python -m tilekern.integrations.liger``: list Liger-Kernel's functions, with the op that serves each."""

from __future__ import annotations

import sys

import click

from tilekern import __version__
from tilekern.integrations.liger import binding, left, served
from tilekern.warning import flush


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


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code, 2 if Liger-Kernel is not installed."""
    try:
        command.main(args=arguments, prog_name="python -m tilekern.integrations.liger", standalone_mode=False)
        flush()
    except click.ClickException as error:
        click.echo(f"tilekern.integrations.liger: {' '.join(error.format_message().split())}", err=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
