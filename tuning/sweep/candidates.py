"""Candidates: a problem with one config, and the key of its artifact."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

from tilekern.compile.backend import Backend
from tilekern.compile.toolchain import artifact_key, backend_of
from tilekern.kernels import spec_named
from tilekern.spec import (
    ALIGNED,
    GENERIC,
    Config,
    KernelSpec,
    Problem,
)
from tilekern.spec.source import source_digest
from tilekern.spec.targets import Target

# Configs with this axis cannot be the fastest: they are tried where a problem needs a kernel of one bit class.
FOR_BITS = "apart"
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
    def backend(self) -> Backend:
        """The compiler or library that runs it."""
        return backend_of(self.spec.implement(self.problem, self.config))

    def blocks(self, sm_count: int) -> int:
        """Return the grid on a GPU of ``sm_count`` SMs; 0 if a library runs it."""
        return self.spec.implement(self.problem, self.config).grid(self.problem, sm_count)

    @property
    def key(self) -> str:
        """Return a name with a part of the artifact's key, so that an edit of the kernel changes it."""
        return f"{self.kernel}|{self.problem.key}|{self.config.key}|{self.variant}|{self.artifact[:ARTIFACT_DIGITS]}"


def candidate(kernel: str, problem: Problem, config: Config, variant: str, target: Target) -> Candidate:
    """Return the candidate of a problem and config on a target."""
    spec = spec_named(kernel)
    key = artifact_key(spec.implement(problem, config), variant, target, source_digest(spec.module))
    return Candidate(kernel, problem, config, variant, key)


def candidates(
    kernel: str,
    problem: Problem,
    target: Target,
    limit: Sequence[Config] | None = None,
    *,
    without: Container[str] = (),
    for_bits: bool = False,
) -> list[Candidate]:
    """Return the candidates of a problem, and last the generic variant that every record carries.

    They are the configs of ``limit`` in its order, else the whole space, the default config first; those of the
    backends named in ``without`` are left out, and those with the axis :data:`FOR_BITS` unless ``for_bits``.
    """
    spec = spec_named(kernel)
    space = [spec.default(problem, target), *spec.space.candidates(problem, target)] if limit is None else limit
    if not for_bits:
        space = [config for config in space if FOR_BITS not in config]
    found = [candidate(kernel, problem, config, ALIGNED, target) for config in dict.fromkeys(space)]
    found = [item for item in found if not without or item.backend.name not in without]
    return [*found, candidate(kernel, problem, spec.generic(problem), GENERIC, target)]
