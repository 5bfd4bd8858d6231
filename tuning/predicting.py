"""Ranks candidates from compile-time facts, with no GPU: the cost model behind ``predicted`` winners.

The kernels here are bound by memory, so a candidate's time is the time of its bytes at the bandwidth that it can
keep busy, or the time of its instructions where that is longer, plus what launching and the last, partly filled wave
of blocks cost. What it can keep busy follows from Little's law: bytes in flight on an SM against bandwidth times
latency. The constants were fitted to one sweep on an H200 (``benchmarks/RESULTS.md`` reports the regret).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from tilekern.cubin import Resources
from tilekern.spec import ALIGNED, Problem, cdiv
from tilekern.targets import Target
from tuning.sweep import Candidate, Sweep, candidates

# Registers are given to a warp in units of 256, shared memory to a block with 1 KiB for the system on top (CUDA
# programming guide, "Technical Specifications per Compute Capability").
_REGISTER_UNIT, _WARP, _RESERVED_SHARED = 256, 32, 1024
_LATENCY_S = 0.9e-6
_LAUNCH_S = 2.2e-6
_CLOCK_HZ = 1.75e9
# Warp instructions that an SM of four schedulers issues in a cycle on average, of four at the most.
_ISSUE = 2.6


@dataclass(frozen=True)
class Prediction:
    """What the model says of a candidate: seconds, and the facts that it rests on."""

    seconds: float
    resident_blocks: int
    in_flight_bytes: float
    spills: bool

    @property
    def rank(self) -> tuple[bool, float]:
        """Sorts spilling candidates behind all others."""
        return self.spills, self.seconds


def resident_blocks(resources: Resources, target: Target) -> int:
    """Blocks of a kernel that fit on one SM of the target at once; 0 where not even one does."""
    warps = cdiv(resources.threads, _WARP)
    registers = cdiv(resources.registers * _WARP, _REGISTER_UNIT) * _REGISTER_UNIT * warps
    limits = [target.blocks, target.threads // resources.threads, target.registers // max(1, registers)]
    limits.append(target.shared_bytes // (resources.shared_bytes + _RESERVED_SHARED))
    return min(limits)


def predict(candidate: Candidate, resources: Resources, target: Target) -> Prediction:
    """The model's time for a candidate on a target."""
    spec, problem, config = candidate.spec, candidate.problem, candidate.config
    implementation = spec.implement(problem, config)
    blocks = implementation.grid(problem, target.sm_count)
    resident = resident_blocks(resources, target)
    if resident == 0:
        return Prediction(float("inf"), 0, 0.0, resources.stack_bytes > 0)
    steps = spec.implement(problem, config.but(schedule="block")).grid(problem, target.sm_count)
    busy = min(resident, cdiv(blocks, target.sm_count))
    step_bytes = spec.bytes_moved(problem) / steps
    persistent = config.get("schedule") == "persistent"
    in_flight = busy * _in_flight(step_bytes, resources, persistent=persistent)
    needed = target.copy_gbs * 1e9 * _LATENCY_S / target.sm_count
    share = in_flight / (in_flight + 0.12 * needed)
    rounds = _rounds(steps, blocks, busy, target, persistent=persistent)
    memory_s = rounds * busy * target.sm_count * step_bytes / (target.copy_gbs * 1e9 * share)
    warps = cdiv(resources.threads, _WARP)
    issued = rounds * busy * resources.code_bytes / 16 * warps * (0.5 if resources.shared_bytes > 16384 else 1.0)
    issue_s = issued / (_ISSUE * _CLOCK_HZ)
    # Work that overlaps badly: a persistent block without TMA waits for its loads before it goes on.
    seconds = _LAUNCH_S + max(memory_s, issue_s) + 0.25 * min(memory_s, issue_s)
    return Prediction(seconds, resident, in_flight, resources.stack_bytes > 0)


def _in_flight(step_bytes: float, resources: Resources, *, persistent: bool) -> float:
    """Bytes that a block keeps in flight: its step, or with TMA what its pipeline's buffers hold."""
    if persistent and resources.shared_bytes > 16384:
        return float(resources.shared_bytes)
    return step_bytes * (0.6 if persistent else 1.0)


def _rounds(steps: int, blocks: int, busy: int, target: Target, *, persistent: bool) -> float:
    """Steps that the busiest place for a block goes through; blocks that come and go even out, resident ones do not."""
    places = busy * target.sm_count
    if persistent:
        return float(cdiv(steps, min(blocks, places)))
    return max(1.0, steps / places + 0.5)


@functools.lru_cache(maxsize=1)
def _compiled(sweep_folder: str, size: int) -> dict[str, dict[str, Any]]:  # noqa: ARG001 (the journal's size is the key)
    from pathlib import Path

    return Sweep(Path(sweep_folder)).compiled()


def ranking(sweep: Sweep, kernel: str, problem: Problem, target: Target) -> list[tuple[Candidate, Prediction]]:
    """The compiled candidates of a problem, the best predicted first; only aligned variants can win."""
    journal = sweep.folder / "compiled.jsonl"
    compiled = _compiled(str(sweep.folder), journal.stat().st_size if journal.exists() else 0)
    found = []
    for item in candidates(kernel, problem, target):
        line = compiled.get(item.artifact)
        if item.variant == ALIGNED and line is not None and line["status"] == "ok":
            found.append((item, predict(item, Resources(**line["resources"]), target)))
    return sorted(found, key=lambda pair: pair[1].rank)


def predict_best(sweep: Sweep, kernel: str, problem: Problem, target: Target) -> Candidate | None:
    """The predicted winner of a problem, or None where nothing compiled."""
    ranked = ranking(sweep, kernel, problem, target)
    return ranked[0][0] if ranked else None
