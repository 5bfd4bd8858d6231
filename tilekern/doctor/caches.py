"""Reports the caches and packs that jobs read here, their records for the GPU, and records that cannot be used."""

from __future__ import annotations

import functools
import os
import re
import shlex
import warnings
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from tilekern.doctor.report import Report
from tilekern.errors import TilekernWarning
from tilekern.spec.targets import Target

if TYPE_CHECKING:
    from tilekern.cache import Layer

_SET = "set TILEKERN_CACHE_DIR to a folder of yours"
# Records read of one cache; of a larger one only the first are read.
_MOST_RECORDS = 2000
# Damaged records by state.
_DAMAGED = {"bad": "cannot be read", "without artifacts": "with artifacts that are missing or damaged"}


def tell_of_caches(report: Report, target: Target | None) -> None:
    """Report all layers in the order of a lookup, with their records for a GPU, or for any if it is None."""
    from tilekern.cache import CacheError, default_layers, user_root
    from tilekern.cache.trust.exposure import others_may_write
    from tilekern.cache.trust.policy import must_be_signed

    try:
        root = user_root()
    except (RuntimeError, KeyError, OSError, CacheError) as error:
        report.complain(f"no folder for the cache is known ({error}): {_SET}")
        return
    _user_cache(report, root)
    groups: dict[str, list[Layer]] = {}
    for layer in default_layers(root, looking=True):
        groups.setdefault(_group_of(layer, root), []).append(layer)
    for number, (name, layers) in enumerate(groups.items()):
        counts = sum((_counts(report, layer, target) for layer in layers), Counter())
        packs = f" ({len(layers)} packs)" if len(layers) > 1 else ""
        report.say("" if number else "caches", f"{name}{packs}: {_told(counts, target)}")
        report.document["caches"].append({"name": name, "layers": len(layers), **counts})
    _data_packages(report, target)
    policy = "signed records alone" if must_be_signed() else "any record"
    shared = "and what others can write, too" if others_may_write() else "but not what others can write"
    report.say("", f"trusted: {policy}, {shared}")


def _data_packages(report: Report, target: Target | None) -> None:
    """Complain about installed data packages of another version; name one that the GPU is without."""
    from tilekern.runtime.data_packages import PACKAGES, to_install, version_unmet

    for wrong in filter(None, map(version_unmet, PACKAGES.values())):
        report.complain(wrong)
    if target is not None and (package := to_install(target)):
        report.say("", f"more records that serve {target.name}: pip install {package}")


def _records(number: int) -> str:
    return f"{number} record{'' if number == 1 else 's'}"


def _user_cache(report: Report, root: Path) -> None:
    """Complain about a user's cache that cannot be used."""
    report.document["cache_dir"] = str(root)
    if root.parts[:1] == ("~",):
        report.complain(f"this user has no home, so that the cache is {root} in the current folder: {_SET}")
    if not os.path.lexists(root):
        return
    if not os.path.isdir(root):
        report.complain(f"the cache {root} is not a folder; {_SET}")
    elif not os.access(root, os.R_OK | os.X_OK):
        report.complain(f"the cache {root} cannot be read; {_SET}")
    elif not os.access(root, os.W_OK):
        report.complain(f"the cache {root} cannot be written, so that nothing which is compiled is kept; {_SET}")


def _group_of(layer: Layer, root: Path) -> str:
    """Return the name a layer is reported under; packs of the wheel, or of one package, share one."""
    origin = getattr(layer, "origin", None)
    if origin == "wheel":
        return "the wheel's packs"
    if origin == "package":
        return f"packs of {layer.name.partition(':')[0]}"
    path = getattr(layer, "root", None) or getattr(layer, "path", layer.name)
    return str(path) if path != root else f"{path} (the user's)"


def _counts(report: Report, layer: Layer, target: Target | None) -> Counter[str]:
    """Count a layer's records for the GPU (``own``), for its arch (``near``) and others; its own also by state."""
    from tilekern.cache import CacheError, PackLayer, UnknownSchema, Untrusted
    from tilekern.cache.keys import Address, parse_path, parse_problem_key
    from tilekern.cache_tools.shared.installed import is_stale

    counts: Counter[str] = Counter()
    addresses: list[Address] = []
    refusal = ""
    path = str(getattr(layer, "path", None) or getattr(layer, "root", ""))
    if isinstance(layer, PackLayer):
        addresses = sorted(layer.addresses())
    else:
        for name in _files_below(report, Path(path)):
            try:
                addresses.append(parse_path(name.split(os.sep)))
            except CacheError:
                counts["other files"] += 1

    @functools.cache
    def is_sound(sha256: str) -> bool:
        try:
            layer.read_blob(sha256)
        except CacheError:
            return False
        return True

    with warnings.catch_warnings():
        # A layer also warns of each file that is bad.
        warnings.filterwarnings("ignore", re.escape(path), TilekernWarning)
        for address in addresses:
            kind = "other" if target is None or not address.target_key.startswith(f"{target.arch}-") else "near"
            kind = "own" if target is not None and address.target_key == target.key else kind
            counts[kind] += 1
            # On a machine without a GPU, none is of its own.
            if (kind != "own" and target is not None) or counts[kind] > _MOST_RECORDS:
                continue
            try:
                record = layer.read_record(*address[:3], parse_problem_key(address.problem_key))
            except UnknownSchema:
                counts["of another version"] += 1
                continue
            except Untrusted as error:
                counts["untrusted"] += 1
                refusal = refusal or f"{'/'.join(address)}: {error}"
                continue
            except CacheError:
                counts["bad"] += 1
                continue
            counts[record.provenance] += 1
            counts["stale"] += is_stale(record) is True
            # A pack is one file, of which nothing gets lost.
            counts["without artifacts"] += not (isinstance(layer, PackLayer) or all(map(is_sound, record.digests)))
    _complain_of_records(report, layer, path, counts, refusal)
    return counts


def _complain_of_records(report: Report, layer: Layer, path: str, counts: Counter[str], refusal: str) -> None:
    """Complain about a layer's records that no job uses, by their counts; ``refusal`` is of one that is not trusted."""
    from tilekern.cache.lookup import other_versions

    if refusal:
        untrusted = _records(counts["untrusted"])
        report.complain(f"{untrusted} of {path} not trusted, and not loaded ({refusal}): see docs/trust.md")
    for state, what in _DAMAGED.items():
        if counts[state]:
            report.complain(
                f"{_records(counts[state])} of {path} {what}: tune or unpack again; "
                f"python -m tilekern.cache_tools verify {shlex.quote(path)} lists them"
            )
    if counts["stale"]:
        package = getattr(layer, "package", None)
        report.complain(
            # A lookup says the same, and the report only once.
            other_versions(package)
            if package
            else f"{layer.name}: {_records(counts['stale'])} stale, as the source of their kernels has changed; "
            "python -m tilekern.tune refresh --same-code keeps those with the same machine code"
        )


def _files_below(report: Report, root: Path) -> list[str]:
    """Return the files below a root that may be records; complain about what cannot be listed."""
    from tilekern.cache.folders import cannot_list, files_below, is_gone
    from tilekern.cache.keys import LAYOUT, OWN_FOLDERS

    def fail(error: OSError) -> None:
        if not is_gone(error):
            report.complain(f"{cannot_list(error)}; what is there is not found by jobs either")

    layout = root / LAYOUT
    return [str(Path(path).relative_to(root)) for path in files_below(layout, OWN_FOLDERS, fail=fail)]


def _told(counts: Counter[str], target: Target | None) -> str:
    """Return the counts of a cache in words."""
    records = sum(counts[kind] for kind in ("own", "near", "other"))
    if not records:
        told = "no records"
    elif target is None:
        told = _records(records)
    else:
        told = f"{_records(counts['own'])} for {target.name}"
        told += f", {counts['near']} for others of {target.arch}" if counts["near"] else ""
        told += f", {counts['other']} for other GPUs" if counts["other"] else ""
    known = ("own", "near", "other")
    states = ", ".join(f"{number} {state}" for state, number in counts.items() if state not in known and number)
    return f"{told} ({states})" if states else told
