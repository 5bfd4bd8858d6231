"""The command show: one record in full, the layers that have it, and which of them a lookup takes."""

from __future__ import annotations

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
from tilekern.cache_tools.shared.here import toolkit_key
from tilekern.cache_tools.shared.options import as_json, cache_dir, command, target, toolkit
from tilekern.cache_tools.shared.selection import Selection
from tilekern.cache_tools.shared.sources import Source, layers_of_a_lookup
from tilekern.cache_tools.shared.staleness import is_fresh, is_stale, today_of
from tilekern.cache_tools.shared.text import gain_of, plain, print_json, size, time_us_of
from tilekern.warning import tell

_TIMEOUT_S = 120
_NOT_REACHED = ("not_reached", "a lookup ends before it comes here")


@command
@click.argument("kernel", metavar="KERNEL")
@click.argument("problem_key", metavar="PROBLEM_KEY")
@target
@toolkit
@click.option("--sass", is_flag=True, help="Also the machine code of the artifacts (needs tilekern[inspect]).")
@click.option("--variant", help="With --sass: only of this artifact, such as aligned.")
@cache_dir
@as_json
def show(
    kernel: str, problem_key: str, store: Store, sass: bool, variant: str | None, as_json: bool, **filters: Any
) -> None:
    """Print one record in full; PROBLEM_KEY as `ls` prints it.

    Looks through all layers of a lookup, says which of them have the record, and which one a lookup takes.

    JSON: layer, path, size_bytes, stale, fresh, record (all fields as the cache keeps them), places[] {layer, path,
    target, toolkit, provenance, time_us, gain, created, outcome, detail}, wins, sass {variant: text}; all in
    docs/cache-json.md.
    """
    selection, problem = Selection(kernel=kernel, **filters), parse_problem_key(problem_key)
    found = _of_one_gpu(store, kernel, problem_key, selection)
    steps = _steps_of_a_lookup(store, kernel, problem, found)
    places = [_place(source, entry, steps) for source, entry in found]
    at = next((at for at, place in enumerate(places) if place["outcome"] == "taken"), 0)
    source, entry = found[at]
    if entry.record is None:
        raise CacheError(f"{entry.path} is unreadable: {entry.problem}")
    document = {
        "layer": source.name,
        "path": str(entry.path),
        "size_bytes": entry.size_bytes,
        "stale": is_stale(entry.record),
        "fresh": is_fresh(entry.record),
        "record": _fields(entry.record),
        "places": places,
        "wins": next((_winner(step) for step in steps.values() if step.outcome == "taken"), None),
    }
    if sass:
        document["sass"] = _sass(source, entry.record, variant)
    if as_json:
        print_json(document)
    else:
        _print(document, entry.record)


def _of_one_gpu(store: Store, kernel: str, key: str, selection: Selection) -> list[tuple[Source, Entry]]:
    """The problem's records in all layers, of the GPU that the first layer which has the problem has it for."""
    layers = [
        [
            (source, entry)
            for entry in source.entries(selection.where)
            if entry.address and entry.address[2:] == (kernel, key)
        ]
        for source in layers_of_a_lookup(store)
    ]
    first = next((found for found in layers if found), None)
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
    return [(s, entry) for found in layers for s, entry in found if entry.address and entry.address[0] == targets[0]]


def _steps_of_a_lookup(
    store: Store, kernel: str, problem: dict[str, Any], found: list[tuple[Source, Entry]]
) -> dict[tuple[str | None, str | None], Step]:
    """The steps of a lookup of the very problem on that GPU, by layer and toolkit."""
    record = next((entry.record for _, entry in found if entry.record), None)
    today = today_of(record) if record else None
    if record is None or today is None:
        return {}
    trace: list[Step] = []
    lookup(
        kernel, problem, bucketed=(), target_key=record.target["key"], arch=record.target["arch"],
        toolkit_key=toolkit_key(), source=today, layers=default_layers(store.root, looking=True),
        trace=trace,
    )  # fmt: skip
    tried = [step for step in trace if step.problem and step.target_key == record.target["key"]]
    return {(step.layer, step.toolkit_key): step for step in tried}


def _fields(record: Record) -> dict[str, Any]:
    """A record's fields as its file has them, less those about the file.

    Raises:
        CacheError: it is nested deeper than can be printed.
    """
    fields: dict[str, Any] = json.loads(record.to_json())
    return {name: value for name, value in fields.items() if name not in ("schema", "sha256")}


def _place(source: Source, entry: Entry, steps: Mapping[tuple[str | None, str | None], Step]) -> dict[str, Any]:
    assert entry.address is not None
    record, step = entry.record, steps.get((source.name, entry.address.toolkit_key))
    outcome, detail = (step.outcome, step.detail) if step else _NOT_REACHED
    if not steps:
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


def _winner(step: Step) -> dict[str, Any]:
    return {"layer": step.layer, "target": step.target_key, "toolkit": step.toolkit_key}


def _sass(source: Source, record: Record, variant: str | None) -> dict[str, str]:
    """The machine code of a variant, or of each where None is named."""
    if variant and variant not in record.artifacts:
        raise CacheError(f"{record.kernel} has the variants {', '.join(record.artifacts)}, not {variant!r}")
    chosen = [variant] if variant else list(record.artifacts)
    return {name: _disassembled(source.read_blob(record.artifacts[name].sha256)) for name in chosen}


def _disassembled(cubin: bytes) -> str:
    """The SASS of a cubin.

    Raises:
        CacheError: nvdisasm is not installed, or these bytes are none that it can read.
    """
    tool = _nvdisasm()
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
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
        raise CacheError(f"nvdisasm cannot read the artifact: {said[0]}")
    return done.stdout.decode(errors="replace")


def _nvdisasm() -> str:
    """The pip package's program first, then the one on PATH."""
    package = importlib.util.find_spec("nvidia")
    for root in package.submodule_search_locations or () if package else ():
        for path in sorted(Path(root).glob("cu*/bin/nvdisasm"), reverse=True):
            if os.access(path, os.X_OK):
                return str(path)
    found = shutil.which("nvdisasm")
    if found is None:
        raise CacheError("nvdisasm is not installed; install it with: pip install 'tilekern[inspect]'")
    return found


def _print(document: Mapping[str, Any], record: Record) -> None:
    tell(f"{record.kernel} {record.address.problem_key}")
    for name in (
        "module",
        "source_digest",
        "space_digest",
        "provenance",
        "candidates",
        "failed",
        "created",
        "created_by",
    ):
        tell(f"{name.replace('_', ' ')}: {plain(getattr(record, name))}")
    state = {True: "yes, the kernel's source has changed since", False: "no", None: "the source is not installed here"}
    tell(f"stale: {state[document['stale']]}")
    if document["fresh"] is False and not document["stale"]:
        tell(f"fresh: no, {NOT_FRESH}")
    tell(f"file: {document['path']}")
    for name in ("target", "toolkit", "config", "measurement", "prediction", "check"):
        _print_section(name, getattr(record, name))
    if record.best_kernel:
        _print_section("where that library is not", record.best_kernel.config)
    tell("runners-up:" if record.runners_up else "runners-up: none")
    for number, runner_up in enumerate(record.runners_up, 2):
        tell(f"  {number}. {json.dumps(runner_up)}")
    for variant, artifact in record.artifacts.items():
        facts = {"sha256": artifact.sha256, "size": size(artifact.size), "symbol": artifact.symbol}
        if artifact.compiler:
            facts["compiler"] = artifact.compiler
        _print_section(f"artifact {variant}", {**facts, **artifact.resources})
    tell("in the layers:")
    for place in document["places"]:
        time_us = "" if place["time_us"] is None else f" {place['time_us']:.1f} us"
        made = f"{place['provenance'] or 'unreadable'}{time_us}"
        tell(f"  {place['layer']}: {place['toolkit']}: {made}: {plain(place['detail'])}")
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
