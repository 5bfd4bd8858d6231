"""Folders, records and packs that others can write are not loaded, unless that is allowed."""

import os

import pytest
from cache_samples import find, make, put, quietly

from tilekern.cache import FolderLayer, PackLayer, write_pack

OTHER_USER = 12345
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")


@pytest.fixture(autouse=True)
def usual_umask(monkeypatch):
    monkeypatch.delenv("TILEKERN_TRUST_SHARED", raising=False)
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777, 0o2775])
@pytest.mark.parametrize("place", ["", "v1", "v1/sm_90-h200-132", "v1/sm_90-h200-132/tileiras-13.4.92/rms_norm"])
def test_a_folder_that_others_can_write_is_not_loaded_unless_that_is_allowed(tmp_path, monkeypatch, mode, place):
    put(tmp_path / "cache")
    (tmp_path / "cache" / place).chmod(mode)
    layer = FolderLayer(tmp_path / "cache", f"shared {mode} {place}")
    with pytest.warns(RuntimeWarning, match="chmod -R go-w.*TILEKERN_TRUST_SHARED=1") as caught:
        assert [find([layer]) for _ in range(3)] == [None] * 3
    assert len(caught) == 1
    monkeypatch.setenv("TILEKERN_TRUST_SHARED", "1")
    assert find([layer])
    monkeypatch.setenv("TILEKERN_TRUST_SHARED", "0")
    assert quietly([layer]) is None
    (tmp_path / "cache" / place).chmod(0o755)
    assert find([layer])


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_a_record_or_pack_that_others_can_write_is_not_loaded(tmp_path, monkeypatch, mode):
    record = put(tmp_path / "cache")
    write_pack(tmp_path / "a.pack", [make()])
    for path in (record, tmp_path / "a.pack"):
        path.chmod(mode)
    layers = [FolderLayer(tmp_path / "cache", "user"), PackLayer(tmp_path / "a.pack")]
    for layer in layers:
        assert quietly([layer]) is None
    monkeypatch.setenv("TILEKERN_TRUST_SHARED", "1")
    assert find([layers[0]])
    assert find([PackLayer(tmp_path / "a.pack")])


@as_root
@pytest.mark.parametrize("place", ["", "v1", "v1/sm_90-h200-132", "record"])
def test_files_of_another_user_are_not_loaded(tmp_path, monkeypatch, place):
    record = put(tmp_path / "cache")
    os.chown(record if place == "record" else tmp_path / "cache" / place, OTHER_USER, 0)
    layer = FolderLayer(tmp_path / "cache", f"foreign {place}")
    with pytest.warns(RuntimeWarning, match=f"belongs to another user .uid {OTHER_USER}.*TILEKERN_TRUST_SHARED=1"):
        assert find([layer]) is None
    monkeypatch.setenv("TILEKERN_TRUST_SHARED", "1")
    assert find([layer])


@as_root
def test_a_pack_of_another_user_is_not_loaded(tmp_path):
    write_pack(tmp_path / "foreign.pack", [make()])
    os.chown(tmp_path / "foreign.pack", OTHER_USER, 0)
    with pytest.warns(RuntimeWarning, match=f"uid {OTHER_USER}"):
        assert find([PackLayer(tmp_path / "foreign.pack")]) is None
    assert find([PackLayer(tmp_path / "foreign.pack", "package", "package")]), "as its code, it came with an install"


@as_root
@pytest.mark.processes
def test_what_is_roots_is_loaded_by_other_users(tmp_path):
    put(tmp_path / "cache")
    for path in (tmp_path, *tmp_path.parents):
        if not path.stat().st_mode & 0o001:
            path.chmod(path.stat().st_mode | 0o011)
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(OTHER_USER)
        os.setuid(OTHER_USER)
        os._exit(0 if find([FolderLayer(tmp_path / "cache", "root")]) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_sticky_folder_is_trusted(tmp_path):
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    put(tmp_path / "tmp")
    assert (tmp_path / "tmp" / "v1").stat().st_mode & 0o022 == 0
    assert find([FolderLayer(tmp_path / "tmp", "user")])


def test_what_is_written_with_a_loose_umask_is_not_others_to_write(tmp_path):
    os.umask(0)
    put(tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.stat().st_mode & 0o022]
    assert find([FolderLayer(tmp_path / "cache", "user")])


def test_a_folder_that_a_team_shares_stays_shared_as_it_grows(tmp_path, monkeypatch):
    os.umask(0o002)
    (tmp_path / "team").mkdir()
    (tmp_path / "team").chmod(0o2775)
    record = put(tmp_path / "team")
    assert all(folder.stat().st_mode & 0o020 for folder in record.parents[:4])
    assert not record.stat().st_mode & 0o022
    monkeypatch.setenv("TILEKERN_TRUST_SHARED", "1")
    assert find([FolderLayer(tmp_path / "team", "team")])
