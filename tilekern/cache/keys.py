"""The names in a cache's paths: problems as text, and which names are safe for files and folders."""

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
# The folders of a cache that hold no records.
OWN_FOLDERS = frozenset((BLOBS, WANTED, SIGNATURES, INCOMING))
SIGNATURE_SUFFIX = ".sig"
SEAL_SUFFIX = ".seal"
LONGEST_NAME = 100
DIGITS = 18
# File systems allow 255 bytes for a name; a record that is set aside adds ".json.bad".
LONGEST_PROBLEM_KEY = 240

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
_DIMENSION = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TEXT = re.compile(r"[A-Za-z0-9_.+-]+")
_WHOLE_NUMBER = re.compile(rf"0|-?[1-9][0-9]{{0,{DIGITS - 1}}}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SIGNATURE = re.compile(rf"([0-9a-f]{{64}})\.([0-9a-f]{{64}})\{SIGNATURE_SUFFIX}")
_SIGNATURE_OR_SEAL = re.compile(rf"[0-9a-f]{{64}}\.[0-9a-f]{{64}}(\{SIGNATURE_SUFFIX}|\{SEAL_SUFFIX})")
# Names of devices on Windows, with any suffix and in upper or lower case.
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
        """The path below the cache's root as text; path objects would take a tenth of a lookup's time."""
        return f"{LAYOUT}/{self.target_key}/{self.toolkit_key}/{self.kernel}/{self.problem_key}.json"

    @property
    def path(self) -> PurePosixPath:
        """The path below the cache's root."""
        return PurePosixPath(self.name)


def parse_path(parts: Sequence[str]) -> Address:
    """Return the address of the record at a path below the cache's root, given as its parts.

    Raises:
        CacheError: this is not the path of a record.
    """
    if len(parts) != 5 or parts[0] != LAYOUT or not parts[4].endswith(".json"):
        raise CacheError(f"{'/'.join(parts)!r:.300} is not the path of a record")
    address = Address(parts[1], parts[2], parts[3], parts[4].removesuffix(".json"))
    _check_folders(*address[:3])
    parse_problem_key(address.problem_key)
    return address


def blob_name(sha256: str) -> str:
    """Return a blob's path below the cache's root as text.

    Raises:
        CacheError: ``sha256`` is not a digest.
    """
    check_digest("a blob", sha256)
    return f"{LAYOUT}/{BLOBS}/{sha256[:2]}/{sha256}"


def blob_path(sha256: str) -> PurePosixPath:
    """Return a blob's path below the cache's root; raises as :func:`blob_name` does."""
    return PurePosixPath(blob_name(sha256))


def signature_path(record_sha256: str, public_key: str) -> PurePosixPath:
    """Return the path below the cache's root of a record's signature by one key.

    Raises:
        CacheError: the record's sha256 or the public key is not 64 hexadecimal digits.
    """
    check_digest("a record's sha256", record_sha256)
    check_digest("a public key", public_key)
    name = f"{record_sha256}.{public_key}{SIGNATURE_SUFFIX}"
    return PurePosixPath(LAYOUT, SIGNATURES, record_sha256[:2], name)


def parse_signature_path(parts: Sequence[str]) -> tuple[str, str]:
    """Return the record's sha256 and the public key for the path of a signature; inverse of :func:`signature_path`.

    Raises:
        CacheError: this is not the path of a signature.
    """
    match = _SIGNATURE.fullmatch(parts[-1])
    if match is None or tuple(parts) != signature_path(match[1], match[2]).parts:
        raise CacheError(f"{'/'.join(parts)!r:.300} is not the path of a signature")
    return match[1], match[2]


def is_place(path: PurePosixPath) -> bool:
    """Return whether a path below the root is that of a record, a blob, a signature or a seal."""
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
    """Return whether this is the name of a signature or a seal."""
    return bool(_SIGNATURE_OR_SEAL.fullmatch(name))


def check_name(what: str, name: object) -> str:
    """Return ``name`` if it is safe for a file or folder; ``what`` names it in the error.

    Raises:
        CacheError: it is not text, is empty or too long, has characters other than letters, digits and ``_.+-``,
            does not start with a letter or digit, ends with a dot, is a device on Windows, or is the name of one of
            the cache's own folders.
    """
    if not isinstance(name, str) or not _is_name(name):
        raise CacheError(
            f"{what} must be letters, digits and _.+- (at most {LONGEST_NAME}), neither a device's name nor one that "
            f"ends with a dot, got {name!r:.150}"
        )
    return name


def check_digest(what: str, digest: object) -> str:
    """Return ``digest`` if it is a sha256 in lower-case hexadecimal; ``what`` names it in the error.

    Raises:
        CacheError: it is anything else.
    """
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise CacheError(f"{what} must be 64 lower-case hexadecimal digits, got {digest!r}")
    return digest


def problem_key(problem: Mapping[str, Value]) -> str:
    """Return the problem as the name of its file, in the order of the mapping: ``rows=8192,dtype=bfloat16``.

    Raises:
        CacheError: the problem is empty, its key is too long, or a name or value cannot be part of a file's name
            or would be read back as another value (the text ``"12"``, for example, as a number).
    """
    if not problem:
        raise CacheError("a problem must have at least one dimension, got none")
    for name in problem:
        if not isinstance(name, str) or not _is_dimension(name):
            raise CacheError(f"the name of a problem's dimension must be letters, digits and _, got {name!r}")
    key = ",".join(f"{name}={_text(name, value)}" for name, value in problem.items())
    if len(key) > LONGEST_PROBLEM_KEY:
        raise CacheError(f"a problem's key may have {LONGEST_PROBLEM_KEY} characters, got {len(key)}: {key[:60]}...")
    return key


def parse_problem_key(text: str) -> dict[str, Value]:
    """Return the problem that a key names; inverse of :func:`problem_key`.

    Raises:
        CacheError: ``text`` is not a problem key.
    """
    if len(text) > LONGEST_PROBLEM_KEY:
        raise CacheError(f"a problem's key may have {LONGEST_PROBLEM_KEY} characters, got {len(text)}")
    problem: dict[str, Value] = {}
    for part in text.split(","):
        pair = _pair(part)
        if pair is None or pair[0] in problem:
            raise CacheError(f"{text!r} is not a problem key; one looks like rows=8192,columns=4096,dtype=bfloat16")
        problem[pair[0]] = pair[1]
    return problem


@functools.lru_cache(maxsize=4096)
def _pair(part: str) -> tuple[str, Value] | None:
    """Return the dimension and the value of a part of a problem's key; None if it is none."""
    # Cached: the records of a pack have few different parts, and a job opens each pack of the wheel.
    name, equals, value = part.partition("=")
    return (name, _value(value)) if equals and _DIMENSION.fullmatch(name) and _TEXT.fullmatch(value) else None


@functools.lru_cache(maxsize=1024)
def _check_folders(target_key: str, toolkit_key: str, kernel: str) -> None:
    # Cached: a pack has thousands of records in some dozens of folders.
    check_name("a target's key", target_key)
    check_name("a toolkit's key", toolkit_key)
    check_name("a kernel", kernel)


@functools.lru_cache(maxsize=1024)
def _is_name(name: str) -> bool:
    if not _NAME.fullmatch(name) or len(name) > LONGEST_NAME or name in OWN_FOLDERS:
        return False
    return not name.endswith(".") and not _DEVICE.fullmatch(name)


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
    # Cached: a lookup asks four times for each value.
    text = str(value)  # only if it is read back as it was
    return text if _TEXT.fullmatch(text) and _value(text) == value else None


def _value(text: str) -> Value:
    if text in _WORDS:
        return _WORDS[text]
    return int(text) if _WHOLE_NUMBER.fullmatch(text) else text
