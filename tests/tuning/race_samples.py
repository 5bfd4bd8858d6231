"""Races to replay: what an H200 measured of Qwen3-8B, and cuda.tile's own search over the same candidates."""

import functools
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

import cuda.tile.tune._tune as cutile
from replay_runner import Noise, ReplayRunner

from tilekern.tuning.strategies import WON, Lineup
from tilekern.tuning.sweep.lines import COPY

DEFAULT = "default"


@dataclass(frozen=True)
class Race:
    """A problem: the medians of its candidates in the order of a prediction that is no better than chance."""

    kernel: str
    medians_us: dict[str, float]
    copy_us: float
    spread: float

    @property
    def lineup(self) -> Lineup:
        return Lineup(tuple(self.medians_us), DEFAULT, (COPY,))

    def runner(self, seed: int, noise: Noise | None = None) -> ReplayRunner:
        return ReplayRunner({**self.medians_us, COPY: self.copy_us}, self.spread, seed, noise)

    def loss(self, key: str) -> float:
        """How many times slower than the best a candidate is."""
        return self.medians_us[key] / min(self.medians_us.values())


@functools.cache
def races() -> list[Race]:
    """The 143 problems of a sweep: the fastest four and the default as they were measured, the others made up.

    Those are spread as the whole families in ``qwen3-8b-h200.json.gz`` are: half of them within some 30 % of the
    fastest ones, the slowest three to five times slower.
    """
    data = Path(__file__).with_name("data") / "h200_races.json"
    return [_race(number, row) for number, row in enumerate(json.loads(data.read_text())["rows"])]


def _race(number: int, row: dict) -> Race:
    chance = random.Random(number)
    known = list(row["fastest_us"])
    if row["default_us"] in known:
        known.remove(row["default_us"])
    others = row["candidates"] - len(known) - 2  # the generic variant does not race
    slower = [max(row["fastest_us"]) * math.exp(abs(chance.gauss(0, 0.5))) for _ in range(others)]
    medians = {DEFAULT: row["default_us"]} | {str(place): time_us for place, time_us in enumerate(known + slower)}
    order = chance.sample(list(medians), len(medians))
    spread = row["spread_us"] / row["fastest_us"][0]
    return Race(row["kernel"], {key: medians[key] for key in order}, row["copy_us"], spread)


class _Launched:
    """Stands for a kernel in cuda.tile's search, which only asks it for one with other hints."""

    def __init__(self, key: str) -> None:
        self.key = key

    def replace_hints(self) -> "_Launched":
        return self


def cutile_search(monkeypatch, race: Race, runner: ReplayRunner) -> str:
    """The choice of ``cuda.tile.tune.exhaustive_search``, its launches replayed."""

    def launch(*given) -> float:
        return runner.sample(next(one.key for one in given if isinstance(one, _Launched)))

    def one_block(_) -> tuple[int]:
        return (1,)

    def no_arguments(_) -> tuple:
        return ()

    monkeypatch.setattr(cutile, "_benchmark", launch)
    search = cutile.exhaustive_search
    return search(list(race.medians_us), 0, one_block, _Launched, no_arguments, quiet=True).best.config


def winner(timings: dict) -> str:
    """The one that has won."""
    [key] = [key for key, timing in timings.items() if timing.left == WON]
    return key
