"""The command revoke: take records back as a trust root."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import click

from tilekern.cache import Pack, Store
from tilekern.cache.files import read_whole
from tilekern.cache.records import LARGEST_RECORD, record_of
from tilekern.cache.trust.revoking import write_revoked
from tilekern.cache.trust.signing import SigningKey
from tilekern.cache_tools.shared.options import FILE, as_json, command, key_file
from tilekern.cache_tools.shared.printing import count, note_left_out, print_result


@command
@click.argument("what", metavar="PACK|CACHE|RECORD|SHA256...", nargs=-1, required=True)
@key_file
@click.option(
    "--out", metavar="FILE.revoked", required=True, type=FILE,
    help="The list; records that are on it stay on it.",
)  # fmt: skip
@as_json
def revoke(what: tuple[str, ...], key_file: Path, out: Path, as_json: bool) -> None:
    """Take records back: all of a pack or a cache's folder, one by its file, or one by the sha256 of its file.

    If FILE.revoked lies beside the trust roots and the key is one of them, TILEKERN_TRUST=signed no longer loads these
    records, whoever signed them.

    JSON: file, public_key, revoked (records that were named), records (on the list), left_out (records of a cache that
    cannot be read, which no job loads).
    """
    key = SigningKey(key_file)
    digests = [digest for argument in what for digest in _digests(argument)]
    named = {digest for digest in digests if digest is not None}
    records, left_out = len(write_revoked(out, named, key)), digests.count(None)
    counts = {"revoked": len(named), "records": records, "left_out": left_out}
    document = {"file": str(out), "public_key": key.public_key, **counts}
    text = f"revoked {count(len(named), 'record')} by key {key.public_key[:16]}; {out} has {records:,}"
    print_result(document, as_json, f"{text}{note_left_out(left_out)}")


def _digests(argument: str) -> Iterator[str | None]:
    """Yield the sha256 of each record that an argument names; None for one that cannot be read."""
    path = Path(argument)
    if re.fullmatch("[0-9a-f]{64}", argument):
        yield argument
    elif path.is_dir():
        for entry, data in Store(path).read_entries():
            yield hashlib.sha256(data).hexdigest() if entry.record else None
    elif path.suffix == ".json":
        data, _ = read_whole(path, LARGEST_RECORD)
        record_of(data)
        yield hashlib.sha256(data).hexdigest()
    else:
        pack = Pack(path)
        yield from (pack.members[name].sha256 for name in pack.records.values())
