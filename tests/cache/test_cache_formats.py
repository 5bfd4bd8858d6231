"""The forms on disk: what a writer of each version made once is read, and is what today's writer makes of it.

``golden/record-3`` holds a cache, packs and trust roots with a record of schema 3, ``golden/record-4`` the same of
schema 4.
Where a test fails, the form has changed: that needs another version, and golden files of it beside these.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import pytest

from tilekern.cache import (
    FolderLayer,
    Pack,
    PackLayer,
    Record,
    Store,
    checked_contents,
    install_pack,
    lookup,
    write_pack,
)
from tilekern.cache.trust.policy import read_signatures, trust_roots

GOLDEN = Path(__file__).parent / "golden"
SCHEMAS = {schema: GOLDEN / f"record-{schema}" for schema in (3, 4)}
PACKS = ("version-1.pack", "version-2.pack")


@pytest.fixture(params=SCHEMAS)
def schema(request):
    """Return the schema of the record."""
    return request.param


@pytest.fixture
def record_bytes(schema):
    (path,) = (SCHEMAS[schema] / "cache").rglob("*.json")
    return path.read_bytes()


@pytest.fixture
def record(record_bytes):
    return Record.from_json(record_bytes.decode())


@pytest.fixture
def golden(schema, tmp_path):
    """A copy that nobody else can write, whatever the umask of the one who cloned the repository."""
    shutil.copytree(SCHEMAS[schema], tmp_path / "golden")
    for path in (tmp_path / "golden", *(tmp_path / "golden").rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return tmp_path / "golden"


def found(layer, record):
    return lookup(
        record.kernel,
        record.problem,
        bucketed=["rows"],
        target_key=record.target["key"],
        arch=record.target["arch"],
        toolkit_key=record.toolkit["key"],
        source=record.source_digest,
        layers=[layer],
    )


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_record_of_each_schema_is_read_and_written_as_it_was(schema, record, record_bytes):
    assert json.loads(record_bytes)["schema"] == record.schema == schema
    assert record.to_json().encode() == record_bytes


def test_schema_4_has_the_fields_of_schema_3_and_one_more():
    three, four = (json.loads(next((SCHEMAS[schema] / "cache").rglob("*.json")).read_text()) for schema in (3, 4))
    assert list(three) == list(four)
    three, four = (record["artifacts"]["aligned"] for record in (three, four))
    assert list(four) == [*three, "bytecode"]


def test_a_cache_with_records_of_each_schema_is_read(golden, record):
    (entry,) = Store(golden / "cache").entries()
    assert entry.record == record
    hit = found(FolderLayer(golden / "cache", "golden"), record)
    for variant, artifact in record.artifacts.items():
        assert hashlib.sha256(hit.load(variant)).hexdigest() == artifact.sha256


@pytest.mark.parametrize("name", PACKS)
def test_a_pack_of_each_version_is_read_in_place_and_unpacked(golden, record, tmp_path, name):
    assert found(PackLayer(golden / name), record).record == record
    assert install_pack(golden / name, Store(tmp_path / "there")).records == 1
    expected = contents(golden / "cache")
    if name == "version-1.pack":
        expected = {path: data for path, data in expected.items() if "signatures" not in path}
    assert contents(tmp_path / "there") == expected


@pytest.mark.parametrize("name", PACKS)
@pytest.mark.skipif("ng" in zlib.ZLIB_RUNTIME_VERSION, reason="another deflate gives other bytes of the same meaning")
def test_a_pack_of_each_version_is_written_as_it_was(schema, tmp_path, name):
    golden = Pack(SCHEMAS[schema] / name)
    write_pack(tmp_path / name, checked_contents(golden), golden.signatures())
    assert (tmp_path / name).read_bytes() == golden.path.read_bytes()


@pytest.mark.parametrize(("name", "version"), [(PACKS[0], 1), (PACKS[1], 2)])
def test_the_members_of_a_pack_are_as_they_were(schema, tmp_path, name, version):
    """Compare what does not depend on the implementation of deflate."""
    golden = Pack(SCHEMAS[schema] / name)
    write_pack(tmp_path / name, checked_contents(golden), golden.signatures())
    with zipfile.ZipFile(golden.path) as then, zipfile.ZipFile(tmp_path / name) as now:
        assert json.loads(then.read("manifest.json"))["schema"] == version
        assert [(i.filename, i.date_time, i.external_attr, i.compress_type) for i in then.infolist()] == [
            (i.filename, i.date_time, i.external_attr, i.compress_type) for i in now.infolist()
        ]
        assert [then.read(one) for one in then.namelist()] == [now.read(one) for one in now.namelist()]


@pytest.mark.parametrize("place", ["cache", "version-2.pack"])
def test_a_signature_of_version_1_holds(golden, record, record_bytes, monkeypatch, place):
    monkeypatch.setenv("TILEKERN_TRUST", "signed")
    layer = FolderLayer(golden / place, "golden") if place == "cache" else PackLayer(golden / place)
    monkeypatch.setenv("TILEKERN_TRUST_ROOTS", str(golden / "trust-roots"))
    (root,) = trust_roots()
    assert root.name == "golden"
    assert found(layer, record).record == record
    assert list(read_signatures(golden / "cache", hashlib.sha256(record_bytes).hexdigest())) == [root.public_key]


PACKING = """
import sys, time
sys.path.insert(0, sys.argv[2])
time.time = lambda: float(sys.argv[3])
from cache_samples import PROBLEM, make
from tilekern.cache import write_pack
records = [make(b"%d" % rows, problem={**PROBLEM, "rows": rows}) for rows in range(1, 30)]
shuffled = sorted(records, key=lambda one: hash(one[0].address.problem_key))
write_pack(sys.argv[1], shuffled, {digest: {} for digest in {"a", "b"}})
"""


@pytest.mark.processes
def test_two_processes_with_other_hash_seeds_clocks_and_zones_write_the_same_bytes(tmp_path):
    written = []
    for seed, clock, zone in (("1", "0", "UTC"), ("2", "4e9", "Asia/Kathmandu")):
        path = tmp_path / f"{seed}.pack"
        command = [sys.executable, "-c", PACKING, str(path), str(Path(__file__).parent), clock]
        root = str(Path(__file__).parents[2])
        subprocess.run(command, env={"PYTHONHASHSEED": seed, "TZ": zone, "PYTHONPATH": root}, check=True)
        written.append(path.read_bytes())
    assert written[0] == written[1]
