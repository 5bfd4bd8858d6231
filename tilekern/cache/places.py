"""Where caches are: the user's folder, and the layers that a lookup reads by default."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from tilekern.cache.absolute_paths import absolute, platform_folder
from tilekern.cache.errors import NoHome
from tilekern.cache.layers import FolderLayer, Layer, Origin, PackLayer
from tilekern.cache.packs.pack import PACK_SUFFIX
from tilekern.warning import warn, warn_once

ENTRY_POINTS = "tilekern.prebuilt"
# The name of the user's cache among the layers.
USER = "user"
# Folders of packs that came with code which this process has loaded, and the names of their owners.
_added: dict[Path, str] = {}


def user_root() -> Path:
    """Return the user's cache folder: ``TILEKERN_CACHE_DIR``, else the platform's folder for caches.

    A relative path is resolved once, so it stays the same when the process changes its folder.

    Raises:
        NoHome: the folder would be in the user's home, and the user has none.
    """
    chosen = os.environ.get("TILEKERN_CACHE_DIR")
    if chosen:
        return absolute(chosen)
    import platformdirs  # slow to import, and not needed if the folder was chosen

    return platform_folder(platformdirs.user_cache_path, "a cache; set TILEKERN_CACHE_DIR to a folder")


def user_root_if_any() -> Path | None:
    """Return the user's cache folder; None, with one warning, if the user has no home."""
    try:
        return user_root()
    except NoHome as error:
        warn_once(f"{error}; until then this process keeps what it compiles to itself", about="no user's cache")
        return None


def default_layers(user: Path | None = None, *, looking: bool = False) -> list[Layer]:
    """Return the layers of a lookup in order: the user's cache, ``TILEKERN_CACHE_PATH``, packages' packs, the wheel's.

    A folder or pack of ``TILEKERN_CACHE_PATH`` that is not there is left out, with one warning.

    Args:
        user: the user's cache, if not :func:`user_root`.
        looking: for tools instead of jobs: bad files of the user's cache are not set aside, and reading a record does
            not count as its use.
    """
    root = user or user_root_if_any()
    own: list[Layer] = [FolderLayer(root, USER, not looking, as_use=not looking)] if root else []
    wheel = _packs_of(Path(__file__).parents[1] / "prebuilt", "prebuilt", "wheel")
    added = [layer for folder, owner in _added.items() for layer in _packs_of(folder, owner, "package")]
    return [*own, *_path_layers(looking), *_package_layers(), *added, *wheel]


def add_packs(folder: Path, owner: str) -> None:
    """Make the lookups of this process read the packs of a folder too, before those of tilekern's wheel.

    This is for code that brings packs along; they are trusted like an installed package's. After the first lookup, call
    :func:`tilekern.runtime.dispatch.forget` as well.
    """
    _added[folder] = owner


def _path_layers(looking: bool) -> Iterator[Layer]:
    for item in os.environ.get("TILEKERN_CACHE_PATH", "").split(os.pathsep):
        if not item:
            continue
        try:
            path = absolute(item)
        except NoHome as error:
            warn_once(f"TILEKERN_CACHE_PATH: {error}; it is left out")
            continue
        # Unlike the methods of Path, these do not raise for a file system that has gone away.
        if os.path.isdir(path):
            yield FolderLayer(path, str(path), as_use=not looking)
        elif os.path.isfile(path):
            yield PackLayer(path)
        else:
            warn_once(f"TILEKERN_CACHE_PATH names {item}, which is neither a folder nor a pack; it is left out")


def _package_layers() -> Iterator[Layer]:
    # Packages are located, not imported (but their parent packages are).
    import importlib.metadata  # slow to import, and looking at a cache needs none of it

    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            spec = find_spec(entry.module)
        except (ImportError, ValueError, AttributeError):
            spec = None
        folders: list[Path] = []
        if spec and spec.submodule_search_locations is not None:
            folders = [Path(folder) for folder in spec.submodule_search_locations]
        elif spec and spec.origin:
            folders = [Path(spec.origin).parent]
        if not folders:
            warn(f"entry point {entry.name} of group {ENTRY_POINTS} names {entry.module}, which cannot be found")
            continue
        for folder in folders:
            yield from _packs_of(folder, entry.name, "package", entry.dist.name if entry.dist else None)


def _packs_of(folder: Path, owner: str, origin: Origin, package: str | None = None) -> Iterator[Layer]:
    for path in sorted(folder.glob(f"*{PACK_SUFFIX}")):
        yield PackLayer(path, f"{owner}:{path.stem}", origin, package)
