"""The places that records are listed from: a cache's folder, a pack, or each layer of a lookup."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tilekern.cache import (
    CacheError,
    Entry,
    FolderLayer,
    Listed,
    PackLayer,
    Record,
    Store,
    UnknownSchema,
    Where,
    default_layers,
)
from tilekern.cache.entries import listed
from tilekern.cache.packs.pack import Pack
from tilekern.cache.places import USER
from tilekern.warning import tell


@dataclass(frozen=True)
class Source:
    """One place to list records from; ``name`` is the layer's, or the path where it was named on the command line."""

    name: str
    place: Store | Pack

    @property
    def path(self) -> Path:
        """The folder or the pack's file."""
        return self.place.root if isinstance(self.place, Store) else self.place.path

    def entries(self, where: Where | None = None) -> Iterator[Entry]:
        """Every record, as :meth:`tilekern.cache.Store.entries` gives them."""
        return self.place.entries(where) if isinstance(self.place, Store) else _entries_of(self.place, where)

    def outlines(self, where: Where | None = None) -> Iterator[Listed]:
        """The same, of each record what a list needs."""
        return map(listed, self.entries(where))

    def read_blob(self, sha256: str) -> bytes:
        """A blob's bytes, checked; raises CacheError."""
        return self.place.read_blob(sha256)


def user_cache(store: Store) -> Source:
    """The cache that a command is about."""
    return Source(USER, store)


def sources_of(store: Store, all_layers: bool, layer: str | None = None) -> list[Source]:
    """The cache that a command is about, or the layers of a lookup: all of them, or the one named.

    Raises:
        CacheError: there is no layer of that name.
    """
    if not all_layers and layer is None:
        return [user_cache(store)]
    sources = layers_of_a_lookup(store)
    chosen = [source for source in sources if layer in (None, source.name)]
    if not chosen:
        raise CacheError(f"there is no layer {layer!r}; a lookup reads {', '.join(source.name for source in sources)}")
    return chosen


def source_at(path: Path) -> Source:
    """The cache or pack at a path.

    Raises:
        CacheError: there is none, or the pack is bad.
    """
    if path.is_dir():
        return Source(str(path), Store(path))
    return Source(str(path), Pack(path))


def layers_of_a_lookup(store: Store) -> list[Source]:
    """The layers that a lookup reads where ``store`` is the user's cache; a bad one is left out, which is said."""
    sources = []
    for layer in default_layers(store.root, looking=True):
        if isinstance(layer, FolderLayer):
            sources.append(Source(layer.name, Store(layer.root)))
        elif isinstance(layer, PackLayer):
            try:
                sources.append(Source(layer.name, Pack(layer.path)))
            except CacheError as error:
                tell(f"left out: {error}", err=True)
    return sources


def _entries_of(pack: Pack, where: Where | None) -> Iterator[Entry]:
    modified = pack.path.stat().st_mtime
    for address, name in sorted(pack.records.items()):
        if where and not all(where(address[:last]) for last in range(1, 5)):
            continue
        record: Record | None = None
        problem: CacheError | None = None
        try:
            record = pack.read_record(address)
        except CacheError as error:
            problem = error
        sizes = {artifact.sha256: artifact.size for artifact in record.artifacts.values()} if record else {}
        file_bytes = pack.members[name].size
        yield Entry(
            path=pack.path / name,
            address=address,
            record=record,
            problem=None if problem is None else str(problem),
            unknown_schema=isinstance(problem, UnknownSchema),
            size_bytes=file_bytes + sum(sizes.values()),
            modified=modified,
            file_bytes=file_bytes,
            used=modified,
            identity=None,
        )
