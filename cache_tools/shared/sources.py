"""Places to list records from: a cache's folder, a pack, or each layer of a lookup."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tilekern.cache import CacheError, FolderLayer, Pack, PackLayer, Store, default_layers
from tilekern.cache.places import USER
from tilekern.warning import tell


class Source(NamedTuple):
    """One place to list records from; ``name`` is the layer's."""

    name: str
    place: Store | Pack

    @property
    def path(self) -> Path:
        """The folder or the pack's file."""
        return self.place.root if isinstance(self.place, Store) else self.place.path


def sources_of(store: Store, all_layers: bool, layer: str | None = None) -> list[Source]:
    """Return the cache alone, all layers of a lookup, or the layer of that name.

    Raises:
        CacheError: there is no layer of that name.
    """
    if not all_layers and layer is None:
        return [Source(USER, store)]
    sources = layers_of_a_lookup(store)
    chosen = [source for source in sources if layer in (None, source.name)]
    if not chosen:
        raise CacheError(f"there is no layer {layer!r}; a lookup reads {', '.join(source.name for source in sources)}")
    return chosen


def place_at(path: Path) -> Store | Pack:
    """Return the cache or pack at a path.

    Raises:
        CacheError: there is none, or the pack is bad.
    """
    return Store(path) if path.is_dir() else Pack(path)


def layers_of_a_lookup(store: Store) -> list[Source]:
    """Return the layers that a lookup reads when ``store`` is the user's cache; bad ones are reported and left out."""
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
