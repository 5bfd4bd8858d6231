"""The statistics of a race, the replay of recorded measurements, and who wins by a journal."""

import math
import random
import statistics

import pytest
from replay_runner import Noise, ReplayRunner

from tilekern.tuning.measure.timing import Timing
from tilekern.tuning.strategies.drift import between_neighbours
from tilekern.tuning.strategies.selection import ranked
from tilekern.tuning.strategies.standing import TRIMMED, standing, student_quantile, trimmed_mean


def rounds_of(medians, factors, **changes):
    return [
        {key: factor * time_us * changes.get((number, key), 1) for key, time_us in medians.items()}
        for number, factor in enumerate(factors)
    ]


@pytest.mark.parametrize(
    ("probability", "freedom", "expected"),
    [(0.95, 4, 2.132), (0.95, 30, 1.697), (0.995, 10, 3.169), (0.9985, 20, 3.350), (0.9985, 200, 3.005)],
)
def test_quantiles_are_those_of_the_tables(probability, freedom, expected):
    assert student_quantile(probability, freedom) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ("values", "expected"),
    [([3], 3), ([1, 3], 2), ([1, 2, 90], 2), ([1, 2, 4, 90], 3), ([90, 1, 2, 3, 4, 5, 6, 95], 4.5)],
)
def test_the_trimmed_mean_leaves_out_the_outer_quarters(values, expected):
    assert trimmed_mean(values) == expected


def test_what_a_round_has_in_common_is_taken_out():
    found = standing(rounds_of({"a": 10.0, "b": 11.0, "c": 30.0}, [1.0, 1.5, 1.2]))
    assert found.typical["b"] - found.typical["a"] == pytest.approx(math.log(1.1))
    assert found.samples == {"a": 3, "b": 3, "c": 3}


def test_samples_of_different_rounds_are_compared_across_them():
    """b was only there while the clock was high: its plain median is below that of a."""
    rounds = rounds_of({"a": 10.0, "b": 11.0, "c": 20.0}, [1.0])
    rounds += [{"a": 8.0, "c": 16.0}, {"b": 8.8, "c": 16.0}, {"b": 8.8, "c": 16.0}, {"a": 12.0, "c": 24.0}]
    found = standing(rounds)
    assert found.typical["b"] - found.typical["a"] == pytest.approx(math.log(1.1), abs=1e-3)


def test_a_round_of_one_says_nothing_beside_larger_ones_and_everything_alone():
    together = rounds_of({"a": 10.0, "b": 11.0}, [1.0, 1.0])
    assert standing([*together, {"a": 50.0}]) == standing(together)
    assert standing([{"a": 10.0}, {"a": 10.0}]).typical["a"] == pytest.approx(math.log(10))


def test_the_noise_is_found_and_few_samples_are_shrunk_to_the_usual():
    runner = ReplayRunner(dict.fromkeys("abcdef", 10_000.0), 0.03 * 0.6745, 3, Noise(outliers=0, drift_share=0.5))
    many = standing([dict(zip("abcdef", runner.round("abcdef"), strict=True)) for _ in range(60)])
    # What is not drift: the drift changes little within a round of 60 ms, but it does change.
    assert 0.03 * math.sqrt(0.5) < many.noise < 0.03 * 1.2
    one = standing([dict.fromkeys("abcdef", 10_000.0)])
    assert one.noise == pytest.approx(0.01, rel=0.02)
    assert many.freedom > one.freedom


def drifting(medians, rounds, seed=0, outliers=0.0):
    """Rounds of samples whose clock swings by 6 % within a fifth of a second, as one at its power limit does."""
    chance, at_us, found = random.Random(seed), 0.0, []
    start = chance.random()
    for _ in range(rounds):
        times = {}
        for key in chance.sample(list(medians), len(medians)):
            swing = 0.06 * math.sin(2 * math.pi * (start + at_us / 200_000))
            times[key] = medians[key] * math.exp(swing + chance.gauss(0, 0.002) + 0.2 * (chance.random() < outliers))
            at_us += times[key]
        found.append(times)
    return found


def off(typical, medians):
    """How far the distances between typical times are from those of the medians, on average."""
    left = [typical[key] - math.log(medians[key]) for key in medians]
    return statistics.fmean(abs(value - statistics.fmean(left)) for value in left)


@pytest.mark.parametrize("outliers", [0.0, 0.05])
def test_neighbours_in_time_are_compared_where_the_clock_drifts_within_a_round(outliers):
    medians = {key: 5_000.0 * (1 + 0.01 * place) for place, key in enumerate("abcdefghij")}
    found, plain = [], []
    for seed in range(10):
        rounds = drifting(medians, 6, seed, outliers)
        found.append(off(standing(rounds).typical, medians))
        plain.append(
            off({key: statistics.median(math.log(times[key]) for times in rounds) for key in medians}, medians)
        )
    assert statistics.fmean(found) < 0.006
    assert statistics.fmean(found) < statistics.fmean(plain) / 3


def test_the_noise_between_neighbours_is_what_doubt_goes_by():
    rounds = drifting(dict.fromkeys("abcdefghij", 5_000.0), 20)
    assert between_neighbours(rounds).noise < 0.01
    assert between_neighbours(rounds).noise <= standing(rounds).noise < 0.011
    # In one order only, the swing looks as if it were the candidates'.
    assert standing([dict.fromkeys("abcdefghij", 5_000.0)]).noise == pytest.approx(0.01, rel=0.02)


def test_differences_that_do_not_tie_all_keys_together_say_nothing():
    assert between_neighbours([{"a": 1.0, "b": 2.0}, {"a": 1.0, "b": 2.0}, {"c": 1.0, "d": 2.0}]) is None
    assert between_neighbours([{"a": 1.0, "b": 2.0, "c": 3.0}]) is None


def test_doubt_shrinks_with_samples_and_one_sample_is_not_believed():
    medians = {"a": 10_000.0, "b": 11_500.0}
    doubts = [standing(rounds_of(medians, [1.0] * n)).doubt("b", "a", 1) for n in (1, 2, 4)]
    assert doubts[0] > 0 > doubts[1] > doubts[2] > -math.log(1.15)
    far = standing(rounds_of({"a": 10_000.0, "b": 13_000.0}, [1.0]))
    assert far.doubt("b", "a", 1) < 0


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
        "won": line(10.0, 20, left="won", within=0.01),
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
    won = Timing.of([5.0, 5.0], "won", within=0.0123456)
    assert won.as_dict() == {"median_us": 5.0, "spread_us": 0.0, "samples": 2, "left": "won", "within": 0.01235}
    assert Timing.of([5.0], "tied", -0.002).as_dict()["behind"] == -0.002


@pytest.mark.parametrize("count", [4, 8, 16])
def test_trimming_costs_the_certainty_that_is_said(count):
    draw = random.Random(count)
    means = [trimmed_mean([draw.gauss(0, 1) for _ in range(count)]) for _ in range(4000)]
    assert statistics.pstdev(means) * math.sqrt(count) == pytest.approx(TRIMMED, abs=0.05)
