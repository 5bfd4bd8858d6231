"""Figures carry the digests of the kernels that they measured, and a changed source makes them stale."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tilekern
from benchmarks import sources
from benchmarks.results import Results, Row
from tilekern import ops
from tilekern.cache.packs.pack import Pack

RUN = {"commit": "abc123def456", "notes": []}


def results(found, benchmark="kernels"):
    rows = [
        Row(benchmark, "a", "torch 2.11.0", "forward", 2.0, "us"),
        Row(benchmark, "a", "tilekern", "forward", 1.0, "us", sources=found),
    ]
    return Results(RUN, rows)


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setenv("TILEKERN_INTERPRET", "1")
    tilekern.clear_autotune_cache()


def test_the_kernels_that_served_calls_are_noted_and_no_others(interpreted):
    x = torch.randn(3, 64)
    ops.swiglu(x, x)
    with sources.kernels_used() as used:
        ops.softmax(x)
    assert used == ["softmax_forward"]


def test_rows_of_tilekern_alone_carry_digests():
    peer, ours = sources.with_sources(results({}).rows, ["swiglu_forward", "no_such_kernel"])
    assert peer.sources == {}
    assert ours.sources == {"swiglu_forward": sources.digest_today("swiglu_forward")}


def test_a_figure_of_another_source_is_stale_and_names_its_kernel():
    fresh = sources.digests(["swiglu_forward", "rope_forward"])
    today = sources.described(results(fresh), "a")
    assert "stale" not in today
    assert len(today) == len("`12345678`")
    changed = sources.described(results(fresh | {"rope_forward": "0" * 12}), "a")
    assert changed.endswith(", **stale**: rope_forward changed")
    assert changed[:10] != today, "the digest is of what was measured"
    gone = sources.described(results(fresh | {"no_such_kernel": "0" * 12}), "a")
    assert gone.endswith("**stale**: no_such_kernel changed")


def test_a_figure_of_a_source_whose_records_were_carried_over_is_not_stale():
    """As of this repository's packs: a record says from which source its figures are."""
    for path in (Path(tilekern.__file__).parent / "prebuilt").glob("*.pack"):
        pack = Pack(path)
        for record in map(pack.read_record, pack.records):
            if record.measurement and (history := record.measurement.get("carried_over")):
                before = history[0]["source_digest"][:12]
                assert before != sources.digest_today(record.kernel)
                assert "stale" not in sources.described(results({record.kernel: before}), "a")
                return
    pytest.fail("no pack has a record that was carried over")


def test_a_figure_without_a_digest_names_its_commit():
    assert sources.described(results({}), "a") == "digest not recorded (commit abc123d)"
    assert sources.described(results({}, "tune"), "a") == "commit abc123d"
