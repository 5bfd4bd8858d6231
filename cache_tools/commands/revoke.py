"""The command revoke: records that a trust root takes back."""

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
from tilekern.cache_tools.shared.options import as_json, command
from tilekern.cache_tools.shared.text import count, print_json
from tilekern.warning import tell


@command
@click.argument("what", metavar="PACK|CACHE|RECORD|SHA256...", nargs=-1, required=True)
@click.option("--key", "key_file", required=True, type=click.Path(path_type=Path), help="The file that `keygen` made.")
@click.option(
    "--out", metavar="FILE.revoked", required=True, type=click.Path(path_type=Path),
    help="The list; records that are on it stay on it.",
)  # fmt: skip
@as_json
def revoke(what: tuple[str, ...], key_file: Path, out: Path, as_json: bool) -> None:
    """Take records back: all of a pack or of a cache's folder, one by its file, or by the sha256 of that.

    Where FILE.revoked lies beside the trust roots and the key is one of them, TILEKERN_TRUST=signed loads none of them
    any more, whoever signed it.

    JSON: file, public_key, revoked (records that were named), records (on the list), left_out (records of a cache that
    cannot be read, which no job loads).
    """
    key = SigningKey(key_file)
    found = [digest for one in what for digest in _digests(one)]
    named = {digest for digest in found if digest is not None}
    together, left_out = write_revoked(out, named, key), found.count(None)
    if as_json:
        counts = {"revoked": len(named), "records": len(together), "left_out": left_out}
        print_json({"file": str(out), "public_key": key.public_key} | counts)
        return
    note = f"; {count(left_out, 'unreadable record')} left out" if left_out else ""
    tell(f"revoked {count(len(named), 'record')} by key {key.public_key[:16]}; {out} has {len(together):,}{note}")


def _digests(one: str) -> Iterator[str | None]:
    """The sha256 of each record that a word of the command line means; None for one that cannot be read."""
    path = Path(one)
    if re.fullmatch("[0-9a-f]{64}", one):
        yield one
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
