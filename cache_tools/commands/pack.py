"""Which records a model needs, for `pack --model`: asked of the tuner, which plans and writes nothing.

The tuner's plan is made in a process of its own: it takes torch and the kernels, and a cache is looked after without.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from typing import NamedTuple

from tilekern.cache import CacheError, Entry
from tilekern.cache.keys import Value

_DTYPES = "bfloat16,float16,float32"
_ATTENTION = "tilekern,tilekern_nondeterministic"


class Needed(NamedTuple):
    """What the records of one kernel on one target must have: all but the bucketed dimensions."""

    target_key: str
    kernel: str
    exact: frozenset[tuple[str, Value]]
    bucketed: frozenset[str]


def needed_by(model: str, target_keys: Iterable[str], tp: int) -> set[Needed]:
    """What a model needs on each of some targets, in any dtype, for steps of any size.

    Args:
        model: a preset, the path of a config.json, or a hub id, as `python -m tilekern.tune` takes it.
        target_keys: the targets' keys.
        tp: ranks that share a model.

    Raises:
        CacheError: the tuner cannot plan it; the error is its own.
    """
    return {needed for target_key in sorted(set(target_keys)) for needed in _planned(model, target_key, tp)}


def is_needed(entry: Entry, needed: set[Needed]) -> bool:
    """Whether a record is one of those, whatever bucket it is for."""
    if entry.record is None or entry.address is None:
        return False
    problem = entry.record.problem.items()
    place = (entry.address.target_key, entry.address.kernel)
    return any(
        one[:2] == place and one.exact == {item for item in problem if item[0] not in one.bucketed} for one in needed
    )


def _planned(model: str, target_key: str, tp: int) -> set[Needed]:
    steps = ["--tp", str(tp), "--dtype", _DTYPES, "--attention", _ATTENTION]
    command = [sys.executable, "-m", "tilekern.tune", model, "--gpu", target_key, *steps, "--dry-run", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise CacheError(f"--model {model}: {lines[-1].removeprefix('error: ')}")
    return {
        Needed(
            target_key,
            item["kernel"],
            frozenset((name, value) for name, value in item["problem"].items() if name not in item["bucketed"]),
            frozenset(item["bucketed"]),
        )
        for item in json.loads(done.stdout)["problems"]
    }
