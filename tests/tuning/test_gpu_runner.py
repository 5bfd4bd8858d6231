"""The order in which the GPU's runner queues, announces and waits; the GPU itself is in tests/gpu."""

import pytest
import torch

from tuning.strategies.runner import LOADING_US, GpuRunner
from tuning.timing import rewriting


class End:
    def __init__(self, log):
        self._log = log

    def synchronize(self):
        self._log.append("waited")


class Queued:
    def __init__(self, log, time_us):
        self.end, self.time_us, self.spent_us = End(log), time_us, time_us + 10


class Watch:
    """A stopwatch whose launches take the time that they return."""

    def __init__(self, log):
        self.log = log

    def queue(self, launch, before):
        if before:
            before()
        return Queued(self.log, launch())

    def wait(self, time_us):
        self.log.append(f"GPU waits {time_us:g}")


@pytest.fixture
def log():
    return []


@pytest.fixture
def runner(log):
    times_us = {"a": 5.0, "b": 8.0, "long": 9000.0, "longer": 9500.0}

    def launch(key):
        log.append(key)
        return times_us[key]

    launches = {key: lambda key=key: launch(key) for key in times_us}
    return GpuRunner(Watch(log), launches, announce=lambda key: log.append(f"announced {key}"))


def test_each_key_s_first_launch_is_announced_and_its_loading_is_not_timed(runner, log):
    assert runner.round(["a", "b"]) == [5.0, 8.0]
    for key in "ab":
        one = [f"announced {key}", key, key, f"announced {key}", "waited"]
        assert log[:5] == one
        del log[:5]
    assert runner.spent_us == 2 * 5 + 10 + 2 * 8 + 10


def test_later_rounds_are_queued_whole_and_each_wait_is_announced(runner, log):
    runner.round(["a", "b"])
    log.clear()
    assert runner.round(["b", "a"]) == [8.0, 5.0]
    assert log == ["b", "a", "announced b", "waited", "announced a", "waited"]


def test_the_loading_of_long_kernels_hides_behind_a_wait(runner, log):
    runner.round(["long"])
    assert log.count("long") == 2
    log.clear()
    spent_us = runner.spent_us
    runner.round(["longer"])
    assert log == ["announced longer", f"GPU waits {LOADING_US:g}", "longer", "announced longer", "waited"]
    assert runner.spent_us - spent_us == LOADING_US + 9510


def test_a_round_with_a_new_key_among_known_ones_gives_them_in_order(runner):
    runner.round(["a"])
    assert runner.round(["a", "b", "a"]) == [5.0, 8.0, 5.0]


def test_what_a_launch_finds_in_l2_is_put_there_before_it(log):
    runner = GpuRunner(Watch(log), {"a": lambda: log.append("a") or 1.0}, lambda: log.append("refreshed"))
    runner.round(["a"])
    log.clear()
    runner.round(["a", "a"])
    assert log[:4] == ["refreshed", "a", "refreshed", "a"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool, torch.uint8])
def test_rewriting_keeps_every_bit(dtype):
    bits = torch.randint(0, 256, (6, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    if dtype == torch.bool:
        bits = bits % 2
    array = bits.clone().view(dtype)  # NaNs and negative zeros among them
    view = array[1:5, ::2]
    rewriting([array, view])()
    assert torch.equal(array.view(torch.uint8), bits)
