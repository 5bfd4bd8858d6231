"""The errors that tilekern raises on purpose, and its warning; each message is a line that says what would be right."""

import re

# What passes, in the words of the compilers, of ptxas and of Python.
_PASSING = re.compile(
    r"no space left|quota exceeded|too many open files|cannot allocate memory|resource temporarily unavailable|"
    r"out of memory|bad_alloc|memory allocation fail|MemoryError|input/output error|stale file handle|"
    r"read-only file system|text file busy|no such file or directory|permission denied|can't start new thread",
    re.IGNORECASE,
)


class TilekernError(Exception):
    """Base of every error of tilekern's own."""


class InputError(TilekernError):
    """Something that the caller named or gave is wrong: command lines exit with 2."""


class ToolchainMissing(TilekernError):  # noqa: N818 (the name says the state)
    """The tile compiler is needed and is not installed: command lines exit with 4."""


class CompileFailed(TilekernError):  # noqa: N818
    """The compiler rejected a candidate, crashed, or exceeded its time."""


class CompileTimeout(CompileFailed):
    """The compiler exceeded its time: with more it may succeed."""


class CompileInterrupted(CompileFailed):
    """The compiler could not work for a reason that passes: memory, disk, processes, a signal; it may succeed later."""


def compile_failure(error: Exception | str) -> type[CompileFailed]:
    """The kind of a compiler's error, or of what it said: was the candidate rejected, or what surrounds it at fault?"""
    is_passing = isinstance(error, OSError | MemoryError) or _PASSING.search(str(error))
    return CompileInterrupted if is_passing else CompileFailed


class CacheMiss(TilekernError):  # noqa: N818
    """Raised under the miss policy ``error`` for a problem that no cache holds."""


class CannotRun(TilekernError):  # noqa: N818
    """A record serves, and this machine cannot run it: its library is missing, or the driver refuses it."""


class RanksDiffer(TilekernError):  # noqa: N818
    """The ranks of a job cannot be brought to run the same kernels, or one of them did not answer in time."""


class LogitsSkipped(InputError, AttributeError):  # noqa: N818
    """Logits are used that a patched model's forward did not make; as an attribute that is missing to ``hasattr``."""


class TilekernWarning(UserWarning, RuntimeWarning):
    """Every warning of tilekern's own (:mod:`tilekern.warning`); filters for either of its bases hold for it, too."""
