"""The library's warnings: one line each, without a line of source, and filtered and caught like any other.

They are about a cache, a machine or a model, not about the line of code that happened to run. So each has the library's
name instead of a file, and Python prints only ``tilekern:0: TilekernWarning: MESSAGE``. Filters match its class, its
message or the module ``tilekern``; pytest and ``logging.captureWarnings`` get it like others. The library leaves
``warnings.showwarning`` to the application; the command lines replace it while they run (:func:`shown_plainly`). What
they print contains no terminal control characters (:func:`tell`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from tilekern.errors import ExtraMissing, InputError, TilekernError, TilekernWarning, ToolchainMissing, needing

if TYPE_CHECKING:
    import click

_PLACE = "tilekern"
# The settings of click for each command line.
HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
_said: set[str] = set()
# Makes the filter `default` show a message once, as it does for a line of code.
_registry: dict[str | tuple[str, type[Warning], int], int] = {}


def printable(text: str) -> str:
    """Return a text on one line with control and unprintable characters escaped.

    Names, reasons and errors may come from a file that others wrote, so everything that is printed passes here.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def one_line(text: str) -> str:
    """Join the lines of a text by single spaces; spaces inside a line, as of a path, stay."""
    return " ".join(filter(None, map(str.strip, text.splitlines())))


def tell(*lines: str, err: bool = False) -> None:
    """Print lines of a command line, each made :func:`printable`; ``err`` selects the standard error."""
    print("\n".join(map(printable, lines)), file=sys.stderr if err else sys.stdout, flush=True)


def fail(message: str, code: int = 2) -> int:
    """Print the error of a command line on one line of the standard error; return the exit code."""
    tell(f"{_PLACE}: {one_line(message)}", err=True)
    return code


def flush() -> None:
    """Flush the standard output; a process may have none, as one of a daemon that closed it."""
    if sys.stdout is not None:
        sys.stdout.flush()


def warn(message: str) -> None:
    """Warn; the message is one line and says what is wrong, then what to do."""
    warnings.warn_explicit(printable(one_line(message)), TilekernWarning, _PLACE, 0, registry=_registry)


def warn_once(message: str, about: object = None) -> None:
    """Warn, but only the first time in this process.

    Args:
        message: as for :func:`warn`.
        about: identifies what is warned about, such as a file; the message itself if None.
    """
    name = message if about is None else str(about)
    if name not in _said:
        _said.add(name)
        warn(message)


@contextlib.contextmanager
def warned_after(seconds: float, message: str, about: object = None) -> Iterator[None]:
    """Warn while the block runs if it takes longer than ``seconds``; only once if it is said what ``about``."""
    timer = threading.Timer(seconds, _warn_from_a_thread, [message, about])
    timer.daemon = True  # a process that ends does not wait for it
    with contextlib.suppress(RuntimeError):  # if no thread can be started, there is no warning
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _warn_from_a_thread(message: str, about: object) -> None:
    # If warnings are errors, nothing in a timer's thread would catch this one.
    with contextlib.suppress(TilekernWarning):
        if about is None:
            warn(message)
        else:
            warn_once(message, about)


@dataclass(frozen=True)
class Deprecated:
    """A stable name that still works and will go (docs/releasing.md has the rules, CHANGELOG lists it).

    Attributes:
        name: the name as users know it: ``tilekern.tune(fast=…)``, or ``--target`` of a command.
        instead: what to use.
        since: the minor release that deprecates it, such as ``0.2``.
        removed_in: the minor release in which it goes, at least two later.
    """

    name: str
    instead: str
    since: str
    removed_in: str

    def __str__(self) -> str:
        since, removed = self.since, self.removed_in
        return f"{self.name} is deprecated since tilekern {since} and will be removed in {removed}; use {self.instead}"

    def warn(self, stacklevel: int = 2) -> None:
        """Give a ``DeprecationWarning`` at the caller's line; the caller itself is ``stacklevel`` 1, as in Python."""
        warnings.warn(str(self), DeprecationWarning, stacklevel + 1)

    def tell(self) -> None:
        """Print a line on the standard error, for a command line."""
        tell(f"{_PLACE}: {self}", err=True)


# All that is deprecated. A test fails once the version reaches a name's removal.
DEPRECATED: Mapping[str, Deprecated] = {
    "--target": Deprecated("--target of python -m tilekern.cache_tools", "--gpu", "0.2", "0.4"),
}


@contextlib.contextmanager
def shown_plainly() -> Iterator[None]:
    """Print tilekern's warnings as ``tilekern: MESSAGE``, for a command line; others are shown as before."""
    before = warnings.showwarning

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int,
        file: TextIO | None = None, line: str | None = None,
    ) -> None:  # fmt: skip
        if issubclass(category, TilekernWarning):
            print(f"{_PLACE}: {message}", file=file or sys.stderr)
        else:
            before(message, category, filename, lineno, file, line)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before


def command_line(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator for the function of a command line, which handles the errors that all of them can meet.

    An error of tilekern, a missing extra, and a file or an output that the system refuses, are one line and exit code
    2, or 4 if a compiler is missing. Ctrl-C is one line and 130, while modules are loaded too. A pipe whose reader has
    gone is no error.
    """

    def decorated(main: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(main)
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                with needing(name):
                    try:
                        return main(*args, **kwargs)
                    except (TilekernError, TilekernWarning) as error:  # a warning is raised under `python -W error`
                        return fail(str(error), 4 if isinstance(error, ToolchainMissing) else 2)
                    finally:
                        # What is buffered would fail at exit, with another code and a trace.
                        _flush_output()
            except ExtraMissing as error:
                return fail(str(error))
            except KeyboardInterrupt:
                return fail("stopped", 130)
            except BrokenPipeError:
                _drop_output()
                return 0
            except OSError as error:
                try:
                    _flush_output()
                except OSError:
                    _drop_output()
                return fail(f"{error.filename or 'input or output'}: {error.strerror or error}")

        return run

    return decorated


def _flush_output() -> None:
    """Write what is buffered; there is no output if the process was started without one."""
    if sys.stdout is not None:
        sys.stdout.flush()


def _drop_output() -> None:
    """Let what is still buffered go nowhere, since Python would complain once more when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def versioned(command: click.Command) -> click.Command:
    """Add ``--version`` to a command of click."""
    import click

    from tilekern import __version__

    return click.version_option(__version__, prog_name="tilekern", message="%(prog)s %(version)s")(command)


def invoke(command: click.Command, arguments: Sequence[str] | None, prog_name: str, hint: str = "") -> Any:
    """Run a command of click; return what it returns, or the exit code of ``--help`` and ``--version``.

    ``command.main`` would end the process with exit code 1 where the reader of a pipe has gone.

    Raises:
        InputError: an option or an argument is wrong; ``hint`` ends the message.
        click.Abort: the user did not answer a question.
    """
    import click

    try:
        with command.make_context(prog_name, list(sys.argv[1:] if arguments is None else arguments)) as context:
            return command.invoke(context)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        raise InputError(f"{error.format_message()}{hint}") from None
