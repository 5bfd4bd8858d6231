"""Links and odd files in sweep folders and in what a cache keeps for the tuner: nothing elsewhere is changed."""

import contextlib
import json
import os
import time
from pathlib import Path

import pytest
from tuning_samples import H200, SMALL

from tilekern.cache import CacheError
from tilekern.errors import InputError
from tilekern.tuning import cli
from tilekern.tuning.refreshing import Refresh, Survey
from tilekern.tuning.serve import loop
from tilekern.tuning.serve.history import Failures, History
from tilekern.tuning.serve.watched import PREDICTED, WatchedCache
from tilekern.tuning.sweep import journal
from tilekern.tuning.sweep.folder import Sweep, folder_in
from tilekern.tuning.sweep.journal import LARGEST_JOURNAL, Journal
from tilekern.tuning.sweep.lines import is_whole
from tilekern.tuning.sweep.plan import PlanFile
from tilekern.tuning.sweep.quarantine import shared

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def own(tmp_path):
    """A folder of the user's, with files whose names are those of artifacts and of journals."""
    own = tmp_path / "own"
    own.mkdir()
    for name in ("thesis.tex", "4c" * 32, ".new-draft", "compiled.jsonl", "history.jsonl", "run.lock", "x.json"):
        (own / name).write_text("mine\n")
    return own


def seen(folder):
    return {path.name: (path.lstat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}


def planned(folder):
    sweep = Sweep(folder)
    sweep.begin(H200, "test", [SMALL])
    return sweep


@pytest.mark.parametrize("name", ["artifacts", "cache", "compiled.jsonl", "measured.jsonl", "sweep.json", "run.lock"])
def test_nothing_is_written_or_deleted_through_a_link_in_a_sweep_folder(tmp_path, own, monkeypatch, name):
    sweep = planned(tmp_path / "sweep")
    path = sweep.folder / name
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    path.symlink_to(own if name in ("artifacts", "cache") else own / "thesis.tex")
    before = seen(own)
    monkeypatch.setattr(loop, "MOST_ARTIFACT_BYTES", 0)
    (sweep.folder / "refresh.json").write_text("{}")
    for work in (
        lambda: sweep.begin(H200, "again", [SMALL]),
        lambda: sweep.running("compile").__enter__(),
        lambda: Refresh(sweep.folder).begin(Survey(), H200, None),
        lambda: sweep.note("compiled", {"key": "a", "status": "failed", "reason": "r"}),
        lambda: sweep.note("measured", {"candidate": "a"}),
        lambda: sweep.cubin("4c" * 32),
        lambda: loop._make_room(sweep),
    ):
        with contextlib.suppress(InputError):
            work()
        assert seen(own) == before
    with pytest.raises(InputError, match=r"is a link|is not a regular file"):
        sweep.running("compile").__enter__()
    assert Sweep(sweep.folder).holder.is_held() in (False, None)


def test_the_default_place_of_a_sweep_is_not_behind_a_link(tmp_path, own):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/sweeps").symlink_to(own)
    before = seen(own)
    for make in (lambda: folder_in(tmp_path / "cache", H200.key), lambda: watched(tmp_path / "cache")):
        with pytest.raises(InputError, match=r"sweeps/.* is a link or behind one"):
            make()
    (tmp_path / "link").symlink_to("cache2")
    assert folder_in(tmp_path / "link", "x") == tmp_path / "link/sweeps/x", "the cache itself may be a link"
    assert seen(own) == before


def watched(root):
    return WatchedCache(root, H200, "tileiras-1", PREDICTED)


@pytest.mark.parametrize("name", ["../../own/thesis.tex", "/etc/passwd", "4C" * 32, "4c" * 31, "a/b", ""])
def test_an_artifact_is_named_by_a_digest_alone(tmp_path, own, name):
    """Else a line could name any file, which is removed as damaged."""
    numbers = ("registers", "stack_bytes", "shared_bytes", "threads", "code_bytes")
    line = {"key": "k", "status": "ok", "sha256": name, "symbol": "s", "code_sha256": "c", "assumptions": []}
    line["resources"] = dict.fromkeys(numbers, 1)
    assert not is_whole("compiled", line)
    assert is_whole("compiled", line | {"sha256": "4c" * 32})
    sweep = planned(tmp_path / "sweep")
    (sweep.folder / "compiled.jsonl").write_text(json.dumps(line) + "\n")
    assert not Sweep(sweep.folder, foreign=True).compiled()


@pytest.mark.parametrize("kept", ["thesis.tex", "cache"])
def test_a_refresh_does_not_clear_a_folder_that_is_something_else(tmp_path, kept):
    """`refresh --sweep .` in a folder of the user's own."""
    folder = tmp_path / "project"
    (folder / "src").mkdir(parents=True)
    (folder / kept).mkdir()
    with pytest.raises(InputError, match=rf"project contains {min(kept, 'src')}, which is not of a refresh"):
        Refresh(folder).begin(Survey(), H200, None)
    assert sorted(path.name for path in folder.iterdir()) == sorted([kept, "src"])


def test_a_refresh_clears_what_a_refresh_left_and_nothing_else(tmp_path):
    folder = tmp_path / "refresh"
    Refresh(folder).begin(Survey(), H200, None)
    (folder / "notes.txt").write_text("mine")
    (folder / "measured.jsonl").write_text("{}\n")
    (folder / "artifacts" / ("4c" * 32)).write_text("cubin")
    Refresh(folder).begin(Survey(), H200, "tileiras-2")
    assert (folder / "notes.txt").read_text() == "mine"
    assert not (folder / "measured.jsonl").exists()
    assert not list((folder / "artifacts").iterdir())


def pipe(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


def huge(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.truncate(path, 1 << 40)
    return path


@pytest.mark.parametrize("odd", [pipe, huge])
def test_odd_files_in_shared_places_hold_nobody_up(tmp_path, odd, capsys):
    root = tmp_path / "cache"
    for name in ("service/history.jsonl", "service/failed.jsonl"):
        odd(root / name)
    history, failures = History(root / "service/history.jsonl"), Failures(root / "service/failed.jsonl")
    with pytest.raises((OSError, CacheError), match=r"is not a regular file|may have at most"):
        history.note("failed", "item", *SMALL, reason="r")
    with pytest.raises(InputError, match=r"failed\.jsonl .*a journal is a readable file"):
        failures.why("item", {})
    odd(root / "quarantine" / H200.key / "x.json")
    sweep = planned(tmp_path / "sweep")
    with shared(sweep, root):
        assert sweep.quarantined() == {}
    for name in ("compiled.jsonl", "runs.jsonl", "sweep.json"):
        again = planned(tmp_path / name)
        odd(again.folder / name)
        assert cli.main(["status", str(again.folder)]) == 2
        [said] = capsys.readouterr().err.splitlines()
        assert name in said
    odd(tmp_path / "refresh/refresh.json")
    with pytest.raises(InputError, match=r"refresh\.json cannot be read"):
        _ = Refresh(tmp_path / "refresh").stale
    with pytest.raises(InputError, match=r"plan\.json cannot be read"):
        PlanFile(odd(tmp_path / "plan.json").parent, "plan.json").read()


@pytest.mark.parametrize("kind", ["link", "hard link"])
@pytest.mark.parametrize("place", ["service", "service/history.jsonl", "service/runs.jsonl", "service/run.lock"])
def test_a_service_appends_to_no_link(tmp_path, own, place, kind):
    cache = watched(tmp_path / "cache")
    path = cache.root / place
    path.parent.mkdir(parents=True)
    if kind == "link" or place == "service":
        path.symlink_to(own if place == "service" else own / "thesis.tex")
    else:
        path.hardlink_to(own / "thesis.tex")
    before = seen(own)
    with pytest.raises((InputError, OSError), match=r"is a link|is not a regular file|has 2 names"), cache.held():
        cache.history.note("failed", "item", *SMALL, reason="r")
    assert seen(own) == before


def test_the_quarantine_is_not_kept_through_a_link(tmp_path, own):
    sweep, root = planned(tmp_path / "sweep"), tmp_path / "cache"
    root.mkdir()
    (root / "quarantine").symlink_to(own)
    before = seen(own)
    line = {"candidate": sweep.candidates(*SMALL)[0].key, "reason": "hung"}
    with pytest.warns(RuntimeWarning, match="is a link, and nothing is written"), shared(sweep, root):
        sweep.note("quarantine", line)
    assert seen(own) == before


def test_lines_without_end_and_torn_lines_without_number_take_no_time(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "_LONGEST_LINE", 1 << 16)
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"' * (1 << 17) + b"\n" + b"x" * (1 << 18) + b'\n{"key": "a"}\n' + b'{"key": "b"}')
    found = Journal(path, "key")
    started = time.monotonic()
    assert list(found.latest()) == ["a", "b"]
    with path.open("a") as file:
        file.write('\n{"key": "c"}\n')
    assert list(found.latest()) == ["a", "b", "c"]
    assert time.monotonic() - started < 20
    os.truncate(path, LARGEST_JOURNAL + 1)
    with pytest.raises(InputError, match="may have at most"):
        found.latest()


def test_json_nested_without_end_is_passed_over(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_text('{"key": "a"}\n' + '{"key": ' + "[" * 100_000 + "\n" + '{"key": "b"}\n')
    assert list(Journal(path, "key").latest()) == ["a", "b"]
    (tmp_path / "root/quarantine" / H200.key).mkdir(parents=True)
    (tmp_path / "root/quarantine" / H200.key / "x.json").write_text("[" * 100_000)
    with shared(planned(tmp_path / "sweep"), tmp_path / "root"):
        pass
    assert Path(path).exists()
