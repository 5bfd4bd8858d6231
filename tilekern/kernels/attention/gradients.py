"""Attention's backward as one spec: by the kernels of this package, with the same bits in every run, or by cuDNN.

The kernels run one after the other: delta, then dk and dv by tiles of keys, then dq by tiles of queries; no two blocks
add to the same element. ``kernels`` compute the scores twice: seven matrix products against five. ``kept`` computes
them once and keeps dS for dq, and so does ``apart``, with parts of dk and dv for each query head
(:mod:`tilekern.kernels.attention.kept`). Both take some heads at a time, so that dS takes :data:`MOST_KEPT` bytes at
most. Through a window dS is never kept, and ``apart`` computes the scores twice too
(:mod:`tilekern.kernels.attention.apart`). A ``deterministic`` problem is not for cuDNN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tilekern.kernels.attention import apart as attention_apart
from tilekern.kernels.attention import backward as attention_backward
from tilekern.kernels.attention import backward_problem as shared
from tilekern.kernels.attention import cudnn as attention_cudnn
from tilekern.kernels.attention import kept as attention_kept
from tilekern.kernels.attention import problem as attention_problem
from tilekern.kernels.families.arrays import Arrays
from tilekern.kernels.families.tables import spec
from tilekern.spec import (
    ITEM_BYTES,
    Array,
    Config,
    Constraint,
    Dimension,
    KernelSpec,
    LibraryCall,
    Problem,
    ScalarParameter,
    Space,
    cdiv,
)
from tilekern.spec.targets import Target

PlanFor = Callable[..., Any]
DIMENSIONS = (*shared.DIMENSIONS, Dimension("deterministic", "flag"))
# Bytes of dS: those of 16 heads at 8192 tokens.
MOST_KEPT = 5 << 28


def _pieces(sizes: Problem | dict[str, Any], query_tokens: int, item_bytes: int, *, apart: bool) -> int | None:
    """Return into how many pieces of equal numbers of heads the backward is cut, so that dS has enough room.

    A piece has whole key heads; only where query heads have parts of dk and dv ``apart``, it may have some readers of
    one key head. None if not even the smallest piece has room. ``query_tokens`` counts the queries of all packed
    sequences.
    """
    heads, kv_heads = sizes["heads"], sizes["kv_heads"]
    if heads % kv_heads:
        return None
    given = (sizes[name] for name in ("queries", "keys", "heads", "causal", "packed"))
    lines, columns, keys, queries = attention_kept.room(sizes["batch"], query_tokens, *given)
    need = lines * columns * keys * queries * item_bytes
    cuts = [n for n in range(1, kv_heads + 1) if kv_heads % n == 0]
    if apart:
        cuts += [kv_heads * n for n in range(2, heads // kv_heads + 1) if heads // kv_heads % n == 0]
    return next((n for n in cuts if need <= n * MOST_KEPT), None)


def parts(config: Config, sizes: dict[str, Any], q: Any, k: Any) -> list[tuple[KernelSpec, dict[str, Any]]]:
    """Return the kernels that a config launches after delta, with their sizes by dimension.

    Args:
        config: a config of :data:`SPEC`.
        sizes: the sizes of a problem of :data:`SPEC`, by dimension.
        q: [batch, queries, heads, head_dim], or all packed sequences in a batch of one.
        k: [batch, keys, kv_heads, head_dim], likewise.
    """
    if config["implementation"] == "cudnn":
        return []
    if config["implementation"] == "kernels":
        return [(attention_backward.DKDV, sizes), (attention_backward.DQ, sizes)]
    apart = config["implementation"] == "apart"
    of_parts = sizes | {"tokens": k.shape[0] * k.shape[1], "group": sizes["heads"] // sizes["kv_heads"]}
    if sizes["windowed"]:
        return [(attention_apart.DKDV, sizes), (attention_backward.DQ, sizes), (attention_kept.SUMS, of_parts)]
    # A record may serve sizes larger than its own, whose dS has less room than the smallest piece's.
    count = _pieces(sizes, q.shape[1], q.element_size(), apart=apart) or sizes["heads" if apart else "kv_heads"]
    heads, kv_heads = sizes["heads"] // count, max(1, sizes["kv_heads"] // count)
    piece = sizes | {"heads": heads, "kv_heads": kv_heads, "apart": apart}
    found = [(attention_kept.DKDV, piece), (attention_kept.DQ, piece)]
    if apart:
        found += [(attention_kept.SUMS, of_parts | piece)]
    return found


class Found(NamedTuple):
    """What a call launches; :func:`launched` takes it, for any tensors of the sizes that :func:`find` was given.

    Attributes:
        config: the config that runs.
        delta: the plan of delta; None by cuDNN.
        plans: the plans of :func:`parts`.
        room: the shape of dS of a piece; None if the scores are computed twice.
        pieces: into how many pieces query heads and key heads are cut.
    """

    config: Config
    delta: Any
    plans: list[Any]
    room: tuple[int, ...] | None
    pieces: tuple[int, int]


def find(plan_for: PlanFor, config: Config, sizes: dict[str, Any], q: Any, k: Any) -> Found | None:
    """Return what a call launches, by :func:`parts` of its arguments; None if kernels have no plans.

    Pieces have heads of their own, which may be in no cache: then the scores are computed twice.
    """
    if config["implementation"] == "cudnn":
        return Found(config, None, [], None, (1, 1))
    delta = plan_for(attention_backward.DELTA, q.device, *q.shape, q.dtype)
    for way in dict.fromkeys((config, Config(implementation="kernels"))):
        found = parts(way, sizes, q, k)
        plans = [plan_for(one, q.device, *(own[d.name] for d in one.dimensions)) for one, own in found]
        if delta is None or None in plans:
            continue
        if way["implementation"] == "kernels" or sizes["windowed"]:
            return Found(way, delta, plans, None, (1, 1))
        own = found[0][1]
        given = (own[name] for name in ("queries", "keys", "heads", "causal", "packed"))
        room = attention_kept.room(own["batch"], q.shape[1], *given)
        return Found(way, delta, plans, room, (q.shape[2] // own["heads"], k.shape[2] // own["kv_heads"]))
    return None


def _composite(problem: Problem, config: Config) -> LibraryCall:
    flags = {name: problem[name] for name in shared.FLAGS}

    def call(plan_for: PlanFor, *inputs: Any) -> tuple[Any, Any, Any]:
        q, k, query_starts, most_queries, most_keys = (inputs[n] for n in (0, 1, 6, 8, 9))
        sizes = {
            "batch": query_starts.shape[0] - 1 if problem["packed"] else q.shape[0],
            "queries": most_queries, "keys": most_keys, "heads": q.shape[2], "kv_heads": k.shape[2],
            "head_dim": q.shape[3], **flags, "dtype": q.dtype,
        }  # fmt: skip
        found = find(plan_for, config, sizes, q, k)
        assert found is not None, "attention's backward has a plan, and its kernels have none"
        return launched(found, *inputs)

    return LibraryCall(call, attention_cudnn.BACKWARD_INPUTS, composite=True)


def launched(
    found: Found, q: Any, k: Any, v: Any, out: Any, dout: Any, lse: Any, query_starts: Any, key_starts: Any,
    most_queries: int, most_keys: int, *factors: Any,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Return dq, dk and dv by kernels; the arguments are the inputs of :data:`SPEC`."""
    number = q.get_device()
    delta = _empty(lse)
    found.delta.launch(number, out, dout, delta)
    dq, dk, dv = _empty(q), _empty(k), _empty(v)
    if found.room is not None:
        arrays = (q, dout, dq, lse, delta), (k, v, dk, dv)
        _launch_kept(found, number, *arrays, (query_starts, key_starts), (most_queries, most_keys), factors)
        return dq, dk, dv
    of_keys, of_queries, *of_sums = found.plans
    read = q, k, v, dout, lse, delta, query_starts, key_starts
    sums = _parts(k, q.shape[2]) if of_sums else (dk, dv)
    of_keys.launch(number, *read, most_keys, *factors, *sums)
    of_queries.launch(number, *read, most_queries, *factors, dq)
    if of_sums:
        _add_parts(of_sums[0], number, sums, (dk, dv))
    return dq, dk, dv


def _parts(k: Any, heads: int) -> tuple[Any, Any]:
    """Make parts of dk and dv for each query head that reads the key heads of k."""
    import torch

    shape = (*k.shape[:2], heads, k.shape[3])
    dk, dv = (torch.empty(shape, dtype=torch.float32, device=k.device) for _ in range(2))
    return dk, dv


def _add_parts(plan: Any, number: int, parts: tuple[Any, ...], sums: tuple[Any, ...]) -> None:
    """Write the sums of the parts of the query heads that read each key head."""
    kv_heads = sums[0].shape[2]
    by_group = (x.view(-1, kv_heads, x.shape[2] // kv_heads, x.shape[3]) for x in parts)
    plan.launch(number, *by_group, *(x.flatten(0, 1) for x in sums))


def _empty(like: Any) -> Any:
    import torch

    return torch.empty_like(like, memory_format=torch.contiguous_format)


def _launch_kept(
    found: Found, number: int, of_readers: tuple[Any, ...], of_owners: tuple[Any, ...], starts: tuple[Any, Any],
    most: tuple[int, int], factors: tuple[Any, ...],
) -> None:  # fmt: skip
    """Write dq, dk and dv piece by piece, with dS kept.

    ``of_readers`` are q, dout, dq, lse and delta, ``of_owners`` k, v, dk and dv.
    """
    import torch

    (of_keys, of_queries, *of_sums), (scale, softcap, _) = found.plans, factors
    first, (count, owners) = of_readers[0], found.pieces
    kept = torch.empty(found.room, dtype=first.dtype, device=first.device)
    each, sums = count // owners, ()  # type: tuple[int, tuple[Any, ...]]
    readers, of_owners = _cut(of_readers, count), _cut(of_owners, owners)
    for n, (q, dout, dq, *rows) in enumerate(readers):
        k, v, dk, dv = of_owners[n // each]
        if not of_sums:
            sums = dk, dv
        elif n % each == 0:
            sums = _parts(k, each * q.shape[2])
        own = sums if each == 1 else [x.narrow(2, n % each * q.shape[2], q.shape[2]) for x in sums]
        of_keys.launch(number, q, k, v, dout, *rows, *starts, most[1], scale, softcap, *own, kept)
        of_queries.launch(number, kept, k, *starts, most[0], scale, dq)
        if of_sums and n % each == each - 1:
            _add_parts(of_sums[0], number, sums, (dk, dv))
            # Before the next key heads' are made.
            del sums, own


def _cut(arrays: tuple[Any, ...], count: int) -> list[tuple[Any, ...]]:
    """Return the arrays of each of ``count`` pieces of their heads, the dimension 2 or, of rows' values, 1."""
    if count == 1:
        return [arrays]
    return list(zip(*(x.chunk(count, 2 if x.dim() == 4 else 1) for x in arrays), strict=True))


def _pieces_of(problem: Problem, *, apart: bool) -> int | None:
    tokens = attention_problem.sizes(problem)["query_tokens"]
    return _pieces(problem, tokens, ITEM_BYTES[problem["dtype"]], apart=apart)


def _has_room(problem: Problem, config: Config, target: Target) -> bool:
    if config["implementation"] not in ("kept", "apart"):
        return True
    apart, heads, kv_heads = config["implementation"] == "apart", problem["heads"], problem["kv_heads"]
    if problem["dtype"] == "float32" or (apart and heads == kv_heads):
        return False
    if problem["windowed"]:
        known = attention_problem.sizes(problem)
        part = problem["head_dim"] * known["entries"] * known["key_tokens"] * 2 * ITEM_BYTES["float32"]
        return apart and heads % kv_heads == 0 and bool(heads * part <= MOST_KEPT)
    return _pieces_of(problem, apart=apart) is not None


_KEPT = Constraint(
    "dS is kept of half types, without windows, which leave few scores to compute again, and if that of one key head "
    "has room, or with parts of one query head; there are parts only if key heads have several readers and, through a "
    "window, if all have room",
    _has_room,
)


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


def _default(problem: Problem, target: Target) -> Config:
    """Return what is fastest on an H200, for GPUs of its kind: parts if key heads have too few tiles to fill it."""
    count = _pieces_of(problem, apart=False)
    tiles = 0 if count is None else problem["batch"] * (problem["kv_heads"] // count) * cdiv(problem["keys"], 64)
    few = target.sm_count if problem["windowed"] else 3 * target.sm_count
    names = ("apart", "kept") if tiles < few else ("kept",)
    found = [config for config in (Config(implementation=name) for name in names) if _has_room(problem, config, target)]
    return found[0] if found and target.has_wgmma else Config(implementation="kernels")


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
        attention_cudnn.backward(problem) if config["implementation"] == "cudnn" else _composite(problem, config)
    ),
    grid=lambda sizes, config, sm_count: 1,
    sizes=attention_problem.sizes,
    space=Space(
        lambda problem: {"implementation": ["kernels", "kept", "apart", "cudnn"]},
        (attention_cudnn.SERVES, attention_cudnn.REPEATS, _KEPT),
    ),
    default=_default,
    generic=lambda problem: Config(implementation="kernels"),
    given=_inputs,
    flops=lambda problem: 10 * attention_problem.pairs(problem) * problem["head_dim"],
    roundings=3,
)

SPECS = (SPEC,)
