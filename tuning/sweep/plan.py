"""Reads and writes a sweep's plan, ``sweep.json``: target, model, problems, and the configs that limit them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tilekern.cache import CacheError
from tilekern.cache.files import read_whole, write_whole
from tilekern.errors import InputError
from tilekern.inference.rehearsal import TokenStep
from tilekern.kernels import all_specs
from tilekern.runtime.recorder import FORMAT, Named, document
from tilekern.spec import Config, Problem
from tilekern.spec.targets import Target

# The plan's file.
PLAN = "sweep.json"
# The configs to try of a problem; the whole space of a problem that is not named.
Limits = Mapping[Named, Sequence[Config]]
# Far more than the plan of any model has.
_LARGEST_PLAN = 2**26


@dataclass(frozen=True)
class Plan:
    """The problems to tune; ``target`` has a ``key`` and a ``name``.

    ``launches`` counts the launches of a step, as far as known. ``invariant`` are the problems that need a kernel of
    one bit class. ``tokens`` are the engine's steps in which the kernels of a token are chosen.
    """

    target: Mapping[str, Any]
    model: str
    problems: tuple[Named, ...]
    limits: Limits
    launches: Mapping[Named, int]
    invariant: frozenset[Named]
    tokens: tuple[TokenStep, ...]


class PlanFile:
    """The plan's file in a sweep folder, or another file, such as one of :func:`tilekern.trace`."""

    def __init__(self, folder: Path, name: str = PLAN) -> None:
        self._folder, self._path = folder, folder / name
        self._read: tuple[tuple[int, int], Plan] | None = None

    def exists(self) -> bool:
        """Return whether the folder has a plan."""
        return self._path.exists()

    def write(
        self, target: Target, model: str, problems: Sequence[Named], limits: Limits,
        launches: Mapping[Named, int] | None = None, invariant: Iterable[Named] = (),
        tokens: Sequence[TokenStep] = (),
    ) -> None:  # fmt: skip
        """Write the plan in one step.

        Raises:
            OSError: the folder cannot be written.
        """
        plan = document(target, model, problems, launches, invariant)
        for item, named in zip(plan["problems"], problems, strict=True):
            if named in limits:
                item["configs"] = [dict(config) for config in limits[named]]
        if tokens:
            plan["tokens"] = msgspec.to_builtins(tokens)
        write_whole(self._path, json.dumps(plan, indent=1).encode())

    def read(self) -> Plan:
        """Return the plan; the file is parsed again only if it has changed.

        Raises:
            InputError: there is none, or it is not a plan of this version of tilekern.
        """
        try:
            status = self._path.stat()
            version = (status.st_ino, status.st_mtime_ns)
            if self._read is None or self._read[0] != version:
                self._read = version, self._parse(json.loads(read_whole(self._path, _LARGEST_PLAN)[0]))
        except (FileNotFoundError, NotADirectoryError):
            if self._path.name != PLAN:
                raise InputError(f"{self._path} does not exist; give a file that tilekern.trace wrote") from None
            is_there = "it is a file" if self._folder.exists() else "there is no such folder"
            why = f"it has no {PLAN}" if self._folder.is_dir() else is_there
            raise InputError(
                f"{self._folder} holds no sweep: {why}; give the folder of one, or plan one for a MODEL with "
                f"--stages plan,compile --sweep {shlex.quote(str(self._folder))}"
            ) from None
        except (OSError, CacheError, ValueError, RecursionError) as error:
            raise InputError(f"{self._path} cannot be read: {error}") from None
        return self._read[1]

    def problems(self) -> list[Named]:
        """Return the planned problems, all of which this version of tilekern has.

        Raises:
            InputError: as :meth:`read`, or the plan is of a version that had other kernels, dimensions or axes.
        """
        plan = self.read()
        for kernel, problem in plan.problems:
            spec = all_specs().get(kernel)
            if spec is None or spec.problem_of(problem) is None:
                raise self._other_version(f"a problem of {kernel}")
            if any(spec.space.of(problem, config) is None for config in plan.limits.get((kernel, problem), ())):
                raise self._other_version(f"a config of {kernel}")
        return list(plan.problems)

    def _other_version(self, what: str) -> InputError:
        return InputError(
            f"{self._path} names {what} that this version of tilekern does not have; use the one that planned it, or "
            "plan it again; a kernel of your own needs --specs MODULE"
        )

    def _parse(self, plan: Any) -> Plan:
        if not isinstance(plan, dict) or plan.get("format") != FORMAT:
            raise InputError(f"{self._path} is not a plan of this version of tilekern; plan it again")
        try:
            items = [
                (
                    str(item["kernel"]),
                    _in_order(str(item["kernel"]), item["problem"]),
                    item.get("configs"),
                    item.get("launches"),
                )
                for item in plan["problems"]
            ]
            classed = [bool(item.get("invariant")) for item in plan["problems"]]
            return Plan(
                {**plan["target"], "key": plan["target"]["key"], "name": plan["target"]["name"]},
                str(plan["model"]),
                tuple((kernel, problem) for kernel, problem, _, _ in items),
                {(k, p): tuple(map(Config, configs)) for k, p, configs, _ in items if configs is not None},
                {(k, p): int(number) for k, p, _, number in items if number is not None},
                frozenset((k, p) for (k, p, _, _), is_classed in zip(items, classed, strict=True) if is_classed),
                msgspec.convert(plan.get("tokens", []), tuple[TokenStep, ...]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, msgspec.ValidationError):
            raise InputError(f"{self._path} is damaged; remove it and plan again") from None


def _in_order(kernel: str, problem: Mapping[str, Any]) -> Problem:
    """Return a problem with its dimensions in the order of its spec, if there is one: lookups ask in that order."""
    spec = all_specs().get(kernel)
    found = spec.problem_of(problem) if spec is not None else None
    return Problem(problem) if found is None else found
