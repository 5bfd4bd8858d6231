"""The data packages of `.ci/data_packages.py`: which records they have, for which GPU and versions, by whose key."""

import itertools
import os
import zipfile
from email import message_from_bytes

import data_packages
import pytest
from cache_samples import B200, H200, PROBLEM, digest_of, find, made_today, make, make_classed, new_key
from command_line import ROOT

from tilekern.cache import CacheError, Pack, PackLayer, checked_contents, default_layers, lookup, why_better, write_pack
from tilekern.runtime.data_packages import PACKAGES, package_of
from tilekern.runtime.requirements import fits
from tilekern.spec.source import source_digest
from tilekern.spec.targets import resolve

TODAY = made_today()
SOURCE = TODAY["source_digest"]
PREBUILT = sorted((ROOT / "tilekern" / "prebuilt").glob("*.pack"))


def pack_of(path, *records):
    """A pack of records and their blobs."""
    write_pack(path, records)
    return path


def record_of(rows, *contents, made=make, **changes):
    return made(*contents, problem={**PROBLEM, "rows": rows}, **{**TODAY, **changes})


def union_of(folder, packs):
    """The layer of the only data package that packs make."""
    (line,) = data_packages.build(packs, folder, "0.2.1")
    zipfile.ZipFile(folder / line.partition(":")[0]).extractall(folder)
    return PackLayer(folder / "tilekern_packs_h200" / "records.pack")


@pytest.fixture
def packs(tmp_path):
    """Two packs with records of their own, one that both have, and artifacts that both have."""
    shared = record_of(2048, b"two" * 100)
    classed = record_of(512, made=make_classed)
    return [
        pack_of(tmp_path / "a.pack", record_of(1024, b"one" * 100), shared, record_of(64, provenance="predicted")),
        pack_of(tmp_path / "b.pack", record_of(8192, b"one" * 100), shared, classed),
    ]


@pytest.mark.processes
def test_it_serves_what_its_packs_served_and_has_what_is_equal_once(packs, tmp_path):
    union, layers = union_of(tmp_path / "dist", packs), [PackLayer(path) for path in packs]
    for rows in (1, 64, 256, 512, 1024, 1500, 2048, 4096, 8192, 65536):
        for invariant in (False, True):
            asked = {**PROBLEM, "rows": rows}
            ours = find([union], asked, source=SOURCE, invariant=invariant)
            theirs = find(layers, asked, source=SOURCE, invariant=invariant)
            assert (ours.record.data, ours.blobs) == (theirs.record.data, theirs.blobs), rows
    members = Pack(union.path).members
    assert sum(name.endswith(".json") for name in members) == 5
    assert len(members) == len({name for path in packs for name in Pack(path).members})


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (record_of(64), record_of(64, provenance="predicted", created="2026-09-01T12:00:00+00:00")),
        (record_of(64, provenance="predicted"), record_of(64, provenance="default")),
        (record_of(64), record_of(64, space_digest="0" * 64, created="2026-09-01T12:00:00+00:00")),
        (record_of(64, made=make_classed), record_of(64, created="2026-09-01T12:00:00+00:00")),
        (record_of(64, created="2026-09-01T12:00:00+00:00"), record_of(64)),
        (record_of(64, created="2026-08-01T13:00:00+00:00", failed=2), record_of(64, created="2026-08-01T12:59:59Z")),
    ],
    ids=["measured", "predicted", "of today's space", "with a class", "newer", "newer by a second"],
)
def test_of_records_of_one_problem_the_better_one_is_taken_from_whichever_pack(better, worse, tmp_path):
    one, other = (Pack(pack_of(tmp_path / name, record)) for name, record in (("a.pack", better), ("b.pack", worse)))
    for opened in ([one, other], [other, one]):
        ((chosen,),) = (of_gpu.values() for of_gpu in data_packages.choose(opened).values())
        assert chosen.record.data == better[0].data


def test_of_equally_good_records_that_of_the_first_pack_is_taken(tmp_path):
    paths = [pack_of(tmp_path / f"{name}.pack", record_of(64, candidates=name)) for name in (30, 31)]
    ((chosen,),) = (of_gpu.values() for of_gpu in data_packages.choose(list(map(Pack, paths))).values())
    assert chosen.record.candidates == 30


@pytest.mark.processes
def test_it_is_a_package_for_its_gpu_and_versions_signed_and_the_same_bytes_twice(packs, tmp_path, monkeypatch):
    packs.append(pack_of(tmp_path / "c.pack", record_of(64, target=B200)))
    key = new_key(tmp_path / "release.key")
    lines = list(data_packages.build(packs, tmp_path / "one", "0.2.1", key))
    names = ["tilekern_packs_b200-0.2.1-py3-none-any.whl", "tilekern_packs_h200-0.2.1-py3-none-any.whl"]
    assert [line.partition(" ")[0].rstrip(":") for line in lines] == names
    assert "1 records of 1 packs" in lines[0]
    assert "5 records of 2 packs" in lines[1]
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    before = os.umask(0o077)
    try:
        # The lines have the digests of the wheels.
        assert list(data_packages.build(packs, tmp_path / "two", "0.2.1", key)) == lines
    finally:
        os.umask(before)
    site = tmp_path / "site"
    for name in names:
        zipfile.ZipFile(tmp_path / "one" / name).extractall(site)
    metadata = message_from_bytes((site / "tilekern_packs_h200-0.2.1.dist-info" / "METADATA").read_bytes())
    assert (metadata["Name"], metadata["License-Expression"]) == ("tilekern-packs-h200", "Apache-2.0")
    assert metadata.get_all("Requires-Dist") == ["tilekern<0.3,>=0.2.1"]
    # As of a job that loads signed records alone, in a process that has it on its path.
    (tmp_path / "roots").write_text(f"ed25519 {key.public_key} release\n")
    monkeypatch.setenv("TILEKERN_TRUST", "signed")
    monkeypatch.setenv("TILEKERN_TRUST_ROOTS", str(tmp_path / "roots"))
    monkeypatch.syspath_prepend(str(site))
    hit = find(default_layers(), {**PROBLEM, "rows": 1024}, source=SOURCE)
    assert (hit.layer.name, hit.layer.package) == ("tilekern-packs-h200:records", "tilekern-packs-h200")
    assert hit.load("aligned") == b"one" * 100


@pytest.mark.processes
def test_the_h100s_package_brings_along_the_h200s(tmp_path):
    h100 = {**H200, "key": "sm_90-h100_80gb_hbm3-132"}
    (line,) = data_packages.build([pack_of(tmp_path / "a.pack", record_of(64, target=h100))], tmp_path, "0.2.1")
    wheel = zipfile.ZipFile(tmp_path / line.partition(":")[0])
    metadata = message_from_bytes(wheel.read("tilekern_packs_h100-0.2.1.dist-info/METADATA"))
    assert metadata.get_all("Requires-Dist") == ["tilekern<0.3,>=0.2.1", "tilekern-packs-h200<0.3,>=0.2.1"]


def test_a_stale_record_a_gpu_without_a_name_and_a_large_wheel_are_refused(packs, tmp_path, monkeypatch):
    stale = pack_of(tmp_path / "stale.pack", make())
    with pytest.raises(CacheError, match=r"^stale\.pack: v1/sm_90-h200-132/.* is stale; tune or refresh it first$"):
        list(data_packages.build([*packs, stale], tmp_path / "dist", "0.2.1"))
    other = pack_of(tmp_path / "other.pack", record_of(64, target={**H200, "key": "sm_90-h300-132"}))
    with pytest.raises(CacheError, match="sm_90-h300-132 has no package yet; name it in"):
        list(data_packages.build([*packs, other], tmp_path / "dist", "0.2.1"))
    monkeypatch.setattr(data_packages, "LARGEST_BYTES", 1000)
    with pytest.raises(CacheError, match=r"tilekern-packs-h200 has [\d,]+ bytes and may have 1,000; "):
        list(data_packages.build(packs, tmp_path / "dist", "0.2.1"))
    assert not list((tmp_path / "dist").iterdir())


@pytest.mark.parametrize(
    ("version", "fitting", "others"),
    [
        ("0.2.0", ["0.2.0", "0.2.7"], ["0.1.9", "0.3.0"]),
        ("0.2.3", ["0.2.3"], ["0.2.2", "0.3.1", "1.0.0"]),
        ("1.9.0.dev0", ["1.9.0.dev0", "1.9.4"], ["1.8.2", "1.10.0", "2.0.0"]),
    ],
)
def test_a_package_is_for_its_version_and_the_later_ones_of_the_same_minor(version, fitting, others):
    wanted = data_packages.fitting(version)
    assert [other for other in (*fitting, *others) if fits(other, wanted)] == fitting


def test_each_gpu_that_ships_has_a_package_and_no_other_has():
    of_gpu = {address.target_key for path in PREBUILT for address in Pack(path).records}
    assert of_gpu == set(PACKAGES)
    assert len(set(PACKAGES.values())) == len(PACKAGES)


@pytest.mark.parametrize(
    ("gpu", "package"),
    [
        ("H200", "tilekern-packs-h200"),
        ("H100", "tilekern-packs-h100"),
        ("H100 PCIe", "tilekern-packs-h100"),
        ("GB200", "tilekern-packs-b200"),
        ("L40S", None),
    ],
)
def test_a_gpu_has_its_own_package_or_that_of_the_most_similar_one_of_its_arch(gpu, package):
    assert package_of(resolve(gpu)) == package


def test_settled_packs_have_the_best_record_of_each_problem_and_stay_as_they_are_otherwise(tmp_path):
    key = new_key(tmp_path / "release.key")
    best, own, other = record_of(64), record_of(1024), record_of(2048)
    signatures = {digest_of(best[0]): {key.public_key: key.sign(best[0].to_json().encode())}}
    paths = [
        pack_of(tmp_path / "a.pack", record_of(64, provenance="default"), own),
        pack_of(tmp_path / "b.pack", record_of(64, b"two" * 100, provenance="predicted"), own),
        tmp_path / "c.pack",
        pack_of(tmp_path / "d.pack", own, other),
    ]
    write_pack(paths[2], [best, other], signatures)
    untouched = [path.read_bytes() for path in paths[2:]]
    assert list(data_packages.settle(paths)) == [
        "a.pack: 1 of 2 records are now those of other packs",
        "b.pack: 1 of 2 records are now those of other packs",
    ]
    assert [path.read_bytes() for path in paths[2:]] == untouched
    for path in paths[:2]:
        found = {record.data for record, _ in checked_contents(Pack(path))}
        assert found == {best[0].data, own[0].data}
        assert Pack(path).signatures() == Pack(paths[2]).signatures()
    assert not list(data_packages.settle(paths))


def test_no_pack_that_ships_has_a_worse_record_than_another():
    """A checkout's lookup takes the first pack's, and a wheel has some of the packs."""
    opened = [Pack(path) for path in PREBUILT]
    for address in {address for pack in opened for address in pack.records}:
        holders = [pack for pack in opened if address in pack.records]
        records = [pack.read_record(address) for pack in holders] if len(holders) > 1 else []
        for (pack, record), other in itertools.product(zip(holders, records, strict=False), records):
            today = source_digest(record.module)
            assert not why_better(other, record, today), (
                f"{pack.path.name}: another pack has a better {address.path}; run python .ci/data_packages.py --settle"
            )


@pytest.mark.nightly
def test_the_packages_that_ship_serve_what_the_packs_serve(tmp_path):
    """At each problem the same kernels; two packs may tell them apart by when their figures were carried over."""
    opened = [Pack(path) for path in PREBUILT]
    layers = [PackLayer(path) for path in PREBUILT]
    for target, of_gpu in data_packages.choose(opened).items():
        write_pack(tmp_path / f"{target}.pack", data_packages.whole(of_gpu.values()))
        union = PackLayer(tmp_path / f"{target}.pack")
        assert set(Pack(union.path).records) == {a for pack in opened for a in pack.records if a.target_key == target}
        for record, _ in of_gpu.values():
            asked = {"target_key": target, "arch": target, "toolkit_key": None, "bucketed": ()}
            asked |= {"source": source_digest(record.module)}
            for invariant in (False, True):
                ours, theirs = (
                    lookup(record.kernel, record.problem, layers=places, invariant=invariant, **asked)
                    for places in ([union], layers)
                )
                assert ours.record.created == theirs.record.created
                assert (ours.record.config, ours.blobs) == (theirs.record.config, theirs.blobs)
