"""Commands that look at every record hold one of them at a time: a cache may have a hundred thousand."""

import tracemalloc

import pytest
from cache_samples import PROBLEM, made_today, put

from tilekern.cache import Pack

RECORDS = 20
# A record of 400 runners-up takes some 300 kB, so that all of them are several times this.
MOST_BYTES = 3_000_000


@pytest.fixture
def large(root):
    """A cache of large records, all of the same artifacts; what a process keeps of their kernel's source is kept."""
    made_today()
    runners_up = [{"config": {"occupancy": number, "tile": 1024}, "median_us": 38.1 + number} for number in range(400)]
    for rows in range(1, RECORDS + 1):
        put(root, problem={**PROBLEM, "rows": rows}, runners_up=runners_up)
    return root


@pytest.mark.parametrize(
    "command",
    [
        ("stats",),
        ("verify",),
        ("prune", "--max-size", "1K", "--dry-run", "--json"),
        ("diff", "CACHE", "CACHE"),
        ("clear", "--all", "--yes"),
    ],
    ids=lambda command: command[0],
)
def test_a_command_does_not_hold_all_records(cli, large, tmp_path, monkeypatch, command):
    (tmp_path / "none").mkdir()

    def run(place):
        monkeypatch.setenv("TILEKERN_CACHE_DIR", str(place))
        return cli.said(*(str(place) if word == "CACHE" else word for word in command))

    run(tmp_path / "none")  # what is imported and kept at the first call is not the records
    out, peak = measured(lambda: run(large))
    assert str(RECORDS) in out
    assert peak < MOST_BYTES


@pytest.mark.slow
@pytest.mark.nightly
def test_pack_does_not_hold_all_records(cli, large, tmp_path, monkeypatch):
    monkeypatch.setattr("tilekern.cache.packs.writing._IN_MEMORY", 1_000_000)
    cli.said("pack", tmp_path / "first.pack", "--problem", "rows=1")
    out, peak = measured(lambda: cli.said("pack", tmp_path / "all.pack"))
    assert f"packed {RECORDS} records" in out
    assert peak < MOST_BYTES
    assert len(Pack(tmp_path / "all.pack").records) == RECORDS
    _, peak = measured(lambda: cli.said("unpack", tmp_path / "all.pack", root=tmp_path / "there"))
    assert peak < MOST_BYTES


def measured(run):
    """Return the result of a call, and the most bytes that it held at a time."""
    tracemalloc.start()
    try:
        return run(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
