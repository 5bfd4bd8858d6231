"""The record of one problem on one target and toolkit, written as JSON and read with every field checked.

msgspec parses the text and checks each field's type in one pass. A record's text ends with the sha256 of everything
before it: a config with a flipped bit would be a valid config, and the artifact would be launched by the wrong grid.
Records of schema 3 do not say which bytecode an artifact was assembled from.
"""

from __future__ import annotations

import contextlib
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

# An artifact's digest as `Record.to_json` writes it; few records have more than an aligned and a generic artifact.
_ARTIFACT_DIGEST = re.compile(rb'\n   "sha256": "([0-9a-f]{64})"')
_USUAL_ARTIFACTS = 4
# A field that holds a sha256, and one that counts something.
Digest = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Count = Annotated[int, msgspec.Meta(ge=0)]
_Threads = Annotated[int, msgspec.Meta(ge=1, le=1024)]
_MOST_THREADS = 1024
_MODULE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")


class Launch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to launch an artifact of another compiler than cuTile's.

    Attributes:
        block: threads of a block, in three dimensions.
        cluster: blocks of a cluster; 1 for no clusters.
        cooperative: whether all blocks must be resident at once.
        shared_bytes: dynamic shared memory of a block.
    """

    block: tuple[_Threads, _Threads, _Threads]
    cluster: Annotated[int, msgspec.Meta(ge=1, le=16)]
    cooperative: bool
    shared_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**20)]


class Artifact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The compiled form of a candidate; its bytes are the blob named ``sha256``.

    The cache does not interpret ``config``, ``assumptions`` and ``resources``.

    Attributes:
        sha256: digest of the bytes, in hexadecimal.
        size: length in bytes.
        symbol: the entry point's name inside the artifact.
        config: the config that it was compiled for.
        assumptions: what its arguments must satisfy.
        resources: registers, spill_bytes, shared_bytes, threads and the like.
        launch: how it is launched; None for cuTile's artifacts, which say themselves what they need.
        compiler: name and version of the compiler that made it; None for the record's toolkit.
        bytecode: sha256 of the Tile IR bytecode, without debug information, that it was assembled from; None in
            schema 3, and for another compiler.
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
    """The best config that needs no library, in a record whose winner is run by a library.

    Attributes:
        config: the config; the record's artifacts are those of it, if it is not a composite of other kernels.
        measurement: None, or its timings from the same run as the winner's.
        check: None, or how far its result was from the reference.
    """

    config: dict[str, Any]
    measurement: dict[str, Any] | None
    check: dict[str, Any] | None


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """The cache's entry for one problem on one target and toolkit.

    Attributes:
        schema: the form of its text, 3 or 4; a record is written in the schema that it was read in, so that its
            signatures stay valid.
        kernel: the spec's name.
        module: dotted name of the module with the kernel's device code.
        problem: the problem with bucketed sizes, in the order of its key.
        target: the GPU: ``key``, ``name``, ``arch`` (text) and further facts about it.
        toolkit: the compiler: ``key`` (text) and the versions of its parts.
        source_digest: the digest of the kernel's source that its artifacts are valid for
            (:func:`tilekern.spec.source.source_digest`).
        space_digest: the digest of the source in whose search space it won; differs from ``source_digest`` if an edit
            changed the space but not the record's machine code.
        provenance: ``measured``, ``predicted`` or ``default``.
        config: the winner.
        artifacts: by the variant's name, for example ``aligned`` and ``generic``.
        best_kernel: None, or the best kernel for users without the library that runs the winner.
        measurement: None, or timings: ``median_us``, ``default_us`` (the default config in the same run) and the
            spread; required if the provenance is ``measured``.
        prediction: None, or the prediction: ``time_us`` and what it was derived from.
        check: None, or how far the winner's result was from the reference.
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
        """The record's address in a cache."""
        return Address(self.target["key"], self.toolkit["key"], self.kernel, problem_key(self.problem))

    @cached_property
    def data(self) -> bytes:
        """The bytes of its file, which signatures cover; for a record that is not in a file, those it would have."""
        return self.to_json().encode()

    @property
    def digests(self) -> frozenset[str]:
        """The sha256 of every blob that the record refers to."""
        return frozenset(artifact.sha256 for artifact in self.artifacts.values())

    def to_json(self) -> str:
        """Return the record as JSON; equal records give equal text.

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
        """Parse a record and check the type and form of every field.

        Raises:
            UnknownSchema: it was written in an unknown schema.
            Corrupt: it is not JSON, a field is missing, unknown or wrong, or the text was changed since.
        """
        data = text.encode(errors="surrogatepass") if isinstance(text, str) else text
        contents, ending = data[:-_ENDING_BYTES], data[-_ENDING_BYTES:]
        is_sealed = ending.startswith(_ENDING_START) and ending.endswith(_ENDING_END)
        try:
            record = _RECORD.decode(contents + b"}" if is_sealed else data)
        except _NOT_PARSED as error:
            with contextlib.suppress(*_NOT_PARSED):
                _check_schema(_ONLY_SCHEMA.decode(data).schema, is_sealed)
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


# Fields that are left out of the text if they are None.
_LEFT_OUT = frozenset({"best_kernel", "launch", "compiler", "bytecode"})


def _fields(item: object) -> dict[str, Any]:
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


def _check_schema(schema: int, is_sealed: bool) -> None:
    """Raise UnknownSchema or Corrupt if the schema is unknown or wrong, or the digest at the end is missing."""
    if schema < 1:
        raise Corrupt(f"schema must be {OLDEST_SCHEMA} or {SCHEMA}, got {schema!r:.60}")
    if not OLDEST_SCHEMA <= schema <= SCHEMA:
        raise UnknownSchema(
            f"schema {schema} was written by another version of tilekern; this one reads {OLDEST_SCHEMA} and {SCHEMA}"
        )
    if not is_sealed:
        raise Corrupt(_CHANGED)


def _not_parsed(what: str, error: Exception) -> Corrupt:
    reason = " ".join(str(error).split())[:200]
    return Corrupt(f"{what}: {reason}" if isinstance(error, msgspec.ValidationError) else f"not valid JSON: {reason}")


def decode_record(data: bytes, address: Address | None) -> Record:
    """Return the record in the bytes of the file at ``address`` (None for a path that is not that of a record).

    Raises:
        UnknownSchema: it was written in an unknown schema.
        Corrupt: it is not a whole record, or it belongs at another address.
    """
    record = record_of(data)
    if record.address != address:
        raise Corrupt(f"its contents belong at {record.address.path}")
    return record


def record_of(data: bytes) -> Record:
    """Return the record in the bytes of a file, at whatever path; it keeps the bytes.

    Raises:
        UnknownSchema: it was written in an unknown schema.
        Corrupt: it is not a whole record.
    """
    record = Record.from_json(data)
    record.__dict__["data"] = data
    return record


def likely_digests(data: bytes) -> list[str]:
    """Return the sha256 of the first blobs that a record's text seems to name, before it is parsed and checked."""
    return [found[1].decode() for found in itertools.islice(_ARTIFACT_DIGEST.finditer(data), _USUAL_ARTIFACTS)]


def check_blob(data: bytes, sha256: str) -> bytes:
    """Return ``data`` if its digest is ``sha256``.

    Raises:
        Corrupt: it has another digest.
    """
    digest = hashlib.sha256(data).hexdigest()
    if digest != sha256:
        raise Corrupt(f"blob {sha256} holds {len(data)} bytes whose sha256 is {digest}")
    return data


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Return the JSON object in ``text``.

    Raises:
        Corrupt: it is anything else, or has ``NaN``, ``Infinity``, lone surrogates or numbers beyond a float.
    """
    try:
        document = msgspec.json.decode(text)
    except _NOT_PARSED as error:
        raise _not_parsed("JSON", error) from None
    if not isinstance(document, dict):
        raise Corrupt(f"expected a JSON object, got {type(document).__name__}")
    return document


def _check_sense(record: Record) -> None:
    """Check the rules that types cannot express."""
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
    try:
        offset = datetime.fromisoformat(record.created).utcoffset()
    except ValueError:
        offset = None
    if offset != timedelta(0):
        raise Corrupt(f"created must be a time in UTC such as 2026-01-31T12:00:00+00:00, got {record.created!r:.60}")
