"""Problems of kernels that may serve beside others in the invariant mode: few rows, and tokens after a cache.

No step asks for them there, since only measuring says whether such a kernel has the bits of the one that trains. Where
it has, it reads weights or keys faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from tilekern.kernels.attention.forward import SPEC as FORWARD
from tilekern.kernels.decode_attention import MOST_HEADS
from tilekern.kernels.decode_attention import SPEC as DECODING
from tilekern.kernels.matmul.product import SPEC as PRODUCT
from tilekern.kernels.skinny.linear import SPEC as FEW_ROWS
from tilekern.kernels.skinny.linear import sizes
from tilekern.kernels.skinny.tiles import MOST_ROWS
from tilekern.spec import Problem
from tilekern.tuning.plan.steps import Planned
from tilekern.tuning.sweep.plan import Named

# The flags of a linear layer's product.
_OF_LAYERS = frozenset(("b_transposed", "biased"))


def with_those_beside(plan: Planned) -> Planned:
    """Add such problems to a plan's, for those of its problems that need a kernel of one bit class."""
    more = frozenset((*_beside(plan.invariant), *_gates(plan.problems)))
    return replace(plan, problems=tuple(dict.fromkeys((*plan.problems, *more))), invariant=plan.invariant | more)


def is_served_beside(kernel: str, problem: Problem) -> bool:
    """Return whether a kernel for few rows, or for one token, may serve a problem in place of its own kernel."""
    if kernel == PRODUCT.name:
        return _is_of_few_rows(problem)
    return kernel == FORWARD.name and _is_of_one_token(problem)


def _beside(named: Iterable[Named]) -> Iterator[Named]:
    longest: dict[Problem, Problem] = {}
    for kernel, problem in named:
        if not is_served_beside(kernel, problem):
            continue
        if kernel == PRODUCT.name:
            on = ["biased"] if problem["biased"] else []
            given = sizes(problem["rows"], problem["inner"], problem["columns"], problem["dtype"], on)
            yield FEW_ROWS.name, FEW_ROWS.problem(**given)
        else:
            for padded in {False, problem["batch"] > 1}:
                found = _decoded(problem, padded=padded)
                # A cache of another length runs the kernel of the nearest.
                longest[found.but(keys=1)] = max(found, longest.get(found.but(keys=1), found), key=lambda p: p["keys"])
    yield from ((DECODING.name, problem) for problem in longest.values())


def _gates(named: Iterable[Named]) -> Iterator[Named]:
    """Yield the gates of a plan, with products that are rounded as two launches would have them."""
    for kernel, problem in named:
        if kernel == FEW_ROWS.name and problem["gated"] and not problem["accumulated"]:
            yield kernel, problem.but(rounded=True)


def _is_of_few_rows(problem: Problem) -> bool:
    on = {d.name for d in PRODUCT.dimensions if d.kind == "flag" and problem[d.name]}
    return problem["rows"] <= MOST_ROWS and "b_transposed" in on and on <= _OF_LAYERS


def _is_of_one_token(problem: Problem) -> bool:
    from tilekern.ops.attention import WIDEST_HEAD  # which loads torch

    heads, kv_heads = problem["heads"], problem["kv_heads"]
    is_taken = heads % kv_heads == 0 and heads <= MOST_HEADS * kv_heads and problem["head_dim"] <= WIDEST_HEAD
    return is_taken and problem["queries"] == 1 < problem["keys"] and problem["causal"] and not problem["packed"]


def _decoded(problem: Problem, *, padded: bool) -> Problem:
    """Return the problem of the kernel for decoding that computes a problem of attention with one query."""
    alike = {d.name: problem[d.name] for d in DECODING.dimensions if d.name in problem}
    heads, kv_heads = problem["heads"], problem["kv_heads"]
    alike |= {"kv_heads": problem["batch"] * kv_heads, "group": heads // kv_heads}
    return DECODING.bucketed(DECODING.problem(**alike, page_size=1, padded=padded, paged=False))
