"""Candidates: a problem with one config, and the key of its artifact."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilekern.compile.toolchain import assumptions, launch_of
from tilekern.kernels import spec_named
from tilekern.spec import (
    ALIGNED,
    GENERIC,
    Config,
    CuteKernel,
    Implementation,
    KernelSpec,
    LibraryCall,
    Problem,
    name_of,
)
from tilekern.spec.source import source_digest
from tilekern.spec.targets import Target

# Stands for the journal's line of an artifact where a library runs a candidate.
LIBRARY_LINE: dict[str, Any] = {"status": "ok"}
# How much of the artifact's key a candidate's key ends with.
ARTIFACT_DIGITS = 16


@dataclass(frozen=True)
class Candidate:
    """A problem and one config of it, with the key of its artifact."""

    kernel: str
    problem: Problem
    config: Config
    variant: str
    artifact: str

    @property
    def spec(self) -> KernelSpec:
        """Return the candidate's spec."""
        return spec_named(self.kernel)

    @property
    def is_library(self) -> bool:
        """Return whether a library runs it, so that nothing is compiled."""
        return self.spec.is_library(self.problem, self.config)

    @property
    def is_cute(self) -> bool:
        """Return whether CuTe DSL compiles it."""
        return isinstance(self.spec.implement(self.problem, self.config), CuteKernel)

    def blocks(self, sm_count: int) -> int:
        """Return the grid's size on a GPU with that many SMs; 0 if a library runs it."""
        implementation = self.spec.implement(self.problem, self.config)
        return 0 if isinstance(implementation, LibraryCall) else implementation.grid(self.problem, sm_count)

    @property
    def key(self) -> str:
        """Return a name with a part of the artifact's key, so that an edit of the kernel changes it."""
        return f"{self.kernel}|{self.problem.key}|{self.config.key}|{self.variant}|{self.artifact[:ARTIFACT_DIGITS]}"


def artifact_key(
    implementation: Implementation | CuteKernel | LibraryCall, variant: str, target: Target, source: str
) -> str:
    """Return the key of compiled code; equal keys compile to the same cubin, for any problem or config.

    A library's call is not compiled; its key only tells that the source is still the same.
    """
    if isinstance(implementation, LibraryCall):
        return hashlib.sha256(f"library {source}".encode()).hexdigest()
    parts: dict[str, Any] = {
        "function": name_of(implementation.function),
        "assumptions": assumptions(implementation, variant),
        "arch": target.arch,
        "source": source,
    }
    if isinstance(implementation, CuteKernel):
        parts |= {"kernel": implementation.kernel, "launch": launch_of(implementation)}
    else:
        parts |= {"hints": dict(implementation.hints)}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def candidate(kernel: str, problem: Problem, config: Config, variant: str, target: Target) -> Candidate:
    """Return the candidate of a problem and config on a target."""
    spec = spec_named(kernel)
    key = artifact_key(spec.implement(problem, config), variant, target, source_digest(spec.module))
    return Candidate(kernel, problem, config, variant, key)


def candidates(
    kernel: str, problem: Problem, target: Target, limit: Sequence[Config] | None = None, *, with_cute: bool = True
) -> list[Candidate]:
    """Return the candidates of a problem, last the generic variant that every record carries.

    They are the space, the default config first, or ``limit`` in its order; with the candidates of CuTe DSL or without.
    """
    spec = spec_named(kernel)
    space = [spec.default(problem, target), *spec.space.candidates(problem, target)] if limit is None else limit
    found = [candidate(kernel, problem, config, ALIGNED, target) for config in dict.fromkeys(space)]
    found = found if with_cute else [item for item in found if not item.is_cute]
    return [*found, candidate(kernel, problem, spec.generic(problem), GENERIC, target)]
