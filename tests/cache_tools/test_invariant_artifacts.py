"""A record whose invariant kernel has an artifact of its own: every command copies, checks and removes both kernels."""

import pytest
from cache_samples import INVARIANT, SAME, blob_file, find, make, make_classed, put, quietly
from command_line import KEY
from msgspec.structs import replace

from tilekern.cache import FolderLayer, Store

SEPTEMBER = "2026-09-01T12:00:00+00:00"
BLOBS = 3


@pytest.fixture
def classed(root):
    """A cache of one record with an invariant kernel."""
    Store(root).write(*make_classed())
    return root


def hit(root):
    return find([FolderLayer(root, "user")])


def test_push_pull_and_signatures_carry_and_cover_both(classed, tmp_path, key, cli, monkeypatch):
    monkeypatch.setenv("TILEKERN_TRUST_ROOTS", f"{key}.pub")
    cli.json("sign", classed, "--key", key)
    cli.json("pack", tmp_path / "a.pack")
    cli.json("push", tmp_path / "a.pack", f"file://{tmp_path}/far/a.pack")
    monkeypatch.setenv("TILEKERN_TRUST", "signed")
    there = tmp_path / "there"
    cli.json("pull", f"file://{tmp_path}/far/a.pack", root=there)
    assert hit(there).load(INVARIANT) == SAME
    for place in (classed, there, tmp_path / "a.pack"):
        found = cli.json("verify", place)
        assert (found["blobs"], found["signatures"]["trusted"], found["broken"]) == (BLOBS, 1, [])
    blob_file(there, SAME).unlink()
    assert cli.json("pull", f"file://{tmp_path}/far/a.pack", root=there)["downloaded"], "it brings the lost one"
    assert hit(there).load(INVARIANT) == SAME


@pytest.mark.parametrize("how", ["is missing", "holds 3 bytes"])
def test_a_broken_one_is_named_and_the_winner_still_found(classed, tmp_path, key, cli, how):
    blob = blob_file(classed, SAME)
    blob.unlink() if how == "is missing" else blob.write_bytes(b"bad")
    (fault,) = cli.json("verify", classed, code=1)["broken"]
    assert fault["path"].endswith(f"{KEY}.json")
    assert fault["problem"].startswith(f"artifact invariant: blob {blob.name} {how}")
    cli.refused("sign", classed, "--key", key, says=[f"{KEY}.json: artifact invariant: blob", how])
    cli.refused("pack", tmp_path / "a.pack", says=[f"{KEY}.json: artifact invariant: ", blob.name])
    assert not (tmp_path / "a.pack").exists()
    found = quietly([FolderLayer(classed, "user")])
    assert found.load("aligned") == b"fast" * 100
    assert blob.name in found.lost


def test_clear_and_prune_remove_both_and_keep_what_another_record_has(classed, cli):
    record, blobs = make_classed(problem={"rows": 1, "columns": 4096, "dtype": "bfloat16"})
    Store(classed).write(record, blobs)
    for command in (["clear", "--problem", "rows=1"], ["clear", "--all"], ["prune", "--max-size", "0"]):
        planned = cli.json(*command, "--dry-run")
        assert planned["blobs"] == (0 if "rows=1" in command else BLOBS)
    assert cli.json("clear", "--problem", "rows=1", "--yes")["blobs"] == 0
    Store(classed).collect_garbage(grace_s=0.0)
    assert hit(classed).load(INVARIANT) == SAME
    assert cli.json("stats")["orphans"]["count"] == 0
    assert cli.json("clear", "--all", "--yes")["blobs"] == BLOBS
    assert not list(Store(classed).blobs())


def test_a_pack_without_a_class_leaves_the_kernel_of_the_class_and_says_so(classed, tmp_path, cli):
    put(tmp_path / "newer", created=SEPTEMBER)
    cli.json("pack", tmp_path / "newer.pack", root=tmp_path / "newer")
    cli.json("pack", tmp_path / "classed.pack")
    said = cli.said("unpack", tmp_path / "newer.pack")
    assert said.endswith("; 1 better record of the cache stayed: 1 with a kernel for tilekern.invariant()\n")
    pulled = cli.json("pull", f"file://{tmp_path}/newer.pack")
    assert pulled["kept"] == {"with a kernel for tilekern.invariant()": 1}
    assert hit(classed).load(INVARIANT) == SAME
    assert cli.json("unpack", tmp_path / "classed.pack", root=tmp_path / "newer")["installed"] == 1
    assert hit(tmp_path / "newer").load(INVARIANT) == SAME


def test_diff_tells_of_another_class_also_where_the_winner_is_of_it(root, tmp_path, cli):
    record, blobs = make()
    for folder, bits in (("a", "a"), ("b", "b"), ("c", None)):
        facts = {INVARIANT: {"config": record.config, "bits": bits, "median_us": 37.8, "generic": True}} if bits else {}
        Store(tmp_path / folder).write(replace(record, measurement=record.measurement | facts), blobs)
    for other in "bc":
        (item,) = cli.json("diff", tmp_path / "a", tmp_path / other)["changed"]
        assert item["because"] == "other kernel for tilekern.invariant()"
