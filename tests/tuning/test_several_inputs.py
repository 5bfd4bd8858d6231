"""Candidates that are timed on several inputs: who wins, and what is told of them."""

import dataclasses
import json

import pytest
from race_samples import winner
from replay_runner import Noise, ReplayRunner

from tilekern.kernels import spec_named
from tilekern.spec import ALIGNED
from tilekern.spec.targets import resolve
from tilekern.tuning.measure.tasks import Entrant, Steps, Task, on
from tilekern.tuning.measure.timing import Timing
from tilekern.tuning.strategies import Lineup, strategy_named
from tilekern.tuning.strategies.runner import Several
from tilekern.tuning.sweep.candidates import Candidate
from tilekern.tuning.sweep.lines import COPY

CALM = Noise(outliers=0.0)
# The first is the fastest of all where rows are even, and the slowest where they are not.
TIMES_US = {"even": (100.0, 200.0), "robust": (104.0, 152.0), "skewed": (130.0, 150.0)}


def race_of(strategy, times_us=TIMES_US, copy_us=20.0):
    medians = {key: even for key, (even, _) in times_us.items()} | {COPY: copy_us}
    medians |= {on(key, "zipf"): skewed for key, (_, skewed) in times_us.items()}
    runner = Several(ReplayRunner(medians, 0.003, 0, CALM), times_us, ("zipf",))
    return runner.told(strategy_named(strategy)(runner, Lineup(tuple(times_us), "even", (COPY,))))


@pytest.mark.parametrize("strategy", ["race", "exhaustive"])
def test_the_least_of_the_worst_losses_wins(strategy):
    timings = race_of(strategy)
    assert winner(timings) == "robust"
    assert timings["even"].behind == pytest.approx((200 / 150) / (104 / 100) - 1, abs=0.03)
    assert timings["skewed"].behind == pytest.approx(130 / 104 - 1, abs=0.03)


def test_what_is_told_are_times_of_each_input():
    timings = race_of("exhaustive")
    for key, (even, skewed) in TIMES_US.items():
        assert timings[key].median_us == pytest.approx(even, rel=0.02)
        assert timings[key].on == {"zipf": pytest.approx(skewed, rel=0.02)}
    assert timings[COPY].median_us == pytest.approx(20.0, rel=0.02)
    assert timings[COPY].on is None
    said = json.loads(json.dumps(timings["robust"].as_dict()))
    assert said["on"]["zipf"] == pytest.approx(152.0, rel=0.02)
    assert "on" not in timings[COPY].as_dict()


def test_without_variations_nothing_is_changed():
    runner = Several(ReplayRunner({"a": 3.0, "b": 2.0}, 0.01, 0, CALM), ("a", "b"), ())
    other = ReplayRunner({"a": 3.0, "b": 2.0}, 0.01, 0, CALM)
    assert runner.round(["a", "b", "a"]) == other.round(["a", "b", "a"])
    assert runner.spent_us == other.spent_us
    timings = {"a": Timing.of([1.0, 2.0])}
    assert runner.told(timings) == timings


def test_a_step_on_other_inputs_is_the_entrant_s():
    class Context:
        @staticmethod
        def RawArray(_, size):  # noqa: N802 (as multiprocessing calls it)
            return [0] * size

    spec, target = spec_named("grouped_linear"), resolve("H200")
    problem = spec.problem(
        rows=64, inner=64, columns=64, experts=4, inner_first=False, gathered=False, biased=False, partial=False,
        dtype="bfloat16",
    )  # fmt: skip
    entrant = Entrant(Candidate(spec.name, problem, spec.default(problem, target), ALIGNED, "0" * 64), {})
    task = Task(spec.name, problem, target, (entrant,), {}, entrant.key, timed=spec.timed)
    assert spec.timed
    steps = Steps(Context)
    steps.follow(task)
    for name in spec.timed:
        steps.begin(on(entrant.key, name))
        assert steps.name == entrant.key
    plain = Steps(Context)
    plain.follow(dataclasses.replace(task, timed=()))
    with pytest.raises(KeyError):
        plain.begin(on(entrant.key, "zipf"))
