"""Old winners timed again: a real cache's records of another toolkit or driver, compiled anew, timed from a record."""

import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from recorded import GPU, RecordedExecutor, times
from tuning_samples import H200, SMALL, THREE, needs_compiler

from tilekern.cache import BestKernel, FolderLayer, PackLayer, Record, Store, write_pack
from tilekern.compile.toolchain import toolkit
from tilekern.errors import InputError
from tilekern.kernels import spec_named
from tilekern.runtime.records import record_of
from tilekern.spec import Config
from tilekern.tuning import cli, pipeline
from tilekern.tuning.commands import refresh as command
from tilekern.tuning.measure.stage import measure_all
from tilekern.tuning.publishing import keep_winners, winners
from tilekern.tuning.refreshing import Refresh, survey
from tilekern.tuning.sweep.candidates import candidates
from tilekern.tuning.sweep.folder import Sweep

HERE = Path(__file__).parent
KERNEL = SMALL[0]
OLD = {"key": "tileiras-13.1.1-cuda_tile-1.5.0", "tileiras": "13.1.1", "cuda_tile": "1.5.0"}
pytestmark = [pytest.mark.processes, needs_compiler]


@pytest.fixture(scope="session")
def measured(compiled_sweep: Sweep, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Record, dict[str, bytes]]]:
    """The records that a tune of three problems makes, and their artifacts."""
    folder = shutil.copytree(compiled_sweep.folder, tmp_path_factory.mktemp("measured") / "sweep")
    sweep = Sweep(Path(folder))
    sweep.begin(H200, "test", THREE)
    measure_all(sweep, RecordedExecutor(), keep_winners)
    return [(winner.record, blobs) for winner, blobs in winners(sweep, OLD)]


@pytest.fixture
def fill(measured, tmp_path):
    """Writes records into a cache, changed in some fields."""

    def write(place: str = "cache", records=slice(None), driver=GPU["driver"], **changes):
        store = Store(tmp_path / place)
        for record, blobs in measured[records]:
            measurement = record.measurement | {"driver": driver}
            store.write(msgspec.structs.replace(record, measurement=measurement, **changes), blobs)
        return store

    return write


@pytest.fixture
def tune(known, monkeypatch, tmp_path, capsys):
    """Run ``refresh --json`` on a machine with a GPU that answers from the record, or without one."""

    monkeypatch.setattr(command, "default_layers", lambda **_: [])  # reading the wheel's packs takes seconds

    def run(*arguments: str, executor: RecordedExecutor | None = None, cache: str = "cache", code: int = 0):
        for module in (command, pipeline):
            monkeypatch.setattr(module, "here", lambda: H200 if executor else None)
        monkeypatch.setattr(command, "describe_gpu", lambda: executor.describe_gpu(H200))
        monkeypatch.setattr("tilekern.tuning.executors.local.LocalExecutor", lambda *_: executor)
        given = ["refresh", "--gpu", "H200", "--cache-dir", str(tmp_path / cache), "--jobs", "2", *arguments]
        assert cli.main([*given, "--json"]) == code
        said = capsys.readouterr()
        return json.loads(said.out) if code == 0 else said.err

    return run


def records(store: Store) -> dict[tuple[str, str], Record]:
    return {(e.record.toolkit["key"], e.address.problem_key): e.record for e in store.entries()}


def test_records_of_an_older_toolkit_are_timed_again_and_stay(fill, tune, measured):
    store = fill(toolkit=OLD)
    old = dict(measured[1][0].config)
    # The new toolkit has made the old winner of one problem a little slow.
    slower = {(THREE[1][1]["rows"], Config(old).key): 1.5}
    executor = RecordedExecutor(factors=slower)
    said = tune(executor=executor)
    assert [change["kernel"] for change in said["changes"]] == [KERNEL] * 3
    assert [change["problem"]["rows"] for change in said["changes"]] == [256, 512, 1024]
    for change in said["changes"]:
        rows = change["problem"]["rows"]
        factor = 1.5 if rows == 512 else 1.0
        was, now = change["before"], change["after"]
        assert was["toolkit"] == OLD["key"]
        assert now["toolkit"] == toolkit().key
        assert change["same_config_us"] == pytest.approx(was["median_us"] * factor)
        assert change["change"] == pytest.approx(now["median_us"] / was["median_us"] - 1, abs=1e-4)
        assert change["unchanged"] == (factor == 1.0) == (now["config"] == was["config"])
    # Few were timed: the winner, three runners-up and the default of each problem.
    assert all(len([e for e in task.entrants if e.is_aligned]) <= 5 for task in executor.tasks)
    found = records(store)
    assert len(found) == 6
    for (key, problem), record in found.items():
        twin = found[toolkit().key if key == OLD["key"] else OLD["key"], problem]
        assert record.provenance == "measured"
        assert record.source_digest == twin.source_digest
        assert (record.measurement["default_us"] > 0) == (twin.measurement["default_us"] > 0)
    again = tune(executor=RecordedExecutor())
    assert again["changes"] == []
    assert again["current"] == 3
    others = f"another toolkit than {toolkit().key} or another driver than {GPU['driver']}"
    assert f"nothing to refresh for H200: 3 measured records, none of {others}" in again["notes"][0]


def test_a_newer_driver_s_time_replaces_the_old_one(fill, tune):
    store = fill(toolkit=toolkit().describe(), driver="575.1")
    said = tune(executor=RecordedExecutor())
    assert [change["before"]["driver"] for change in said["changes"]] == ["575.1"] * 3
    assert [change["after"]["driver"] for change in said["changes"]] == [GPU["driver"]] * 3
    assert all(change["unchanged"] for change in said["changes"])
    assert [record.measurement["driver"] for record in records(store).values()] == [GPU["driver"]] * 3


def test_only_what_is_outdated_is_timed_unless_all_is_asked_for(fill, tune):
    fill(records=slice(0, 1), toolkit=OLD)
    fill(records=slice(1, 3), toolkit=toolkit().describe())
    executor = RecordedExecutor()
    said = tune(executor=executor)
    assert (len(said["changes"]), said["current"]) == (1, 2)
    everything = RecordedExecutor()
    assert len(tune("--all", executor=everything)["changes"]) == 3
    assert len(everything.tasks) == 3


@pytest.mark.parametrize(
    ("digest", "reason"),
    [
        ("source_digest", "it was made from another version of the kernel's source"),
        # A few of its configs timed again would pass for the best of today's space.
        ("space_digest", "the search space has changed since, so that a few of its configs say nothing of the best"),
    ],
)
def test_a_record_of_an_edited_kernel_or_space_needs_a_whole_tune(fill, tune, digest, reason):
    fill(records=slice(0, 1), toolkit=OLD, **{digest: "0" * 64})
    fill(records=slice(1, 2), toolkit=OLD)
    said = tune(executor=RecordedExecutor())
    assert len(said["changes"]) == 1
    assert [(stale["problem"], stale["reason"]) for stale in said["stale"]] == [(dict(THREE[0][1]), reason)]


def test_the_best_kernel_of_a_library_s_problem_is_timed_again_too(tmp_path):
    spec = spec_named("matmul")
    flags = {d.name: False for d in spec.dimensions if d.kind == "flag"}
    problem = spec.problem(rows=4096, inner=4096, columns=4096, dtype="bfloat16", **flags)
    default, other = spec.default(problem, H200), next(iter(spec.space.candidates(problem, H200)))
    by_cublas = next(c for c in spec.space.candidates(problem, H200) if c["implementation"] == "cublas")
    assert len({default, other, by_cublas}) == 3
    best_kernel = BestKernel(dict(other), {"median_us": 11.0}, None)
    measurement = {"median_us": 9.0, "driver": GPU["driver"]}
    record = record_of(
        spec, problem, by_cublas, H200, OLD, {}, "measured", measurement=measurement, best_kernel=best_kernel
    )
    Store(tmp_path).write(record, {})
    found = survey([FolderLayer(tmp_path, "cache")], H200, toolkit().key, GPU["driver"], top=3, everything=False)
    assert [configs for _, configs in found.outdated] == [[by_cublas, other, default]]


def test_a_stale_record_beside_a_valid_one_is_nobody_s_concern(fill, tmp_path):
    fill(records=slice(0, 1), toolkit=OLD, source_digest="0" * 64)
    fill(records=slice(0, 1), toolkit=toolkit().describe())
    layer = FolderLayer(tmp_path / "cache", "cache")
    found = survey([layer], H200, toolkit().key, GPU["driver"], top=3, everything=False)
    assert (len(found.outdated), len(found.current), len(found.stale)) == (0, 1, 0)


def test_configs_that_are_in_the_space_no_more_are_left_out(fill, tmp_path):
    gone = {"tile_m": 7, "tile_n": [1]}
    kernel, problem = THREE[0]
    space = [item.config for item in candidates(kernel, problem, H200)[:-1]]
    runners = [{"config": gone}, {"config": dict(space[4])}, "nonsense", {"config": dict(space[5])}]
    fill(records=slice(0, 1), toolkit=OLD, runners_up=runners)
    layer = FolderLayer(tmp_path / "cache", "cache")
    [(record, configs)] = survey([layer], H200, toolkit().key, None, top=2, everything=False).outdated
    default = spec_named(kernel).default(problem, H200)
    assert configs == list(dict.fromkeys([Config(record.config), space[4], default]))
    fill(records=slice(0, 1), toolkit=OLD, runners_up=[{"config": gone}], config={"tile_m": 7})
    found = survey([layer], H200, toolkit().key, None, top=2, everything=False)
    assert found.outdated == []
    assert found.stale[0].reason == "its configs are not in the search space any more"


def test_a_pack_s_records_are_timed_into_the_cache(measured, tune, tmp_path):
    changed = [(msgspec.structs.replace(record, toolkit=OLD), blobs) for record, blobs in measured]
    write_pack(tmp_path / "old.pack", changed)
    said = tune("--pack", str(tmp_path / "old.pack"), executor=RecordedExecutor())
    assert len(said["changes"]) == 3
    assert len(records(Store(tmp_path / "cache"))) == 3
    (tmp_path / "bad.pack").write_text("no pack")
    assert "bad.pack is not a pack" in tune("--pack", str(tmp_path / "bad.pack"), code=2)


def test_installed_packs_that_another_toolkit_made_are_offered(measured, fill, tune, tmp_path, monkeypatch):
    """Who is served by them alone is told of them, until the cache has newer records of the same."""
    packs = [tmp_path / name for name in ("the old.pack", "today.pack")]
    for path, made_by in zip(packs, (OLD, toolkit().describe()), strict=True):
        write_pack(path, [(msgspec.structs.replace(record, toolkit=made_by), blobs) for record, blobs in measured[:2]])
    installed = [FolderLayer(tmp_path / "cache", "user"), *map(PackLayer, packs[:1])]
    monkeypatch.setattr(command, "default_layers", lambda **_: installed)
    nothing, offer = tune(executor=RecordedExecutor())["notes"]
    assert "0 measured records" in nothing
    assert "2 measured records of the old.pack" in offer
    given = shlex.split(offer.partition("to refresh them: ")[2])
    assert given[:4] == ["python", "-m", "tilekern.tune", "refresh"]
    assert given[4:6] == ["--pack", str(packs[0])]
    # It is what refreshes them, and no more is offered then.
    assert len(tune(*given[4:], executor=RecordedExecutor())["changes"]) == 2
    assert len(tune(executor=RecordedExecutor())["notes"]) == 1
    installed[1:] = [PackLayer(packs[1])]
    assert len(tune(executor=RecordedExecutor(), cache="other")["notes"]) == 1


def test_without_the_gpu_the_folder_is_carried_to_it(fill, tune, tmp_path):
    fill("build", toolkit=OLD)
    at_home = tune("--sweep", str(tmp_path / "here"), cache="build")
    assert at_home["changes"] == []
    assert "no H200 here: carry" in at_home["notes"][0]
    assert at_home["compile"]["compiled"] >= 2
    shutil.move(tmp_path / "here", tmp_path / "there")
    said = tune("--sweep", str(tmp_path / "there"), executor=RecordedExecutor(), cache="gpu-host")
    assert said["compile"]["compiled"] == 0
    assert len(said["changes"]) == 3
    assert len(records(Store(tmp_path / "gpu-host"))) == 3
    assert {key for key, _ in records(Store(tmp_path / "build"))} == {OLD["key"]}


def test_a_refresh_that_was_stopped_goes_on(fill, tune, tmp_path):
    class Stopped(RecordedExecutor):
        def run(self, tasks):
            yield from super().run(itertools.islice(tasks, 1))
            raise KeyboardInterrupt

    fill(toolkit=OLD)
    tune(executor=Stopped(), code=130)
    folder = tmp_path / "cache" / "sweeps" / f"refresh-{H200.key}"
    assert Refresh(folder).unfinished
    executor = RecordedExecutor()
    said = tune(executor=executor)
    assert len(executor.tasks) == 2
    assert len(said["changes"]) == 3
    assert not Refresh(folder).unfinished


@pytest.mark.nightly
def test_a_refresh_that_is_killed_before_any_change_to_its_folder_begins_again(tmp_path):
    command = [sys.executable, str(HERE / "refresh_kills.py"), str(tmp_path)]
    path = os.pathsep.join((str(HERE), str(HERE.parents[1]), str(HERE.parent / "kernels")))
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kills = dict(line.split() for line in done.stdout.splitlines())
    assert int(kills["old"]) > int(kills["new"]) > 4


def test_an_old_winner_that_fails_now_loses_its_place(fill, tune, measured):
    store = fill(toolkit=OLD)
    config = Config(measured[0][0].config).key
    said = tune(executor=RecordedExecutor(wrong=[config]))
    change = next(change for change in said["changes"] if change["problem"] == dict(THREE[0][1]))
    assert change["same_config_us"] is None
    assert "relative error" in change["same_config_reason"]
    assert Config(change["after"]["config"]).key != config
    assert records(store)[toolkit().key, THREE[0][1].key].failed == 1


def test_where_nothing_can_be_timed_nothing_is_published(fill, tune):
    store = fill(records=slice(0, 1), toolkit=OLD)
    every = [item.config.key for item in candidates(*THREE[0], H200)[:-1]]
    said = tune(executor=RecordedExecutor(crashing=every))
    [change] = said["changes"]
    assert change["after"] is None
    assert change["same_config_reason"] == "the process died (exit code 7)"
    assert [key for key, _ in records(store)] == [OLD["key"]]


def test_a_composite_finds_the_winners_of_today_that_it_may_launch(fill, tmp_path):
    """Its parts are up to date and no part of the plan, so the sweep's own cache must have them."""
    store = fill(records=slice(0, 1), toolkit=toolkit().describe())
    spec = spec_named("fused_linear_cross_entropy")
    problem = spec.problem(rows=64, hidden=1024, vocabulary=151936, dtype="bfloat16")
    default = spec.default(problem, H200)
    measurement = {"median_us": 90.0, **GPU}
    store.write(record_of(spec, problem, default, H200, OLD, {}, "measured", measurement=measurement), {})
    found = survey([FolderLayer(store.root, "cache")], H200, toolkit().key, GPU["driver"], top=3, everything=False)
    refresh = Refresh(tmp_path / "refresh")
    refresh.begin(found, H200, toolkit().key)
    assert refresh.sweep.problems() == [(spec.name, problem)]
    assert [item.config for item in refresh.sweep.candidates(spec.name, problem)[:-1]] == [default]
    [(_, part)] = records(Store(refresh.sweep.cache)).items()
    assert (part.kernel, part.problem) == (KERNEL, dict(THREE[0][1]))


def test_a_sweep_of_another_kind_is_left_alone(fill, tune, tmp_path):
    fill(toolkit=OLD)
    Sweep(tmp_path / "mine").begin(H200, "test", THREE)
    said = tune("--sweep", str(tmp_path / "mine"), executor=RecordedExecutor(), code=2)
    assert "mine contains a tuning sweep, not a refresh; pass another --sweep folder" in said


@pytest.mark.parametrize("before", [[{"schema": 1, "kernel": "swiglu_forward"}], None])
def test_what_another_version_noted_in_the_folder_is_refused(tmp_path, before):
    noted = {"finished": False, "toolkit": None, "before": before, "stale": [], "current": 0}
    (tmp_path / "refresh.json").write_text(json.dumps(noted))
    with pytest.raises(InputError, match="another version of tilekern wrote it; remove the folder"):
        _ = Refresh(tmp_path).current


def test_the_table_says_what_changed_and_what_did_not(fill, tune, measured, capsys, monkeypatch, tmp_path):
    fill(toolkit=OLD)
    fill("other", records=slice(0, 1), toolkit=OLD, source_digest="0" * 64)
    old = Config(measured[1][0].config)
    executor = RecordedExecutor(factors={(THREE[1][1]["rows"], old.key): 1.5})
    tune(executor=executor)
    fill(toolkit=OLD)
    shutil.rmtree(tmp_path / "cache" / "v1" / H200.key / toolkit().key)
    assert cli.main(["refresh", "--gpu", "H200", "--cache-dir", str(tmp_path / "cache")]) == 0
    text = capsys.readouterr().out
    assert "3 records timed again: 2 keep their winner, 1 have another, 0 have none; 0 were of today" in text
    was = times()[KERNEL, THREE[0][1], Config(measured[0][0].config)]
    for part in ("the same", f"{was:.1f}", "+0.0 %", f"H200, {toolkit().key}, driver {GPU['driver']}"):
        assert part in text
    assert cli.main(["refresh", "--gpu", "H200", "--cache-dir", str(tmp_path / "other")]) == 0
    text = capsys.readouterr().out
    assert "nothing to refresh for H200" in text
    assert "needs a whole tune: column_sum 256 128 bfloat16: it was made from another version" in text
