"""The errors that tilekern raises on purpose, and its warning; each message is one line that says what to do."""

import contextlib
import re
from collections.abc import Iterable, Iterator

# Messages of compilers, ptxas and Python about conditions that pass.
_PASSING = re.compile(
    r"no space left|quota exceeded|too many open files|cannot allocate memory|resource temporarily unavailable|"
    r"out of memory|bad_alloc|memory allocation fail|MemoryError|input/output error|stale file handle|"
    r"read-only file system|text file busy|no such file or directory|permission denied|can't start new thread",
    re.IGNORECASE,
)


class TilekernError(Exception):
    """Base of all errors that tilekern raises on purpose."""


class InputError(TilekernError):
    """The caller's input is wrong; command lines exit with 2."""


class ToolchainMissing(TilekernError):  # noqa: N818 (the name says the state)
    """A compiler is needed and not installed; command lines exit with 4."""


class CompileFailed(TilekernError):  # noqa: N818
    """The compiler rejected a candidate, crashed, or exceeded its time limit."""


class CompileTimeout(CompileFailed):
    """The compiler exceeded its time limit; with more time it may succeed."""


class CompileInterrupted(CompileFailed):
    """The compiler failed for a reason that passes (memory, disk, processes, a signal); it may succeed later."""


def compile_failure(error: Exception | str) -> type[CompileFailed]:
    """Return whether a compiler's error, or its text, means a rejected candidate or a condition that passes."""
    is_passing = isinstance(error, OSError | MemoryError) or _PASSING.search(str(error))
    return CompileInterrupted if is_passing else CompileFailed


def did_you_mean(word: object, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ``; did you mean NAME?`` for the known name that a word resembles most, or an empty text.

    Args:
        word: what was given instead of a name; it may be no text at all.
        known: the names; upper case and hyphens in place of underscores do not count as differences.
        cutoff: how similar a name must be, 0 to 1.
    """
    import difflib  # only an error needs it

    names = {_folded(name): name for name in known}
    nearest = difflib.get_close_matches(_folded(str(word)), names, n=1, cutoff=cutoff)
    return f"; did you mean {names[nearest[0]]}?" if nearest else ""


def _folded(name: str) -> str:
    return name.strip().lower().replace("-", "_")


class CacheMiss(TilekernError):  # noqa: N818
    """No cache has a record of a problem, and the miss policy is ``error``."""


class CannotRun(TilekernError):  # noqa: N818
    """This machine cannot run the record that serves: its library is missing, or the driver refuses its artifact."""


class DriverError(CannotRun):
    """A call of the CUDA driver failed; ``code`` is the error's number."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class NoVariant(TilekernError):  # noqa: N818
    """No stored variant of a kernel allows the arguments of a launch."""


class RowsVary(TilekernError):  # noqa: N818
    """In the strict invariant mode something would run that may make a token's row depend on others."""


class RanksDiffer(TilekernError):  # noqa: N818
    """The ranks of a job cannot run the same kernels, or one of them did not answer in time."""


# The extra that brings a package, by the package's name; :mod:`tilekern.runtime.requirements` has the versions.
EXTRA_OF = {
    "torch": "torch",
    "transformers": "torch",
    "numpy": "torch",
    "click": "tools",
    "rich": "tools",
    "tokenizers": "text",
}


class ExtraMissing(TilekernError, ModuleNotFoundError):  # noqa: N818
    """A package is not installed that one of tilekern's extras brings."""


@contextlib.contextmanager
def needing(what: str) -> Iterator[None]:
    """Name the extra if an import fails inside; for ``with`` and as a decorator.

    Args:
        what: the name or the command that cannot work without the package.

    Raises:
        ExtraMissing: a package of :data:`EXTRA_OF` is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in EXTRA_OF:
            raise
        install = f"pip install 'tilekern[{EXTRA_OF[error.name]}]'"
        raise ExtraMissing(f"{what} needs {error.name}, which is not installed: {install}", name=error.name) from None


class LogitsSkipped(InputError, AttributeError):  # noqa: N818
    """The caller uses logits that a patched model's forward did not compute; ``hasattr`` sees a missing attribute."""


class TilekernWarning(UserWarning, RuntimeWarning):
    """The class of all warnings of tilekern (:mod:`tilekern.warning`); filters for either base match it too."""
