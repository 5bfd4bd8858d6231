"""Attention's backward as its specs declare it: dimensions, consistent inputs, the formula of the gradients.

The layout and the meaning of the flags are those of :mod:`tilekern.kernels.attention.problem`. Sinks act through the
log-sum-exp alone, so that no backward kernel knows of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tilekern.kernels.attention import problem as shared
from tilekern.spec import ArrayParameter, Problem, ScalarParameter

DIMENSIONS = tuple(dimension for dimension in shared.DIMENSIONS if dimension.name != "sinks")
FLAGS = ("causal", "windowed", "capped", "packed")


def parameters(problem: Problem, most: str, outputs: tuple[str, ...]) -> tuple[ArrayParameter | ScalarParameter, ...]:
    """The parameters of a backward kernel whose grid covers ``most``, before its constants."""
    dtype, head_dim = problem["dtype"], problem["head_dim"]
    return (
        *(ArrayParameter(name, dtype, 4, head_dim) for name in ("q", "k", "v", "dout")),
        *(ArrayParameter(name, "float32", 3, aligned=False) for name in ("lse", "delta")),
        *(ArrayParameter(name, "int32", 1) for name in ("query_starts", "key_starts")),
        ScalarParameter(most, "int32"),
        *(ScalarParameter(name, "float32") for name in ("scale", "softcap")),
        ScalarParameter("window", "int32"),
        *(ArrayParameter(name, dtype, 4, head_dim, "output") for name in outputs),
    )


def inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """The forward's inputs, a normal dout, and the lse and delta that they give.

    lse receives a normal gradient too, which delta holds: without it a query that sees one key has dS = 0, of which a
    rounded result can say nothing.
    """
    import torch

    found = shared.inputs(problem.but(sinks=False), generator, device)
    q = found["q"]
    found["dout"] = torch.randn(q.shape, generator=generator, device=device).to(q.dtype)
    lse, delta = _by_head(problem, found)
    dlse = torch.randn(lse.shape, generator=generator, device=device)
    del found["sink_logits"]
    return {**found, "lse": lse.float(), "delta": delta.float() - dlse}


# Scores of one sequence that are worked out at a time.
_SCORES = 1 << 28


def _by_head(problem: Problem, found: dict[str, Any]) -> tuple[Any, Any]:
    """lse and delta in float64, some heads at a time: the scores of all heads at once need not fit in memory."""
    import torch

    flags = {flag: problem[flag] for flag in FLAGS} | {"sinks": False}
    given = {name: value for name, value in found.items() if name not in ("q", "k", "v", "dout")}
    heads, parts = problem["heads"], []
    at_once = max(1, _SCORES // (problem["queries"] * problem["keys"]))
    for some in torch.arange(heads, device=found["q"].device).split(at_once):
        q, dout = (found[name][:, :, some] for name in ("q", "dout"))
        k, v = (found[name][:, :, some * problem["kv_heads"] // heads] for name in ("k", "v"))
        forward = shared.formula(q=q, k=k, v=v, **given, **flags)
        out = forward["out"].to(q.dtype).double()
        parts.append((forward["lse"], (out * dout.double()).sum(-1).transpose(1, 2)))
    return torch.cat([lse for lse, _ in parts], 1), torch.cat([delta for _, delta in parts], 1)


def _sequence_gradients(
    q: Any, k: Any, v: Any, dout: Any, lse: Any, delta: Any, scale: float, softcap: float, window: int,
    causal: bool, windowed: bool, capped: bool,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """dq, dk and dv of one sequence, [tokens, heads, head_dim] each."""
    import torch

    heads, kv_heads = q.shape[1], k.shape[1]
    of_head = torch.arange(heads, device=q.device) * kv_heads // heads
    q, dout = q.double(), dout.double()
    k_heads, v_heads = k.double()[:, of_head], v.double()[:, of_head]
    scores = torch.einsum("qhd,khd->hqk", q * scale, k_heads)
    slope = torch.ones_like(scores)
    if capped:
        flat = torch.tanh(scores / softcap)
        scores, slope = softcap * flat, 1 - flat.square()
    seen = shared.mask(q.shape[0], k.shape[0], window, causal, windowed, q.device)
    weights = torch.exp(scores - lse.double()[..., None]).masked_fill(~seen, 0)
    pulled = torch.einsum("qhd,khd->hqk", dout, v_heads)
    gradients = scale * slope * weights * (pulled - delta.double()[..., None])
    dq = torch.einsum("hqk,khd->qhd", gradients, k_heads)
    by_head = (torch.einsum("hqk,qhd->khd", left, right) for left, right in ((gradients, q), (weights, dout)))
    # Group by group, since an index_add_ on a GPU adds heads up in another order each time.
    dk, dv = (torch.stack([found[:, of_head == kv_head].sum(1) for kv_head in range(kv_heads)], 1) for found in by_head)
    return dq, dk, dv


def gradients(
    q: Any, k: Any, v: Any, dout: Any, lse: Any, delta: Any, query_starts: Any, key_starts: Any, most_queries: int,
    most_keys: int, scale: float, softcap: float, window: int, causal: bool, windowed: bool, capped: bool, packed: bool,
) -> dict[str, Any]:  # fmt: skip
    """The formula in float64: dq, dk and dv for the given lse and delta."""
    import torch

    del most_queries, most_keys
    entries = list(zip(q, k, v, dout, lse, delta, strict=True))
    if packed:
        spans = [starts.tolist() for starts in (query_starts, key_starts)]
        bounds = zip(spans[0], spans[0][1:], spans[1], spans[1][1:], strict=False)
        entries = [
            (q[0, a:b], k[0, c:d], v[0, c:d], dout[0, a:b], lse[0, :, a:b], delta[0, :, a:b]) for a, b, c, d in bounds
        ]
    of_one = functools.partial(
        _sequence_gradients,
        scale=scale, softcap=softcap, window=window, causal=causal, windowed=windowed, capped=capped,
    )  # fmt: skip
    parts = [of_one(*entry) for entry in entries]
    join = (lambda found: torch.cat(found)[None]) if packed else torch.stack
    joined = [join(found) for found in zip(*parts, strict=True)]
    return dict(zip(("dq", "dk", "dv"), joined, strict=True))


def rows_shape(problem: Problem, side: str) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of a gradient for ``side``, ``queries`` or ``keys``."""
    heads = problem["heads" if side == "queries" else "kv_heads"]
    return (*shared.token_shape(problem, side), heads, problem["head_dim"]), problem["dtype"]


def read_bytes(problem: Problem) -> int:
    """Bytes of what each of the two backward kernels reads: q and dout, k and v, lse and delta."""
    return 2 * (shared.rows_bytes(problem, "queries") + shared.rows_bytes(problem, "keys") + shared.lse_bytes(problem))


def _of(outputs: tuple[str, ...]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(gradients)
    def reference(**given: Any) -> dict[str, Any]:
        found = gradients(**given)
        return {name: found[name] for name in outputs}

    return reference


# The part of the formula that the kernel owning tiles of queries or of keys computes.
REFERENCES = {"queries": _of(("dq",)), "keys": _of(("dk", "dv"))}
