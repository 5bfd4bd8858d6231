"""The pipeline from a planned sweep to the cache, its budget of time, and ``tilekern.tune``; with no GPU."""

import hashlib
import itertools
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import rank_jobs
import torch
from one_record import asked_for_nothing
from recorded import Known, RecordedExecutor
from transformers import Qwen3Config, Qwen3ForCausalLM
from tuning_samples import SMALL, THREE, WIDE, needs_compiler

import tilekern
from tilekern.cache import FolderLayer, Pack, PackLayer, Store, default_layers
from tilekern.cache.keys import parse_problem_key
from tilekern.cache.trust.signing import SigningKey, generate_key
from tilekern.errors import InputError
from tilekern.kernels import spec_named
from tilekern.patch.registry import known_ops
from tilekern.runtime import dispatch
from tilekern.runtime.dispatch import find
from tilekern.runtime.recorder import Trace, document
from tilekern.spec import INVARIANT
from tilekern.spec.targets import resolve
from tilekern.tuning import cli, pipeline
from tilekern.tuning.budget import Budget, Worth, is_as_good, served_by, turns_by_gain, worths_of
from tilekern.tuning.measure.stage import measure_all
from tilekern.tuning.pipeline import NOT_COMPILED, NOT_MEASURED, Options, Pipeline
from tilekern.tuning.plan.models import plan_of_model
from tilekern.tuning.plan.steps import Planned, Steps
from tilekern.tuning.predict.estimating import artifact_s, problem_s
from tilekern.tuning.predict.gains import GAINS, OTHER_GAIN
from tilekern.tuning.predict.roofline import launch_s
from tilekern.tuning.publishing import keep_winners, pack_paths, winners, write_packs
from tilekern.tuning.sweep.folder import Sweep
from tilekern.tuning.sweep.plan import PlanFile
from tilekern.tuning.terminal import print_result

FOUR = [*THREE, WIDE]
# The code of an invariant kernel that is not the fastest.
ANOTHER = b"\x7fELF of another"
TOOLS = {"key": "tileiras-1-cuda_tile-1", "tileiras": "1", "cuda_tile": "1"}


@pytest.fixture
def start(both: Sweep, monkeypatch, tmp_path: Path):
    """A pipeline over the four problems, of which nothing is done; it answers from what was compiled and measured."""

    def run(gpu="H200", executor=None, pool=None, folder="sweep", tell=lambda *_: None, **options) -> Pipeline:
        monkeypatch.setattr(pipeline, "here", lambda: gpu and resolve(gpu))
        monkeypatch.setattr("tilekern.tuning.executors.local.LocalExecutor", lambda *_: executor or RecordedExecutor())
        monkeypatch.setattr(pipeline, "compile_in_order", pool or Known(both))
        # The packs of the wheel have records of some of these sizes.
        monkeypatch.setattr(pipeline, "default_layers", lambda root, **_: [FolderLayer(root, "cache")])
        sweep = both.again(tmp_path / folder)
        return Pipeline(sweep, Store(tmp_path / "cache"), Options(**options), tell)

    return run


def records(root: Path) -> dict[int, str]:
    """How each record of a cache was chosen, by the problem's rows and columns."""
    return {tuple(e.record.problem.values())[:2]: e.record.provenance for e in Store(root / "cache").entries()}


def sizes(named) -> list[tuple[int, int]]:
    return [tuple(problem.values())[:2] for _, problem in named]


@needs_compiler
class TestRun:
    def test_both_stages_at_once_publish_what_they_publish_apart(self, start, tmp_path, monkeypatch):
        told = []
        result = start(tell=lambda *said: told.append(said)).run()
        assert [winner.record.provenance for winner in result.winners] == ["measured"] * 4
        assert records(tmp_path) == dict.fromkeys(sizes(FOUR), "measured")
        assert (result.is_whole, result.left_out, result.notes) == (True, [], [])
        assert result.seconds.keys() == {"compile", "measure"}
        assert [said for said in told if said[0] == "measure"][-1] == ("measure", 4, 4)
        monkeypatch.setattr(Pipeline, "_has_room_for_both", lambda _: False)
        apart = start(folder="apart").run()
        assert [w.as_json() for w in apart.winners] == [w.as_json() for w in result.winners]

    @pytest.fixture
    def classed(self, start, tmp_path):
        """Give a record of the cache an invariant kernel, and change it; return the record before, and the kernel."""

        def change(variant="aligned", **changes):
            start().run()
            store = Store(tmp_path / "cache")
            record = next(iter(store.entries())).record
            config = dict(record.artifacts[variant].config)
            facts = {"config": config, "bits": "a", "median_us": 1.0, "generic": False}
            artifacts, blobs = dict(record.artifacts), {digest: store.read_blob(digest) for digest in record.digests}
            if config != record.config:
                other = hashlib.sha256(ANOTHER).hexdigest()
                blobs[other] = ANOTHER
                same = msgspec.structs.replace(
                    artifacts["aligned"], sha256=other, size=len(ANOTHER), config=config
                )  # fmt: skip
                artifacts[INVARIANT] = same
            changes |= {"measurement": record.measurement | {INVARIANT: facts}, "artifacts": artifacts}
            store.write(msgspec.structs.replace(record, **changes), blobs)
            return record, facts

        return change

    @pytest.mark.parametrize("variant", ["aligned", "generic"])
    def test_a_run_without_classes_takes_none_away(self, start, classed, tmp_path, variant):
        """The invariant kernel stays, with its artifact where the winner is another."""
        before, facts = classed(variant)
        result = start(folder="again").run()
        assert result.notes == []
        store = Store(tmp_path / "cache")
        record = next(e.record for e in store.entries() if e.record.problem == before.problem)
        assert record.measurement[INVARIANT] == facts
        assert (INVARIANT in record.artifacts) == (variant == "generic")
        assert record.config == before.config
        if variant == "generic":
            assert store.read_blob(record.artifacts[INVARIANT].sha256) == ANOTHER

    def test_a_run_that_signs_takes_no_code_from_a_cache(self, start, classed, tmp_path):
        """Nobody knows who made it: the key's owner would say to all who trust it that they did."""
        classed("generic")
        generate_key(tmp_path / "mine.key")
        result = start(folder="again", key=SigningKey(tmp_path / "mine.key")).run()
        assert any("have none now: 1; tune them with --invariant" in note for note in result.notes)
        pack = Pack(Path(result.results))
        assert len(pack.signatures()) == 4
        assert hashlib.sha256(ANOTHER).hexdigest() not in {
            x for one in pack.records for x in pack.read_record(one).digests
        }

    def test_a_class_of_another_toolkit_stays_in_its_record(self, start, classed, tmp_path):
        """Of the same config another compiler may make code of another class."""
        before, _ = classed(toolkit={**TOOLS, "key": "tileiras-0-cuda_tile-0"})
        store = Store(tmp_path / "cache")
        for made in (entry for entry in store.entries() if entry.record.toolkit == before.toolkit):
            made.path.unlink()
        assert start(folder="again").run().notes == []
        found = [e.record for e in Store(tmp_path / "cache").entries() if e.record.problem == before.problem]
        classes = {record.toolkit["key"]: INVARIANT in record.measurement for record in found}
        assert classes == {"tileiras-0-cuda_tile-0": True, before.toolkit["key"]: False}

    def test_a_class_of_other_source_is_lost_and_said(self, start, classed):
        classed(source_digest="0" * 64)
        [note] = start(folder="again").run().notes
        assert "had a kernel for tilekern.invariant() and have none now: 1; tune them with --invariant" in note
        assert start(folder="once more").run().notes == []

    @pytest.mark.parametrize(("gpu", "words"), [(None, "no GPU here"), ("B200", "the GPU here is a B200, not a H200")])
    def test_where_the_gpu_is_not_the_winners_are_predicted(self, start, tmp_path, gpu, words):
        result = start(gpu).run()
        assert records(tmp_path) == dict.fromkeys(sizes(FOUR), "predicted")
        assert result.notes == [f"{words}: the measure stage is left out and the winners are predicted"]

    def test_one_stage_alone_says_what_comes_next(self, start, tmp_path):
        planned = start(stages=["plan"])
        assert "4 problems are planned in" in planned.run().notes[0]
        compiled = Pipeline(planned.sweep, planned.store, Options(["compile"])).run()
        assert compiled.notes == [f"carry {tmp_path / 'sweep'} to the target and run --stages measure --sweep "
                                  f"{tmp_path / 'sweep'}"]  # fmt: skip
        assert len(compiled.winners) == 4
        assert not (tmp_path / "cache" / "v1").exists()
        measured = Pipeline(planned.sweep, planned.store, Options(["measure"])).run()
        assert [winner.record.provenance for winner in measured.winners] == ["measured"] * 4

    def test_only_measured_winners_are_published_where_that_is_asked(self, start, tmp_path):
        result = start(gpu=None, only_measured=True).run()
        assert result.winners == []
        assert result.results is None
        assert records(tmp_path) == {}

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"strategy": "luck"}, "unknown strategy 'luck'; known: race, exhaustive"),
            ({"executor": "slurm"}, "unknown executor 'slurm'; known: local, ray, ray://HOST:PORT"),
            ({"executor": "ray://"}, "unknown executor 'ray://'; known: local, ray, ray://HOST:PORT"),
            ({"executor": "ray://head"}, "unknown executor 'ray://head'; known: local, ray, ray://HOST:PORT"),
            ({"stages": ["paint"]}, "unknown stage 'paint'; known: plan, compile, measure"),
            ({"jobs": 10_000}, "--jobs 10000 is too many"),
            ({"jobs": 1.5}, "jobs must be a whole number of at least 1, got 1.5"),
            ({"gpus": 0}, "gpus must be a whole number of at least 1, got 0"),
            ({"budget_s": float("nan")}, "budget_s must be a number of seconds, got nan"),
            ({"timeout_s": "60"}, "timeout_s must be a number of seconds, got '60'"),
        ],
    )
    def test_an_option_that_cannot_be_is_refused_before_anything_is_written(self, options, words):
        with pytest.raises(InputError, match=words):
            Options(**options)


class TestWorth:
    def test_the_most_gain_per_second_comes_first_and_what_is_done_before_it(self, h200):
        a, b, c, d = FOUR
        worths = {a: Worth(1e-3, 10), b: Worth(9e-4, 1), c: Worth(0.0, 5), d: Worth(1e-6, 0)}
        assert list(turns_by_gain(worths, h200)) == [d, b, a, c]

    def test_what_is_timed_behind_a_kernel_comes_before_it(self, h200):
        spec = spec_named("rms_norm_backward")
        problem = spec.problem(rows=2048, columns=128, dtype="bfloat16", weight_dtype="bfloat16")
        near, far, other = (SMALL[0], SMALL[1].but(rows=512)), (SMALL[0], SMALL[1].but(rows=1 << 16)), WIDE
        worths = {(spec.name, problem): Worth(1e-3, 1)} | {named: Worth(1e-9, 1) for named in (other, far, near)}
        assert list(turns_by_gain(worths, h200))[:2] == [near, (spec.name, problem)]

    def test_a_gain_is_that_of_all_launches_of_a_step(self, both, tmp_path, h200):
        sweep = Sweep(tmp_path)
        sweep.begin(h200, "test", [*FOUR], both.limits, launches={THREE[0]: 57, THREE[1]: 1})
        how = {"jobs": 2, "timeout_s": 60.0, "sweeps": []}
        worths = worths_of(sweep, {}, gpus=0, **how)
        one = launch_s(*THREE[1], h200) * GAINS["column_sum"]
        assert worths[THREE[1]].gain_s == pytest.approx(one)
        assert worths[THREE[0]].gain_s == pytest.approx(57 * launch_s(*THREE[0], h200) * GAINS["column_sum"])
        assert worths[WIDE].gain_s == 0, "asked for only if another config wins"
        measured = worths_of(sweep, {}, gpus=1, **how)
        assert all(measured[named].cost_s > worths[named].cost_s > 0 for named in FOUR)
        assert worths_of(both, {}, gpus=1, **how)[WIDE].cost_s == 0
        assert 0 < OTHER_GAIN < min(GAINS.values()) < 1
        assert {spec_named(kernel).name for kernel in GAINS} == set(GAINS)

    def test_a_tenth_of_the_time_brings_most_of_the_gain_that_an_h200_measured(self, h200):
        """Of 143 problems of Qwen3-8B the default's and the best time were measured; order and costs are estimated."""
        rows = json.loads((Path(__file__).parent / "data" / "h200_races.json").read_text())["rows"]
        found = []
        for row in rows:
            kernel, many = row["kernel"], row["candidates"]
            flags = {d.name: False for d in spec_named(kernel).dimensions if d.kind == "flag"}
            problem = spec_named(kernel).problem(**flags | parse_problem_key(row["problem"]))
            cost_s = problem_s(kernel, problem, many, h200) + many * artifact_s(kernel, {}) / 2
            worth = Worth(launch_s(kernel, problem, h200) * GAINS.get(kernel, OTHER_GAIN), cost_s)
            found.append((worth, row["default_us"] - row["fastest_us"][0]))
        left_s, gained = sum(worth.cost_s for worth, _ in found) / 10, 0.0
        for worth, gain_us in sorted(found, key=lambda pair: pair[0].rank):
            left_s -= worth.cost_s
            gained += gain_us * (left_s >= 0)
        assert gained >= 0.8 * sum(gain_us for _, gain_us in found)

    @needs_compiler
    def test_a_record_that_cannot_be_bettered_leaves_nothing_to_gain(self, start, tmp_path, h200):
        start().run()
        served = served_by(FOUR, h200, default_layers(tmp_path / "cache", looking=True))
        near = THREE[0][0], THREE[0][1].but(rows=1 << 15)
        assert all(is_as_good(hit, "measured") and is_as_good(hit, "predicted") for hit in served.values())
        nearest = served_by([near], h200, default_layers(tmp_path / "cache", looking=True))[near]
        assert nearest is not None
        assert not is_as_good(nearest, "predicted")
        assert not is_as_good(None, "predicted")
        fresh = Sweep(tmp_path / "fresh")
        fresh.begin(h200, "test", FOUR)
        worths = worths_of(fresh, served, jobs=1, gpus=1, timeout_s=60.0, sweeps=[])
        assert {worth.gain_s for worth in worths.values()} == {0.0}

    def test_a_plan_counts_the_launches_of_all_layers(self, tmp_path, h200):
        """28 layers, of which one is traced, with two norms of the hidden size each and one behind them."""
        planned = plan_of_model("qwen3-0.6b", Steps([2048], ops=["rms_norm", "attention"]), h200)
        counts = {kernel: planned.launches.get((kernel, problem)) for kernel, problem in planned.problems}
        assert counts["attention_forward"] == 28
        assert [n for named, n in planned.launches.items() if named[0] == "attention_dkdv_kept"] == [28]
        hidden = [n for n in planned.problems if n[0] == "rms_norm_backward" and n[1]["columns"] == 1024]
        assert [planned.launches[named] for named in hidden] == [57]
        for name in ("sweep.json", "traced.json"):
            (tmp_path / name).write_text(json.dumps(document(h200, "m", planned.problems, planned.launches)))
            assert PlanFile(tmp_path, name).read().launches == planned.launches


class TestBudget:
    def test_it_is_spent_when_its_time_is_over(self):
        budget = Budget(0.3, time.monotonic() - 0.1)
        with budget.counted(), budget.counted(0.5) as half:
            assert half.wait(5)
            assert not budget.spent.is_set()
            assert budget.spent.wait(5)
            assert 0.3 <= budget.used_s < 5
        with Budget(1, time.monotonic() - 2).counted() as late:
            assert late.wait(5)

    def test_problems_are_measured_in_their_turn_until_it_is_spent(self, both, tmp_path):
        sweep = both.again(tmp_path / "sweep")
        sweep.note("compiled", *both.compiled().values())
        for line in both.compiled().values():
            sweep.store(both.cubin(line["sha256"]))
        budget, executor = Budget(60, time.monotonic()), RecordedExecutor()

        def spend(done, _total):
            if done == 2:
                budget.spent.set()

        turns = {named: turn for turn, named in enumerate([WIDE, THREE[2], THREE[0], THREE[1]])}
        how = {"turns": turns, "is_over": budget.spent}
        measure_all(sweep, executor, keep_winners, progress=spend, **how)
        assert [task.problem for task in executor.tasks] == [WIDE[1], THREE[2][1]]
        budget.spent.clear()
        measure_all(sweep, executor, keep_winners, **how)
        assert [task.problem for task in executor.tasks[2:]] == [THREE[0][1], THREE[1][1]]
        assert len(sweep.races()) == 4

    @needs_compiler
    def test_finished_problems_are_published_and_the_rest_named(self, start, both, tmp_path, capsys):
        """The second problem to be measured is the last one."""
        runs, pool = [], Known(both)

        def spend(stage, done, _total):
            if stage == "measure" and done == 2:
                runs[0].budget.spent.set()

        first = start(tell=spend, budget_s=600.0, pool=pool)
        runs.append(first)
        result = first.run()
        order = sorted(FOUR, key=first._turns.get)
        assert sizes((w.kernel, w.problem) for w in result.winners if w.record.provenance == "measured") == sizes(
            sorted(order[:2], key=FOUR.index)
        )
        left = {(out.kernel, out.problem): out for out in result.left_out}
        assert left.keys() == set(order[2:])
        for out in left.values():
            assert (out.reason, out.provenance) in ((NOT_COMPILED, "default"), (NOT_MEASURED, "predicted"))
        published = {size: how for size, how in records(tmp_path).items() if how == "measured"}
        assert published.keys() == set(sizes(order[:2]))
        assert all(records(tmp_path).get(sizes([named])[0]) in (None, "predicted") for named in left)
        assert result.is_whole
        print_result(result)
        said = " ".join(capsys.readouterr().out.split())
        assert f"budget: {result.spent_s:.0f} s of 600 s spent; 2 problems are left out" in said
        assert f"left out: {order[-1][0]} {order[-1][1].key}: " in said
        compiled, again = list(pool.compiled), Known(both)
        rest = start(pool=again, budget_s=600.0).run()
        assert (rest.left_out, len(rest.winners)) == ([], 4)
        assert not set(again.compiled) & set(compiled), "compiled twice"
        assert sorted([*again.compiled, *compiled]) == sorted(both.compiled())
        assert records(tmp_path) == dict.fromkeys(sizes(FOUR), "measured")
        print_result(rest)
        assert "; nothing is left out" in capsys.readouterr().out

    @needs_compiler
    def test_a_partly_compiled_space_has_no_winner(self, start, both, tmp_path):
        runs = []

        def before(item):
            if len(runs[0].sweep.compiled()) == 3:
                runs[0].budget.spent.set()

        runs.append(start(gpu=None, pool=Known(both, before), budget_s=600.0))
        result = runs[0].run()
        assert 3 <= len(runs[0].sweep.compiled()) == result.compile["compiled"] < 5
        assert {out.reason for out in result.left_out} == {NOT_COMPILED}
        assert len(result.left_out) + len(result.winners) == 4
        assert set(records(tmp_path).values()) <= {"predicted"}
        assert len(records(tmp_path)) == len(result.winners) < 4
        assert result.as_json()["budget"]["left_out"][0]["reason"] == NOT_COMPILED
        # A measured record that the cache had serves on, whatever this run predicts.
        start(folder="whole").run()
        again = start(gpu=None, folder="third", budget_s=600.0, pool=Known(both, lambda _: again.budget.spent.set()))
        assert {out.provenance for out in again.run().left_out} == {"measured"}
        assert set(records(tmp_path).values()) == {"measured"}

    @needs_compiler
    def test_a_budget_that_is_too_short_for_anything_is_said(self, start):
        result = start(budget_s=1.0, began=time.monotonic() - 5).run()
        assert len(result.left_out) == 4
        assert (result.winners, result.is_whole, result.results) == ([], False, None)
        assert result.compile["compiled"] == 0
        assert result.spent_s > 5

    @needs_compiler
    def test_where_the_stages_run_apart_each_has_half(self, start, both, monkeypatch):
        monkeypatch.setattr(Pipeline, "_has_room_for_both", lambda _: False)
        slow = Known(both, lambda _: time.sleep(0.4))
        result = start(budget_s=2.0, pool=slow).run()
        assert 0 < len(slow.compiled) < len(both.compiled())
        assert result.left_out
        assert result.seconds.keys() == {"compile", "measure"}
        assert result.measure["wrong"] == 0

    def test_the_command_line_reads_it(self, capsys, tmp_path):
        for text, words in (("10 years", "is not a time in seconds"), ("0", "1<=x"), ("25h", "86400"), ("", "budget")):
            assert cli.main(["qwen3-8b", "--gpu", "B200", "--budget", text, "--cache-dir", str(tmp_path / "c")]) == 2
            assert words in capsys.readouterr().err
        assert cli.main(["qwen3-0.6b", "--gpu", "B200", "--budget", "10m", "--dry-run"]) == 2
        assert "leave it out with --dry-run" in capsys.readouterr().err
        assert not (tmp_path / "c").exists()

    @pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("10m", 600), ("1.5h", 5400)])
    def test_times_have_units(self, text, seconds):
        from tilekern.tuning.options import Seconds

        assert Seconds(least=1).convert(text, None, None) == seconds


class TestTune:
    @pytest.mark.parametrize(
        "lines",
        [
            "import tilekern; before = tilekern.tune; import tilekern.tune; after = tilekern.tune",
            "import tilekern.tune; before = tilekern.tune; from tilekern import tune as after",
            "from tilekern import tune as before; import tilekern; after = tilekern.tune",
        ],
    )
    @pytest.mark.processes
    def test_it_can_be_called_however_it_was_imported(self, lines):
        check = "import inspect; print(before is after, callable(after), *inspect.signature(after).parameters)"
        ran = subprocess.run(
            [sys.executable, "-W", "error", "-c", f"{lines}\n{check}"], capture_output=True, text=True, check=False
        )
        assert ran.stdout.startswith("True True model tokens "), ran.stderr

    def test_a_model_that_is_not_known_is_named(self):
        with pytest.raises(InputError, match="unknown model 'no such model'"):
            tilekern.tune("no such model", gpu="B200")
        assert tilekern.tune.main.__module__ == "tilekern.tune"

    @pytest.mark.parametrize("model", ["qwen3-8b", Trace(resolve("H200"))])
    def test_a_batch_is_of_a_model(self, model):
        with pytest.raises(InputError, match=f"pass the model with it, not a {type(model).__name__}, or tokens"):
            tilekern.tune(model, {"input_ids": torch.zeros(1, 8, dtype=torch.long)}, gpu="H200")

    @needs_compiler
    @pytest.mark.processes
    @pytest.mark.usefixtures("default_configs")
    def test_the_batch_of_a_job_is_tuned_and_the_job_s_next_calls_find_it(self, tmp_path, monkeypatch):
        model = Qwen3ForCausalLM(Qwen3Config(
            hidden_size=80, num_attention_heads=5, num_key_value_heads=1, head_dim=16, intermediate_size=208,
            vocab_size=331, num_hidden_layers=2,
        )).to(torch.bfloat16)  # fmt: skip
        tilekern.apply_to_model(model, **{op: op == "swiglu" for op in known_ops()})
        ids = torch.zeros(2, 48, dtype=torch.long)
        spec, device, sizes = spec_named("swiglu_forward"), torch.device("cuda", 0), (96, 208, torch.bfloat16)
        with asked_for_nothing(tmp_path / "cache", monkeypatch):
            dispatch.set_miss_policy("fallback")
            assert dispatch.plan_for(spec, device, *sizes) is None
            result = tilekern.tune(model, {"input_ids": ids, "labels": ids}, gpu="H200", jobs=2, budget_s=600)
            assert {(w.kernel, w.problem["rows"]) for w in result.winners if w.kernel.startswith("swiglu")} == {
                ("swiglu_forward", 128), ("swiglu_backward_remake", 128),
            }  # fmt: skip
            assert dispatch.plan_for(spec, device, *sizes) is not None
        tilekern.reset()

    @pytest.mark.processes
    def test_the_module_runs_as_before(self):
        command = [sys.executable, "-W", "error", "-m", "tilekern.tune", "--version"]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (ran.stdout, ran.stderr) == (f"tilekern {tilekern.__version__}\n", "")

    @needs_compiler
    @pytest.mark.processes
    @pytest.mark.usefixtures("default_configs")
    def test_a_traced_step_is_tuned_and_found(self, tmp_path):
        from tilekern import ops

        with tilekern.trace(tmp_path / "plan.json", gpu="H200") as traced:
            x = torch.empty(64, 96, dtype=torch.bfloat16, device="meta")
            for _ in range(3):
                ops.swiglu(x, x)
        cache = tmp_path / "cache"
        named = ("swiglu_forward", spec_named("swiglu_forward").problem(rows=64, columns=96, dtype="bfloat16"))
        assert traced.launches[named] == 3
        nothing = tilekern.tune(traced, budget_s=1e-6, cache_dir=cache)
        assert [(out.kernel, out.reason) for out in nothing.left_out] == [(named[0], NOT_COMPILED)]
        assert nothing.winners == []
        told = []
        result = tilekern.tune(traced, jobs=2, budget_s=600, cache_dir=cache, tell=lambda *said: told.append(said[0]))
        [winner] = result.winners
        assert (winner.kernel, winner.problem, winner.record.provenance) == (*named, "predicted")
        assert (result.left_out, result.is_whole, result.budget_s) == ([], True, 600)
        assert 0 < result.seconds["compile"] < result.spent_s
        assert dict.fromkeys(told) == dict.fromkeys(["compile", "publish"])
        hit = find(spec_named(named[0]), named[1], resolve("H200"), layers=default_layers(cache, looking=True))
        assert hit.record == winner.record
        again = tilekern.tune(str(tmp_path / "plan.json"), gpu="H200", cache_dir=cache)
        assert again.compile["compiled"] == 0
        assert again.winners[0].record.config == winner.record.config
        with pytest.raises(InputError, match="the step was traced for H200, not B200"):
            tilekern.tune(traced, gpu="B200", cache_dir=cache)


# Ranks of a job that tunes before its first step; the pipeline's work is the argument's.
RANKS = """
import os, sys, torch.distributed as dist
from one_record import GPU, H200, SIZES, SPEC
import tilekern.tune
from tilekern.runtime import dispatch
meet, rank, ranks, root, fails = sys.argv[1:]
dispatch.here = lambda _device=None: H200
os.environ["TILEKERN_CACHE_DIR"] = os.path.join(root, rank)
dist.init_process_group("gloo", init_method=meet, rank=int(rank), world_size=int(ranks))
def run():
    if fails == "fails":
        raise ValueError("it fails")
    dispatch.compile_default(SPEC, SPEC.bucketed(SPEC.problem(rows=50, columns=48, dtype="bfloat16")), H200)
    return "tuned"
try:
    print(sys.modules["tilekern.tune"]._by_one_rank(run))
except ValueError as error:
    print(error)
dispatch.set_miss_policy("fallback")
print(dispatch.plan_for(SPEC, GPU, *SIZES) is not None)
"""


@needs_compiler
@pytest.mark.processes
@pytest.mark.parametrize(
    ("fails", "said"), [("no", ["tuned True", "None True"]), ("fails", ["it fails False", "None False"])]
)
def test_one_rank_tunes_and_all_run_what_it_found(tmp_path, fails, said):
    """Each has a cache of its own, as on two machines."""
    ended = rank_jobs.finish(rank_jobs.start(tmp_path, RANKS, 2, tmp_path, fails, TILEKERN_ON_MISS="compile"))
    assert [" ".join(out.split()) for out, _, _ in ended] == said, [errors for _, errors, _ in ended]


class TestPacks:
    def test_each_model_has_a_pack_of_what_it_asks_for(self, both, tmp_path, h200):
        models = [Planned("a", (SMALL, WIDE)), Planned("Acme/B b", (SMALL,)), Planned("/x/c/config.json-tp2", ())]
        paths = pack_paths(tmp_path / "new", models, h200)
        assert [path.name for path in paths] == ["a-h200.pack", "b-b-h200.pack", "c-tp2-h200.pack"]
        written = write_packs(paths, list(winners(both, TOOLS)))
        assert list(written.values()) == [2, 1, 0]
        assert [list(columns_in(path)) for path in paths] == [[128, 4096], [128], []]

    def test_packs_of_one_name_or_of_no_model_are_refused(self, tmp_path, h200):
        with pytest.raises(InputError, match=r"--packs: m and Acme/M would both be m-h200.pack"):
            pack_paths(tmp_path, [Planned("m", ()), Planned("Acme/M", ())], h200)
        with pytest.raises(InputError, match="no MODEL is named"):
            pack_paths(tmp_path, [], h200)

    def test_the_command_line_writes_them(self, compiled_sweep, monkeypatch, tmp_path, capsys, h200):
        monkeypatch.setattr(pipeline, "here", lambda: None)
        sweep = shutil.copytree(compiled_sweep.folder, tmp_path / "sweep")
        model = tmp_path / "acme.json"
        model.write_text(json.dumps(document(h200, "acme", [SMALL])))
        where = ["--gpu", "H200", "--sweep", str(sweep), "--cache-dir", str(tmp_path / "cache")]
        assert cli.main([str(model), *where, "--packs", str(tmp_path / "packs"), "--json"]) == 0
        pack = tmp_path / "packs" / "acme-h200.pack"
        assert json.loads(capsys.readouterr().out)["packs"] == {str(pack): 1}
        assert columns_in(pack) == [SMALL[1]["columns"]]
        assert cli.main([str(model), *where, "--stages", "plan,compile", "--packs", "x"]) == 2
        assert "--packs needs a run that plans and measures" in capsys.readouterr().err
        assert cli.main(["--plan", str(model), *where, "--packs", "x"]) == 2
        assert "no MODEL is named" in capsys.readouterr().err


def columns_in(pack: Path) -> list[int]:
    layer = PackLayer(pack, "pack")
    places = itertools.product(layer.targets(), [SMALL[0]])
    return sorted(
        problem["columns"]
        for target, kernel in places
        for tools in layer.toolkits(target)
        for problem in layer.problems(target, tools, kernel)
    )
