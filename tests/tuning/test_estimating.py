"""Dry runs: the counts against the sweep that follows, and the times against what it took."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from recorded import RIGHT
from tuning_samples import SMALL

from tilekern.errors import InputError
from tilekern.kernels import all_specs, spec_named
from tilekern.spec import Problem
from tilekern.spec.targets import Target
from tilekern.tuning import cli, pipeline
from tilekern.tuning.commands.status import standing
from tilekern.tuning.compile.stage import compile_all, default_jobs, jobs_of, wanted
from tilekern.tuning.plan.models import plan_of_model
from tilekern.tuning.plan.steps import Steps
from tilekern.tuning.predict.estimating import (
    CANDIDATE_ROOFLINES,
    CANDIDATE_S,
    COMPILE_S,
    COMPILE_START_S,
    MEASURE_START_S,
    OVER_ROOFLINE,
    PROBLEM_ROOFLINES,
    PROBLEM_S,
    SAMPLE_S,
    Estimate,
    count,
    earlier_sweeps,
    estimate_compile,
    estimate_measure,
    estimate_together,
)
from tilekern.tuning.predict.roofline import launch_s
from tilekern.tuning.strategies.race import LEAST_ROUNDS, ROUNDS
from tilekern.tuning.sweep.candidates import candidates
from tilekern.tuning.sweep.folder import Sweep

RUN = {"run": "1", "stage": "measure", "host": "here", "process": 1, "started": "", "ended": True}


def sums(columns: int) -> tuple[str, Problem]:
    return "column_sum", spec_named("column_sum").problem(rows=256, columns=columns, dtype="bfloat16")


def files(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*")}


@pytest.mark.slow
def test_the_counts_of_a_plan_are_those_of_the_sweep(tmp_path: Path, h200: Target):
    problems = plan_of_model("qwen3-0.6b", Steps([2048]), h200).problems
    sweep = Sweep(tmp_path / "sweep")
    counts = count(problems, h200, sweep, "race")
    assert not sweep.folder.exists()
    for (kernel, problem), found in zip(problems, counts, strict=True):
        spec, items = spec_named(kernel), candidates(kernel, problem, h200)
        assert found.candidates == len(items)
        assert found.space - sum(found.ruled_out.values()) == len(list(spec.space.candidates(problem, h200)))
        assert 0 < found.to_measure <= found.candidates
        assert found.settled == found.compiled == 0
    reasons = {reason for found in counts for reason in found.ruled_out}
    assert reasons
    assert "" not in reasons
    sweep.begin(h200, "test", problems)
    assert sum(found.artifacts for found in counts) == len(list(wanted(sweep)))


def test_finished_candidates_are_not_counted_again(compiled_sweep: Sweep, tmp_path: Path, h200: Target):
    (found,) = count([SMALL], h200, compiled_sweep, "race")
    assert found.compiled == found.artifacts > 0
    assert estimate_compile([found], 2, [compiled_sweep]).seconds == 0
    lines = (compiled_sweep.folder / "compiled.jsonl").read_text().splitlines()
    half = Sweep(tmp_path)
    (tmp_path / "compiled.jsonl").write_text("\n".join(lines[: len(lines) // 2]) + "\n")
    (tmp_path / "artifacts").symlink_to(compiled_sweep.folder / "artifacts")
    (left,) = count([SMALL], h200, half, "race")
    assert left.compiled == len(lines) // 2
    assert left.artifacts == len(lines)
    measured = next(item for item in candidates(*SMALL, h200) if item.artifact in half.compiled())
    check = {"passed": False, "relative_error": 1.0, "elementwise_error": 1.0, "reason": "wrong"}
    half.note("measured", {"candidate": measured.key, "check": check})
    (after,) = count([SMALL], h200, half, "race")
    assert (after.settled, after.to_measure) == (left.settled + 1, left.to_measure - 1)


def test_a_lost_artifact_is_counted_as_one_to_compile(compiled_sweep: Sweep, tmp_path: Path, h200: Target):
    lines = (compiled_sweep.folder / "compiled.jsonl").read_text()
    (tmp_path / "compiled.jsonl").write_text(lines)
    (found,) = count([SMALL], h200, Sweep(tmp_path), "race")
    assert found.compiled == 0


@pytest.mark.processes
def test_what_ran_out_of_time_counts_again_for_a_run_that_gives_more(compiled_sweep: Sweep, tmp_path: Path, capsys):
    sweep = Sweep(Path(shutil.copytree(compiled_sweep.folder, tmp_path / "sweep")))
    late, wrong = candidates(*SMALL, sweep.target)[1:3]
    for item, more in ((late, {"gave_up_after_s": 5.0}), (wrong, {})):
        line = sweep.compiled()[item.artifact]
        failed = {"key": item.artifact, "status": "failed", "reason": "no", "toolkit": line["toolkit"], **more}
        sweep.note("compiled", failed)

    def counted(*options: str, stages: str = "compile,measure") -> dict[str, int]:
        arguments = ["--stages", stages, "--sweep", str(sweep.folder), "--cache-dir", str(tmp_path), *options]
        totals: dict[str, int] = json.loads(dry_run(capsys, *arguments, "--json"))["totals"]
        return totals

    same, more = counted("--timeout", "5"), counted("--timeout", "6")
    assert same["compiled"] == same["artifacts"]
    assert counted("--timeout", "6", stages="measure") == same
    assert (more["compiled"], more["to_measure"]) == (same["compiled"] - 1, same["to_measure"] + 1)
    compile_all(sweep, 1, timeout_s=6)
    assert sweep.compiled()[late.artifact]["status"] == "ok"


@pytest.mark.slow
@pytest.mark.nightly
def test_the_compile_estimate_is_near_a_real_run(tmp_path: Path, h200: Target):
    """From the journals of a run just before and one just after it; of sizes that no other test has compiled.

    Within a factor of two on a quiet machine; a busy one is not as busy for all three.
    """
    jobs = default_jobs()
    runs = {columns: Sweep(tmp_path / str(columns)) for columns in (144, 528, 1040)}
    counts = count([sums(528)], h200, runs[528], "race")
    seconds = {}
    for columns, sweep in runs.items():
        # Of what the estimate is made from, a third says what a candidate takes.
        configs = [item.config for item in candidates(*sums(columns), h200)][:: 1 if columns == 528 else 3]
        sweep.begin(h200, "test", [sums(columns)], {sums(columns): configs})
        seconds[columns] = compile_all(sweep, jobs).seconds
    estimate = estimate_compile(counts, jobs, [runs[144], runs[1040]])
    # The server that has loaded the front end may be there from a test before.
    assert seconds[528] / 4 < estimate.seconds < 4 * seconds[528] + COMPILE_START_S, (estimate, seconds)
    assert "the means of" in estimate.basis


def test_without_a_journal_the_shipped_means_and_the_load_say_how_long(monkeypatch, tmp_path: Path, h200: Target):
    counts = count([sums(128)], h200, Sweep(tmp_path), "race")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)))
    core_s = counts[0].artifacts * COMPILE_S["column_sum"]
    for load, slower in ((0.0, 1), (3.0, 1), (7.0, 2)):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, load, load))
        one = estimate_compile(counts, 1, [])
        assert one.seconds == pytest.approx(COMPILE_START_S + slower * core_s)
        assert "shipped means" in one.basis
        assert ("this machine's load of 7.0" in one.basis) == (slower == 2)
    assert set(COMPILE_S) <= set(all_specs())


def test_measuring_is_estimated_from_the_shipped_sweep_and_then_from_the_sweeps_here(
    compiled_sweep: Sweep, tmp_path: Path, h200: Target
):
    counts = count([SMALL], h200, compiled_sweep, "race")
    todo = counts[0].to_measure
    shipped = estimate_measure(counts, h200, 1, [])
    launches_s = (PROBLEM_ROOFLINES + CANDIDATE_ROOFLINES * todo) * launch_s(*SMALL, h200)
    assert shipped.seconds == pytest.approx(MEASURE_START_S + PROBLEM_S + CANDIDATE_S * todo + launches_s)
    assert "one sweep of an H200" in shipped.basis
    assert estimate_measure(counts, h200, 2, []).seconds == pytest.approx((shipped.seconds + MEASURE_START_S) / 2)
    # A sweep of the same problem that took twice as long as the shipped one would have.
    earlier = Sweep(tmp_path / "sweeps" / "earlier")
    earlier.begin(h200, "test", [SMALL])
    check = {"passed": True, "relative_error": 0.0, "elementwise_error": 0.0, "reason": None}
    earlier.note("measured", *({"candidate": item.key, "check": check} for item in candidates(*SMALL, h200)[:todo]))
    run = RUN | {"seconds": 2 * shipped.seconds}
    (earlier.folder / "runs.jsonl").write_text(json.dumps(run) + "\n")
    found = estimate_measure(counts, h200, 1, earlier_sweeps(tmp_path, compiled_sweep))
    assert found.seconds == pytest.approx(2 * shipped.seconds, rel=0.1)
    assert "sweeps of a H200 took here" in found.basis


def test_an_exhaustive_race_is_estimated_to_take_all_its_rounds(compiled_sweep: Sweep, tmp_path: Path, h200: Target):
    counts = count([SMALL], h200, compiled_sweep, "exhaustive")
    raced, whole = (estimate_measure(counts, h200, 1, [], name) for name in ("race", "exhaustive"))
    sample_s = SAMPLE_S + OVER_ROOFLINE * launch_s(*SMALL, h200)
    assert whole.seconds == pytest.approx(raced.seconds + ROUNDS * counts[0].to_measure * sample_s)
    assert f"up to {ROUNDS} samples of each" in whole.basis
    # Sizes that take longer than a race may: it stops after the least number of rounds.
    huge = dataclasses.replace(counts[0], problem=SMALL[1].but(rows=1 << 24, columns=1 << 14))
    raced_s = estimate_measure([huge], h200, 1, []).seconds
    assert raced_s > raced.seconds + 60 * launch_s(huge.kernel, huge.problem, h200)
    left_s = estimate_measure([huge], h200, 1, [], "exhaustive").seconds - raced_s
    sample_s = SAMPLE_S + OVER_ROOFLINE * launch_s(huge.kernel, huge.problem, h200)
    assert left_s == pytest.approx(LEAST_ROUNDS * huge.to_measure * sample_s)
    # What one strategy took says nothing of another.
    earlier = Sweep(tmp_path)
    earlier.begin(h200, "test", [SMALL])
    earlier.note("measured", {"candidate": candidates(*SMALL, h200)[0].key, "check": RIGHT})
    earlier.note("races", {"race": "1", "kernel": SMALL[0], "problem": SMALL[1].key, "strategy": "race", "untimed": {}})
    (tmp_path / "runs.jsonl").write_text(json.dumps(RUN | {"seconds": 900.0}))
    assert estimate_measure(counts, h200, 1, [earlier], "exhaustive") == whole
    assert estimate_measure(counts, h200, 1, [earlier], "race").seconds > 100


@pytest.mark.slow
@pytest.mark.nightly
def test_a_whole_sweep_of_an_h200_is_estimated_as_it_was(tmp_path: Path, h200: Target):
    """105 problems of Qwen3-8B took 94 s, where the figures come from; these are 102 of today, of fewer candidates."""
    problems = plan_of_model("qwen3-8b", Steps([1024, 2048, 4096, 8192, 16384]), h200).problems
    counts = count(problems, h200, Sweep(tmp_path), "race")
    assert 60 < estimate_measure(counts, h200, 1, []).seconds < 115


def test_sizes_that_take_long_are_estimated_to(tmp_path: Path, h200: Target):
    """No less than one launch of each candidate at the roofline, on a GPU that was measured before as on another."""
    empty, steps = Sweep(tmp_path / "none"), [Steps([tokens], ops=["attention"]) for tokens in (8192, 1 << 20)]
    small, large = (plan_of_model("qwen3-8b", step, h200).problems for step in steps)
    counts, many = count(small, h200, empty, "race"), count(large, h200, empty, "race")
    least_s = sum(launch_s(item.kernel, item.problem, h200) * item.to_measure for item in many)
    assert least_s > 100
    assert estimate_measure(counts, h200, 1, []).seconds < 60
    assert estimate_measure(many, h200, 1, []).seconds > least_s
    earlier = Sweep(tmp_path / "sweeps" / "earlier")
    earlier.begin(h200, "test", small)
    check = {"candidate": candidates(*small[0], h200)[0].key, "check": RIGHT}
    earlier.note("measured", check)
    (earlier.folder / "runs.jsonl").write_text(json.dumps(RUN | {"seconds": 9.0}) + "\n")
    assert estimate_measure(many, h200, 1, [earlier]).seconds > least_s


def dry_run(capsys, *arguments: str) -> str:
    assert cli.main([*arguments, "--dry-run"]) == 0
    return capsys.readouterr().out


def test_a_dry_run_prints_the_plan_and_writes_nothing(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    small = ("qwen3-0.6b", "--gpu", "B200", "--ops", "swiglu", "--tokens", "64", "--cache-dir", str(tmp_path / "cache"))
    said = dry_run(capsys, *small)
    for part in ("swiglu_forward", "64 3072 bfloat16", "starves the memory system; 6 of more", "compile: about",
                 "measure: about", "a dry run: nothing was written"):  # fmt: skip
        assert part in said
    found = json.loads(dry_run(capsys, *small, "--json"))
    assert {item["kernel"] for item in found["problems"]} == {"swiglu_forward", "swiglu_backward_remake"}
    totals = found["totals"]
    assert totals["problems"] == len(found["problems"])
    assert totals["space"] - totals["ruled_out"] <= totals["candidates"]
    assert found["estimate"]["compile"]["seconds"] > 0 < found["estimate"]["measure"]["seconds"]
    assert f"{totals['artifacts']} artifacts" in found["estimate"]["compile"]["basis"]
    assert not files(tmp_path)


def test_a_dry_run_of_a_planned_sweep_counts_what_it_holds(compiled_sweep: Sweep, tmp_path: Path, capsys):
    before = files(compiled_sweep.folder)
    found = json.loads(
        dry_run(capsys, "--stages", "measure", "--sweep", str(compiled_sweep.folder), "--cache-dir", str(tmp_path),
                "--json")
    )  # fmt: skip
    assert found["totals"]["compiled"] == found["totals"]["artifacts"] > 0
    assert found["estimate"]["compile"]["seconds"] == 0
    assert found["model"] == "test"
    assert found["notes"] == ["no GPU here: the measure stage runs on the target alone"]
    assert files(compiled_sweep.folder) == before


def test_a_plan_that_is_limited_to_some_configs_is_counted_so(compiled_sweep: Sweep, tmp_path: Path, capsys):
    kernel, problem = compiled_sweep.problems()[0]
    configs = [item.config for item in compiled_sweep.candidates(kernel, problem)][1:4]
    limited = Sweep(tmp_path / "sweep")
    limited.begin(compiled_sweep.target, "test", [(kernel, problem)], {(kernel, problem): configs})
    artifacts = {item.artifact for item in limited.candidates(kernel, problem) if not item.is_library}
    arguments = ("--stages", "compile", "--sweep", str(limited.folder), "--cache-dir", str(tmp_path), "--json")
    totals = json.loads(dry_run(capsys, *arguments))["totals"]
    assert (totals["space"], totals["ruled_out"], totals["candidates"]) == (3, 0, 4), "and the generic variant"
    assert totals["artifacts"] == len(artifacts)
    stages = standing(limited)
    assert stages["compile"]["artifacts"] == stages["compile"]["left"] == len(artifacts)
    assert min(stage["left_s"] for stage in (stages["compile"], stages["measure"])) > 0


def test_a_dry_run_refuses_what_the_run_would(compiled_sweep: Sweep, capsys):
    command = ["qwen3-0.6b", "--gpu", "B200", "--sweep", str(compiled_sweep.folder), "--dry-run"]
    assert cli.main(command) == 2
    assert "holds a sweep for H200, not B200" in capsys.readouterr().err


def test_a_dry_run_counts_on_the_gpus_of_this_host_where_they_are_the_target(monkeypatch, tmp_path: Path, capsys, h200):
    monkeypatch.setattr(pipeline, "here", lambda: h200)
    monkeypatch.setattr("tilekern.tuning.measure.gpu.devices", lambda: ["0", "1", "2"])
    small = ("qwen3-0.6b", "--gpu", "H200", "--ops", "swiglu", "--cache-dir", str(tmp_path))
    assert "over 3 GPUs" in dry_run(capsys, *small)
    assert "over 2 GPUs" in dry_run(capsys, *small, "--gpus", "2")
    assert "the measure stage is left out" not in dry_run(capsys, *small)


def test_a_dry_run_for_a_cluster_uses_the_size_that_it_is_given(tmp_path: Path, capsys):
    small = ("qwen3-0.6b", "--gpu", "H200", "--ops", "swiglu", "--cache-dir", str(tmp_path), "--executor", "ray")
    said = dry_run(capsys, *small, "--jobs", "64", "--gpus", "4")
    for part in ("over 64 cores", "over 4 GPUs", "the cluster was not asked what it has"):
        assert part in said
    assert "this machine's load" not in said


def test_workers_are_bounded_by_the_cores_that_are_to_run_them():
    here = default_jobs()
    assert [jobs_of(None), jobs_of(4 * here), jobs_of(None, 64), jobs_of(256, 64)] == [here, 4 * here, 64, 256]
    with pytest.raises(InputError, match=rf"--jobs {4 * here + 1} is too many for the {here} cores that this process"):
        jobs_of(4 * here + 1)
    with pytest.raises(InputError, match="--jobs 257 is too many for the 64 cores that the cluster has: at most 4"):
        jobs_of(257, 64)


@pytest.mark.parametrize(("compiles", "measures"), [(35.0, 94.0), (300.0, 94.0), (0.0, 94.0), (35.0, 0.0)])
def test_both_stages_at_once_take_about_as_long_as_the_longer_one(compiles, measures):
    found = estimate_together(Estimate(compiles, ""), Estimate(measures, ""))
    assert max(compiles, measures) <= found.seconds <= max(compiles, measures) + COMPILE_START_S
    assert ("compile" if compiles > measures else "measure") in found.basis
