"""Attention's backward without its kernels: dimensions, arrays, inputs, the formula of the gradients, search spaces.

The layout and the flags are those of :mod:`tilekern.kernels.attention.problem`. Sinks act only through the log-sum-exp:
no backward kernel takes them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tilekern.kernels.attention import problem as shared
from tilekern.spec import ITEM_BYTES, Array, Config, Constraint, Problem, Space, Value
from tilekern.spec.targets import Target

DIMENSIONS = tuple(dimension for dimension in shared.DIMENSIONS if dimension.name != "sinks")
FLAGS = ("causal", "windowed", "capped", "packed")


# Arrays that both backward kernels read.
READ = (
    shared.Q,
    shared.K,
    shared.V,
    Array("dout", "dtype", shared.TOKENS["queries"]),
    *(Array(name, "float32", shared.OF_QUERIES, aligned=False) for name in ("lse", "delta")),
    *shared.STARTS,
)
DQ, DK, DV = (
    Array(name, "dtype", shared.TOKENS["queries" if name == "dq" else "keys"], "output") for name in ("dq", "dk", "dv")
)


def inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """Draw the forward's inputs and dout; compute their lse and delta.

    lse gets a normal gradient too, which delta holds: without it a query that sees one key has dS = 0, and a rounded
    result cannot be compared.
    """
    import torch

    found = shared.inputs(problem.but(sinks=False), generator, device)
    q = found["q"]
    found["dout"] = torch.randn(q.shape, generator=generator, device=device).to(q.dtype)
    lse, delta = _by_head(problem, found)
    dlse = torch.randn(lse.shape, generator=generator, device=device)
    del found["sink_logits"]
    return {**found, "lse": lse.float(), "delta": delta.float() - dlse}


# Scores of one sequence computed at a time.
_SCORES = 1 << 28


def _by_head(problem: Problem, found: dict[str, Any]) -> tuple[Any, Any]:
    """Compute lse and delta in float64, some heads at a time: the scores of all heads may not fit in memory."""
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
    """Compute dq, dk and dv of one sequence, [tokens, heads, head_dim] each."""
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
    # Group by group, since index_add_ on a GPU adds heads in a different order each time.
    dk, dv = (torch.stack([found[:, of_head == kv_head].sum(1) for kv_head in range(kv_heads)], 1) for found in by_head)
    return dq, dk, dv


def gradients(
    q: Any, k: Any, v: Any, dout: Any, lse: Any, delta: Any, query_starts: Any, key_starts: Any, most_queries: int,
    most_keys: int, scale: float, softcap: float, window: int, causal: bool, windowed: bool, capped: bool, packed: bool,
) -> dict[str, Any]:  # fmt: skip
    """Compute dq, dk and dv in float64 for the given lse and delta."""
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


def _of(outputs: tuple[str, ...]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(gradients)
    def reference(**given: Any) -> dict[str, Any]:
        found = gradients(**given)
        return {name: found[name] for name in outputs}

    return reference


# The results of the kernels that own tiles of queries, or tiles of keys.
REFERENCES = {"queries": _of(("dq",)), "keys": _of(("dk", "dv"))}


# Search spaces.


def config_of(tile_m: int, tile_n: int, warps: int, schedule: str = "block") -> Config:
    """Return a config of the tile kernels, at one block an SM."""
    return Config(
        implementation="tile", schedule=schedule, tile_m=tile_m, tile_n=tile_n, occupancy=1, num_worker_warps=warps,
        latency=0,
    )  # fmt: skip


# Configs in the order in which the default tries them; the last one fits everywhere.
_TRIED = {
    "keys": ((64, 128, 8), (64, 64, 8), (64, 64, 4), (32, 32, 8), (16, 16, 8)),
    "queries": ((128, 128, 8), (64, 64, 4), (32, 32, 8), (16, 16, 8)),
}
_SMALLEST = 16


def _axes(problem: Problem) -> dict[str, list[Value]]:
    # Products of float32 run on the ordinary units: few configs, since none is fast.
    plain = problem["dtype"] == "float32"
    small = plain or shared.depth_of(problem) > 256
    tiles: list[Value] = [_SMALLEST, 32] if small else [64, 128] if shared.depth_of(problem) <= 128 else [32, 64]
    return {
        "implementation": ["tile"],
        "schedule": ["block"],
        "tile_m": tiles,
        "tile_n": tiles,
        "occupancy": [1] if plain else [1, 2],
        "num_worker_warps": [4, 8],
        "latency": [0],
    }


def _fits_registers(problem: Problem, config: Config, target: Target, side: str) -> bool:
    rows, columns = (config[name] for name in ("tile_m", "tile_n"))
    sums = rows if side == "queries" else 2 * columns
    values = sums * shared.depth_of(problem) + 2 * rows * columns
    # Blackwell's data-centre GPUs keep accumulators in tensor memory, which dk and dv of long heads do not fit.
    if target.has_tensor_memory:
        long = side == "keys" and shared.depth_of(problem) > 128
        return bool(rows == columns == 32 if long else values <= 256 * 32 * config["num_worker_warps"])
    return bool(values <= 192 * 32 * config["num_worker_warps"])


def _fits_shared(problem: Problem, config: Config, target: Target, side: str) -> bool:
    own, other = (config[name] for name in (("tile_m", "tile_n") if side == "queries" else ("tile_n", "tile_m")))
    row = shared.depth_of(problem) * ITEM_BYTES[problem["dtype"]]
    return bool((2 * own + 4 * other) * row * config["occupancy"] <= target.shared_bytes)


def _least(config: Config) -> bool:
    return bool(config["tile_m"] == config["tile_n"] == _SMALLEST and config["occupancy"] == 1)


def space_of(side: str) -> Space:
    """Return the space of the kernel whose blocks own tiles of ``side``."""
    constraints = (
        Constraint(
            "a warp's share of the sums, P and dS exceeds its registers",
            lambda problem, config, target: _least(config) or _fits_registers(problem, config, target, side),
        ),
        Constraint(
            "a block's own tiles and two stages of the others exceed its share of the shared memory",
            lambda problem, config, target: _least(config) or _fits_shared(problem, config, target, side),
        ),
        Constraint(
            "two blocks of 8 worker warps leave 80 registers to a thread",
            lambda problem, config, target: config["occupancy"] == 1 or config["num_worker_warps"] == 4,
        ),
    )
    return Space(_axes, constraints)


def _small_side(problem: Problem) -> int:
    """Return the side of a small tile for eight warps that compiles in 3 s with packed rows, a window and a cap."""
    return 32 if shared.depth_of(problem) <= (64 if problem["dtype"] == "float32" else 128) else _SMALLEST


def _is_quick(problem: Problem, config: Config, target: Target) -> bool:
    """Return whether a config compiles in 3 s: without large matrix units, products and packed rows are long code."""
    long = problem["dtype"] == "float32" or problem["packed"]
    wide = config["tile_m"] >= 64 and (shared.depth_of(problem) <= 128 or target.has_wgmma)
    return bool(not long or wide or config["tile_m"] <= _small_side(problem))


def generic(problem: Problem) -> Config:
    """Return small tiles that eight warps share, for any GPU and any layout."""
    return config_of(_small_side(problem), _small_side(problem), 8, "persistent")


def default(problem: Problem, target: Target, space: Space, side: str) -> Config:
    """Return the first tried config that the space holds and that compiles in seconds."""
    sizes = {*_axes(problem)["tile_m"], _SMALLEST}
    tried = [config_of(m, n, warps) for m, n, warps in _TRIED[side] if {m, n} <= sizes]
    quick = [config for config in tried[:-1] if _is_quick(problem, config, target)] + tried[-1:]
    return next(config for config in quick if space.violated(problem, config, target) is None)
