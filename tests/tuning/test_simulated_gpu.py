"""The measure stage from plan to winners with its real worker, on a GPU that is simulated by the CPU."""

import functools
from multiprocessing import get_context

import pytest
import simulated_gpu

from tilekern.kernels import spec_named
from tilekern.spec import Config, Problem
from tilekern.tuning.compile.stage import Compiling, compile_all
from tilekern.tuning.executors.local import LocalExecutor
from tilekern.tuning.measure import process
from tilekern.tuning.measure.stage import confirm, measure_all
from tilekern.tuning.publishing import Known, keep_winners, winners
from tilekern.tuning.sweep.candidates import candidates
from tilekern.tuning.sweep.folder import Sweep

# One worker of pytest's compiles the sweep for both tests.
pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("simulated GPU")]

NO_FLAGS = {d.name: False for d in spec_named("matmul").dimensions if d.kind == "flag"}
PROBLEMS = [
    ("column_sum", {"rows": 64, "columns": 128, "dtype": "bfloat16"}),
    ("swiglu_forward", {"rows": 64, "columns": 32, "dtype": "bfloat16"}),
    ("rms_norm_backward", {"rows": 64, "columns": 128, "dtype": "bfloat16", "weight_dtype": "bfloat16"}),
    ("grouped_weight_gradient", {"rows": 64, "inner": 32, "columns": 64, "experts": 4, "dtype": "bfloat16",
                                 "a_gathered": False, "b_gathered": False}),
    ("matmul", {"rows": 64, "inner": 32, "columns": 64, "dtype": "float32", **NO_FLAGS}),
    ("matmul", {"rows": 64, "inner": 32, "columns": 64, "dtype": "bfloat16", **NO_FLAGS}),
]  # fmt: skip


class SimulatedExecutor(LocalExecutor):
    """The host's executor on the simulated GPU."""

    def describe_gpu(self, _):
        return {"gpu": "a simulated one", "driver": "0", "torch": "0"}


def _is_of(key, record):
    """Return whether a candidate's key is that of a record's winner."""
    kernel, problem, config, variant, _ = f"{key}||||".split("|")[:5]
    return (kernel, problem, config, variant) == (
        record.kernel, Problem(record.problem).key, Config(record.config).key, "aligned",
    )  # fmt: skip


@pytest.fixture
def simulated(monkeypatch):
    monkeypatch.setattr(process, "serve", simulated_gpu.serve)
    monkeypatch.setattr(process, "get_context", lambda _: get_context("fork"))
    monkeypatch.setattr("tilekern.tuning.executors.local.devices", lambda: ["0"])


@pytest.fixture(scope="module")
def compiled(tmp_path_factory, h200):
    sweep = Sweep(tmp_path_factory.mktemp("simulated"))
    named = [(name, spec_named(name).problem(**sizes)) for name, sizes in PROBLEMS]
    # A few candidates of each are enough.
    limits = {pair: [item.config for item in candidates(*pair, h200)][:3] for pair in named[:2]}
    by_cublas, tile = (spec_named("matmul").default(problem, h200) for _, problem in named[-2:])
    few = [by_cublas.but(tile_k=64), tile, tile.but(schedule="block")]
    norm, gradient = (spec_named(name).default(problem, h200) for name, problem in named[2:4])
    routed = [gradient, gradient.but(implementation="torch")]
    limits |= {named[-1]: few, named[2]: [norm, norm.but(occupancy=1)], named[3]: routed}
    sweep.begin(h200, "test", named, limits, invariant=named[:3])
    assert compile_all(sweep, jobs=2).failed == 0
    return sweep


def test_every_problem_has_a_confirmed_winner(simulated, compiled):
    summary = measure_all(compiled, SimulatedExecutor(compiled.cache), keep_winners)
    assert (summary.wrong, summary.quarantined) == (0, 0)
    assert not compiled.skipped()
    by_winner = list(winners(compiled, {"key": "none"}))
    found = [winner for winner, _ in by_winner]
    assert [winner.kernel for winner in found] == [name for name, _ in PROBLEMS]
    for winner in found:
        record = winner.record
        assert record.provenance == "measured"
        assert record.measurement["median_us"] > 0
        assert record.check["passed"]
        assert len(record.check["cases"]) > 3
    assert found[2].record.measurement["with"] == "column_sum"
    assert not any("with" in winner.record.measurement for winner in found if winner is not found[2])
    sums, gated = found[0].record, found[1].record
    assert "bits" not in sums.check, "results are not by rows"
    assert gated.measurement["invariant"]["bits"] == gated.check["bits"] != "", "all its configs are of one class"
    assert gated.measurement["invariant"]["config"] == gated.config
    classed = {race["kernel"] for race in compiled.races().values() if race.get("invariant")}
    assert classed == {"column_sum", "swiglu_forward", "rms_norm_backward"}
    [race] = (race for race in compiled.races().values() if race["kernel"] == "rms_norm_backward")
    # The plan has no sum over as few rows as there are blocks: it is the winner of the nearest one.
    [(blocks, follower)] = race["followers"].items()
    assert 0 < int(blocks) < 64
    assert _is_of(follower, found[0].record)
    routed = found[3].record
    assert routed.measurement["on"].keys() == {"zipf"}
    assert routed.measurement["on"]["zipf"] > 0
    assert {case["case"] for case in routed.check["cases"]} >= {"zipf", "one expert gets all", "one row each"}
    float32, bfloat16 = (winner.record for winner in found[-2:])
    assert float32.config["implementation"] == bfloat16.config["implementation"] == "cublas"
    assert (float32.artifacts, float32.best_kernel) == ({}, None), "no kernel multiplies float32"
    best = bfloat16.best_kernel
    assert best.config["implementation"] == "tile"
    assert best.config == bfloat16.artifacts["aligned"].config
    # Medians of a loaded core need not stand in the order of the race.
    assert best.measurement["median_us"] > 0
    assert best.check["passed"]
    assert len(best.check["cases"]) > 3
    assert set(by_winner[-1][1]) == bfloat16.digests
    assert len(bfloat16.artifacts) == 2


def lines_of(sweep):
    return (sweep.folder / "measured.jsonl").read_text().splitlines()


def confirm_others(sweep, executor):
    """Candidates that only raced stand the battery too, and keep their times; those that stood it do not again."""
    known, before = Known.of(sweep), sweep.measured()
    items = [item for named in sweep.problems() for item in known.timings(sweep.candidates(*named))]
    others = [item for item in items if not known.is_confirmed(item)]
    assert {(item.kernel, item.problem) for item in others} == set(sweep.problems())
    lines = len(lines_of(sweep))
    confirm(sweep, executor, items)
    after = Sweep(sweep.folder).measured()
    for item in items:
        assert after[item.key]["timing"] == before[item.key]["timing"]
        assert len(after[item.key]["check"]["cases"]) > 3
        assert item in others or after[item.key]["check"] == before[item.key]["check"]
    assert len(lines_of(sweep)) == lines + len(others), "each is checked once"


def test_what_is_measured_while_others_are_compiled_has_confirmed_winners_too(simulated, compiled, h200, tmp_path):
    """Compilers, measuring processes and journals at once, in an executor that starts its workers before; in turns."""
    sweep, named = Sweep(tmp_path / "sweep"), compiled.problems()[:2]
    sweep.begin(h200, "test", named, {pair: compiled.limits[pair] for pair in named})
    turns = {pair: turn for turn, pair in enumerate(reversed(named))}
    with (
        SimulatedExecutor(sweep.cache) as executor,
        Compiling(functools.partial(compile_all, sweep, jobs=2, turns=turns)) as compiling,
    ):
        summary = measure_all(sweep, executor, keep_winners, coming=compiling.problems(), turns=turns)
        assert compiling.summary().compiled == len(sweep.compiled())
        confirm_others(sweep, executor)
    assert (summary.wrong, summary.quarantined) == (0, 0)
    assert [race["kernel"] for race in sweep.races().values()] == [kernel for kernel, _ in reversed(named)]
    found = [winner for winner, _ in winners(sweep, {"key": "none"})]
    assert [(winner.kernel, winner.problem) for winner in found] == named
    assert all(winner.record.provenance == "measured" and winner.record.check["passed"] for winner in found)
    codes = [{key: line["code_sha256"] for key, line in one.compiled().items()} for one in (sweep, compiled)]
    assert codes[0].items() <= codes[1].items()
