"""The battery on a GPU: kernels and libraries stand it, one that is wrong there does not, and it costs little.

What else is wrong, ``tests/tuning/test_battery.py`` tries on the CPU.
"""

import time

import cuda.tile as ct
import pytest
import torch
from spec_samples import sized

from tilekern.compile.toolchain import compile_candidate, toolkit
from tilekern.kernels import all_specs, spec_named
from tilekern.kernels.tiles import ConstInt
from tilekern.runtime.dispatch import plan_for
from tilekern.spec import ALIGNED, GENERIC
from tilekern.spec.targets import here
from tilekern.tuning.measure.bench import Bench
from tilekern.tuning.measure.tasks import Entrant, Task
from tilekern.tuning.sweep.candidates import LIBRARY_LINE, candidate
from tilekern.tuning.verify.battery import Battery

needs_a_compiler = pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")
# Sizes of a small model that is real.
SIZES = {
    "rows": 2048, "tokens": 2048, "batch": 1, "columns": 1024, "inner": 3072, "hidden": 1024, "vocabulary": 32000,
    "heads": 16, "kv_heads": 8, "head_dim": 128, "pairs": 32, "experts": 64, "expert_groups": 8, "choices": 8,
}  # fmt: skip


def problem_of(spec):
    """The problem of a spec in training the model."""
    problem = sized(spec, "bfloat16", **SIZES)
    return spec.bucketed(problem.but(causal=True) if "causal" in problem else problem)


def task_of(spec, problem):
    """The spec's default and generic config, compiled here."""
    target, found, cubins = here(), [], {}
    for config, variant in ((spec.default(problem, target), ALIGNED), (spec.generic(problem), GENERIC)):
        item = candidate(spec.name, problem, config, variant, target)
        line = LIBRARY_LINE
        if not item.is_library:
            made = compile_candidate(spec, problem, config, target, variant)
            cubins[item.key] = made.cubin
            line = {"status": "ok", "sha256": item.key, "symbol": made.symbol, "assumptions": made.assumptions}
        found.append(Entrant(item, line))
    return Task(spec.name, problem, target, tuple(found), cubins, found[0].key)


@needs_a_compiler
@pytest.mark.parametrize("spec", all_specs().values(), ids=lambda spec: spec.name)
def test_every_spec_passes_the_battery_at_the_sizes_of_a_model(spec):
    """The aligned and the generic variant, and what it costs once the references are there."""
    task = task_of(spec, problem_of(spec))
    bench = Bench(task)
    for entrant in task.entrants:
        check = bench.check(entrant)
        assert check.passed, check.reason
        check = bench.confirm(entrant)
        assert check.passed, check.reason
        assert {"bucket", "tails", "large magnitudes", "zeros", "repeat"} <= {case["case"] for case in check.cases}
    started = time.perf_counter()
    assert bench.confirm(task.entrants[0]).passed
    assert time.perf_counter() - started < 1


def chosen(name, config, **flags):
    """(spec, problem, config) of a library."""
    spec = spec_named(name)
    problem = problem_of(spec).but(**flags)
    [found] = [c for c in spec.space.candidates(problem, here()) if config.items() <= c.items()][:1]
    assert spec.is_library(problem, found)
    return spec, problem, found


@pytest.mark.parametrize(
    ("name", "config", "flags"),
    [
        ("matmul", {"implementation": "cublas"}, {}),
        ("attention_forward", {"implementation": "cudnn"}, {}),
        ("attention_backward", {"implementation": "cudnn"}, {"deterministic": False}),
    ],
)
def test_libraries_stand_the_battery(name, config, flags):
    spec, problem, config = chosen(name, config, **flags)
    battery = Battery(spec, problem, here().sm_count)

    def run(problem, inputs, outputs):
        library = spec.implement(problem, config)
        return library.bound(plan_for)(*(inputs[name] for name in library.inputs))

    check = battery.screen(config, run)
    assert check.passed, check.reason
    check = battery.confirm(config, run)
    assert check.passed, check.reason


SWIGLU = spec_named("swiglu_forward")
PROBLEM = SWIGLU.problem(rows=256, columns=96, dtype="bfloat16")


@ct.kernel
def promises_whole_tiles(gate, up, y, tile_n: ConstInt):
    """A row in tiles, of which the last reaches over its end; only the loads know."""
    index, shape = (ct.bid(0), ct.bid(1)), (1, tile_n)
    g = ct.load(gate, index, shape, padding_mode=ct.PaddingMode.ZERO, allow_tma=False).astype(ct.float32)
    u = ct.load(up, index, shape, padding_mode=ct.PaddingMode.ZERO, allow_tma=False).astype(ct.float32)
    ct.store(y, index, (g / (1.0 + ct.exp(-g)) * u).astype(y.dtype), check_bounds=False, allow_tma=False)


@needs_a_compiler
def test_a_kernel_that_stores_beyond_rows_is_found():
    """Each row's end is written again by the next row's block, or not: behind the last row stands a canary."""

    def run(problem, inputs, outputs):
        arguments = (inputs["gate"], inputs["up"], outputs["y"], 64)
        ct.launch(torch.cuda.current_stream(), (problem["rows"], 2), promises_whole_tiles, arguments)

    check = Battery(SWIGLU, PROBLEM, here().sm_count).screen(SWIGLU.generic(PROBLEM), run)
    assert not check.passed
    assert "memory around y was written to" in check.reason
