"""Strategies on recorded measurements: who wins, who leaves when, and what it costs."""

import dataclasses
import itertools
import math
import random
import statistics
from collections import Counter

import pytest
from examples import examples, stressed
from hypothesis import given
from hypothesis import strategies as st
from race_samples import DEFAULT, cutile_search, races, winner
from replay_runner import Noise, ReplayRunner

from tilekern.errors import InputError
from tilekern.tuning.measure.timing import Timing
from tilekern.tuning.strategies import (
    BESIDE,
    HOPELESS,
    SLOWER,
    STRATEGIES,
    TIED,
    WON,
    Lineup,
    race,
    strategy_named,
)
from tilekern.tuning.strategies.lineup import ranked
from tilekern.tuning.sweep.lines import COPY

CALM = Noise(outliers=0.0)


class Clocked:
    """A runner without noise whose clock is another one in every round."""

    def __init__(self, medians_us, factors):
        self.medians_us, self.factors, self.rounds = medians_us, itertools.cycle(factors), []
        self.spent_us = 0.0

    def round(self, keys):
        factor = next(self.factors)
        self.rounds.append(list(keys))
        times = [factor * self.medians_us[key] for key in keys]
        self.spent_us += sum(times)
        return times


def family(*medians_us, spread=0.005, seed=0, noise=CALM):
    medians = {str(place): time_us for place, time_us in enumerate(medians_us)}
    return ReplayRunner(medians, spread, seed, noise), Lineup(tuple(medians), "0")


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_finds_a_clear_winner(name):
    runner, lineup = family(140.0, 100.0, 130.0, 150.0)
    timings = strategy_named(name)(runner, lineup)
    assert winner(timings) == "1"
    assert set(timings) == set(lineup.keys)
    assert timings["1"].median_us == pytest.approx(100, rel=0.02)
    assert timings["0"].behind == pytest.approx(0.4, abs=0.03)


def test_an_unknown_strategy_is_refused_with_the_known_ones():
    with pytest.raises(InputError, match="unknown strategy 'fastest'; known: race, exhaustive"):
        strategy_named("fastest")


def test_who_is_not_in_the_best_third_runs_once_and_who_cannot_win_leaves():
    runner, lineup = family(10_000.0, *[20_000.0] * 5, *[11_000.0] * 6)
    timings = race.run(runner, lineup)
    assert timings["0"].left == WON
    assert {timings[str(place)].left for place in range(1, 6)} == {HOPELESS}
    assert {timings[str(place)].left for place in range(6, 12)} == {HOPELESS, SLOWER}
    assert max(timing.samples for timing in timings.values()) == race.LEAST_SAMPLES


def test_short_kernels_run_several_times_before_the_first_cut():
    """One sample of the fastest is bad."""
    runner, lineup = family(*[2.0] + [2.2] * 20)
    sample, rounds = runner.round, []

    def first_is_bad(keys):
        rounds.append(keys)
        taken = dict(zip(keys, sample(keys), strict=True))
        return list((taken | {"0": 20.0} if len(rounds) == 1 else taken).values())

    runner.round = first_is_bad
    assert winner(race.run(runner, lineup)) == "0"


def test_the_first_round_runs_all_in_the_predicted_order():
    runner = Clocked({"c": 30.0, "a": 10.0, "b": 20.0, COPY: 5.0}, [1.0])
    race.run(runner, Lineup(("c", "a", "b"), "c", (COPY,)))
    assert runner.rounds[0] == ["c", "a", "b", COPY]
    assert all("b" not in keys for keys in runner.rounds[race.LEAST_SAMPLES + 1 :])


@pytest.mark.parametrize("name", ["race", "exhaustive"])
def test_a_clock_that_changes_between_rounds_judges_all_alike(name):
    """By their plain medians the slowest would win: it has no sample but those of the fastest rounds."""
    medians = {"a": 101.5, "b": 100.0, "c": 103.0}
    timings = strategy_named(name)(Clocked(medians, [1.0, 1.4, 1.2, 1.6]), Lineup(("a", "b", "c")))
    assert winner(timings) == "b"
    assert timings["a"].behind == pytest.approx(0.015, abs=1e-4)
    assert timings["c"].behind == pytest.approx(0.03, abs=1e-4)


def test_among_equals_the_default_wins_else_the_best_predicted():
    same = {"a": 100.0, "b": 100.0, "c": 100.1}
    for default, expected in (("c", "c"), ("b", "b"), (None, "a")):
        timings = race.run(Clocked(same, [1.0]), Lineup(("a", "b", "c"), default))
        assert winner(timings) == expected
        assert {timings[key].left for key in same if key != expected} <= {TIED, SLOWER}


def test_one_outlier_does_not_cost_the_victory():
    class Hiccup(Clocked):
        def round(self, keys):
            times = super().round(keys)
            return [time + 20 * (key == "b" and len(self.rounds) == 1) for key, time in zip(keys, times, strict=True)]

    timings = race.run(Hiccup({"a": 103.0, "b": 100.0}, [1.0]), Lineup(("a", "b")))
    assert winner(timings) == "b"


@pytest.mark.parametrize("name", STRATEGIES)
def test_times_below_the_clock_s_resolution_are_compared_all_the_same(name):
    timings = strategy_named(name)(Clocked({"a": 0.0, "b": 9.0}, [1.0]), Lineup(("a", "b")))
    assert winner(timings) == "a"


def test_yardsticks_get_a_figure_and_the_copy_never_wins():
    runner = ReplayRunner({"a": 50.0, DEFAULT: 180.0, COPY: 20.0}, 0.01, 1, CALM)
    timings = race.run(runner, Lineup(("a", DEFAULT), DEFAULT, (COPY,)))
    assert (timings["a"].left, timings[COPY].left) == (WON, BESIDE)
    assert timings[COPY].behind is None
    assert min(timing.samples for timing in timings.values()) >= race.LEAST_SAMPLES


def test_who_is_predicted_far_from_winning_does_not_run():
    times_us = [100.0 + place for place in range(12)]
    runner, lineup = family(*times_us)
    predicted = dict.fromkeys(lineup.keys, 0.0001) | {"2": 1e-3, "9": 2.4e-4, "10": 2.6e-4, "11": math.inf}
    lineup = dataclasses.replace(lineup, default="11", predicted=predicted)
    timings = race.run(runner, lineup)
    # The first ones run whatever is predicted, the default too; and so does who is only somewhat slower.
    assert lineup.keys[race.LEAST_CANDIDATES - 1] == "5"
    assert set(lineup.keys) - timings.keys() == {"10"}
    assert len(race.exhaustive(runner, lineup)) == len(times_us)


@pytest.mark.parametrize(("time_us", "fields"), [(200.0, [15, 5, 4]), (200_000.0, [15, 5])], ids=["cheap", "dear"])
def test_of_many_equals_the_best_third_runs_on_as_far_as_it_may_cost(time_us, fields):
    named = {str(place): time_us * (1 + place / 10_000) for place in range(15)}
    runner = Clocked(named | {COPY: time_us / 2}, [1.0, 1.02, 0.98])
    race.run(runner, Lineup(tuple(named), "0", (COPY,)))
    sizes = [len({*keys} - {COPY}) for keys in runner.rounds if {*keys} - {COPY}]
    assert [size for size, _ in itertools.groupby(sizes)][: len(fields)] == fields


def test_each_field_takes_an_equal_part_of_the_time_that_is_left(monkeypatch):
    """Where samples spread by more than the candidates differ, one sample does not decide who runs on."""
    monkeypatch.setattr(race, "MOST_SAMPLES", math.inf)
    spread_us = random.Random(1)

    class Noisy(Clocked):
        def round(self, keys):
            return [time_us * math.exp(spread_us.gauss(0, 0.05)) for time_us in super().round(keys)]

    named = {str(place): 30.0 * (1 + place / 1000) for place in range(27)}
    runner = Noisy(named, [1.0])
    race.run(runner, Lineup(tuple(named)))
    spent_us = Counter()
    for keys in runner.rounds[1:]:
        spent_us[len(keys)] += sum(named[key] for key in keys)
    fields = [spent_us[9], sum(spent_us[count] for count in range(1, 9))]
    assert sum(fields) == pytest.approx(race.LEAST_US, rel=0.2)
    assert fields[0] == pytest.approx(fields[1], rel=0.5)


def test_one_candidate_alone_wins():
    runner, lineup = family(100.0)
    timings = race.run(runner, lineup)
    assert (timings["0"].left, timings["0"].samples) == (WON, race.LEAST_SAMPLES)


def test_a_race_of_long_kernels_that_no_sample_tells_apart_ends_in_time():
    runner, lineup = family(*[200_000.0] * 6, spread=0.05)
    timings = race.run(runner, lineup)
    assert runner.spent_us < race.MOST_US + 6 * 250_000
    assert {timings[key].left for key in lineup.keys} <= {WON, TIED, HOPELESS}


def test_an_undecided_race_ends_at_the_limit_of_samples(monkeypatch):
    monkeypatch.setattr(race, "LEAST_US", math.inf)
    monkeypatch.setattr(race, "MOST_US", math.inf)
    monkeypatch.setattr(race, "MOST_SAMPLES", 40)
    runner, lineup = family(5.0, 5.0, 5.0, spread=0.2)
    timings = race.run(runner, lineup)
    assert max(timing.samples for timing in timings.values()) == 40


@examples(60)
@given(
    medians=st.lists(st.floats(1.0, 1e5), min_size=1, max_size=12),
    spread=st.floats(0.0, 0.3),
    seed=st.integers(0, 10),
    default=st.booleans(),
)
def test_whatever_the_times_exactly_one_candidate_wins(medians, spread, seed, default):
    named = {str(place): time_us for place, time_us in enumerate(medians)} | {COPY: 1.0}
    runner = ReplayRunner(named, spread, seed)
    timings = race.run(runner, Lineup(tuple(named)[:-1], "0" if default else None, (COPY,)))
    assert set(timings) == set(named)
    assert winner(timings) != COPY
    assert runner.launches == sum(timing.samples for timing in timings.values())


def test_exhaustive_times_all_equally_often():
    runner, lineup = family(100.0, 500.0, 120.0)
    timings = race.exhaustive(runner, lineup)
    assert {timing.samples for timing in timings.values()} == {race.ROUNDS}
    assert winner(timings) == "0"


def test_exhaustive_gives_long_kernels_fewer_rounds():
    runner, lineup = family(300_000.0, 400_000.0)
    timings = race.exhaustive(runner, lineup)
    assert race.LEAST_ROUNDS <= timings["0"].samples < race.ROUNDS


def outcomes(run, noise, seeds):
    """For each race the choices of so many tunes, and the GPU seconds that one took."""
    found, spent_us = [], 0.0
    for number, one in enumerate(races()):
        choices = []
        for seed in seeds:
            runner = one.runner(1000 * seed + number, noise)
            choices.append(run(one, runner))
            spent_us += runner.spent_us / len(seeds)
        found.append((one, choices))
    return found, spent_us / 1e6


def share(flags):
    counts = Counter(flags)
    return counts[True] / counts.total()


NOISES = {
    "drift": Noise(), "rough": Noise(drift_share=0.7, drift_us=500.0, outliers=0.03),
    "no-drift": Noise(drift_share=0.0),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", list(NOISES)[: stressed(3, 2)])
@pytest.mark.nightly
def test_all_problems_of_a_model(monkeypatch, name):
    """The figures that the tuner promises, on what an H200 measured of Qwen3-8B."""
    noise = NOISES[name]
    ours, ours_s = outcomes(lambda one, runner: winner(race.run(runner, one.lineup)), noise, (1, 2))
    theirs, theirs_s = outcomes(lambda one, runner: cutile_search(monkeypatch, one, runner), noise, (1,))
    quality = share(one.loss(choice) <= 1.01 for one, choices in ours for choice in choices)
    repeatable = share(abs(math.log(one.loss(a) / one.loss(b))) <= math.log(1.01) for one, (a, b) in ours)
    assert quality >= 0.95
    # In a fifth of its time, and as good but for chance.
    assert quality >= share(one.loss(choice) <= 1.01 for one, [choice] in theirs) - 0.01
    assert repeatable >= 0.95
    assert ours_s <= theirs_s / 4


def test_a_replay_has_the_recorded_median_and_spread():
    runner = ReplayRunner({"a": 100.0}, 0.01, 1)
    timing = Timing.of([runner.sample("a") for _ in range(4000)])
    assert timing.median_us == pytest.approx(100, rel=2e-3)
    assert timing.spread_us == pytest.approx(1.0, rel=0.1)


def test_a_replay_s_outliers_are_slow_and_its_times_are_ticks():
    runner = ReplayRunner({"a": 100.0}, 0.0, 1, Noise(outliers=0.1, tick_us=0.5))
    samples = [runner.sample("a") for _ in range(1000)]
    assert 50 < sum(time_us > 100 for time_us in samples) < 150
    assert min(samples) == 100
    assert all(time_us % 0.5 == 0 for time_us in samples)


def test_a_replay_s_drift_is_common_to_neighbours():
    runner = ReplayRunner({"a": 20.0}, 0.05, 1, Noise(drift_share=1.0, drift_us=2_000.0, outliers=0.0))
    samples = [runner.sample("a") for _ in range(2000)]
    near, far = (statistics.correlation(samples[:-lag], samples[lag:]) for lag in (1, 500))
    assert near > 0.9
    assert abs(far) < 0.5


def test_replays_of_one_seed_are_the_same_and_count_what_they_spend():
    first, second = (ReplayRunner({"a": 10.0, "b": 20.0}, 0.05, 7) for _ in range(2))
    assert first.round("abab") == second.round("abab")
    assert first.spent_us == second.spent_us > 4 * Noise().flush_us + 50
    assert first.launches == 4


def line(median_us, samples, **more):
    return {"median_us": median_us, "spread_us": 0.1, "samples": samples, **more}


def test_who_a_strategy_says_has_won_comes_first_then_who_was_least_behind():
    timings = {
        "slow": line(12.0, 1, left="hopeless", behind=0.3),
        "near": line(9.9, 20, left="tied", behind=-0.001),
        "won": line(10.0, 20, left="won"),
        "far": line(9.8, 3, left="slower", behind=0.02),
    }
    assert ranked(timings) == ["won", "near", "far", "slow"]
    del timings["won"]
    assert ranked(timings)[0] == "near"


def test_without_a_strategy_s_word_the_fastest_of_those_that_ran_to_the_end_wins():
    timings = {"early": line(8.0, 5), "first": line(10.0, 85), "second": line(10.0, 85), "best": line(9.0, 85)}
    assert ranked(timings) == ["best", "first", "second", "early"]
    assert ranked({}) == []


def test_a_timing_keeps_what_its_strategy_said_and_nothing_else():
    assert Timing.of([5.0, 5.0]).as_dict() == {"median_us": 5.0, "spread_us": 0.0, "samples": 2}
    won = Timing.of([5.0, 5.0], "won")
    assert won.as_dict() == {"median_us": 5.0, "spread_us": 0.0, "samples": 2, "left": "won"}
    assert Timing.of([5.0], "tied", -0.002).as_dict()["behind"] == -0.002
