"""Successive elimination: time all once, then only those that may still win, until the leader is certain to 1 %.

Who is predicted to be far from winning does not run at all. A round runs the leader and its contenders one after the
other, so that a drift of the clocks meets them alike. After each the standing is looked at again: who cannot be faster
than the leader by more than 1 % is out (Even-Dar, Mannor and Mansour 2006, "Action elimination and stopping
conditions"), and comes back only if the leader falls behind it. Looks come at growing intervals, so that their number
adds little to the probability of an error. Of many who may still win only the best third runs on, then the best third
of those, and each such phase may take an equal part of the GPU time that is left (after Karnin, Koren and Somekh 2013,
"Almost optimal exploration in multi-armed bandits", who halve): where samples spread more than the candidates differ,
to cut after one or two of them would be to draw lots.
"""

from __future__ import annotations

import math

from tilekern.tuning.measure.timing import Timing
from tilekern.tuning.strategies import Lineup, Runner
from tilekern.tuning.strategies.board import Board

# The winner and what it is compared with get at least this many samples, and more for a better figure while cheap.
LEAST_SAMPLES, FIGURE_SAMPLES = 3, 10
# No race takes more samples of a candidate, or begins a round when it has taken so much GPU time.
MOST_SAMPLES, LONGEST_US = 200, 4e6
# Nor when it has taken so much for any race and its first round, and this part of the first round beside: a search that
# times each candidate five times, after three runs to warm up, takes eight times that round.
CHEAP_US, MORE_ROUNDS = 40_000.0, 0.55
# Who is predicted so many times slower than the best predicted one does not run, but for the first so many. In a sweep
# of Qwen3-8B on an H200 no winner was predicted 1.5 times slower.
FAR, LEAST_CANDIDATES = 2.5, 6
# One of so many rivals runs on from phase to phase, but at least so many do. Replayed with clocks that swing as those
# of a GPU at its power limit, thirds choose better than quarters and no worse than halves.
KEPT, LEAST_RIVALS = 3, 3


def run(runner: Runner, lineup: Lineup) -> dict[str, Timing]:
    """Race the lineup; see :data:`tilekern.tuning.strategies.Strategy`."""
    board = Board(runner, lineup)
    started = runner.spent_us
    board.run([*promising(lineup), *lineup.beside])
    return finish(board, started + allowed_us(runner.spent_us - started))


def promising(lineup: Lineup) -> list[str]:
    """The candidates that are not predicted to be far from winning, and the default."""
    best = min(lineup.predicted.values(), default=0.0)
    return [
        key
        for place, key in enumerate(lineup.keys)
        if place < LEAST_CANDIDATES or key == lineup.default or lineup.predicted.get(key, best) <= FAR * best
    ]


def allowed_us(first_us: float) -> float:
    """How much GPU time a race may take whose first round took so much, that round included."""
    return min(max(CHEAP_US, first_us) + MORE_ROUNDS * first_us, max(LONGEST_US, first_us))


def finish(board: Board, until_us: float) -> dict[str, Timing]:
    """Race those who have run once until the leader is certain or the runner has spent so much; the verdict."""
    fields = _fields(len(board.candidates))
    for place, most_rivals in enumerate(fields):
        spent_us = board.runner.spent_us
        if _narrow(board, most_rivals, spent_us + (until_us - spent_us) / (len(fields) - place), until_us):
            break
    while True:
        wanted = FIGURE_SAMPLES if board.runner.spent_us < min(until_us, CHEAP_US) else LEAST_SAMPLES
        if not (lacking := board.short_of([board.choice(), *board.lineup.yardsticks], wanted)):
            return board.verdict()
        board.run([board.choice(), *lacking])


def _fields(candidates: int) -> list[int]:
    """How many rivals may run on in each phase."""
    fields = [max(LEAST_RIVALS, math.ceil(candidates / KEPT))]
    return fields if fields[0] == LEAST_RIVALS else fields + _fields(fields[0])


def _narrow(board: Board, most_rivals: int, phase_until_us: float, until_us: float) -> bool:
    """One phase: the leader and its best rivals run until its GPU time is spent; whether all is known before.

    All is known where the leader is certain, or has as many samples as it may have.

    Args:
        board: the board.
        most_rivals: how many run at most beside the leader.
        phase_until_us: what the runner may have spent when the phase ends.
        until_us: and when the race does.
    """
    runner = board.runner
    while runner.spent_us < phase_until_us:
        leader = board.leader
        affordable = int((until_us - runner.spent_us) / board.typical_us(leader))
        rivals = board.contenders()[: max(1, min(most_rivals, affordable - 1))]
        taken = len(board.samples_us(leader))
        if taken >= (MOST_SAMPLES if rivals else LEAST_SAMPLES):
            return True
        board.run([leader, *rivals], max(1, taken // 4))
    return False
