"""The rooms of the code, the lowest first, and the tests that a change of some files can reach."""

import subprocess
from pathlib import PurePosixPath

# A module imports of tilekern its own room and those below. Rooms on one line do not import each other.
ROOMS = (
    ("errors",),
    ("warning",),
    ("spec",),
    ("compile", "cache"),
    ("kernels", "interpreter"),
    ("runtime",),
    # What torch brings to a launch, and launches on arrays of any library, without it.
    ("ops", "arrays"),
    # What replaces the code of models, and the engine that runs them without torch.
    ("patch", "inference"),
    # `fp8` has the names of `patch` that users import.
    ("integrations", "fp8", "tuning", "cache_tools"),
    # `python -m tilekern.NAME`
    ("doctor", "generate", "run", "tune"),
)
HEIGHT = {room: height for height, rooms in enumerate(ROOMS) for room in rooms}
# Folders of tests that are not called as the room that they test.
FOLDERS = {"liger": "integrations", "ptx": "kernels", "stress": "cache"}
# Changes of these reach only tests that always run.
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CITATION.cff")
PROSE = ("docs/", "benchmarks/", ".github/", *PAGES)


def reached(paths):
    """The rooms whose tests a change of these files can reach, or None if it can reach all."""
    rooms = set()
    for path in paths:
        top, *rest = PurePosixPath(path).parts
        name = PurePosixPath(rest[0]).stem if rest else ""
        if top in ("tilekern", "tuning", "cache_tools"):
            room = name if top == "tilekern" else top
            if room not in HEIGHT and room != "prebuilt":
                return None
            rooms |= {other for other, height in HEIGHT.items() if room == other or height > HEIGHT.get(room, 99)}
        elif top == "tests" and len(rest) > 1:
            rooms.add(FOLDERS.get(name, name))
        elif not path.startswith(PROSE):
            return None
    return rooms


def is_reached(folder, rooms):
    """Whether the tests of a folder below tests/ run; those of no single room always do."""
    room = FOLDERS.get(folder, folder)
    return rooms is None or room in rooms or room not in HEIGHT


def changed_since(commit, root):
    """The files below ``root`` that differ from a commit's, new ones too."""
    commands = (["diff", "--name-only", commit], ["ls-files", "--others", "--exclude-standard"])
    return [
        path
        for command in commands
        for path in subprocess.run(
            ["git", *command], cwd=root, capture_output=True, text=True, check=True
        ).stdout.splitlines()
    ]
