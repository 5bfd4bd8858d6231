"""Kernels of a token that are chosen in the engine's own step: by what rule, what is kept, and what a failure costs."""

import contextlib
import itertools
import json
from multiprocessing import get_context

import pytest
import rehearsal_samples
from recorded import RIGHT, WRONG, RecordedExecutor
from tuning_samples import SMALL, THREE, WIDE, needs_compiler

from tilekern.cache import Record, Store
from tilekern.errors import InputError
from tilekern.inference.architectures import architecture_of
from tilekern.inference.rehearsal import TokenStep
from tilekern.spec import Config
from tilekern.tuning import cli, pipeline
from tilekern.tuning.pipeline import Options, Pipeline
from tilekern.tuning.plan.presets import PRESETS
from tilekern.tuning.publishing import Known
from tilekern.tuning.rehearse import process, stage
from tilekern.tuning.rehearse.descent import StepFailed, choose, saved
from tilekern.tuning.rehearse.process import Stage
from tilekern.tuning.rehearse.stage import open_problems, rehearse
from tilekern.tuning.sweep.folder import Sweep

STEP = TokenStep(architecture_of(PRESETS["qwen3-8b"]), "bfloat16", 1, 4096)
SOUND = RIGHT | {"cases": [{"case": "full"}]}


class Step:
    """A step whose time is the sum of its kernels', as numbers by name, with noise and a drift of clocks.

    Args:
        cost: what each kernel adds, in us, or a function of the whole way.
        noise: the half range of what is added to a sample.
        fails: kernels that cannot run.
        launched: the problems that a way launches.
    """

    def __init__(self, cost, noise=0.0, drift=0.0, fails=(), launched=lambda way: way):
        self.launched = launched
        self._cost, self._noise, self._drift, self._fails = cost, noise, drift, fails
        self.asked = []
        self._clock = itertools.count()

    def samples(self, ways, count):
        self.asked.append(ways)
        for way in ways:
            if failing := [kernel for kernel in way.values() if kernel in self._fails]:
                raise StepFailed(f"{failing[0]} cannot run")
        found = [[] for _ in ways]
        for _ in range(count):
            for number, way in enumerate(ways):
                at = next(self._clock)
                noise = self._noise * (2 * (at * 0.618034 % 1) - 1)
                cost = self._cost(way) if callable(self._cost) else sum(map(self._cost.get, way.values()))
                found[number].append(100 + cost + noise + self._drift * at)
        return found


class TestChoice:
    def chosen(self, step, others, given, **options):
        return {choice.named: choice for choice in choose(step, given, others, **options)}

    def test_the_fastest_step_wins_and_later_ones_are_made_with_it(self):
        def cost(way):
            # b2 pays beside a3 alone.
            return {"a1": 10, "a2": 8, "a3": 5}[way["a"]] + {"b1": 10, "b2": 9 if way["a"] == "a3" else 12}[way["b"]]

        found = self.chosen(Step(cost), {"a": ["a2", "a3"], "b": ["b2"]}, {"a": "a1", "b": "b1"})
        assert [(one.kernel, one.otherwise_us, one.token_us, one.tried) for one in found.values()] == [
            ("a3", 120.0, 115.0, 2), ("b2", 115.0, 114.0, 1)
        ]  # fmt: skip

    def test_what_is_not_faster_is_kept(self):
        step = Step({"a1": 5, "a2": 5, "a3": 6})
        found = self.chosen(step, {"a": ["a2", "a3"]}, {"a": "a1"})
        assert (found["a"].kernel, found["a"].token_us, found["a"].otherwise_us) == ("a1", 105.0, 105.0)

    @pytest.mark.parametrize(("gain", "kernel"), [(0.4, "a1"), (4.0, "a2")])
    def test_a_gain_within_the_noise_is_none(self, gain, kernel):
        step = Step({"a1": 5, "a2": 5 - gain}, noise=2.0)
        assert self.chosen(step, {"a": ["a2"]}, {"a": "a1"})["a"].kernel == kernel

    def test_drifting_clocks_choose_nothing_and_hide_nothing(self):
        """The token takes twice as long after all samples as before."""
        step = Step({"a1": 5, "a2": 5, "b1": 5, "b2": 2}, noise=0.2, drift=-0.1)
        found = self.chosen(step, {"a": ["a2"], "b": ["b2"]}, {"a": "a1", "b": "b1"})
        assert [one.kernel for one in found.values()] == ["a1", "b2"]

    def test_luck_does_not_last(self):
        """A graph that is faster once is compared again, captured anew; the next best gets its chance."""
        times = iter([10.0, 10.0, 2.0, 10.0, 6.0, 10.0, 10.0, 10.0, 6.0])

        class Lucky:
            launched = staticmethod(dict)

            def samples(self, ways, count):
                return [[next(times)] * count for _ in ways]

        (found,) = choose(Lucky(), {"a": "a1"}, {"a": ["a2", "a3"]})
        assert (found.kernel, found.token_us) == ("a3", 6.0)

    def test_a_kernel_that_cannot_run_is_left_out(self):
        step = Step({"a1": 5, "a3": 3}, fails=["a2"])
        found = self.chosen(step, {"a": ["a2", "a3"]}, {"a": "a1"})
        assert (found["a"].kernel, found["a"].failed) == ("a3", ("a2 cannot run",))

    def test_a_step_that_cannot_run_is_an_error(self):
        with pytest.raises(StepFailed, match="a1 cannot run"):
            list(choose(Step({}, fails=["a1"]), {"a": "a1"}, {"a": ["a2"]}))

    def test_no_choice_is_made_when_the_time_is_over(self):
        step, given = Step({"a1": 5, "a2": 3, "b1": 5, "b2": 3}), {"a": "a1", "b": "b1"}
        # The first comparison, the one that confirms it, and then no more.
        found = self.chosen(step, {"a": ["a2"], "b": ["b2"]}, given, is_over=lambda: len(step.asked) > 2)
        assert list(found) == ["a"]
        assert len(step.asked) == 3

    def test_what_the_step_does_not_launch_is_not_chosen(self):
        """The first choice leads to another problem behind it."""
        step = Step(
            {"a1": 5, "a2": 3, "b1": 5, "b2": 3, "c1": 5, "c2": 3},
            launched=lambda way: {"a", "c" if way["a"] == "a2" else "b"},
        )
        given, others = {"a": "a1", "b": "b1", "c": "c1"}, {"a": ["a2"], "b": ["b2"], "c": ["c2"]}
        assert list(self.chosen(step, others, given)) == ["a", "c"]

    def test_samples_are_compared_in_pairs(self):
        assert saved([10, 20, 30, 40], [9, 19, 29, 39]) == 1
        assert saved([10, 20, 30, 40], [9, 21, 29, 41]) == 0
        assert saved([1000.0] * 9, [999.0] * 9) == 0, "graphs of the same launches differ by so much"


class Executor(RecordedExecutor):
    """The second config takes 3 % longer in a row than the first, the third 6 % and the fourth 50 %.

    Args:
        unsound: keys of candidates that do not stand the battery.
        unchecked: keys of those that it never ends for.
    """

    def __init__(self, unsound=(), unchecked=()):
        super().__init__()
        self._unsound, self._unchecked, self.confirmed = unsound, unchecked, []

    def time_us(self, entrant):
        item = entrant.candidate
        return self.times[item.kernel, item.problem][item.config.key]

    def _measure(self, task):
        if task.confirms:
            for entrant in task.entrants:
                if not task.checks[entrant.key].cases and entrant.key not in self._unchecked:
                    self.confirmed.append(entrant.key)
                    is_sound = entrant.key not in self._unsound
                    yield "measured", {"candidate": entrant.key, "check": SOUND if is_sound else WRONG}
            return
        times = {entrant.key: self.time_us(entrant) for entrant in task.entrants if entrant.is_aligned}
        for journal, line in super()._measure(task):
            yield journal, line | {"check": SOUND} if line["candidate"] == min(times, key=times.get) else line


@pytest.fixture
def planned(both, tmp_path, monkeypatch):
    """A sweep of a token that launches three problems once and a fourth not at all, compiled and not measured."""
    sweep = Sweep(tmp_path / "sweep")
    named = both.problems()
    limits = {one: [item.config for item in both.candidates(*one)[:-1]] for one in named}
    sweep.begin(both.target, "test", named, limits, tokens=[STEP])
    for line in both.compiled().values():
        sweep.store(both.cubin(line["sha256"]))
        sweep.note("compiled", line)
    launches = dict.fromkeys(THREE, 1)
    monkeypatch.setattr(stage, "problems_of_token", lambda *_: (launches, [*THREE, WIDE]))
    return sweep


@pytest.fixture
def run(planned, tmp_path, monkeypatch):
    """Measure the sweep and publish, with a step; return its result, the step, and the executor."""
    aligned = {named: planned.candidates(*named)[:-1] for named in planned.problems()}
    # The largest problem has the largest share.
    times = {
        named: {item.config.key: factor * named[1]["rows"] for item, factor in zip(items, (1, 1.03, 1.06, 1.5))}  # noqa: B905
        for named, items in aligned.items()
    }
    monkeypatch.setattr(Executor, "times", times, raising=False)
    monkeypatch.setattr(pipeline, "here", lambda: planned.target)

    def start(step, executor=None, **options):
        executor = executor or Executor()
        monkeypatch.setattr("tilekern.tuning.executors.local.LocalExecutor", lambda *_: executor)
        opened = []

        def stages(asked, cubins):
            opened.append((asked, cubins))
            return contextlib.nullcontext(step)

        monkeypatch.setattr(pipeline, "stage_in", lambda _: stages)
        given = Options(**({"stages": ["measure"]} | options))
        result = Pipeline(Sweep(planned.folder), Store(tmp_path / "cache"), given).run()
        return result, opened, executor

    return start


def key_of(sweep, named, place):
    return sweep.candidates(*named)[place].key


class Costs(Step):
    """A step that is faster by 9 us with the third candidates of a problem, and by 5 with the second ones."""

    def __init__(self, sweep, **options):
        self.sweep = sweep
        gains = (0, -5, -9, -30)
        self.gains = {
            item.key: gain
            for named in sweep.problems()
            for item, gain in zip(sweep.candidates(*named), gains, strict=False)
        }
        options = {"launched": lambda _: THREE} | options
        super().__init__(lambda way: sum(self.gains[kernel.key] for kernel in way.values()), **options)

    def samples(self, ways, count):
        named = [{name: kernel.key for name, kernel in way.items()} for way in ways]
        found = super().samples(ways, count)
        self.asked[-1] = named
        return found


@needs_compiler
class TestStage:
    def test_the_step_s_choice_is_the_record_s_winner(self, planned, run, tmp_path):
        step = Costs(planned)
        result, opened, executor = run(step)
        configs = {named: [item.config for item in planned.candidates(*named)] for named in planned.problems()}
        for winner in result.winners:
            named, record = (winner.kernel, winner.problem), winner.record
            if named == WIDE:  # which the token does not launch
                assert (winner.in_step, Config(record.config)) == (None, configs[named][0])
                continue
            assert Config(record.config) == configs[named][2]
            facts = dict(winner.in_step)
            assert facts.pop("otherwise_us") - facts.pop("token_us") == 9
            assert facts == {"of": str(STEP), "layers": 6, "tried": 2}
            assert record.measurement["median_us"] == round(1.06 * named[1]["rows"], 3), "that in a row, as ever"
            assert record.check["cases"]
            assert Config(record.runners_up[0]["config"]) == configs[named][0]
            assert Record.from_json(record.to_json()) == record
            assert Config(record.artifacts["aligned"].config) == configs[named][2]
        stored = {entry.record.address: entry.record for entry in Store(tmp_path / "cache").entries()}
        assert {winner.record.address: winner.record for winner in result.winners} == stored
        assert result.step == {"chosen": 3, "changed": 3, "tried": 6}
        # The one with the largest share came first, and what was 50 % slower in a row was not tried.
        tried = [next(name for name in way if way[name] != base[name]) for base, way, *_ in
                 (asked for asked in step.asked if len(asked) == 2)]  # fmt: skip
        assert list(dict.fromkeys(tried)) == sorted(THREE, key=lambda named: -named[1]["rows"])
        assert key_of(planned, SMALL, 3) not in {key for asked in step.asked for way in asked for key in way.values()}
        assert sorted(executor.confirmed) == sorted(key_of(planned, named, 2) for named in THREE)
        ((asked, cubins),) = opened
        assert asked == STEP
        assert all(planned.cubin(digest) == data for digest, data in cubins.items())

    def test_what_is_decided_is_not_tried_again_until_it_is_raced_again(self, planned, run):
        run(Costs(planned))
        result, opened, executor = run(Costs(planned))
        assert (opened, executor.tasks, result.step["chosen"]) == ([], [], 0)
        assert sum(winner.in_step is not None for winner in result.winners) == 3
        again = Sweep(planned.folder)
        race = next(race for race in again.races().values() if race["problem"] == SMALL[1].key)
        timed = [line for line in again.measured().values() if line.get("race") == race["race"]]
        again.note("measured", *({**line, "race": "new"} for line in timed))
        again.note("races", {**race, "race": "new"})
        assert list(open_problems(Sweep(planned.folder), STEP).others) == [SMALL, WIDE], "it may launch the other now"
        other = TokenStep(STEP.architecture, "bfloat16", 8, 4096)
        assert list(open_problems(Sweep(planned.folder), other).others) == [SMALL, WIDE]
        assert next(w for w in run(Costs(planned))[0].winners if w.problem == SMALL[1]).in_step

    def test_a_choice_that_does_not_stand_the_battery_never_wins(self, planned, run):
        """The problem is decided again without it; the choices for others stay."""
        bad = key_of(planned, SMALL, 2)
        result, opened, executor = run(Costs(planned), Executor(unsound=[bad]))
        assert len(opened) == 2
        found = {winner.problem: winner for winner in result.winners}
        assert Config(found[SMALL[1]].record.config) == planned.candidates(*SMALL)[1].config
        assert found[SMALL[1]].in_step["tried"] == 1
        assert found[SMALL[1]].record.check["cases"]
        assert executor.confirmed[-1] == key_of(planned, SMALL, 1)
        assert [note for note in result.notes if "left out since" in note] == [
            f"chosen in {STEP}, and left out since: column_sum {SMALL[1].key}: y: relative error"
        ]

    def test_a_choice_that_is_not_checked_to_the_end_is_said_and_tried_by_the_next_run(self, planned, run):
        executor = Executor(unchecked=[key_of(planned, SMALL, 2)])
        result, opened, _ = run(Costs(planned), executor)
        assert (len(opened), result.step["chosen"]) == (1, 2)
        assert [note.rpartition(": ")[2] for note in result.notes] == ["its checks did not come to their end"]
        assert SMALL in open_problems(Sweep(planned.folder), STEP).others

    def test_a_candidate_that_the_step_cannot_run_is_left_out_and_named(self, planned, run):
        step, bad = Costs(planned), key_of(planned, SMALL, 2)
        real = step.samples

        def samples(ways, count):
            if any(kernel.key == bad for way in ways for kernel in way.values()):
                raise StepFailed("the process died (exit code 7)")
            return real(ways, count)

        step.samples = samples
        result = run(step)[0]
        winner = next(winner for winner in result.winners if winner.problem == SMALL[1])
        assert Config(winner.record.config) == planned.candidates(*SMALL)[1].config
        assert [note for note in result.notes if "left out of" in note] == [
            f"left out of {STEP}: column_sum {SMALL[1].key}: the process died (exit code 7)"
        ]

    def test_where_the_step_does_not_run_the_fastest_in_a_row_win(self, planned, run):
        class Broken:
            def samples(self, *_):
                raise StepFailed("DriverError: the GPU has too little memory")

        result = run(Broken())[0]
        assert [note for note in result.notes if "does not run" in note] == [
            f"{STEP} does not run, and what it has not decided has the fastest in a row: "
            "DriverError: the GPU has too little memory"
        ]
        assert [Config(winner.record.config) for winner in result.winners] == [
            planned.candidates(*named)[0].config for named in planned.problems()
        ]
        assert {winner.in_step for winner in result.winners} == {None}

    def test_a_gpu_that_is_lost_on_the_way_ends_the_step_and_earlier_choices_hold(self, planned, run):
        step, deadly = Costs(planned), key_of(planned, THREE[1], 1)
        real, asked = step.samples, []

        def samples(ways, count):
            asked.append(ways)
            if any(kernel.key == deadly for way in ways for kernel in way.values()):
                step.launched = step.samples = lost
                lost()
            return real(ways, count)

        def lost(*_):
            asked.append(None)
            raise StepFailed("the GPU is lost")

        step.samples = samples
        result = run(step)[0]
        assert (asked[-2:], asked.count(None)) == ([None, None], 2), "the candidate's, and that of the step without it"
        assert result.step["chosen"] == 1
        largest = next(winner for winner in result.winners if winner.problem == THREE[2][1])
        assert largest.in_step
        assert any(note.endswith("has the fastest in a row: the GPU is lost") for note in result.notes)

    def test_the_budget_ends_it_and_the_next_run_goes_on(self, planned, run):
        step = Costs(planned)
        run(step)
        (planned.folder / "chosen.jsonl").unlink()
        sweep, again = Sweep(planned.folder), Costs(planned)
        # The base, two comparisons of the first problem, and the one that confirms its choice.
        stages = lambda *_: contextlib.nullcontext(again)  # noqa: E731
        found = rehearse(sweep, Executor(), stages, is_over=lambda: len(again.asked) > 3)
        assert (found.chosen, len(again.asked)) == (1, 4)
        largest_first = sorted(THREE[:2], key=lambda named: -named[1]["rows"])
        assert list(open_problems(Sweep(planned.folder), STEP).others) == [*largest_first, WIDE]

    def test_a_spent_budget_begins_no_step(self, planned, run, monkeypatch):
        measured = run(Costs(planned))[0]
        (planned.folder / "chosen.jsonl").unlink()
        monkeypatch.setattr("tilekern.tuning.pipeline.Budget.used_s", 9.0)
        result, opened, _ = run(Costs(planned), budget_s=1.0)
        assert (len(measured.winners), opened, result.step) == (4, [], {"chosen": 0, "changed": 0, "tried": 0})

    def test_what_the_other_stages_leave_of_a_budget_is_the_step_s(self, planned, run):
        result, opened, _ = run(Costs(planned), stages=["compile", "measure"], budget_s=1000.0)
        assert (len(opened), result.step["chosen"]) == (1, 3)

    @pytest.mark.parametrize(
        ("gpu", "words"), [(None, "which needs the GPU here, and there is none"), ("target", None)]
    )
    def test_without_the_gpu_it_is_left_out_with_a_word(self, planned, run, monkeypatch, gpu, words):
        monkeypatch.setattr(pipeline, "here", lambda: gpu and planned.target)
        result, opened, _ = run(Costs(planned), stages=["compile", "measure"])
        assert bool(opened) == (words is None)
        assert any("no step of a token is timed" in note and words in note for note in result.notes) == bool(words)

    def test_a_line_that_others_wrote_chooses_nothing(self, planned, run):
        run(Costs(planned))
        path = planned.folder / "chosen.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        other = key_of(planned, SMALL, 1)
        changed = [line | ({"candidate": other} if "candidate" in line else {"more": 1}) for line in lines]
        path.write_text("".join(json.dumps(line) + "\n" for line in changed))
        assert Sweep(planned.folder).chosen() == {}
        assert len(Sweep(planned.folder, foreign=True).chosen()) == 4

    def test_candidates_of_other_shapes_come_before_others(self, planned, run, monkeypatch):
        run(Costs(planned))
        (planned.folder / "chosen.jsonl").unlink()
        sweep = Sweep(planned.folder)
        monkeypatch.setattr(stage, "_MOST_OTHERS", 1)
        monkeypatch.setattr("tilekern.tuning.sweep.candidates.Candidate.blocks", lambda *_: 7)
        items = sweep.candidates(*SMALL)[1:3]
        known = Known.of(sweep)
        assert stage._different(items[::-1], known, sweep.target) == [items[1]]
        monkeypatch.setattr(stage, "_MOST_OTHERS", 2)
        assert stage._different(items, known, sweep.target) == items


class TestPlan:
    def test_a_step_says_what_it_is_of(self):
        assert str(STEP) == "a token of 1 sequence of 4096 by qwen3 of 36 layers of 4096, static cache, bfloat16"

    def test_a_dry_run_says_that_steps_follow(self, tmp_path, capsys):
        asked = ["gpt2", "--engine", "--gpu", "H200", "--context", "64", "--kernels", "advance", "--dry-run"]
        assert cli.main([*asked, "--decode", "1,2", "--cache-dir", str(tmp_path)]) == 0
        assert "the kernels of 2 tokens are then chosen in their steps" in capsys.readouterr().out
        assert cli.main([*asked, "--stages", "plan,compile", "--cache-dir", str(tmp_path)]) == 0
        assert "in their steps" not in capsys.readouterr().out

    def test_a_plan_keeps_its_tokens(self, h200, tmp_path):
        sweep = Sweep(tmp_path / "sweep")
        sweep.begin(h200, "test", [SMALL], tokens=[STEP])
        assert Sweep(tmp_path / "sweep").tokens == (STEP,)
        assert sweep.again(tmp_path / "again").tokens == (STEP,)
        path = sweep.folder / "sweep.json"
        plan = json.loads(path.read_text())
        path.write_text(json.dumps({name: value for name, value in plan.items() if name != "tokens"}))
        assert Sweep(tmp_path / "sweep").tokens == (), "an older plan has none"
        plan["tokens"][0]["architecture"]["layers"] = "many"
        path.write_text(json.dumps(plan))
        with pytest.raises(InputError, match="is damaged"):
            _ = Sweep(tmp_path / "sweep").tokens


@pytest.fixture
def at_work(monkeypatch):
    """Processes that a step runs in, of which a kernel says what they do."""
    monkeypatch.setattr(process, "serve", rehearsal_samples.serve)
    monkeypatch.setattr(process, "get_context", lambda _: get_context("fork"))
    monkeypatch.setattr(process, "SAMPLES_S", 1.0)

    def stage_of(step):
        return Stage(step, {"sha": b"cubin"}, "cache", "3")

    return stage_of


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        ("dies", "the process died (exit code 7)"),
        ("hangs", "no answer within 1 s"),
        ("fails", "ValueError: it cannot be launched"),
    ],
)
def test_a_process_that_is_lost_costs_one_question(at_work, kernel, reason):
    with at_work("a step") as found:
        assert found.samples([{"a": "right"}], 2) == [[3.0, 1.0]] * 2
        with pytest.raises(StepFailed) as raised:
            found.samples([{"a": kernel}], 2)
        assert str(raised.value) == reason
        assert found.samples([{"a": "right"}], 1) == [[3.0, 1.0]]


@pytest.mark.processes
def test_a_step_that_does_not_fit_says_why(at_work):
    with at_work("too large") as found, pytest.raises(StepFailed, match="MemoryError: the GPU has no 9 bytes left"):
        found.samples([{"a": "right"}], 1)
