"""The command wheel: an installable package with a pack in it, which a lookup finds by its entry point."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from tilekern.cache import PACK_SUFFIX, CacheError, Store
from tilekern.cache.files import write_whole
from tilekern.cache_tools.shared.contents import Contents, read_contents, sha256_of
from tilekern.cache_tools.shared.options import as_json, cache_dir, with_age_filters, with_filters
from tilekern.cache_tools.shared.packing import write_selected
from tilekern.cache_tools.shared.selection import Selection
from tilekern.cache_tools.shared.text import count, print_json, size
from tilekern.warning import tell

# The group that tilekern.cache.places reads.
_GROUP = "tilekern.prebuilt"
# 1980-01-01, the first time that a zip file can hold: the same contents give the same bytes whenever they are built.
_EPOCH = "315532800"
_BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


@click.command()
@click.argument("out_dir", metavar="OUT_DIR", type=click.Path(path_type=Path, file_okay=False))
@click.option("--name", required=True, help="The package's name, such as acme-kernels-h200.")
@click.option("--version", required=True, help="The package's version, such as 1.0.")
@click.option("--pack", "pack", type=click.Path(path_type=Path), help="This pack, instead of records of the cache.")
@with_filters
@with_age_filters
@cache_dir
@as_json
def wheel(
    out_dir: Path, name: str, version: str, pack: Path | None, store: Store, as_json: bool, **filters: Any
) -> None:
    """Make a wheel that brings records along: once it is installed by pip, every lookup finds them.

    The records are those that the filters choose, or a pack's. The same records give the same bytes, by the same
    setuptools.

    JSON: wheel, name, version, module, left_out, wheel_bytes, wheel_sha256, sha256 and bytes (of the pack in it),
    records, targets[], toolkits[].
    """
    package, selection, left_out = _parse_package(name, version), Selection(**filters), 0
    if pack and not selection.is_empty:
        raise CacheError("--pack takes a pack as it is, with no filters; leave one of them out")
    with TemporaryDirectory() as folder:
        if pack is None:
            pack = Path(folder, f"records{PACK_SUFFIX}")
            _, left_out = write_selected(store, pack, selection)
        contents = read_contents(pack)
        path = _build_wheel(contents, package, out_dir)
    if as_json:
        made = {"wheel": str(path), "name": package.name, "version": package.version, "module": package.module}
        sizes = {"left_out": left_out, "wheel_bytes": path.stat().st_size, "wheel_sha256": sha256_of(path)}
        print_json(made | sizes | contents.document())
        return
    note = f"; {count(left_out, 'unreadable record')} left out" if left_out else ""
    tell(f"made {path} with {count(len(contents.records), 'record')}, {size(path.stat().st_size)}{note}")


@dataclass(frozen=True)
class _Package:
    """A package as pip will name it.

    Attributes:
        name: its normalised name.
        version: its normalised version.
    """

    name: str
    version: str

    @property
    def module(self) -> str:
        """Its folder among the installed ones, which no other package has."""
        return f"tilekern_packs_{self.name.replace('-', '_')}"


def _parse_package(name: str, version: str) -> _Package:
    """A package's name and version as pip reads them.

    Raises:
        CacheError: pip would refuse one of them, the name is that of tilekern itself, or `packaging` is not installed.
    """
    try:
        from packaging.utils import InvalidName, canonicalize_name
        from packaging.version import InvalidVersion, Version
    except ImportError:
        raise CacheError(_needs("packaging")) from None
    try:
        package = _Package(canonicalize_name(name, validate=True), str(Version(version)))
    except InvalidName:
        raise CacheError(
            f"--name must be letters, digits and single ones of -_. between them, such as acme-kernels, got {name!r}"
        ) from None
    except InvalidVersion:
        raise CacheError(f"--version must be one that pip knows, such as 1.0 or 2026.11, got {version!r}") from None
    if package.name == "tilekern":
        raise CacheError("--name tilekern would take the place of tilekern itself; choose another")
    return package


def _build_wheel(pack: Contents, package: _Package, out_dir: Path) -> Path:
    """Make a wheel; the same pack, name and version give the same bytes, by the same setuptools.

    Returns:
        The wheel's file, put there in one step.

    Raises:
        CacheError: setuptools is not installed or fails, or the wheel cannot be written.
    """
    with TemporaryDirectory() as folder:
        project, built = Path(folder, "project"), Path(folder, "built")
        built.mkdir()
        _write_project(project, pack, package)
        _run_setuptools(project, built)
        (wheel,) = built.iterdir()
        path = out_dir / wheel.name
        try:
            write_whole(path, wheel.read_bytes())
        except OSError as error:
            raise CacheError(f"cannot write {path}: {error.strerror}") from None
    return path


def _write_project(project: Path, pack: Contents, package: _Package) -> None:
    module = project / package.module
    module.mkdir(parents=True)
    (module / "__init__.py").write_text('"""Packs of tuned GPU kernels, which tilekern reads where they lie."""\n')
    shutil.copyfile(pack.path, module / "records.pack")
    for path in module.iterdir():
        path.chmod(0o644)
    holds = f"{count(len(pack.records), 'record')} of tuned GPU kernels for {', '.join(pack.targets)}"
    text = f"{holds}, made with {', '.join(pack.toolkits)}. sha256 of the pack: {pack.sha256}.\n"
    (project / "pyproject.toml").write_text(
        f"""[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = {json.dumps(package.name)}
version = {json.dumps(package.version)}
description = {json.dumps(_summary(pack))}
readme = {{text = {json.dumps(text)}, content-type = "text/plain"}}

[project.entry-points."{_GROUP}"]
{json.dumps(package.name)} = {json.dumps(package.module)}

[tool.setuptools]
packages = [{json.dumps(package.module)}]

[tool.setuptools.package-data]
{package.module} = ["*.pack"]
"""
    )


def _summary(pack: Contents) -> str:
    """One line of metadata, which may have 512 characters."""
    records, models = count(len(pack.records), "record"), count(len(pack.targets), "GPU model")
    return f"Tuned GPU kernels for tilekern: {records} for {models}"


def _run_setuptools(project: Path, out: Path) -> None:
    """In a process of its own: the backend works in the current folder, and leaves its traces in its process."""
    ran = subprocess.run(
        [sys.executable, "-c", _BUILD, str(out)],
        cwd=project,
        env=os.environ | {"SOURCE_DATE_EPOCH": _EPOCH},
        umask=0o022,
        capture_output=True,
        text=True,
        check=False,
    )
    if "No module named 'setuptools'" in ran.stderr:
        raise CacheError(_needs("setuptools"))
    if ran.returncode:
        raise CacheError(f"setuptools cannot build the wheel: {ran.stderr.strip().splitlines()[-1:]}")


def _needs(library: str) -> str:
    return f"making a wheel needs {library}: pip install 'tilekern[ship]'"
