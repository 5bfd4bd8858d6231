"""The command repository: a folder that the library `kernels` of Hugging Face loads tilekern and its cubins from.

A build of it is a folder of Python with packs in it, one for CUDA and one without packs for the CPU. The library reads
``metadata.json`` beside the code; https://huggingface.co/docs/kernels describes the form.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import re
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from tilekern import __version__
from tilekern.cache import PACK_SUFFIX, CacheError, Store
from tilekern.cache_tools.shared.contents import Contents, read_contents
from tilekern.cache_tools.shared.options import as_json, cache_dir, command, with_age_filters, with_filters
from tilekern.cache_tools.shared.packing import write_selected
from tilekern.cache_tools.shared.selection import Selection
from tilekern.cache_tools.shared.text import count, print_json, size
from tilekern.spec.source import NOTES, note_digests, spec_modules
from tilekern.warning import tell

_NAME = "tilekern"
_REPO_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
# A job tunes nothing, and looks after no cache.
_LEFT_BEHIND = ("tune.py", "tuning", "cache_tools")
# What each build has as its `__init__.py`.
_LOADER = Path("integrations", "hub_kernel.py")


@command
@click.argument("out_dir", metavar="OUT_DIR", type=click.Path(path_type=Path))
@click.option("--repo-id", required=True, help="Name by which the hub and jobs know it, such as acme/tilekern.")
@click.option("--kernel-version", type=click.IntRange(min=0), default=1, help="The version that jobs ask for; 1.")
@click.option(
    "--pack", "packs", multiple=True, type=click.Path(path_type=Path),
    help="This pack, instead of records of the cache; may be given again.",
)  # fmt: skip
@click.option(
    "--hub-cache", type=click.Path(path_type=Path, file_okay=False), help="A cache of the hub to put it into."
)
@with_filters
@with_age_filters
@cache_dir
@as_json
def repository(
    out_dir: Path, repo_id: str, kernel_version: int, packs: tuple[Path, ...], hub_cache: Path | None, store: Store,
    as_json: bool, **filters: Any,
) -> None:  # fmt: skip
    """Make a repository of Hugging Face's `kernels`: tilekern's layers, with the artifacts that they launch.

    OUT_DIR is a new folder. `get_local_kernel` loads from it, and it can be uploaded to the hub as it is. Its
    kernels.lock names the contents; `load_kernel` finds them by it in --hub-cache, with no network. The records are
    those that the filters choose, or those of packs.

    JSON: repository, repo_id, kernel_version, commit, lock, hub_cache (null where not given), files, bytes, builds[]
    (each with variant, id, archs[]), left_out, packs[] (each with sha256, bytes, records, targets[], toolkits[]).
    """
    selection, left_out = Selection(**filters), 0
    if not _REPO_ID.fullmatch(repo_id):
        raise CacheError(f"--repo-id must be an owner and a name, such as acme/tilekern, got {repo_id!r}")
    if packs and not selection.is_empty:
        raise CacheError("--pack takes a pack as it is, with no filters; leave one of them out")
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise CacheError(f"{out_dir} is not a new folder; name another")
    with TemporaryDirectory() as folder:
        if not packs:
            packs = (Path(folder, f"records{PACK_SUFFIX}"),)
            _, left_out = write_selected(store, packs[0], selection)
        contents = [read_contents(pack) for pack in packs]
        made = _write_repository(Path(folder, "repository"), contents, repo_id, kernel_version)
        _put(Path(folder, "repository"), out_dir)
    if hub_cache is not None:
        _put_into_hub_cache(out_dir, hub_cache, made)
    if as_json:
        places = {"repository": str(out_dir), "hub_cache": None if hub_cache is None else str(hub_cache)}
        places["lock"] = str(out_dir / "kernels.lock")
        print_json(places | made.document() | {"left_out": left_out, "packs": [one.document() for one in contents]})
        return
    note = f"; {count(left_out, 'unreadable record')} left out" if left_out else ""
    records = sum(len(one.records) for one in contents)
    tell(f"made {out_dir} with {count(records, 'record')}, {size(made.size_bytes)}{note}")


@dataclass(frozen=True)
class _Build:
    """One folder below ``build``.

    Attributes:
        variant: its name, by which `kernels` knows whether it fits.
        id: its module's name in Python, different for each build.
        archs: the compute capabilities that its cubins are for.
    """

    variant: str
    id: str
    archs: list[str]


@dataclass(frozen=True)
class _Repository:
    """A repository that was written.

    Attributes:
        repo_id, kernel_version: as they were given.
        commit: the digest of all files but the lock file, in the place of git's.
        builds: what it holds.
        files, size_bytes: how many files, and their size.
    """

    repo_id: str
    kernel_version: int
    commit: str
    builds: tuple[_Build, ...]
    files: int
    size_bytes: int

    def document(self) -> dict[str, Any]:
        """The part of a JSON document that says what was made."""
        return {
            "repo_id": self.repo_id,
            "kernel_version": self.kernel_version,
            "commit": self.commit,
            "files": self.files,
            "bytes": self.size_bytes,
            "builds": [vars(build) for build in self.builds],
        }


def _write_repository(root: Path, packs: list[Contents], repo_id: str, kernel_version: int) -> _Repository:
    builds = tuple(
        _write_build(root / "build" / f"torch-{backend}", backend, its_packs, repo_id, kernel_version)
        for backend, its_packs in (("cuda", packs), ("cpu", []))
    )
    (root / "README.md").write_text(_card(repo_id, kernel_version, packs), encoding="utf-8")
    digests = _digests(root)
    listing = "".join(f"{digest} {path}\n" for path, digest in digests.items())
    commit = hashlib.sha1(listing.encode(), usedforsecurity=False).hexdigest()
    dependency = {"repo-id": repo_id, "version": kernel_version}
    lock = [{"dependency": dependency, "lock": {"commit": commit}}]
    (root / "kernels.lock").write_text(_json(lock), encoding="utf-8")
    files = [path for path in root.rglob("*") if path.is_file()]
    sizes = sum(path.stat().st_size for path in files)
    return _Repository(repo_id, kernel_version, commit, builds, len(files), sizes)


def _write_build(folder: Path, backend: str, packs: list[Contents], repo_id: str, kernel_version: int) -> _Build:
    """A copy of this tilekern with packs in it, the file that loads it, and what `kernels` must know of them."""
    ours = Path(str(_found().origin)).parent
    for source in sorted(ours.rglob("*.py")):
        place = source.relative_to(ours)
        if place.parts[0] not in _LEFT_BEHIND:
            _copy(source, folder / _NAME / place)
    note_digests(spec_modules(ours.parent), folder / _NAME / NOTES.relative_to(ours))
    for position, pack in enumerate(packs):
        _copy(pack.path, folder / _NAME / "prebuilt" / f"{position}-{pack.path.name}")
    _copy(ours / _LOADER, folder / "__init__.py")
    own = {"name": repo_id, "version": __version__, "needs": _needs()}
    (folder / "tilekern.json").write_text(_json(own), encoding="utf-8")
    digests = _digests(folder)
    whole = hashlib.sha256("".join(f"{digest} {path}\n" for path, digest in digests.items()).encode()).hexdigest()
    archs = sorted({_capability(target) for pack in packs for target in pack.targets})
    build = _Build(folder.name, f"_{_NAME}_{backend}_{whole[:12]}", archs)
    metadata = {
        "id": build.id,
        "name": _NAME,
        "version": kernel_version,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend} | ({"archs": archs} if archs else {}),
        "digest": {"algorithm": "sha256", "files": digests},
    }
    (folder / "metadata.json").write_text(_json(metadata), encoding="utf-8")
    return build


def _found() -> Any:
    return importlib.util.find_spec(_NAME)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _needs() -> list[str]:
    """The packages that tilekern needs, as pip takes them.

    Raises:
        CacheError: tilekern is not installed.
    """
    try:
        return [need for need in requires(_NAME) or [] if ";" not in need]
    except PackageNotFoundError:
        raise CacheError("tilekern is not installed, so what it needs is not known: pip install -e .") from None


def _digests(root: Path) -> dict[str, str]:
    """The sha256 of every file in a folder, in base64, as `kernels` writes it."""
    paths = sorted(path for path in root.rglob("*") if path.is_file())
    return {
        str(path.relative_to(root)): base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
        for path in paths
    }


def _capability(target_key: str) -> str:
    """``9.0`` for the key ``sm_90-h200-132``."""
    number = target_key.partition("-")[0].removeprefix("sm_").rstrip("af")
    return f"{number[:-1]}.{number[-1]}"


def _card(repo_id: str, kernel_version: int, packs: list[Contents]) -> str:
    """The page that the hub shows."""
    targets = ", ".join(sorted({target for pack in packs for target in pack.targets}))
    toolkits = ", ".join(sorted({toolkit for pack in packs for toolkit in pack.toolkits}))
    records = count(sum(len(pack.records) for pack in packs), "record")
    needed = " ".join(f"'{need}'" for need in _needs())
    return f"""---
license: apache-2.0
tags: [kernels]
---
# tilekern {__version__}

GPU kernels for Hugging Face models, with {records} of tuned ones for {targets}, made with {toolkits}.

```python
from kernels import get_kernel

tilekern = get_kernel("{repo_id}", version={kernel_version})
tilekern.apply()
```

`tilekern.integrations.hub_layers` has layers for `kernelize`, `tilekern.ops` the ops. It needs `pip install {needed}`.
"""


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def _put(folder: Path, out_dir: Path) -> None:
    try:
        shutil.copytree(folder, out_dir, dirs_exist_ok=True)
    except OSError as error:
        raise CacheError(f"cannot write {out_dir}: {error.strerror}") from None


def _put_into_hub_cache(folder: Path, cache: Path, made: _Repository) -> None:
    """Put a repository where huggingface_hub keeps what it downloads: a snapshot, and a branch that names it."""
    place = cache / f"kernels--{made.repo_id.replace('/', '--')}"
    snapshot = place / "snapshots" / made.commit
    if not snapshot.exists():
        _put(folder, snapshot)
    (place / "refs").mkdir(exist_ok=True)
    for name in ("main", f"v{made.kernel_version}"):
        (place / "refs" / name).write_text(made.commit, encoding="utf-8")
