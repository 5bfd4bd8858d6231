"""Search with Optuna's tree-structured Parzen estimator, for spaces too big to time each candidate even once.

The estimator proposes configs from those that were fast, beginning with the best predicted; each is timed once beside
the leader, and the best few then race. What was never proposed is not timed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

from tilekern.spec import Value
from tuning.strategies import Lineup, Runner, race
from tuning.strategies.board import Board
from tuning.timing import Timing

SEED = 0
# How many candidates are tried: a share of them, but no fewer than these; the first are the best predicted.
TRIED_SHARE, LEAST_TRIED, PREDICTED = 0.25, 24, 8
FINALISTS = 6
# A proposal that is no candidate, or was timed already, costs no GPU time, but not for ever.
PROPOSALS_A_TRIAL = 10


class Axes:
    """Configs as points: the place of each value on its axis."""

    def __init__(self, configs: Mapping[str, Mapping[str, Value]]) -> None:
        names = dict.fromkeys(name for config in configs.values() for name in config)
        values = {name: _ordered({config.get(name) for config in configs.values()}) for name in names}
        self._places = {
            name: {value: place for place, value in enumerate(found)}
            for name, found in values.items()
            if len(found) > 1
        }
        self.points = {
            key: {name: places[config.get(name)] for name, places in self._places.items()}
            for key, config in configs.items()
        }
        self._keys = {tuple(point.values()): key for key, point in self.points.items()}

    def distributions(self) -> dict[str, BaseDistribution]:
        """What the estimator draws from: numbers are neighbours of numbers, other values of none."""
        return {
            name: IntDistribution(0, len(places) - 1)
            if all(type(value) is int for value in places)
            else CategoricalDistribution(list(range(len(places))))
            for name, places in self._places.items()
        }

    def key(self, point: Mapping[str, int]) -> str | None:
        """The candidate at a point; None where there is none."""
        return self._keys.get(tuple(point[name] for name in self._places))


def _ordered(values: set[Value]) -> list[Value]:
    return sorted(values, key=lambda value: (type(value).__name__, value if type(value) is int else 0, str(value)))


def run(runner: Runner, lineup: Lineup) -> dict[str, Timing]:
    """Search the lineup; see :data:`tuning.strategies.Strategy`."""
    budget = max(LEAST_TRIED, round(TRIED_SHARE * len(lineup.keys)))
    if budget >= len(lineup.keys):
        return race.run(runner, lineup)
    board = Board(runner, lineup)
    started = runner.spent_us
    found = _search(board, budget)
    board.run([*sorted(found, key=lambda key: found[key])[:FINALISTS], *lineup.yardsticks])
    return race.finish(board, started + race.allowed_us(runner.spent_us - started))


def _search(board: Board, budget: int) -> dict[str, float]:
    """Time up to ``budget`` candidates, each once beside the leader; the logarithms of their times over the first's."""
    keys = board.lineup.keys
    axes = Axes({key: board.lineup.configs[key] for key in keys})
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=SEED, n_startup_trials=PREDICTED))
    for key in keys[:PREDICTED]:
        study.enqueue_trial(axes.points[key])
    leader, found = keys[0], {keys[0]: 0.0}
    for _ in range(PROPOSALS_A_TRIAL * budget):
        if len(found) >= budget:
            break
        trial = study.ask(axes.distributions())
        proposed = axes.key(trial.params)
        if proposed is not None and proposed not in found:
            times_us = board.run([leader, proposed])
            found[proposed] = found[leader] + math.log(times_us[proposed] / times_us[leader])
            leader = min(leader, proposed, key=lambda key: found[key])
        # What is forbidden counts as the slowest, so that it is not proposed again and again.
        study.tell(trial, max(found.values()) if proposed is None else found[proposed])
    return found
