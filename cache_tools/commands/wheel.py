"""The command wheel: make an installable package with a pack in it, which a lookup finds by its entry point."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from tilekern.cache import CacheError, Store
from tilekern.cache.files import write_whole
from tilekern.cache_tools.shared.options import FILE, as_json, cache_dir, with_filters
from tilekern.cache_tools.shared.packs import Contents, packs_or_selected, sha256_of
from tilekern.cache_tools.shared.printing import count, note_left_out, print_result, size
from tilekern.cache_tools.shared.selection import Selection

# The group that tilekern.cache.places reads.
_GROUP = "tilekern.prebuilt"
# 1980-01-01, the earliest time in a zip file: the same contents give the same bytes whenever they are built.
_EPOCH = "315532800"
_BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


@click.command()
@click.argument("out_dir", metavar="OUT_DIR", type=click.Path(path_type=Path, file_okay=False))
@click.option("--name", required=True, help="The package's name, such as acme-kernels-h200.")
@click.option("--version", required=True, help="The package's version, such as 1.0.")
@click.option("--pack", type=FILE, help="This pack, instead of records of the cache.")
@with_filters()
@cache_dir
@as_json
def wheel(
    out_dir: Path, name: str, version: str, pack: Path | None, store: Store, selection: Selection, as_json: bool
) -> None:
    """Make a wheel of records: once pip has installed it, every lookup finds them.

    The records are those that the filters choose, or a pack's. The same records give the same bytes with the same
    setuptools.

    JSON: wheel, name, version, module, left_out, wheel_bytes, wheel_sha256, sha256 and bytes (of the pack in it),
    records, targets[], toolkits[].
    """
    name, version = _normalised(name, version)
    # Its folder among the installed packages, which no other package has.
    module = f"tilekern_packs_{name.replace('-', '_')}"
    with packs_or_selected([pack] if pack else [], store, selection) as ((contents,), left_out):
        path = _build_wheel(contents, name, version, module, out_dir)
    size_bytes = path.stat().st_size
    document = {"wheel": str(path), "name": name, "version": version, "module": module, "left_out": left_out}
    document |= {"wheel_bytes": size_bytes, "wheel_sha256": sha256_of(path), **contents.document()}
    text = f"made {path} with {count(len(contents.records), 'record')}, {size(size_bytes)}{note_left_out(left_out)}"
    print_result(document, as_json, text)


def _normalised(name: str, version: str) -> tuple[str, str]:
    """Return a package's name and version as pip reads them; raise CacheError if pip would refuse one."""
    try:
        from packaging.utils import InvalidName, canonicalize_name
        from packaging.version import InvalidVersion, Version
    except ImportError:
        raise CacheError(_needs("packaging")) from None
    try:
        package = canonicalize_name(name, validate=True)
        number = str(Version(version))
    except InvalidName:
        raise CacheError(
            f"--name must be letters, digits and single ones of -_. between them, such as acme-kernels, got {name!r}"
        ) from None
    except InvalidVersion:
        raise CacheError(f"--version must be one that pip knows, such as 1.0 or 2026.11, got {version!r}") from None
    if package == "tilekern":
        raise CacheError("--name tilekern would replace tilekern itself; choose another")
    return package, number


def _build_wheel(pack: Contents, name: str, version: str, module: str, out_dir: Path) -> Path:
    with TemporaryDirectory() as folder:
        project, built = Path(folder, "project"), Path(folder, "built")
        built.mkdir()
        _write_project(project, pack, name, version, module)
        _run_setuptools(project, built)
        (wheel,) = built.iterdir()
        path = out_dir / wheel.name
        try:
            write_whole(path, wheel.read_bytes())
        except OSError as error:
            raise CacheError(f"cannot write {path}: {error.strerror}") from None
    return path


def _write_project(project: Path, pack: Contents, name: str, version: str, module: str) -> None:
    folder = project / module
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text('"""Packs of tuned GPU kernels, which tilekern reads where they lie."""\n')
    shutil.copyfile(pack.path, folder / "records.pack")
    for path in folder.iterdir():
        path.chmod(0o644)
    records = count(len(pack.records), "record")
    # The summary may have 512 characters.
    summary = f"Tuned GPU kernels for tilekern: {records} for {count(len(pack.targets), 'GPU model')}"
    text = (
        f"{records} of tuned GPU kernels for {', '.join(pack.targets)}, made with {', '.join(pack.toolkits)}. "
        f"sha256 of the pack: {pack.sha256}.\n"
    )
    (project / "pyproject.toml").write_text(
        f"""[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = {json.dumps(name)}
version = {json.dumps(version)}
description = {json.dumps(summary)}
readme = {{text = {json.dumps(text)}, content-type = "text/plain"}}

[project.entry-points."{_GROUP}"]
{json.dumps(name)} = {json.dumps(module)}

[tool.setuptools]
packages = [{json.dumps(module)}]

[tool.setuptools.package-data]
{module} = ["*.pack"]
"""
    )


def _run_setuptools(project: Path, out: Path) -> None:
    # In another process: the backend works in the current folder and changes its process.
    done = subprocess.run(
        [sys.executable, "-c", _BUILD, str(out)],
        cwd=project,
        env=os.environ | {"SOURCE_DATE_EPOCH": _EPOCH},
        umask=0o022,
        capture_output=True,
        text=True,
        check=False,
    )
    if "No module named 'setuptools'" in done.stderr:
        raise CacheError(_needs("setuptools"))
    if done.returncode:
        raise CacheError(f"setuptools cannot build the wheel: {done.stderr.strip().splitlines()[-1:]}")


def _needs(library: str) -> str:
    return f"making a wheel needs {library}: pip install 'tilekern[ship]'"
