"""Taking a pack into a cache: all of it is checked before anything is written, and it goes in whole or not at all."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from pathlib import Path, PurePosixPath

from tilekern.cache.errors import CacheError, UnknownSchema, Untrusted
from tilekern.cache.files import read_whole
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
    """Put a pack's records, blobs and signatures into a store, after all of them have been checked: all or nothing.

    A record that is better in the store stays (:func:`has_better`). Where the policy is ``signed``, every record must
    be signed by a trust root.

    Args:
        path: the pack.
        store: the cache.
        own: the sha256 of the bytes of records that this very process made and put into the pack; under ``signed``
            they are sealed in place of signed.
        made_now: the sha256 of the bytes of records that this process made, of its own artifacts or others'. Nothing
            in the store is newer, whatever its date says.
        today: gives the digests of a record's kernel by its source of today, by which :func:`has_better` judges.

    Returns:
        The number of records written.

    Raises:
        Corrupt: anything in the pack is wrong; nothing was written.
        Untrusted: the policy is ``signed``, and no trust root signed a record; nothing was written.
        UnknownSchema: another version of tilekern wrote the pack, or a record that it would replace; nothing was
            written.
        CacheError: the pack cannot be read, or the store cannot be written.
    """
    pack = Pack(Path(path))
    signatures = pack.signatures()
    for record, _ in checked_contents(pack):
        if must_be_signed() and pack.members[str(record.address.path)].sha256 not in own:
            _require_trusted(pack, record)
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
        _put_back_blobs(pack, store, chosen)
    except OSError as error:
        raise CacheError(f"cannot write to the cache folder {store.root}: {error.strerror or error}") from None
    return len(chosen)


def _require_trusted(pack: Pack, record: Record) -> None:
    try:
        require_trusted(pack.read(str(record.address.path)), lambda name: pack.read(str(name)))
    except Untrusted as error:
        raise Untrusted(f"{pack.path}: {record.address.path}: {error}; nothing was unpacked") from None


def has_better(store: Store, offered: Record, today: Today | None = None, *, made_now: bool = False) -> bool:
    """Whether a store's record of the same problem, target and toolkit is better than one that is offered.

    One that is valid beside today's source of the kernel is better than one that is not. Then measured beats predicted,
    and predicted beats default. Of two that are equal in that, and were chosen from other search spaces, that of
    today's is the better. Else the newer one is, so that an old pack takes nothing back.

    Args:
        store: the cache.
        offered: the other record.
        today: gives the digests of a record's kernel by its source of today, None where that is not installed here.
        made_now: whether the offered record was made just now: it is of today's source, and newer than any, whatever
            dates say, which are by the clocks of two machines.

    Raises:
        UnknownSchema: another version of tilekern wrote it; only that one may replace it.
    """
    address = offered.address
    path = store.root / address.path
    try:
        data, _ = read_whole(path, LARGEST_RECORD, as_use=False)
        present = decode_record(data, address)
        if not made_now and must_be_signed():
            # One that nobody loads keeps none away that a trust root signed.
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
    """The blobs and signatures of a record, and the record, byte for byte as the pack has it."""
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


def _put_back_blobs(pack: Pack, store: Store, chosen: list[Address]) -> None:
    """A garbage collection may have taken a blob that was there, before its new record was."""
    for address in chosen:
        for blob in pack.read_record(address).digests:
            if not (store.root / blob_path(blob)).exists():
                with Incoming(store.root) as incoming:
                    incoming.add({blob_path(blob): pack.read_blob(blob)})
                    incoming.commit()
