"""The environment of processes that tests start."""

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]


def environment(*folders: Path | str, without: tuple[str, ...] = ("TILEKERN_",), **more: str) -> dict[str, str]:
    """Return a user's environment without a GPU: this process's variables without tilekern's settings, and ``more``.

    Args:
        folders: where Python looks first; the checkout where none is given.
        without: how the names begin that are left out.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(without)}
    return kept | {"PYTHONPATH": python_path(*(folders or (ROOT,))), "CUDA_VISIBLE_DEVICES": ""} | more


def python_path(*folders: Path | str) -> str:
    """Folders, and behind them those that the tests were given, as that of the compiler which keeps its cubins."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def installed(folder: Path) -> Path:
    """A folder by which Python takes tilekern for installed, so that ``import torch`` calls its entry point."""
    info = folder / "tilekern-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tilekern\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntilekern = tilekern_startup:begin\n")
    return folder


def stub_of_the_driver(folder: Path) -> dict[str, str]:
    """Compile the stub of the CUDA driver (``runtime/driver_stub.c``); the variables by which a process loads it."""
    source = ROOT / "tests" / "runtime" / "driver_stub.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", folder / "libcuda.so.1", source], check=True)
    return {"LD_LIBRARY_PATH": str(folder)}


def without_kept_cubins() -> str:
    """A PATH by which ``kept_cubins.sh``, to which few variables come, runs the compiler and keeps nothing."""
    return f"/keep-no-cubins{os.pathsep}{os.environ['PATH']}"


def needed(requirements: list[str]) -> dict[str, metadata.Distribution]:
    """The installed distributions that requirements without extras name, and all that those need."""
    found: dict[str, metadata.Distribution] = {}
    wanted = [line for line in requirements if ";" not in line]
    while wanted:
        name = re.match(r"[\w.-]+", wanted.pop())[0]
        if name not in found:
            found[name] = metadata.distribution(name)
            wanted += [line for line in found[name].requires or () if ";" not in line]
    return found


class BarePython:
    """Python that sees the standard library, the distributions that tilekern declares to need, and tilekern.

    A folder has a link for each of their files and is all that ``python -S`` searches beside the standard library, so
    what runs here needs nothing else. It says nothing about how pip resolves versions, or about older ones.
    """

    def __init__(self, folder: Path, requirements: list[str], tilekern: Path = ROOT) -> None:
        self.folder = folder
        for distribution in needed(requirements).values():
            for file in distribution.files or ():
                if file.parts[0] != ".." and "__pycache__" not in file.parts:
                    (folder / file).parent.mkdir(parents=True, exist_ok=True)
                    (folder / file).symlink_to(distribution.locate_file(file))
        self._path = os.pathsep.join([str(folder), str(tilekern)])

    def run(self, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run Python with arguments in the folder, as a user without settings."""
        return subprocess.run(
            [sys.executable, "-S", "-s", *map(str, arguments)], cwd=self.folder, capture_output=True, text=True,
            check=False, env=environment() | {"PYTHONPATH": self._path} | variables,
        )  # fmt: skip
