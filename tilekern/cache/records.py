"""The record of one problem on one target and toolkit, as JSON and back, with every field checked.

msgspec parses the text and checks each field's type in one pass. A record's text ends with the sha256 of all that
stands before it, since a flipped bit in a config reads as well as any other config, and the artifact would be launched
by the wrong grid. Records of schema 3 do not say which bytecode an artifact was assembled from.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from datetime import datetime, timedelta
from functools import cached_property
from typing import Annotated, Any, Literal, get_args

import msgspec

from tilekern.cache.errors import CacheError, Corrupt, UnknownSchema
from tilekern.cache.keys import Address, Value, check_name, problem_key

SCHEMA, OLDEST_SCHEMA = 4, 3
Provenance = Literal["measured", "predicted", "default"]
PROVENANCES: tuple[str, ...] = get_args(Provenance)
LARGEST_RECORD = 16 * 2**20
LARGEST_BLOB = 256 * 2**20

# As `Record.to_json` writes that of an artifact; few records name more than an aligned and a generic one.
_ARTIFACT_DIGEST = re.compile(rb'\n   "sha256": "([0-9a-f]{64})"')
_USUAL_ARTIFACTS = 4
# A field that holds a sha256, and one that counts something.
Digest = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Count = Annotated[int, msgspec.Meta(ge=0)]
_Threads = Annotated[int, msgspec.Meta(ge=1, le=1024)]
_MOST_THREADS = 1024
_MODULE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")


class Launch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How an artifact is launched that does not follow cuTile's own way, and does not say so itself.

    Attributes:
        block: threads of a block, in three dimensions.
        cluster: blocks of a cluster; 1 for none.
        cooperative: whether all blocks must be resident at once.
        shared_bytes: dynamic shared memory of a block.
    """

    block: tuple[_Threads, _Threads, _Threads]
    cluster: Annotated[int, msgspec.Meta(ge=1, le=16)]
    cooperative: bool
    shared_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**20)]


class Artifact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The compiled form of a candidate; the bytes themselves are the blob of the name ``sha256``.

    Attributes:
        sha256: digest of the bytes, in hexadecimal.
        size: length in bytes.
        symbol: the entry point's name inside the artifact.
        config: the config that it was compiled for; not looked at by the cache.
        assumptions: what its arguments must satisfy; not looked at by the cache.
        resources: registers, spill_bytes, shared_bytes, threads and the like; not looked at by the cache.
        launch: how it is launched; None for cuTile's own way, in which the artifact says what it needs.
        compiler: name and version of the compiler that made it; None where that is the record's toolkit.
        bytecode: sha256 of the Tile IR bytecode, without its debug information, that it was assembled from; None in
            schema 3, and of another compiler.
    """

    sha256: Digest
    size: Annotated[int, msgspec.Meta(ge=0, le=LARGEST_BLOB)]
    symbol: str
    config: dict[str, Any]
    assumptions: list[Any]
    resources: dict[str, Any]
    launch: Launch | None = None
    compiler: str | None = None
    bytecode: Digest | None = None


class BestKernel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The best config that needs no library, where a library runs the winner.

    Attributes:
        config: the config; the record's artifacts are its, but where it is made of other kernels and has none.
        measurement: None, or what was timed, as of the winner in the same run.
        check: None, or how far it was from the reference.
    """

    config: dict[str, Any]
    measurement: dict[str, Any] | None
    check: dict[str, Any] | None


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """The cache's entry for one problem on one target and toolkit.

    Attributes:
        schema: the form of its text, 3 or 4; one that was read is written as it was, so that signatures hold.
        kernel: the spec's name.
        module: dotted name of the module that holds the kernel's device code.
        problem: the problem with bucketed sizes, in the order of its key.
        target: the GPU: ``key``, ``name``, ``arch`` (text) and whatever else describes it.
        toolkit: the compiler: ``key`` (text) and the versions of its parts.
        source_digest: the digest of the kernel's source that its artifacts are valid for
            (:func:`tilekern.spec.source.source_digest`).
        space_digest: the digest of the source in whose search space it won; another one where an edit changed the space
            but none of the record's machine code.
        provenance: ``measured``, ``predicted`` or ``default``.
        config: the winner.
        artifacts: by the variant's name, for example ``aligned`` and ``generic``.
        best_kernel: None, or where a library runs the winner, what runs where the library does not.
        measurement: None, or what was timed: ``median_us``, ``default_us`` (the default config in the same run) and
            its spread; needed where the provenance is ``measured``.
        prediction: None, or what was predicted: ``time_us`` and what it was derived from.
        check: None, or how far the winner was from the reference.
        runners_up: the next best candidates.
        candidates: how many were tried.
        failed: how many of them failed.
        created: time in UTC, ISO 8601.
        created_by: the program and version that wrote it.
    """

    schema: int
    kernel: str
    module: str
    problem: dict[str, Value]
    target: dict[str, Any]
    toolkit: dict[str, Any]
    source_digest: Digest
    space_digest: Digest
    provenance: Provenance
    config: dict[str, Any]
    artifacts: dict[str, Artifact]
    best_kernel: BestKernel | None = None
    measurement: dict[str, Any] | None
    prediction: dict[str, Any] | None
    check: dict[str, Any] | None
    runners_up: list[Any]
    candidates: Count
    failed: Count
    created: str
    created_by: str

    @cached_property
    def address(self) -> Address:
        """The address of the record in a cache."""
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
            text = json.dumps(_fields(self), default=_fields, allow_nan=False, indent=1)
        except (TypeError, ValueError, RecursionError) as error:
            raise CacheError(f"the record of {self.kernel} must hold plain JSON data: {error}") from None
        contents = text.removesuffix("\n}")
        return contents + _ending(contents.encode()).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Record:
        """The record that ``text`` holds, with every field's type and form checked.

        Raises:
            UnknownSchema: it was written under another schema.
            Corrupt: it is not JSON, a field is missing, unknown, or not what it must be, or the text was changed since.
        """
        data = text.encode(errors="surrogatepass") if isinstance(text, str) else text
        contents, ending = data[:-_ENDING_BYTES], data[-_ENDING_BYTES:]
        is_sealed = ending.startswith(_ENDING_START) and ending.endswith(_ENDING_END)
        try:
            record = _RECORD.decode(contents + b"}" if is_sealed else data)
        except _NOT_PARSED as error:
            _check_schema(_schema_in(data), is_sealed)
            raise _not_parsed("record", error) from None
        _check_schema(record.schema, is_sealed)
        if is_sealed and ending != _ending(contents):
            raise Corrupt(_CHANGED)
        try:
            _check_sense(record)
        except Corrupt:
            raise
        except CacheError as error:
            raise Corrupt(str(error)) from None
        return record


# Fields that stand in the text only where they hold something.
_LEFT_OUT = frozenset({"best_kernel", "launch", "compiler", "bytecode"})


def _fields(item: object) -> dict[str, Any]:
    """A part of a record as JSON has it.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(item, Launch | Artifact | BestKernel | Record):
        raise TypeError(f"a value of type {type(item).__name__}")
    fields = msgspec.structs.asdict(item)
    return {name: value for name, value in fields.items() if value is not None or name not in _LEFT_OUT}


class _Schema(msgspec.Struct):
    schema: int


_RECORD, _ONLY_SCHEMA = msgspec.json.Decoder(Record), msgspec.json.Decoder(_Schema)
_NOT_PARSED = (msgspec.MsgspecError, UnicodeError, RecursionError)
_ENDING_START, _ENDING_END = b',\n "sha256": "', b'"\n}\n'
_CHANGED = "its last field, sha256, is not that of the text before it: it was changed since it was written"


def _ending(contents: bytes) -> bytes:
    return _ENDING_START + hashlib.sha256(contents).hexdigest().encode() + _ENDING_END


_ENDING_BYTES = len(_ending(b""))


def _schema_in(data: bytes) -> int | None:
    """The schema that a text names, where it is not a record of today; None where it names none."""
    try:
        return _ONLY_SCHEMA.decode(data).schema
    except _NOT_PARSED:
        return None


def _check_schema(schema: int | None, is_sealed: bool) -> None:
    """Whether a record's schema is known, and its text ends as that schema has it; None is not looked at.

    Raises:
        UnknownSchema: the record was written under another schema.
        Corrupt: there is no such schema, or the digest at the end is missing.
    """
    if schema is None:
        return
    if schema < 1:
        raise Corrupt(f"schema must be {OLDEST_SCHEMA} or {SCHEMA}, got {schema!r:.60}")
    if not OLDEST_SCHEMA <= schema <= SCHEMA:
        raise UnknownSchema(
            f"schema {schema} was written by another version of tilekern; this one reads {OLDEST_SCHEMA} and {SCHEMA}"
        )
    if not is_sealed:
        raise Corrupt(_CHANGED)


def _not_parsed(what: str, error: Exception) -> Corrupt:
    """The error of msgspec about a text, in one line."""
    said = " ".join(str(error).split())[:200]
    return Corrupt(f"{what}: {said}" if isinstance(error, msgspec.ValidationError) else f"not valid JSON: {said}")


def decode_record(data: bytes, address: Address | None) -> Record:
    """The record in the bytes of the file at ``address``, which is None where no record may stand.

    Raises:
        UnknownSchema: it was written under another schema.
        Corrupt: it is not a whole record, or it belongs at another address.
    """
    record = record_of(data)
    if record.address != address:
        raise Corrupt(f"its contents belong at {record.address.path}")
    return record


def record_of(data: bytes) -> Record:
    """The record in the bytes of a file, wherever that stands; it remembers the bytes.

    Raises:
        UnknownSchema: it was written under another schema.
        Corrupt: it is not a whole record.
    """
    record = Record.from_json(data)
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


def parse_object(text: str | bytes) -> dict[str, Any]:
    """The JSON object in ``text``; ``NaN``, ``Infinity``, lone surrogates and numbers beyond a float are refused.

    Raises:
        Corrupt: it is anything else.
    """
    try:
        document = msgspec.json.decode(text)
    except _NOT_PARSED as error:
        raise _not_parsed("JSON", error) from None
    if not isinstance(document, dict):
        raise Corrupt(f"expected a JSON object, got {type(document).__name__}")
    return document


def _check_sense(record: Record) -> None:
    """Check the rules that the types alone do not state."""
    for name, artifact in record.artifacts.items():
        check_name("a variant", name)
        if artifact.launch and math.prod(artifact.launch.block) > _MOST_THREADS:
            raise Corrupt(f"artifact {name}: a block has at most {_MOST_THREADS} threads, got {artifact.launch.block}")
        if artifact.bytecode and record.schema < SCHEMA:
            raise Corrupt(f"artifact {name}: a record of schema {record.schema} has no bytecode")
    check_name("kernel", record.kernel)
    if not _MODULE.fullmatch(record.module):
        raise Corrupt(f"module must be the dotted name of a module, got {record.module!r:.60}")
    check_name("the target's key", record.target.get("key"))
    check_name("the toolkit's key", record.toolkit.get("key"))
    for name in ("name", "arch"):
        if not isinstance(record.target.get(name), str):
            raise Corrupt(f"the target's {name} must be text, got {record.target.get(name)!r:.60}")
    _ = record.address  # raises where the problem can have no key
    if record.provenance == "measured" and not record.measurement:
        raise Corrupt("a measured record must have a measurement")
    if not _is_in_utc(record.created):
        raise Corrupt(f"created must be a time in UTC such as 2026-01-31T12:00:00+00:00, got {record.created!r:.60}")


def _is_in_utc(created: str) -> bool:
    try:
        return datetime.fromisoformat(created).utcoffset() == timedelta(0)
    except ValueError:
        return False
