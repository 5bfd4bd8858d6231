"""``python -m tilekern.tune serve``: tune the problems that running jobs miss, until it is stopped."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from tilekern.cache import user_root
from tilekern.compile.toolchain import require_toolkit
from tilekern.errors import InputError
from tilekern.spec.targets import Target, here, resolve
from tilekern.tuning.options import FOLDER, Seconds, tuner_command
from tilekern.tuning.pipeline import Options
from tilekern.tuning.serve.loop import Service
from tilekern.tuning.serve.watched import MEASURED, PREDICTED, WAITING, WatchedCache
from tilekern.tuning.stopping import Stopped, stopped_by
from tilekern.warning import tell


@tuner_command(short_help="Tune the problems that running jobs miss, until it is stopped.")
@click.option("--cache-dir", "roots", multiple=True, type=FOLDER, help="A cache to watch; may be repeated.")
@click.option("--gpu", default="auto", show_default=True, help="Target: auto, or a GPU (B200) to predict winners for.")
@click.option("--once", is_flag=True, help="Tune what is wanted now, then end: for cron.")
@click.option("--poll", "poll_s", type=Seconds(least=0.1), default=30.0, show_default=True, help="Seconds to rest.")
@click.option("--batch", type=click.IntRange(min=1), default=8, show_default=True, help="Problems to tune at once.")
@click.option("--jobs", type=click.IntRange(min=1), help="Compile workers, up to 4 a core; one a core if not given.")
@click.option("--gpus", type=click.IntRange(min=1), help="How many of this host's GPUs to measure on at most.")
@click.option("--retry", is_flag=True, help="Try again what failed before.")
@click.option("--json", "as_json", is_flag=True, help="With --once: print one JSON document in place of lines.")
def command(
    *, roots: Sequence[Path], gpu: str, once: bool, poll_s: float, batch: int, jobs: int | None, gpus: int | None,
    retry: bool, as_json: bool,
) -> None:  # fmt: skip
    """Watch the wanted lists of caches, tune what costs running jobs most, and publish it into the same caches.

    Running jobs take the new records. A service that was stopped or killed goes on where it was. Without the GPU, --gpu
    names it, and winners are predicted. `python -m tilekern.cache_tools wanted` lists what is still wanted. Exit codes:
    0 stopped by SIGTERM, or nothing is left; 1 --once left some.
    """
    if as_json and not once:
        raise InputError("--json goes with --once; a service prints a line for each problem that it tunes")
    target, goal = _aim(gpu)
    toolkit = require_toolkit()
    folders = dict.fromkeys(root.expanduser().resolve() for root in roots or [user_root()])
    caches = [WatchedCache(root, target, toolkit.key, goal) for root in folders]
    say: Callable[[str], None] = (lambda _: None) if as_json else tell
    service = Service(caches, Options(jobs=jobs, gpus=gpus), batch, say)
    stopped: Stopped | None = None
    with contextlib.ExitStack() as held:
        for cache in caches:
            held.enter_context(cache.held())
            if retry:
                cache.failures.forget()
        try:
            with stopped_by(signal.SIGTERM, signal.SIGINT):
                if once:
                    service.work_off()
                else:
                    say(f"watching {', '.join(str(cache.root) for cache in caches)} for {target.name}")
                    service.run(poll_s)
        except Stopped as error:
            stopped = error
    _end(service, stopped, once=once, as_json=as_json)


def _end(service: Service, stopped: Stopped | None, *, once: bool, as_json: bool) -> None:
    """Print the summary and set the exit code."""
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
    if as_json:
        tell(*json.dumps(summary, indent=1).splitlines())
    else:
        counted = ("published", "failed", "left", "not_tuned_here")
        tell(", ".join(f"{len(summary[name])} {name.replace('_', ' ')}" for name in counted))
    if left or service.troubled or any(line["passing"] for line in service.failed):
        raise SystemExit(1)


def _aim(gpu: str) -> tuple[Target, str]:
    """Return the target, and the provenance that its records can have from this machine."""
    at_hand = here()
    if gpu == "auto" and at_hand is None:
        raise InputError("this machine has no CUDA GPU to tune on; to publish predicted winners, name one: --gpu B200")
    target = resolve(gpu)
    return target, MEASURED if at_hand is not None and at_hand.key == target.key else PREDICTED
