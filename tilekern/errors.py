"""The errors that tilekern raises on purpose, and its warning; each message is a line that says what would be right."""


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


class CacheMiss(TilekernError):  # noqa: N818
    """Raised under the miss policy ``error`` for a problem that no cache holds."""


class CannotRun(TilekernError):  # noqa: N818
    """A record serves, and this machine cannot run it: its library is missing, or the driver refuses it."""


class NoVariant(TilekernError):  # noqa: N818
    """No stored variant of a kernel allows the arguments that it was launched with."""


class RanksDiffer(TilekernError):  # noqa: N818
    """The ranks of a job cannot be brought to run the same kernels, or one of them did not answer in time."""


class LogitsSkipped(InputError, AttributeError):  # noqa: N818
    """Logits are used that a patched model's forward did not make; as an attribute that is missing to ``hasattr``."""


class TilekernWarning(UserWarning, RuntimeWarning):
    """Every warning of tilekern's own (:mod:`tilekern.warning`); filters for either of its bases hold for it, too."""
