"""Successive elimination: time all once, then only those that may still win, until the leader is certain to 1 %.

A round runs the leader and its contenders one after the other, so that a drift of the clocks meets them alike. After
each the standing is looked at again: who cannot be faster than the leader by more than 1 % is out (Even-Dar, Mannor
and Mansour 2006, "Action elimination and stopping conditions"), and comes back only if the leader falls behind it.
Looks come at growing intervals, so that their number adds little to the probability of an error.
"""

from __future__ import annotations

from tuning.strategies import Lineup, Runner
from tuning.strategies.board import Board
from tuning.timing import Timing

# The winner and what it is compared with get at least this many samples, and more for a better figure while cheap.
LEAST_SAMPLES, FIGURE_SAMPLES = 3, 10
# No race takes more samples of a candidate, or begins a round when it has taken so much GPU time.
MOST_SAMPLES, LONGEST_US = 200, 4e6
# Nor when it has taken so much for any race, and so many times what its first round took beside: a search that times
# each candidate five times, after three runs to warm up, takes eight times that.
CHEAP_US, MOST_FIRST_ROUNDS = 10_000.0, 2.0


def run(runner: Runner, lineup: Lineup) -> dict[str, Timing]:
    """Race the lineup; see :data:`tuning.strategies.Strategy`."""
    board = Board(runner, lineup)
    started = runner.spent_us
    board.run([*lineup.keys, *lineup.beside])
    return finish(board, started + allowed_us(runner.spent_us - started))


def allowed_us(first_us: float) -> float:
    """How much GPU time a race may take whose first round took so much."""
    return min(CHEAP_US + MOST_FIRST_ROUNDS * first_us, LONGEST_US)


def finish(board: Board, until_us: float) -> dict[str, Timing]:
    """Race those who have run once until the leader is certain or the runner has spent so much; the verdict."""
    runner, yardsticks = board.runner, board.lineup.yardsticks
    while runner.spent_us < until_us:
        leader, rivals = board.leader, board.contenders()
        taken = len(board.samples_us(leader))
        if taken >= (MOST_SAMPLES if rivals else LEAST_SAMPLES):
            break
        for _ in range(max(1, taken // 4)):
            board.run([leader, *rivals, *board.short_of(yardsticks, LEAST_SAMPLES)])
    while True:
        figures = [board.choice(), *yardsticks]
        wanted = FIGURE_SAMPLES if runner.spent_us < min(until_us, CHEAP_US) else LEAST_SAMPLES
        if not (lacking := board.short_of(figures, wanted)):
            return board.verdict()
        board.run(lacking)
