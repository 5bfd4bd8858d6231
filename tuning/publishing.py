"""From a sweep's journal to records: the winner of each problem, with its generic variant, into a pack or a cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilekern.cache import Artifact, Record, Store, install_pack, write_pack
from tilekern.records import record_of
from tilekern.spec import ALIGNED, GENERIC, Problem
from tilekern.targets import Target
from tuning.predicting import Prediction, ranking
from tuning.sweep import Candidate, Sweep, candidates
from tuning.tasks import copy_key

MOST_RUNNERS_UP = 3


@dataclass(frozen=True)
class Winner:
    """The outcome for one problem, as tables and ``--json`` show it.

    ``time_us`` is measured or predicted, as ``provenance`` says; ``share`` is the part of the roofline that it
    reaches (the time of a copy of the bytes that must move, over ``time_us``); ``gain`` is the default config's time
    over the winner's, by the same means.
    """

    kernel: str
    problem: Problem
    record: Record
    time_us: float
    share: float
    gain: float


def winners(sweep: Sweep, toolkit: dict[str, str]) -> Iterator[tuple[Winner, dict[str, bytes]]]:
    """The winner of each problem for which anything compiled and passed, with the bytes of its artifacts."""
    target, compiled, measured = sweep.target, sweep.compiled(), sweep.measured()
    for kernel, problem in sweep.problems():
        found = candidates(kernel, problem, target)
        generic = found[-1]
        if not _usable(generic, compiled) or not _passed(measured.get(generic.key)):
            continue
        chosen = _measured_winner(sweep, found, compiled, measured) or _predicted_winner(sweep, kernel, problem, target)
        if chosen is None:
            continue
        item, facts = chosen
        variants = {} if item.is_library else {ALIGNED: item, GENERIC: generic}
        artifacts = {name: _artifact(sweep, one, compiled[one.artifact]) for name, one in variants.items()}
        blobs = {artifact.sha256: sweep.cubin(artifact.sha256) for artifact in artifacts.values()}
        failed = sum(
            compiled.get(c.artifact, {}).get("status") == "failed" or not _passed(measured.get(c.key)) for c in found
        )
        made_by = compiled.get(item.artifact, {}).get("toolkit", toolkit)
        record = record_of(
            item.spec, problem, item.config, target, made_by, artifacts, facts.pop("provenance"),
            candidates=len(found), failed=failed, measurement=facts.get("measurement"),
            prediction=facts.get("prediction"), check=facts.get("check"), runners_up=facts.get("runners_up", []),
        )  # fmt: skip
        yield _winner(item, record, target), blobs


def _usable(item: Candidate, compiled: dict[str, Any]) -> bool:
    """Whether a candidate compiled, or needs no compiler."""
    return item.is_library or compiled.get(item.artifact, {}).get("status") == "ok"


def _passed(line: dict[str, Any] | None) -> bool:
    """Whether nothing speaks against a candidate: not checked, or checked and right."""
    return line is None or line.get("check", {}).get("passed", True)


def _artifact(sweep: Sweep, item: Candidate, line: dict[str, Any]) -> Artifact:
    return Artifact(
        sha256=line["sha256"],
        size=len(sweep.cubin(line["sha256"])),
        symbol=line["symbol"],
        config=dict(item.config),
        assumptions=line["assumptions"],
        resources=line["resources"],
    )


def _measured_winner(
    sweep: Sweep, found: list[Candidate], compiled: dict[str, Any], measured: dict[str, Any]
) -> tuple[Candidate, dict[str, Any]] | None:
    timed = [
        (measured[c.key]["timing"]["median_us"], index, c)
        for index, c in enumerate(found)
        if "timing" in measured.get(c.key, {}) and _passed(measured[c.key]) and _usable(c, compiled)
    ]
    # Medians of few samples belong to candidates that were out of the race early.
    most = max((measured[c.key]["timing"]["samples"] for _, _, c in timed), default=0)
    finalists = sorted(t for t in timed if measured[t[2].key]["timing"]["samples"] == most)
    if not finalists:
        return None
    _, _, best = finalists[0]
    line = measured[best.key]
    measurement = dict(line["timing"]) | dict(sweep.gpu()) | {"samples": line["timing"]["samples"]}
    default = measured.get(found[0].key, {}).get("timing")
    copied = measured.get(copy_key(best.kernel, best.problem), {}).get("timing")
    if default:
        measurement["default_us"] = default["median_us"]
    if copied:
        measurement["copy_us"] = copied["median_us"]
    others = sorted(timed)[: MOST_RUNNERS_UP + 1]
    return best, {
        "provenance": "measured",
        "measurement": measurement,
        "check": line["check"],
        "runners_up": [{"config": dict(c.config), "median_us": us} for us, _, c in others if c is not best],
    }


def _predicted_winner(
    sweep: Sweep, kernel: str, problem: Problem, target: Target
) -> tuple[Candidate, dict[str, Any]] | None:
    ranked = ranking(sweep, kernel, problem, target)
    if not ranked:
        return None
    best, prediction = ranked[0]
    default = next((p for c, p in ranked if c.config == best.spec.default(problem, target)), prediction)
    return best, {
        "provenance": "predicted",
        "prediction": _prediction(prediction) | {"default_us": round(1e6 * default.seconds, 3)},
        "runners_up": [
            {"config": dict(c.config), "time_us": round(1e6 * p.seconds, 3)} for c, p in ranked[1 : MOST_RUNNERS_UP + 1]
        ],
    }


def _prediction(prediction: Prediction) -> dict[str, float | int]:
    return {
        "time_us": round(1e6 * prediction.seconds, 3),
        "resident_blocks": prediction.resident_blocks,
        "in_flight_bytes": round(prediction.in_flight_bytes),
    }


def _winner(item: Candidate, record: Record, target: Target) -> Winner:
    facts = record.measurement or record.prediction or {}
    time_us = facts["median_us"] if record.measurement else facts["time_us"]
    copy_us = facts.get("copy_us", item.spec.bytes_moved(item.problem) / target.copy_gbs / 1e3)
    return Winner(
        item.kernel, item.problem, record, time_us, copy_us / time_us, facts.get("default_us", time_us) / time_us
    )


def keep_winners(sweep: Sweep) -> None:
    """Put the winners so far into the cache of the sweep's own."""
    tools = next((line["toolkit"] for line in sweep.compiled().values() if "toolkit" in line), None)
    if tools is not None:
        store = Store(sweep.cache)
        for winner, blobs in winners(sweep, tools):
            store.write(winner.record, blobs)


def publish(found: list[tuple[Winner, dict[str, bytes]]], pack: Path, store: Store | None) -> None:
    """Write the winners' pack and, where a store is given, take it into that cache.

    Raises:
        tilekern.cache.CacheError: the pack or the cache cannot be written.
    """
    write_pack(pack, [(winner.record, blobs) for winner, blobs in found])
    if store is not None:
        install_pack(pack, store)
