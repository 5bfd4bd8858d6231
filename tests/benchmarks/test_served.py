"""Reports on configs without a measurement."""

from pathlib import Path

import pytest

import tilekern
from benchmarks.served import doubts
from tilekern.cache import Pack
from tilekern.runtime import dispatch
from tilekern.spec import Problem

PACKS = Path(tilekern.__file__).parent / "prebuilt"


@pytest.mark.parametrize(("gpu", "said"), [("h200", 0), ("b200", 2)])
def test_a_record_that_was_not_measured_is_named(gpu, said, monkeypatch):
    pack = Pack(PACKS / f"qwen3-8b-{gpu}.pack")
    records = [pack.read_record(address) for address in list(pack.records)[:2]]
    resolved = {(record.kernel, Problem(record.problem)): record for record in records}
    monkeypatch.setattr(dispatch, "resolved", lambda: resolved | {("rope", Problem(tokens=1)): None})
    # Other tests of this process have missed.
    lines = [line for line in doubts() if "the config is" in line]
    assert len(lines) == said
    for line, record in zip(lines, records, strict=False):
        assert (
            line == f"tilekern {record.kernel} {Problem(record.problem).key}: the config is predicted, and not measured"
        )
