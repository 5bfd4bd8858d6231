"""Processes that may be killed at any moment: with all that they started, and never outliving their parent.

A disposable process is the leader of a session. Processes that it starts, and that these start, belong to the
session, whatever process groups are made in it, and go with it. Linux only: sessions are read from ``/proc``.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
import time
from collections.abc import Container, Iterable
from multiprocessing import connection, parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path

# How long a killed process may take to be gone: the driver waits for the GPU before it tears a context down.
GONE_WITHIN_S = 30.0
_POLL_S = 0.005
# How an obituary begins of a process that somebody else killed.
KILLED = "SIGKILL"


def begin(memory_bytes: int | None = None) -> None:
    """Make the calling process disposable; call it first.

    Args:
        memory_bytes: address space that it, and each process that it starts, may have; no limit where None.
    """
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes is not None:
        # Where this process itself may have less, so be it.
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        allowed = memory_bytes if most == resource.RLIM_INFINITY else min(memory_bytes, most)
        resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))
    threading.Thread(target=_go_with_parent, daemon=True).start()


def has_address_space(memory_bytes: int) -> bool:
    """Return whether this process may have that much address space."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
    return allowed == resource.RLIM_INFINITY or allowed >= memory_bytes


def _go_with_parent() -> None:
    """Wait for the parent's end, then kill the session."""
    parent = parent_process()
    assert parent is not None, "a disposable process is started by multiprocessing"
    connection.wait([parent.sentinel])
    _kill(pid for pid in _members([os.getpid()]) if pid != os.getpid())
    os.kill(os.getpid(), signal.SIGKILL)


class Obituary:
    """Describes how a process ended; made before the process starts."""

    def __init__(self) -> None:
        self._out_of_memory = _out_of_memory_kills()

    def of(self, process: BaseProcess) -> str:
        """Return how a process ended: ``exit code 7``, ``SIGSEGV``, or who killed it and why."""
        code = process.exitcode
        if code is None:
            return f"not gone {GONE_WITHIN_S:g} s after it was killed"
        if code >= 0:
            return f"exit code {code}"
        if -code == signal.SIGKILL and _out_of_memory_kills() > self._out_of_memory:
            return f"{KILLED}: the host ran out of memory"
        return signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"


def end(*processes: BaseProcess) -> None:
    """Kill disposable processes with their sessions, and wait until all are gone."""
    leaders = {process.pid for process in processes if process.pid is not None}
    deadline = time.monotonic() + GONE_WITHIN_S
    for process in processes:
        process.kill()
    while living := _members(leaders):
        _kill(living)
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


def _members(leaders: Container[int | None]) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                # After the name, which may hold anything: state, parent, process group, session.
                fields = Path("/proc", name, "stat").read_text(errors="replace").rpartition(")")[2].split()
                if int(fields[3]) in leaders and fields[0] not in "ZX":
                    found.append(int(name))
    return found


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _out_of_memory_kills() -> int:
    """Return how many processes this host has killed for memory since it started, in any container."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0
