"""A pack carries a cache, and of two records of one problem the better one stays."""

from pathlib import Path

import pytest
from cache_samples import PROBLEM, SOURCE, digest_of, make, make_classed, put

from tilekern.cache import CacheError, Store, install_pack, why_kept, write_pack
from tilekern.cache.keys import blob_path

SECOND = {"problem": {**PROBLEM, "rows": 1}}
# Records are made in August.
JULY, SEPTEMBER = ({"created": f"2026-{month}-01T12:00:00Z"} for month in ("07", "09"))
# By a clock that is far ahead.
AHEAD = {"created": "2099-01-01T00:00:00+00:00"}
PREDICTED = {"provenance": "predicted"}
CLASSED = {"measurement": {"median_us": 37.8, "invariant": {"config": {}, "bits": "a", "median_us": 42.0}}}
OTHER_SOURCE, OTHER_SPACE = {"source_digest": "1" * 64}, {"space_digest": "0" * 64}
BY_DATE = [
    ({}, PREDICTED, True),
    (PREDICTED, {}, False),
    (PREDICTED, PREDICTED, False),
    ({}, JULY, True),
    ({}, SEPTEMBER, False),
    ({}, SEPTEMBER | PREDICTED, True),
    (PREDICTED, JULY, False),
    (OTHER_SOURCE, JULY, True),
    (OTHER_SOURCE, SEPTEMBER, False),
]
DECISIONS = [
    *((present, offered | space, None, stays) for present, offered, stays in BY_DATE for space in ({}, OTHER_SPACE)),
    # Of two sources that of today stays, whatever the dates say. An old pack takes nothing back; and after a downgrade
    # of tilekern the old pack is the one that serves.
    *((OTHER_SOURCE, date, "1" * 64, True) for date in (JULY, SEPTEMBER)),
    *((OTHER_SOURCE, date, SOURCE, False) for date in (JULY, SEPTEMBER)),
    (OTHER_SOURCE, JULY, "2" * 64, True),
    (OTHER_SOURCE, SEPTEMBER, "2" * 64, False),
    # So does the record of today's space, and no clock decides.
    (OTHER_SPACE | AHEAD, {}, SOURCE, False),
    ({}, OTHER_SPACE | AHEAD, SOURCE, True),
    ({}, OTHER_SOURCE | AHEAD, SOURCE, True),
    (OTHER_SOURCE | AHEAD, PREDICTED, SOURCE, False),
    (PREDICTED, OTHER_SPACE, SOURCE, False),
    # A kernel of one bit class counts more than a date.
    (CLASSED, SEPTEMBER, SOURCE, True),
    (SEPTEMBER, CLASSED, SOURCE, False),
    (CLASSED | OTHER_SPACE, JULY, SOURCE, False),
    (CLASSED, CLASSED | SEPTEMBER, SOURCE, False),
]


@pytest.mark.parametrize(("present", "offered", "today", "stays"), DECISIONS)
def test_the_better_record_stays(tmp_path, present, offered, today, stays):
    put(tmp_path / "cache", created_by="present", **present)
    write_pack(tmp_path / "a.pack", [make(created_by="offered", **offered)])
    installed = install_pack(tmp_path / "a.pack", Store(tmp_path / "cache"), today=today and (lambda _: today))
    (entry,) = Store(tmp_path / "cache").entries()
    assert (installed.records, entry.record.created_by) == ((0, "present") if stays else (1, "offered"))


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"damaged")], ids=["lost", "damaged"])
def test_a_record_whose_artifact_cannot_be_loaded_does_not_stay(tmp_path, damage):
    store, (present, kept) = Store(tmp_path / "cache"), make_classed(**AHEAD)
    store.write(present, kept)
    offered, blobs = make(**PREDICTED)
    damage(store.root / blob_path(present.artifacts["invariant"].sha256))
    assert why_kept(store, offered), "it serves all the same"
    damage(store.root / blob_path(present.artifacts["aligned"].sha256))
    assert not why_kept(store, offered)
    write_pack(tmp_path / "a.pack", [(offered, blobs)])
    assert install_pack(tmp_path / "a.pack", store).records == 1
    assert {sha256: store.read_blob(sha256) for sha256 in offered.digests} == blobs


def test_a_record_made_just_now_is_newer_than_any_date(tmp_path):
    put(tmp_path / "cache", created_by="present", **AHEAD, **CLASSED)
    made = make(created_by="tuned")
    write_pack(tmp_path / "a.pack", [made])
    reason = "with a kernel for tilekern.invariant()"
    assert install_pack(tmp_path / "a.pack", Store(tmp_path / "cache")) == (0, {reason: 1}, 0)
    assert install_pack(tmp_path / "a.pack", Store(tmp_path / "cache"), made_now=[digest_of(made[0])]) == (1, {}, 1)
    assert not why_kept(Store(tmp_path / "cache"), made[0], made_now=True)


def test_inconsistent_contents_are_not_packed(tmp_path):
    record, blobs = make()
    for contents in ([(record, {})], [(record, blobs)] * 2, [(record, dict.fromkeys(blobs, b"bad"))]):
        with pytest.raises(CacheError):
            write_pack(tmp_path / "a.pack", contents)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="Not a directory"):
        write_pack(tmp_path / "file" / "a.pack", [(record, blobs)])
