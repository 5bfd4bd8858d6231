"""The record of one problem on one target and toolkit, as JSON and back, with every field checked.

A record's text ends with the sha256 of all that stands before it, since a flipped bit in a config reads as well as any
other config, and the artifact would be launched by the wrong grid. Records of schema 1 have none.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, Literal, NoReturn

from tilekern.cache.errors import CacheError, Corrupt, UnknownSchema
from tilekern.cache.keys import Address, Value, check_digest, check_name, problem_key

SCHEMA, WITHOUT_DIGEST = 2, 1
PROVENANCES = ("measured", "predicted", "default")
LARGEST_RECORD = 16 * 2**20
LARGEST_BLOB = 256 * 2**20

# As `Record.to_json` writes that of an artifact; few records name more than an aligned and a generic one.
_ARTIFACT_DIGEST = re.compile(rb'\n   "sha256": "([0-9a-f]{64})"')
_USUAL_ARTIFACTS = 4
_MODULE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")


@dataclass(frozen=True)
class Artifact:
    """What a candidate compiled to; the bytes themselves are the blob of the name ``sha256``.

    Attributes:
        sha256: digest of the bytes, in hexadecimal.
        size: length in bytes.
        symbol: the entry point's name inside the artifact.
        config: the config that it was compiled for; not looked at by the cache.
        assumptions: what its arguments must satisfy; not looked at by the cache.
        resources: registers, spill_bytes, shared_bytes, threads and the like; not looked at by the cache.
    """

    sha256: str
    size: int
    symbol: str
    config: dict[str, Any]
    assumptions: list[Any]
    resources: dict[str, Any]


@dataclass(frozen=True)
class Record:
    """The cache's entry for one problem on one target and toolkit.

    Attributes:
        kernel: the spec's name.
        module: dotted name of the module that holds the kernel's device code.
        problem: the problem with bucketed sizes, in the order of its key.
        target: the GPU: ``key``, ``name``, ``arch`` (text) and whatever else describes it.
        toolkit: the compiler: ``key`` (text) and the versions of its parts.
        source_digest: sha256 of the kernel's source, in hexadecimal.
        provenance: ``measured``, ``predicted`` or ``default``.
        config: the winner.
        artifacts: by the variant's name, for example ``aligned`` and ``generic``.
        measurement: None, or what was timed: ``median_us``, ``default_us`` (the default config in the same run) and
            its spread; needed where the provenance is ``measured``.
        prediction: None, or what was predicted: ``time_us`` and what it was derived from.
        check: None, or how far the winner was from the reference.
        runners_up: the next best candidates.
        candidates: how many were tried.
        failed: how many of them failed.
        created: time in UTC, ISO 8601.
        created_by: the program and version that wrote it.
        schema: the form of its text, 1 or 2; one that was read is written as it was, so that signatures hold.
    """

    kernel: str
    module: str
    problem: dict[str, Value]
    target: dict[str, Any]
    toolkit: dict[str, Any]
    source_digest: str
    provenance: Literal["measured", "predicted", "default"]
    config: dict[str, Any]
    artifacts: dict[str, Artifact]
    measurement: dict[str, Any] | None
    prediction: dict[str, Any] | None
    check: dict[str, Any] | None
    runners_up: list[Any]
    candidates: int
    failed: int
    created: str
    created_by: str
    schema: int = SCHEMA

    @cached_property
    def address(self) -> Address:
        """Where the record belongs in a cache."""
        return Address(self.target["key"], self.toolkit["key"], self.kernel, problem_key(self.problem))

    @cached_property
    def data(self) -> bytes:
        """The bytes of its file, which signatures are over; of a record that was made here, those that a file gets."""
        return self.to_json().encode()

    @property
    def digests(self) -> frozenset[str]:
        """The sha256 of every blob that the record refers to."""
        return frozenset(artifact.sha256 for artifact in self.artifacts.values())

    def to_json(self) -> str:
        """The record as JSON; equal records give equal text.

        Raises:
            CacheError: a field holds something that JSON cannot.
        """
        try:
            return record_text({"schema": self.schema, **asdict(self)})
        except (TypeError, ValueError, RecursionError) as error:
            raise CacheError(f"the record of {self.kernel} must hold plain JSON data: {error}") from None

    @classmethod
    def from_json(cls, text: str) -> Record:
        """The record that ``text`` holds, with every field's type and form checked.

        Raises:
            UnknownSchema: it was written under another schema.
            Corrupt: it is no JSON, a field is missing, unknown, or not what it must be, or the text was changed since.
        """
        document = parse_object(text)
        check_form(document, text.encode(errors="surrogatepass"))
        document.pop("sha256", None)
        try:
            _check("record", document, _RECORD_FIELDS)
            document["artifacts"] = {name: _artifact(name, value) for name, value in document["artifacts"].items()}
            record = cls(**document)
            _check_sense(record)
        except (UnknownSchema, Corrupt):
            raise
        except CacheError as error:
            raise Corrupt(str(error)) from None
        return record


def record_text(document: Mapping[str, Any]) -> str:
    """The text of a record's fields, ``schema`` first; its digest comes last where the schema has one.

    Raises:
        TypeError, ValueError, RecursionError: a field holds something that JSON cannot.
    """
    text = json.dumps(document, allow_nan=False, indent=1)
    if document["schema"] == WITHOUT_DIGEST:
        return text + "\n"
    contents = text.removesuffix("\n}")
    return contents + _ending(contents.encode())


def check_form(document: Mapping[str, Any], data: bytes) -> None:
    """Whether the schema of a record's fields is known, and the bytes that hold them are those that were written.

    Raises:
        UnknownSchema: the record was written under another schema.
        Corrupt: there is no schema, or the digest at the end is not that of the bytes before it.
    """
    schema = document.get("schema")
    if type(schema) is not int or schema < 1:
        raise Corrupt(f"schema must be {WITHOUT_DIGEST} or {SCHEMA}, got {schema!r:.60}")
    if schema > SCHEMA:
        raise UnknownSchema(
            f"schema {schema} was written by another version of tilekern; this one reads {WITHOUT_DIGEST} and {SCHEMA}"
        )
    if schema == WITHOUT_DIGEST:
        if "sha256" in document:
            raise Corrupt(f"a record of schema {WITHOUT_DIGEST} has no sha256 of its own")
    elif data[-_ENDING_BYTES:] != _ending(data[:-_ENDING_BYTES]).encode():
        raise Corrupt("its last field, sha256, is not that of the text before it: it was changed since it was written")


def _ending(contents: bytes) -> str:
    return f',\n "sha256": "{hashlib.sha256(contents).hexdigest()}"\n}}\n'


_ENDING_BYTES = len(_ending(b""))


def decode_record(data: bytes, address: Address | None) -> Record:
    """The record in the bytes of the file at ``address``, which is None where no record may stand.

    Raises:
        UnknownSchema: it was written under another schema.
        Corrupt: it is no whole record, or it belongs at another address.
    """
    record = record_of(data)
    if record.address != address:
        raise Corrupt(f"its contents belong at {record.address.path}")
    return record


def record_of(data: bytes) -> Record:
    """The record in the bytes of a file, wherever that stands; it remembers the bytes.

    Raises:
        UnknownSchema: it was written under another schema.
        Corrupt: it is no whole record.
    """
    try:
        record = Record.from_json(data.decode())
    except UnicodeDecodeError:
        raise Corrupt("not valid JSON: it is not UTF-8") from None
    record.__dict__["data"] = data
    return record


def likely_digests(data: bytes) -> list[str]:
    """The sha256 of the first blobs that a record's text seems to refer to, before it is parsed and checked."""
    return [found[1].decode() for found in itertools.islice(_ARTIFACT_DIGEST.finditer(data), _USUAL_ARTIFACTS)]


def check_blob(data: bytes, sha256: str) -> bytes:
    """``data`` where its digest is ``sha256``.

    Raises:
        Corrupt: its digest is another.
    """
    digest = hashlib.sha256(data).hexdigest()
    if digest != sha256:
        raise Corrupt(f"blob {sha256} holds {len(data)} bytes whose sha256 is {digest}")
    return data


def parse_object(text: str) -> dict[str, Any]:
    """The JSON object in ``text``; ``NaN``, ``Infinity`` and lone surrogates are refused.

    A number too large for a float (``1e999``) comes out infinite: looking at each would make a lookup a tenth longer.

    Raises:
        Corrupt: it is anything else.
    """
    try:
        document = _DECODER.decode(text)
        if "\\ud" in text.lower():
            json.dumps(document, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"not valid JSON: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(document, dict):
        raise Corrupt(f"expected a JSON object, got {type(document).__name__}")
    return document


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


_NULL = type(None)
_NAMES = {str: "text", dict: "an object", list: "a list", int: "a whole number", _NULL: "null"}
_ARTIFACT_FIELDS: dict[str, tuple[type, ...]] = {
    "sha256": (str,),
    "size": (int,),
    "symbol": (str,),
    "config": (dict,),
    "assumptions": (list,),
    "resources": (dict,),
}
_RECORD_FIELDS: dict[str, tuple[type, ...]] = {
    "kernel": (str,),
    "module": (str,),
    "problem": (dict,),
    "target": (dict,),
    "toolkit": (dict,),
    "source_digest": (str,),
    "provenance": (str,),
    "config": (dict,),
    "artifacts": (dict,),
    "measurement": (dict, _NULL),
    "prediction": (dict, _NULL),
    "check": (dict, _NULL),
    "runners_up": (list,),
    "candidates": (int,),
    "failed": (int,),
    "created": (str,),
    "created_by": (str,),
    "schema": (int,),
}


def _check(where: str, document: Mapping[str, Any], forms: Mapping[str, tuple[type, ...]]) -> None:
    """Compare a JSON object's fields and their types with what they must be; a bool is no whole number."""
    if document.keys() != forms.keys():
        missing = sorted(forms.keys() - document.keys())
        problem = f"lacks {missing[0]}" if missing else f"has an unknown field {min(document.keys() - forms.keys())!r}"
        raise Corrupt(f"{where} {problem}")
    for name, types in forms.items():
        if type(document[name]) not in types:
            expected = " or ".join(_NAMES[one] for one in types)
            raise Corrupt(f"{where}: {name} must be {expected}, got {document[name]!r:.60}")


def _artifact(name: str, document: Any) -> Artifact:
    check_name("a variant", name)
    if not isinstance(document, dict):
        raise Corrupt(f"artifact {name} must be an object, got {type(document).__name__}")
    _check(f"artifact {name}", document, _ARTIFACT_FIELDS)
    check_digest(f"artifact {name}: sha256", document["sha256"])
    if not 0 <= document["size"] <= LARGEST_BLOB:
        raise Corrupt(f"artifact {name}: size must be 0 to {LARGEST_BLOB} bytes, got {document['size']}")
    return Artifact(**document)


def _check_sense(record: Record) -> None:
    """What the types alone do not say."""
    check_name("kernel", record.kernel)
    if not _MODULE.fullmatch(record.module):
        raise Corrupt(f"module must be the dotted name of a module, got {record.module!r}")
    check_name("the target's key", record.target.get("key"))
    check_name("the toolkit's key", record.toolkit.get("key"))
    for name in ("name", "arch"):
        if not isinstance(record.target.get(name), str):
            raise Corrupt(f"the target's {name} must be text, got {record.target.get(name)!r:.60}")
    _ = record.address  # raises where the problem can have no key
    if min(record.candidates, record.failed) < 0:
        raise Corrupt(f"candidates and failed must be at least 0, got {record.candidates} and {record.failed}")
    check_digest("source_digest", record.source_digest)
    if record.provenance not in PROVENANCES:
        raise Corrupt(f"provenance must be one of {', '.join(PROVENANCES)}, got {record.provenance!r:.60}")
    if record.provenance == "measured" and not record.measurement:
        raise Corrupt("a measured record must have a measurement")
    check_created(record.created)


def check_created(created: str) -> None:
    """Whether a text is a time in UTC.

    Raises:
        Corrupt: it is not.
    """
    try:
        in_utc = datetime.fromisoformat(created).utcoffset() == timedelta(0)
    except ValueError:
        in_utc = False
    if not in_utc:
        raise Corrupt(f"created must be a time in UTC such as 2026-01-31T12:00:00+00:00, got {created!r:.60}")
