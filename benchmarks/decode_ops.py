"""Measure the ops of one decoded token beside their peers: a layer's products of few rows, and attention to a cache.

A call goes through several copies of its weights or caches one after the other, so that none of them is in the L2
cache, and a launch is not timed alone. tilekern's calls are those of patched models, outside and inside of
``tilekern.invariant()``; for attention outside, the op itself, since a patched model leaves it to SDPA where no record
says that the op is faster. o and the head are plain linear layers of a model; here they take the function that q, k and
v take.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.clock import Entrant
from benchmarks.environment import version_of
from benchmarks.jobs import Found
from benchmarks.kernels import Effort
from benchmarks.providers import OURS, PEER_SLACK, one_line
from benchmarks.results import Row
from tilekern.errors import InputError
from tilekern.spec import TOLERANCES
from tilekern.tuning.measure.timing import Timing
from tilekern.tuning.verify.check import errors, within

BENCHMARK = "decode"
INVARIANT = f"{OURS}-invariant"
# Bytes of weights or caches that one call reads at least, several times an L2 cache, and the most copies of them.
LEAST_BYTES, MOST_COPIES = 256 << 20, 64
# How many sequences of a batch are compared with attention in float64.
CHECKED = 2
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_BACKENDS = {"sdpa-cudnn": "CUDNN_ATTENTION", "sdpa-flash": "FLASH_ATTENTION", "sdpa-efficient": "EFFICIENT_ATTENTION"}
Call = Callable[..., Any]


@dataclass(frozen=True)
class Product:
    """Linear layers that share their input: how many of a model's, the matrices' sizes, and tilekern's call.

    ``formula`` computes the same by ``linear(x, weight)``.
    """

    name: str
    count: int
    inner: int
    columns: Sequence[int]
    ours: Call
    formula: Call

    def weights(self, device: str) -> tuple[Any, ...]:
        """Draw the matrices."""
        import torch

        shapes = [(columns, self.inner) for columns in self.columns]
        return tuple(torch.randn(one, dtype=torch.bfloat16, device=device) * self.inner**-0.5 for one in shapes)


def mode_of(who: str) -> contextlib.AbstractContextManager[None]:
    """Return the mode of a provider's calls."""
    return inside() if who == INVARIANT else contextlib.nullcontext()


def inside() -> contextlib.AbstractContextManager[None]:
    """Return the invariant mode."""
    import tilekern

    return tilekern.invariant()


def has_experts(config: Any) -> bool:
    """Return whether the weights that a token needs depend on the token."""
    text = config.get_text_config()
    return any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def products_of(config: Any, layers: int) -> list[Product]:
    """Return the products of one token: of a layer's attention, of its MLP, and of the head.

    Args:
        config: the configuration of a model.
        layers: how many layers count.

    Raises:
        InputError: its layers have no MLP with the gate that the kernel knows.
    """
    import torch

    from tilekern.ops.gated_linear import gated_linear
    from tilekern.ops.linear import product
    from tilekern.ops.projections import projections

    text = config.get_text_config()
    named = str(getattr(text, "hidden_activation", None) or getattr(text, "hidden_act", ""))
    kind = _ACTIVATIONS.get(named, "")
    if not kind or has_experts(config):
        raise InputError(f"{text.model_type}: its layers have no MLP with a gate by {' or '.join(_ACTIVATIONS)}")
    hidden, inner = text.hidden_size, text.intermediate_size
    size = getattr(text, "head_dim", None) or hidden // text.num_attention_heads
    attended, shared = text.num_attention_heads * size, text.num_key_value_heads * size
    tanh = functools.partial(torch.nn.functional.gelu, approximate="tanh")
    activation: Call = torch.nn.functional.silu if kind == "silu" else tanh

    def alone(linear: Call, x: Any, weight: Any) -> Any:
        return linear(x, weight)

    return [
        Product(
            "q, k, v", layers, hidden, (attended, shared, shared), projections,
            lambda linear, x, *weights: tuple(linear(x, weight) for weight in weights),
        ),
        Product("o", layers, attended, (hidden,), product, alone),
        Product(
            "gate, up, activation", layers, hidden, (inner, inner), functools.partial(gated_linear, activation=kind),
            lambda linear, x, gate, up: activation(linear(x, gate)) * linear(x, up),
        ),
        Product("down", layers, inner, (hidden,), product, alone),
        Product("head", 1, hidden, (text.vocab_size,), product, alone),
    ]  # fmt: skip


def products(
    name: str, config: Any, layers: int, rows: Sequence[int], effort: Effort, clock: Any, device: str
) -> Iterator[Found]:
    """Time a model's products of some rows: each alone, and the sum of all layers and the head."""
    import torch

    peer = f"torch {version_of('torch')}"
    for count in rows:
        timings: dict[str, list[tuple[int, Timing]]] = {}
        wanted = products_of(config, layers)
        for one in wanted:
            case = f"{name} products, {count} rows: {one.name}"
            copies = [one.weights(device) for _ in range(_copies(2 * one.inner * sum(one.columns), device))]
            x = torch.randn((count, 1, one.inner), dtype=torch.bfloat16, device=device)
            by_torch = functools.partial(one.formula, torch.nn.functional.linear)
            calls: dict[str, Call] = {OURS: one.ours, INVARIANT: one.ours, peer: by_torch}
            wide = one.formula(torch.nn.functional.linear, x.double(), *(weight.double() for weight in copies[0]))
            givens = [(x, *weights) for weights in copies]
            for who, found in _raced(case, calls, givens, wide, lambda out: out, effort, clock):
                if isinstance(found, Timing):
                    timings.setdefault(who, []).append((one.count, found))
                    yield _row(case, who, found)
                else:
                    yield found
            del copies, givens, wide
        for who, parts in timings.items():
            if len(parts) == len(wanted):
                yield _row(f"{name} products, {count} rows: {layers} layers and the head", who, _sum(parts))


def attention(
    name: str, config: Any, batches: Sequence[int], contexts: Sequence[int], effort: Effort, clock: Any, device: str
) -> Iterator[Found]:  # fmt: skip
    """Time attention of one new token per sequence to a cache, by tilekern and each back end of SDPA."""
    import torch

    from tilekern.ops.operation import DECLARED

    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    for batch in batches:
        for context in contexts:
            case = f"{name} decode attention, batch {batch}, context {context}"
            try:
                asking, cached = _shapes(config, batch, context)
                count = _copies(4 * math.prod(cached), device)
                copies = [tuple(torch.randn(cached, **options) for _ in "kv") for _ in range(count)]
                q = torch.randn(asking, **options)
                lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
                few, keys, values = (x[:CHECKED].double() for x in (q[:, :, 0], *copies[0]))
                wide = DECLARED["decode_attention"].formula(
                    few, keys, values, lengths[:CHECKED], None, None, None, None, None, None
                )
                del keys, values
                calls = _attentions(lengths)
                givens = [(q, *cache) for cache in copies]
                for who, found in _raced(case, calls, givens, wide, lambda out: out[:CHECKED], effort, clock):
                    yield _row(case, who, found) if isinstance(found, Timing) else found
            except torch.OutOfMemoryError:
                yield f"{case}: no memory is left for it"
            copies, givens = [], []
            if device == "cuda":
                torch.cuda.empty_cache()


def ask(config: Any, parts: Collection[str], batches: Sequence[int], contexts: Sequence[int]) -> None:
    """Call tilekern on meta tensors, in both modes, as ``products`` and ``attention`` do if they are in ``parts``."""
    import torch

    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta"}
    for who in (OURS, INVARIANT):
        with torch.no_grad(), mode_of(who):
            for batch in batches:
                for one in products_of(config, 1) if "products" in parts else []:
                    one.ours(torch.empty((batch, 1, one.inner), **options), *one.weights("meta"))
                for context in contexts if "attention" in parts else []:
                    q, cached = _shapes(config, batch, context)
                    given = [torch.empty(shape, **options) for shape in (q, cached, cached)]
                    _attentions(torch.empty(batch, dtype=torch.int32, device="meta"))[who](*given)


def _shapes(config: Any, batch: int, context: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of the query of a token, and of the keys or the values of a cache."""
    text = config.get_text_config()
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return (batch, text.num_attention_heads, 1, size), (batch, text.num_key_value_heads, context, size)


def _attentions(lengths: Any) -> dict[str, Call]:
    """Return the calls of ``q`` [batch, heads, 1, head_dim] and a cache; results are [batch, heads, head_dim]."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from tilekern import ops

    layer = torch.nn.Module()
    layer.is_causal = True

    def of_model(q: Any, keys: Any, values: Any) -> Any:
        scale = q.shape[-1] ** -0.5
        return ALL_ATTENTION_FUNCTIONS[OURS](layer, q, keys, values, None, scaling=scale)[0][:, 0]

    def by(backend: str) -> Call:
        def attend(q: Any, keys: Any, values: Any) -> Any:
            with sdpa_kernel([getattr(SDPBackend, backend)]):
                return torch.nn.functional.scaled_dot_product_attention(q, keys, values, enable_gqa=True)[:, :, 0]

        return attend

    calls: dict[str, Call] = {
        OURS: lambda q, keys, values: ops.decode_attention(q[:, :, 0], keys, values, lengths),
        INVARIANT: of_model,
    }
    return calls | {f"{name} {version_of('torch')}": by(backend) for name, backend in _BACKENDS.items()}


def _copies(size_bytes: int, device: str) -> int:
    """Return how many copies of operands of this size a call goes through."""
    return min(MOST_COPIES, math.ceil(LEAST_BYTES / size_bytes)) if device == "cuda" else 2


def _raced(
    case: str, calls: Mapping[str, Call], givens: Sequence[tuple[Any, ...]], wide: Any, judged: Call, effort: Effort,
    clock: Any,
) -> Iterator[tuple[str, Timing | str]]:  # fmt: skip
    """Check each call on the first operands, then time all that are right; yield a timing of one call, or a note."""
    right: dict[str, Call] = {}
    for who, call in calls.items():
        try:
            with mode_of(who):
                found = judged(call(*givens[0]))
            _check(found, wide, 1.0 if who.startswith(OURS) else PEER_SLACK)
            right[who] = call
        except Exception as error:  # noqa: BLE001 (whatever a back end raises, the others go on)
            yield who, f"{case}: {who} left out: {one_line(error)}"

    def through(who: str) -> list[Any]:
        with mode_of(who):
            return [right[who](*given) for given in givens]

    entrants = {who: Entrant(functools.partial(through, who)) for who in right}
    timings = clock.run(entrants, effort.samples, effort.seconds)
    for who in right:
        if who in timings:
            timing, share = timings[who], 1 / len(givens)
            yield who, Timing(timing.median_us * share, timing.spread_us * share, timing.samples)
        else:
            yield who, f"{case}: {who} left out, too few samples"


def _check(found: Any, wide: Any, slack: float) -> None:
    """Compare one result, or several, with float64; a gate rounds its factors before their product."""
    pairs = zip(found, wide, strict=True) if isinstance(found, tuple) else [(found, wide)]
    for result, reference in pairs:
        relative, elementwise = errors(result, reference)
        if not within(relative, elementwise, TOLERANCES["bfloat16"].times(2 * slack)):
            raise AssertionError(f"wrong: relative error {relative:.2e}, elementwise {elementwise:.2e}")


def _sum(parts: Sequence[tuple[int, Timing]]) -> Timing:
    total, spread = (sum(count * getattr(one, name) for count, one in parts) for name in ("median_us", "spread_us"))
    return Timing(total, spread, min(one.samples for _, one in parts))


def _row(case: str, who: str, timing: Timing) -> Row:
    return Row(BENCHMARK, case, who, "time", round(timing.median_us, 3), "us", round(timing.spread_us, 3))
