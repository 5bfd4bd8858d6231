"""The search with Optuna: it times a share of a big space, learns from it, and gives the same twice."""

import itertools

from race_samples import winner

from tuning.lines import COPY
from tuning.strategies import Lineup, race, tpe
from tuning.strategies.replay import Noise, ReplayRunner

AXES = {"tile": [16, 32, 64, 128, 256], "stages": [1, 2, 3, 4, 5, 6], "schedule": ["block", "persistent"],
        "tma": [True, False], "latency": [None, 2, 4]}  # fmt: skip


def space():
    """480 configs whose times have a slope towards one of them; a quarter of the product is forbidden."""
    configs = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]
    allowed = [config for config in configs if not (config["tile"] == 256 and config["stages"] > 3)]
    medians, named = {COPY: 50.0}, {}
    for number, config in enumerate(allowed):
        key = str(number)
        named[key] = config
        medians[key] = 100.0 * (
            (1 + 0.15 * abs(AXES["tile"].index(config["tile"]) - 3))
            * (1 + 0.1 * abs(config["stages"] - 4))
            * (1.3 if config["schedule"] == "block" else 1)
            * (1.0 if config["tma"] else 1.2)
            * (1.1 if config["latency"] is None else 1)
        )
    return medians, named


def search(seed=0):
    medians, configs = space()
    keys = tuple(configs)
    runner = ReplayRunner(medians, 0.004, seed, Noise(outliers=0.0))
    return runner, tpe.run(runner, Lineup(keys, keys[0], (COPY,), configs)), medians


def test_it_times_a_share_and_finds_what_is_near_the_best():
    runner, timings, medians = search()
    tried = len(timings) - 1
    assert tried <= tpe.TRIED_SHARE * len(medians) + 1
    assert medians[winner(timings)] <= 1.11 * 100
    assert set(timings) >= {"0", COPY}
    # cuda.tile's search launches each eight times.
    assert runner.launches < 2 * len(medians)


def test_a_search_is_repeatable():
    _, first, _ = search()
    _, second, _ = search()
    assert first == second


def test_the_best_predicted_are_tried_first():
    medians, configs = space()
    best = min(configs, key=lambda key: medians[key])
    keys = (best, *(key for key in configs if key != best))
    runner = ReplayRunner(medians, 0.004, 1, Noise(outliers=0.0))
    timings = tpe.run(runner, Lineup(keys, keys[-1], (COPY,), configs))
    assert medians[winner(timings)] <= 1.01 * medians[best]
    assert set(keys[: tpe.PREDICTED]) <= set(timings)


def test_a_small_space_is_raced():
    medians = {str(place): 100.0 + place for place in range(tpe.LEAST_TRIED)}
    lineup = Lineup(tuple(medians), "0", (), {key: {"place": int(key)} for key in medians})
    assert tpe.run(ReplayRunner(medians, 0.01, 1), lineup) == race.run(ReplayRunner(medians, 0.01, 1), lineup)


def test_every_config_is_a_point_and_no_other_point_is_one():
    _, configs = space()
    axes = tpe.Axes(configs)
    assert all(axes.key(point) == key for key, point in axes.points.items())
    assert axes.key({"tile": 4, "stages": 5, "schedule": 0, "tma": 0, "latency": 0}) is None


def test_numbers_are_ordered_and_other_values_are_not():
    found = tpe.Axes({"a": {"n": 16, "s": "x", "one": 1}, "b": {"n": 2, "s": "y", "one": 1}, "c": {"n": 4, "s": None}})
    kinds = {name: type(one).__name__ for name, one in found.distributions().items()}
    assert kinds == {"n": "IntDistribution", "s": "CategoricalDistribution", "one": "CategoricalDistribution"}
    assert [found.points[key]["n"] for key in "bca"] == [0, 1, 2]


def test_a_space_that_is_mostly_forbidden_is_searched_in_finite_time():
    medians, configs = space()
    kept = {key: config for key, config in configs.items() if int(key) % 10 == 0}
    timings = tpe.run(ReplayRunner(medians, 0.004, 1), Lineup(tuple(kept), None, (), kept))
    assert tpe.PREDICTED <= len(timings) <= len(kept)
