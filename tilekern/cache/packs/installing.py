"""Install a pack into a cache: all of it is checked before anything is written, and it is installed whole or not."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from tilekern.cache.errors import CacheError, UnknownSchema, Untrusted
from tilekern.cache.files import read_whole
from tilekern.cache.folders import write_below
from tilekern.cache.freshness import has_class, why_better
from tilekern.cache.keys import Address, blob_path, signature_path
from tilekern.cache.packs.incoming import Incoming, finish_incoming, remove_abandoned
from tilekern.cache.packs.pack import Pack, checked_contents
from tilekern.cache.records import LARGEST_RECORD, Record, decode_record
from tilekern.cache.store import GRACE_S, Store
from tilekern.cache.trust.policy import must_be_signed, own_seal, require_trusted
from tilekern.cache.trust.signing import SIGNATURE_BYTES
from tilekern.spec.kernel_spec import INVARIANT

Today = Callable[[Record], str | None]
_Signatures = Mapping[str, Mapping[str, bytes]]


class Installed(NamedTuple):
    """What became of a pack's records.

    Attributes:
        records: how many were written.
        kept: by reason, how many of the cache stayed instead.
        unclassed: how many were written over one with an invariant kernel, and have none.
    """

    records: int
    kept: dict[str, int]
    unclassed: int = 0


def install_pack(
    path: str | os.PathLike[str],
    store: Store,
    own: Collection[str] = (),
    made_now: Collection[str] = (),
    today: Today | None = None,
) -> Installed:
    """Put a pack's records, blobs and signatures into a store, all or nothing, once all are checked.

    A record in the store stays if it is better (:func:`why_kept`). Under the policy ``signed``, every record must be
    signed by a trust root.

    Args:
        path: the pack.
        store: the cache.
        own: sha256 of the records in the pack that this very process made; under ``signed`` they are sealed and need
            no signature.
        made_now: sha256 of the records that this process made, of its own artifacts or others'. They count as newer
            than any in the store, whatever the dates.
        today: returns the digest of a record's kernel by its source today, for :func:`why_kept`.

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
    reasons = {
        address: why_kept(store, pack.read_record(address), today, made_now=pack.members[name].sha256 in made_now)
        for address, name in pack.records.items()
    }
    chosen = [address for address, reason in reasons.items() if not reason]
    unclassed = sum(has_class(_present(store, one)) and not has_class(pack.read_record(one)) for one in chosen)
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
    return Installed(len(chosen), dict(Counter(filter(None, reasons.values()))), unclassed)


def _present(store: Store, address: Address, *, trusted: bool = False) -> Record | None:
    """Return a store's record; None if there is none that can be loaded, or that is ``trusted`` if it must be signed.

    Raises:
        UnknownSchema: another version of tilekern wrote it.
    """
    path = store.root / address.path
    try:
        data, _ = read_whole(path, LARGEST_RECORD, as_use=False)
        present = decode_record(data, address)
        if trusted and must_be_signed():
            # A record that is never loaded must not keep out a signed one.
            require_trusted(data, lambda name: read_whole(store.root / name, SIGNATURE_BYTES + 1)[0])
        # Nor must one that a lookup passes over, since an artifact is lost.
        for name, artifact in present.artifacts.items():
            if name != INVARIANT:
                store.read_blob(artifact.sha256)
    except UnknownSchema as error:
        raise UnknownSchema(f"{path} is left alone: {error}") from None
    except CacheError:
        return None
    return present


def why_kept(store: Store, offered: Record, today: Today | None = None, *, made_now: bool = False) -> str:
    """Return why a store's record is better than an offered one of its address; empty if the latter is to be written.

    :func:`tilekern.cache.why_better` says which is better.

    Args:
        store: the cache.
        offered: the other record.
        today: returns the digest of a record's kernel by its source today, or None if that is not installed here.
        made_now: whether the offered record was made just now, of today's source.

    Raises:
        UnknownSchema: another version of tilekern wrote the store's record; only that version may replace it.
    """
    present = _present(store, offered.address, trusted=not made_now)
    if present is None:
        return ""
    source = None if made_now or today is None else today(offered)
    return why_better(present, offered, source, other_is_new=made_now)


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
