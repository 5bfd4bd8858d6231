"""Wanted problems, and services in processes of their own."""

import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

from environments import environment
from tuning_samples import SMALL

from tilekern.cache import note_wanted
from tilekern.kernels import spec_named
from tilekern.spec import Problem
from tilekern.spec.targets import resolve

PATIENCE_S = 120
# Few candidates, which compile in two seconds.
OTHER: tuple[str, Problem] = (
    "swiglu_forward",
    spec_named("swiglu_forward").problem(rows=64, columns=48, dtype="bfloat16"),
)
REASON = "not in any cache; policy fallback"


def want(root: Path, named: tuple[str, Problem] = SMALL, gpu: str = "H200") -> None:
    """Put a problem on a cache's wanted list, as dispatch does on a miss."""
    kernel, problem = named
    assert note_wanted(root, kernel, dict(problem), resolve(gpu).describe(), REASON)


class Running:
    """A service in a process group of its own."""

    def __init__(self, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tilekern.tune", "serve", *map(str, arguments)],
            env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def line(self) -> str:
        """Return its next line."""
        assert self.process.stdout
        with selectors.DefaultSelector() as waiting:
            waiting.register(self.process.stdout, selectors.EVENT_READ)
            assert waiting.select(PATIENCE_S), "it prints nothing"
        return self.process.stdout.readline()

    def kill(self) -> None:
        """Kill it with all that it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    def end(self) -> tuple[int, str, str]:
        """Wait for its end; return exit code, output and errors."""
        output, errors = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, output, errors


def until(holds):
    """Wait until a function returns something true, and return that."""
    deadline = time.monotonic() + PATIENCE_S
    while not (value := holds()):
        assert time.monotonic() < deadline, f"waited {PATIENCE_S} s"
        time.sleep(0.02)
    return value
