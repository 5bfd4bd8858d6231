"""``python -m tilekern.tune serve``: tune what running jobs asked for and did not find, for as long as it runs."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from tilekern.cache import user_root
from tilekern.compile.toolchain import require_toolkit
from tilekern.errors import InputError
from tilekern.spec.targets import Target, here, resolve
from tilekern.tuning.options import Folder, Seconds, tuner_command
from tilekern.tuning.pipeline import Options
from tilekern.tuning.serve.board import STOPPING, Board
from tilekern.tuning.serve.loop import Service
from tilekern.tuning.serve.watched import MEASURED, PREDICTED, WAITING, WatchedCache
from tilekern.warning import tell

if TYPE_CHECKING:
    from tilekern.tuning.serve.server import StatusServer

DEFAULT_ADDRESS, NOWHERE = "127.0.0.1:8417", "none"
_FOLDER = Folder()
_FILE = click.Path(dir_okay=False, path_type=Path)


class Stopped(KeyboardInterrupt):
    """Raised in the loop by a signal, as Ctrl-C is anywhere: what was finished is kept."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@tuner_command(short_help="Tune what running jobs miss, for as long as it runs.")
@click.option("--cache-dir", "roots", multiple=True, type=_FOLDER, help="A cache to watch; may be repeated.")
@click.option("--gpu", default="auto", show_default=True, help="Target: auto, or a GPU (B200) to predict winners for.")
@click.option("--once", is_flag=True, help="Tune what is wanted now, then end: for cron.")
@click.option("--poll", "poll_s", type=Seconds(least=0.1), default=30.0, show_default=True, help="Seconds to rest.")
@click.option("--batch", type=click.IntRange(min=1), default=8, show_default=True, help="Problems to tune at once.")
@click.option("--jobs", type=click.IntRange(min=1), help="Compile workers, up to 4 a core; one a core if not given.")
@click.option("--gpus", type=click.IntRange(min=1), help="How many of this host's GPUs to measure on at most.")
@click.option("--retry", is_flag=True, help="Try again what failed before.")
@click.option("--listen", metavar="HOST:PORT", help=f"Where to show the status; none: nowhere.  [{DEFAULT_ADDRESS}]")
@click.option("--token-file", type=_FILE, help="The token that clients must send; else TILEKERN_SERVE_TOKEN.")
@click.option("--json", "as_json", is_flag=True, help="With --once: print one JSON document in place of lines.")
def command(
    *, roots: Sequence[Path], gpu: str, once: bool, poll_s: float, batch: int, jobs: int | None, gpus: int | None,
    retry: bool, listen: str | None, token_file: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Watch the wanted lists of caches, tune what costs running jobs most, and publish it into the same caches.

    Jobs take new records while they run. A service that was stopped or killed goes on where it was. Where the GPU is
    not here, --gpu names it, and what is published is predicted. The status is at /status, as a page at /; an address
    that other machines reach needs a token. Exit codes: 0 stopped by SIGTERM, or nothing is left; 1 --once left some.
    """
    if as_json and not once:
        raise InputError("--json goes with --once; a service shows its status at /status")
    target, goal = _aim(gpu)
    toolkit = require_toolkit()
    folders = dict.fromkeys(root.expanduser().resolve() for root in roots or [user_root()])
    caches = [WatchedCache(root, target, toolkit.key, goal) for root in folders]
    board = Board(target, toolkit.describe(), goal, poll_s)
    say: Callable[[str], None] = (lambda _: None) if as_json else tell
    service = Service(caches, Options(jobs=jobs, gpus=gpus), batch, board, say)
    stopped: Stopped | None = None
    with contextlib.ExitStack() as held:
        for cache in caches:
            held.enter_context(cache.held())
            if retry:
                cache.failures.forget()
        server = _server(listen or (NOWHERE if once else DEFAULT_ADDRESS), token_file, board)
        try:
            with _stopped_by_signals():
                if server:
                    server.start()
                    say(f"status at {server.url}")
                if once:
                    service.work_off()
                else:
                    say(f"watching {', '.join(str(cache.root) for cache in caches)} for {target.name}")
                    service.run(poll_s)
        except Stopped as error:
            stopped = error
        finally:
            board.put(state=STOPPING)
            if server:
                server.stop()
    _end(service, stopped, once=once, as_json=as_json)


def _end(service: Service, stopped: Stopped | None, *, once: bool, as_json: bool) -> None:
    """Say how it went, by the exit code too."""
    if stopped is not None and stopped.number == signal.SIGINT:
        raise stopped
    if not once:
        tell("stopped; what was finished is kept")
        return
    done = {(line["cache"], line["kernel"], json.dumps(line["problem"])) for line in service.published}
    left = [
        item for item in service.left
        if item.state == WAITING and (str(item.root), item.kernel, json.dumps(dict(item.problem))) not in done
    ]  # fmt: skip
    summary: dict[str, list[Any]] = {
        "published": service.published,
        "failed": service.failed,
        "left": [{"cache": str(i.root), "kernel": i.kernel, "problem": dict(i.problem)} for i in left],
        "not_tuned_here": [
            {"cache": str(i.root), "kernel": i.kernel, "problem": dict(i.problem), "state": i.state, "why": i.why}
            for i in service.left if i.state != WAITING
        ],
        "trouble": list(service.troubled.values()),
    }  # fmt: skip
    tell(*(json.dumps(summary, indent=1).splitlines() if as_json else [_told(summary)]))
    if left or service.troubled or any(line["passing"] for line in service.failed):
        raise SystemExit(1)


def _told(summary: dict[str, list[Any]]) -> str:
    words = {"published": "published", "failed": "failed", "left": "left", "not_tuned_here": "not tuned here"}
    return ", ".join(f"{len(summary[name])} {word}" for name, word in words.items())


def _aim(gpu: str) -> tuple[Target, str]:
    """The target, and the provenance that can be reached for it here."""
    at_hand = here()
    if gpu == "auto" and at_hand is None:
        raise InputError("this machine has no CUDA GPU to tune on; to publish predicted winners, name one: --gpu B200")
    target = resolve(gpu)
    return target, MEASURED if at_hand is not None and at_hand.key == target.key else PREDICTED


def _server(listen: str, token_file: Path | None, board: Board) -> StatusServer | None:
    if listen == NOWHERE:
        return None
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise InputError(f"--listen {listen}: expected HOST:PORT, such as {DEFAULT_ADDRESS}, or {NOWHERE}")
    try:
        from tilekern.tuning.serve import access, server
    except ModuleNotFoundError as error:
        raise InputError(
            f"showing the status needs {error.name}: pip install 'tilekern[serve]', or give --listen {NOWHERE}"
        ) from None
    host = host.removeprefix("[").removesuffix("]")
    allowed = access.access_for(host, token_file)
    return server.StatusServer(board, server.listen(host, int(port)), allowed)


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGINT into :class:`Stopped`; the second one ends the process as it always would."""
    numbers = (signal.SIGTERM, signal.SIGINT)

    def stop(number: int, _: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_DFL)
        raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
