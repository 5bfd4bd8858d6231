"""Compute the terms of the cost model: the seconds of each resource that a candidate's launch uses.

Each term is a count from the problem, the launch grid or the machine code over a rate of the target, so it carries over
to other GPUs. :mod:`tilekern.tuning.predict.cost_model` weighs and combines the terms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilekern.compile.cubin import Resources
from tilekern.spec import Config, cdiv
from tilekern.spec.targets import Target
from tilekern.tuning.compile.machine_code import Counts, MachineCode
from tilekern.tuning.predict.roofline import roofline
from tilekern.tuning.sweep.candidates import Candidate

# Registers are given to a warp in units of 256, shared memory to a block with 1 KiB for the system on top (CUDA
# programming guide, "Technical Specifications per Compute Capability").
_REGISTER_UNIT, _WARP, _RESERVED_SHARED = 256, 32, 1024
_CLOCK_HZ = 1.75e9
_LATENCY_S = 1e-6
_BARRIER_S = 50e-9
_STEP_S = 0.1e-6
# Threads that only issue TMA loads while others compute.
_PRODUCER_THREADS = 128
# Bytes a cycle of an SM's first-level cache, for spilled registers.
_LOCAL_BYTES_A_CYCLE = 64
# Bytes a cycle of the L2 cache to one SM, even if few SMs are at work.
_INTAKE_BYTES_A_CYCLE = 64
# Cycles of a warp's access to global memory at the load-store unit, and of a TMA load.
_ACCESS_CYCLES, _BOX_CYCLES = 4, 20
# Instructions for each floating-point one, if only those are known to belong to the computing warps.
_AROUND_FLOAT = 2.5
# The least bytes of a stage of a software pipeline.
_STAGE_BYTES = 16384
_L2_BYTES_S_A_SM = 38e9
_TILE_ELEMENTS, _TILE_DEPTH, _TILE_ROWS = 128 * 128, 64, 64
# Instructions around each product of wgmma in a plain loop of products.
_PLAIN_DENSITY = 16


@dataclass(frozen=True)
class Costs:
    """The cost of a launch: seconds of each term, and traits that the weights turn into a factor.

    ``roofline_s`` is the time of a copy of the bytes, or of the products at the datasheet's rate.
    """

    terms: dict[str, float]
    traits: dict[str, float]
    roofline_s: float
    resident_blocks: int
    in_flight_bytes: float


@dataclass(frozen=True)
class _Launch:
    """The distribution of a candidate's blocks over the target's SMs.

    Attributes:
        resident: blocks that fit on an SM.
        busy: blocks at work on the busiest SM.
        places: blocks at work on the GPU at once.
        blocks: blocks of the grid.
        steps: tiles of work; a persistent block takes several.
        workers: threads of a block that compute.
        specialised: whether other threads of the block load for them.
    """

    resident: int
    busy: int
    places: int
    blocks: int
    steps: int
    workers: int
    specialised: bool

    @property
    def rounds(self) -> int:
        """Return how many tiles the last block takes one after another."""
        return cdiv(self.steps, self.places)


def resident_blocks(resources: Resources, target: Target) -> int:
    """Return how many blocks of a kernel fit on one SM of the target at once."""
    warps = cdiv(resources.threads, _WARP)
    registers = cdiv(resources.registers * _WARP, _REGISTER_UNIT) * _REGISTER_UNIT * warps
    limits = [target.blocks, target.threads // resources.threads, target.registers // max(1, registers)]
    limits.append(target.shared_bytes // (resources.shared_bytes + _RESERVED_SHARED))
    return min(limits)


def _launch(candidate: Candidate, resources: Resources, target: Target) -> _Launch:
    spec, problem, config = candidate.spec, candidate.problem, candidate.config
    blocks = spec.device(problem, config).grid(problem, target.sm_count)
    steps = spec.device(problem, config.but(schedule="block")).grid(problem, target.sm_count)
    ctas = int(config.get("num_ctas") or 1)
    resident = resident_blocks(resources, target)
    busy = min(resident, cdiv(blocks * ctas, target.sm_count))
    places = max(1, min(blocks, busy * target.sm_count // ctas))
    specialised = candidate.backend.adds_warps and resources.threads > _WARP * _warps(config)
    workers = resources.threads - (_PRODUCER_THREADS if specialised else 0)
    return _Launch(resident, busy, places, blocks, steps, workers, specialised)


def _warps(config: Config) -> int:
    return int(config.get("num_worker_warps") or 4)


def memory_costs(candidate: Candidate, resources: Resources, code: MachineCode, target: Target) -> Costs:
    """Compute the costs of a kernel that memory bounds."""
    launch = _launch(candidate, resources, target)
    moved = candidate.spec.bytes_moved(candidate.problem)
    step_bytes = moved / launch.steps
    bulk = code.whole.bulk_loads > 0
    part, passes = _repeated(code, step_bytes, launch.workers, resources.shared_bytes)
    rounds = launch.rounds * passes
    looping = bulk and (passes > 1 or (launch.rounds > 1 and _is_persistent(candidate.config)))
    if bulk:
        held = min(float(resources.shared_bytes), math.inf if looping else step_bytes)
        waits = max(1.0, launch.rounds * step_bytes / held) if looping else launch.rounds * max(1.0, step_bytes / held)
        cycles = max((loop.cycles for loop in code.loops), default=0) or part.cycles
        floats = sum(loop.float_operations for loop in code.loops) or part.float_operations
        issued = _AROUND_FLOAT * max(1, floats)
    else:
        held = max((loop.load_bytes for loop in code.loops), default=0) or code.whole.load_bytes
        held, waits = float(held * launch.workers), rounds * max(1, part.load_waits)
        cycles, issued = part.cycles, float(part.instructions)
    # A count for each thread of a block and pass, times this, is seconds of an SM that does one of them in a cycle.
    each = passes * launch.workers * launch.steps / (target.sm_count * _CLOCK_HZ)
    accesses = part.global_loads + part.global_stores
    boxes = part.bulk_loads + part.bulk_stores
    terms = {
        "copy": roofline(candidate.kernel, candidate.problem, target).memory_s,
        "intake": launch.rounds * launch.busy * step_bytes / (_INTAKE_BYTES_A_CYCLE * _CLOCK_HZ),
        "issue": issued * each / _WARP,
        "access": accesses * each / _WARP * _ACCESS_CYCLES,
        "local": part.local_accesses * each * 4 / _LOCAL_BYTES_A_CYCLE,
        "boxes": boxes * each / launch.workers * _BOX_CYCLES,
        "latency": waits * _LATENCY_S,
        "chain": cycles * rounds / _CLOCK_HZ,
        "barriers": part.barriers * rounds * _BARRIER_S,
        "blocks": launch.blocks / launch.places * _LATENCY_S if launch.blocks > launch.places else 0.0,
        "start": _LATENCY_S,
    }
    traits = {
        "persistent": float(_is_persistent(candidate.config)),
        "pipelined": float(looping),
        "specialised": float(launch.specialised),
    }
    return Costs(terms, traits, terms["copy"], launch.resident, launch.busy * held)


def _repeated(code: MachineCode, step_bytes: float, workers: int, shared_bytes: int) -> tuple[Counts, float]:
    """Return the part of the code that moves a tile's bytes, and how often it runs for one tile.

    If TMA moves them, threads do not count them; a pass is then what shared memory holds.
    """
    whole, share = code.whole, step_bytes / workers
    if whole.bulk_loads:
        return whole, max(1.0, step_bytes / max(_STAGE_BYTES, shared_bytes))
    hot = Counts.total(code.loops) if code.loops else Counts()
    moved, all_moved = hot.load_bytes + hot.store_bytes, whole.load_bytes + whole.store_bytes
    # A loop that moves only a small part of the bytes does not matter.
    if moved and (share >= 1.5 * moved or moved >= 0.3 * min(share, all_moved)):
        return hot, max(1.0, share / moved)
    return whole, max(1.0, share / max(1, all_moved))


def product_costs(candidate: Candidate, resources: Resources, code: MachineCode, target: Target) -> Costs:
    """Compute the costs of a kernel that the matrix units bound, with tiles of ``tile_m`` by ``tile_n``."""
    problem, config, launch = candidate.problem, candidate.config, _launch(candidate, resources, target)
    flops, products_s = candidate.spec.flops(problem), roofline(candidate.kernel, problem, target).arithmetic_s
    tile_m, tile_n, warps = int(config["tile_m"]), int(config["tile_n"]), _warps(config)
    ctas = int(config.get("num_ctas") or 1)
    # Blocks of a causal problem have unequal work, so their number for each place says little.
    uneven = bool(problem.get("causal"))
    waves = 1.0 if uneven else launch.rounds * launch.places / launch.steps
    loops = [loop for loop in code.loops if loop.products]
    steps = flops / (2 * tile_m * tile_n * _TILE_DEPTH)
    spilled = sum(loop.local_accesses for loop in loops) * warps * _WARP * 4 / _LOCAL_BYTES_A_CYCLE
    wgmma = target.has_wgmma
    instructions, products = (sum(getattr(loop, name) for loop in loops) for name in ("instructions", "products"))
    density = max(0.0, math.log2(instructions / products / _PLAIN_DENSITY)) if wgmma and products else 0.0
    terms = {
        "products": products_s * waves,
        "operands": flops * (1 / tile_m + 1 / tile_n) / (_L2_BYTES_S_A_SM * target.sm_count),
        "steps": steps / (target.sm_count * max(1, launch.busy)) * ctas * _STEP_S,
        "local": steps * spilled / (target.sm_count * _CLOCK_HZ),
        "start": _LATENCY_S,
    }
    traits = {
        "uneven": float(uneven and _is_persistent(config)),
        "shared_sm": float(launch.resident > 1),
        "tile": math.log2(tile_m * tile_n / _TILE_ELEMENTS),
        "latency_hint": float(bool(config.get("latency"))),
        "alone": density if launch.resident < 2 else 0.0,
        # wgmma gives each group of four warps 64 rows; more warps than that share rows, and multiply twice.
        "split": float(wgmma and max(tile_m, tile_n) < _TILE_ROWS * warps // 4),
    }
    return Costs(terms, traits, products_s, launch.resident, 0.0)


def _is_persistent(config: Config) -> bool:
    return bool(config["schedule"] == "persistent")


def unread(resources: Resources) -> MachineCode:
    """Estimate the counts from the size of the code, for an artifact whose code was not counted."""
    instructions = resources.code_bytes // 16
    return MachineCode(Counts(instructions=instructions, cycles=2 * instructions, load_waits=1))
