"""``python -m tilekern.run SCRIPT ARGS``: run a trainer whose code one does not edit, with its models patched.

The program finds what it would find under ``python SCRIPT ARGS`` or ``python -m MODULE ARGS``: its arguments, its
import path, and neither torch nor transformers imported in advance. ``tilekern.apply`` is called as soon as the program
has imported what transformers makes models with.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

import click

from tilekern import __version__
from tilekern.errors import InputError
from tilekern.integrations.startup import apply_later
from tilekern.runtime.settings import APPLY, check_settings
from tilekern.runtime.switches import ADAMW, ATTENTION, EXPERTS, FORMS, OPS, text_of
from tilekern.warning import tell

# What is off unless it is asked for.
_ASKED = {
    EXPERTS: "Layers of experts and their routers run tilekern's, too.",
    ATTENTION: 'Models that name no attn_implementation get "tilekern".',
    ADAMW: "torch.optim.AdamW makes tilekern's.",
}


class Program(NamedTuple):
    """The program to run: a script's path or, where ``is_module``, a module's name; with its arguments."""

    name: str
    arguments: tuple[str, ...]
    is_module: bool

    def run(self) -> None:
        """Run it as ``__main__``; what it raises is raised."""
        sys.argv = [self.name, *self.arguments]
        if self.is_module:
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
            return
        if not sys.flags.safe_path:
            # For `python -m tilekern.run` python has put the current folder there.
            sys.path[0] = self.name if os.path.isdir(self.name) else os.path.dirname(os.path.realpath(self.name))
        # It becomes the program's __file__, which a change of the folder must not spoil.
        runpy.run_path(os.path.abspath(self.name), run_name="__main__")


def _with_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """A flag for each op: one leaves out what is on by default, one asks for what is off."""
    for op, what in reversed(_ASKED.items()):
        command = click.option(f"--{op}", op, is_flag=True, help=what)(command)
    for op in reversed(OPS):
        command = click.option(f"--no-{op.replace('_', '-')}", op, is_flag=True, help=f"Leave {op} out.")(command)
    return command


@click.command(
    context_settings={
        "help_option_names": ["-h", "--help"], "max_content_width": 120, "allow_interspersed_args": False,
        "token_normalize_func": lambda name: name.replace("_", "-"),
    }
)  # fmt: skip
@click.option("-m", "is_module", is_flag=True, help="Run a module, as python -m does, in the place of a script.")
@_with_flags
@click.option(
    "--forms", type=click.Choice(FORMS), default=FORMS[0], show_default=True,
    help="Patch the families whose tests pass in tilekern, or any whose code has a form that is known.",
)  # fmt: skip
@click.argument("program", metavar="SCRIPT|MODULE")
@click.argument("arguments", metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED)
@click.version_option(__version__, prog_name="tilekern", message="%(prog)s %(version)s")
def command(program: str, arguments: tuple[str, ...], is_module: bool, forms: str, **given: bool) -> Program:
    """Run a script, or with -m a module, with tilekern.apply called for its models.

    Options stand before SCRIPT; all that follows is the program's. Its exit code and its tracebacks are its own.
    Processes that it starts with Python are patched with the same ops, of tested families, where tilekern is
    installed: TILEKERN_APPLY is set for them. Under torchrun: torchrun ... -m tilekern.run SCRIPT.
    """
    check_settings()
    switches = {op: is_set if op in _ASKED else not is_set for op, is_set in given.items()}
    os.environ[APPLY] = text_of(switches)
    apply_later(forms=forms, **switches)
    return Program(program, arguments, is_module)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code, 2 for bad input. The program's errors are raised."""
    try:
        program = command.main(args=arguments, prog_name="python -m tilekern.run", standalone_mode=False)
    except click.ClickException as error:
        return _fail(error.format_message())
    except InputError as error:
        return _fail(str(error))
    if not isinstance(program, Program):
        return int(program)  # --help
    try:
        program.run()
    except BaseException as error:
        if isinstance(error, ImportError | OSError) and _of_the_program(error.__traceback__) is None:
            said = error.strerror if isinstance(error, OSError) else error
            return _fail(f"{program.name} cannot be run: {said}; give the path of a script, or -m and a module's name")
        sys.excepthook = functools.partial(_show, sys.excepthook)
        raise
    return 0


def _show(
    hook: Callable[..., object], kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """Show an error as where python had run the program by itself."""
    own = _of_the_program(traceback)
    hook(kind, error.with_traceback(own), own)


def _of_the_program(traceback: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that is in the program; None where it never began."""
    around = {function.__code__.co_filename for function in (main, runpy.run_path)}
    while traceback is not None and traceback.tb_frame.f_code.co_filename in around:
        traceback = traceback.tb_next
    return traceback


def _fail(message: str) -> int:
    tell(f"tilekern: {' '.join(message.split())}", err=True)
    return 2


if __name__ == "__main__":
    sys.exit(main())
