"""From a model to the problems that its training needs tuned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from tilekern.errors import InputError
from tilekern.kernels import spec_named
from tilekern.spec import DTYPES, Problem
from tilekern.targets import Target
from tuning.models import ModelShape

Named = tuple[str, Problem]
MOST_TOKENS = 1 << 24


def _rms_norm(shape: ModelShape, tokens: int, dtype: str, target: Target) -> Iterator[Named]:
    sizes = [(tokens, shape.hidden)]
    if shape.qk_norm:
        sizes += [(tokens * shape.heads, shape.head_dim), (tokens * shape.kv_heads, shape.head_dim)]
    for rows, columns in sizes:
        for kernel in ("rms_norm_forward", "rms_norm_backward"):
            spec = spec_named(kernel)
            yield kernel, spec.problem(rows=rows, columns=columns, dtype=dtype, weight_dtype=dtype)
        # The backward stores a row of partial sums for each resident block; it keeps one to four on an SM.
        for blocks in (1, 2, 4):
            rows_of_sums = target.sm_count * blocks
            yield "column_sum", spec_named("column_sum").problem(rows=rows_of_sums, columns=columns, dtype=dtype)


def _swiglu(shape: ModelShape, tokens: int, dtype: str, target: Target) -> Iterator[Named]:  # noqa: ARG001
    for kernel in ("swiglu_forward", "swiglu_backward"):
        yield kernel, spec_named(kernel).problem(rows=tokens, columns=shape.intermediate, dtype=dtype)


def _rope(shape: ModelShape, tokens: int, dtype: str, target: Target) -> Iterator[Named]:  # noqa: ARG001
    for inverse in (False, True):
        yield (
            "rope",
            spec_named("rope").problem(
                tokens=tokens,
                batch=1,
                heads=shape.heads,
                kv_heads=shape.kv_heads,
                head_dim=shape.head_dim,
                full=False,
                inverse=inverse,
                dtype=dtype,
                angle_dtype=dtype,
            ),
        )


OPS: dict[str, Callable[[ModelShape, int, str, Target], Iterator[Named]]] = {
    "rms_norm": _rms_norm,
    "swiglu": _swiglu,
    "rope": _rope,
}


def plan(
    shape: ModelShape, tokens: Sequence[int], dtypes: Iterable[str], ops: Iterable[str], target: Target
) -> list[Named]:
    """The problems, each once, with bucketed dimensions at their buckets, in the order of ops and tokens.

    Raises:
        InputError: an op or dtype is unknown, or a token count is no positive number.
    """
    found: dict[Named, None] = {}
    for op in ops:
        if op not in OPS:
            raise InputError(f"unknown op {op!r}; known: {', '.join(OPS)}")
        for dtype in dtypes:
            if dtype not in DTYPES:
                raise InputError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
            for count in tokens:
                if not 1 <= count <= MOST_TOKENS:
                    raise InputError(f"--tokens {count}: a token count is from 1 to {MOST_TOKENS}")
                for kernel, problem in OPS[op](shape, count, dtype, target):
                    found[kernel, spec_named(kernel).bucketed(problem)] = None
    return list(found)
