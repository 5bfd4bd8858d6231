"""Code that runs on the nodes of a cluster.

A node's dependencies are imported only when it is known to have them, so that it can name missing ones.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import os
import pickle
import platform
import queue
import shutil
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tilekern.errors import InputError
from tilekern.kernels import users_modules
from tilekern.spec.source import source_digest

if TYPE_CHECKING:
    from tilekern.runtime.workers.pool import Answer, Compile, Lost
    from tilekern.spec.targets import Target
    from tilekern.tuning.measure.process import Noted, Worker
    from tilekern.tuning.measure.tasks import Task
    from tilekern.tuning.sweep.candidates import Candidate

# What is carried to the nodes; they install the rest.
PACKAGES = ("tilekern",)
# How long to wait for a line before saying that there is none yet, in seconds.
_PATIENCE_S = 5.0


def code_digest() -> str:
    """Return the sha256 of all the code that tunes, users' kernels included, wherever it lies."""
    digests = (_code_of_packages(), *map(source_digest, users_modules()))
    return hashlib.sha256("".join(digests).encode()).hexdigest()


@functools.cache
def _code_of_packages() -> str:
    digest = hashlib.sha256()
    for package in PACKAGES:
        root = package_folder(package)
        # Path.rglob goes through no link, as tilekern/tuning is one in a checkout.
        paths = (Path(folder, name) for folder, _, names in os.walk(root, followlinks=True) for name in names)
        for path in sorted(path for path in paths if path.suffix == ".py"):
            digest.update(f"{package}/{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def package_folder(package: str) -> Path:
    """Return the folder that a package was imported from."""
    return Path(importlib.import_module(package).__path__[0])


def check_node(code: str, *needs: str) -> None:
    """Check that this node runs the driver's code and has the modules of a task.

    Args:
        code: the driver's :func:`code_digest`.
        needs: names of modules.

    Raises:
        InputError: it does not.
    """
    if code_digest() != code:
        raise InputError(
            f"the node {platform.node()} runs another tilekern, from {package_folder('tilekern')}; "
            "take it off the node's PYTHONPATH, or install the same one there"
        )
    missing = []
    for name in needs:
        with contextlib.suppress(ModuleNotFoundError):  # of a parent
            if importlib.util.find_spec(name) is not None:
                continue
        missing.append(name)
    if missing:
        raise InputError(
            f"{', '.join(missing)} missing on the node {platform.node()}; install tilekern's dependencies there"
        )


@dataclass(frozen=True)
class CompileWork:
    """Candidates for a node to compile; those of one device function stand together.

    ``pickled`` holds the candidates and the function to run on each, since a node without cuda-tile cannot read them.
    """

    code: str
    toolkit_key: str
    pickled: bytes
    limit_s: float
    memory_bytes: int

    @classmethod
    def of(
        cls, toolkit_key: str, items: Sequence[Candidate], compile_one: Compile, limit_s: float, memory_bytes: int
    ) -> CompileWork:
        """Make it on the driver."""
        return cls(code_digest(), toolkit_key, pickle.dumps((list(items), compile_one)), limit_s, memory_bytes)


def compile_on_node(work: CompileWork) -> list[Answer | Lost]:
    """Compile candidates in a disposable process of this node.

    Raises:
        InputError: the node has another compiler than the driver, none, or other code.
    """
    check_node(work.code, "cuda.tile", "elftools")
    from tilekern.compile.toolchain import toolkit
    from tilekern.tuning.compile.order import Order
    from tilekern.tuning.compile.pool import compile_in_order

    tools = toolkit()
    if tools is None or tools.key != work.toolkit_key:
        found = tools.key if tools else "no tile compiler"
        raise InputError(f"the node {platform.node()} has {found}, and the sweep is compiled by {work.toolkit_key}")
    items, compile_one = pickle.loads(work.pickled)
    return list(compile_in_order(Order(items), compile_one, 1, work.limit_s, work.memory_bytes))


class GpuNode:
    """Measures on one GPU of a node, in disposable processes.

    Args:
        launch_timeout_s: the least time that a candidate is given for what it launches.
    """

    def __init__(self, launch_timeout_s: float) -> None:
        self._launch_timeout_s = launch_timeout_s
        self._folder = Path(tempfile.mkdtemp(prefix="tilekern-"))
        self._worker: Worker | None = None
        self._found: queue.SimpleQueue[Noted | BaseException] = queue.SimpleQueue()
        self._error: BaseException | None = None

    def describe(self, code: str, target: Target) -> dict[str, str]:
        """Return the GPU, its driver, torch and the libraries that candidates call.

        Raises:
            InputError: the node cannot measure, or its GPU is not the target.
        """
        check_node(code, "torch", "cuda.tile")
        from tilekern.tuning.measure.gpu import check_gpu, describe_gpu

        try:
            check_gpu(target)
        except InputError as error:
            raise InputError(f"the node {platform.node()}: {error}") from None
        return describe_gpu()

    def begin(self, code: str, target: Target, pack: bytes) -> tuple[str, dict[str, str]]:
        """Prepare for tasks; return the node's name in the cluster, and what :meth:`describe` returns.

        Args:
            code: the driver's :func:`code_digest`.
            target: the GPU that this one must be.
            pack: what composites look kernels up in; empty for nothing.

        Raises:
            InputError: the node cannot measure, or its GPU is not the target.
        """
        found = self.describe(code, target)
        import ray

        from tilekern.cache import Pack, Store, install_pack
        from tilekern.tuning.measure.process import Worker

        cache = self._folder / "cache"
        if pack:
            path = self._folder / "winners.pack"
            path.write_bytes(pack)
            # The driver made all of it, whose code this process runs.
            records = Pack(path)
            install_pack(path, Store(cache), own={records.members[name].sha256 for name in records.records.values()})
        self._worker = Worker(cache, None, self._launch_timeout_s)
        self._worker.process()  # it loads its modules while the first task is on its way
        return ray.get_runtime_context().get_node_id(), found

    def measure(self, task: Task) -> list[Noted]:
        """Begin a task, when the one before is over, and return its first lines (:meth:`more`)."""
        # A thread takes in what the process says when it says it: what a slow network does is no candidate's doing.
        threading.Thread(target=self._measure, args=(task,), daemon=True).start()
        return self.more()

    def _measure(self, task: Task) -> None:
        from tilekern.tuning.executors.work import finished
        from tilekern.tuning.measure.process import measure_task

        assert self._worker is not None
        try:
            for noted in measure_task(self._worker, task):
                self._found.put(noted)
            self._found.put(finished(task))
        except BaseException as error:  # noqa: BLE001 (raised again where the lines are taken)
            self._found.put(error)

    def more(self) -> list[Noted]:
        """Return the lines since the last call; none if none come for a while.

        Raises:
            InputError: the GPU cannot be used.
        """
        found: list[Noted] = []
        with contextlib.suppress(queue.Empty):
            while self._error is None:
                item = self._found.get_nowait() if found else self._found.get(timeout=_PATIENCE_S)
                if isinstance(item, BaseException):
                    self._error = item
                else:
                    found.append(item)
        if self._error is not None and not found:
            raise self._error
        return found

    def close(self) -> None:
        """End all processes and delete all files."""
        if self._worker is not None:
            self._worker.close()
        shutil.rmtree(self._folder, ignore_errors=True)
