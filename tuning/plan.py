"""From a model to the problems that its training needs tuned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tilekern.errors import InputError
from tilekern.kernels import all_specs
from tilekern.spec import DTYPES, ModelShape, Problem
from tilekern.targets import Target

Named = tuple[str, Problem]
MOST_TOKENS = 1 << 24


def known_ops() -> list[str]:
    """The ops that the specs name, each once."""
    return list(dict.fromkeys(op for spec in all_specs().values() for op in spec.ops))


def plan(
    shape: ModelShape, tokens: Sequence[int], dtypes: Iterable[str], ops: Iterable[str], target: Target
) -> list[Named]:
    """The problems, each once, with bucketed dimensions at their buckets, in the order of ops and tokens.

    Raises:
        InputError: an op or dtype is unknown, or a token count is no positive number.
    """
    found: dict[Named, None] = {}
    for op in ops:
        if op not in known_ops():
            raise InputError(f"unknown op {op!r}; known: {', '.join(known_ops())}")
        for dtype in dtypes:
            if dtype not in DTYPES:
                raise InputError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
            for count in tokens:
                if not 1 <= count <= MOST_TOKENS:
                    raise InputError(f"--tokens {count}: a token count is from 1 to {MOST_TOKENS}")
                found |= dict.fromkeys(_problems(op, shape, count, dtype, target))
    return list(found)


def _problems(op: str, shape: ModelShape, tokens: int, dtype: str, target: Target) -> list[Named]:
    specs = [spec for spec in all_specs().values() if op in spec.ops]
    return [
        (spec.name, spec.bucketed(spec.problem(**sizes)))
        for spec in specs
        for sizes in spec.workloads(shape, tokens, dtype, target)
    ]
