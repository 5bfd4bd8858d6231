"""The places of caches: the user's folder, and the layers that a lookup reads by default."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from tilekern.cache.errors import NoHome
from tilekern.cache.folders import absolute, platform_folder
from tilekern.cache.layers import FolderLayer, Layer
from tilekern.cache.packs.layers import Origin, PackLayer
from tilekern.cache.packs.pack import PACK_SUFFIX
from tilekern.warning import warn, warn_once

ENTRY_POINTS = "tilekern.prebuilt"
# What people call the user's cache among the layers.
USER = "user"
# Folders of packs that came with code which this process has loaded, each with what people call it.
_added: dict[Path, str] = {}


def user_root() -> Path:
    """The user's cache folder: ``TILEKERN_CACHE_DIR``, else the platform's folder for caches.

    A relative one stays where this process first looked for it, whatever folder the process changes to.

    Raises:
        NoHome: it would lie in the user's home, and the user has none.
    """
    chosen = os.environ.get("TILEKERN_CACHE_DIR")
    if chosen:
        return absolute(chosen)
    import platformdirs  # slow to import, and not needed where the folder was chosen

    return platform_folder(platformdirs.user_cache_path, "a cache; set TILEKERN_CACHE_DIR to a folder")


def user_root_if_any() -> Path | None:
    """The user's cache folder, or None where there is none, which is said once."""
    try:
        return user_root()
    except NoHome as error:
        warn_once(f"{error}; until then this process keeps what it compiles to itself", about="no user's cache")
        return None


def default_layers(user: Path | None = None, *, looking: bool = False) -> list[Layer]:
    """The layers of a lookup, first to last: the user's cache, ``TILEKERN_CACHE_PATH``, packages' packs, the wheel's.

    A folder or pack of ``TILEKERN_CACHE_PATH`` that is not there is warned about once and left out.

    Args:
        user: the user's cache where it is another folder than :func:`user_root`.
        looking: for a tool and not for a job: bad files of the user's cache stay, and no reading counts as use.
    """
    root = user or user_root_if_any()
    own: list[Layer] = [FolderLayer(root, USER, not looking, as_use=not looking)] if root else []
    wheel = _packs_of(Path(__file__).parents[1] / "prebuilt", "prebuilt", "wheel")
    added = [layer for folder, owner in _added.items() for layer in _packs_of(folder, owner, "package")]
    return [*own, *_path_layers(looking), *_package_layers(), *added, *wheel]


def add_packs(folder: Path, owner: str) -> None:
    """Have the lookups of this process read the packs of a folder too, before those of tilekern's wheel.

    They are trusted as an installed package's are: this is for code that was loaded and brings packs along. A process
    that has looked up already calls :func:`tilekern.runtime.dispatch.forget` for them to count.
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
        # Those of os.path say no where those of Path raise: on a folder of a file system that has gone away.
        if os.path.isdir(path):
            yield FolderLayer(path, str(path), as_use=not looking)
        elif os.path.isfile(path):
            yield PackLayer(path)
        else:
            warn_once(f"TILEKERN_CACHE_PATH names {item}, which is neither a folder nor a pack; it is left out")


def _package_layers() -> Iterator[Layer]:
    """The packs of installed packages; a package is found, not imported (its parents are, where it has any)."""
    import importlib.metadata  # slow to import, and looking at a cache needs none of it

    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            spec = importlib.util.find_spec(entry.module)
        except (ImportError, ValueError, AttributeError):
            spec = None
        folders = _folders(spec) if spec else []
        if not folders:
            warn(f"entry point {entry.name} of group {ENTRY_POINTS} names {entry.module}, which cannot be found")
            continue
        for folder in folders:
            yield from _packs_of(folder, entry.name, "package")


def _folders(spec: importlib.machinery.ModuleSpec) -> list[Path]:
    if spec.submodule_search_locations is not None:
        return [Path(folder) for folder in spec.submodule_search_locations]
    return [Path(spec.origin).parent] if spec.origin else []


def _packs_of(folder: Path, owner: str, origin: Origin) -> Iterator[Layer]:
    for path in sorted(folder.glob(f"*{PACK_SUFFIX}")):
        yield PackLayer(path, f"{owner}:{path.stem}", origin)
