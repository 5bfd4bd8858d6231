"""Ranks candidates from compile-time facts, with no GPU: the cost model behind ``predicted`` winners.

The kernels here are bound by memory, so the model starts from the time of a copy of the bytes that must move and
multiplies it by what a candidate loses. The loss is log-linear in facts of the artifact and its launch, each of them a
ratio that carries over to another GPU: bytes in flight on an SM against what Little's law asks for (bandwidth times
latency), work for each thread, warps, the last and partly filled wave of blocks, time to issue the instructions, and
whether loads are pipelined. The weights are a least-squares fit to a sweep of Qwen3-8B and Qwen3-0.6B on an H200,
2,227 candidates of 50 problems; fitted to either model alone they rank the other's candidates as well.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilekern.cubin import Resources
from tilekern.spec import ALIGNED, Problem, cdiv
from tilekern.targets import Target
from tuning.sweep import Candidate, Sweep, candidates

# Registers are given to a warp in units of 256, shared memory to a block with 1 KiB for the system on top (CUDA
# programming guide, "Technical Specifications per Compute Capability").
_REGISTER_UNIT, _WARP, _RESERVED_SHARED = 256, 32, 1024
_LATENCY_S = 0.9e-6
_LAUNCH_S = 2.5e-6
_CLOCK_HZ = 1.75e9
# Instructions that an SM issues in a cycle once latencies are hidden no better than usual.
_ISSUE_RATE = 2
# More static shared memory than reductions need: the buffers of a software pipeline.
_PIPELINE_BYTES = 16384
# The side of a tile whose operand traffic costs as much as its arithmetic.
_TILE_SIDE = 12
_INTERCEPT = 0.2192
_WEIGHTS = {
    "threads_squared": 0.0163,
    "thread_bytes": 0.0834,
    "thread_bytes_squared": 0.0074,
    "persistent": -0.0447,
    "pipelined": -0.0774,
    "in_flight": -0.0845,
    "in_flight_squared": 0.0102,
    "imbalance": 0.1192,
    "issue": 0.1699,
    "issue_squared": -0.0308,
    "stack": 0.0585,
    "waits": 0.0144,
    "few_steps": -0.1308,
    "warps": 0.0761,
    "alone": -0.0646,
}


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
    """The model's time for a candidate on a target; infinite where no block fits on an SM."""
    resident = resident_blocks(resources, target)
    spills = resources.stack_bytes > 0
    if resident == 0:
        return Prediction(math.inf, 0, 0.0, spills)
    if is_arithmetic(candidate, target):
        return _predict_arithmetic(candidate, resources, target, resident)
    floor_s = _memory_s(candidate, target)
    features, in_flight = _features(candidate, resources, target, resident, floor_s)
    loss = _INTERCEPT + sum(weight * features[name] for name, weight in _WEIGHTS.items())
    return Prediction(floor_s * math.exp(loss), resident, in_flight, spills)


def _memory_s(candidate: Candidate, target: Target) -> float:
    return _LAUNCH_S + candidate.spec.bytes_moved(candidate.problem) / (target.copy_gbs * 1e9)


def _arithmetic_s(candidate: Candidate, target: Target) -> float:
    return candidate.spec.flops(candidate.problem) / (target.matmul_tflops * 1e12)


def is_arithmetic(candidate: Candidate, target: Target) -> bool:
    """Whether the matrix units' rate, and not memory's, bounds a candidate's problem."""
    return _arithmetic_s(candidate, target) > _memory_s(candidate, target)


def predict_library(candidate: Candidate, target: Target) -> Prediction:
    """The roofline's time: NVIDIA's libraries come near it on every GPU, so nothing is predicted to beat them."""
    return Prediction(max(_memory_s(candidate, target), _arithmetic_s(candidate, target)), 1, 0.0, spills=False)


def _predict_arithmetic(candidate: Candidate, resources: Resources, target: Target, resident: int) -> Prediction:
    """Coarse: a tile's operands are read again from L2 by each block, and the last wave is not full."""
    spec, config, problem = candidate.spec, candidate.config, candidate.problem
    sides = [int(config[name]) for name in ("tile_m", "tile_n") if name in config]
    traffic = sum(_TILE_SIDE / side for side in sides)
    blocks = spec.device(problem, config).grid(problem, target.sm_count)
    places = min(blocks, max(1, resident) * target.sm_count)
    waves = cdiv(blocks, places) * places / blocks
    seconds = _arithmetic_s(candidate, target) * (1.05 + traffic) * waves
    return Prediction(seconds, resident, 0.0, resources.stack_bytes > 0)


def _features(
    candidate: Candidate, resources: Resources, target: Target, resident: int, floor_s: float
) -> tuple[dict[str, float], float]:
    """The model's features by name, and the bytes in flight on an SM."""
    spec, problem, config = candidate.spec, candidate.problem, candidate.config
    blocks = spec.device(problem, config).grid(problem, target.sm_count)
    steps = spec.device(problem, config.but(schedule="block")).grid(problem, target.sm_count)
    busy = min(resident, cdiv(blocks, target.sm_count))
    places = min(blocks, busy * target.sm_count)
    step_bytes = spec.bytes_moved(problem) / steps
    persistent = config["schedule"] == "persistent"
    pipelined = bool(config.get("tma")) and resources.shared_bytes > _PIPELINE_BYTES
    held = resources.shared_bytes if persistent and pipelined else step_bytes
    wanted = target.copy_gbs * 1e9 * _LATENCY_S / target.sm_count
    warps = cdiv(resources.threads, _WARP)
    instructions = steps * resources.code_bytes / 16 * warps
    issue_s = instructions / (target.sm_count * _ISSUE_RATE * _CLOCK_HZ)
    threads, thread_bytes = math.log2(busy * resources.threads / 1024), math.log2(step_bytes / resources.threads / 32)
    in_flight, issue = math.log2(busy * held / wanted), math.log1p(issue_s / floor_s)
    features = {
        "threads_squared": threads**2,
        "thread_bytes": thread_bytes,
        "thread_bytes_squared": thread_bytes**2,
        "persistent": float(persistent),
        "pipelined": float(pipelined),
        "in_flight": in_flight,
        "in_flight_squared": in_flight**2,
        "imbalance": math.log(cdiv(steps, places) * places / steps),
        "issue": issue,
        "issue_squared": issue**2,
        "stack": math.log1p(resources.stack_bytes),
        "waits": math.log2(steps / places + 1) if persistent and not pipelined else 0.0,
        "few_steps": math.log1p(places / steps),
        "warps": math.log2(warps) - 2,
        "alone": float(busy == 1),
    }
    return features, busy * held


@functools.lru_cache(maxsize=1)
def _compiled(sweep_folder: str, size: int) -> dict[str, dict[str, Any]]:  # noqa: ARG001 (the journal's size is the key)
    return Sweep(Path(sweep_folder)).compiled()


def ranking(sweep: Sweep, kernel: str, problem: Problem, target: Target) -> list[tuple[Candidate, Prediction]]:
    """The compiled candidates of a problem, the best predicted first; only aligned variants can win."""
    journal = sweep.folder / "compiled.jsonl"
    compiled = _compiled(str(sweep.folder), journal.stat().st_size if journal.exists() else 0)
    found = []
    for item in candidates(kernel, problem, target):
        line = compiled.get(item.artifact)
        if item.is_library and item.variant == ALIGNED:
            found.append((item, predict_library(item, target)))
        elif item.variant == ALIGNED and line is not None and line["status"] == "ok":
            found.append((item, predict(item, Resources(**line["resources"]), target)))
    return sorted(found, key=lambda pair: pair[1].rank)


def predict_best(sweep: Sweep, kernel: str, problem: Problem, target: Target) -> Candidate | None:
    """The predicted winner of a problem, or None where nothing compiled."""
    ranked = ranking(sweep, kernel, problem, target)
    return ranked[0][0] if ranked else None
