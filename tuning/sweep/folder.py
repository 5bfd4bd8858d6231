"""The sweep folder: a journal of one tuning run that can be resumed, and carried to another machine.

sweep.json            target, model and problems; written once by the plan stage
compiled.jsonl        one line for each artifact that was tried, appended as it is finished
artifacts/<sha256>    cubins
measured.jsonl        one line for each candidate that was checked, and one more when it was timed
races.jsonl           one line for each problem whose timings are complete, with the GPU and driver
chosen.jsonl          one line for each problem whose kernel was chosen in the step of a token
gpu.jsonl             the GPUs and drivers that measured
skipped.jsonl         problems that could not be measured at all, with the reason; tried again by the next run
quarantine.jsonl      candidates that crashed or hung, with the reason; not tried again with what ran them then
runs.jsonl            who worked on the folder, on which stage and for how long
signatures.jsonl      signatures of lines of compiled.jsonl, for those who take the folder over
run.lock              held by the run at work
results.pack          records and artifacts of the winners, what the cache takes in

Lines that records are made of carry their writer's seal, and those of others do not count
(:mod:`tilekern.tuning.sweep.sealing`). Nothing in it names a path outside of it. The journals of two machines that
worked on copies of one folder become one folder's when they are appended to each other and the artifacts put together
(:mod:`tilekern.tuning.sweep.journal`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from tilekern.cache import CacheError, Corrupt, Missing
from tilekern.cache.files import make_folder, read_whole
from tilekern.cache.folders import files_inside, is_linked, unlink_below
from tilekern.cache.records import LARGEST_BLOB
from tilekern.cache.trust.policy import must_be_signed
from tilekern.cache.trust.signing import SigningKey
from tilekern.compile.toolchain import backends
from tilekern.errors import InputError
from tilekern.inference.rehearsal import TokenStep
from tilekern.spec import Problem
from tilekern.spec.targets import Target, from_description
from tilekern.tuning.sweep.candidates import ARTIFACT_DIGITS, Candidate, candidates
from tilekern.tuning.sweep.holding import Holder, Run, written
from tilekern.tuning.sweep.journal import Journal, Line
from tilekern.tuning.sweep.lines import is_copy, is_whole
from tilekern.tuning.sweep.plan import PLAN, Limits, Named, PlanFile
from tilekern.tuning.sweep.sealing import COMPILED, SEALED, Lines, require_own_folder, signatures_of

# The field of a line that says what it is about.
_KEYS = {
    "compiled": "key",
    "measured": "candidate",
    "quarantine": "candidate",
    "gpu": "gpu",
    "races": "race",
    "chosen": "chosen",
    "skipped": "skipped",
    "runs": "run",
    "signatures": "signed",
}
_ARTIFACTS, _CACHE = "artifacts", "cache"
RESULTS = "results.pack"
# All that a run writes, but for the lock and the results; the plan first.
CONTENTS = (PLAN, _ARTIFACTS, _CACHE, *(f"{name}.jsonl" for name in _KEYS))
# Files with such names are what a killed run was writing.
_UNFINISHED = ".new-"


def folder_in(root: Path, name: str) -> Path:
    """Return a sweep folder that a cache keeps, by its name.

    Raises:
        InputError: it is a link or stands behind one inside the cache.
    """
    place = PurePosixPath("sweeps", name)
    if is_linked(root, place):
        raise InputError(f"{root / place} is a link or behind one, and nothing is written through a link in a cache")
    return root / place


class ArtifactLost(InputError):  # noqa: N818 (the name says the state)
    """An artifact of a sweep is missing or damaged, or cannot be read."""


class Sweep:
    """A sweep folder on disk.

    Args:
        folder: the folder; it need not exist.
        foreign: whether lines count that neither this user wrote nor a trust root signed: to look at a folder, or to
            measure one that was carried here (:meth:`carried`). Nothing that is made of them is this user's own.
        finished: whether nothing more is compiled in it, so that candidates are those that its compile stage knew.
    """

    def __init__(self, folder: Path, *, foreign: bool = False, finished: bool = False) -> None:
        self.folder = folder
        self.is_own = not foreign
        self._is_finished = foreign or finished
        signatures = _journal(folder, "signatures")
        self._lines = {name: Lines(name, signatures, foreign=foreign) for name in _KEYS}
        self._journals = {name: _journal(folder, name, self._lines[name].count) for name in _KEYS if name != "runs"}
        self._runs = _journal(folder, "runs")
        self.holder = Holder(folder, self._runs)
        self._plan = PlanFile(folder)
        self._tidying = threading.Lock()
        # By all that they depend on: a space takes up to 0.1 s to enumerate.
        self._candidates: dict[Hashable, list[Candidate]] = {}

    @classmethod
    def carried(cls, folder: Path, *, signs: bool = False) -> Sweep:
        """Open a folder in order to measure what is in it, whoever compiled that.

        Under ``TILEKERN_TRUST=signed``, and for a run that signs, only what this user compiled or a trust root signed
        counts.

        Raises:
            CacheError: ``TILEKERN_TRUST`` is neither ``any`` nor ``signed``.
        """
        return cls(folder, foreign=not (must_be_signed() or signs))

    def own_part(self) -> Sweep:
        """Open the folder as the lines alone make it that this user wrote or a trust root signed."""
        part = Sweep(self.folder, finished=self._is_finished)
        part._candidates = self._candidates
        return part

    def require_own(self) -> None:
        """Refuse a folder that others can write (:func:`tilekern.tuning.sweep.sealing.require_own_folder`)."""
        require_own_folder(self.folder, CONTENTS)

    def begin(
        self, target: Target, model: str, problems: Sequence[Named], limits: Limits | None = None,
        launches: Mapping[Named, int] | None = None, invariant: Iterable[Named] = (),
        tokens: Sequence[TokenStep] = (),
    ) -> None:  # fmt: skip
        """Write the plan, in place of an older one for the same target; the journals stay.

        Args:
            target: the GPU to tune for.
            model: what the problems are of, for people.
            problems: the problems by kernel.
            limits: the configs to try of a problem; the whole space of one that is not named.
            launches: how often a step launches a problem, where that is known.
            invariant: the problems that need a kernel of one bit class.
            tokens: the engine's steps in which the kernels of a token are chosen.

        Raises:
            InputError: the folder holds another target's sweep, is held by another run, cannot be written, or can be
                written by others.
        """
        self.require_own()
        with written(self.folder):
            if self._plan.exists() and (before := self._plan.read().target)["key"] != target.key:
                raise InputError(f"{self.folder} holds a sweep for {before['name']}, not {target.name}; give another")
            make_folder(self.folder / _ARTIFACTS)
            with self.holder.locked():
                self._plan.write(target, model, problems, limits or {}, launches, invariant, tokens)

    def again(self, folder: Path) -> Sweep:
        """Begin a sweep of the same plan in another folder.

        Raises:
            InputError: as of :meth:`begin`.
        """
        sweep = Sweep(folder)
        sweep.begin(
            self.target, self.model, self.problems(), self.limits, self.launches, self.invariant, self.tokens
        )  # fmt: skip
        return sweep

    @property
    def target(self) -> Target:
        """Return the sweep's target."""
        return from_description(self._plan.read().target)

    @property
    def cache(self) -> Path:
        """Return the sweep's own cache, in which composites look kernels up while they are measured."""
        return self.folder / _CACHE

    @property
    def model(self) -> str:
        """Return the name of the planned model."""
        return self._plan.read().model

    def problems(self) -> list[tuple[str, Problem]]:
        """Return the planned problems; raises as :meth:`tilekern.tuning.sweep.plan.PlanFile.problems`."""
        return self._plan.problems()

    @property
    def limits(self) -> Limits:
        """Return the configs to try of the problems that the plan limits."""
        return self._plan.read().limits

    @property
    def launches(self) -> Mapping[Named, int]:
        """Return how often a step launches each problem, as far as known."""
        return self._plan.read().launches

    @property
    def invariant(self) -> frozenset[Named]:
        """Return the problems that need a kernel of one bit class beside the fastest; none without a plan."""
        return self._plan.read().invariant if self._plan.exists() else frozenset()

    @property
    def tokens(self) -> tuple[TokenStep, ...]:
        """Return the engine's steps in which the kernels of a token are chosen."""
        return self._plan.read().tokens

    def candidates(self, kernel: str, problem: Problem) -> list[Candidate]:
        """Return the candidates of a problem, as the plan limits them."""
        plan = self._plan.read()
        limit, without = plan.limits.get((kernel, problem)), self.missing_backends
        for_bits = (kernel, problem) in plan.invariant
        asked = (kernel, problem, plan.target["key"], None if limit is None else tuple(limit), without, for_bits)
        if asked not in self._candidates:
            found = candidates(kernel, problem, self.target, limit, without=without, for_bits=for_bits)
            self._candidates[asked] = found
        return list(self._candidates[asked])

    @property
    def missing_backends(self) -> frozenset[str]:
        """The optional backends whose configs are not candidates: neither installed here nor where it was compiled.

        A reader of a folder whose compile stage has ended goes by what that stage had: a package that is installed
        later adds nothing to a finished sweep.
        """
        optional = [backend for backend in backends() if backend.is_optional]
        ended = [run for run in self.runs() if run["stage"] == "compile"][-1:]
        if not (self._is_finished and ended and ended[0].get("ended")):
            optional = [backend for backend in optional if backend.compiler() is None]
        if not optional:
            return frozenset()
        used = {line["compiler"].partition(" ")[0] for line in self.compiled().values() if "compiler" in line}
        return frozenset(backend.name for backend in optional if used.isdisjoint(backend.needs))

    def compiled(self) -> dict[str, Line]:
        """Return the line of each artifact key: status ``ok``, ``failed`` or ``open``, with facts or the reason."""
        return self._journals["compiled"].latest()

    @property
    def others(self) -> int:
        """Return how many lines about artifacts neither this user wrote nor a trust root signed."""
        return self._lines[COMPILED].others

    @property
    def is_of_others(self) -> bool:
        """Return whether lines that records are made of are neither this user's nor signed, whether they count or not.

        Such are all that another machine measured, since only artifacts are signed.
        """
        for name in SEALED:
            self._journals[name].latest()
        return any(self._lines[name].others for name in SEALED)

    def sign(self, key: SigningKey) -> int:
        """Sign the lines about artifacts for those who take the folder over; return their number.

        Raises:
            InputError: the folder cannot be written, or lines of others count in it.
        """
        if not self.is_own:
            raise InputError(f"{self.folder} is not signed: artifacts in it that others compiled count here")
        found = signatures_of(self.compiled().values(), key)
        self.note("signatures", *found)
        return len(found)

    def lost(self) -> set[str]:
        """Return the keys of compiled artifacts whose files are gone."""
        folder = self.folder / _ARTIFACTS
        there = set(os.listdir(folder)) if folder.is_dir() else set()
        return {key for key, line in self.compiled().items() if "sha256" in line and line["sha256"] not in there}

    def races(self) -> dict[str, Line]:
        """Return each race that ended, the newest last."""
        return self._journals["races"].latest()

    def chosen(self) -> dict[str, Line]:
        """Return what the step of a token chose for each problem, by ``kernel|problem``; a later race ends it.

        Further lines say which problems a step does not launch (:func:`tilekern.tuning.sweep.lines.not_in`).
        """
        races = {f"{race['kernel']}|{race['problem']}": name for name, race in self.races().items()}
        lines = self._journals["chosen"].latest()
        return {key: line for key, line in lines.items() if races.get(line["of"]) == line["race"]}

    def measured(self) -> dict[str, Line]:
        """The check and the time of each candidate, as far as known.

        A line about other machine code than the artifact's of today is left out, and one that has lost its check; of a
        race that did not come to its end the timing is: what it left out would be judged by another race's clock.
        """
        races = self.races()
        codes = {key[:ARTIFACT_DIGITS]: line.get("code_sha256") for key, line in self.compiled().items()}
        found = {}
        for key, line in self._journals["measured"].latest().items():
            code = line.get("code_sha256")
            if "check" not in line and not is_copy(key):
                continue
            if code is not None and codes.get(_artifact_of(key), code) != code:
                continue
            ended = line.get("race") is None or line["race"] in races
            found[key] = line if ended else {name: line[name] for name in line if name not in ("race", "timing")}
        return found

    def quarantined(self) -> dict[str, str]:
        """Return the reason for each candidate that crashed or hung with today's, or an unknown, toolkit and driver.

        The toolkit is that of the candidate's artifact, the driver that of the GPU that measured last. A library's call
        has no artifact: another torch, cuDNN or cuBLAS than the line names frees it.
        """
        toolkits = {key[:ARTIFACT_DIGITS]: _toolkit_key(line) for key, line in self.compiled().items()}
        gpu = self.gpu()
        found = {}
        for key, line in self._journals["quarantine"].latest().items():
            made_by = toolkits.get(_artifact_of(key))
            names = {"driver": line.get("driver"), **(line.get("libraries") or {})}
            same_gpu = all(_agree(value, gpu.get(name)) for name, value in names.items())
            if same_gpu and _agree(_toolkit_key(line), made_by):
                found[key] = line["reason"]
        return found

    def skipped(self) -> dict[str, str]:
        """Return the reason for each problem that could not be measured and was not since, by ``kernel|problem``."""
        raced = {f"{race['kernel']}|{race['problem']}" for race in self.races().values()}
        lines = self._journals["skipped"].latest()
        return {key: line["reason"] for key, line in lines.items() if key not in raced}

    def gpu(self) -> dict[str, Any]:
        """Return the GPU, driver and torch of the last measure stage; empty before one."""
        return next(reversed(self._journals["gpu"].latest().values()), {})

    def runs(self) -> list[Line]:
        """Return the runs that worked on the folder, each with its ``stage`` and ``seconds``."""
        return list(self._runs.latest().values())

    def note(self, journal: str, *lines: Mapping[str, Any]) -> None:
        """Append lines to a journal in one write.

        Raises:
            InputError: the folder cannot be written.
        """
        with written(self.folder):
            self._journals[journal].append(*map(self._lines[journal].sealed, lines))
            self.holder.beat()

    @contextlib.contextmanager
    def running(self, stage: str) -> Iterator[Run]:
        """Work on a stage: keep other runs out, count its time, and sync its lines at the end.

        Two stages of one process may be at work at once.

        Raises:
            InputError: another run holds the folder, it cannot be written, or others can write it.
        """
        self.require_own()
        with self.holder.running(stage) as run:
            with self._tidying:
                if self.holder.stages == 1:  # another one may be writing
                    self._tidy()
            try:
                yield run
            finally:
                for journal in self._journals.values():
                    journal.sync()

    def _tidy(self) -> None:
        artifacts = self.folder / _ARTIFACTS
        with written(artifacts):
            make_folder(artifacts)  # a folder that was carried may have come without it
            for path in files_inside(self.folder, _ARTIFACTS):
                if path.name.startswith(_UNFINISHED):
                    unlink_below(self.folder, path)

    def store(self, cubin: bytes) -> str:
        """Keep a cubin; return its sha256.

        Raises:
            InputError: the folder cannot be written.
        """
        name = hashlib.sha256(cubin).hexdigest()
        path = self.folder / _ARTIFACTS / name
        if not path.exists():
            with written(self.folder):
                _write(path, cubin)
        return name

    def cubin(self, sha256: str) -> bytes:
        """Return the bytes of an artifact; a damaged one is removed, so that it is compiled again.

        Raises:
            ArtifactLost: it is missing or damaged, or cannot be read.
        """
        path = self.folder / _ARTIFACTS / sha256
        try:
            found, _ = read_whole(path, LARGEST_BLOB)
        except Missing:
            raise ArtifactLost(f"{path} is missing; compile it again") from None
        except Corrupt:
            found = b""
        except CacheError as error:
            raise ArtifactLost(str(error)) from None
        if hashlib.sha256(found).hexdigest() != sha256:
            with contextlib.suppress(OSError):
                unlink_below(self.folder, PurePosixPath(_ARTIFACTS, sha256))
            raise ArtifactLost(f"{path} is damaged; compile it again")
        return found


def _journal(folder: Path, name: str, counts: Callable[[Line], bool] = lambda _line: True) -> Journal:
    merge = {"merge": _with_time} if name == "measured" else {}
    path = folder / f"{name}.jsonl"
    return Journal(path, _KEYS[name], is_whole=lambda line: is_whole(name, line) and counts(line), **merge)


def _with_time(before: Line, line: Line) -> Line:
    """Keep the time of a candidate whose check is noted again, if the code is the same."""
    same = before.get("code_sha256") == line.get("code_sha256")
    return before | line if same else line


def _artifact_of(candidate_key: str) -> str:
    return candidate_key.rpartition("|")[2]


def _toolkit_key(line: Line) -> Any:
    found = line.get("toolkit")
    return found.get("key") if isinstance(found, dict) else found


def _agree(one: Any, other: Any) -> bool:
    return one is None or other is None or one == other


def _write(path: Path, content: bytes) -> None:
    """Write a file in one step; it is not synced, since a lost file is compiled again."""
    temporary = path.with_name(f"{_UNFINISHED}{secrets.token_hex(8)}")
    try:
        temporary.touch(0o644)
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
