"""The journal on disk, and the compile stage with the real compiler."""

import json
import shutil
from pathlib import Path

import pytest
from tuning_samples import SMALL

from tilekern.errors import InputError
from tilekern.kernels import spec_named
from tilekern.spec import GENERIC
from tilekern.spec.source import source_digest
from tilekern.spec.targets import Target, resolve
from tilekern.tuning import cli
from tilekern.tuning.compile.stage import compile_all, wanted
from tilekern.tuning.sweep.candidates import candidates
from tilekern.tuning.sweep.folder import Sweep


def test_every_candidate_of_the_problem_is_compiled_with_its_facts(compiled_sweep: Sweep, h200: Target):
    done = compiled_sweep.compiled()
    items = candidates(*SMALL, h200)
    assert {item.artifact for item in items} == set(done)
    assert items[-1].variant == GENERIC
    for line in done.values():
        assert line["status"] == "ok"
        assert line["resources"]["registers"] > 0
        assert len(compiled_sweep.cubin(line["sha256"])) > 1000
        assert line["toolkit"]["tileiras"]


def test_a_second_run_compiles_nothing(compiled_sweep: Sweep):
    assert list(wanted(compiled_sweep)) == []
    assert compile_all(compiled_sweep, jobs=2).compiled == 0


@pytest.fixture
def copy_of_sweep(compiled_sweep: Sweep, tmp_path: Path) -> Sweep:
    """One that a test may change."""
    return Sweep(Path(shutil.copytree(compiled_sweep.folder, tmp_path / "copy")))


@pytest.mark.processes
def test_a_torn_last_line_is_compiled_again(copy_of_sweep: Sweep):
    journal = copy_of_sweep.folder / "compiled.jsonl"
    before = copy_of_sweep.compiled()
    journal.write_bytes(journal.read_bytes()[:-40])
    assert len(copy_of_sweep.compiled()) == len(before) - 1
    assert len(list(wanted(copy_of_sweep))) == 1
    assert compile_all(copy_of_sweep, jobs=1).compiled == 1
    assert copy_of_sweep.compiled().keys() == before.keys()


@pytest.mark.processes
def test_an_artifact_that_is_lost_or_damaged_is_compiled_again(copy_of_sweep: Sweep):
    lost, damaged = sorted({line["sha256"] for line in copy_of_sweep.compiled().values()})[:2]
    (copy_of_sweep.folder / "artifacts" / lost).unlink()
    (copy_of_sweep.folder / "artifacts" / damaged).write_bytes(b"cubic")
    with pytest.raises(InputError, match="is damaged; compile it again"):
        copy_of_sweep.cubin(damaged)
    assert {item.artifact for item in wanted(copy_of_sweep)} == copy_of_sweep.lost()
    compile_all(copy_of_sweep, jobs=1)
    assert len(copy_of_sweep.cubin(lost)) > 1000
    assert len(copy_of_sweep.cubin(damaged)) > 1000


@pytest.mark.processes
def test_a_sweep_that_was_carried_without_its_artifacts_has_them_made_again(copy_of_sweep: Sweep):
    artifacts, keep = copy_of_sweep.folder / "artifacts", sorted(copy_of_sweep.compiled())[0]
    shutil.rmtree(artifacts)
    artifacts.write_bytes(b"")
    with pytest.raises(InputError, match=f"cannot write {artifacts}"):
        compile_all(copy_of_sweep, jobs=1, only=[keep])
    artifacts.unlink()
    compile_all(copy_of_sweep, jobs=1, only=[keep])
    assert len(copy_of_sweep.cubin(copy_of_sweep.compiled()[keep]["sha256"])) > 1000


@pytest.mark.processes
def test_a_candidate_that_takes_too_long_is_recorded_and_the_sweep_goes_on(tmp_path: Path, h200: Target, first_configs):
    sweep = Sweep(tmp_path)
    sweep.begin(h200, "test", [SMALL], first_configs)
    summary = compile_all(sweep, jobs=2, timeout_s=0.001)
    assert summary.compiled == len(sweep.compiled())
    # A compiler that has kept the artifact may be done in time.
    late = [line["reason"] for line in sweep.compiled().values() if line["status"] != "ok"]
    # On a busy machine the compiler may not have had the processor, which passes.
    assert summary.failed + summary.open == len(late)
    assert late
    assert all(reason.startswith("tileiras exceeded 0.001 s") for reason in late)


def test_a_damaged_artifact_is_refused(tmp_path: Path, h200: Target):
    sweep = Sweep(tmp_path)
    sweep.begin(h200, "test", [SMALL])
    name = sweep.store(b"cubin")
    assert sweep.cubin(name) == b"cubin"
    (tmp_path / "artifacts" / name).write_bytes(b"cubic")
    with pytest.raises(InputError, match="is damaged; compile it again"):
        sweep.cubin(name)


def test_a_folder_belongs_to_one_target(tmp_path: Path, h200: Target):
    sweep = Sweep(tmp_path)
    sweep.begin(h200, "test", [SMALL])
    assert sweep.target == h200
    assert sweep.problems() == [SMALL]
    with pytest.raises(InputError, match="holds a sweep for H200, not B200"):
        sweep.begin(resolve("B200"), "test", [SMALL])


def test_a_folder_keeps_what_was_said_of_a_gpu_that_is_not_listed(tmp_path: Path):
    mine = resolve("sm_90:40,memory=1000,shared=100,name=Mine")
    Sweep(tmp_path).begin(mine, "test", [SMALL])
    assert Sweep(tmp_path).target == mine


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"format": 99}), json.dumps({"format": 1})])
def test_a_folder_that_is_not_a_sweep(tmp_path: Path, content: str):
    (tmp_path / "sweep.json").write_text(content)
    with pytest.raises(InputError):
        Sweep(tmp_path).problems()


@pytest.mark.parametrize(
    "change",
    [{"kernel": "gone"}, {"problem": {"rows": 256}}, {"problem": dict(SMALL[1]) | {"rows": "many"}},
     {"problem": dict(SMALL[1]) | {"stride": 1}}, {"configs": [{"tile": 64}]}],
)  # fmt: skip
def test_a_plan_of_another_version_is_said_and_planned_again(tmp_path: Path, h200: Target, capsys, change):
    sweep = Sweep(tmp_path)
    sweep.begin(h200, "test", [SMALL])
    plan = json.loads((tmp_path / "sweep.json").read_text())
    plan["problems"][0] |= change
    (tmp_path / "sweep.json").write_text(json.dumps(plan))
    for command in (["status"], ["report"], ["--stages", "compile", "--sweep"]):
        assert cli.main([*command, str(tmp_path)]) == 2
        assert "that this version of tilekern does not have; use the one that planned it" in capsys.readouterr().err
    sweep.begin(h200, "test", [SMALL])
    assert sweep.problems() == [SMALL]


def test_a_dry_run_on_an_impossible_folder_ends_without_a_traceback(tmp_path: Path, capsys):
    (tmp_path / "file").touch()
    command = ["qwen3-0.6b", "--gpu", "H200", "--ops", "rope", "--sweep", str(tmp_path / "file" / "sweep")]
    assert cli.main([*command, "--dry-run"]) == 0
    assert cli.main(command) == 2
    assert f"cannot write {tmp_path}/file/sweep: Not a directory" in capsys.readouterr().err


@pytest.mark.processes
def test_what_ran_out_of_time_is_tried_again_with_more(tmp_path: Path, h200: Target, first_configs):
    sweep = Sweep(tmp_path)
    sweep.begin(h200, "test", [SMALL], first_configs)
    compile_all(sweep, jobs=2, timeout_s=0.001)
    # One may come in time whose cubin was kept from another run; one that a busy machine kept waiting is open.
    late = {key: line for key, line in sweep.compiled().items() if line["status"] != "ok"}
    assert late
    still_open = {key for key, line in late.items() if line["status"] == "open"}
    assert {item.artifact for item in wanted(sweep, timeout_s=0.001)} == still_open
    assert {item.artifact for item in wanted(sweep, timeout_s=60)} == late.keys()


def test_a_measurement_belongs_to_one_source_of_the_kernel(compiled_sweep: Sweep, h200: Target, monkeypatch):
    before = candidates(*SMALL, h200)[0].key
    source = source_digest(spec_named(SMALL[0]).module)
    for digest, is_same in ((source, True), ("0" * 64, False)):
        monkeypatch.setattr(
            "tilekern.tuning.sweep.candidates.source_digest",
            lambda _, digest=digest: digest,
        )
        assert (candidates(*SMALL, h200)[0].key == before) == is_same
