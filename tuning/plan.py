"""From a model to the problems that its training needs tuned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tilekern.errors import InputError
from tilekern.kernels import all_specs
from tilekern.spec import DTYPES, KernelSpec, ModelShape, Problem, Value
from tilekern.targets import Target
from tuning.families import Layers, Model

Named = tuple[str, Problem]
# Tokens of a step, and how many of them are one sequence.
Step = tuple[int, int]
MOST_TOKENS = 1 << 24


def known_ops() -> list[str]:
    """The ops that the specs name, each once."""
    return list(dict.fromkeys(op for spec in all_specs().values() for op in spec.ops))


def plan(
    model: ModelShape | Model,
    tokens: Sequence[int],
    dtypes: Iterable[str],
    ops: Iterable[str],
    target: Target,
    sequences: Sequence[int] = (),
) -> list[Named]:
    """The problems, each once, with bucketed dimensions at their buckets, in the order of ops and tokens.

    Args:
        model: its sizes on one rank.
        tokens: tokens of a step, the batch times the sequence.
        dtypes: the dtypes to train in.
        ops: the ops to tune.
        target: the GPU to tune for.
        sequences: tokens of a sequence; a step is one sequence where there are none.

    Raises:
        InputError: an op or dtype is unknown, a count is out of range, or steps and sequences do not go together.
    """
    kinds = model.layers if isinstance(model, Model) else (Layers(model),)
    found: dict[Named, None] = {}
    dtypes, taken = list(dtypes), steps(tokens, sequences)
    for op in ops:
        if op not in known_ops():
            raise InputError(f"unknown op {op!r}; known: {', '.join(known_ops())}")
        for dtype in dtypes:
            if dtype not in DTYPES:
                raise InputError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
            for step in taken:
                for kind in (kind for kind in kinds if kind.take(op)):
                    found |= dict.fromkeys(_problems(op, kind, step, dtype, target))
    return list(found)


def steps(tokens: Sequence[int], sequences: Sequence[int] = ()) -> list[Step]:
    """Each step with each length of a sequence that it holds a whole number of.

    Raises:
        InputError: a count is out of range, or goes together with none of the others.
    """
    for option, counts in (("--tokens", tokens), ("--sequence", sequences)):
        for count in counts:
            if not 1 <= count <= MOST_TOKENS:
                raise InputError(f"{option} {count}: a token count is from 1 to {MOST_TOKENS}")
    if not sequences:
        return [(count, count) for count in tokens]
    found = [(count, length) for count in tokens for length in sequences if count % length == 0]
    for place, option, counts in ((0, "--tokens", tokens), (1, "--sequence", sequences)):
        for count in counts:
            if count not in {step[place] for step in found}:
                raise InputError(
                    f"{option} {count}: no step of --tokens {_listed(tokens)} is made of whole sequences of --sequence "
                    f"{_listed(sequences)} with it; tokens are the batch times the sequence"
                )
    return found


def _listed(counts: Sequence[int]) -> str:
    return ",".join(map(str, counts))


def _problems(op: str, kind: Layers, step: Step, dtype: str, target: Target) -> Iterator[Named]:
    tokens, sequence = step[0] * kind.rows_per_token, step[1]
    for spec in all_specs().values():
        if op in spec.ops:
            for sizes in _workloads(spec, kind.shape, (tokens, sequence), dtype, target):
                yield spec.name, spec.bucketed(spec.problem(**sizes))


def _workloads(
    spec: KernelSpec, shape: ModelShape, step: Step, dtype: str, target: Target
) -> Iterator[dict[str, Value]]:
    """A spec's workloads; one that has a batch is asked for a single sequence, of which there are as many as fit."""
    tokens, sequence = step
    if not any(dimension.name == "batch" for dimension in spec.dimensions):
        yield from map(dict, spec.workloads(shape, tokens, dtype, target))
        return
    for sizes in spec.workloads(shape, sequence, dtype, target):
        yield {**sizes, "batch": int(sizes["batch"] or 1) * (tokens // sequence)}
