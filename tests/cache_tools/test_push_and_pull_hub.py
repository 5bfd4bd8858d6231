"""Packs in a repository of the Hugging Face hub: its real client against a hub of this machine.

The client moves large files by the hub's older protocol here (``HF_HUB_DISABLE_XET``); the hub's own storage, which
newer ones talk to, cannot be had on this side.
"""

import json
import os

import pytest
from command_line import is_refusal, process
from local_hub import TOKEN, Hub, handler_of
from ship_samples import has_both, make_pack, served, sha256

pytestmark = pytest.mark.processes

URL = "hf://team/kernels/packs/b200.pack"


@pytest.fixture
def hub():
    return Hub()


@pytest.fixture
def run(hub, tmp_path):
    """The command line in a process of its own, since the client reads its endpoint when it is imported."""
    with served(handler_of(hub)) as address:

        def command(*arguments, token=TOKEN):
            (tmp_path / "temporary").mkdir(exist_ok=True)
            env = os.environ | {
                "HF_ENDPOINT": address,
                "HF_TOKEN": token,
                "HF_HOME": str(tmp_path / "hub home"),
                "HF_HUB_DISABLE_XET": "1",
                "TMPDIR": str(tmp_path / "temporary"),
            }
            env.pop("HF_HUB_OFFLINE", None)
            ran = process(*arguments, env=env)
            assert list((tmp_path / "temporary").iterdir()) == []
            return ran.returncode, ran.stdout, ran.stderr

        yield command


@pytest.fixture
def as_json(run):
    def command(*arguments):
        code, out, err = run(*arguments, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return command


def test_a_repository_carries_a_pack(as_json, hub, tmp_path):
    pack, cache = make_pack(tmp_path), tmp_path / "pulled"
    pushed = as_json("push", pack, URL)
    assert (pushed["pushed"], pushed["sha256"]) == (True, sha256(pack))
    assert pushed["place"] == f"hf://team/kernels@{hub.branches['main']}/packs/b200.pack"
    assert as_json("push", pack, URL)["pushed"] is False
    pulled = as_json("pull", URL, "--cache-dir", cache)
    assert (pulled["downloaded"], pulled["installed"], pulled["sha256"]) == (True, 2, sha256(pack))
    assert has_both(cache)
    assert as_json("pull", URL, "--cache-dir", cache)["downloaded"] is False
    assert hub.downloads == 1


def test_a_revision_is_pulled_from_for_ever_and_a_branch_is_pushed_to(as_json, hub, tmp_path):
    hub.branches["next"] = "0" * 40
    older, newer = make_pack(tmp_path), make_pack(tmp_path, b"newer" * 50, name="newer.pack")
    branch = "hf://team/kernels@next/b200.pack"
    place = as_json("push", older, branch)["place"]
    assert as_json("push", newer, branch)["pushed"] is True
    assert hub.commits[hub.branches["main"]] == {}
    assert as_json("pull", place, "--out", tmp_path / "out.pack")["sha256"] == sha256(older)
    assert as_json("pull", branch, "--out", tmp_path / "out.pack")["sha256"] == sha256(newer)


def test_a_file_that_was_changed_in_the_hub_is_refused(run, as_json, hub, tmp_path):
    pack = make_pack(tmp_path)
    as_json("push", pack, URL)
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    hub.contents[sha256(pack)] = bytes(data)
    is_refusal(*run("pull", URL, "--cache-dir", tmp_path / "pulled"), URL)
    assert not (tmp_path / "pulled").exists()


def test_what_is_not_there_and_what_is_no_place_are_one_line(run, tmp_path):
    pack, cache = make_pack(tmp_path), tmp_path / "pulled"
    is_refusal(*run("pull", URL, "--cache-dir", cache), f"there is no {URL}")
    is_refusal(*run("pull", "hf://team/none/b200.pack", "--cache-dir", cache), "hf://team/none/b200.pack")
    is_refusal(*run("push", pack, "hf://team/none/b200.pack"), "hf://team/none/b200.pack")
    is_refusal(*run("push", pack, "hf://team/kernels@none/b200.pack"), "none")
    is_refusal(*run("push", pack, "hf://team/kernels"), ".pack")
    is_refusal(*run("pull", URL, "--cache-dir", cache, token="hf_a_wrong_one"), URL)
    assert not cache.exists()
