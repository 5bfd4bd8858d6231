"""What a list of records needs of each, read from the few parts of the file that hold it.

A record's text is mostly its artifacts' assumptions, its checks and its runners-up; a list of many thousand records
that parsed all of that would take most of its time there. What is left out is not checked but for the text's digest:
``verify`` checks it.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from tilekern.cache.errors import CacheError
from tilekern.cache.keys import Address, Value
from tilekern.cache.records import PROVENANCES, Record, check_created, check_form, decode_record, parse_object

# As `Record.to_json` writes it: one space before each field of the record, three before those of an artifact. No text
# within it can hold a line break.
_ARTIFACTS, _MEASUREMENT = b',\n "artifacts": ', b',\n "measurement": '
_CHECK, _CANDIDATES = b',\n "check": ', b',\n "candidates": '
_ARTIFACT = re.compile(rb'\n   "sha256": "([0-9a-f]{64})",\n   "size": ([0-9]{1,9}),')


class Outline(NamedTuple):
    """What a list says of a record; the fields are those of :class:`tilekern.cache.Record`.

    ``blob_bytes`` is the size of its artifacts, each counted once.
    """

    address: Address
    problem: dict[str, Value]
    module: str
    source_digest: str
    provenance: str
    measurement: dict[str, Any] | None
    prediction: dict[str, Any] | None
    created: str
    blob_bytes: int


def decode_outline(data: bytes, address: Address | None) -> Outline:
    """The outline of the record in the bytes of the file at ``address``, which is None where no record may stand.

    Raises:
        UnknownSchema: the record was written under another schema.
        Corrupt: what was read is not that of a record, or the record belongs at another address.
    """
    try:
        outline = _from_parts(data)
        if outline.address == address:
            return outline
    except (ValueError, KeyError, TypeError, AttributeError, CacheError):
        pass
    return outline_of(decode_record(data, address))


def outline_of(record: Record) -> Outline:
    """The outline of a whole record."""
    sizes = {artifact.sha256: artifact.size for artifact in record.artifacts.values()}
    return Outline(
        record.address,
        record.problem,
        record.module,
        record.source_digest,
        record.provenance,
        record.measurement,
        record.prediction,
        record.created,
        sum(sizes.values()),
    )


def _from_parts(data: bytes) -> Outline:
    """Fails in whatever way where the text is not just as `Record.to_json` writes it."""
    artifacts = data.index(_ARTIFACTS)
    measurement = data.index(_MEASUREMENT, artifacts)
    check = data.index(_CHECK, measurement)
    candidates = data.rindex(_CANDIDATES, check)
    # The parts that are left out begin with a comma and end before one, so the rest is one object.
    found = parse_object((data[:artifacts] + data[measurement:check] + data[candidates:]).decode())
    check_form(found, data)
    if found["provenance"] not in PROVENANCES:
        raise ValueError("another provenance")
    if not all(isinstance(found[name], dict | None) for name in ("measurement", "prediction")):
        raise ValueError("no measurement or prediction")
    if not all(isinstance(found[name], str) for name in ("module", "source_digest")):
        raise ValueError("no source")
    check_created(found["created"])
    # What is a key and what is none was decided when the file was named.
    key = ",".join([f"{name}={value}" for name, value in found["problem"].items()])
    sizes = dict(_ARTIFACT.findall(data, artifacts, measurement))
    return Outline(
        Address(found["target"]["key"], found["toolkit"]["key"], found["kernel"], key),
        found["problem"],
        found["module"],
        found["source_digest"],
        found["provenance"],
        found["measurement"],
        found["prediction"],
        found["created"],
        sum(map(int, sizes.values())),
    )
