"""Makes records of the cache from compiled candidates."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
from collections.abc import Mapping
from typing import Any

from tilekern import __version__
from tilekern.cache import SCHEMA, Artifact, BestKernel, Launch, Record
from tilekern.compile.toolchain import Compiled, compile_candidate, require_toolkit
from tilekern.spec import ALIGNED, GENERIC, Config, KernelSpec, Problem
from tilekern.spec.source import source_digest
from tilekern.spec.targets import Target
from tilekern.warning import warned_after

# Seconds that a job waits for a compile before it is told why.
LONG_S = 2.0
_WHY_LONG = "which no cache holds; Ctrl-C stops it, and a tune of the model before the job makes it unnecessary"


def artifact_of(made: Compiled, config: Config) -> Artifact:
    """Return the entry of a compiled candidate in a record."""
    return Artifact(
        sha256=hashlib.sha256(made.cubin).hexdigest(),
        size=len(made.cubin),
        symbol=made.symbol,
        config=dict(config),
        assumptions=made.assumptions,
        resources=made.resources().as_dict(),
        launch=launch_in(made.launch),
        compiler=made.compiler,
        bytecode=made.bytecode,
    )


def launch_in(fields: Mapping[str, Any] | None) -> Launch | None:
    """Return how an artifact is launched, from plain data; None if its cubin states block and cluster itself."""
    return None if fields is None else Launch(**{**fields, "block": tuple(fields["block"])})


def record_of(
    spec: KernelSpec, problem: Problem, config: Config, target: Target, toolkit: Mapping[str, str],
    artifacts: Mapping[str, Artifact], provenance: str, *, measurement: dict[str, Any] | None = None,
    prediction: dict[str, Any] | None = None, check: dict[str, Any] | None = None,
    runners_up: list[Any] | None = None, best_kernel: BestKernel | None = None, candidates: int = 1, failed: int = 0,
) -> Record:  # fmt: skip
    """Return the record of a problem's winner, with today's digest of the source and the time."""
    digest = source_digest(spec.module)
    return Record(
        schema=SCHEMA,
        kernel=spec.name,
        module=spec.module,
        problem=dict(problem),
        target=target.describe(),
        toolkit=dict(toolkit),
        source_digest=digest,
        space_digest=digest,
        provenance=provenance,  # type: ignore[arg-type]
        config=dict(config),
        artifacts=dict(artifacts),
        best_kernel=best_kernel,
        measurement=measurement,
        prediction=prediction,
        check=check,
        runners_up=runners_up or [],
        candidates=candidates,
        failed=failed,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        created_by=f"tilekern {__version__}",
    )


def tell_of_long(spec: KernelSpec, problem: Problem) -> contextlib.AbstractContextManager[None]:
    """Warn a job that waits more than :data:`LONG_S` for a problem's default."""
    return warned_after(LONG_S, f"compiling {spec.name} for {problem.key}, {_WHY_LONG}")


def turn_of(spec: KernelSpec, problem: Problem, target: Target) -> str:
    """Return the name of the turn to compile a problem's default."""
    return f"{spec.name} {problem.key} {target.key}"


def compiled_default(spec: KernelSpec, problem: Problem, target: Target) -> tuple[Record, dict[str, bytes]]:
    """Compile both variants of a problem's default config; return the record, and the artifacts by sha256.

    Ctrl-C ends it together with its compiler, and nothing is left behind.

    Raises:
        ToolchainMissing: no compiler is installed.
        CompileFailed: the compiler rejected it.
    """
    tools = require_toolkit()
    config = spec.default(problem, target)
    artifacts, blobs = {}, {}
    variants = ((ALIGNED, config), (GENERIC, spec.generic(problem)))
    for variant, chosen in () if spec.is_library(problem, config) else variants:
        made = compile_candidate(spec, problem, chosen, target, variant)
        artifacts[variant] = artifact_of(made, chosen)
        blobs[artifacts[variant].sha256] = made.cubin
    return record_of(spec, problem, config, target, tools.describe(), artifacts, "default"), blobs
