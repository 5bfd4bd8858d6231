"""The command pack: write records into one file.

Which records a model needs is asked of the tuner's planner, in another process: it loads torch and the kernels, which
the other commands here do without.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import click

from tilekern.cache import CacheError, Record, Store
from tilekern.cache.keys import Value
from tilekern.cache_tools.shared.options import FILE, as_json, cache_dir, command, with_filters
from tilekern.cache_tools.shared.packs import write_selected
from tilekern.cache_tools.shared.printing import count, note_left_out, print_result, size
from tilekern.cache_tools.shared.selection import Selection
from tilekern.runtime.switches import FP8_FORMATS, ROWWISE, fp8_format

_DTYPES = ("--dtype", "bfloat16,float16,float32")
# In whatever dtype and by whatever attention the model may be trained, and generate.
# On long sequences attention's backward runs in pieces of fewer heads.
_TRAINED = ("--attention", "tilekern,tilekern_nondeterministic", "--experts", "--tokens", "4096,8192,16384,32768")
_STEPS = (*_TRAINED, *_DTYPES, "--decode", "2", "--context", "4096", "--invariant")
_AUTOCAST = (*_TRAINED, "--autocast")
# Few rows and many, and weights of both kinds.
_OF_ENGINE = (*_DTYPES, "--engine", "--decode", "1,64,128", "--tokens", "64,128")
_STEPS_OF_ENGINE = (_OF_ENGINE, (*_OF_ENGINE, "--weight-dtype", "int8"))


@command
@click.argument("out", metavar="OUT.pack", type=FILE)
@with_filters()
@click.option("--model", help="Only what this model needs: a preset, the path of a config.json, or a hub id.")
@click.option("--engine", is_flag=True, help="Of --model, what tilekern.inference needs to run it, without torch.")
@click.option(
    "--fp8",
    is_flag=False,
    flag_value=ROWWISE,
    metavar=f"[{'|'.join(FP8_FORMATS)}]",
    callback=lambda _context, _option, word: word and fp8_format(word, "OUT.pack"),
    help=f"Of --model, also what its steps by 8-bit floats need, {ROWWISE} if no format follows.",
)
@click.option("--tp", type=click.IntRange(min=1), default=1, help="Tensor-parallel degree of the model.")
@cache_dir
@as_json
def pack(
    out: Path, model: str | None, engine: bool, fp8: str | None, tp: int, store: Store, selection: Selection,
    as_json: bool,
) -> None:  # fmt: skip
    """Write records, their artifacts and signatures into one file; the same records give the same bytes.

    The records of a model are those of its sizes, in any dtype, under autocast, and for steps of any length, with those
    of its experts and of generation; with --fp8, also those of its linear layers and experts of 8-bit floats; with
    --engine, those of the engine in place of these, weights of int8 included.

    JSON: pack, records, bytes, left_out.
    """
    for option in ("--engine",) * engine + ("--fp8",) * bool(fp8):
        if not model:
            raise CacheError(f"{option} says what of a model is meant; pass --model too")
    if engine and fp8:
        raise CacheError("--fp8 describes a step of transformers' model; leave it out with --engine")
    written, left_out = write_selected(
        store, out, selection, lambda record: not model or _is_needed(record, model, tp, engine, fp8)
    )  # fmt: skip
    size_bytes = out.stat().st_size
    document = {"pack": str(out), "records": written, "bytes": size_bytes, "left_out": left_out}
    text = f"packed {count(written, 'record')} into {out}, {size(size_bytes)}{note_left_out(left_out)}"
    print_result(document, as_json, text)


class _Needed(NamedTuple):
    """A kernel whose records are needed, its sizes and dtypes that must be exact, and the names of the others.

    Flags are free: padding, pages and the invariant mode set others for the same model.
    """

    kernel: str
    exact: frozenset[tuple[str, Value]]
    bucketed: frozenset[str]


def _is_needed(record: Record, model: str, tp: int, engine: bool, fp8: str | None) -> bool:
    problem = record.problem.items()
    return any(
        needed.kernel == record.kernel and needed.exact == _exact(problem, needed.bucketed)
        for needed in _needed_by(model, record.address.target_key, tp, engine, fp8)
    )


@functools.cache
def _needed_by(model: str, target_key: str, tp: int, engine: bool, fp8: str | None) -> set[_Needed]:
    ways = _STEPS_OF_ENGINE if engine else (_STEPS, _AUTOCAST, *([(*_STEPS, "--fp8", fp8)] if fp8 else []))
    return set().union(*(_planned(model, target_key, tp, steps) for steps in ways))


def _planned(model: str, target_key: str, tp: int, steps: Sequence[str]) -> set[_Needed]:
    planning = [sys.executable, "-m", "tilekern.tune", "preflight", model, "--gpu", target_key, "--tp", str(tp), *steps]
    done = subprocess.run([*planning, "--json"], capture_output=True, text=True, check=False)
    # 3: the caches have not all of it.
    if done.returncode not in (0, 3):
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise CacheError(f"--model {model}: {lines[-1].removeprefix('tilekern: ')}")
    return {
        _Needed(
            item["kernel"],
            _exact(item["problem"].items(), item["bucketed"]),
            frozenset(item["bucketed"]),
        )
        for item in json.loads(done.stdout)["problems"]
    }


def _exact(problem: Iterable[tuple[str, Value]], bucketed: Container[str]) -> frozenset[tuple[str, Value]]:
    return frozenset(item for item in problem if item[0] not in bucketed and not isinstance(item[1], bool))
