"""Install a pack into a cache: all of it is checked before anything is written, and it is installed whole or not."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from pathlib import Path, PurePosixPath

from tilekern.cache.errors import CacheError, UnknownSchema, Untrusted
from tilekern.cache.files import read_whole
from tilekern.cache.folders import write_below
from tilekern.cache.freshness import FRESH, STALE, freshness
from tilekern.cache.keys import Address, blob_path, signature_path
from tilekern.cache.packs.incoming import Incoming, finish_incoming, remove_abandoned
from tilekern.cache.packs.pack import Pack, checked_contents
from tilekern.cache.records import LARGEST_RECORD, PROVENANCES, Record, decode_record
from tilekern.cache.store import GRACE_S, Store
from tilekern.cache.trust.policy import must_be_signed, own_seal, require_trusted
from tilekern.cache.trust.signing import SIGNATURE_BYTES

Today = Callable[[Record], str | None]
_Signatures = Mapping[str, Mapping[str, bytes]]


def install_pack(
    path: str | os.PathLike[str],
    store: Store,
    own: Collection[str] = (),
    made_now: Collection[str] = (),
    today: Today | None = None,
) -> int:
    """Put a pack's records, blobs and signatures into a store, all or nothing, once all are checked.

    A record in the store stays if it is better (:func:`has_better`). Under the policy ``signed``, every record must be
    signed by a trust root.

    Args:
        path: the pack.
        store: the cache.
        own: sha256 of the records in the pack that this very process made; under ``signed`` they are sealed and need
            no signature.
        made_now: sha256 of the records that this process made, of its own artifacts or others'. They count as newer
            than any in the store, whatever the dates.
        today: returns the digest of a record's kernel by its source today, for :func:`has_better`.

    Returns:
        The number of records written.

    Raises:
        Corrupt: anything in the pack is wrong; nothing was written.
        Untrusted: the policy is ``signed``, and a record is not signed by a trust root; nothing was written.
        UnknownSchema: another version of tilekern wrote the pack or a record that it would replace; nothing was
            written.
        CacheError: the pack cannot be read, or the store cannot be written.
    """
    pack = Pack(Path(path))
    signatures = pack.signatures()
    for record, _ in checked_contents(pack):
        if must_be_signed() and pack.members[str(record.address.path)].sha256 not in own:
            try:
                require_trusted(pack.read(str(record.address.path)), lambda name: pack.read(str(name)))
            except Untrusted as error:
                raise Untrusted(f"{pack.path}: {record.address.path}: {error}; nothing was unpacked") from None
    finish_incoming(store.root)
    chosen = [
        address
        for address, name in pack.records.items()
        if not has_better(store, pack.read_record(address), today, made_now=pack.members[name].sha256 in made_now)
    ]
    try:
        remove_abandoned(store.root, time.time() - GRACE_S)
        with Incoming(store.root) as incoming:
            for address in chosen:
                incoming.add(_files(pack, store, address, signatures, own))
            if chosen:
                incoming.commit()
        # A garbage collection may have deleted a blob that was there, before its new record was.
        for address in chosen:
            for blob in pack.read_record(address).digests:
                if not (store.root / blob_path(blob)).exists():
                    write_below(store.root, blob_path(blob), pack.read_blob(blob))
    except OSError as error:
        raise CacheError(f"cannot write to the cache folder {store.root}: {error.strerror or error}") from None
    return len(chosen)


def has_better(store: Store, offered: Record, today: Today | None = None, *, made_now: bool = False) -> bool:
    """Return whether a store's record of the same problem, target and toolkit is better than an offered one.

    The better one is, in this order: valid for today's source of the kernel; of the stronger provenance (measured, then
    predicted, then default); of today's search space; the newer one. So an old pack does not undo newer records.

    Args:
        store: the cache.
        offered: the other record.
        today: returns the digest of a record's kernel by its source today, or None if that is not installed here.
        made_now: whether the offered record was made just now: it is of today's source, and newer than any, whatever
            the dates, which come from the clocks of two machines.

    Raises:
        UnknownSchema: another version of tilekern wrote the store's record; only that version may replace it.
    """
    address = offered.address
    path = store.root / address.path
    try:
        data, _ = read_whole(path, LARGEST_RECORD, as_use=False)
        present = decode_record(data, address)
        if not made_now and must_be_signed():
            # A record that is never loaded must not keep out a signed one.
            require_trusted(data, lambda name: read_whole(store.root / name, SIGNATURE_BYTES + 1)[0])
    except UnknownSchema as error:
        raise UnknownSchema(f"{path} is left alone: {error}") from None
    except CacheError:
        return False
    source = None if made_now or today is None else today(offered)
    worth = [freshness(record, source) if source else None for record in (present, offered)]
    if (worth[0] == STALE) != (worth[1] == STALE):
        return worth[1] == STALE
    if present.source_digest == offered.source_digest:
        ranks = [PROVENANCES.index(record.provenance) for record in (present, offered)]
        if ranks[0] != ranks[1]:
            return ranks[0] < ranks[1]
        if present.space_digest != offered.space_digest and FRESH in worth:
            return worth[0] == FRESH
    if made_now:
        return False
    return datetime.fromisoformat(present.created) > datetime.fromisoformat(offered.created)


def _files(
    pack: Pack, store: Store, address: Address, signatures: _Signatures, own: Collection[str]
) -> dict[PurePosixPath, bytes]:
    """Return a record with its blobs and signatures, byte for byte as in the pack."""
    name = str(address.path)
    data, digest = pack.read(name), pack.members[name].sha256
    files = {signature_path(digest, key): text for key, text in signatures.get(digest, {}).items()}
    if digest in own:
        files |= own_seal(data)
    files[address.path] = data
    for blob in decode_record(data, address).digests:
        if not store.keep_blob(blob):
            files[blob_path(blob)] = pack.read_blob(blob)
    return files
