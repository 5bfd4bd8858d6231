"""The command repository: a folder from which Hugging Face's library `kernels` loads tilekern and its cubins.

Each build in it is a folder of Python: one for CUDA with packs, one for the CPU without. The library reads
``metadata.json`` beside the code; https://huggingface.co/docs/kernels describes the form.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import re
import shutil
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from tilekern import __version__
from tilekern.cache import CacheError, Store
from tilekern.cache_tools.shared.options import FILE, FOLDER, as_json, cache_dir, command, with_filters
from tilekern.cache_tools.shared.packs import Contents, packs_or_selected
from tilekern.cache_tools.shared.printing import count, note_left_out, print_result, size
from tilekern.cache_tools.shared.selection import Selection
from tilekern.spec.source import NOTES, note_digests, spec_modules

_NAME = "tilekern"
_REPO_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
# A job does not tune, nor look after a cache.
_LEFT_BEHIND = ("tune.py", "tuning", "cache_tools")
# The `__init__.py` of each build.
_LOADER = Path("integrations", "hub_kernel.py")


@command
@click.argument("out_dir", metavar="OUT_DIR", type=FOLDER)
@click.option("--repo-id", required=True, help="Name by which the hub and jobs know it, such as acme/tilekern.")
@click.option("--kernel-version", type=click.IntRange(min=0), default=1, help="The version that jobs ask for; 1.")
@click.option(
    "--pack", "packs", multiple=True, type=FILE,
    help="This pack, instead of records of the cache; may be given again.",
)  # fmt: skip
@click.option("--hub-cache", type=FOLDER, help="A cache of the hub to put it into.")
@with_filters()
@cache_dir
@as_json
def repository(
    out_dir: Path, repo_id: str, kernel_version: int, packs: tuple[Path, ...], hub_cache: Path | None, store: Store,
    selection: Selection, as_json: bool,
) -> None:  # fmt: skip
    """Make a repository for Hugging Face's `kernels`: tilekern's layers, with the artifacts that they launch.

    OUT_DIR is a new folder. `get_local_kernel` loads from it, and it can be uploaded to the hub as it is. Its
    kernels.lock names the contents; `load_kernel` finds them by it in --hub-cache, with no network. The records are
    those that the filters choose, or those of packs.

    JSON: repository, repo_id, kernel_version, commit, lock, hub_cache (null if not given), files, bytes, builds[]
    (each with variant, id, archs[]), left_out, packs[] (each with sha256, bytes, records, targets[], toolkits[]).
    """
    if not _REPO_ID.fullmatch(repo_id):
        raise CacheError(f"--repo-id must be an owner and a name, such as acme/tilekern, got {repo_id!r}")
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise CacheError(f"{out_dir} is not a new folder; name another")
    with packs_or_selected(packs, store, selection) as (contents, left_out), TemporaryDirectory() as folder:
        made = _write_repository(Path(folder), contents, repo_id, kernel_version)
        _put(Path(folder), out_dir)
    if hub_cache is not None:
        # Where huggingface_hub keeps what it downloads: a snapshot, and branches that name it.
        cached = hub_cache / f"kernels--{repo_id.replace('/', '--')}"
        snapshot = cached / "snapshots" / made["commit"]
        if not snapshot.exists():
            _put(out_dir, snapshot)
        (cached / "refs").mkdir(exist_ok=True)
        for name in ("main", f"v{kernel_version}"):
            (cached / "refs" / name).write_text(made["commit"], encoding="utf-8")
    document = {
        "repository": str(out_dir),
        "hub_cache": None if hub_cache is None else str(hub_cache),
        "lock": str(out_dir / "kernels.lock"),
        "repo_id": repo_id,
        "kernel_version": kernel_version,
        **made,
        "left_out": left_out,
        "packs": [pack.document() for pack in contents],
    }
    records = count(sum(len(pack.records) for pack in contents), "record")
    text = f"made {out_dir} with {records}, {size(made['bytes'])}{note_left_out(left_out)}"
    print_result(document, as_json, text)


def _write_repository(root: Path, packs: list[Contents], repo_id: str, kernel_version: int) -> dict[str, Any]:
    """Write a repository; return its commit (a digest of all files but the lock), builds, and size."""
    builds = [
        _write_build(root / "build" / f"torch-{backend}", backend, its_packs, repo_id, kernel_version)
        for backend, its_packs in (("cuda", packs), ("cpu", []))
    ]
    (root / "README.md").write_text(_card(repo_id, kernel_version, packs), encoding="utf-8")
    commit = hashlib.sha1(_listing(_digests(root)), usedforsecurity=False).hexdigest()
    dependency = {"repo-id": repo_id, "version": kernel_version}
    _write_json(root / "kernels.lock", [{"dependency": dependency, "lock": {"commit": commit}}])
    files = [path for path in root.rglob("*") if path.is_file()]
    size_bytes = sum(path.stat().st_size for path in files)
    return {"commit": commit, "files": len(files), "bytes": size_bytes, "builds": builds}


def _write_build(
    folder: Path, backend: str, packs: list[Contents], repo_id: str, kernel_version: int
) -> dict[str, Any]:  # fmt: skip
    """Write a copy of this tilekern with packs in it, and the metadata that `kernels` needs."""
    spec = importlib.util.find_spec(_NAME)
    assert spec is not None
    ours = Path(str(spec.origin)).parent
    for source in sorted(ours.rglob("*.py")):
        below = source.relative_to(ours)
        if below.parts[0] not in _LEFT_BEHIND:
            _copy(source, folder / _NAME / below)
    note_digests(spec_modules(ours.parent), folder / _NAME / NOTES.relative_to(ours))
    for position, pack in enumerate(packs):
        _copy(pack.path, folder / _NAME / "prebuilt" / f"{position}-{pack.path.name}")
    _copy(ours / _LOADER, folder / "__init__.py")
    _write_json(folder / "tilekern.json", {"name": repo_id, "version": __version__, "needs": _needs()})
    digests = _digests(folder)
    # Each build has its own module name in Python.
    module = f"_{_NAME}_{backend}_{hashlib.sha256(_listing(digests)).hexdigest()[:12]}"
    archs = sorted({_capability(target) for pack in packs for target in pack.targets})
    metadata = {
        "id": module,
        "name": _NAME,
        "version": kernel_version,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend} | ({"archs": archs} if archs else {}),
        "digest": {"algorithm": "sha256", "files": digests},
    }
    _write_json(folder / "metadata.json", metadata)
    return {"variant": folder.name, "id": module, "archs": archs}


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _needs() -> list[str]:
    """Return the packages that tilekern needs with its extra ``torch``, as pip takes them."""
    try:
        needs = [need.partition(";") for need in requires(_NAME) or []]
        return [need.strip() for need, _, when in needs if not when or re.search(r"extra\s*==\s*['\"]torch['\"]", when)]
    except PackageNotFoundError:
        raise CacheError("tilekern is not installed, so what it needs is not known: pip install -e .") from None


def _digests(root: Path) -> dict[str, str]:
    """Return the sha256 of every file in a folder, in base64, as `kernels` writes it."""
    paths = sorted(path for path in root.rglob("*") if path.is_file())
    return {
        str(path.relative_to(root)): base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
        for path in paths
    }


def _listing(digests: dict[str, str]) -> bytes:
    return "".join(f"{digest} {path}\n" for path, digest in digests.items()).encode()


def _capability(target_key: str) -> str:
    """Return ``9.0`` for the key ``sm_90-h200-132``."""
    number = target_key.partition("-")[0].removeprefix("sm_").rstrip("af")
    return f"{number[:-1]}.{number[-1]}"


def _card(repo_id: str, kernel_version: int, packs: list[Contents]) -> str:
    """Return the page that the hub shows."""
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


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _put(folder: Path, out_dir: Path) -> None:
    try:
        shutil.copytree(folder, out_dir, dirs_exist_ok=True)
    except OSError as error:
        raise CacheError(f"cannot write {out_dir}: {error.strerror}") from None
