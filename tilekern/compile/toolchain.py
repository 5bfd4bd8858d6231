"""Compiles a candidate: spec, config and target become an artifact, by the backend of the config's implementation."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from tilekern.compile import cute_compiler, cutile, library  # noqa: F401 (each registers its backend)
from tilekern.compile.backend import Compiled, backend_of, backends
from tilekern.compile.cutile import Toolkit, require_toolkit, toolkit
from tilekern.spec import Config, DeviceKernel, KernelSpec, LibraryCall, Problem, name_of
from tilekern.spec.targets import Target

__all__ = [
    "Compiled",
    "Toolkit",
    "artifact_key",
    "assumptions",
    "backend_of",
    "backends",
    "compile_candidate",
    "require_toolkit",
    "toolkit",
]


def compile_candidate(
    spec: KernelSpec, problem: Problem, config: Config, target: Target, variant: str, *, timeout_s: float = 120
) -> Compiled:
    """Compile one candidate for one target.

    Args:
        spec: the kernel.
        problem: its sizes, real or at their buckets.
        config: a point of its space.
        target: the GPU to compile for.
        variant: ``aligned`` (16-byte base addresses and row strides, last stride 1) or ``generic`` (only dtypes and
            ranks are assumed).
        timeout_s: wall seconds that a compiler in a process of its own may take (tileiras). One that compiles inside
            this process can only be ended from another.

    Raises:
        TypeError: a library runs the config.
        ToolchainMissing: the compiler is not installed.
        CompileFailed: the compiler rejected the candidate, crashed, or took too long.
        CompileInterrupted: the compiler could not work, for a reason that passes.
        OSError: there is no room for its files, or the compiler cannot be run.
    """
    kernel = spec.device(problem, config)
    return backend_of(kernel).compile(kernel, target, variant, timeout_s)


def assumptions(kernel: DeviceKernel, variant: str) -> list[dict[str, Any]]:
    """Return the assumptions of a variant about each argument, as plain data for a record."""
    return backend_of(kernel).assumptions(kernel, variant)


def artifact_key(implementation: DeviceKernel | LibraryCall, variant: str, target: Target, source: str) -> str:
    """Name the compiled code: equal keys compile to the same cubin, whatever problem or config asks for it.

    A library's call is not compiled; its key only tells that the source is still the same.
    """
    if isinstance(implementation, LibraryCall):
        return hashlib.sha256(f"library {source}".encode()).hexdigest()
    backend = backend_of(implementation)
    parts = {
        "function": name_of(implementation.function),
        "assumptions": backend.assumptions(implementation, variant),
        "arch": target.arch,
        "source": source,
        **backend.code_key(implementation),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
