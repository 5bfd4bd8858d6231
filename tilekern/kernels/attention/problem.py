"""Attention as its specs declare it, forward and backward: dimensions, inputs, the formula, what it must cost.

Layout: q [batch, queries, heads, head_dim], k and v [batch, keys, kv_heads, head_dim], out like q, lse (the natural
log of the softmax's denominator) [batch, heads, queries] float32. Where ``packed``, the ``batch`` sequences stand one
after the other in a batch of one, ``queries`` and ``keys`` are the lengths of the longest, and ``query_starts`` and
``key_starts`` (int32, [batch + 1]) say where each begins. An array that a flag turns off is a placeholder of one
element: ``sink_logits`` [heads] float32 without ``sinks``, the starts without ``packed``.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from tilekern.kernels.tiles import power_of_two
from tilekern.spec import ITEM_BYTES, Config, Dimension, Problem

DIMENSIONS = (
    Dimension("batch", "bucketed"),
    Dimension("queries", "bucketed"),
    Dimension("keys", "bucketed"),
    Dimension("heads", "exact"),
    Dimension("kv_heads", "exact"),
    Dimension("head_dim", "exact"),
    Dimension("causal", "flag"),
    Dimension("windowed", "flag"),
    Dimension("capped", "flag"),
    Dimension("sinks", "flag"),
    Dimension("packed", "flag"),
    Dimension("dtype", "dtype"),
)


def depth_of(problem: Problem) -> int:
    """The width of a tile that holds whole heads: a power of two, and enough for the matrix units."""
    return max(16, power_of_two(problem["head_dim"]))


def lengths(batch: int, longest: int) -> list[int]:
    """Lengths of the sequences that stand for a packed problem: from the longest down to half of it."""
    return [max(1, longest - number * longest // (2 * batch)) for number in range(batch)]


def is_one_loop(config: Config) -> bool:
    """Whether one loop goes over all tiles and masks each, in place of one over whole tiles and one over edges.

    A small tile's mask costs little, and the second loop's code takes as long to compile as the first's.
    """
    return bool(config["tile_m"] * config["tile_n"] < 64 * 64)


def token_shape(problem: Problem, side: str) -> tuple[int, int]:
    """(batch, tokens) of the arrays for ``side``, ``queries`` or ``keys``."""
    if problem["packed"]:
        return 1, sum(lengths(problem["batch"], problem[side]))
    return problem["batch"], problem[side]


def outputs(problem: Problem, blocks: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shapes and dtypes of out and lse."""
    batch, tokens = token_shape(problem, "queries")
    heads = problem["heads"]
    return {
        "out": ((batch, tokens, heads, problem["head_dim"]), problem["dtype"]),
        "lse": ((batch, heads, tokens), "float32"),
    }


def window_of(problem: Problem) -> int:
    """The window with which a windowed problem is run and counted: a quarter of the keys."""
    return max(1, problem["keys"] // 4)


def inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """Normal q, k and v; the scores' scale, cap and window; sinks and starts."""
    import torch

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=generator, device=device)

    def starts(side: str) -> Any:
        found = accumulate(lengths(problem["batch"], problem[side]), initial=0) if problem["packed"] else [0]
        return torch.tensor(list(found), dtype=torch.int32, device=device)

    dtype = getattr(torch, problem["dtype"])
    keys = (*token_shape(problem, "keys"), problem["kv_heads"], problem["head_dim"])
    return {
        "q": normal(*token_shape(problem, "queries"), problem["heads"], problem["head_dim"]).to(dtype),
        "k": normal(*keys).to(dtype),
        "v": normal(*keys).to(dtype),
        "sink_logits": normal(problem["heads"] if problem["sinks"] else 1),
        "query_starts": starts("queries"),
        "key_starts": starts("keys"),
        "most_queries": problem["queries"],
        "most_keys": problem["keys"],
        "scale": float(problem["head_dim"] ** -0.5),
        "softcap": 5.0,
        "window": window_of(problem),
    }


def mask(queries: int, keys: int, window: int, causal: bool, windowed: bool, device: Any) -> Any:
    """Which keys each query sees, [queries, keys] bool."""
    import torch

    position = torch.arange(queries, device=device)[:, None] + keys - queries
    key = torch.arange(keys, device=device)[None, :]
    found = torch.ones((queries, keys), dtype=torch.bool, device=device)
    if causal:
        found &= key <= position
    if windowed:
        found &= (key - position).abs() < window
    return found


def formula(
    q: Any, k: Any, v: Any, sink_logits: Any, query_starts: Any, key_starts: Any, most_queries: int,
    most_keys: int, scale: float, softcap: float, window: int, causal: bool, windowed: bool, capped: bool,
    sinks: bool, packed: bool,
) -> dict[str, Any]:  # fmt: skip
    """The formula in float64: out and lse; a query that sees no key has out 0 and lse its sink, else -inf."""
    import torch

    del most_queries, most_keys

    def attend(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        heads, kv_heads = q.shape[1], k.shape[1]
        of_head = torch.arange(heads, device=q.device) * kv_heads // heads
        scores = torch.einsum("qhd,khd->hqk", q.double() * scale, k.double()[:, of_head])
        if capped:
            scores = softcap * torch.tanh(scores / softcap)
        seen = mask(q.shape[0], k.shape[0], window, causal, windowed, q.device)
        scores = scores.masked_fill(~seen, -torch.inf)
        lse = torch.logsumexp(scores, -1)
        if sinks:
            lse = torch.logaddexp(lse, sink_logits.double()[:, None])
        weights = torch.exp(scores - lse.masked_fill(lse.isneginf(), 0)[..., None])
        return torch.einsum("hqk,khd->qhd", weights, v.double()[:, of_head]), lse

    if packed:
        spans = [x.tolist() for x in (query_starts, key_starts)]
        parts = [
            attend(q[0, a:b], k[0, c:d], v[0, c:d])
            for a, b, c, d in zip(spans[0], spans[0][1:], spans[1], spans[1][1:], strict=False)
        ]
        return {"out": torch.cat([o for o, _ in parts])[None], "lse": torch.cat([e for _, e in parts], 1)[None]}
    parts = [attend(*entry) for entry in zip(q, k, v, strict=True)]
    return {"out": torch.stack([o for o, _ in parts]), "lse": torch.stack([e for _, e in parts])}


def results(found: dict[str, Any]) -> dict[str, Any]:
    """Out and lse such that both can be compared: which queries see nothing stands apart from the finite values."""
    lse = found["lse"]
    return {**found, "lse": lse.masked_fill(lse.isneginf(), 0), "blind": lse.isneginf().double()}


def _ramp(first: int, count: int, top: int) -> int:
    """The sum of first, first + 1, ... (``count`` values), each held to 0 ... top."""
    count -= min(count, max(0, -first))
    first = max(first, 0)
    rising = min(count, max(0, top - first))
    return rising * first + rising * (rising - 1) // 2 + (count - rising) * top


def visible(queries: int, keys: int, window: int, causal: bool, windowed: bool) -> int:
    """How many (query, key) pairs of a sequence see each other."""
    offset = keys - queries
    reach = 1 if causal else window if windowed else keys + queries
    below = _ramp(offset - window + 1, queries, keys) if windowed else 0
    return _ramp(offset + reach, queries, keys) - below


def pairs(problem: Problem) -> int:
    """The (query, key) pairs of all heads and sequences."""
    flags = (window_of(problem), problem["causal"], problem["windowed"])
    if problem["packed"]:
        queries, keys = (lengths(problem["batch"], problem[side]) for side in ("queries", "keys"))
        return problem["heads"] * sum(visible(q, k, *flags) for q, k in zip(queries, keys, strict=True))
    return problem["heads"] * problem["batch"] * visible(problem["queries"], problem["keys"], *flags)


def rows_bytes(problem: Problem, side: str) -> int:
    """Bytes of an array [batch, tokens, heads, head_dim] for ``side``: q or out, k or v."""
    batch, tokens = token_shape(problem, side)
    heads = problem["heads" if side == "queries" else "kv_heads"]
    return batch * tokens * heads * problem["head_dim"] * ITEM_BYTES[problem["dtype"]]


def lse_bytes(problem: Problem) -> int:
    """Bytes of an array [batch, heads, queries] in float32."""
    batch, tokens = token_shape(problem, "queries")
    return batch * tokens * problem["heads"] * 4
