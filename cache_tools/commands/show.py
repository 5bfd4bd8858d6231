"""The command show: one record in full, the layers that have it, and which of them a lookup takes."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from tilekern.cache import NOT_FRESH, CacheError, Entry, Record, Step, Store, default_layers, lookup, parse_problem_key
from tilekern.cache_tools.shared.installed import is_fresh, is_stale, today_of, toolkit_key
from tilekern.cache_tools.shared.options import as_json, cache_dir, command, with_filters
from tilekern.cache_tools.shared.printing import gain_of, invariant_of, plain, print_result, size, time_us_of
from tilekern.cache_tools.shared.selection import Selection
from tilekern.cache_tools.shared.sources import Source, layers_of_a_lookup
from tilekern.warning import tell

_TIMEOUT_S = 120
# Layer and toolkit.
_Steps = Mapping[tuple[str | None, str | None], Step]


@command
@click.argument("kernel", metavar="KERNEL")
@click.argument("problem_key", metavar="PROBLEM_KEY")
@with_filters("target", "toolkit")
@click.option("--sass", is_flag=True, help="Also the machine code of the artifacts (needs tilekern[inspect]).")
@click.option("--variant", help="With --sass: only of this artifact, such as aligned.")
@cache_dir
@as_json
def show(
    kernel: str, problem_key: str, store: Store, selection: Selection, sass: bool, variant: str | None, as_json: bool
) -> None:
    """Print one record in full; PROBLEM_KEY as `ls` prints it.

    Looks through all layers of a lookup, says which of them have the record, and which one a lookup takes.

    JSON: layer, path, size_bytes, stale, fresh, record (all fields as the cache keeps them), places[] {layer, path,
    target, toolkit, provenance, time_us, gain, created, outcome, detail}, wins, sass {variant: text}; all in
    docs/cache-json.md.
    """
    problem = parse_problem_key(problem_key)
    found = _of_one_gpu(store, kernel, problem_key, dataclasses.replace(selection, kernel=kernel))
    steps = _steps_of_a_lookup(store, kernel, problem, found)
    places = [_place(source, entry, steps) for source, entry in found]
    at = next((at for at, place in enumerate(places) if place["outcome"] == "taken"), 0)
    source, entry = found[at]
    record = entry.record
    if record is None:
        raise CacheError(f"{entry.path} is unreadable: {entry.problem}")
    taken = next((step for step in steps.values() if step.outcome == "taken"), None)
    # A record that is nested deeper than can be printed raises CacheError here.
    fields = {name: value for name, value in json.loads(record.to_json()).items() if name not in ("schema", "sha256")}
    document = {
        "layer": source.name,
        "path": str(entry.path),
        "size_bytes": entry.size_bytes,
        "stale": is_stale(record),
        "fresh": is_fresh(record),
        "record": fields,
        "places": places,
        "wins": taken and {"layer": taken.layer, "target": taken.target_key, "toolkit": taken.toolkit_key},
    }
    if sass:
        if variant and variant not in record.artifacts:
            raise CacheError(f"{record.kernel} has the variants {', '.join(record.artifacts)}, not {variant!r}")
        document["sass"] = {
            name: _disassembled(source.place.read_blob(record.artifacts[name].sha256))
            for name in ([variant] if variant else record.artifacts)
        }
    print_result(document, as_json, lambda: _print(document, record))


def _of_one_gpu(store: Store, kernel: str, key: str, selection: Selection) -> list[tuple[Source, Entry]]:
    """Return the problem's records in all layers, for the GPU that the first layer with the problem has it for."""
    layers = [
        [
            (source, entry)
            for entry in source.place.entries(selection.where)
            if entry.address and entry.address[2:] == (kernel, key)
        ]
        for source in layers_of_a_lookup(store)
    ]
    first = next((entries for entries in layers if entries), None)
    if first is None and not store.root.is_dir():
        raise CacheError(
            f"there is no cache at {store.root} and no record of {kernel} {key} in another layer; "
            "--cache-dir or TILEKERN_CACHE_DIR says where the cache is"
        )
    if first is None:
        raise CacheError(f"there is no record of {kernel} {key} in {store.root} or another layer; see `ls --layers`")
    targets = sorted({entry.address.target_key for _, entry in first if entry.address})
    if len(targets) > 1:
        raise CacheError(f"records of {len(targets)} GPUs match, choose one by --gpu: {', '.join(targets)}")
    found = [pair for entries in layers for pair in entries]
    return [(source, entry) for source, entry in found if entry.address and entry.address.target_key == targets[0]]


def _steps_of_a_lookup(
    store: Store, kernel: str, problem: dict[str, Any], found: list[tuple[Source, Entry]]
) -> dict[tuple[str | None, str | None], Step]:
    """Return the steps of a lookup of this very problem on the GPU, by layer and toolkit."""
    record = next((entry.record for _, entry in found if entry.record), None)
    today = today_of(record) if record else None
    if record is None or today is None:
        return {}
    trace: list[Step] = []
    lookup(
        kernel, problem, bucketed=(), target_key=record.target["key"], arch=record.target["arch"],
        toolkit_key=toolkit_key(), source=today, layers=default_layers(store.root, looking=True), trace=trace,
    )  # fmt: skip
    tried = [step for step in trace if step.problem and step.target_key == record.target["key"]]
    return {(step.layer, step.toolkit_key): step for step in tried}


def _place(source: Source, entry: Entry, steps: _Steps) -> dict[str, Any]:
    assert entry.address is not None
    record, step = entry.record, steps.get((source.name, entry.address.toolkit_key))
    if step:
        outcome, detail = step.outcome, step.detail
    elif steps:
        outcome, detail = "not_reached", "a lookup ends before it comes here"
    else:
        outcome, detail = "unknown", "the kernel's source is not installed here, so no lookup can take it here"
    return {
        "layer": source.name,
        "path": str(entry.path),
        "target": entry.address.target_key,
        "toolkit": entry.address.toolkit_key,
        "provenance": record.provenance if record else None,
        "time_us": time_us_of(record) if record else None,
        "gain": gain_of(record) if record else None,
        "created": record.created if record else None,
        "outcome": outcome,
        "detail": entry.problem or detail,
    }


def _disassembled(cubin: bytes) -> str:
    """Return the SASS of a cubin, by the pip package's nvdisasm, else the one on PATH."""
    package = importlib.util.find_spec("nvidia")
    roots = package.submodule_search_locations or () if package else ()
    ours = [path for root in roots for path in sorted(Path(root).glob("cu*/bin/nvdisasm"), reverse=True)]
    tool = next((str(path) for path in ours if os.access(path, os.X_OK)), None) or shutil.which("nvdisasm")
    if tool is None:
        raise CacheError("nvdisasm is not installed; install it with: pip install 'tilekern[inspect]'")
    with TemporaryDirectory() as folder:
        path = Path(folder, "artifact.cubin")
        path.write_bytes(cubin)
        try:
            done = subprocess.run(
                [tool, "--print-code", path], capture_output=True, timeout=_TIMEOUT_S, check=False, cwd=folder
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CacheError(f"{tool} could not be run: {error}") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
        raise CacheError(f"nvdisasm cannot read the artifact: {lines[0]}")
    return done.stdout.decode(errors="replace")


def _print(document: Mapping[str, Any], record: Record) -> None:
    tell(f"{record.kernel} {record.address.problem_key}")
    facts = ["module", "source_digest", "space_digest", "provenance", "candidates", "failed", "created", "created_by"]
    tell(*(f"{name.replace('_', ' ')}: {plain(getattr(record, name))}" for name in facts))
    state = {True: "yes, the kernel's source has changed since", False: "no", None: "the source is not installed here"}
    tell(f"stale: {state[document['stale']]}")
    if document["fresh"] is False and not document["stale"]:
        tell(f"fresh: no, {NOT_FRESH}")
    tell(f"file: {document['path']}")
    for name in ("target", "toolkit", "config", "measurement", "prediction", "check"):
        _print_section(name, getattr(record, name))
    if same := invariant_of(record):
        tell(f"tilekern.invariant(): {same['time_us']:.1f} us, {same['price']:.2f} times the winner's time")
    if record.best_kernel:
        _print_section("without that library", record.best_kernel.config)
    tell("runners-up:" if record.runners_up else "runners-up: none")
    for number, runner_up in enumerate(record.runners_up, 2):
        tell(f"  {number}. {json.dumps(runner_up)}")
    for variant, artifact in record.artifacts.items():
        about = {"sha256": artifact.sha256, "size": size(artifact.size), "symbol": artifact.symbol}
        if artifact.compiler:
            about["compiler"] = artifact.compiler
        _print_section(f"artifact {variant}", {**about, **artifact.resources})
    tell("in the layers:")
    for place in document["places"]:
        time_us = "" if place["time_us"] is None else f" {place['time_us']:.1f} us"
        winner = f"{place['provenance'] or 'unreadable'}{time_us}"
        tell(f"  {place['layer']}: {place['toolkit']}: {winner}: {plain(place['detail'])}")
    for variant, text in document.get("sass", {}).items():
        tell(f"machine code of {variant}:", *text.expandtabs().splitlines())


def _print_section(name: str, values: Mapping[str, Any] | None) -> None:
    tell(f"{name}:" if values else f"{name}: none")
    for key, value in (values or {}).items():
        if isinstance(value, list) and all(isinstance(item, dict) for item in value):
            tell(f"  {plain(key)}:")
            for item in value:
                tell(f"    {', '.join(f'{plain(field)} {plain(found)}' for field, found in item.items())}")
        else:
            tell(f"  {plain(key)}: {plain(value)}")
