"""``python -m tilekern.tune MODEL``: plan, compile, measure, and fill the cache."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from tilekern.cache import Store, user_root
from tilekern.errors import InputError
from tilekern.targets import Target, here, resolve
from tuning.models import resolve_model
from tuning.plan import known_ops, plan
from tuning.publishing import Winner, keep_winners, publish, winners
from tuning.sweep import Sweep

STAGES = ("plan", "compile", "measure")


@dataclass
class Outcome:
    """What a run did, in the form of ``--json``."""

    model: str
    target: Target
    toolkit: dict[str, str]
    seconds: dict[str, float] = field(default_factory=dict)
    winners: list[Winner] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    compile: dict[str, Any] = field(default_factory=dict)
    measure: dict[str, Any] = field(default_factory=dict)
    results: str | None = None
    cache: str | None = None

    def as_json(self) -> dict[str, Any]:
        """The document that ``--json`` prints."""
        return {
            "model": self.model,
            "target": self.target.describe(),
            "toolkit": self.toolkit,
            "seconds": {stage: round(seconds, 3) for stage, seconds in self.seconds.items()},
            "compile": self.compile,
            "measure": self.measure,
            "problems": [_problem_json(winner) for winner in self.winners],
            "results": self.results,
            "cache": self.cache,
            "notes": self.notes,
        }


def _problem_json(winner: Winner) -> dict[str, Any]:
    record = winner.record
    return {
        "kernel": winner.kernel,
        "problem": record.problem,
        "config": record.config,
        "provenance": record.provenance,
        "candidates": record.candidates,
        "failed": record.failed,
        "time_us": round(winner.time_us, 3),
        "share_of_roofline": round(winner.share, 4),
        "gain_over_default": round(winner.gain, 4),
    }


def _listed(text: str, what: str) -> list[str]:
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise InputError(f"{what} is empty; give a list with commas between")
    return found


def _tokens(text: str) -> list[int]:
    try:
        return [int(part) for part in _listed(text, "--tokens")]
    except ValueError:
        raise InputError(f"--tokens {text!r}: expected whole numbers with commas between, such as 2048,8192") from None


def _stages(text: str) -> list[str]:
    found = _listed(text, "--stages")
    for stage in found:
        if stage not in STAGES:
            raise InputError(f"unknown stage {stage!r}; known: {', '.join(STAGES)}")
    return found


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model", required=False)
@click.option("--gpu", default="auto", show_default=True, help="Target: auto, a GPU (B200), an arch (sm_90) or a key.")
@click.option("--tokens", default="2048,8192", show_default=True, help="Tokens of a step (batch times sequence).")
@click.option(
    "--dtype", default="bfloat16", show_default=True, help="bfloat16, float16 or float32; several with commas."
)
@click.option("--ops", default=",".join(known_ops()), show_default=True, help="Which ops to tune.")
@click.option("--jobs", type=click.IntRange(min=1), help="Compile workers; one for each core where not given.")
@click.option("--stages", default=",".join(STAGES), show_default=True, help="Which stages to run.")
@click.option("--sweep", type=click.Path(file_okay=False, path_type=Path), help="The sweep folder; it can travel.")
@click.option("--cache-dir", type=click.Path(file_okay=False, path_type=Path), help="The cache to fill.")
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=1), default=60.0, show_default=True,
    help="Seconds that one compile may take.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document in place of tables.")
def command(
    model: str | None, gpu: str, tokens: str, dtype: str, ops: str, jobs: int | None, stages: str, sweep: Path | None,
    cache_dir: Path | None, timeout_s: float, as_json: bool,
) -> None:  # fmt: skip
    """Tune the kernels of MODEL for a GPU and fill the cache.

    MODEL is a preset (qwen3-8b), the path of a config.json or of a folder with one, or a hub id. With --stages
    measure alone it is taken from the sweep folder. Without a GPU the measure stage is left out and the winners are
    predicted. A run that was stopped goes on where it was.
    """
    wanted = _stages(stages)
    outcome = _run(model, gpu, _tokens(tokens), _listed(dtype, "--dtype"), _listed(ops, "--ops"), jobs, wanted, sweep,
                   cache_dir, timeout_s, quiet=as_json)  # fmt: skip
    if as_json:
        click.echo(json.dumps(outcome.as_json(), indent=1))
    else:
        from tuning.report import print_outcome

        print_outcome(outcome)


def _run(
    model: str | None, gpu: str, tokens: list[int], dtypes: list[str], ops: list[str], jobs: int | None,
    stages: list[str], folder: Path | None, cache_dir: Path | None, timeout_s: float, *, quiet: bool,
) -> Outcome:  # fmt: skip
    from tuning.compiling import compile_all, default_jobs, start_server
    from tuning.executors.local import LocalExecutor
    from tuning.measuring import measure_all

    if "compile" in stages:
        start_server()
    seconds: dict[str, float] = {}
    store = Store(cache_dir or user_root())
    if "plan" in stages:
        with _timed(seconds, "plan"):
            sweep = _planned(model, gpu, tokens, dtypes, ops, folder, store)
    else:
        if folder is None:
            raise InputError("stages after plan need the folder of a planned sweep: give --sweep DIR")
        sweep = Sweep(folder)
    outcome = Outcome(sweep.model, sweep.target, _toolkit(), seconds)
    _check_writable(store, sweep)
    if "compile" in stages:
        with _timed(seconds, "compile"), _bar("compile", quiet) as progress:
            summary = compile_all(sweep, jobs or default_jobs(), timeout_s, progress)
        outcome.compile = dataclasses.asdict(summary)
    if "measure" in stages:
        absent = _absent(sweep.target) if "compile" in stages else None
        if absent:
            outcome.notes.append(absent)
        else:
            with _timed(seconds, "measure"), _bar("measure", quiet) as progress:
                outcome.measure = dataclasses.asdict(
                    measure_all(sweep, LocalExecutor(sweep.cache), keep_winners, progress=progress)
                )
    if "measure" in stages:
        _publish(outcome, sweep, store)
    elif "compile" in stages:
        outcome.winners = [winner for winner, _ in winners(sweep, outcome.toolkit)]
        outcome.notes.append(f"carry {sweep.folder} to the target and run --stages measure --sweep {sweep.folder}")
    return outcome


def _absent(target: Target) -> str | None:
    """Why a whole run cannot measure here, or None where the GPU here is the target."""
    at_hand = here()
    if at_hand is not None and at_hand.key == target.key:
        return None
    found = "no GPU here" if at_hand is None else f"the GPU here is a {at_hand.name}, not a {target.name}"
    return f"{found}: the measure stage is left out and the winners are predicted"


def _publish(outcome: Outcome, sweep: Sweep, store: Store) -> None:
    found = list(winners(sweep, outcome.toolkit))
    if not found:
        raise InputError(
            f"no candidate compiled and passed its check; the reasons are in {sweep.folder}/compiled.jsonl"
        )
    outcome.winners = [winner for winner, _ in found]
    pack = sweep.folder / "results.pack"
    publish(found, pack, store)
    outcome.results, outcome.cache = str(pack), str(store.root)


def _planned(
    model: str | None, gpu: str, tokens: list[int], dtypes: list[str], ops: list[str], folder: Path | None, store: Store
) -> Sweep:
    if model is None:
        raise InputError("name a model: a preset such as qwen3-8b, the path of a config.json, or a hub id")
    shape = resolve_model(model)
    target = resolve(gpu)
    problems = plan(shape, tokens, dtypes, ops, target)
    # A folder of its own for each target in the cache's root, so that a stopped run is found again.
    sweep = Sweep(folder or store.root / "sweeps" / target.key)
    sweep.begin(target, shape.name, problems)
    return sweep


def _toolkit() -> dict[str, str]:
    from tilekern.toolchain import toolkit

    found = toolkit()
    return found.describe() if found else {"key": "none", "tileiras": "none", "cuda_tile": "none"}


def _check_writable(store: Store, sweep: Sweep) -> None:
    for folder in (Path(store.root), sweep.folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot write {folder}: {error.strerror}; give another --cache-dir or --sweep") from None
        if not os.access(folder, os.W_OK):
            raise InputError(f"cannot write {folder}; give another --cache-dir or --sweep")


@contextlib.contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        seconds[stage] = time.perf_counter() - started


@contextlib.contextmanager
def _bar(stage: str, quiet: bool) -> Iterator[Any]:
    """A progress bar on the terminal's error stream; nothing where ``--json`` asked for quiet."""
    if quiet:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(f"{stage:8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(stage, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
