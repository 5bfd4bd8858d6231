"""Helpers for tests of Ctrl-C."""

import signal


def hear_interrupts() -> None:
    """For ``preexec_fn``: a process that a shell started in the background ignores Ctrl-C, and so do its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
