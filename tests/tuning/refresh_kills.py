"""Kills a refresh before each change that its beginning makes to its folder: ``python refresh_kills.py FOLDER``."""

import os
import sys
from pathlib import Path

from tuning_samples import SMALL

from tilekern.kernels import spec_named
from tilekern.runtime.records import record_of
from tilekern.spec.targets import resolve
from tilekern.tuning.refreshing import Refresh, Survey

H200 = resolve("H200")
TOOLKIT = {"key": "tileiras-13.1.1-cuda_tile-1.5.0", "tileiras": "13.1.1", "cuda_tile": "1.5.0"}
CHANGES = frozenset(("open", "os.mkdir", "os.remove", "os.rename", "os.rmdir"))
KILLED = 9


def found() -> Survey:
    """One record of another toolkit, with the config to time again."""
    spec, problem = spec_named(SMALL[0]), SMALL[1]
    config = spec.default(problem, H200)
    record = record_of(spec, problem, config, H200, TOOLKIT, {}, "measured", measurement={"median_us": 5.0})
    return Survey([(record, [config])])


def in_child(work, *args) -> int:
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        work(*args)
        code = 0
    finally:
        os._exit(code)


def begin(folder: Path, changes: int) -> None:
    """Begin the refresh, and die before the last of so many changes."""
    left = changes

    def count(event: str, args: tuple) -> None:
        nonlocal left
        if event in CHANGES and str(args[0]).startswith(str(folder)):
            left -= 1
            if left == 0:
                os._exit(KILLED)

    sys.addaudithook(count)
    Refresh(folder).begin(found(), H200, TOOLKIT["key"])


def finish(folder: Path) -> None:
    """An older refresh that came to its end."""
    refresh = Refresh(folder)
    refresh.begin(found(), H200, None)
    refresh.finish([])
    assert not refresh.unfinished


def go_on(folder: Path) -> None:
    """Run the next run: continue what was begun, or begin it."""
    refresh = Refresh(folder)
    if not refresh.unfinished:
        refresh.begin(found(), H200, TOOLKIT["key"])
    assert refresh.unfinished
    assert refresh.sweep.problems() == [SMALL]
    assert refresh.toolkit_key == TOOLKIT["key"]


def main(root: Path) -> None:
    for kind in ("new", "old"):
        for changes in range(1, 200):
            folder = root / kind / str(changes)
            if kind == "old":
                assert in_child(finish, folder) == 0
            code = in_child(begin, folder, changes)
            assert code in (0, KILLED), code
            assert in_child(go_on, folder) == 0, f"{kind}: killed before change {changes}"
            if code == 0:
                break
        print(kind, changes - 1)  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]))
