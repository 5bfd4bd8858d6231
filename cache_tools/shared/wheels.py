"""Wheels of records: an installable package with a pack in it, which a lookup finds by its entry point."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tilekern.cache import CacheError
from tilekern.cache.files import write_whole
from tilekern.cache_tools.shared.packs import Contents
from tilekern.cache_tools.shared.printing import count

# The group that tilekern.cache.places reads.
_GROUP = "tilekern.prebuilt"
# 1980-01-01, the earliest time in a zip file: the same contents give the same bytes whenever they are built.
_EPOCH = "315532800"
_BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def write_wheel(
    pack: Contents, name: str, version: str, module: str, out_dir: Path, more: Mapping[str, Any] | None = None
) -> Path:
    """Write the wheel of a pack, and return its path; the same pack gives the same bytes with the same setuptools.

    Args:
        pack: the pack.
        name: the package's name, normalised.
        version: its version, normalised.
        module: its folder among the installed packages.
        out_dir: the folder for the wheel.
        more: further fields of ``[project]``, each text or a list of texts.

    Raises:
        CacheError: setuptools is missing or fails, or the file cannot be written.
    """
    with TemporaryDirectory() as folder:
        project, built = Path(folder, "project"), Path(folder, "built")
        built.mkdir()
        _write_project(project, pack, name, version, module, more or {})
        _run_setuptools(project, built)
        (wheel,) = built.iterdir()
        path = out_dir / wheel.name
        try:
            write_whole(path, wheel.read_bytes())
        except OSError as error:
            raise CacheError(f"cannot write {path}: {error.strerror}") from None
    return path


def _write_project(
    project: Path, pack: Contents, name: str, version: str, module: str, more: Mapping[str, Any]
) -> None:  # fmt: skip
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
    # A JSON text or list of texts is one of TOML, too.
    further = "".join(f"{field} = {json.dumps(value)}\n" for field, value in more.items())
    (project / "pyproject.toml").write_text(
        f"""[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = {json.dumps(name)}
version = {json.dumps(version)}
description = {json.dumps(summary)}
readme = {{text = {json.dumps(text)}, content-type = "text/plain"}}
{further}
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
        raise CacheError(needs("setuptools"))
    if done.returncode:
        raise CacheError(f"setuptools cannot build the wheel: {done.stderr.strip().splitlines()[-1:]}")


def needs(library: str) -> str:
    """Return the message that making a wheel needs a library."""
    return f"making a wheel needs {library}: pip install 'tilekern[ship]'"
