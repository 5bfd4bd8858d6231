"""Turns a sweep's journal into records: the winner of each problem, with its generic variant, in packs and a cache."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tilekern.cache import PACK_SUFFIX, Artifact, BestKernel, Hit, Installed, Record, Store, install_pack, write_pack
from tilekern.cache.trust.signing import SigningKey
from tilekern.errors import InputError
from tilekern.kernels import spec_named
from tilekern.runtime.records import launch_in, record_of
from tilekern.spec import ALIGNED, GENERIC, INVARIANT, Problem
from tilekern.spec.bits import agree, joined, sizes_of_class
from tilekern.spec.targets import Target
from tilekern.tuning.measure.stage import identity
from tilekern.tuning.plan.beside import is_served_beside
from tilekern.tuning.plan.steps import Planned
from tilekern.tuning.predict.ranking import Prediction, ranking
from tilekern.tuning.predict.roofline import Roofline, roofline
from tilekern.tuning.strategies.lineup import ranked
from tilekern.tuning.sweep.candidates import LIBRARY_LINE, Candidate, candidate
from tilekern.tuning.sweep.folder import ArtifactLost, Sweep
from tilekern.tuning.sweep.journal import Line
from tilekern.tuning.sweep.lines import copy_key
from tilekern.tuning.sweep.plan import Named

MOST_RUNNERS_UP = 3
# In a record's measurement: the step of a token in which its kernel was chosen.
IN_STEP = "in_step"
# A class may cost training so much more than the best one, if more of decoding is of it: a problem of decoding without
# a kernel of the class is left to training's, which takes twice as long and more.
_NEAR = 1.5


@dataclass(frozen=True)
class Winner:
    """Outcome for one problem, as tables and ``--json`` show it.

    ``time_us`` is measured or predicted, as ``provenance`` says; ``roofline`` is the least time that it could be, with
    the copy of the same race where one was timed; ``gain`` is the default config's time over the winner's, by the same
    means.
    """

    kernel: str
    problem: Problem
    record: Record
    time_us: float
    roofline: Roofline
    gain: float

    @property
    def price(self) -> float | None:
        """The time of the invariant kernel over the winner's; None if the problem has no bit class."""
        same = (self.record.measurement or {}).get(INVARIANT)
        return None if same is None else same["median_us"] / self.time_us

    @property
    def in_step(self) -> dict[str, Any] | None:
        """The step of a token in which its kernel was chosen; None if it is the fastest in a row."""
        best = self.record.best_kernel
        found = best.measurement if best else self.record.measurement
        return (found or {}).get(IN_STEP)

    @property
    def share(self) -> float:
        """The part of the roofline that it reaches: the roofline's time over ``time_us``."""
        return 1e6 * self.roofline.seconds / self.time_us

    def as_json(self) -> dict[str, Any]:
        """Return the winner as ``--json`` prints it."""
        record = self.record
        return {
            "kernel": self.kernel,
            "problem": record.problem,
            "config": record.config,
            "provenance": record.provenance,
            "candidates": record.candidates,
            "failed": record.failed,
            "time_us": round(self.time_us, 3),
            "share_of_roofline": round(self.share, 4),
            "bound": self.roofline.bound,
            "gain_over_default": round(self.gain, 4),
            "invariant": (record.measurement or {}).get(INVARIANT),
            IN_STEP: self.in_step,
        }


def winners(
    sweep: Sweep, toolkit: dict[str, str], *, only_measured: bool = False, lost: dict[Named, str] | None = None
) -> Iterator[tuple[Winner, dict[str, bytes]]]:  # fmt: skip
    """Yield the winner of each problem for which a candidate compiled and passed, with the bytes of its artifacts.

    Args:
        sweep: the sweep; its journals are read once.
        toolkit: what to name as the toolkit where no artifact was compiled.
        only_measured: whether to pass over problems without a measurement, which have a predicted winner.
        lost: gets the reason for each problem that is passed over because an artifact of its winner is lost.
    """
    target, known = sweep.target, Known.of(sweep)
    invariant, _ = invariant_winners(sweep, known)
    for kernel, problem in sweep.problems():
        found = sweep.candidates(kernel, problem)
        generic = found[-1]
        if not known.may_win(generic):
            continue
        chosen = _measured_winner(known, found, target)
        if chosen is None and not only_measured:
            chosen = _predicted_winner(sweep, known, kernel, problem, target)
        if chosen is None:
            continue
        item, facts = chosen
        kernel_of = _best_kernel(sweep, known, found, target) if item.is_library else None
        runs, best_kernel = kernel_of or (item, None)
        variants = {} if runs.is_library else {ALIGNED: runs, GENERIC: generic}
        if same := invariant.get((kernel, problem)):
            facts["measurement"][INVARIANT] = known.invariant(same, generic)
            if not same.is_library and same.config != runs.config:
                variants[INVARIANT] = same
        try:
            artifacts = {name: artifact_in(sweep, one, known.compiled[one.artifact]) for name, one in variants.items()}
            blobs = {artifact.sha256: sweep.cubin(artifact.sha256) for artifact in artifacts.values()}
        except ArtifactLost as error:
            if lost is not None:
                lost[kernel, problem] = str(error)
            continue
        # What a library runs belongs to the toolkit of its rivals.
        made_by = (known.line(item) or known.line(generic)).get("toolkit", toolkit)
        record = record_of(
            item.spec, problem, item.config, target, made_by, artifacts, facts.pop("provenance"),
            best_kernel=best_kernel, candidates=len(found), failed=sum(known.has_failed(c) for c in found), **facts,
        )  # fmt: skip
        yield _winner(item, record, target), blobs


def of_others(
    sweep: Sweep, toolkit: dict[str, str], found: Sequence[tuple[Winner, dict[str, bytes]]]
) -> set[Named]:  # fmt: skip
    """Return the problems whose records rest on lines that neither this user wrote nor a trust root signed.

    A record is this user's own if their lines alone give the same one, so one line of others costs no other record.

    Args:
        sweep: the sweep.
        toolkit: as of :func:`winners`.
        found: what :func:`winners` yielded.
    """
    if sweep.is_own or not sweep.is_of_others:
        return set()
    own = {(winner.kernel, winner.problem): winner.record for winner, _ in winners(sweep.own_part(), toolkit)}

    def is_own(winner: Winner) -> bool:
        record = own.get((winner.kernel, winner.problem))
        return record is not None and msgspec.structs.replace(record, created=winner.record.created) == winner.record

    return {(winner.kernel, winner.problem) for winner, _ in found if not is_own(winner)}


def with_invariant(
    found: Iterable[tuple[Winner, dict[str, bytes]]], served: Callable[[Named], Hit | None]
) -> Iterator[tuple[Winner, dict[str, bytes]]]:  # fmt: skip
    """Yield measured winners with the invariant kernels of the records that serve their problems now.

    The class of a kernel holds as long as its source and the toolkit are the same, whatever is faster, so a sweep that
    asks for no classes takes none away. A record of another toolkit stays beside the new one, and serves the mode.

    Args:
        found: winners with the bytes of their artifacts; one that has an invariant kernel is yielded as it is.
        served: returns the record that a lookup of a problem finds.
    """
    for winner, blobs in found:
        record, hit = winner.record, None
        if record.provenance == "measured" and INVARIANT not in (record.measurement or {}):
            hit = served((winner.kernel, winner.problem))
        if hit is not None and hit.exact_target and hit.exact_bucket and not hit.lost:
            facts = (hit.record.measurement or {}).get(INVARIANT)
            if facts is not None and _same_code(hit.record, record):
                yield _classed(winner, blobs, hit, facts)
                continue
        yield winner, blobs


def _same_code(one: Record, other: Record) -> bool:
    """Return whether artifacts of two records with one config are the same."""
    return (one.source_digest, one.toolkit["key"]) == (other.source_digest, other.toolkit["key"])


def _classed(
    winner: Winner, blobs: dict[str, bytes], hit: Hit, facts: Mapping[str, Any]
) -> tuple[Winner, dict[str, bytes]]:  # fmt: skip
    """Return a winner with a record's invariant kernel, and its artifact unless it is the winner's or a library's."""
    record, variants = winner.record, hit.record.artifacts
    artifacts = dict(record.artifacts)
    runs = next((name for name in (INVARIANT, ALIGNED) if _runs(variants, name, facts)), None)
    if runs is not None and not _runs(artifacts, ALIGNED, facts):
        artifacts[INVARIANT] = variants[runs]
        blobs = blobs | {variants[runs].sha256: hit.load(runs)}
    measurement = (record.measurement or {}) | {INVARIANT: facts}
    changed = msgspec.structs.replace(record, measurement=measurement, artifacts=artifacts)
    return dataclasses.replace(winner, record=changed), blobs


def _runs(artifacts: Mapping[str, Artifact], variant: str, facts: Mapping[str, Any]) -> bool:
    """Return whether a variant runs the config of an invariant kernel."""
    return variant in artifacts and artifacts[variant].config == facts["config"]


@dataclass(frozen=True)
class Known:
    """The contents of the journals, read once."""

    compiled: dict[str, Line]
    measured: dict[str, Line]
    quarantined: dict[str, str]
    races: dict[tuple[str, str], Line]
    gpu: dict[str, Any]
    chosen: dict[str, Line]

    @classmethod
    def of(cls, sweep: Sweep) -> Known:
        """Read all journals of a sweep; the newest race of a problem counts."""
        races = {(race["kernel"], race["problem"]): race for race in sweep.races().values()}
        return cls(sweep.compiled(), sweep.measured(), sweep.quarantined(), races, sweep.gpu(), sweep.chosen())

    def line(self, item: Candidate) -> Line:
        """Return the journal's line of a candidate's artifact, or an empty one."""
        return {} if item.is_library else self.compiled.get(item.artifact, {})

    def is_wrong(self, item: Candidate) -> bool:
        """Return whether a candidate failed its check."""
        return not self.measured.get(item.key, {}).get("check", {}).get("passed", True)

    def is_confirmed(self, item: Candidate) -> bool:
        """Return whether a candidate passed the whole battery of checks, as each winner must."""
        return bool(self.measured[item.key]["check"].get("cases"))

    def may_win(self, item: Candidate) -> bool:
        """Return whether a candidate compiled or needs no compiler, and is neither wrong nor in quarantine."""
        is_usable = item.is_library or self.line(item).get("status") == "ok"
        return is_usable and not self.is_wrong(item) and item.key not in self.quarantined

    def bits(self, item: Candidate) -> str:
        """Return a candidate's bit class; empty if a row's bits depend on others, or it is not known."""
        return str(self.measured.get(item.key, {}).get("check", {}).get("bits") or "")

    def why_classless(self, timings: Collection[Candidate]) -> str:
        """Return why none of the candidates that were timed has a bit class, for people."""
        if not timings:
            return "it was not measured"
        if all("bits" not in self.measured[item.key]["check"] for item in timings):
            return "no rows of its results can be compared"
        return "a row's bits depend on the rows around it, whichever kernel runs"

    def invariant(self, item: Candidate, generic: Candidate) -> dict[str, Any]:
        """Return the facts of an invariant winner, and whether the generic variant is of its class."""
        return {
            "config": dict(item.config),
            "bits": self.bits(item),
            "median_us": self.measured[item.key]["timing"]["median_us"],
            "generic": bool(self.bits(generic)) and agree(self.bits(generic), self.bits(item)),
        }

    def has_failed(self, item: Candidate) -> bool:
        """Return whether a candidate did not compile, crashed, hung or was wrong."""
        failed = self.line(item).get("status") == "failed"
        return failed or self.is_wrong(item) or item.key in self.quarantined

    def why_untimed(self, item: Candidate) -> str:
        """Return why a candidate has no timing, for people."""
        if item.key in self.quarantined:
            return self.quarantined[item.key]
        if self.is_wrong(item):
            return str(self.measured[item.key]["check"].get("reason", "it failed its check"))
        return str(self.line(item).get("reason", "it was not timed"))

    def best_kernel(self, timings: Mapping[Candidate, Mapping[str, Any]]) -> Candidate | None:
        """Return the kernel that runs of those of one race, without a library: what the step of a token chose, or else
        the fastest that is confirmed; None if there is none.
        """
        able = [item for item in ranked(timings) if not item.is_library and self.is_confirmed(item)]
        line = self.chosen.get(f"{able[0].kernel}|{able[0].problem.key}", {}) if able else {}
        return next((item for item in able if item.key == line.get("candidate")), able[0] if able else None)

    def in_step(self, item: Candidate) -> dict[str, Any]:
        """Return what a record says of a kernel that the step of a token chose; nothing of another."""
        line = self.chosen.get(f"{item.kernel}|{item.problem.key}", {})
        return {IN_STEP: line["step"]} if line.get("candidate") == item.key else {}

    def timings(self, found: list[Candidate]) -> dict[Candidate, dict[str, Any]]:
        """Return the timings of the newest race; only candidates that raced together compare."""
        race = self.races.get((found[0].kernel, found[0].problem.key), {}).get("race")
        lines = {item: self.measured.get(item.key, {}) for item in found if self.may_win(item)}
        return {item: line["timing"] for item, line in lines.items() if "timing" in line and line.get("race") == race}


def artifact_in(sweep: Sweep, item: Candidate, line: dict[str, Any]) -> Artifact:
    """Return the entry in a record of a candidate that compiled, by the journal's line of its artifact."""
    return Artifact(
        sha256=line["sha256"],
        size=len(sweep.cubin(line["sha256"])),
        symbol=line["symbol"],
        config=dict(item.config),
        assumptions=line["assumptions"],
        resources=line["resources"],
        launch=launch_in(line.get("launch")),
        compiler=line.get("compiler"),
        bytecode=line.get("bytecode"),
    )


def _measured_winner(known: Known, found: list[Candidate], target: Target) -> tuple[Candidate, dict[str, Any]] | None:
    timings = known.timings(found)
    if not timings:
        return None
    order = ranked(timings)
    best = next((item for item in order if known.is_confirmed(item)), order[0])
    if not best.is_library:
        best = known.best_kernel(timings) or best
    others = [item for item in order if item is not best]
    race = known.races.get((best.kernel, best.problem.key), {})
    measurement = timings[best] | race.get("gpu", known.gpu) | known.in_step(best)
    if race.get("followers") and best.spec.follower:
        measurement["with"] = best.spec.follower.kernel
    if default := timing_of_default(timings, known.compiled, target):
        measurement["default_us"] = default["median_us"]
    if copied := known.measured.get(copy_key(best.kernel, best.problem), {}).get("timing"):
        measurement["copy_us"] = copied["median_us"]
    return best, {
        "provenance": "measured",
        "measurement": measurement,
        "check": known.measured[best.key]["check"],
        "runners_up": [
            {"config": dict(item.config), "median_us": timings[item]["median_us"]} for item in others[:MOST_RUNNERS_UP]
        ],
    }


def invariant_winners(sweep: Sweep, known: Known) -> tuple[dict[Named, Candidate], dict[Named, str]]:
    """Return the fastest candidate of one bit class for each problem, the same class for all buckets of a problem.

    Of the classes that every bucket has, it is about the one whose times are at most the smallest factor above the
    winners'. A problem of decoding takes part if it can: where it has no kernel of the class, that of training serves.
    Only the problems that the plan names take part, or all if it names none, and of them those that have a candidate
    with a class. The second dictionary says of the others, and where no class is common to all buckets, why.
    """
    buckets: dict[Any, dict[Named, list[tuple[Candidate, float]]]] = {}
    found: dict[Named, Candidate] = {}
    reasons: dict[Named, str] = {}
    for kernel, problem in (named for named in sweep.problems() if not sweep.invariant or named in sweep.invariant):
        timings = known.timings(sweep.candidates(kernel, problem))
        able = [item for item in ranked(timings) if known.is_confirmed(item) and known.bits(item)]
        fastest = min((timing["median_us"] for timing in timings.values()), default=1.0)
        if not able:
            reasons[kernel, problem] = known.why_classless(timings)
            continue
        of_problem = buckets.setdefault(sizes_of_class(spec_named(kernel), problem), {})
        of_problem[kernel, problem] = [(item, timings[item]["median_us"] / fastest) for item in able]
    for (serving, *_), by_problem in buckets.items():
        # Those of the spec that serves all of them come first, and the others follow where they can.
        named = sorted(by_problem, key=lambda one: one[0] != serving)
        needed = sum(kernel == serving for kernel, _ in named)
        weighty = [kernel == serving and not is_served_beside(kernel, problem) for kernel, problem in named]
        chosen = _one_class(known, [by_problem[one] for one in named], needed, weighty)
        for one, item in zip(named, chosen, strict=True):
            if item is not None:
                found[one] = item
            elif one[0] == serving or not needed:
                reasons[one] = "no class is common to all its sizes"
            else:
                reasons[one] = f"no kernel has the bits of {serving}, which serves in its place"
    return found, reasons


def _one_class(
    known: Known, by_problem: Sequence[Sequence[tuple[Candidate, float]]], needed: int, weighty: Sequence[bool]
) -> list[Candidate | None]:
    """Return a candidate of each problem, all of classes that agree, for problems of training and then of decoding.

    It is the class whose largest factor over training's weighty problems is the least; of those within :data:`_NEAR` of
    it, the one that serves the most problems of decoding, and then the one whose largest factor is the least.

    Args:
        known: the journals.
        by_problem: the able candidates of each problem and their factors, the fastest first.
        needed: so many problems, the first ones, have a candidate, or no problem has; if 0, all have or none.
        weighty: whether each is of training and no kernel for decoding may serve it; if none is, all of training are.
    """
    needed = needed or len(by_problem)
    found: list[tuple[float, int, float, list[Candidate | None]]] = []
    # Classes with more digests first: each stands for those that agree with it.
    classes = sorted({known.bits(item) for able in by_problem for item, _ in able}, key=lambda bits: (-len(bits), bits))
    for begun in classes:
        bits = begun
        chosen: list[tuple[Candidate, float] | None] = []
        for able in by_problem:
            one = next((pair for pair in able if agree(known.bits(pair[0]), bits)), None)
            if one is None and len(chosen) < needed:
                break
            chosen.append(one)
            bits = bits if one is None else joined(bits, known.bits(one[0]))
        else:
            heavy = [pair for pair, counts in zip(chosen, weighty, strict=True) if counts] or chosen[:needed]
            of_training, of_all = (max(pair[1] for pair in pairs if pair is not None) for pairs in (heavy, chosen))
            found.append((of_training, chosen.count(None), of_all, [pair and pair[0] for pair in chosen]))
    least = min((of_training for of_training, *_ in found), default=0.0)
    near = [one for one in found if one[0] <= _NEAR * least]
    return min(near, key=lambda one: one[1:3])[3] if near else [None] * len(by_problem)


def _best_kernel(
    sweep: Sweep, known: Known, found: list[Candidate], target: Target
) -> tuple[Candidate, BestKernel] | None:
    """Return the best candidate that is a kernel: by the newest race (:meth:`Known.best_kernel`), or as predicted."""
    timings = known.timings(found)
    if item := known.best_kernel(timings):
        check = known.measured[item.key]["check"]
        return item, BestKernel(dict(item.config), timings[item] | known.in_step(item), check)
    if timings:
        return None
    predicted = ranking(sweep, found[0].kernel, found[0].problem, target)
    able = (item for item, _ in predicted if not item.is_library and known.may_win(item))
    return next(((item, BestKernel(dict(item.config), None, None)) for item in able), None)


def timing_of_default(
    timings: Mapping[Candidate, Mapping[str, Any]], compiled: Mapping[str, Line], target: Target
) -> Mapping[str, Any] | None:
    """Return the timing of the default config, or of a candidate with the same machine code."""
    first = next(iter(timings))
    default = candidate(first.kernel, first.problem, first.spec.default(first.problem, target), ALIGNED, target)
    line = LIBRARY_LINE if default.is_library else compiled.get(default.artifact, {})
    if line.get("status") != "ok":
        return None
    does = identity(default, line, target)
    same = (item for item in timings if identity(item, compiled.get(item.artifact, LIBRARY_LINE), target) == does)
    return next((timings[item] for item in same), None)


def _predicted_winner(
    sweep: Sweep, known: Known, kernel: str, problem: Problem, target: Target
) -> tuple[Candidate, dict[str, Any]] | None:
    ranked = [(item, said) for item, said in ranking(sweep, kernel, problem, target) if known.may_win(item)]
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
    copy_s = 1e-6 * facts["copy_us"] if "copy_us" in facts else None
    limit = roofline(item.kernel, item.problem, target, copy_s)
    return Winner(item.kernel, item.problem, record, time_us, limit, facts.get("default_us", time_us) / time_us)


def why_not(sweep: Sweep, kernel: str, problem: Problem) -> str:
    """Return why a problem has no winner."""
    if reason := sweep.skipped().get(f"{kernel}|{problem.key}"):
        return reason
    compiled, measured, quarantined = sweep.compiled(), sweep.measured(), sweep.quarantined()
    items = sweep.candidates(kernel, problem)
    if not any(item.is_library or item.artifact in compiled for item in items):
        return f"nothing of it is compiled; run --stages compile,measure --sweep {shlex.quote(str(sweep.folder))}"
    # The generic variant first, without which there is no record.
    reasons = (_why_out(item, compiled.get(item.artifact, {}), measured, quarantined) for item in items[::-1])
    return next(filter(None, reasons), "no candidate was timed")


def is_open(sweep: Sweep, kernel: str, problem: Problem) -> bool:
    """Return whether a passing cause kept a candidate from being compiled, so that the next run may do it."""
    compiled = sweep.compiled()
    return any(compiled.get(item.artifact, {}).get("status") == "open" for item in sweep.candidates(kernel, problem))


def _why_out(
    item: Candidate, line: Mapping[str, Any], measured: Mapping[str, Line], quarantined: Mapping[str, str]
) -> str | None:
    """Return why a candidate cannot win, for people; None if it can."""
    check = measured.get(item.key, {}).get("check", {})
    if line.get("status") == "failed":
        return f"{item.config.key} did not compile: {line['reason']}"
    if line.get("status") == "open":
        return f"{item.config.key} could not be compiled now: {line['reason']}; run it again"
    if item.key in quarantined:
        return f"{item.config.key} is in quarantine: {quarantined[item.key]}"
    if not check.get("passed", True):
        return f"{item.config.key} failed its check: {check.get('reason', 'wrong')}"
    return None


def compiled_with(sweep: Sweep) -> dict[str, str] | None:
    """Return the toolkit of the artifact that a sweep compiled last; None if it has none."""
    tools = [line["toolkit"] for line in sweep.compiled().values() if "toolkit" in line]
    return tools[-1] if tools else None


def keep_winners(sweep: Sweep) -> None:
    """Write the winners so far into the sweep's own cache."""
    tools = compiled_with(sweep)
    if tools is not None:
        store = Store(sweep.cache)
        for winner, blobs in winners(sweep, tools):
            store.write(winner.record, blobs)


def publish(
    found: Sequence[tuple[Winner, dict[str, bytes]]], pack: Path, store: Store, others: Collection[Named] = (),
    key: SigningKey | None = None,
) -> Installed:  # fmt: skip
    """Write the winners' pack and install it in a cache.

    Args:
        found: the winners.
        pack: the file to write.
        store: the cache.
        others: the problems whose records are not this user's own (:func:`of_others`): the policy ``signed`` lets them
            in only if a trust root signed them.
        key: what to sign the records in the pack with, all of which must be this user's own.

    Returns:
        What became of the records.

    Raises:
        InputError: there is a key, and a record is not this user's own.
        tilekern.cache.CacheError: the pack or the cache cannot be written, or a record is not trusted.
    """
    if key and others:
        raise InputError(f"{pack} is not signed: its records are made of artifacts that others compiled")
    digests = write(found, pack, key)
    own = [winner.record.to_json().encode() for winner, _ in found if (winner.kernel, winner.problem) not in others]
    return install_pack(pack, store, own=[hashlib.sha256(text).hexdigest() for text in own], made_now=digests)


def write(
    found: Sequence[tuple[Winner, dict[str, bytes]]], pack: Path, key: SigningKey | None = None
) -> dict[str, bytes]:  # fmt: skip
    """Write winners into a pack; return the text of each record by its digest.

    Raises:
        tilekern.cache.CacheError: the pack cannot be written.
    """
    texts = [winner.record.to_json().encode() for winner, _ in found]
    digests = {hashlib.sha256(text).hexdigest(): text for text in texts}
    signatures = {digest: {key.public_key: key.sign(text)} for digest, text in digests.items()} if key else {}
    write_pack(pack, [(winner.record, blobs) for winner, blobs in found], signatures)
    return digests


def pack_paths(folder: Path, models: Sequence[Planned], target: Target) -> dict[Path, Planned]:
    """Return the plan of each model by the path of its pack, ``<model>-<gpu>.pack``.

    Raises:
        InputError: two models have one name, so that one pack would overwrite the other; or no model is named.
    """
    if not models:
        raise InputError("--packs writes a pack for each MODEL, and no MODEL is named")
    found: dict[Path, Planned] = {}
    for model in models:
        path = folder / f"{_file_name(model.name)}-{_file_name(target.name)}{PACK_SUFFIX}"
        if path in found:
            raise InputError(f"--packs: {found[path].name} and {model.name} would both be {path.name}; tune one by one")
        found[path] = model
    return found


def write_packs(
    paths: Mapping[Path, Planned], found: Sequence[tuple[Winner, dict[str, bytes]]], key: SigningKey | None = None
) -> dict[str, int]:
    """Write to each path the winners that its model asks for; return the number of records by path.

    Raises:
        tilekern.cache.CacheError: a pack cannot be written.
    """
    written = {}
    for path, model in paths.items():
        asked = set(model.problems)
        mine = [one for one in found if (one[0].kernel, one[0].problem) in asked]
        path.parent.mkdir(parents=True, exist_ok=True)
        write(mine, path, key)
        written[str(path)] = len(mine)
    return written


def _file_name(name: str) -> str:
    """Return a model's name as part of a file name: the last part of a path or a hub id."""
    last = name.replace("/config.json", "").removesuffix(".json").rpartition("/")[2]
    return re.sub(r"[^a-z0-9._-]+", "-", last.lower())
