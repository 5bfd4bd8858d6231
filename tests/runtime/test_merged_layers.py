"""A machine's layers as one, by which ranks agree without reading records: it answers as a snapshot of them does."""

import itertools

import pytest
from marks import needs_compiler
from one_record import H200, SPEC
from rank_jobs import OTHER, fill, record

from tilekern import cache
from tilekern.cache.packs.pack import Pack
from tilekern.errors import RanksDiffer
from tilekern.runtime.ranks.merged import Merged
from tilekern.runtime.ranks.snapshot import Snapshot
from tilekern.spec.source import source_digest

pytestmark = needs_compiler
COLUMNS = (48, 64, 80, 96, 112)


def pack(path, compiled, *columns, **changes):
    cache.write_pack(path, [record(compiled, each, **changes) for each in columns])
    return cache.PackLayer(path, path.name)


@pytest.fixture
def layers(compiled, tmp_path):
    """A folder before packs, which hide each other's records; a stale record, and one of another GPU of the arch."""
    h100 = {**record(compiled)[0].target, "key": "sm_90-h100_80gb_hbm3-132", "name": "H100"}
    return [
        cache.FolderLayer(fill(tmp_path / "user", compiled, 48), "user"),
        pack(tmp_path / "a.pack", compiled, 48, 64, config=OTHER),
        pack(tmp_path / "b.pack", compiled, 64, 80),
        pack(tmp_path / "stale.pack", compiled, 80, 96, source_digest="5" * 64),
        pack(tmp_path / "h100.pack", compiled, 112, target=h100),
    ]


def merged(layers, toolkit=None, **changes):
    return Merged("sm_90", layers, toolkit, **changes)


def answers(layer, toolkit):
    """What lookups of each problem and its neighbours find in a layer, for the GPU and any of its arch."""
    for columns, rows, bucketed in itertools.product(COLUMNS, (64, 128), ((), ("rows",))):
        problem = dict(SPEC.problem(rows=rows, columns=columns, dtype="bfloat16"))
        hits = cache.hits(
            SPEC.name, problem, bucketed=bucketed, target_key=H200.key, arch="sm_90", toolkit_key=toolkit,
            source=source_digest(SPEC.module), layers=[layer],
        )  # fmt: skip
        yield [(hit.record.data, hit.blobs, hit.exact_target, hit.exact_bucket) for hit in hits]


@pytest.mark.parametrize("installed", [True, False])
def test_lookups_find_what_they_find_in_a_snapshot(layers, installed):
    toolkit = layers[0].toolkits(H200.key)[0] if installed else None
    both = [list(answers(each, toolkit)) for each in (merged(layers, toolkit), Snapshot.take("sm_90", layers, toolkit))]
    assert both[0] == both[1]
    assert [bool(found) for found in both[0]].count(True) >= 12
    configs = {found[0][0].count(b'"tile') for found in both[0] if found}
    assert configs
    assert merged(layers, toolkit).snapshot().digest == Snapshot.take("sm_90", layers, toolkit).digest


def test_records_are_read_as_they_are_asked_for(layers, monkeypatch):
    read, real = [], Pack.read
    monkeypatch.setattr(Pack, "read", lambda self, name: read.append(name) or real(self, name))
    one = merged(layers)
    assert len(one.digest) == 64
    assert (len(one), one.targets()) == (5, ["sm_90-h100_80gb_hbm3-132", H200.key])
    assert not read
    [toolkit] = one.toolkits(H200.key)
    problem = dict(SPEC.problem(rows=64, columns=64, dtype="bfloat16"))
    for _ in range(2):
        found = one.read_record(H200.key, toolkit, SPEC.name, problem)
    assert found.config == dict(OTHER)
    assert [name for name in read if name.endswith(".json")] == [name for name in read if "columns=64" in name]
    for digest in found.digests:
        assert one.read_blob(digest)


def test_each_change_of_what_lookups_find_is_another_digest(layers, compiled, tmp_path):
    first, *others = layers
    given = {
        "as it is": merged(layers),
        "another toolkit": merged(layers, "tileiras-1-cuda_tile-1"),
        "invariant": merged(layers, invariant=True),
        "another order": merged([first, *reversed(others)]),
        "one less": merged(layers[:-1]),
        "a folder's config": merged(
            [cache.FolderLayer(fill(tmp_path / "other", compiled, 48, config=OTHER), "user"), *others]
        ),
        "a pack's config": merged(
            [*layers[:2], pack(tmp_path / "c.pack", compiled, 64, 80, config=OTHER), *layers[3:]]
        ),
        "a package's pack": merged([*layers[:-1], cache.PackLayer(layers[-1].path, "h100.pack", "package", "p")]),
    }
    assert len({each.digest for each in given.values()}) == len(given)
    again = [cache.FolderLayer(first.root, "user"), *(cache.PackLayer(each.path, each.name) for each in others)]
    elsewhere = pack(
        tmp_path / "b200.pack", compiled, 48, target=record(compiled)[0].target | {"key": "sm_100-b200-148"}
    )
    assert merged([*again, elsewhere]).digest == given["as it is"].digest, "packs of other archs do not count"


def test_other_folders_before_the_packs_take_the_place_of_its_own(layers, compiled, tmp_path):
    """Ranks with equal packs compare the records of these folders alone."""
    theirs = cache.FolderLayer(fill(tmp_path / "theirs", compiled, 48, 112, config=OTHER), "user")
    one, other = merged(layers), merged([theirs, *layers[1:]])
    assert (one.rest, one.digest == other.digest) == (other.rest, False)
    wanted = list(answers(other, None))
    assert list(answers(one, None)) != wanted
    both = one.having(other.folders)
    assert (list(answers(both, None)), both.digest) == (wanted, other.digest)
    behind = merged([layers[1], theirs, *layers[2:]])
    assert (len(behind.folders), behind.rest != one.rest) == (0, True), "a folder behind a pack counts with the packs"


def test_what_was_agreed_on_is_found_when_the_files_are_gone(layers, tmp_path):
    one = merged(layers)
    wanted = list(answers(Snapshot.take("sm_90", layers, None), None))
    for path in [*tmp_path.glob("*.pack"), *tmp_path.glob("user/v1/*/*/*/*.json")]:
        path.unlink()
    assert list(answers(one, None)) == wanted


def test_a_pack_that_is_written_to_in_place_is_an_error(layers):
    one = merged(layers)
    layers[2].path.write_bytes(layers[1].path.read_bytes())
    with pytest.raises(RanksDiffer, match=r"b\.pack was written to after the ranks had agreed"):
        list(answers(one, None))
