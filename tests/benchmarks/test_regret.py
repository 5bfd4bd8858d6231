"""Regret on a made-up sweep: the predicted winner's time over the best, twins sharing one timing."""

from __future__ import annotations

import pytest

from benchmarks import regret as benchmark
from tilekern.errors import InputError
from tilekern.kernels import spec_named
from tilekern.spec.targets import resolve
from tilekern.tuning.sweep.candidates import candidates
from tilekern.tuning.sweep.folder import Sweep

H200 = resolve("H200")
SPEC = spec_named("swiglu_forward")
PROBLEM = SPEC.problem(rows=8192, columns=4096, dtype="bfloat16")
RIGHT = {"passed": True, "relative_error": 1e-7, "elementwise_error": 1e-7}
RESOURCES = dict.fromkeys(("registers", "stack_bytes", "shared_bytes", "threads", "code_bytes"), 1)


@pytest.fixture
def regret(monkeypatch):
    """The benchmark with a predictor that answers the second candidate."""
    monkeypatch.setattr(
        benchmark, "predict_best", lambda _, kernel, problem, target: candidates(kernel, problem, target)[1]
    )
    return benchmark


def sweep_with(folder, times_us, codes):
    sweep = Sweep(folder)
    sweep.begin(H200, "made-up", [(SPEC.name, PROBLEM)])
    for item, time_us, code in zip(candidates(SPEC.name, PROBLEM, H200), times_us, codes, strict=False):
        made = {"sha256": "0" * 64, "symbol": "kernel", "code_sha256": code, "assumptions": [], "resources": RESOURCES}
        sweep.note("compiled", {"key": item.artifact, "status": "ok", **made})
        if time_us:
            timing = {"median_us": time_us, "spread_us": 0.1, "samples": 60}
            sweep.note("measured", {"candidate": item.key, "check": RIGHT, "timing": timing})


def test_the_predicted_time_over_the_best(tmp_path, regret):
    sweep_with(tmp_path, [20.0, 11.0, 10.0], "abc")
    results = regret.measure(tmp_path)
    case = f"swiglu_forward {PROBLEM.key}"
    assert results.run["gpu"] == "H200"
    assert [results.row(case, "tilekern", m).value for m in ("predicted", "best", "default")] == [11.0, 10.0, 20.0]
    assert results.row(case, "tilekern", "regret").value == 1.1
    for name in ("median_regret", "p90_regret", "worst_regret"):
        assert results.row(regret.ALL, "tilekern", name).value == 1.1


def test_a_twin_of_the_predicted_winner_gives_it_its_time(tmp_path, regret):
    sweep_with(tmp_path, [20.0, None, 10.0], "aac")
    found = regret.timed_candidates(Sweep(tmp_path), SPEC.name, PROBLEM)
    assert sorted(timing["median_us"] for _, timing in found.values()) == [10.0, 20.0]


@pytest.mark.parametrize(
    ("values", "percent", "expected"), [([3, 1, 2], 50, 2), ([1, 2], 90, 2), (range(1, 101), 90, 90), ([5], 10, 5)]
)
def test_percentiles(regret, values, percent, expected):
    assert regret.percentile(values, percent) == expected


def test_a_winner_that_was_never_timed_is_noted(tmp_path, regret):
    sweep_with(tmp_path, [20.0, None, 10.0], "abc")
    with pytest.raises(InputError, match="holds no measurements"):
        regret.measure(tmp_path)
