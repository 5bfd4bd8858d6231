"""The command pack: records into one file.

Which records a model needs is asked of the tuner, which plans and writes nothing. Its plan is made in a process of its
own: it takes torch and the kernels, and a cache is looked after without.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import click

from tilekern.cache import CacheError, Record, Store
from tilekern.cache.keys import Value
from tilekern.cache_tools.shared.options import as_json, cache_dir, command, with_age_filters, with_filters
from tilekern.cache_tools.shared.packing import write_selected
from tilekern.cache_tools.shared.selection import Selection
from tilekern.cache_tools.shared.text import count, print_json, size
from tilekern.warning import tell

_DTYPES = "bfloat16,float16,float32"
_ATTENTION = "tilekern,tilekern_nondeterministic"


@command
@click.argument("out", metavar="OUT.pack", type=click.Path(path_type=Path))
@with_filters
@with_age_filters
@click.option("--model", help="Only what this model needs: a preset, the path of a config.json, or a hub id.")
@click.option("--tp", type=click.IntRange(min=1), default=1, help="Tensor-parallel degree: ranks of the model.")
@cache_dir
@as_json
def pack(out: Path, model: str | None, tp: int, store: Store, as_json: bool, **filters: Any) -> None:
    """Write records, their artifacts and signatures into one file; the same records give the same bytes.

    A model's records are those of its sizes, in any dtype and for steps of any length, and those of its layers of
    experts.

    JSON: pack, records, bytes, left_out.
    """
    written, left_out = write_selected(
        store, out, Selection(**filters), lambda record: not model or _is_needed(record, model, tp)
    )
    size_bytes = out.stat().st_size
    if as_json:
        print_json({"pack": str(out), "records": written, "bytes": size_bytes, "left_out": left_out})
        return
    note = f"; {count(left_out, 'unreadable record')} left out" if left_out else ""
    tell(f"packed {count(written, 'record')} into {out}, {size(size_bytes)}{note}")


class _Needed(NamedTuple):
    """The dimensions that the records of one kernel must have: all but the bucketed dimensions."""

    kernel: str
    exact: frozenset[tuple[str, Value]]
    bucketed: frozenset[str]


def _is_needed(record: Record, model: str, tp: int) -> bool:
    """Whether a model needs a record, whatever bucket it is for."""
    problem = record.problem.items()
    return any(
        one.kernel == record.kernel and one.exact == {item for item in problem if item[0] not in one.bucketed}
        for one in _needed_by(model, record.address.target_key, tp)
    )


@functools.cache
def _needed_by(model: str, target_key: str, tp: int) -> set[_Needed]:
    """The records that a model needs on a target, in any dtype, for steps of any size.

    Raises:
        CacheError: the tuner cannot plan it; the error is its own.
    """
    steps = ["--tp", str(tp), "--dtype", _DTYPES, "--attention", _ATTENTION, "--experts"]
    planning = [sys.executable, "-m", "tilekern.tune", model, "--gpu", target_key, *steps, "--dry-run", "--json"]
    done = subprocess.run(planning, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise CacheError(f"--model {model}: {lines[-1].removeprefix('tilekern: ')}")
    return {
        _Needed(
            item["kernel"],
            frozenset((name, value) for name, value in item["problem"].items() if name not in item["bucketed"]),
            frozenset(item["bucketed"]),
        )
        for item in json.loads(done.stdout)["problems"]
    }
