"""The parts of attention's specs that forward and backward share: dimensions, arrays, inputs, the formula, the cost.

Layout: q [batch, queries, heads, head_dim], k and v [batch, keys, kv_heads, head_dim], out like q, lse (the natural
log of the softmax's denominator) [batch, heads, queries] float32. If ``packed``, the ``batch`` sequences follow one
another in a batch of one, ``queries`` and ``keys`` are the lengths of the longest, and ``query_starts`` and
``key_starts`` (int32, [batch + 1]) are their first rows. An array that a flag turns off is a placeholder of one
element: ``sink_logits`` [heads] float32 without ``sinks``, the starts without ``packed``.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from tilekern.kernels.tiles import power_of_two
from tilekern.spec import ITEM_BYTES, Array, Config, Dimension, Problem, ScalarParameter

DIMENSIONS = (
    *(Dimension(name, "bucketed") for name in ("batch", "queries", "keys")),
    *(Dimension(name, "exact") for name in ("heads", "kv_heads", "head_dim")),
    *(Dimension(name, "flag") for name in ("causal", "windowed", "capped", "sinks", "packed")),
    Dimension("dtype", "dtype"),
)
# Shapes of arrays of tokens by their side, and of the log-sum-exp; their sizes are those of :func:`sizes`.
TOKENS = {
    "queries": ("entries", "query_tokens", "heads", "head_dim"),
    "keys": ("entries", "key_tokens", "kv_heads", "head_dim"),
}
OF_QUERIES = ("entries", "heads", "query_tokens")
Q, K, V = (Array(name, "dtype", TOKENS["queries" if name == "q" else "keys"]) for name in "qkv")
STARTS = tuple(Array(name, "int32", ("starts",)) for name in ("query_starts", "key_starts"))
SCALARS = (
    *(ScalarParameter(name, "float32") for name in ("scale", "softcap")),
    ScalarParameter("window", "int32"),
)
# Bytes that the blocks running at the same time should share and reuse: they fit any data-centre GPU's L2.
_WAVE_BYTES = 16 << 20


def depth_of(problem: Problem) -> int:
    """Return the width of a tile that holds whole heads: a power of two, and enough for the matrix units."""
    return max(16, power_of_two(problem["head_dim"]))


def keys_apart(problem: Problem) -> int:
    """Return how many keys a tile holds that is summed by itself (:func:`tilekern.kernels.attention.tiles.tile_sums`).

    Training and decoding have a bit class together if it is the same number in both.
    """
    depth = depth_of(problem)
    return 32 if problem["dtype"] == "float32" or depth > 256 else 128 if depth <= 128 else 64


def lengths(batch: int, longest: int) -> list[int]:
    """Return the lengths of a packed problem's sequences: from the longest down to half of it."""
    return [max(1, longest - number * longest // (2 * batch)) for number in range(batch)]


def is_one_loop(config: Config) -> bool:
    """Tell whether one loop masks all tiles, instead of one loop over whole tiles and one over edge tiles.

    A small tile's mask costs little, and the second loop takes as long to compile as the first.
    """
    return bool(config["tile_m"] * config["tile_n"] < 64 * 64)


def sizes(problem: Problem) -> dict[str, int]:
    """Return the sizes of arrays, and the kernel constants, that follow from a problem."""
    packed, batch = problem["packed"], problem["batch"]
    queries, keys = (sum(lengths(batch, problem[side])) if packed else problem[side] for side in ("queries", "keys"))
    return {
        "entries": 1 if packed else batch,
        "query_tokens": queries,
        "key_tokens": keys,
        "starts": batch + 1 if packed else 1,
        "sink_logits": problem["heads"] if problem.get("sinks") else 1,
        "depth": depth_of(problem),
        "budget": _WAVE_BYTES // ITEM_BYTES[problem["dtype"]],
        "precise": problem["dtype"] == "float32",
    }


def window_of(problem: Problem) -> int:
    """Return the window with which a windowed problem is run and counted: a quarter of the keys."""
    return max(1, problem["keys"] // 4)


def inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """Draw q, k, v and sinks; add starts, the scores' scale, cap and window."""
    import torch

    known = problem.but(**sizes(problem))

    def normal(shape: tuple[int, ...]) -> Any:
        return torch.randn(shape, generator=generator, device=device)

    def starts(side: str) -> Any:
        firsts = accumulate(lengths(problem["batch"], problem[side]), initial=0) if problem["packed"] else [0]
        return torch.tensor(list(firsts), dtype=torch.int32, device=device)

    return {
        **{x.name: normal(x.shape_in(known)).to(getattr(torch, problem["dtype"])) for x in (Q, K, V)},
        "sink_logits": normal((known["sink_logits"],)),
        "query_starts": starts("queries"),
        "key_starts": starts("keys"),
        "most_queries": problem["queries"],
        "most_keys": problem["keys"],
        "scale": float(problem["head_dim"] ** -0.5),
        "softcap": 5.0,
        "window": window_of(problem),
    }


def mask(queries: int, keys: int, window: int, causal: bool, windowed: bool, device: Any) -> Any:
    """Return which keys each query sees, [queries, keys] bool."""
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
    """Compute out and lse in float64.

    A query that sees no key has out 0; its lse is its sink, or else -inf.
    """
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
    """Make out and lse comparable: ``blind`` says which queries see nothing, and their lse is 0."""
    lse = found["lse"]
    return {**found, "lse": lse.masked_fill(lse.isneginf(), 0), "blind": lse.isneginf().double()}


def _ramp(first: int, count: int, top: int) -> int:
    """Sum ``count`` values first, first + 1, ..., each clamped to 0 ... top."""
    count -= min(count, max(0, -first))
    first = max(first, 0)
    rising = min(count, max(0, top - first))
    return rising * first + rising * (rising - 1) // 2 + (count - rising) * top


def visible(queries: int, keys: int, window: int, causal: bool, windowed: bool) -> int:
    """Count the (query, key) pairs of a sequence that see each other."""
    offset = keys - queries
    reach = 1 if causal else window if windowed else keys + queries
    below = _ramp(offset - window + 1, queries, keys) if windowed else 0
    return _ramp(offset + reach, queries, keys) - below


def pairs(problem: Problem) -> int:
    """Count the visible (query, key) pairs of all heads and sequences."""
    flags = (window_of(problem), problem["causal"], problem["windowed"])
    if problem["packed"]:
        queries, keys = (lengths(problem["batch"], problem[side]) for side in ("queries", "keys"))
        return problem["heads"] * sum(visible(q, k, *flags) for q, k in zip(queries, keys, strict=True))
    return problem["heads"] * problem["batch"] * visible(problem["queries"], problem["keys"], *flags)
