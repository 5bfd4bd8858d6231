"""The environment of processes that tests start."""

import os
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


def without_kept_cubins() -> str:
    """A PATH by which ``kept_cubins.sh``, to which few variables come, runs the compiler and keeps nothing."""
    return f"/keep-no-cubins{os.pathsep}{os.environ['PATH']}"
