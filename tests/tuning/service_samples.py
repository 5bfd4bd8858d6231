"""Caches that want something, and real services on them, for the tests of the service."""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from environments import environment
from tuning_samples import SMALL

from tilekern.cache import note_wanted
from tilekern.kernels import spec_named
from tilekern.spec import Problem
from tilekern.spec.targets import resolve

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120
# As few candidates as a problem has.
OTHER: tuple[str, Problem] = (
    "swiglu_forward",
    spec_named("swiglu_forward").problem(rows=64, columns=48, dtype="bfloat16"),
)
REASON = "not in any cache; policy fallback"


def want(root: Path, named: tuple[str, Problem] = SMALL, gpu: str = "H200") -> None:
    """What dispatch does at a miss."""
    kernel, problem = named
    assert note_wanted(root, kernel, dict(problem), resolve(gpu).describe(), REASON)


class Running:
    """A service in a process group of its own."""

    def __init__(self, *arguments: object, **env: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tilekern.tune", "serve", *map(str, arguments)],
            env=environment(**env), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def line(self) -> str:
        """Its next line."""
        assert self.process.stdout
        with selectors.DefaultSelector() as waiting:
            waiting.register(self.process.stdout, selectors.EVENT_READ)
            assert waiting.select(PATIENCE_S), "it says nothing"
        return self.process.stdout.readline()

    def url(self) -> str:
        """Where it shows its status."""
        line = self.line()
        assert line.startswith("status at http://"), line + self.process.communicate()[1]
        return line.removeprefix("status at ").strip()

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kill it with all that it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    def end(self) -> tuple[int, str, str]:
        """Wait for its end: exit code, output and errors."""
        output, errors = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, output, errors


def get(url: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of a request, with no redirection followed and no proxy."""
    opener = urllib.request.build_opener(_Stay, urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, method=method, headers={k.replace("_", "-"): v for k, v in headers.items()})
    try:
        with opener.open(request, timeout=30) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), error.read()


def status(url: str, **headers: str) -> dict:
    code, _, body = get(f"{url}status", **headers)
    assert code == 200, body
    return json.loads(body)


def until(holds, every_s: float = 0.02):
    """What holds, when it does; it is looked at so often."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := holds()):
        assert time.monotonic() < deadline, f"waited {PATIENCE_S} s"
        time.sleep(every_s)
    return found


class _Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_):
        return None
