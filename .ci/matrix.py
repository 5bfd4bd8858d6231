#!/usr/bin/env python3
"""Try HEAD with the versions of Python, torch and transformers in `.ci/versions.toml`, and write what worked.

    python .ci/matrix.py                     all cells
    python .ci/matrix.py py3.12 5.24.0       cells with one of these in their name, such as py3.12-torch2.15.0-...
    python .ci/matrix.py --list              the names, and nothing else

For each Python and torch it makes an environment in a temporary folder, installs HEAD and each transformers with pip,
and runs the tests of PARTS, one to three minutes a cell on two cores; no GPU is needed. Interpreters are those on PATH
and pyenv's. A torch for CUDA takes 6 GB of disk until its cells are done; without room, or where pip cannot install
the versions, a cell is "unavailable". Rows of the cells that ran are replaced in docs/versions.json, from which
the table of docs/versions.md is made. Exit code 1: a cell failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from release import ROOT, commit_archive, git, unpack

VERSIONS = ROOT / ".ci" / "versions.toml"
RESULTS = ROOT / "docs" / "versions.json"
PAGE = RESULTS.with_suffix(".md")
TABLE = re.compile(r"^\| Python \|.*?\n(?=\n|\Z)", re.M | re.S)
# For an environment with a torch for CUDA, and what pip unpacks meanwhile.
ROOM_BYTES = 12e9
# Of the extra `test`, what runs the tests of PARTS.
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
# Models that people train and generate with, dense ones, with experts, with linear attention, and with images.
FAMILIES = (
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "gemma2", "gemma3", "phi3", "gpt2",
    "gpt_oss", "olmo2", "granite", "glm4", "deepseek_v3", "qwen2_vl",
)  # fmt: skip
# Kernels that are compiled; old compilers reject most of them.
KERNELS = ("attention_forward", "skinny_linear", "rms_norm_forward", "swiglu_forward")
# By the table's column: pytest's arguments.
PARTS = {
    "trace": ("tests/patch/test_trace_of_a_step.py", "-k", "dtypes or as_it_was or refused"),
    "patches": ("tests/patch/test_model_families.py", "-k", " or ".join(f"is[{name}]" for name in FAMILIES)),
    "interpreter": ("tests/interpreter/test_tiles.py", "tests/ops/test_norms_op.py"),
    "compiler": ("tests/kernels/test_compile.py", "-k", f"qwen3_8b and ({' or '.join(KERNELS)})"),
    "stub driver": ("tests/runtime/test_extended_launch.py", "tests/inference/test_engine.py", "-m", "not nightly"),
}
# Variables by which a user's settings would change the tests.
CLEARED = ("TILEKERN_", "PYTHON", "TEST_", "HYPOTHESIS_")
TIMEOUT_S = 1800
# In what pip says where an index does not have the versions, or they exclude each other.
UNAVAILABLE = ("No matching distribution", "Could not find a version", "conflicting dependencies")
CODE = """
import json, platform, tilekern, torch, transformers
from importlib.metadata import version
assert callable(tilekern.apply)
names = ("torch", "transformers", "cuda-tile", "nvidia-cuda-tileiras", "numpy", "tokenizers")
print(json.dumps({"python": platform.python_version()} | {name: version(name) for name in names}))
"""


class Cell(NamedTuple):
    """Versions that are tried together."""

    python: str
    torch: str
    transformers: str

    @property
    def name(self) -> str:
        """How the command line names it."""
        return f"py{self.python}-torch{self.torch}-transformers{self.transformers}"


class UnavailableError(Exception):
    """A cell cannot be tried here; the message says why."""


class InstallError(Exception):
    """pip found all packages and could not install them; the message is pip's."""


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Try HEAD with versions of Python, torch and transformers.")
    parser.add_argument("names", nargs="*", help="parts of the names of cells; default: all cells")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    options = parser.parse_args()
    cells = read_cells()
    chosen = [cell for cell in cells if not options.names or any(name in cell.name for name in options.names)]
    if not chosen:
        raise SystemExit(f"matrix: no cell has {' or '.join(options.names)} in its name; --list names them")
    if options.list:
        print("\n".join(cell.name for cell in chosen))
        return
    failed = 0
    for _, group in groupby(chosen, key=lambda cell: (cell.python, cell.torch)):
        with tempfile.TemporaryDirectory(prefix="tilekern-matrix-") as folder:
            for row in tried(list(group), Path(folder)):
                print(f"{row['name']}: {row['result']} in {row['seconds']} s {row['reason']}".rstrip(), flush=True)
                failed += row["result"] == "failed"
                write(cells, row)
    raise SystemExit(failed > 0)


def read_cells() -> list[Cell]:
    """Return the cells of versions.toml, in its order."""
    entries = tomllib.loads(VERSIONS.read_text(encoding="utf-8"))["cell"]
    return [Cell(entry["python"], entry["torch"], release) for entry in entries for release in entry["transformers"]]


def tried(cells: list[Cell], folder: Path) -> Iterable[dict[str, Any]]:
    """Try cells of one Python and one torch in an environment in ``folder``, and yield their rows."""
    source = unpack(commit_archive(ROOT), folder / "source")
    for cell in cells:
        row: dict[str, Any] = {"name": cell.name, **cell._asdict(), "result": "passed", "reason": "", "parts": {}}
        row |= {"date": datetime.date.today().isoformat(), "commit": git(ROOT, "rev-parse", "--short=8", "HEAD")}
        begun = time.monotonic()
        try:
            room(folder)
            environment = environment_of(cell.python, folder)
            install(environment, source, cell)
            row |= outcome(environment, source)
        except UnavailableError as error:
            row |= {"result": "unavailable", "reason": str(error)}
        except InstallError as error:
            row |= {"result": "failed", "reason": str(error)}
        yield row | {"seconds": round(time.monotonic() - begun)}


def room(folder: Path) -> None:
    """Refuse a disk that a torch for CUDA could fill."""
    if (free := shutil.disk_usage(folder).free) < ROOM_BYTES:
        raise UnavailableError(f"the disk has {free / 1e9:.0f} GB free, and {ROOM_BYTES / 1e9:.0f} GB are needed")


def environment_of(python: str, folder: Path) -> Path:
    """Return the Python of the environment in a folder, which is made first if it is not there."""
    environment = folder / "environment" / "bin" / "python"
    if not environment.exists():
        subprocess.run([interpreter(python), "-m", "venv", folder / "environment"], check=True)
    return environment


def interpreter(python: str) -> str:
    """Return an interpreter of a version such as 3.12."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    for path in (shutil.which(f"python{python}"), *pyenv.glob(f"versions/{python}.*/bin/python")):
        # A shim of pyenv is on PATH, and fails, for versions that are not switched on.
        if path and ran(path, "-c", code).stdout.strip() == python:
            return str(path)
    raise UnavailableError(f"no interpreter python{python} on PATH or in pyenv")


def install(environment: Path, source: Path, cell: Cell) -> None:
    """Install a cell's versions, the checkout and what runs its tests."""
    needs = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    tools = [need for need in needs["test"] if re.split(r"[^\w-]", need)[0] in TOOLS]
    asked = [f"torch=={cell.torch}", f"transformers=={cell.transformers}", "-e", f"{source}[torch,tools,text,compile]"]
    quiet = ("-q", "--no-compile", "--disable-pip-version-check")
    done = ran(environment, "-m", "pip", "install", *quiet, *asked, *tools)
    if done.returncode:
        errors = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        absent = [line for line in errors if any(words in line for words in UNAVAILABLE)]
        text = f"pip: {[done.stderr.strip()[-200:], *errors, *absent][-1].strip()[:200]}"
        raise UnavailableError(text) if absent else InstallError(text)


def outcome(environment: Path, source: Path) -> dict[str, Any]:
    """Return what the parts of a cell gave: ``result``, ``reason``, ``parts`` by column, and ``versions``."""
    settings = {name: text for name, text in os.environ.items() if not name.startswith(CLEARED)}
    settings |= {"TILEKERN_CACHE_DIR": str(source.parent / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    settings |= {"PATH": f"{environment.parent}{os.pathsep}{settings['PATH']}"}
    first = ran(environment, "-c", CODE, cwd=source, env=settings)
    if first.returncode:
        said = first.stderr.strip().splitlines()[-1:] or [f"exit code {first.returncode}"]
        return {"result": "failed", "reason": f"import: {said[0]}", "parts": {"import": "failed"}}
    parts, reasons = {"import": "passed"}, []
    for part, arguments in PARTS.items():
        options = ("-q", "-p", "no:cacheprovider", *arguments)
        done = ran(environment, "-m", "pytest", *options, cwd=source, env=settings)
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        parts[part] = counts(lines[-1]) if lines else f"exit code {done.returncode}"
        if done.returncode:
            words = next((line for line in lines if line.startswith(("FAILED", "ERROR"))), done.stderr.strip()[-200:])
            reasons.append(f"{part}: {words[:200]}")
            print(done.stdout[-6000:], done.stderr[-2000:], sep="\n", file=sys.stderr)
    result = "failed" if reasons else "passed"
    return {"result": result, "reason": "; ".join(reasons), "parts": parts, "versions": json.loads(first.stdout)}


def ran(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command; one without an end in time has exit code 124."""
    try:
        return subprocess.run(command, check=False, capture_output=True, text=True, timeout=TIMEOUT_S, **options)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"no end after {TIMEOUT_S} s")


def counts(line: str) -> str:
    """Return the counts that people want to read of pytest's last line."""
    return ", ".join(re.findall(r"\d+ (?:passed|failed|errors?|skipped)", line)) or line


def write(cells: list[Cell], row: dict[str, Any]) -> None:
    """Put a cell's row among the results of earlier runs, without those of cells that are gone."""
    earlier = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    rows = {old["name"]: old for old in earlier} | {row["name"]: row}
    kept = [rows[cell.name] for cell in cells if cell.name in rows]
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(
        TABLE.sub(lambda _: table(cells, rows), PAGE.read_text(encoding="utf-8"), count=1), encoding="utf-8"
    )


def table(cells: list[Cell], rows: dict[str, dict[str, Any]]) -> str:
    """Return the page's table: all cells, and the results by name of those that were tried."""
    columns = ("import", *PARTS)
    heads = ("Python", "torch", "transformers", "result", *columns, "date", "commit")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for cell in cells:
        row = rows.get(cell.name, {"result": "not tried", "reason": "", "parts": {}, "date": "-", "commit": "-"})
        result = ": ".join(filter(None, (row["result"], row["reason"].replace("|", "\\|"))))
        parts = [row["parts"].get(column, "-") for column in columns]
        lines.append(f"| {' | '.join((*cell, result, *parts, row['date'], row['commit']))} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
