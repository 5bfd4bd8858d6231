"""A token that the tuner rehearses: the engine's own launches by any plans, without a checkpoint."""

import dataclasses

import emulated
import pytest
from small_models import MODELS

from tilekern.inference import launches, rehearsal
from tilekern.inference.architectures import architecture_of
from tilekern.inference.caches import KINDS
from tilekern.inference.rehearsal import Rehearsal, TokenStep
from tilekern.kernels import spec_named
from tilekern.runtime import dispatch
from tilekern.runtime.plans import InterpretedPlan
from tilekern.spec.targets import INTERPRETED, resolve
from tilekern.tuning.plan.engine import problems_of_token
from tilekern.tuning.rehearse import process
from tilekern.tuning.rehearse.process import Answers, Kernel

H200 = resolve("H200")


def step_of(name="qwen3", **given):
    architecture = architecture_of(MODELS[name][1](**MODELS[name][2]).to_dict())
    return TokenStep(architecture, **{"dtype": "float32", "batch": 2, "context": 12} | given)


@pytest.fixture
def asked(monkeypatch):
    """The problems that plans were asked for, at their buckets."""
    found, real = [], emulated.interpreted

    def plan_for(spec, device, target, problem):
        found.append((spec.name, spec.bucketed(problem)))
        return real(spec, device, target, problem)

    monkeypatch.setattr("tilekern.runtime.dispatch.array_plan_for", plan_for)
    return found


@pytest.mark.parametrize("cache", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_it_launches_what_a_plan_has(gpu, asked, name, cache):
    step = step_of(name, cache=cache)
    found = Rehearsal(step, gpu.stream())
    asked.clear()  # what loading took
    found.samples([found.capture()], 3)
    counts, problems = problems_of_token(step, H200)
    assert set(asked) <= set(problems)
    assert {named for named in counts if named[0] != "sample"} <= set(asked), "it draws no tokens"


def test_int8_weights(gpu, asked):
    step = step_of(int8=True)
    found = Rehearsal(step, gpu.stream())
    found.samples([found.capture()], 1)
    assert "skinny_linear_int8_tf32" in {name for name, _ in asked}
    assert {named for named in problems_of_token(step, H200)[0] if "int8" in named[0]} <= set(asked)


def test_few_layers_stand_for_many_and_tokens_stay_in_the_context(gpu, monkeypatch):
    """Its positions, the last tokens' lengths and its ids are those of a full cache, however often it is replayed."""
    real = launches.empty

    def garbage(*given):
        """Memory as a GPU's may be: no id, and no number."""
        found = real(*given)
        found.memory.fill(0xFF)
        return found

    monkeypatch.setattr(launches, "empty", garbage)
    step = step_of(batch=3)
    step = dataclasses.replace(step, architecture=dataclasses.replace(step.architecture, layers=99))
    assert step.layers == 6
    monkeypatch.setattr(rehearsal, "_MOST_LAYERS", 1)
    monkeypatch.setattr(rehearsal, "_SAMPLE_MS", 6.0)  # the stub's events lie 1.5 ms apart
    found = Rehearsal(step, gpu.stream())
    running = found._generation
    assert emulated.read(running.choice.ids).tolist() == [0] * 3
    assert all(emulated.read(x).isfinite().all() for x in running.cache.keys.of_layer(0).values())
    samples = found.samples([found.capture(), found.capture()], 5)
    assert samples == [[1500.0 / 4] * 5] * 2
    assert len(running._model.weights.layers) == 1
    assert emulated.read(running._positions).tolist() == [12] * 3
    assert emulated.read(running._lengths).tolist() == [13] * 3, "that of the next token, which is not computed"
    ids = emulated.read(running.choice.ids)
    assert ((ids >= 0) & (ids < step.architecture.vocabulary)).all()


def test_a_way_says_which_kernel_a_problem_has(gpu, asked, monkeypatch):
    """Others have those of the cache, and one that cannot be launched is an error."""
    step, seen = step_of(batch=1), []

    class Given(emulated.Interpreted):
        def queue(self, stream, *arguments):
            seen.append(self.config)
            super().queue(stream, *arguments)

    def plan_of(kernel, implementation, config, problem, target):
        assert kernel == "its cubins"
        return Given(implementation, config, implementation.grid(problem, INTERPRETED.sm_count))

    monkeypatch.setattr(process, "prebuilt", lambda *_: "its cubins")
    monkeypatch.setattr(process, "plan_of", plan_of)
    answers = Answers(step, {})
    (named,) = [one for one in problems_of_token(step, H200)[0] if one[0] == "token_attention"]
    spec = spec_named(named[0])
    default = spec.default(named[1], INTERPRETED)
    configs = [default, next(c for c in spec.space.candidates(named[1], H200) if c != default)]
    ways = [{named: Kernel(str(number), config, {})} for number, config in enumerate(configs)]
    asked.clear()
    answers.samples(ways, 2)
    assert answers.launched(ways[0]) == {*asked, named}
    assert seen == [configs[0]] * 2 + [configs[1]] * 2, "a launch in each of two layers, once for each capture"
    assert named not in asked
    assert len(asked) > 5
    seen.clear()
    answers.samples([ways[0], ways[0] | {}], 2)
    assert len(seen) == 2, "the graph of the way that was first before is kept"
    assert isinstance(answers._plans["0", next(iter(answers._plans))[1]]._plan, InterpretedPlan)
    monkeypatch.setattr(process, "plan_of", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        answers.samples([ways[0], {named: Kernel("2", configs[1], {})}], 2)


def test_a_token_is_that_of_the_default_mode(gpu):
    step = step_of("gpt2", dtype="bfloat16", batch=1)
    usual, launched = problems_of_token(step, H200), Answers(step, {}).launched({})
    before = dispatch.set_invariant(on=True)
    try:
        assert problems_of_token(step, H200) == usual
        assert dispatch.is_invariant()
        assert Answers(step, {}).launched({}) == launched, "which a process of its own turns off"
    finally:
        dispatch.set_invariant(on=before)
