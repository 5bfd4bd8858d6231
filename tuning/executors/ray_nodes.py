"""Connects to a Ray cluster, finds the GPUs of its nodes, and explains its errors."""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import ray

from tilekern.errors import InputError
from tilekern.kernels import VARIABLE, users_modules
from tilekern.spec.source import path_of
from tilekern.spec.targets import Target
from tilekern.tuning.executors.node import PACKAGES, GpuNode, code_digest, package_folder

# How long a GPU may take to become free, in seconds: other jobs hold them for a while.
FREE_WITHIN_S = 600.0
# How often a cluster is asked that answers with an error, and how long to wait before the next time, in seconds.
TRIES, PAUSE_S = 3, 2.0
# Ray's name for what a node with GPUs of a type has, one of it whatever their number.
_TYPE = "accelerator_type:"
_LONGEST = 300
_T = TypeVar("_T")


def ask_again(ask: Callable[[], _T], may_pass: Callable[[Exception], bool]) -> _T:
    """Return the cluster's answer; ask up to :data:`TRIES` times while the error may pass.

    Args:
        ask: asks; it must leave nothing behind if it fails.
        may_pass: whether an error may be gone the next time.
    """
    for _ in range(TRIES - 1):
        try:
            return ask()
        except (OSError, RuntimeError, ray.exceptions.RayError) as error:
            if not may_pass(error):
                raise
        time.sleep(PAUSE_S)
    return ask()


def is_rays_own(error: Exception) -> bool:
    """Return whether an error is Ray's, not of the code that ran: a worker or node may have died."""
    return isinstance(error, ray.exceptions.RayError) and not isinstance(error, ray.exceptions.RayTaskError)


def connect(address: str | None) -> None:
    """Connect with the job's code; an existing connection is used as it is.

    Args:
        address: ``ray://HOST:PORT``; None for the cluster that this host belongs to, or else a new one on this host.

    Raises:
        InputError: the cluster cannot be reached, or has another Ray or Python.
    """
    if ray.is_initialized():
        return
    modules = [str(package_folder(package)) for package in PACKAGES]
    with tempfile.TemporaryDirectory() as folder:
        for name in dict.fromkeys(module.partition(".")[0] for module in users_modules()):
            path = path_of(name)
            if path.name == "__init__.py":
                modules.append(str(path.parent))
            else:
                shutil.copy(path, folder)
        # A job with a working directory does not look for modules in the driver's, where another version may lie.
        Path(folder, "code").write_text(code_digest(), encoding="ascii")
        environment: dict[str, Any] = {"working_dir": folder, "py_modules": modules, "excludes": ["**/__pycache__/**"]}
        environment["env_vars"] = {VARIABLE: os.environ.get(VARIABLE, "")}

        def ask() -> None:
            try:
                ray.init(address, runtime_env=environment, log_to_driver=False, logging_level=logging.ERROR)
            except BaseException:
                ray.shutdown()
                raise

        try:
            # A server that Ray starts for each client, and that died then, aborts the connection.
            ask_again(ask, lambda error: not isinstance(error, OSError) or isinstance(error, ConnectionAbortedError))
        except (OSError, RuntimeError, ray.exceptions.RayError) as error:
            reason = reason_of(error)
            raise InputError(f"cannot use the Ray cluster {address or 'of this host'}: {reason}") from None


def start_actor(node: type[GpuNode], target: Target, launch_timeout_s: float) -> Any:
    """Start an actor on a GPU of the target's type, now or when one becomes free.

    Raises:
        InputError: no node has such a GPU.
    """
    kind, _ = gpus_like(target)
    options = {"num_gpus": 1, "num_cpus": 1, "resources": {f"{_TYPE}{kind}": 0.001}, "max_restarts": 0}
    return ray.remote(node).options(**options).remote(launch_timeout_s)


def gpus_like(target: Target) -> tuple[str, int]:
    """Return Ray's name for a target's type, and how many GPUs of it the cluster has.

    Raises:
        InputError: it has none.
    """
    found = _gpus_by_type()
    fitting = {kind: count for kind, count in found.items() if is_of_type(target, kind)}
    if not fitting:
        known = ", ".join(f"{kind} ({count})" for kind, count in sorted(found.items())) or "none"
        raise InputError(f"no node of the cluster has a {target.name}; its GPUs by type: {known}")
    # The longest name says most.
    return max(fitting.items(), key=lambda item: len(item[0]))


def _gpus_by_type() -> dict[str, int]:
    found: dict[str, int] = {}
    for node in ray.nodes():
        if node["Alive"]:
            for name in node["Resources"]:
                if name.startswith(_TYPE):
                    kind = name.removeprefix(_TYPE)
                    found[kind] = found.get(kind, 0) + int(node["Resources"].get("GPU", 0))
    return {kind: count for kind, count in found.items() if count}


def is_of_type(target: Target, kind: str) -> bool:
    """Return whether Ray's name for a GPU's type is the beginning of the target's name."""
    words, names = (re.findall("[a-z0-9]+", text.lower()) for text in (kind, target.name))
    return bool(words) and names[: len(words)] == words


def reason_of(error: BaseException) -> str:
    """Return an error of Ray, or of the code that ran there, in one line."""
    cause = getattr(error, "cause", None)
    if isinstance(error, ray.exceptions.RayTaskError) and isinstance(cause, BaseException):
        error = cause
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # What a traceback is about is its last line.
    said = lines[-1] if any(line.startswith("Traceback") for line in lines) else " ".join(lines)
    return said[:_LONGEST] or type(error).__name__
