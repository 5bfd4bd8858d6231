"""The benchmark of races on recorded measurements; the GPU's part runs on a GPU."""

import itertools

import pytest
from replay_runner import ReplayRunner

from benchmarks.races import ALL, Effort, judged, summary
from benchmarks.results import Row
from tilekern.tuning.strategies import Lineup
from tilekern.tuning.strategies.race import LEAST_ROUNDS

MEDIANS = {"a": 120.0, "b": 100.0, "c": 100.5, "d": 300.0}


def rows_of(rounds=60):
    seeds = itertools.count()
    lineup = Lineup(tuple(MEDIANS), "a")
    return judged("x rows=1", lambda: ReplayRunner(MEDIANS, 0.003, next(seeds)), lineup, Effort(rounds, 10))


def test_two_races_are_judged_by_the_sweep():
    times, rows = rows_of()
    assert times == pytest.approx({"b": 1.0, "c": 1.005}, rel=0.002)
    figures = {row.metric: row.value for row in rows}
    assert 1 <= figures["quality"] <= 1.01
    assert 1 <= figures["repeated"] <= 1.01
    assert figures["rounds"] == 60


def test_who_comes_close_or_was_chosen_decides_in_more_rounds():
    asked = []

    class Counting(ReplayRunner):
        def round(self, keys):
            asked.append(set(keys))
            return super().round(keys)

    judged("x rows=1", lambda: Counting(MEDIANS, 0.003, 1), Lineup(tuple(MEDIANS), "a"), Effort(60, 10), others=["d"])
    assert asked[-60:] == [{"b", "c", "d"}] * 60
    # "a" is a fifth behind, which five rounds do not decide.
    assert asked[-60 - LEAST_ROUNDS : -60] == [set(MEDIANS)] * LEAST_ROUNDS


def test_the_best_of_each_field_is_among_the_judged():
    times, _ = judged("x rows=1", lambda: ReplayRunner(MEDIANS, 0.003, 1), Lineup(tuple(MEDIANS), "a"), Effort(60, 10),
                      [tuple(MEDIANS), ("a", "d")])  # fmt: skip
    assert set(times) == {"a", "b", "c"}


def test_a_field_of_libraries_alone_has_no_best_with_code():
    times, _ = judged("x rows=1", lambda: ReplayRunner(MEDIANS, 0.003, 1), Lineup(tuple(MEDIANS)), Effort(60, 10),
                      [tuple(MEDIANS), ()])  # fmt: skip
    assert set(times) == {"b", "c"}


def test_the_summary_counts_what_is_near_and_divides_the_times():
    def row(case, provider, metric, value):
        return Row("races", case, provider, metric, value, "1")

    rows = [row("x", "tilekern", "quality", 1.0), row("x", "tilekern", "quality_again", 1.02),
            row("x", "tilekern", "repeated", 1.02), row("y", "tilekern", "quality", 1.009),
            row("y", "tilekern", "quality_again", 1.0), row("y", "tilekern", "repeated", 1.0),
            row("x", "tilekern", "gpu", 3.0), row("y", "tilekern", "gpu", 1.0),
            row("x", "cuda.tile 1.7", "gpu", 30.0), row("y", "cuda.tile 1.7", "gpu", 10.0),
            row("x", "cuda.tile 1.7", "quality", 1.5)]  # fmt: skip
    found = {(one.provider, one.metric): one.value for one in summary(rows)}
    assert found == {
        ("tilekern", "share_near_best"): 0.75, ("tilekern", "share_repeated"): 0.5,
        ("tilekern", "gpu_share_of_search"): 0.1, ("cuda.tile 1.7", "share_near_best"): 0.0,
    }  # fmt: skip
    assert {one.case for one in summary(rows)} == {ALL}


def test_without_a_library_s_rival_there_is_a_summary_all_the_same():
    _, rows = rows_of()
    assert {row.metric for row in summary(rows)} == {"share_near_best", "share_repeated"}
