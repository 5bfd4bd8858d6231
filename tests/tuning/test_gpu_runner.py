"""Timing: samples, the order in which the GPU's runner queues, announces and waits; the GPU itself is in tests/gpu."""

import pytest
import torch
from spec_samples import sized

from tilekern.errors import InputError
from tilekern.kernels import spec_named
from tilekern.spec.targets import here, resolve
from tilekern.tuning.executors.local import LocalExecutor
from tilekern.tuning.measure.bench import _in_turn, turns_of
from tilekern.tuning.measure.stage import measure_all
from tilekern.tuning.measure.tasks import QUEUE
from tilekern.tuning.measure.timing import MOST_HOST_US, SAFETY, Queue, Stopwatch, Timing, rewriting
from tilekern.tuning.measure.worker import _Rounds
from tilekern.tuning.publishing import keep_winners
from tilekern.tuning.strategies.runner import WAKING_US, GpuRunner

LEAD_US = 3.0


class End:
    def __init__(self, log):
        self._log = log

    def synchronize(self):
        self._log.append("waited")


class Queued:
    def __init__(self, log, time_us):
        self.end, self.time_us, self.spent_us = End(log), abs(time_us), abs(time_us) + 10
        self.late = time_us < 0


class Watch(Stopwatch):
    """A stopwatch whose launches take the time that they return; the GPU waited for those that return less than 0."""

    def __init__(self, log):
        self.log, self.spent_us, self.flushed = log, 0.0, 0

    def queue(self, launches, before, *, flushes):
        queued = []
        for launch in launches:
            if flushes:
                self.flushed += 1
            if before:
                before()
            queued.append(Queued(self.log, launch()))
        return Queue(queued, LEAD_US)

    def read(self, queued):
        return [events.time_us for events in queued.events]

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


@pytest.mark.skipif(here() is not None, reason="this machine has a GPU")
def test_measuring_without_a_gpu_is_refused(compiled_sweep):
    with pytest.raises(InputError, match="needs a GPU and this machine has none"):
        measure_all(compiled_sweep, LocalExecutor(compiled_sweep.cache), keep_winners)


def test_a_timing_of_samples():
    assert Timing.of([5.0]) == Timing(5.0, 0.0, 1)
    found = Timing.of([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (found.median_us, found.spread_us, found.samples) == (3.0, 1.0, 5)


def test_each_key_s_first_launch_is_announced_and_its_loading_is_not_timed(runner, log):
    assert runner.round(["a", "b"]) == [5.0, 8.0]
    assert log.pop(0) == f"GPU waits {WAKING_US:g}"
    for key in "ab":
        one = [f"announced {key}", key, key, f"announced {key}", "waited"]
        assert log[:5] == one
        del log[:5]
    assert runner.spent_us == WAKING_US + 2 * 5 + 10 + 2 * 8 + 10 + 2 * LEAD_US


def test_later_rounds_are_queued_whole_and_each_wait_is_announced(runner, log):
    runner.round(["a", "b"])
    log.clear()
    assert runner.round(["b", "a"]) == [8.0, 5.0]
    assert log == ["b", "a", "announced b", "waited", "announced a", "waited"]


def test_code_that_loads_without_a_launch_costs_the_gpu_nothing(log):
    def load_code(key):
        log.append(f"loads {key}")
        return key == "ours"

    launches = {key: lambda key=key: log.append(key) or 5.0 for key in ("ours", "library")}
    runner = GpuRunner(Watch(log), launches, load_code, announce=lambda key: log.append(f"announced {key}"))
    assert runner.round(["ours", "library"]) == [5.0, 5.0]
    assert log[1:4] == ["announced ours", "loads ours", "ours"]
    assert log[6:10] == ["announced library", "loads library", "library", "library"]
    assert runner.spent_us == WAKING_US + 15 + 5 + 15 + 2 * LEAD_US
    log.clear()
    runner.round(["ours"])
    assert "loads ours" not in log


def test_a_round_with_a_new_key_among_known_ones_gives_them_in_order(runner):
    runner.round(["a"])
    assert runner.round(["a", "b", "a"]) == [5.0, 8.0, 5.0]


def test_what_a_launch_finds_in_l2_is_put_there_before_it(log):
    runner = GpuRunner(Watch(log), {"a": lambda: log.append("a") or 90.0}, refresh=lambda: log.append("refreshed"))
    runner.round(["a"])
    log.clear()
    runner.round(["a", "a"])
    assert log[:4] == ["refreshed", "a", "refreshed", "a"]


def test_short_launches_that_find_their_inputs_in_l2_are_timed_in_a_row(log):
    class InARow(Watch):
        """Its launches take 10 us, and the overhead of a sample is 2 us."""

        def queue(self, launches, before, **_):
            queued = []
            for launch in launches:
                first = len(self.log)
                before()
                launch()
                queued.append(Queued(self.log, 2 + 10 * self.log[first:].count("launched")))
            return Queue(queued, LEAD_US)

    launches = {key: lambda: log.append("launched") for key in "ab"}
    runner = GpuRunner(InARow(log), launches, lambda _: True, refresh=lambda: log.append("refreshed"))
    # 12 us alone, so four in a row.
    assert runner.round(["a", "b"]) == [10.5, 10.5]
    assert (log.count("refreshed"), log.count("launched")) == (3, 1 + 2 * 4)


def test_launches_of_a_streamed_kernel_are_timed_in_a_row_and_no_l2_is_flushed(log):
    watch, launches = Watch(log), {key: lambda key=key: log.append(key) or 6.0 for key in "ab"}
    # Each function makes three launches in 6 us. Its code comes with the first of them, which is not timed.
    runner = GpuRunner(watch, launches, in_a_row=3)
    assert runner.round(["a", "b"]) == [2.0, 2.0]
    assert [log.count(key) for key in "ab"] == [2, 2]
    assert runner.round(["b", "a"]) == [2.0, 2.0]
    assert [log.count(key) for key in "ab"] == [3, 3]
    assert (watch.flushed, runner.spent_us) == (0, WAKING_US + 2 * 6 + 4 * 16 + 3 * LEAD_US)
    GpuRunner(watch, launches, lambda _: True).round(["a", "b"])
    assert watch.flushed == 2


@pytest.mark.parametrize(
    ("name", "sizes", "turns"),
    [
        # 8.4 MB of weights, 101 MB, 1.2 GB; 17 MB of keys and values; the L2 of an H200 holds 63 MB.
        ("skinny_linear", {"rows": 1, "inner": 4096, "columns": 1024}, 30),
        ("skinny_linear", {"rows": 1, "inner": 12288, "columns": 4096}, 3),
        ("skinny_linear", {"rows": 1, "inner": 4096, "columns": 151936}, 1),
        ("decode_attention", {"kv_heads": 8, "keys": 4096, "page_size": 1, "group": 4, "head_dim": 128}, 15),
        ("rms_norm_forward", {"rows": 1, "columns": 4096}, 1),
    ],
)
def test_copies_of_a_streamed_kernel_s_inputs_exceed_the_l2(name, sizes, turns):
    spec, target = spec_named(name), resolve("H200")
    problem = sized(spec, "bfloat16", **sizes)
    assert turns_of(spec, problem, target) == turns
    assert not spec.streamed or turns * spec.bytes_moved(problem) >= 4 * target.l2_bytes


def test_a_prepared_launch_takes_the_copies_in_turn():
    taken = []
    launch = _in_turn([lambda n=n: taken.append(n) for n in range(3)])
    for _ in range(5):
        launch()
    assert taken == [0, 1, 2, 0, 1]


def test_a_launch_that_the_gpu_waited_for_is_timed_again(log):
    times_us = {"a": [5.0, 6.0], "b": [9.0, -70.0, -60.0, 9.5], "c": [4.0, 4.5]}
    runner = GpuRunner(Watch(log), {key: lambda left=left: left.pop(0) for key, left in times_us.items()})
    runner._loaded.update(times_us)
    for left in times_us.values():
        left.pop(0)
    assert runner.round(["a", "b", "c"]) == [6.0, 9.5, 4.5]
    assert runner.spent_us == 3 * LEAD_US + 16 + 80 + 14.5 + 70 + 19.5


def test_one_that_the_gpu_always_waits_for_gets_a_figure_all_the_same(log):
    runner = GpuRunner(Watch(log), {"a": lambda: -30.0})
    assert runner.round(["a"]) == [30.0]


@pytest.mark.parametrize("careful", [False, True])
def test_who_is_queued_alone_is_announced_before_it(runner, log, careful):
    """So that a fault that shows while it is queued has its name."""

    class Steps:
        def begin(self, name):
            log.append(f"step {name}")

    runner.round(["a", "b"])
    log.clear()
    assert _Rounds(runner, Steps(), careful=careful).round(["b", "a"]) == [8.0, 5.0]
    steps = [line for line in log if line.startswith("step")]
    assert steps == (["step b", "step a"] if careful else [f"step {QUEUE}"])
    assert log[0] == steps[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool, torch.uint8])
def test_rewriting_keeps_every_bit(dtype):
    bits = torch.randint(0, 256, (6, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    if dtype == torch.bool:
        bits = bits % 2
    array = bits.clone().view(dtype)  # NaNs and negative zeros among them
    view = array[1:5, ::2]
    rewriting([array, view])()
    assert torch.equal(array.view(torch.uint8), bits)


class Simulated:
    """A GPU whose clock stands, on which work takes the time that it is queued with; the host's clock runs with it."""

    def __init__(self, monkeypatch):
        self.host_us = self.free_at_us = 0.0
        self.busy_us = {}
        monkeypatch.setattr("tilekern.tuning.measure.timing.time.perf_counter", lambda: self.host_us / 1e6)
        gpu = self

        class Event:
            def __init__(self, **_):
                self.at_us = 0.0

            def record(self):
                gpu.put(0.0)
                self.at_us = gpu.free_at_us

            def synchronize(self):
                gpu.wait()

            def query(self):
                return gpu.host_us >= self.at_us

            def elapsed_time(self, end):
                return (end.at_us - self.at_us) / 1000

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.put(cycles / 2000))
        monkeypatch.setattr(torch.cuda, "synchronize", self.wait)
        self.watch = Stopwatch.__new__(Stopwatch)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", lambda *_, **__: self)
            self.watch.__init__(1)

    def zero_(self):
        self.put(20.0)

    def put(self, time_us, host_us=0.0):
        """Work that the host takes so long to queue."""
        self.host_us += host_us
        self.free_at_us = max(self.free_at_us, self.host_us) + time_us

    def wait(self):
        self.host_us = max(self.host_us, self.free_at_us)

    def launch(self, time_us, host_us):
        return lambda: self.put(time_us, host_us)


@pytest.mark.parametrize("host_us", [5.0, 45.0, 150.0])
@pytest.mark.parametrize("time_us", [2.0, 400.0])
@pytest.mark.parametrize("launches", [1, 2, 90])
def test_no_sample_holds_the_host_s_time_once_its_pace_is_known(monkeypatch, host_us, time_us, launches):
    gpu = Simulated(monkeypatch)
    queue = [gpu.launch(time_us, host_us)] * launches
    gpu.watch.round(queue)
    for _ in range(3):
        queued = gpu.watch.queue(queue)
        gpu.wait()
        assert gpu.watch.read(queued) == pytest.approx([time_us] * launches)
    needed_us = host_us + (launches - 1) * max(0.0, host_us - 20 - time_us)
    assert queued.lead_us <= SAFETY * needed_us + 1e-6


def test_what_was_late_is_known_and_timed_again(monkeypatch):
    gpu = Simulated(monkeypatch)
    gpu.watch.round([gpu.launch(10.0, 5.0)])
    held_up = [1000.0]
    stalls = gpu.launch(10.0, 5.0)

    def stalling():
        gpu.host_us += held_up.pop() if held_up else 0.0
        stalls()

    queued = gpu.watch.queue([stalling, gpu.launch(10.0, 5.0)])
    gpu.wait()
    assert [events.late for events in queued.events] == [True, False]
    assert gpu.watch.read(queued)[0] > 900
    held_up.append(1000.0)
    assert gpu.watch.round([stalling, gpu.launch(10.0, 5.0)]) == pytest.approx([10.0, 10.0])
    assert not held_up


def test_one_slow_launch_among_fast_ones_is_waited_for_and_the_loading_of_code_is_not(monkeypatch):
    gpu = Simulated(monkeypatch)
    mixed = [gpu.launch(10.0, 8.0), gpu.launch(10.0, 120.0), gpu.launch(10.0, 8.0)]
    gpu.watch.round(mixed)
    assert gpu.watch.round(mixed) == pytest.approx([10.0] * 3)
    gpu.watch.round([gpu.launch(10.0, 1e6)])
    assert gpu.watch.queue(mixed).lead_us <= SAFETY * 3 * MOST_HOST_US
