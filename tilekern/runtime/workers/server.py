"""A process with modules loaded, from which workers are forked in milliseconds.

It is multiprocessing's fork server, with two differences. It belongs to tilekern alone: torch is hidden in it, and a
job's own use of ``forkserver`` must not meet that. And its workers do not import the job's main program again, which
would train once more if nothing guards it.
"""

from __future__ import annotations

import io
import os
import signal
import tempfile
import threading
from collections.abc import Callable
from multiprocessing import context, forkserver, popen_forkserver, reduction, resource_tracker, spawn, util
from multiprocessing.process import BaseProcess
from typing import Any

# The longest path of a temporary folder to which multiprocessing can add its 35 bytes.
_MOST_FOLDER_BYTES = 70
# What tells a process which program to import.
_MAIN_PROGRAM = ("init_main_from_name", "init_main_from_path")


class Server:
    """Forks workers.

    Args:
        modules: names of the modules that it loads, by which it and its workers begin.
    """

    def __init__(self, *modules: str) -> None:
        self._modules = list(modules)
        self._lock = threading.Lock()
        self._forks = self._new()
        # A forked child has servers of its own: this one ends with the process that started it.
        os.register_at_fork(after_in_child=self._begin_anew)

    def _new(self) -> forkserver.ForkServer:
        forks = forkserver.ForkServer()
        forks.set_forkserver_preload(self._modules)
        return forks

    def _begin_anew(self) -> None:
        self._lock, self._forks = threading.Lock(), self._new()

    @property
    def pid(self) -> int | None:
        """The process, once it was started."""
        return self._forks._forkserver_pid  # type: ignore[attr-defined]

    def start(self) -> None:
        """Start the process unless it runs. It loads its modules in the background.

        Raises:
            OSError: no process can be started.
        """
        # The server listens in multiprocessing's temporary folder, and the path of a socket is cut off at 107 bytes.
        with self._lock:
            usual = tempfile.tempdir
            if len(os.fsencode(tempfile.gettempdir())) > _MOST_FOLDER_BYTES and os.access("/tmp", os.W_OK):
                tempfile.tempdir = "/tmp"
            try:
                util.get_temp_dir()
            finally:
                tempfile.tempdir = usual
            # The server's start would start it, and it would let the signal through again.
            resource_tracker.ensure_running()
            # Only the parent handles Ctrl-C. The server ignores it once its modules are loaded; until then it is
            # blocked.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                self._forks.ensure_running()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def process(self, target: Callable[..., object], *arguments: Any) -> BaseProcess:
        """Return a process that is forked from the server when it is started, and ends with this one."""
        return _Process(self, target=target, args=arguments, daemon=True)

    def connect(self, descriptors: list[int]) -> tuple[int, int]:
        """Fork a process; return what its result is read from, and what its work is written to."""
        self.start()
        return self._forks.connect_to_new_process(descriptors)


class _Process(BaseProcess):
    _start_method = "forkserver"

    def __init__(self, server: Server, **options: Any) -> None:
        super().__init__(**options)
        self._server: Server | None = server

    def _Popen(self, process: Any) -> _Popen:  # noqa: N802 (multiprocessing's name)
        assert self._server is not None
        return _Popen(process, self._server)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_server": None}


class _Popen(popen_forkserver.Popen):
    def __init__(self, process: BaseProcess, server: Server) -> None:
        self._server = server
        super().__init__(process)

    def _launch(self, process: BaseProcess) -> None:
        told = spawn.get_preparation_data(process.name)
        for name in _MAIN_PROGRAM:
            told.pop(name, None)
        work = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(told, work)
            reduction.dump(process, work)
        finally:
            context.set_spawning_popen(None)
        self.sentinel, written = self._server.connect(self._fds)  # type: ignore[attr-defined]
        # The worker sees this process's end by what is kept open here.
        kept = os.dup(written)
        self.finalizer = util.Finalize(self, util.close_fds, (kept, self.sentinel))  # type: ignore[attr-defined]
        with open(written, "wb", closefd=True) as file:
            file.write(work.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)
