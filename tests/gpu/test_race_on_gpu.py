"""The stopwatch and the runner of races on a GPU."""

import functools
import statistics
import time

import pytest
import torch

from tilekern.spec.targets import here
from tilekern.tuning.measure import timing
from tilekern.tuning.measure.bench import _in_turn
from tilekern.tuning.measure.gpu import captured, load_code
from tilekern.tuning.measure.timing import Stopwatch, rewriting
from tilekern.tuning.strategies import SLOWER, WON, Lineup, strategy_named
from tilekern.tuning.strategies.runner import GpuRunner
from tilekern.tuning.sweep.lines import COPY

MIB = 1 << 20


@pytest.fixture(scope="module")
def watch():
    found = Stopwatch(here().l2_bytes)
    found.warm_clocks()
    return found


def copying(mib):
    source = torch.zeros(mib * MIB, dtype=torch.uint8, device="cuda")
    sink = torch.empty_like(source)
    return lambda: sink.copy_(source)


def resting(microseconds):
    """A launch that only waits, by a clock that goes no faster than 2 GHz."""
    return lambda: torch.cuda._sleep(2000 * microseconds)


def loaded_late(launch, host_s):
    """A launch whose first call keeps the host for so long, as the loading of a kernel's code does."""
    left = [host_s]

    def run():
        if left:
            time.sleep(left.pop())
        launch()

    return run


def median_us(watch, launch, before=None, samples=40):
    return statistics.median(watch.round([launch] * samples, before))


def test_a_sample_is_the_launch_and_what_is_spent_has_the_flush(watch):
    [events] = watch.queue([resting(300)]).events
    torch.cuda.synchronize()
    assert 300 <= events.time_us < 1000
    assert events.spent_us > events.time_us + 5


def held_up():
    """``resting(100)`` after a moment of the host's, which is longer than what lies queued before a round's first."""
    time.sleep(2e-4)
    resting(100)()


def over_its_neighbour(watch):
    """How many times as long as the launch after it a held-up one seems to take where nothing foretells it.

    The two are of one round: the clocks of another may differ by a quarter, as they do after heavy work.
    """
    ratios = []
    for _ in range(9):
        watch.round([resting(100)] * 3)
        surprise, rest = watch.round([held_up, resting(100)])
        ratios.append(surprise / rest)
    return statistics.median(ratios)


def test_the_host_s_time_for_a_launch_is_in_no_sample(watch):
    found = watch.round([resting(100), held_up] * 40)
    assert statistics.median(found[1::2]) == pytest.approx(statistics.median(found[::2]), rel=0.05)


def test_nor_is_it_where_it_comes_as_a_surprise(watch, monkeypatch):
    assert over_its_neighbour(watch) == pytest.approx(1, rel=0.05)
    monkeypatch.setattr(timing, "TRIES", 1)
    assert over_its_neighbour(watch) > 1.5


def test_a_flush_of_the_cache_s_size_leaves_nothing_of_the_inputs(watch):
    """Twice as large a flush makes a launch no slower."""
    launch = copying(max(1, here().l2_bytes // MIB // 4))
    twice = Stopwatch(2 * here().l2_bytes)
    pairs = [(median_us(watch, launch), median_us(twice, launch)) for _ in range(10)]
    once_us, twice_us = map(statistics.median, zip(*pairs, strict=True))
    assert once_us == pytest.approx(twice_us, rel=0.05)


def test_inputs_that_are_refreshed_are_read_faster(watch):
    source = torch.zeros(max(1, here().l2_bytes // 4), dtype=torch.uint8, device="cuda")
    launch = lambda: source.view(torch.int32).sum(dtype=torch.int64)  # noqa: E731
    assert median_us(watch, launch, rewriting([source])) < 0.9 * median_us(watch, launch)


def test_the_loading_of_code_is_in_no_sample(watch):
    launches = {"first": resting(20), "second": loaded_late(resting(20), 1e-3)}
    runner = GpuRunner(watch, launches)
    first, second = runner.round(["first", "second"])
    assert second == pytest.approx(first, rel=0.1, abs=20)
    assert runner.spent_us >= first + second


def test_code_is_loaded_and_not_run():
    sink, ones = torch.zeros(MIB, device="cuda"), torch.ones(MIB, device="cuda")
    launch = functools.partial(torch.add, sink, ones, out=sink)
    load_code(launch)
    torch.cuda.synchronize()
    assert sink.sum() == 0
    launch()
    assert sink.sum() == MIB


def test_the_smaller_copy_wins_and_each_was_announced(watch):
    announced = []
    sizes = {"large": 64, "middle": 48, "small": 32, COPY: 16}
    runner = GpuRunner(watch, {key: copying(mib) for key, mib in sizes.items()}, announce=announced.append)
    timings = strategy_named("race")(runner, Lineup(("large", "middle", "small"), "large", (COPY,)))
    assert [key for key, timing in timings.items() if timing.left == WON] == ["small"]
    assert set(announced) == set(sizes)
    assert timings["middle"].left == SLOWER


def test_two_races_of_close_candidates_choose_within_a_percent(watch):
    launches = {str(mib): copying(mib) for mib in (200, 201, 202, 206, 212)}
    exhaustive = strategy_named("exhaustive")(GpuRunner(watch, launches), Lineup(tuple(launches)))
    for _ in range(2):
        timings = strategy_named("race")(GpuRunner(watch, launches), Lineup(tuple(launches)))
        [key] = [key for key, timing in timings.items() if timing.left == WON]
        best_us = min(timing.median_us for timing in exhaustive.values())
        assert exhaustive[key].median_us <= 1.01 * best_us


def test_copies_in_a_row_come_from_memory_and_one_alone_from_the_l2(watch):
    """A quarter of the L2 is read; copies of it, in turn, are four times as large as the L2."""
    size = here().l2_bytes // 4
    # Sums of whole numbers are slower than memory.
    arrays = [torch.ones(size // 4, dtype=torch.float32, device="cuda") for _ in range(16)]
    sums = [lambda array=array: array.sum() for array in arrays]
    in_turn, alone = captured(_in_turn(sums), 16), captured(_in_turn(sums[:1]), 16)
    for launch in (in_turn, alone):
        launch()
    times_us = {
        launch: statistics.median(watch.round([launch] * 20, flushes=False)) / 16 for launch in (in_turn, alone)
    }
    assert size / times_us[in_turn] / 1000 <= 1.05 * here().memory_gbs
    assert times_us[in_turn] > 1.1 * times_us[alone]


def test_launches_in_a_row_are_not_as_slow_as_the_host(watch):
    """Sixty launches of a few microseconds take the host longer than the GPU."""
    launch = captured(copying(1), 60)
    launch()
    found = watch.round([launch] * 10, flushes=False)
    assert statistics.median(found) / 60 < 6
    assert max(found) < 2 * min(found)
