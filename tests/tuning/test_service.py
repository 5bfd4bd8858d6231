"""The service: from a wanted list to records in the cache, also when it is killed or told to stop."""

import json
import os
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from recorded import RecordedExecutor
from service_samples import OTHER, REASON, Running, until, want
from tuning_samples import H200, SMALL, THREE, needs_compiler

from tilekern.cache import (
    Artifact,
    BestKernel,
    FolderLayer,
    Store,
    note_misses,
    note_wanted,
    read_wanted,
    wanted_name,
)
from tilekern.compile.toolchain import compile_candidate, toolkit
from tilekern.kernels import spec_named
from tilekern.runtime import dispatch
from tilekern.runtime.records import record_of
from tilekern.spec.targets import resolve
from tilekern.tuning import cli, pipeline
from tilekern.tuning.pipeline import Options
from tilekern.tuning.predict.roofline import launch_s
from tilekern.tuning.serve import history, loop
from tilekern.tuning.serve.history import Failures, History
from tilekern.tuning.serve.loop import Service, tune
from tilekern.tuning.serve.watched import MEASURED, OWN_OP, PREDICTED, WatchedCache, lost
from tilekern.tuning.sweep.folder import Sweep
from tilekern.tuning.sweep.plan import Named

pytestmark = [pytest.mark.processes, needs_compiler]


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    for name in [name for name in os.environ if name.startswith("TILEKERN_")]:
        monkeypatch.delenv(name)


def cache_at(root: Path) -> WatchedCache:
    return WatchedCache(root, H200, toolkit().key, PREDICTED)


def service_on(*caches: WatchedCache, how: Options | None = None, batch: int = 8) -> Service:
    return Service(caches, how or Options(jobs=2), batch, lambda _: None)


def name_of(named: Named, gpu: str = "H200") -> str:
    kernel, problem = named
    return wanted_name(kernel, dict(problem), resolve(gpu).describe())


def provenances(root: Path) -> dict[int, str]:
    """Return the provenance of each record by its problem's rows."""
    return {entry.record.problem["rows"]: entry.record.provenance for entry in Store(root).entries()}


def history_of(root: Path) -> list[dict]:
    return [json.loads(line) for line in (root / "service" / "history.jsonl").read_text().splitlines()]


def test_a_miss_is_tuned_published_and_found(tmp_path: Path, monkeypatch, capsys):
    """A job's dispatch misses; one pass of the service; the next job's dispatch has the predicted winner."""
    import torch

    spec, sizes = spec_named(OTHER[0]), (50, 48, torch.bfloat16)
    monkeypatch.setenv("TILEKERN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(dispatch, "here", lambda _device=None: H200)
    monkeypatch.setenv("TILEKERN_ON_MISS", "fallback")
    dispatch.forget()
    with pytest.warns(UserWarning, match="the model's own op runs"):
        assert dispatch.plan_for(spec, torch.device("cuda", 0), *sizes) is None
    assert len(read_wanted(tmp_path)) == 1
    assert cli.main(["serve", "--once", "--gpu", "H200", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert read_wanted(tmp_path) == []
    dispatch.forget()
    found = dispatch.plan_for(spec, torch.device("cuda", 0), *sizes)
    dispatch.forget()
    [published] = summary["published"]
    assert published["provenance"] == "predicted"
    assert dict(found.config) == published["config"]
    assert summary == {"published": [published], "failed": [], "left": [], "not_tuned_here": [], "trouble": []}
    [line] = history_of(tmp_path)
    assert (line["event"], line["kernel"], line["problem"]) == ("published", OTHER[0], OTHER[1].key)


def test_of_a_library_s_call_no_artifact_of_its_record_tells_the_time(tmp_path: Path):
    spec = spec_named("matmul")
    flags = {d.name: False for d in spec.dimensions if d.kind == "flag"}
    problem = spec.problem(rows=64, inner=64, columns=64, dtype="bfloat16", **flags)
    tile = spec.default(problem, H200)
    artifact = Artifact("0" * 64, 1, "kernel", dict(tile), [], {})
    record = record_of(
        spec, problem, tile.but(implementation="cublas"), H200, {"key": "t"}, {"aligned": artifact}, "default",
        best_kernel=BestKernel(dict(tile), None, None),
    )  # fmt: skip
    assert lost("matmul", problem, H200, Sweep(tmp_path), record, {}.__getitem__).basis == "roofline"


def test_the_parts_of_a_composite_are_tuned_with_it_unless_the_cache_has_them(tmp_path: Path):
    class StoppedError(Exception):
        pass

    def stop(*_: object) -> None:
        raise StoppedError

    spec, cache = spec_named("fused_linear_cross_entropy"), cache_at(tmp_path)
    loss = spec.name, spec.problem(rows=64, hidden=64, vocabulary=512, dtype="bfloat16")
    with pytest.raises(StoppedError):
        tune(cache, [loss, SMALL], Options(jobs=1), stop)
    planned = cache.sweep.problems()
    assert planned[:2] == [loss, SMALL]
    assert {kernel for kernel, _ in planned[2:]} == {"cross_entropy_fused", "matmul"}
    part = next(named for named in planned if named[0] == "cross_entropy_fused")
    record, blobs = record_of_default(*part)
    cache.store.write(msgspec.structs.replace(record, provenance="predicted"), blobs)
    with pytest.raises(StoppedError):
        tune(cache, [loss], Options(jobs=1), stop)
    assert set(cache.sweep.problems()) == {loss, *planned[2:]} - {part}
    # There composites look it up while they are measured.
    [lent] = [entry.record for entry in Store(cache.sweep.cache).entries()]
    assert (lent.kernel, lent.problem, lent.digests) == (part[0], dict(part[1]), set(blobs))


def test_a_predicted_record_does_not_meet_the_goal_measured(known, tmp_path: Path, monkeypatch):
    class Skipping(RecordedExecutor):
        def _measure(self, task):
            reason = "its inputs do not fit"
            yield "skipped", {"kernel": task.kernel, "problem": task.problem.key, "reason": reason}

    monkeypatch.setattr(pipeline, "here", lambda: H200)
    cache = WatchedCache(tmp_path, H200, toolkit().key, MEASURED)
    told = []
    for executor, outcome in ((Skipping(), "its inputs do not fit"), (RecordedExecutor(), None)):
        monkeypatch.setattr("tilekern.tuning.executors.local.LocalExecutor", lambda *_, it=executor: it)
        found = tune(cache, [SMALL], Options(jobs=1), lambda stage, *_: told.append(stage))[SMALL]
        assert (found if outcome else found.record.provenance) == (outcome or MEASURED)
        assert provenances(tmp_path) == {SMALL[1]["rows"]: "predicted" if outcome else MEASURED}
    assert list(dict.fromkeys(told)) == ["compile", "measure", "publish"]


def test_a_problem_that_needs_a_bit_class_and_gets_none_has_the_reason(known, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(pipeline, "here", lambda: H200)
    monkeypatch.setattr("tilekern.tuning.executors.local.LocalExecutor", lambda *_: RecordedExecutor())
    cache = WatchedCache(tmp_path, H200, toolkit().key, MEASURED)
    found = tune(cache, THREE[:2], Options(jobs=1), invariant={THREE[0]})
    assert cache.sweep.invariant == {THREE[0]}
    assert found[THREE[0]] == "no bit class: no rows of its results can be compared"
    assert found[THREE[1]].record.provenance == MEASURED
    assert provenances(tmp_path)[THREE[0][1]["rows"]] == MEASURED, "it is published all the same"


def test_costlier_problems_come_first(tmp_path: Path):
    for named in (SMALL, OTHER):
        want(tmp_path, named)
    cache = cache_at(tmp_path)
    assert all(item.misses == 1 for item in cache.queue())
    for first, second in ((SMALL, OTHER), (OTHER, SMALL)):
        assert note_misses(tmp_path, "00000001", {name_of(first): 7000, name_of(second): 3})
        assert note_misses(tmp_path, "00000002", {name_of(first): 1})
        found = cache.queue()
        assert [(item.kernel, item.misses) for item in found] == [(first[0], 7001), (second[0], 3)]
        assert found[0].cost_s == pytest.approx(7001 * found[0].lost.seconds)
        assert found[0].lost.seconds > 0


def test_a_launch_loses_what_is_predicted_of_the_default_and_of_the_best(compiled_sweep: Sweep):
    from tilekern.tuning.predict.ranking import ranking

    kernel, problem = SMALL
    known = ranking(compiled_sweep, kernel, problem, H200)
    best = known[0][1].seconds
    own = lost(kernel, problem, H200, compiled_sweep, None, {}.__getitem__)
    assert own.seconds == pytest.approx(OWN_OP * launch_s(kernel, problem, H200) - best)
    default = spec_named(kernel).default(problem, H200)
    [now] = [said.seconds for item, said in known if item.config == default]
    record, blobs = record_of_default(kernel, problem)
    found = lost(kernel, problem, H200, compiled_sweep, record, blobs.__getitem__)
    assert (found.seconds, found.basis) == (pytest.approx(now - best), "predicted")
    nothing = Sweep(compiled_sweep.folder / "nowhere")
    alone = lost(kernel, problem, H200, nothing, record, blobs.__getitem__)
    assert alone.basis == "roofline"
    assert alone.seconds == pytest.approx(now - launch_s(kernel, problem, H200))


def record_of_default(kernel, problem):
    from tilekern.runtime.records import artifact_of, record_of

    spec = spec_named(kernel)
    config = spec.default(problem, H200)
    made = compile_candidate(spec, problem, config, H200, "aligned")
    artifacts = {name: artifact_of(made, config) for name in ("aligned", "generic")}
    record = record_of(spec, problem, config, H200, toolkit().describe(), artifacts, "default")
    return record, {artifacts["aligned"].sha256: made.cubin}


def test_problems_that_cannot_be_tuned_here_are_listed_and_left(tmp_path: Path):
    kernel, problem = SMALL
    describe = H200.describe()
    want(tmp_path, SMALL, "B200")
    note_wanted(tmp_path, "of_tomorrow", dict(problem), describe, REASON)
    note_wanted(tmp_path, kernel, {**problem, "rows": 0}, describe, REASON)
    note_wanted(tmp_path, kernel, {"rows": 256}, describe, REASON)
    cache = cache_at(tmp_path)
    said = {item.why.partition(":")[0]: item.state for item in cache.queue()}
    assert said == {
        "not for this GPU": "elsewhere",
        "no kernel of_tomorrow here; if it is your own, pass --specs MODULE": "unknown",
        "this version of tilekern has no such problem": "unknown",
    }
    service = service_on(cache)
    service.work_off()
    assert len(service.left) == len(read_wanted(tmp_path)) == 4
    assert service.published == service.failed == []


def test_each_cache_gets_only_what_it_wants(known, tmp_path: Path):
    one, other = tmp_path / "one", tmp_path / "other"
    want(one, THREE[0])
    want(other, THREE[1])
    code = cli.main(["serve", "--once", "--gpu", "H200", "--cache-dir", str(one), "--cache-dir", str(other)])
    assert code == 0
    assert provenances(one) == {256: "predicted"}
    assert provenances(other) == {512: "predicted"}
    assert read_wanted(one) == read_wanted(other) == []


@pytest.mark.nightly
def test_what_fails_stays_wanted_with_its_reason_until_it_is_asked_for_again(tmp_path: Path):
    want(tmp_path)
    cache = cache_at(tmp_path)
    hasty = service_on(cache, how=Options(jobs=2, timeout_s=0.001))
    hasty.work_off()
    [failed] = hasty.failed
    if "had the processor for" in failed["reason"]:
        pytest.skip("this machine is too busy for a compile to be at fault")
    assert "did not compile" in failed["reason"]
    [item] = cache.queue()
    assert (item.state, item.why) == ("failed", failed["reason"])
    patient = service_on(cache)
    patient.work_off()
    assert patient.published == patient.failed == []
    assert len(read_wanted(tmp_path)) == 1
    assert cli.main(["serve", "--once", "--gpu", "H200", "--cache-dir", str(tmp_path)]) == 0
    assert len(read_wanted(tmp_path)) == 1
    assert cli.main(["serve", "--once", "--gpu", "H200", "--cache-dir", str(tmp_path), "--retry"]) == 0
    assert read_wanted(tmp_path) == []


def test_a_failure_stands_for_its_source_toolkit_and_goal(tmp_path: Path):
    want(tmp_path)
    cache = cache_at(tmp_path)
    [item] = cache.queue()
    cache.fail(item, "it crashed", passing=False)
    assert cache.queue()[0].state == "failed"
    assert WatchedCache(tmp_path, H200, "another-toolkit", PREDICTED).queue()[0].state == "waiting"
    assert WatchedCache(tmp_path, H200, toolkit().key, "measured").queue()[0].state == "waiting"
    assert Failures(tmp_path / "service" / "failed.jsonl").why(item.name, {"source": "edited"}) is None


def test_a_passing_failure_is_tried_again_later_and_later(tmp_path: Path, monkeypatch):
    clock = 1000.0
    monkeypatch.setattr(history.time, "time", lambda: clock)
    failures, state = Failures(tmp_path / "failed.jsonl"), {"source": "a"}
    for pause_s in (60, 120, 240):
        failures.note("item", "the disk is full", state, passing=True)
        clock += pause_s - 1
        assert failures.why("item", state) == "the disk is full"
        clock += 2
        assert failures.why("item", state) is None
    for _ in range(20):
        failures.note("item", "the disk is full", state, passing=True)
    clock += 86401
    assert failures.why("item", state) is None


def test_an_item_that_breaks_the_tuner_stops_no_other(known, tmp_path: Path, monkeypatch):
    def breaks(cache, named, options):
        if THREE[0] in named:
            raise RuntimeError("a bug of a spec")
        return tune(cache, named, options)

    monkeypatch.setattr(loop, "tune", breaks)
    for named in THREE[:2]:
        want(tmp_path, named)
    service = service_on(cache_at(tmp_path))
    service.work_off()
    assert [line["problem"] for line in service.published] == [dict(THREE[1][1])]
    assert [line["reason"] for line in service.failed] == ["RuntimeError: a bug of a spec"]
    assert [item.state for item in service.left] == ["failed"]


def test_a_cache_that_cannot_be_written_is_said_and_left_alone(known, tmp_path: Path):
    bad, good = tmp_path / "bad", tmp_path / "good"
    for root in (bad, good):
        want(root)
    (bad / "sweeps").write_text("a file where the sweeps' folder should be")
    service = service_on(cache_at(bad), cache_at(good))
    service.work_off()
    assert provenances(good) == {256: "predicted"}
    [failed] = service.failed
    assert (failed["cache"], failed["passing"]) == (str(bad), True)
    assert "choose another folder for the cache or the sweep" in failed["reason"]
    assert [(item.root, item.state) for item in service.left] == [(bad, "failed")]


def test_a_problem_that_the_cache_already_holds_is_taken_off_the_list(known, tmp_path: Path):
    want(tmp_path)
    service_on(cache_at(tmp_path)).work_off()
    want(tmp_path)
    service = service_on(cache_at(tmp_path))
    service.work_off()
    assert service.published == []
    assert read_wanted(tmp_path) == []


def test_a_default_that_a_job_compiled_is_tuned(known, tmp_path: Path):
    kernel, problem = SMALL
    want(tmp_path)
    os.environ["TILEKERN_CACHE_DIR"] = str(tmp_path)
    try:
        dispatch.compile_default(spec_named(kernel), problem, H200)
    finally:
        del os.environ["TILEKERN_CACHE_DIR"]
    assert provenances(tmp_path) == {256: "default"}
    cache = cache_at(tmp_path)
    assert cache.settle() == []
    service_on(cache).work_off()
    assert provenances(tmp_path) == {256: "predicted"}


def test_a_wanted_file_with_another_name_is_tuned_once(known, tmp_path: Path):
    """The service cannot know which file to delete, for example of a list that was copied by hand."""
    want(tmp_path)
    [path] = (tmp_path / "v1" / "wanted").iterdir()
    path.rename(path.with_name("copied.json"))
    service = service_on(cache_at(tmp_path))
    service.work_off()
    assert len(service.published) == 1
    assert [item.why for item in service.left] == ["the cache holds it; its file could not be taken off the list"]


def test_the_history_is_bounded(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(history, "MOST_LINES", 10)
    kept = History(tmp_path / "history.jsonl")
    for number in range(100):
        kept.note("published", f"item {number}", *SMALL)
        assert len((tmp_path / "history.jsonl").read_bytes().splitlines()) <= 20
    lines = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert [line["item"] for line in lines[-3:]] == ["item 97", "item 98", "item 99"]


def test_old_artifacts_make_room(known, tmp_path: Path, monkeypatch):
    want(tmp_path)
    cache = cache_at(tmp_path)
    monkeypatch.setattr(loop, "MOST_ARTIFACT_BYTES", 300_000)
    service_on(cache).work_off()
    held = sum(path.stat().st_size for path in (cache.sweep.folder / "artifacts").iterdir())
    assert 0 < held <= 300_000
    assert provenances(tmp_path) == {256: "predicted"}


def test_a_running_service_takes_new_wishes_keeps_others_out_and_stops_with_its_work_kept(tmp_path: Path, capsys):
    with Running("--gpu", "H200", "--cache-dir", tmp_path, "--jobs", 1, "--poll", 0.1) as running:
        assert running.line().startswith("watching")
        assert cli.main(["serve", "--once", "--gpu", "H200", "--cache-dir", str(tmp_path)]) == 2
        [refused] = capsys.readouterr().err.splitlines()
        assert f"is held by another run: serve on {os.uname().nodename}, process {running.process.pid}" in refused
        want(tmp_path, OTHER)
        assert running.line().startswith("swiglu_forward 64 48 bfloat16: predicted ")
        journal = cache_at(tmp_path).sweep.folder / "compiled.jsonl"
        before = journal.read_bytes().count(b"\n")
        want(tmp_path)
        until(lambda: journal.read_bytes().count(b"\n") > before)
        running.process.send_signal(signal.SIGTERM)
        code, output, errors = running.end()
    assert (code, errors) == (0, "")
    assert "stopped; what was finished is kept" in output
    assert len(read_wanted(tmp_path)) == 1
    assert {json.loads(line)["status"] for line in journal.read_text().splitlines()} == {"ok"}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_it(tmp_path: Path, monkeypatch, capsys, number, code):
    before = signal.getsignal(number)
    monkeypatch.setattr(Service, "work_off", lambda _: os.kill(os.getpid(), number))
    assert cli.main(["serve", "--gpu", "H200", "--cache-dir", str(tmp_path)]) == code
    said = capsys.readouterr()
    assert "stopped; what was finished is kept" in said.out + said.err
    assert signal.getsignal(number) is before


@pytest.mark.nightly
def test_a_service_that_is_killed_goes_on_at_the_next_start(tmp_path: Path):
    want(tmp_path)
    journal = cache_at(tmp_path).sweep.folder / "compiled.jsonl"
    for lines in (1, 3, 5):
        with Running("--gpu", "H200", "--cache-dir", tmp_path, "--jobs", 2) as running:
            until(lambda n=lines: journal.exists() and journal.read_bytes().count(b"\n") >= n)
            running.kill()
        assert running.process.returncode == -signal.SIGKILL
    assert len(read_wanted(tmp_path)) == 1
    with Running("--once", "--gpu", "H200", "--cache-dir", tmp_path) as last:
        assert last.end()[0] == 0
    assert read_wanted(tmp_path) == []
    assert provenances(tmp_path) == {256: "predicted"}
    keys = Counter(json.loads(line)["key"] for line in journal.read_text().splitlines() if line.endswith("}"))
    assert max(keys.values()) == 1, "compiled twice"
    layer = FolderLayer(tmp_path, "cache")
    [tools] = layer.toolkits(H200.key)
    record = layer.read_record(H200.key, tools, *[SMALL[0], dict(SMALL[1])])
    assert {len(layer.read_blob(digest)) > 0 for digest in record.digests} == {True}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "no CUDA GPU to tune on; to publish predicted winners, name one: --gpu B200"),
        (["--gpu", "H2000"], "unknown GPU 'H2000'"),
        (["--gpu", "H200", "--json"], "--json goes with --once"),
        (["--gpu", "H200", "--cache-dir", "/dev/null/cache"], "cannot write /dev/null/cache: Not a directory; choose"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, monkeypatch, capsys, arguments, says):
    monkeypatch.setenv("TILEKERN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cli.main(["serve", *arguments]) == 2
    errors = capsys.readouterr().err
    assert says in errors
    assert errors.count("\n") == 1


def test_a_pass_that_leaves_something_ends_with_1(tmp_path: Path, capsys):
    want(tmp_path)
    (tmp_path / "sweeps").write_text("a file where the sweeps' folder should be")
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "--once", "--gpu", "H200", "--cache-dir", str(tmp_path), "--json"])
    assert ended.value.code == 1
    summary = json.loads(capsys.readouterr().out)
    [failed] = summary["failed"]
    assert failed["passing"]
    assert "choose another folder for the cache or the sweep" in failed["reason"]
    assert len(read_wanted(tmp_path)) == 1


def test_an_item_shows_at_its_bucket(tmp_path: Path):
    """A list that another program wrote may have sizes that are no bucket's."""
    kernel, problem = SMALL
    want(tmp_path, (kernel, problem.but(rows=200)))
    [item] = cache_at(tmp_path).queue()
    assert item.named == SMALL
    assert replace(item, misses=3).cost_s == pytest.approx(3 * item.lost.seconds)
