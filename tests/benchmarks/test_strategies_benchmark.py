"""The comparison of strategies on replayed measurements; its GPU part runs on a GPU."""

import itertools

import pytest
from replay_runner import ReplayRunner

from benchmarks.strategies import AGAIN_S, BEFORE_S, HOT, RESTED, Effort, Heated, compared, judged, summary
from tilekern.tuning.measure.timing import Timing
from tilekern.tuning.strategies import SLOWER, STRATEGIES, WON, Lineup

MEDIANS = {"a": 120.0, "b": 100.0, "c": 100.5, "d": 300.0}
LINEUP = Lineup(tuple(MEDIANS), "a")
SEEDS = itertools.count()


def fresh():
    return ReplayRunner(MEDIANS, 0.003, next(SEEDS))


def test_each_strategy_is_compared_by_its_choices_and_its_time():
    rows, notes = compared(f"x rows=1, {HOT}", fresh, LINEUP, ["race", "exhaustive"], Effort(rounds=60))
    figures = {(row.provider, row.metric): row.value for row in rows}
    for name in ("race", "exhaustive"):
        assert 0 <= figures[name, "regret"] <= figures[name, "worst_regret"] < 1
        assert figures[name, "time"] == pytest.approx(100, rel=0.01)
        assert figures[name, "share_near_best"] == 1
        assert figures[name, "gpu"] > 5 * 0.3
    assert [note.split(": ")[1].split()[0] for note in notes] == ["best", "race", "exhaustive"]


def test_a_bad_choice_is_judged_with_those_near_the_best(monkeypatch):
    timings = {"d": Timing(1.0, 0.0, 1, WON), "b": Timing(2.0, 0.0, 1, SLOWER)}
    monkeypatch.setattr("benchmarks.strategies.strategy_named", lambda _: lambda *_: timings)
    assert judged(fresh(), LINEUP, ["d"], Effort(rounds=60)).keys() == {"b", "c", "d"}
    rows, _ = compared("x", fresh, LINEUP, ["race"], Effort(rounds=60))
    assert {row.metric: row.value for row in rows}["regret"] == pytest.approx(200, rel=0.01)


def test_judging_ends_when_its_time_is_spent():
    runner = fresh()
    judged(runner, LINEUP, [], Effort(rounds=80, seconds=0.0))
    assert runner.launches == 4 * (1 + 7) + 2 * (1 + 10)


def test_the_summary_adds_up_each_state_of_the_gpu():
    rows = [
        row
        for state, case in itertools.product((RESTED, HOT), "xy")
        for row in compared(f"{case}, {state}", fresh, LINEUP, list(STRATEGIES), Effort(1, 20))[0]
    ]
    total = {(row.case, row.provider, row.metric): row.value for row in summary(rows)}
    mine = [row.value for row in rows if row.provider == "race" and row.metric == "gpu" and row.case.endswith(HOT)]
    assert total[f"all problems, {HOT}", "race", "gpu"] == pytest.approx(sum(mine), abs=1e-3)
    assert len(total) == 2 * len(STRATEGIES) * 5


def test_the_gpu_is_heated_before_and_between_rounds(monkeypatch):
    now, heated = itertools.count(), []
    monkeypatch.setattr("benchmarks.strategies.time.perf_counter", lambda: next(now) * AGAIN_S)
    runner = Heated(fresh(), heated.append)
    runner.round("ab")
    runner.round("ab")
    assert heated == [BEFORE_S, AGAIN_S]
    assert runner.heated_s == pytest.approx(AGAIN_S)
    assert runner.spent_us > 400
