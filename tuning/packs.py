"""A run's winners as packs, one for each model that it tunes, so that one command makes what is shipped of several."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tilekern.cache import PACK_SUFFIX
from tilekern.cache.trust.signing import SigningKey
from tilekern.errors import InputError
from tilekern.spec.targets import Target
from tilekern.tuning.plan.steps import Planned
from tilekern.tuning.publishing import Winner, write


def pack_paths(folder: Path, models: Sequence[Planned], target: Target) -> dict[Path, Planned]:
    """The file of each model's pack, ``<model>-<gpu>.pack``, by the plans of the models.

    Raises:
        InputError: two models have one name, so that one pack would overwrite the other; or no model is named.
    """
    if not models:
        raise InputError("--packs writes a pack for each MODEL, and no MODEL is named")
    found: dict[Path, Planned] = {}
    for model in models:
        path = folder / f"{_file_name(model.name)}-{_file_name(target.name)}{PACK_SUFFIX}"
        if path in found:
            raise InputError(f"--packs: {found[path].name} and {model.name} would both be {path.name}; tune one by one")
        found[path] = model
    return found


def write_packs(
    paths: Mapping[Path, Planned], found: Sequence[tuple[Winner, dict[str, bytes]]], key: SigningKey | None = None
) -> dict[str, int]:
    """Write to each path the winners that its model asks for; gives the number of records by path.

    Raises:
        tilekern.cache.CacheError: a pack cannot be written.
    """
    written = {}
    for path, model in paths.items():
        asked = set(model.problems)
        mine = [one for one in found if (one[0].kernel, one[0].problem) in asked]
        path.parent.mkdir(parents=True, exist_ok=True)
        write(mine, path, key)
        written[str(path)] = len(mine)
    return written


def _file_name(name: str) -> str:
    """A model's name as part of a file's: of a path or a hub id the last part that says something."""
    last = name.replace("/config.json", "").removesuffix(".json").rpartition("/")[2]
    return re.sub(r"[^a-z0-9._-]+", "-", last.lower())
