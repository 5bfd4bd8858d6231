"""The names that make up a cache's paths: problems as text, and what is safe as the name of a file or folder."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from tilekern.cache.errors import CacheError

Value = int | str | bool | None

LAYOUT = "v1"
BLOBS = "blobs"
WANTED = "wanted"
SIGNATURES = "signatures"
INCOMING = "incoming"
# The folders of a cache that hold no target's records.
OWN_FOLDERS = frozenset((BLOBS, WANTED, SIGNATURES, INCOMING))
SIGNATURE_SUFFIX = ".sig"
SEAL_SUFFIX = ".seal"
LONGEST_NAME = 100
DIGITS = 18
# A file system takes 255 bytes for a name; a record that is set aside adds ".json.bad".
LONGEST_PROBLEM_KEY = 240

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
_DIMENSION = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TEXT = re.compile(r"[A-Za-z0-9_.+-]+")
_WHOLE_NUMBER = re.compile(rf"0|-?[1-9][0-9]{{0,{DIGITS - 1}}}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SIGNATURE = re.compile(rf"([0-9a-f]{{64}})\.([0-9a-f]{{64}})\{SIGNATURE_SUFFIX}")
_SIGNATURE_OR_SEAL = re.compile(rf"[0-9a-f]{{64}}\.[0-9a-f]{{64}}(\{SIGNATURE_SUFFIX}|\{SEAL_SUFFIX})")
# What Windows takes for a device, with any suffix and in upper or lower case.
_DEVICE = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)
_WORDS: dict[str, Value] = {"True": True, "False": False, "None": None}


class Address(NamedTuple):
    """The four names of a record's path in a cache or pack."""

    target_key: str
    toolkit_key: str
    kernel: str
    problem_key: str

    @property
    def name(self) -> str:
        """The record's path below the cache's root, as text: a lookup spends a tenth of its time on path objects."""
        return f"{LAYOUT}/{self.target_key}/{self.toolkit_key}/{self.kernel}/{self.problem_key}.json"

    @property
    def path(self) -> PurePosixPath:
        """The record's path below the cache's root."""
        return PurePosixPath(self.name)


def parse_path(parts: Sequence[str]) -> Address:
    """The address of the record at a path below the cache's root, given as its parts.

    Raises:
        CacheError: no record may stand there.
    """
    if len(parts) != 5 or parts[0] != LAYOUT or not parts[4].endswith(".json"):
        raise CacheError(f"{'/'.join(parts)!r:.300} is not the path of a record")
    address = Address(parts[1], parts[2], parts[3], parts[4].removesuffix(".json"))
    for what, name in zip(("a target's key", "a toolkit's key", "a kernel"), address[:3], strict=True):
        check_name(what, name)
    parse_problem_key(address.problem_key)
    return address


def blob_name(sha256: str) -> str:
    """A blob's path below the cache's root, as text.

    Raises:
        CacheError: ``sha256`` is not a digest.
    """
    check_digest("a blob", sha256)
    return f"{LAYOUT}/{BLOBS}/{sha256[:2]}/{sha256}"


def blob_path(sha256: str) -> PurePosixPath:
    """A blob's path below the cache's root; raises as :func:`blob_name` does."""
    return PurePosixPath(blob_name(sha256))


def signature_path(record_sha256: str, public_key: str) -> PurePosixPath:
    """The path, below the cache's root, of the signature that one key gave to a record.

    Args:
        record_sha256: the digest of the record's bytes.
        public_key: 32 bytes in hexadecimal.

    Raises:
        CacheError: either is not 64 hexadecimal digits.
    """
    check_digest("a record's sha256", record_sha256)
    check_digest("a public key", public_key)
    name = f"{record_sha256}.{public_key}{SIGNATURE_SUFFIX}"
    return PurePosixPath(LAYOUT, SIGNATURES, record_sha256[:2], name)


def parse_signature_path(parts: Sequence[str]) -> tuple[str, str]:
    """The record's sha256 and the public key of the signature at a path; inverse of :func:`signature_path`.

    Raises:
        CacheError: no signature may stand there.
    """
    found = _SIGNATURE.fullmatch(parts[-1])
    if found is None or tuple(parts) != signature_path(found[1], found[2]).parts:
        raise CacheError(f"{'/'.join(parts)!r:.300} is not the path of a signature")
    return found[1], found[2]


def is_place(path: PurePosixPath) -> bool:
    """Whether a file of a cache may stand at a path below the root: a record, a blob, a signature or a seal."""
    folder, name = path.parts[:-1], path.name
    if folder == (LAYOUT, BLOBS, name[:2]):
        return bool(_DIGEST.fullmatch(name))
    if folder == (LAYOUT, SIGNATURES, name[:2]):
        return is_signature_name(name)
    try:
        parse_path(path.parts)
    except CacheError:
        return False
    return True


def is_signature_name(name: str) -> bool:
    """Whether a file of this name is a signature or a seal."""
    return bool(_SIGNATURE_OR_SEAL.fullmatch(name))


def check_name(what: str, name: object) -> str:
    """``name`` where it is safe as the name of a file or folder; ``what`` is said in the error.

    Raises:
        CacheError: it is not text, is empty or too long, has other characters than letters, digits and ``_.+-``,
            does not start with a letter or digit, ends with a dot, is a device on Windows, or is taken by the
            cache's own folders.
    """
    if not isinstance(name, str) or not _is_name(name):
        raise CacheError(
            f"{what} must be letters, digits and _.+- (at most {LONGEST_NAME}), neither a device's name nor one that "
            f"ends with a dot, got {name!r:.150}"
        )
    return name


def check_digest(what: str, digest: object) -> str:
    """``digest`` where it is a sha256 in lower-case hexadecimal; ``what`` is said in the error.

    Raises:
        CacheError: it is anything else.
    """
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise CacheError(f"{what} must be 64 lower-case hexadecimal digits, got {digest!r}")
    return digest


def problem_key(problem: Mapping[str, Value]) -> str:
    """The problem as one line that names its file, in the order of the mapping: ``rows=8192,dtype=bfloat16``.

    Raises:
        CacheError: the problem is empty, its key is too long, or a name or value cannot be part of a file's name
            or would not read back as it was (the text ``"12"``, for example, would read back as a number).
    """
    if not problem:
        raise CacheError("a problem must have at least one dimension, got none")
    key = ",".join(f"{_dimension(name)}={_text(name, value)}" for name, value in problem.items())
    if len(key) > LONGEST_PROBLEM_KEY:
        raise CacheError(f"a problem's key may have {LONGEST_PROBLEM_KEY} characters, got {len(key)}: {key[:60]}...")
    return key


def parse_problem_key(text: str) -> dict[str, Value]:
    """The problem that a key names: whole numbers, True, False, None and text; inverse of :func:`problem_key`.

    Raises:
        CacheError: ``text`` is not a problem key.
    """
    if len(text) > LONGEST_PROBLEM_KEY:
        raise CacheError(f"a problem's key may have {LONGEST_PROBLEM_KEY} characters, got {len(text)}")
    problem: dict[str, Value] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals or name in problem or not _DIMENSION.fullmatch(name) or not _TEXT.fullmatch(value):
            raise CacheError(f"{text!r} is not a problem key; one looks like rows=8192,columns=4096,dtype=bfloat16")
        problem[name] = _value(value)
    return problem


@functools.lru_cache(maxsize=1024)
def _is_name(name: str) -> bool:
    if not _NAME.fullmatch(name) or len(name) > LONGEST_NAME or name in OWN_FOLDERS:
        return False
    return not name.endswith(".") and not _DEVICE.fullmatch(name)


def _dimension(name: object) -> str:
    if not isinstance(name, str) or not _is_dimension(name):
        raise CacheError(f"the name of a problem's dimension must be letters, digits and _, got {name!r}")
    return name


@functools.lru_cache(maxsize=1024)
def _is_dimension(name: str) -> bool:
    return bool(_DIMENSION.fullmatch(name))


def _text(name: str, value: object) -> str:
    known = isinstance(value, str | None) or (isinstance(value, int) and abs(value) < 10**DIGITS)
    text = _known_text(value) if known else None
    if text is None:
        got = repr(value[:60]) if isinstance(value, str) else f"a value of type {type(value).__name__}"
        raise CacheError(
            f"{name} must be a whole number of at most {DIGITS} digits, True, False, None, "
            f"or text of letters, digits and _.+- that reads as none of these, got {got}"
        )
    return text


@functools.lru_cache(maxsize=1024, typed=True)
def _known_text(value: Value) -> str | None:
    """A value as text where it reads back as it was; a lookup asks four times for each."""
    text = str(value)
    return text if _TEXT.fullmatch(text) and _value(text) == value else None


def _value(text: str) -> Value:
    if text in _WORDS:
        return _WORDS[text]
    return int(text) if _WHOLE_NUMBER.fullmatch(text) else text
