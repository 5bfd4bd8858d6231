"""Every candidate equally often, in interleaved rounds: what other strategies are judged by."""

from __future__ import annotations

from tilekern.tuning.measure.timing import Timing
from tilekern.tuning.strategies import Lineup, Runner
from tilekern.tuning.strategies.board import Board

# The least is five times what cuda.tile's own search takes.
ROUNDS, LEAST_ROUNDS = 50, 25
# No round after the first ones begins when so much GPU time is spent.
LONGEST_US = 20e6


def run(runner: Runner, lineup: Lineup, rounds: int = ROUNDS, longest_us: float = LONGEST_US) -> dict[str, Timing]:
    """Time the lineup ``rounds`` times; see :data:`tilekern.tuning.strategies.Strategy`."""
    board = Board(runner, lineup)
    started = runner.spent_us
    for done in range(rounds):
        if done >= LEAST_ROUNDS and runner.spent_us - started > longest_us:
            break
        board.run([*lineup.keys, *lineup.beside])
    return board.verdict()
