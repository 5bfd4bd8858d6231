"""Packs in a repository of the Hugging Face hub: its real client against a local stand-in for the hub.

The client uses the hub's older protocol for large files (``HF_HUB_DISABLE_XET``); the newer one needs the hub's own
storage, which cannot run here.
"""

import pytest
from huggingface_hub import HfFileSystem, constants
from local_hub import TOKEN, Hub, handler_of
from ship_samples import carried, make_pack, served, sha256

URL = "hf://team/kernels/packs/b200.pack"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub that the client of this process talks to; nothing temporary may be left behind."""
    hub, temporary = Hub(), tmp_path / "temporary"
    temporary.mkdir()
    with served(handler_of(hub)) as address:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr("tempfile.tempdir", str(temporary))
        HfFileSystem.clear_instance_cache()
        yield hub
        HfFileSystem.clear_instance_cache()
    assert list(temporary.iterdir()) == []


def test_a_repository_carries_a_pack(cli, hub, tmp_path):
    pushed = carried(cli, make_pack(tmp_path), URL, tmp_path / "pulled")
    assert pushed["place"] == f"hf://team/kernels@{hub.branches['main']}/packs/b200.pack"
    assert hub.downloads == 1


def test_a_revision_is_pulled_from_for_ever_and_a_branch_is_pushed_to(cli, hub, tmp_path):
    hub.branches["next"] = "0" * 40
    older, newer = make_pack(tmp_path), make_pack(tmp_path, b"newer" * 50, name="newer.pack")
    branch = "hf://team/kernels@next/b200.pack"
    place = cli.json("push", older, branch)["place"]
    assert cli.json("push", newer, branch)["pushed"] is True
    assert hub.commits[hub.branches["main"]] == {}
    assert cli.json("pull", place, "--out", tmp_path / "out.pack")["sha256"] == sha256(older)
    assert cli.json("pull", branch, "--out", tmp_path / "out.pack")["sha256"] == sha256(newer)


def test_a_file_that_was_changed_in_the_hub_is_refused(cli, hub, tmp_path):
    pack = make_pack(tmp_path)
    cli.json("push", pack, URL)
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    hub.contents[sha256(pack)] = bytes(data)
    cli.refused("pull", URL, "--cache-dir", tmp_path / "pulled", says=URL)
    assert not (tmp_path / "pulled").exists()


def test_missing_packs_and_wrong_urls_are_refused_in_one_line(cli, hub, tmp_path, monkeypatch):
    pack, cache = make_pack(tmp_path), tmp_path / "pulled"
    cli.refused("pull", URL, "--cache-dir", cache, says=f"there is no {URL}")
    cli.refused("pull", "hf://team/none/b200.pack", "--cache-dir", cache, says="hf://team/none/b200.pack")
    cli.refused("push", pack, "hf://team/none/b200.pack", says="hf://team/none/b200.pack")
    cli.refused("push", pack, "hf://team/kernels@none/b200.pack", says="none")
    cli.refused("push", pack, "hf://team/kernels", says=".pack")
    monkeypatch.setenv("HF_TOKEN", "hf_a_wrong_one")
    HfFileSystem.clear_instance_cache()
    cli.refused("pull", URL, "--cache-dir", cache, says=URL)
    assert not cache.exists()
