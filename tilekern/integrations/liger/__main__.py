"""``python -m tilekern.integrations.liger``: list Liger-Kernel's functions, with the op that serves each."""

from __future__ import annotations

import sys

import click

from tilekern.integrations.liger import binding, left, served
from tilekern.warning import HELP, command_line, flush, invoke, versioned


@versioned
@click.command(context_settings=HELP)
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
    invoke(command, arguments, "python -m tilekern.integrations.liger")
    flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
