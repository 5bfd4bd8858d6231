"""Strategies time the candidates of a problem until the fastest is known.

A strategy decides which candidates run and when to stop, and touches no device. A runner takes the times, on a GPU
(:mod:`tilekern.tuning.strategies.runner`) or, in tests, from recorded measurements.
"""

from __future__ import annotations

from tilekern.errors import InputError
from tilekern.tuning.strategies import race
from tilekern.tuning.strategies.lineup import BESIDE, HOPELESS, SLOWER, TIED, WON, Lineup, Runner, Strategy

__all__ = [
    "BESIDE", "HOPELESS", "SLOWER", "STRATEGIES", "TIED", "WON", "Lineup", "Runner", "Strategy", "strategy_named",
]  # fmt: skip

# A description and the function of each strategy, by name.
STRATEGIES: dict[str, tuple[str, Strategy]] = {
    "race": ("keeps the best third by medians of short rounds until few are left, which run in more rounds", race.run),
    "exhaustive": ("times every candidate equally often", race.exhaustive),
}


def strategy_named(name: str) -> Strategy:
    """Return a strategy by its name.

    Raises:
        InputError: no strategy has this name.
    """
    if name not in STRATEGIES:
        raise InputError(f"unknown strategy {name!r}; known: {', '.join(STRATEGIES)}")
    return STRATEGIES[name][1]
