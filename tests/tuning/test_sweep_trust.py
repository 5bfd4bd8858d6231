"""Sweep folders of others, or that others can write: nothing of them becomes this user's own."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from recorded import RecordedExecutor
from service_samples import OTHER, want
from tuning_samples import H200, SMALL, needs_compiler

from tilekern.cache import FolderLayer, Pack, Store, checked_contents, lookup
from tilekern.cache.trust.signing import SigningKey, generate_key
from tilekern.compile.toolchain import toolkit
from tilekern.errors import InputError
from tilekern.kernels import spec_named
from tilekern.spec.source import source_digest
from tilekern.tuning import cli
from tilekern.tuning import preflight as checks
from tilekern.tuning.compile.stage import compile_all, wanted
from tilekern.tuning.measure.stage import measure_all
from tilekern.tuning.pipeline import Options, whose_artifacts
from tilekern.tuning.publishing import keep_winners, of_others, publish, winners
from tilekern.tuning.serve import loop
from tilekern.tuning.serve.watched import PREDICTED, WatchedCache
from tilekern.tuning.sweep import candidates as space
from tilekern.tuning.sweep.folder import Sweep

OTHER_USER = 12345
TOOLKIT = {"key": "tileiras-1-cuda_tile-1", "tileiras": "1", "cuda_tile": "1"}
CONFIG = {
    "model_type": "qwen3", "hidden_size": 96, "intermediate_size": 224, "num_attention_heads": 3,
    "num_key_value_heads": 1, "head_dim": 16, "num_hidden_layers": 2, "vocab_size": 333,
}  # fmt: skip
pytestmark = needs_compiler
policies = pytest.mark.parametrize("policy", ["any", "signed"])


@pytest.fixture(autouse=True)
def users(monkeypatch, tmp_path):
    """Has another user, with settings of their own, go on from here."""
    for name in [name for name in os.environ if name.startswith("TILEKERN_TRUST")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TILEKERN_CACHE_DIR", str(tmp_path / "unused"))
    return lambda name: monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings" / name))


def copy_of(folder, to):
    return Path(shutil.copytree(folder, to))


def forge(folder):
    """Alter each cubin of a sweep folder and make all digests in it fit; the digests of the altered ones."""
    altered = {}
    for path in (folder / "artifacts").iterdir():
        data = path.read_bytes() + b"altered"
        altered[path.name] = hashlib.sha256(data).hexdigest()
        path.unlink()
        path.with_name(altered[path.name]).write_bytes(data)
    journal = folder / "compiled.jsonl"
    found = [json.loads(line) for line in journal.read_text().splitlines()]
    journal.write_text("".join(json.dumps(line | {"sha256": altered[line["sha256"]]}) + "\n" for line in found))
    assert altered
    return set(altered.values())


def blobs_of(root):
    return {path.name for path in (root / "v1" / "blobs").rglob("*") if path.is_file()}


def found_in(root, named, target):
    kernel, problem = named
    source = source_digest(spec_named(kernel).module)
    return lookup(
        kernel, dict(problem), bucketed=(), target_key=target.key, arch=target.arch, toolkit_key=None,
        source=source, layers=[FolderLayer(root, str(root))],
    )  # fmt: skip


@policies
@pytest.mark.parametrize("place", ["", "artifacts", "compiled.jsonl", "sweep.json"])
def test_a_folder_that_others_can_write_is_refused(compiled_sweep, tmp_path, monkeypatch, capsys, policy, place):
    monkeypatch.setenv("TILEKERN_TRUST", policy)
    folder = copy_of(compiled_sweep.folder, tmp_path / "sweep")
    (folder / place).chmod(0o777)
    arguments = ["--stages", "compile,measure", "--sweep", str(folder), "--cache-dir", str(tmp_path / "cache")]
    assert cli.main(arguments) == 2
    said = capsys.readouterr().err
    assert "can be written by others (mode 0777); run chmod -R go-w on it, or set TILEKERN_TRUST_SHARED=1" in said
    assert len(said.splitlines()) == 1
    assert not blobs_of(tmp_path / "cache")
    monkeypatch.setenv("TILEKERN_TRUST_SHARED", "1")
    assert cli.main(arguments) == 0
    assert blobs_of(tmp_path / "cache")


@policies
@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")
@pytest.mark.parametrize("place", ["", "compiled.jsonl"])
def test_a_folder_of_another_user_is_refused(compiled_sweep, tmp_path, monkeypatch, capsys, policy, place):
    """The attack: a finished folder with altered cubins, whose digests fit, lies where the victim names it."""
    monkeypatch.setenv("TILEKERN_TRUST", policy)
    folder = copy_of(compiled_sweep.folder, tmp_path / "sweep")
    forge(folder)
    os.chown(folder / place, OTHER_USER, OTHER_USER)
    for stages in ("compile,measure", "measure"):
        arguments = ["--stages", stages, "--sweep", str(folder), "--cache-dir", str(tmp_path / "cache")]
        assert cli.main(arguments) == 2
        assert f"belongs to another user (uid {OTHER_USER}); use a copy of your own" in capsys.readouterr().err
    assert not blobs_of(tmp_path / "cache")


@policies
def test_what_was_altered_is_compiled_anew(compiled_sweep, known, tmp_path, monkeypatch, policy, h200):
    """The same in a copy that is the victim's own, as an unpacked archive is."""
    monkeypatch.setenv("TILEKERN_TRUST", policy)
    folder = copy_of(compiled_sweep.folder, tmp_path / "sweep")
    altered = forge(folder)
    assert len(list(wanted(Sweep(folder)))) == len(compiled_sweep.compiled())
    arguments = ["--stages", "compile,measure", "--sweep", str(folder), "--cache-dir", str(tmp_path / "cache")]
    assert cli.main(arguments) == 0
    made = blobs_of(tmp_path / "cache")
    assert made
    assert not made & altered
    assert sorted(known.compiled) == sorted(compiled_sweep.compiled())
    assert found_in(tmp_path / "cache", SMALL, h200)


@policies
def test_what_another_user_compiled_is_compiled_anew_where_it_was_not_carried(compiled_sweep, users, policy):
    assert not list(wanted(Sweep(compiled_sweep.folder)))
    users("victim")
    assert len(list(wanted(Sweep(compiled_sweep.folder)))) == len(compiled_sweep.compiled())


def test_a_carried_folder_is_measured_and_its_records_are_nobodys(compiled_sweep, tmp_path, users, monkeypatch, h200):
    folder = copy_of(compiled_sweep.folder, tmp_path / "sweep")
    users("other host")
    sweep = Sweep.carried(folder)
    assert sweep.compiled().keys() == compiled_sweep.compiled().keys()
    assert sweep.others == len(compiled_sweep.compiled())
    measure_all(sweep, RecordedExecutor(), keep_winners)
    found = list(winners(sweep, TOOLKIT))
    publish(found, folder / "results.pack", Store(tmp_path / "cache"), of_others(sweep, TOOLKIT, found))
    assert found_in(tmp_path / "cache", SMALL, h200).record.provenance == "measured"
    monkeypatch.setenv("TILEKERN_TRUST", "signed")
    with pytest.warns(RuntimeWarning, match="no trust root signed it"):
        assert found_in(tmp_path / "cache", SMALL, h200) is None
    # What was measured here is this user's; what it was measured of is not.
    assert Sweep(folder).measured()
    assert not Sweep(folder).compiled()


@policies
def test_what_another_machine_measured_is_published_as_nobodys(
    compiled_sweep, tmp_path, users, monkeypatch, h200, capsys, policy
):  # fmt: skip
    """The GPU host was gone before its run could write results.pack: the folder alone was carried back."""
    folder, cache = copy_of(compiled_sweep.folder, tmp_path / "sweep"), tmp_path / "cache"
    (folder / "results.pack").unlink(missing_ok=True)
    arguments = ["publish", str(folder), "--cache-dir", str(cache)]
    assert cli.main(arguments) == 2
    assert f"no problem in {folder} is measured" in capsys.readouterr().err
    users("GPU host")
    measure_all(Sweep.carried(folder), RecordedExecutor(), keep_winners)
    users("home")
    monkeypatch.setenv("TILEKERN_TRUST", policy)
    if policy == "signed":
        assert cli.main(arguments) == 2
        [said] = capsys.readouterr().err.splitlines()
        assert "others compiled or measured what is in" in said
        assert "--sign KEY" in said
        assert not cache.exists()
        return
    assert cli.main(arguments) == 0
    said = capsys.readouterr().out
    assert "1 of 1 records rest on what others compiled or measured, and are not yours" in said
    record = found_in(cache, SMALL, h200).record
    assert (record.provenance, record.measurement["gpu"]) == ("measured", "NVIDIA H200")
    assert {address.kernel for address in Pack(folder / "results.pack").records} == {SMALL[0]}
    monkeypatch.setenv("TILEKERN_TRUST", "signed")
    with pytest.warns(RuntimeWarning, match="no trust root signed it"):
        assert found_in(cache, SMALL, h200) is None


def test_what_was_measured_of_another_source_is_said_to_be(compiled_sweep, tmp_path, monkeypatch, capsys):
    folder = copy_of(compiled_sweep.folder, tmp_path / "sweep")
    measure_all(Sweep(folder), RecordedExecutor(), keep_winners)
    monkeypatch.setattr(space, "source_digest", lambda _module: "0" * 64)
    assert cli.main(["publish", str(folder), "--cache-dir", str(tmp_path / "cache")]) == 2
    [said] = capsys.readouterr().err.splitlines()
    assert said.endswith("not of the kernels of this tilekern; publish it with the tilekern that measured it")


def test_what_this_user_measured_is_published_as_theirs(compiled_sweep, tmp_path, monkeypatch, h200, capsys):
    """Also under signed, without what somebody has put beside it."""
    folder, cache = copy_of(compiled_sweep.folder, tmp_path / "sweep"), tmp_path / "cache"
    measure_all(Sweep(folder), RecordedExecutor(), keep_winners)
    forged = [json.loads(line) | {"symbol": "another"} for line in _lines(folder / "compiled.jsonl")]
    with (folder / "compiled.jsonl").open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in forged))
    monkeypatch.setenv("TILEKERN_TRUST", "signed")
    assert cli.main(["publish", str(folder), "--cache-dir", str(cache)]) == 0
    assert "not yours" not in capsys.readouterr().out
    record = found_in(cache, SMALL, h200).record
    assert record.provenance == "measured"
    assert "another" not in [artifact.symbol for artifact in record.artifacts.values()]


def test_problems_that_were_not_measured_get_no_record(compiled_sweep, tmp_path, capsys):
    folder, cache = copy_of(compiled_sweep.folder, tmp_path / "sweep"), tmp_path / "cache"
    sweep = Sweep(folder)
    other = (SMALL[0], SMALL[1].but(rows=64))
    measure_all(sweep, RecordedExecutor(), keep_winners)
    sweep.begin(sweep.target, sweep.model, [*sweep.problems(), other])
    assert cli.main(["publish", str(folder), "--cache-dir", str(cache), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [problem["problem"] for problem in document["problems"]] == [dict(SMALL[1])]
    assert "1 of 2 problems are not measured and have no record" in document["notes"][-1]


def test_under_signed_nothing_is_measured_that_nobody_vouches_for(compiled_sweep, tmp_path, users, monkeypatch, capsys):
    folder = copy_of(compiled_sweep.folder, tmp_path / "sweep")
    users("other host")
    monkeypatch.setenv("TILEKERN_TRUST", "signed")
    arguments = ["--stages", "measure", "--sweep", str(folder), "--cache-dir", str(tmp_path / "cache")]
    assert cli.main(arguments) == 2
    [said] = capsys.readouterr().err.splitlines()
    assert "TILEKERN_TRUST is signed, and neither you compiled what is in" in said
    assert "--sign KEY" in said
    assert not (tmp_path / "cache").exists()


@pytest.fixture
def signed_folder(compiled_sweep, tmp_path, capsys):
    """A folder whose artifacts were signed by the compile stage, and the public half of the key."""
    folder = copy_of(compiled_sweep.folder, tmp_path / "sweep")
    public = generate_key(tmp_path / "team.key")
    arguments = ["--stages", "compile", "--sweep", str(folder), "--sign", str(tmp_path / "team.key")]
    assert cli.main([*arguments, "--cache-dir", str(tmp_path / "cache of the builder")]) == 0
    assert f"signed {len(compiled_sweep.compiled())} artifacts with key {public[:16]}" in capsys.readouterr().out
    (tmp_path / "roots").write_text(f"ed25519 {public} the team\n")
    return folder


def test_what_a_trust_root_signed_is_measured_and_is_trusted(signed_folder, tmp_path, users, monkeypatch, h200):
    users("other host")
    monkeypatch.setenv("TILEKERN_TRUST", "signed")
    assert not Sweep.carried(signed_folder).compiled(), "a signature of a key that is not a trust root"
    monkeypatch.setenv("TILEKERN_TRUST_ROOTS", str(tmp_path / "roots"))
    sweep = Sweep.carried(signed_folder)
    assert not sweep.others
    assert not list(wanted(sweep))
    measure_all(sweep, RecordedExecutor(), keep_winners)
    found = list(winners(sweep, TOOLKIT))
    publish(found, tmp_path / "r.pack", Store(tmp_path / "cache"), of_others(sweep, TOOLKIT, found))
    assert found_in(tmp_path / "cache", SMALL, h200).record.provenance == "measured"


def test_one_altered_line_of_a_signed_folder_does_not_count(signed_folder, tmp_path, users, monkeypatch):
    users("other host")
    monkeypatch.setenv("TILEKERN_TRUST_ROOTS", str(tmp_path / "roots"))
    journal = signed_folder / "compiled.jsonl"
    first, *rest = [json.loads(line) for line in journal.read_text().splitlines()]
    # The symbol, which no digest of the cubin holds.
    journal.write_text("".join(json.dumps(line) + "\n" for line in [first | {"symbol": "another"}, *rest]))
    sweep = Sweep(signed_folder)
    assert sweep.compiled().keys() == {line["key"] for line in rest}
    assert sweep.others == 1
    [said] = whose_artifacts(sweep)
    assert said == f"1 artifact in {signed_folder} is by another, and no trust root signed it: it is left out"


def test_the_measurer_does_not_sign_what_a_stranger_compiled(compiled_sweep, tmp_path, users, monkeypatch, capsys):
    """Under any policy: the key's owner would say to all who trust it that they made it."""
    folder = copy_of(compiled_sweep.folder, tmp_path / "sweep")
    # Of a test that measured the folder that all share.
    (folder / "results.pack").unlink(missing_ok=True)
    users("other host")
    generate_key(tmp_path / "mine.key")
    arguments = ["--stages", "measure", "--sweep", str(folder), "--cache-dir", str(tmp_path / "cache")]
    assert cli.main([*arguments, "--sign", str(tmp_path / "mine.key")]) == 2
    [said] = capsys.readouterr().err.splitlines()
    assert "--sign signs what is your own, and neither you compiled what is in" in said
    assert not (folder / "results.pack").exists()
    sweep = Sweep.carried(folder)
    measure_all(sweep, RecordedExecutor(), keep_winners)
    key = SigningKey(tmp_path / "mine.key")
    found = list(winners(sweep, TOOLKIT))
    for sign in (
        lambda: publish(found, folder / "r.pack", Store(tmp_path / "c"), of_others(sweep, TOOLKIT, found), key),
        lambda: sweep.sign(key),
    ):
        with pytest.raises(InputError, match=r"is not signed: .*others compiled"):
            sign()
    assert not (folder / "r.pack").exists()


def test_the_measurer_signs_what_a_trust_root_compiled(signed_folder, tmp_path, users, monkeypatch):
    """Also under any, and without what somebody has put beside it."""
    users("other host")
    monkeypatch.setenv("TILEKERN_TRUST_ROOTS", str(tmp_path / "roots"))
    first, *rest = [json.loads(line) for line in _lines(signed_folder / "compiled.jsonl")]
    forged = json.dumps(first | {"symbol": "another"})
    (signed_folder / "compiled.jsonl").write_text("\n".join([*map(json.dumps, rest), forged]) + "\n")
    sweep = Sweep.carried(signed_folder, signs=True)
    assert sweep.is_own
    measure_all(sweep, RecordedExecutor(), keep_winners)
    generate_key(tmp_path / "mine.key")
    key, pack = SigningKey(tmp_path / "mine.key"), tmp_path / "r.pack"
    found = list(winners(sweep, TOOLKIT))
    publish(found, pack, Store(tmp_path / "cache"), of_others(sweep, TOOLKIT, found), key)
    [(record, _)] = checked_contents(Pack(pack))
    assert list(Pack(pack).signatures()[hashlib.sha256(record.data).hexdigest()]) == [key.public_key]
    assert "another" not in [artifact.symbol for artifact in record.artifacts.values()]


def test_only_what_the_builder_vouches_for_is_signed(compiled_sweep, known, tmp_path, users, capsys):
    """Who signs a folder signs their own artifacts: those of others were compiled anew before."""
    folder = copy_of(compiled_sweep.folder, tmp_path / "sweep")
    altered = forge(folder)
    generate_key(tmp_path / "team.key")
    arguments = ["--stages", "compile", "--sweep", str(folder), "--sign", str(tmp_path / "team.key")]
    assert cli.main([*arguments, "--cache-dir", str(tmp_path / "cache")]) == 0
    sweep = Sweep(folder)
    signed = {line["signed"].partition("|")[0] for line in map(json.loads, _lines(folder / "signatures.jsonl"))}
    assert len(signed) == len(sweep.compiled())
    assert not {line["sha256"] for line in sweep.compiled().values()} & altered


def _lines(path):
    return path.read_text().splitlines()


def tuned(root, folder):
    model = folder / "config.json"
    model.write_text(json.dumps(CONFIG))
    what = ["--gpu", "H200", "--ops", "swiglu", "--tokens", "64", "--dtype", "bfloat16"]
    assert cli.main([str(model), *what, "--cache-dir", str(root)]) == 0


def served(root, _folder):
    cache = WatchedCache(root, H200, toolkit().key, PREDICTED)
    want(root, OTHER)
    assert not isinstance(loop.tune(cache, [OTHER], Options(jobs=2))[OTHER], str)
    assert found_in(root, OTHER, H200)


def fixed(root, _folder):
    found = checks.preflight(CONFIG, [64], gpu="H200", ops=["swiglu"], cache_dir=root)
    assert not checks.fix(found, by="compile", cache_dir=root).missing


@pytest.mark.slow
@policies
@pytest.mark.parametrize(
    ("run", "settings"), [(tuned, "victim"), (tuned, "attacker"), (served, "attacker"), (fixed, "attacker")]
)
@pytest.mark.share(8)
def test_what_is_planted_at_a_default_place_is_not_taken(
    tmp_path, users, default_configs, monkeypatch, policy, run, settings
):
    """In the cache's ``sweeps/``, which a folder with the sticky bit lets anybody fill."""
    monkeypatch.setenv("TILEKERN_TRUST", policy)
    users(settings)
    run(tmp_path / "theirs", tmp_path)
    (tmp_path / "cache").mkdir()
    copy_of(tmp_path / "theirs" / "sweeps", tmp_path / "cache" / "sweeps")
    [folder] = (tmp_path / "cache" / "sweeps").iterdir()
    altered = forge(folder)
    users("victim")
    run(tmp_path / "cache", tmp_path)
    made = blobs_of(tmp_path / "cache")
    assert made
    assert not made & altered


def test_a_forged_measurement_does_not_count(compiled_sweep, tmp_path, users):
    """A stranger's line would say that a candidate passed its check, or was the fastest."""
    folder = copy_of(compiled_sweep.folder, tmp_path / "sweep")
    measure_all(Sweep(folder), RecordedExecutor(), keep_winners)
    kept = Sweep(folder).measured()
    last = json.loads(_lines(folder / "measured.jsonl")[-1])
    forged = last | {"timing": {"median_us": 0.001, "samples": 99}, "check": {"passed": True, "relative_error": 0.0,
                     "elementwise_error": 0.0}}  # fmt: skip
    with (folder / "measured.jsonl").open("a") as file:
        file.write(json.dumps(forged) + "\n")
    assert Sweep(folder).measured() == kept
    users("other")
    assert not Sweep(folder).measured()
    assert not Sweep(folder).races()


def test_a_seal_counts_for_its_journal_and_its_line_alone(compiled_sweep, tmp_path):
    folder = copy_of(compiled_sweep.folder, tmp_path / "sweep")
    first, second, *_ = map(json.loads, _lines(folder / "compiled.jsonl"))
    before = Sweep(folder).compiled()
    moved = [first | {"seal": second["seal"]}, {**first, "seal": 7}, {**first, "seal": "é"}, {**first, "seal": None}]
    moved += [{"race": "r", "kernel": "k", "problem": "p", "strategy": "race", "untimed": {}, "seal": first["seal"]}]
    with (folder / "compiled.jsonl").open("a") as file:
        file.writelines(json.dumps(line | {"symbol": "another"}) + "\n" for line in moved[:4])
    (folder / "races.jsonl").write_text(json.dumps(moved[4]) + "\n")
    assert Sweep(folder).compiled() == before
    assert not Sweep(folder).races()


@pytest.mark.processes
def test_settings_that_cannot_be_written_cost_a_later_run_its_head_start(compiled_sweep, tmp_path, monkeypatch, h200):
    monkeypatch.setenv("XDG_CONFIG_HOME", "/dev/null/settings")
    sweep = Sweep(tmp_path / "sweep")
    sweep.begin(h200, "test", [SMALL], {SMALL: [spec_named(SMALL[0]).default(SMALL[1], h200)]})
    with pytest.warns(RuntimeWarning, match="cannot write the secret of your seals.*a later run compiles anew"):
        compile_all(sweep, jobs=1)
    assert not list(wanted(Sweep(tmp_path / "sweep")))
    assert list(winners(Sweep(tmp_path / "sweep"), TOOLKIT))
    code = (
        "import pathlib, sys\nfrom tilekern.tuning.sweep.folder import Sweep\n"
        "print(len(Sweep(pathlib.Path(sys.argv[1])).compiled()))"
    )
    ran = subprocess.run([sys.executable, "-c", code, tmp_path / "sweep"], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "0"


@pytest.mark.processes
def test_others_cannot_write_the_files_of_a_sweep_under_any_umask(tmp_path, h200):
    before = os.umask(0o002)
    try:
        sweep = Sweep(tmp_path / "sweeps" / "a")
        sweep.begin(h200, "test", [SMALL], {SMALL: [spec_named(SMALL[0]).default(SMALL[1], h200)]})
        compile_all(sweep, jobs=1)
    finally:
        os.umask(before)
    assert not [path for path in (tmp_path / "sweeps").rglob("*") if path.stat().st_mode & 0o022]
