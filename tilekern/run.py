"""``python -m tilekern.run SCRIPT ARGS``: run a trainer with its models patched, without editing its code.

The program sees the same as under ``python SCRIPT ARGS`` or ``python -m MODULE ARGS``: its arguments, its import path,
and neither torch nor transformers imported in advance. ``tilekern.apply`` is called as soon as the program has imported
what transformers makes models with.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

from tilekern.integrations.startup import apply_later
from tilekern.runtime.settings import APPLY, check_settings
from tilekern.runtime.switches import ADAMW, ATTENTION, EXPERTS, FORMS, FP8, GRAPHS, OPS, text_of
from tilekern.warning import HELP, command_line, fail, invoke, versioned

# Ops that are off by default.
_ASKED = {
    EXPERTS: "Run layers of experts and their routers by tilekern too.",
    ATTENTION: 'Give models without an attn_implementation "tilekern".',
    ADAMW: "Replace torch.optim.AdamW by tilekern's.",
    GRAPHS: "Replay training steps from CUDA graphs, as tilekern.graphed does.",
    FP8: "Linear layers run products of 8-bit floats, as after tilekern.fp8.convert.",
}


class Program(NamedTuple):
    """The program to run, a script's path or with ``is_module`` a module's name, and its arguments."""

    name: str
    arguments: tuple[str, ...]
    is_module: bool

    def run(self) -> None:
        """Run it as ``__main__``."""
        sys.argv = [self.name, *self.arguments]
        if self.is_module:
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
            return
        if not sys.flags.safe_path:
            # `python -m tilekern.run` has put the current folder there.
            sys.path[0] = self.name if os.path.isdir(self.name) else os.path.dirname(os.path.realpath(self.name))
        # The absolute path becomes the program's __file__, which must stay right if it changes the folder.
        runpy.run_path(os.path.abspath(self.name), run_name="__main__")


@command_line("python -m tilekern.run")
def _program(arguments: list[str] | None) -> Program | int:
    """Return the program that a command line names and have its models patched; or the exit code."""
    import click

    def with_flags(command: Callable[..., Any]) -> Callable[..., Any]:
        """Add a flag for each op: ``--no-OP`` for ops that are on by default, ``--OP`` for others."""
        for op, what in reversed(_ASKED.items()):
            command = click.option(f"--{op}", op, is_flag=True, help=what)(command)
        for op in reversed(OPS):
            command = click.option(f"--no-{op.replace('_', '-')}", op, is_flag=True, help=f"Leave {op} out.")(command)
        return command

    own = {"allow_interspersed_args": False, "token_normalize_func": lambda name: name.replace("_", "-")}

    @versioned
    @click.command(context_settings=HELP | own)
    @click.option("-m", "is_module", is_flag=True, help="Run a module instead of a script, as python -m does.")
    @with_flags
    @click.option(
        "--forms", type=click.Choice(FORMS), default=FORMS[0], show_default=True,
        help="Patch the model families that tilekern tests, or any whose code has a known form.",
    )  # fmt: skip
    @click.argument("program", metavar="SCRIPT|MODULE")
    @click.argument("arguments", metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED)
    def command(program: str, arguments: tuple[str, ...], is_module: bool, forms: str, **given: bool) -> Program:
        """Run a script, or with -m a module, with tilekern.apply called for its models.

        Options go before SCRIPT; everything after it belongs to the program, as do the exit code and tracebacks. Python
        processes that it starts are patched with the same ops, for tested families, if tilekern is installed:
        TILEKERN_APPLY is set for them. With torchrun: torchrun ... -m tilekern.run SCRIPT.
        """
        check_settings()
        switches = {op: is_set if op in _ASKED else not is_set for op, is_set in given.items()}
        os.environ[APPLY] = text_of(switches)
        apply_later(forms=forms, **switches)
        return Program(program, arguments, is_module)

    program = invoke(command, arguments, "python -m tilekern.run")
    return program if isinstance(program, Program) else int(program)  # --help


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code, 2 for bad input; raise the program's errors."""
    program = _program(arguments)
    if not isinstance(program, Program):
        return program
    try:
        program.run()
    except BaseException as error:
        if isinstance(error, ImportError | OSError) and _of_the_program(error.__traceback__) is None:
            said = error.strerror if isinstance(error, OSError) else error
            return fail(f"{program.name} cannot be run: {said}; give the path of a script, or -m and a module's name")
        sys.excepthook = functools.partial(_show, sys.excepthook)
        raise
    return 0


def _show(
    hook: Callable[..., object], kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """Show an error as if python had run the program itself."""
    own = _of_the_program(traceback)
    hook(kind, error.with_traceback(own), own)


def _of_the_program(traceback: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback inside the program; None if the program never started."""
    around = {function.__code__.co_filename for function in (main, runpy.run_path, os.path.realpath)}
    while traceback is not None and traceback.tb_frame.f_code.co_filename in around:
        traceback = traceback.tb_next
    return traceback


if __name__ == "__main__":
    sys.exit(main())
