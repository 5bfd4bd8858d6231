"""Attention's backward as one spec: by the kernels of this package, with the same bits in every run, or by cuDNN.

The kernels run one after the other: delta, then dk and dv by tiles of keys, then dq by tiles of queries. They compute
the scores twice (seven matrix products against five), and no two blocks add to the same element. Only they serve a
``deterministic`` problem.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilekern.kernels.attention import backward as attention_backward
from tilekern.kernels.attention import backward_problem as shared
from tilekern.kernels.attention import cudnn as attention_cudnn
from tilekern.kernels.attention import problem as attention_problem
from tilekern.kernels.families.arrays import Arrays
from tilekern.kernels.families.tables import spec
from tilekern.spec import Array, Config, Dimension, LibraryCall, Problem, ScalarParameter, Space

PlanFor = Callable[..., Any]
DIMENSIONS = (*shared.DIMENSIONS, Dimension("deterministic", "flag"))


def _composite(problem: Problem) -> LibraryCall:
    flags = [problem[name] for name in shared.FLAGS]

    def call(
        plan_for: PlanFor, q: Any, k: Any, v: Any, out: Any, dout: Any, lse: Any, query_starts: Any, key_starts: Any,
        most_queries: int, most_keys: int, *factors: Any,
    ) -> tuple[Any, Any, Any]:  # fmt: skip
        import torch

        device, number = q.device, q.get_device()
        heads, head_dim, kv_heads = q.shape[2], q.shape[3], k.shape[2]
        batch = query_starts.shape[0] - 1 if problem["packed"] else q.shape[0]
        sizes = (batch, most_queries, most_keys, heads, kv_heads, head_dim, *flags, q.dtype)
        delta = torch.empty(lse.shape, dtype=torch.float32, device=device)
        of_delta = plan_for(attention_backward.DELTA, device, q.shape[0], q.shape[1], heads, head_dim, q.dtype)
        of_delta.launch(number, out, dout, delta)
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=device) for x in (q, k, v))
        given = (q, k, v, dout, lse, delta, query_starts, key_starts)
        plan_for(attention_backward.DKDV, device, *sizes).launch(number, *given, most_keys, *factors, dk, dv)
        plan_for(attention_backward.DQ, device, *sizes).launch(number, *given, most_queries, *factors, dq)
        return dq, dk, dv

    return LibraryCall(call, attention_cudnn.BACKWARD_INPUTS, composite=True)


def _inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """Draw the forward's inputs and dout; compute the forward's results."""
    import torch

    plain = problem.but(sinks=False)
    found = attention_problem.inputs(plain, generator, device)
    flags = {name: problem[name] for name in shared.FLAGS}
    if problem["queries"] * problem["keys"] <= _FEW:
        made = attention_problem.formula(**found, **flags, sinks=False)
        # Not out itself: the gradients of a query that sees one key would vanish, and could not be compared.
        noise = torch.randn(found["q"].shape, generator=generator, device=device)
        out, lse = (made["out"] + noise).to(found["q"].dtype), made["lse"].float()
    else:  # only timed, never checked
        out = torch.randn(found["q"].shape, generator=generator, device=device).to(found["q"].dtype)
        lse = torch.full((out.shape[0], out.shape[2], out.shape[1]), 9.0, device=device)
    dout = torch.randn(out.shape, generator=generator, device=device).to(out.dtype)
    del found["sink_logits"]
    return {**found, "out": out, "dout": dout, "lse": lse}


# Pairs of queries and keys up to which the forward is computed for the inputs.
_FEW = 1 << 21


def reference(
    out: Any, dout: Any, causal: bool, windowed: bool, capped: bool, packed: bool, **given: Any
) -> dict[str, Any]:
    """Compute dq, dk and dv in float64."""
    delta = (out.double() * dout.double()).sum(-1).transpose(1, 2)
    return shared.gradients(
        **given, dout=dout, delta=delta, causal=causal, windowed=windowed, capped=capped, packed=packed
    )


_QUERIES = attention_problem.TOKENS["queries"]
_ARRAYS: Arrays = (
    *(attention_problem.Q, attention_problem.K, attention_problem.V),
    *(Array(name, "dtype", _QUERIES) for name in ("out", "dout")),
    Array("lse", "float32", attention_problem.OF_QUERIES),
    *attention_problem.STARTS,
    *(ScalarParameter(name, "int32") for name in ("most_queries", "most_keys")),
    *attention_problem.SCALARS,
    *(shared.DQ, shared.DK, shared.DV),
)

SPEC = spec(
    "attention_backward",
    "dq, dk and dv of attention, by kernels that repeat bit by bit or by cuDNN",
    DIMENSIONS,
    lambda problem: _ARRAYS,
    reference,
    function=lambda problem, config: None,
    library=lambda problem, config: (
        attention_cudnn.backward(problem) if config["implementation"] == "cudnn" else _composite(problem)
    ),
    grid=lambda sizes, config, sm_count: 1,
    sizes=attention_problem.sizes,
    space=Space(
        lambda problem: {"implementation": ["kernels", "cudnn"]}, (attention_cudnn.SERVES, attention_cudnn.REPEATS)
    ),
    default=lambda problem, target: Config(implementation="kernels"),
    generic=lambda problem: Config(implementation="kernels"),
    given=_inputs,
    flops=lambda problem: 10 * attention_problem.pairs(problem) * problem["head_dim"],
    roundings=3,
)

SPECS = (SPEC,)
