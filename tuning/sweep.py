"""The sweep folder: a journal of one tuning run that can be resumed, and carried to another machine.

sweep.json            target, model and problems; written once by the plan stage
compiled.jsonl        one line for each artifact that was tried, appended as it is finished
artifacts/<sha256>    cubins
measured.jsonl        one line for each candidate that was checked and timed
gpu.jsonl             the GPU and driver that measured
quarantine.jsonl      candidates that crashed or hung, with the reason; not tried again
results.pack          records and artifacts of the winners, what the cache takes in
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilekern.errors import InputError
from tilekern.kernels import spec_named
from tilekern.source import digest_of_module
from tilekern.spec import ALIGNED, GENERIC, Config, Implementation, KernelSpec, LibraryCall, Problem
from tilekern.targets import KNOWN, Target
from tilekern.toolchain import assumptions

FORMAT = 1
# Stands for the journal's line of an artifact where a library runs a candidate.
LIBRARY_LINE: dict[str, Any] = {"status": "ok"}


@dataclass(frozen=True)
class Candidate:
    """A problem and one config of it, with the key of the artifact that it runs."""

    kernel: str
    problem: Problem
    config: Config
    variant: str
    artifact: str

    @property
    def spec(self) -> KernelSpec:
        """The candidate's spec."""
        return spec_named(self.kernel)

    @property
    def is_library(self) -> bool:
        """Whether a library runs it, so that there is nothing to compile."""
        return self.spec.is_library(self.problem, self.config)

    @property
    def key(self) -> str:
        """One line that names the candidate and its artifact: after an edit of the kernel it is another one."""
        return f"{self.kernel}|{self.problem.key}|{self.config.key}|{self.variant}|{self.artifact[:16]}"


def artifact_key(implementation: Implementation | LibraryCall, variant: str, target: Target, source_digest: str) -> str:
    """Names what is compiled: equal keys compile to the same cubin, whatever problem or config asks for it.

    What a library runs is not compiled; its key only tells that the source is still the same.
    """
    if isinstance(implementation, LibraryCall):
        return hashlib.sha256(f"library {source_digest}".encode()).hexdigest()
    parts = {
        "function": implementation.function._pyfunc.__name__,
        "assumptions": assumptions(implementation, variant),
        "hints": dict(implementation.hints),
        "arch": target.arch,
        "source": source_digest,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def candidate(kernel: str, problem: Problem, config: Config, variant: str, target: Target) -> Candidate:
    """The candidate of a (problem, config) on a target."""
    spec = spec_named(kernel)
    key = artifact_key(spec.implement(problem, config), variant, target, digest_of_module(spec.module))
    return Candidate(kernel, problem, config, variant, key)


def candidates(kernel: str, problem: Problem, target: Target) -> list[Candidate]:
    """The space of a problem, the default config first, and last the generic variant that every record carries."""
    spec = spec_named(kernel)
    configs = dict.fromkeys([spec.default(problem, target), *spec.space.candidates(problem, target)])
    found = [candidate(kernel, problem, config, ALIGNED, target) for config in configs]
    return [*found, candidate(kernel, problem, spec.generic(problem), GENERIC, target)]


class Sweep:
    """A sweep folder on disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, target: Target, model: str, problems: list[tuple[str, Problem]]) -> None:
        """Write the plan; a folder that holds the same target's plan already takes the new problems in.

        Raises:
            InputError: the folder holds another target's sweep, or cannot be written.
        """
        plan = {
            "format": FORMAT,
            "target": target.describe(),
            "model": model,
            "problems": [{"kernel": kernel, "problem": dict(problem)} for kernel, problem in problems],
        }
        try:
            if (self.folder / "sweep.json").exists():
                before = self._plan()
                if before["target"] != plan["target"]:
                    raise InputError(
                        f"{self.folder} holds a sweep for {before['target']['name']}, not {target.name}; give another"
                    )
            (self.folder / "artifacts").mkdir(parents=True, exist_ok=True)
            _write(self.folder / "sweep.json", json.dumps(plan, indent=1).encode())
        except OSError as error:
            raise InputError(f"cannot write the sweep folder {self.folder}: {error.strerror}") from None

    def _plan(self) -> dict[str, Any]:
        try:
            plan = json.loads((self.folder / "sweep.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InputError(
                f"{self.folder} is no sweep folder; run --stages plan,compile --sweep {self.folder}"
            ) from None
        except (OSError, ValueError) as error:
            raise InputError(f"{self.folder}/sweep.json cannot be read: {error}") from None
        if not isinstance(plan, dict) or plan.get("format") != FORMAT:
            raise InputError(f"{self.folder}/sweep.json is no plan of this version of tilekern; plan it again")
        if not {"target", "model", "problems"} <= set(plan):
            raise InputError(f"{self.folder}/sweep.json is damaged; remove it and plan again")
        return plan

    @property
    def target(self) -> Target:
        """The target that the sweep is for."""
        described = self._plan()["target"]
        for target in KNOWN:
            if target.key == described["key"]:
                return target
        from tilekern.targets import here

        at_hand = here()
        if at_hand is not None and at_hand.key == described["key"]:
            return at_hand
        raise InputError(f"{self.folder}: the target {described['key']} is not known here")

    @property
    def cache(self) -> Path:
        """The cache of the sweep's own, which measuring looks kernels up in."""
        return self.folder / "cache"

    @property
    def model(self) -> str:
        """The model that the sweep was planned for."""
        return str(self._plan()["model"])

    def problems(self) -> list[tuple[str, Problem]]:
        """The planned problems."""
        return [(item["kernel"], Problem(item["problem"])) for item in self._plan()["problems"]]

    def compiled(self) -> dict[str, dict[str, Any]]:
        """What is known of each artifact key: status ``ok`` or ``failed``, and facts or the reason."""
        return {line["key"]: line for line in _lines(self.folder / "compiled.jsonl")}

    def measured(self) -> dict[str, dict[str, Any]]:
        """What is known of each candidate's check and time."""
        return {line["candidate"]: line for line in _lines(self.folder / "measured.jsonl")}

    def quarantined(self) -> dict[str, str]:
        """The reason for each candidate that crashed or hung."""
        return {line["candidate"]: line["reason"] for line in _lines(self.folder / "quarantine.jsonl")}

    def gpu(self) -> dict[str, Any]:
        """The GPU, driver and torch that the last measure stage ran on; empty before one did."""
        found = list(_lines(self.folder / "gpu.jsonl"))
        return found[-1] if found else {}

    def note(self, journal: str, line: Mapping[str, Any]) -> None:
        """Append a line to ``compiled``, ``measured``, ``quarantine`` or ``gpu``; readers skip a torn last line."""
        with (self.folder / f"{journal}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, sort_keys=True) + "\n")
            file.flush()

    def store(self, cubin: bytes) -> str:
        """Keep a cubin; its sha256."""
        name = hashlib.sha256(cubin).hexdigest()
        path = self.folder / "artifacts" / name
        if not path.exists():
            _write(path, cubin)
        return name

    def cubin(self, sha256: str) -> bytes:
        """The bytes of an artifact.

        Raises:
            InputError: it is missing or damaged.
        """
        path = self.folder / "artifacts" / sha256
        try:
            found = path.read_bytes()
        except OSError:
            found = b""
        if hashlib.sha256(found).hexdigest() != sha256:
            raise InputError(f"{path} is missing or damaged; run the compile stage again")
        return found


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:  # the run was killed in the middle of this line
            continue
        if isinstance(line, dict):
            yield line


def _write(path: Path, content: bytes) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
