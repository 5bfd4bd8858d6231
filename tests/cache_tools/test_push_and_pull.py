"""Packs pushed to and pulled from filesystems and a web server; what every place has in common."""

import collections
import functools
import http.server
import json
import os
import shutil

import pytest
from cache_samples import B200, PROBLEM, put
from ship_samples import URL_OF_NOTHING, carried, has_both, make_pack, served, sha256

from tilekern.cache import FolderLayer, Store
from tilekern.cache_tools.commands.pull import was_pulled


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """The folder for temporary files, which every command leaves empty."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield folder
    assert list(folder.iterdir()) == []


@pytest.fixture
def shared(cli, pack, tmp_path):
    """The URL that the pack was pushed to, in a folder."""
    url = f"file://{tmp_path}/shared/kernels.pack"
    cli.json("push", pack, url)
    return url


@pytest.fixture
def web(tmp_path):
    """A web server of the folder ``www``; its address, and how often each path was fetched."""
    (tmp_path / "www").mkdir()
    fetched = collections.Counter()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):
            fetched[self.path] += 1
            super().do_GET()

        def log_message(self, *_):
            pass

    with served(functools.partial(Handler, directory=str(tmp_path / "www"))) as address:
        yield address, tmp_path / "www", fetched


@pytest.mark.parametrize("place", ["file://FOLDER/shared/team/kernels.pack", "memory://bucket/team/kernels.pack"])
def test_a_filesystem_carries_a_pack(cli, pack, root, tmp_path, place):
    url = place.replace("FOLDER", str(tmp_path))
    pushed = carried(cli, pack, url, root)
    assert pushed["place"] == url
    assert pushed["targets"] == ["sm_100-b200-148", "sm_90-h200-132"]
    assert pushed["toolkits"] == ["tileiras-13.4.92"]
    assert cli.json("pull", url) == {
        "url": url, "downloaded": False, "sha256": sha256(pack), "cache_dir": str(root), "installed": 0, "kept": {},
    }  # fmt: skip
    assert cli.json("verify")["broken"] == []


def test_a_push_writes_the_pack_and_its_sha256sum(shared, pack, tmp_path):
    contents = {path.name: path.read_bytes() for path in (tmp_path / "shared").iterdir()}
    line = f"{sha256(pack)}  kernels.pack\n".encode()
    assert contents == {"kernels.pack": pack.read_bytes(), "kernels.pack.sha256": line}


def test_a_web_server_s_pack_is_pulled_once(cli, pack, web):
    address, folder, fetched = web
    cli.json("push", pack, f"file://{folder}/kernels.pack")
    url = f"{address}/kernels.pack"
    assert cli.json("pull", url)["downloaded"] is True
    assert fetched["/kernels.pack"] == 1
    again = cli.json("pull", url)
    assert (again["downloaded"], again["installed"], again["sha256"]) == (False, 0, sha256(pack))
    assert fetched["/kernels.pack"] == 1
    assert "has this pack already" in cli("pull", url)[1]


def test_a_web_server_need_not_state_a_digest(cli, pack, web):
    address, folder, fetched = web
    shutil.copy(pack, folder)
    for _ in range(2):
        assert cli.json("pull", f"{address}/kernels.pack")["downloaded"] is True
    assert fetched["/kernels.pack"] == 2
    pinned = cli.json("pull", f"{address}/kernels.pack", "--digest", sha256(pack))
    assert pinned["downloaded"] is False


def test_a_signed_url_is_asked_for_one_file_alone(cli, pack, web):
    address, folder, fetched = web
    shutil.copy(pack, folder)
    assert cli.json("pull", f"{address}/kernels.pack?signature=1")["installed"] == 2
    assert set(fetched) == {"/kernels.pack?signature=1"}


def test_a_pinned_pack_that_is_here_needs_no_server(cli, pack, shared, tmp_path):
    cli.json("pull", shared)
    pinned = ("pull", URL_OF_NOTHING, "--digest", sha256(pack))
    assert cli.json(*pinned)["downloaded"] is False
    cli.refused(*pinned, root=tmp_path / "other", says="cannot connect")


@pytest.mark.parametrize("loss", ["record", "blob", "note"])
def test_lost_files_are_pulled_again(cli, shared, root, loss):
    cli.json("pull", shared)
    if loss == "record":
        next(Store(root).entries()).path.unlink()
    elif loss == "blob":
        next(Store(root).blobs()).path.unlink()
    else:
        next((root / "pulled").iterdir()).write_text("{")
    assert cli.json("pull", shared)["downloaded"] is True
    assert cli.json("verify")["broken"] == []
    assert has_both(root)


def test_a_record_that_was_tuned_since_stays(cli, shared, root):
    cli.json("pull", shared)
    put(root, b"better" * 100, target=B200)
    assert cli.json("pull", shared)["downloaded"] is False
    record = FolderLayer(root, "cache").read_record(B200["key"], "tileiras-13.4.92", "rms_norm", PROBLEM)
    assert record.artifacts["aligned"].size == 600


def test_a_pack_is_kept_in_a_file(cli, pack, tmp_path, web):
    address, folder, fetched = web
    cli.json("push", pack, f"file://{folder}/kernels.pack")
    out = tmp_path / "kept.pack"
    command = ("pull", f"{address}/kernels.pack", "--out", out)
    assert cli.json(*command) == {"url": command[1], "downloaded": True, "sha256": sha256(pack), "file": str(out)}
    assert out.read_bytes() == pack.read_bytes()
    assert cli.json(*command)["downloaded"] is False
    assert fetched["/kernels.pack"] == 1
    out.write_bytes(b"other")
    assert cli.json(*command)["downloaded"] is True
    assert has_both(out)


def damaged(pack, how):
    data = bytearray(pack.read_bytes())
    if how == "cut":
        return bytes(data[: len(data) // 2])
    if how == "no pack":
        return b"<html>please log in</html>"
    data[len(data) // 2] ^= 1
    return bytes(data)


@pytest.mark.parametrize("stated", [True, False])
@pytest.mark.parametrize("how", ["cut", "flipped", "no pack"])
def test_a_pull_of_a_damaged_pack_leaves_nothing(cli, pack, shared, root, tmp_path, how, stated):
    (tmp_path / "shared" / "kernels.pack").write_bytes(damaged(pack, how))
    if not stated:
        (tmp_path / "shared" / "kernels.pack.sha256").unlink()
    out = tmp_path / "kept.pack"
    out.write_bytes(b"as it was")
    before = set(tmp_path.iterdir())
    cli.refused("pull", shared, says=shared)
    cli.refused("pull", shared, "--out", out, says=shared)
    assert out.read_bytes() == b"as it was"
    assert set(tmp_path.iterdir()) == before


def test_another_pack_than_the_one_that_is_wanted_is_refused(cli, pack, shared, root, tmp_path):
    wanted = "0" * 64
    cli.refused("pull", shared, "--digest", wanted, says=("another pack", wanted, sha256(pack)))
    os.unlink(tmp_path / "shared" / "kernels.pack.sha256")
    cli.refused("pull", shared, "--digest", wanted, says=(wanted, sha256(pack)))
    assert not root.exists()


def test_under_signed_unsigned_packs_are_not_pulled(cli, shared, root, monkeypatch):
    monkeypatch.setenv("TILEKERN_TRUST", "signed")
    cli.refused("pull", shared, says="no trust root signed it")
    assert not root.exists()


def test_an_invalid_stated_digest_is_refused(cli, shared, tmp_path):
    (tmp_path / "shared" / "kernels.pack.sha256").write_text("<html>\n")
    cli.refused("pull", shared, says="sha256sum")


def test_a_bad_pack_is_not_pushed(cli, pack, tmp_path):
    pack.write_bytes(damaged(pack, "flipped"))
    cli.refused("push", pack, f"file://{tmp_path}/shared/kernels.pack", says=str(pack))
    assert not (tmp_path / "shared").exists()


def test_a_push_replaces_an_older_pack(cli, shared, tmp_path):
    newer = make_pack(tmp_path, b"newer" * 50, name="newer.pack")
    cli.json("pull", shared)
    assert cli.json("push", newer, shared)["pushed"] is True
    pulled = cli.json("pull", shared)
    assert (pulled["downloaded"], pulled["installed"], pulled["sha256"]) == (True, 2, sha256(newer))


def test_a_missing_package_is_named(cli, pack, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "fsspec.core", None)
    monkeypatch.delitem(__import__("sys").modules, "tilekern.cache_tools.remotes.filesystem", raising=False)
    cli.refused("push", pack, "memory://bucket/kernels.pack", says="pip install 'tilekern[ship]'")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"schema": 1, "records": [3]}', '{"schema": 1}', "\xff", "{}"])
def test_a_damaged_note_of_a_pull_is_ignored(tmp_path, text):
    path = tmp_path / "pulled" / f"{'0' * 64}.json"
    path.parent.mkdir()
    path.write_bytes(text.encode("latin-1"))
    assert not was_pulled(Store(tmp_path), "0" * 64)


def test_a_note_names_records_of_the_cache_alone(tmp_path):
    record = put(tmp_path / "other")
    put(tmp_path / "cache", problem={**PROBLEM, "rows": 1})  # which brings the same artifacts
    path = tmp_path / "cache" / "pulled" / f"{'0' * 64}.json"
    path.parent.mkdir(parents=True)
    name = f"../other/{record.relative_to(tmp_path / 'other')}"
    path.write_text(json.dumps({"schema": 1, "records": [name]}))
    assert not was_pulled(Store(tmp_path / "cache"), "0" * 64)
