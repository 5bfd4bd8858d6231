"""Packs pushed to and pulled from filesystems and a web server; what every place has in common."""

import collections
import functools
import http.server
import json
import os
import shutil

import pytest
from cache_samples import B200, PROBLEM, put
from ship_samples import URL_OF_NOTHING, Commands, has_both, make_pack, served, sha256

from tilekern.cache import FolderLayer, Store
from tilekern.cache_tools.commands.pull import was_pulled


@pytest.fixture
def cli(capsys):
    return Commands(capsys)


@pytest.fixture
def pack(tmp_path):
    return make_pack(tmp_path)


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "pulled"


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


def test_a_shared_folder_carries_a_pack(cli, pack, cache, tmp_path):
    url = f"file://{tmp_path}/shared/team/kernels.pack"
    pushed = cli.json("push", pack, url)
    assert (pushed["pushed"], pushed["place"], pushed["records"]) == (True, url, 2)
    assert pushed["sha256"] == sha256(pack)
    assert pushed["targets"] == ["sm_100-b200-148", "sm_90-h200-132"]
    assert pushed["toolkits"] == ["tileiras-13.4.92"]
    assert cli.json("push", pack, url)["pushed"] is False
    assert {path.name for path in (tmp_path / "shared" / "team").iterdir()} == {"kernels.pack", "kernels.pack.sha256"}
    assert cli.json("pull", url, "--cache-dir", cache) == {
        "url": url,
        "downloaded": True,
        "sha256": sha256(pack),
        "cache_dir": str(cache),
        "installed": 2,
    }
    assert has_both(cache)
    assert cli.json("verify", "--cache-dir", cache)["broken"] == []


def test_what_lies_beside_a_pack_is_what_sha256sum_writes(cli, pack, tmp_path):
    cli.json("push", pack, f"file://{tmp_path}/shared/b200.pack")
    assert (tmp_path / "shared" / "b200.pack.sha256").read_text() == f"{sha256(pack)}  b200.pack\n"


def test_a_filesystem_in_memory_carries_a_pack(cli, pack, cache):
    """In one process, as every command here."""
    cli.json("push", pack, "memory://bucket/team/kernels.pack")
    assert cli.json("pull", "memory://bucket/team/kernels.pack", "--cache-dir", cache)["installed"] == 2
    assert has_both(cache)


def test_a_web_server_s_pack_is_pulled_once(cli, pack, cache, web):
    address, folder, fetched = web
    cli.json("push", pack, f"file://{folder}/kernels.pack")
    url = f"{address}/kernels.pack"
    assert cli.json("pull", url, "--cache-dir", cache)["downloaded"] is True
    assert fetched["/kernels.pack"] == 1
    again = cli.json("pull", url, "--cache-dir", cache)
    assert (again["downloaded"], again["installed"], again["sha256"]) == (False, 0, sha256(pack))
    assert fetched["/kernels.pack"] == 1
    assert "has this pack already" in cli("pull", url, "--cache-dir", cache)[1]


def test_a_web_server_that_states_no_digest_serves_as_well(cli, pack, cache, web):
    address, folder, fetched = web
    shutil.copy(pack, folder)
    for _ in range(2):
        assert cli.json("pull", f"{address}/kernels.pack", "--cache-dir", cache)["downloaded"] is True
    assert fetched["/kernels.pack"] == 2
    pinned = cli.json("pull", f"{address}/kernels.pack", "--cache-dir", cache, "--digest", sha256(pack))
    assert pinned["downloaded"] is False


def test_a_signed_url_is_asked_for_one_file_alone(cli, pack, cache, web):
    address, folder, fetched = web
    shutil.copy(pack, folder)
    assert cli.json("pull", f"{address}/kernels.pack?signature=1", "--cache-dir", cache)["installed"] == 2
    assert set(fetched) == {"/kernels.pack?signature=1"}


def test_a_pinned_pack_that_is_there_is_asked_of_nobody(cli, pack, cache, tmp_path):
    cli.json("push", pack, f"file://{tmp_path}/shared/kernels.pack")
    cli.json("pull", f"file://{tmp_path}/shared/kernels.pack", "--cache-dir", cache)
    assert cli.json("pull", URL_OF_NOTHING, "--cache-dir", cache, "--digest", sha256(pack))["downloaded"] is False
    cli.refused(
        "pull", URL_OF_NOTHING, "--cache-dir", tmp_path / "other", "--digest", sha256(pack), says="cannot connect"
    )


@pytest.mark.parametrize("loss", ["record", "blob", "note"])
def test_what_was_lost_since_is_pulled_again(cli, pack, cache, tmp_path, loss):
    url = f"file://{tmp_path}/shared/kernels.pack"
    cli.json("push", pack, url)
    cli.json("pull", url, "--cache-dir", cache)
    if loss == "record":
        next(Store(cache).entries()).path.unlink()
    elif loss == "blob":
        next(Store(cache).blobs()).path.unlink()
    else:
        next((cache / "pulled").iterdir()).write_text("{")
    assert cli.json("pull", url, "--cache-dir", cache)["downloaded"] is True
    assert cli.json("verify", "--cache-dir", cache)["broken"] == []
    assert has_both(cache)


def test_a_record_that_was_tuned_since_stays(cli, pack, cache, tmp_path):
    url = f"file://{tmp_path}/shared/kernels.pack"
    cli.json("push", pack, url)
    cli.json("pull", url, "--cache-dir", cache)
    put(cache, b"better" * 100, target=B200)
    assert cli.json("pull", url, "--cache-dir", cache)["downloaded"] is False
    record = FolderLayer(cache, "cache").read_record(B200["key"], "tileiras-13.4.92", "rms_norm", PROBLEM)
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
def test_a_pull_of_a_damaged_pack_leaves_nothing(cli, pack, cache, tmp_path, how, stated):
    folder = tmp_path / "shared"
    cli.json("push", pack, f"file://{folder}/kernels.pack")
    (folder / "kernels.pack").write_bytes(damaged(pack, how))
    if not stated:
        (folder / "kernels.pack.sha256").unlink()
    url = f"file://{folder}/kernels.pack"
    cli.refused("pull", url, "--cache-dir", cache, says=url)
    assert not cache.exists()
    out = tmp_path / "kept.pack"
    out.write_bytes(b"as it was")
    before = set(tmp_path.iterdir())
    cli.refused("pull", url, "--out", out, says=url)
    assert out.read_bytes() == b"as it was"
    assert set(tmp_path.iterdir()) == before


def test_another_pack_than_the_one_that_is_wanted_is_refused(cli, pack, cache, tmp_path):
    cli.json("push", pack, f"file://{tmp_path}/shared/kernels.pack")
    url, wanted = f"file://{tmp_path}/shared/kernels.pack", "0" * 64
    cli.refused("pull", url, "--cache-dir", cache, "--digest", wanted, says=("another pack", wanted, sha256(pack)))
    os.unlink(tmp_path / "shared" / "kernels.pack.sha256")
    cli.refused("pull", url, "--cache-dir", cache, "--digest", wanted, says=(wanted, sha256(pack)))
    assert not cache.exists()


def test_what_nobody_signed_is_not_pulled_where_it_must_be(cli, pack, cache, tmp_path, monkeypatch):
    cli.json("push", pack, f"file://{tmp_path}/shared/kernels.pack")
    monkeypatch.setenv("TILEKERN_TRUST", "signed")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    cli.refused("pull", f"file://{tmp_path}/shared/kernels.pack", "--cache-dir", cache, says="no trust root signed it")
    assert not cache.exists()


def test_a_digest_that_is_none_is_refused(cli, pack, cache, tmp_path):
    cli.json("push", pack, f"file://{tmp_path}/shared/kernels.pack")
    (tmp_path / "shared" / "kernels.pack.sha256").write_text("<html>\n")
    cli.refused("pull", f"file://{tmp_path}/shared/kernels.pack", "--cache-dir", cache, says="sha256sum")


def test_a_bad_pack_is_not_pushed(cli, pack, tmp_path):
    pack.write_bytes(damaged(pack, "flipped"))
    cli.refused("push", pack, f"file://{tmp_path}/shared/kernels.pack", says=str(pack))
    cli.refused("push", tmp_path / "none.pack", f"file://{tmp_path}/shared/kernels.pack", says="none.pack")
    assert not (tmp_path / "shared").exists()


def test_a_push_replaces_an_older_pack(cli, pack, cache, tmp_path):
    url = f"file://{tmp_path}/shared/kernels.pack"
    cli.json("push", pack, url)
    newer = make_pack(tmp_path, b"newer" * 50, name="newer.pack")
    cli.json("pull", url, "--cache-dir", cache)
    assert cli.json("push", newer, url)["pushed"] is True
    pulled = cli.json("pull", url, "--cache-dir", cache)
    assert (pulled["downloaded"], pulled["installed"], pulled["sha256"]) == (True, 2, sha256(newer))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("kernels.pack", ["is not a URL", "oci://", "hf://", "s3://"]),
        ("s3://", ["is not a URL"]),
        ("nonsense://bucket/kernels.pack", ["nonsense"]),
        ("oci://kernels:b200", ["not a place in a registry", "oci://registry.example.com/team/kernels:h200"]),
        ("oci://team/kernels:b200", ["not a place in a registry"]),
        ("oci://registry.example.com/Team/Kernels:b200", ["not a place in a registry"]),
        ("oci://registry.example.com/../kernels:b200", ["not a place in a registry"]),
        ("oci://user:secret@registry.example.com/kernels:b200", ["not a place in a registry"]),
        ("oci://127.0.0.1:1/team/kernels:b200", ["127.0.0.1", "refused"]),
        (URL_OF_NOTHING, [f"cannot connect to {URL_OF_NOTHING}: ", "Connect call failed"]),
        ("https://no-such-host.invalid/at/all.pack", ["cannot connect to https://no-such-host.invalid/at/all.pack"]),
        ("file:///nowhere/at/all.pack", ["there is no file:///nowhere/at/all.pack"]),
        ("file:///", ["file:/// is a folder"]),
    ],
)
def test_a_place_that_cannot_be_pulled_from_is_one_line(cli, cache, url, words):
    cli.refused("pull", url, "--cache-dir", cache, says=words)
    assert not cache.exists()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("memory://bucket/kernels.zip", [".pack"]),
        ("memory://other/", [".pack"]),
        (URL_OF_NOTHING, ["not pushed to"]),
        ("oci://127.0.0.1:1/team/kernels:b200", ["127.0.0.1", "refused"]),
    ],
)
def test_a_place_that_cannot_be_pushed_to_is_one_line(cli, pack, url, words):
    cli.refused("push", pack, url, says=words)


def test_options_that_contradict_each_other_are_refused(cli, cache, tmp_path):
    url = "memory://bucket/none.pack"
    cli.refused("pull", url, "--cache-dir", cache, "--out", "x.pack", says=("--out", "--cache-dir"))
    cli.refused("pull", url, "--out", "x.zip", says=".pack")
    cli.refused("pull", url, "--out", tmp_path / "none" / "x.pack", says="there is no folder")
    cli.refused("pull", url, "--digest", "abc", says="--digest must be 64")
    cli.refused("pull", url, "--plain-http", says="oci:// alone")


def test_what_is_not_installed_is_named(cli, pack, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "fsspec.core", None)
    monkeypatch.delitem(__import__("sys").modules, "tilekern.cache_tools.remotes.filesystem", raising=False)
    cli.refused("push", pack, "memory://bucket/kernels.pack", says="pip install 'tilekern[ship]'")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"schema": 1, "records": [3]}', '{"schema": 1}', "\xff", "{}"])
def test_a_damaged_note_of_what_was_pulled_is_none(tmp_path, text):
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
