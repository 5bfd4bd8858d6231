"""The fault layer: makes chosen calls of this process to the C library fail, or kill it.

It is ``faults.c``, built with the C compiler at hand and loaded with ``LD_PRELOAD``, so what is tested is the code that
users run, down to the calls that Python itself makes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

# In the order of the enumeration in faults.c.
OPERATIONS = ("open", "read", "write", "fsync", "rename", "unlink", "mkdir", "rmdir", "list", "stat", "touch")
ACTIONS = ("nothing", "fail once", "fail on", "kill")
_SOURCE = Path(__file__).with_name("faults.c")


def why_not() -> str | None:
    """Why the fault layer cannot be had here, or None."""
    return None if shutil.which("cc") else "the fault layer is built with a C compiler, and no `cc` is here"


def build(folder: Path) -> dict[str, str]:
    """Build the layer; what the environment of a process must hold to run on top of it."""
    library = folder / "faults.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, _SOURCE, "-ldl"], check=True, capture_output=True)
    return {"LD_PRELOAD": str(library)}


class Faults:
    """The layer that this process runs on.

    Raises:
        RuntimeError: it runs on none.
    """

    def __init__(self) -> None:
        library = os.environ.get("LD_PRELOAD", "")
        if not library.endswith("faults.so"):
            raise RuntimeError("this process does not run on the fault layer")
        self._library = ctypes.CDLL(library)
        self._library.faults_seen.restype = ctypes.c_long

    def arm(
        self,
        root: Path,
        action: str,
        after: int,
        *,
        operations: Sequence[str] = OPERATIONS,
        error: int = 0,
        seed: int = 0,
        lying_sync: bool = False,
    ) -> None:
        """Strike at the call after the next ``after`` ones of ``operations`` on files below ``root``.

        Args:
            root: what is below this folder is watched.
            action: one of ``ACTIONS``; ``kill`` first takes back some of what was written and not synced, as a loss
                of power does, and then ends the process with SIGKILL.
            after: calls that still pass.
            operations: those that count.
            error: the errno of a call that fails.
            seed: how much is taken back.
            lying_sync: fsync does nothing and says that all is well.
        """
        mask = sum(1 << OPERATIONS.index(name) for name in operations)
        self._library.faults_arm(
            os.fsencode(root), mask, ctypes.c_long(after), ACTIONS.index(action), error, seed, int(lying_sync)
        )

    @contextlib.contextmanager
    def failing(
        self, root: Path, error: int, after: int, operations: Sequence[str], action: str = "fail once"
    ) -> Iterator[None]:
        """Let one call fail (or all from it on), for as long as the context lasts."""
        self.arm(root, action, after, operations=operations, error=error)
        try:
            yield
        finally:
            self._library.faults_disarm()

    def seen(self) -> int:
        """How many calls counted since the layer was armed."""
        return int(self._library.faults_seen())

    def set_clock(self, offset_s: float) -> None:
        """Move the wall clock of this process; the file system's stays."""
        self._library.faults_set_clock(ctypes.c_double(offset_s))

    def let_locks_lie(self) -> None:
        """Grant every lock at once from now on, even if another process holds it."""
        self._library.faults_let_locks_lie(1)
