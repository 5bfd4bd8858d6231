"""Make cases of a model's layer of experts at real width: its tensors, its expected results, and its providers.

A layer is called ``layer(x, ids, scores, *weights)`` with x [tokens, hidden], the experts of each token and their
weights [tokens, choices], and the parameters of transformers' module in its order and layout. Each layer has four
cases: all parameters are trained, with balanced and with Zipf routing; the parameters are frozen; LoRA is applied like
PEFT's LoRA for parameters, which adds its product to each parameter before the layer runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.cases import Case, Tensors, Work, seeded
from benchmarks.environment import version_of
from benchmarks.models import make_model
from benchmarks.providers import FP8, OURS, Provider
from benchmarks.train import name_of
from tilekern.errors import InputError
from tilekern.runtime.switches import ROWWISE
from tilekern.tuning.plan.configs import config_named

OP, FROZEN_OP, LORA_OP = "experts", "experts_frozen", "experts_lora"
BALANCED, ZIPF, FROZEN, LORA = "balanced", "zipf", "frozen", "lora"
KINDS = (BALANCED, ZIPF, FROZEN, LORA)
_OPS = {BALANCED: OP, ZIPF: OP, FROZEN: FROZEN_OP, LORA: LORA_OP}
MODELS = ("gpt-oss-20b", "qwen3-30b-a3b")
RANK = 16
# Pre-activation, activation, the experts' rows and their sum are rounded, forward and backward.
ROUNDINGS = 4
# LoRA rounds the weights that it makes and their gradients, too, and its larger activations reach GPT-OSS's clamps,
# where a rounding decides whether an element has a gradient: torch's own loop is as far off.
LORA_ROUNDINGS = 16
Layer = Callable[..., Any]


@dataclass(frozen=True)
class Experts:
    """A model's module of experts on ``meta``, which tells the layout of its parameters and its gate."""

    model: str
    module: Any
    choices: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of its parameters."""
        return {name: tuple(x.shape) for name, x in self.module.named_parameters()}

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return the number of experts, and the columns of x and of the pre-activation."""
        number, *pair = self.shapes["gate_up_proj"]
        hidden, double = pair if self.module.is_transposed else pair[::-1]
        return number, hidden, double

    def given(self, weights: Sequence[Any]) -> dict[str, Any]:
        """Return parameters by name."""
        return dict(zip(self.shapes, weights, strict=True))

    def facing(self, weight: Any) -> Any:
        """Return a weight as [experts, in, out]."""
        return weight if self.module.is_transposed else weight.transpose(1, 2)

    def run(self, implementation: str, format: str = "") -> Layer:
        """Run the layer by transformers' module, with one of its implementations of experts.

        ``format`` is that of 8-bit floats, or empty.
        """
        import torch

        from tilekern.patch.experts import FORMAT

        module = _module(self.model, implementation)
        if format:
            setattr(module, FORMAT, format)

        def layer(x: Any, ids: Any, scores: Any, *weights: Any) -> Any:
            return torch.func.functional_call(module, self.given(weights), (x, ids, scores))

        return layer


@functools.cache
def experts_of(model: str) -> Experts:
    """Return a model's layer of experts.

    Raises:
        InputError: the model is unknown, or it has no experts.
    """
    config = config_named(model)[1].get_text_config()
    return Experts(model, _module(model, "grouped_mm"), config.num_experts_per_tok)


def _module(model: str, implementation: str) -> Any:
    whole = make_model(config_named(model)[1], 1, "eager", "meta")
    module = next((part for part in whole.modules() if hasattr(type(part), "_apply_gate")), None)
    if module is None:
        raise InputError(f"{model} has no experts whose implementation can be chosen; known: {', '.join(MODELS)}")
    whole.set_experts_implementation(implementation)
    return module


def cases(model: str, tokens: Sequence[int], kinds: Sequence[str], dtype: str = "bfloat16") -> list[Case]:
    """Return the cases of a model's layer at these token counts, of these :data:`KINDS`."""
    experts = experts_of(model)
    return [_case(experts, count, kind, dtype) for count in tokens for kind in kinds]


def label(model: str, tokens: int, kind: str) -> str:
    """Return a case's name in the results."""
    return f"{name_of(model)} {tokens} tokens, {kind}"


def _case(experts: Experts, tokens: int, kind: str, dtype: str) -> Case:
    _, hidden, double = experts.sizes
    product = 2 * tokens * experts.choices * hidden * (double + double // 2)
    loop = _of_kind(kind, functools.partial(by_loop, experts))
    return Case(
        op=_OPS[kind], label=label(experts.model, tokens, kind), dtype=dtype,
        roundings=LORA_ROUNDINGS if kind == LORA else ROUNDINGS,
        tensors=functools.partial(_tensors, experts, tokens, kind, dtype), metrics=("forward_backward",),
        expected=functools.partial(_expected, loop), work=Work(flops=(product, product * (1 if kind == FROZEN else 2))),
        products=Products(experts, kind != FROZEN),
    )  # fmt: skip


def _tensors(experts: Experts, tokens: int, kind: str, dtype: str, device: str) -> Tensors:
    import torch

    generator, (_, hidden, _) = seeded(device), experts.sizes

    def normal(*shape: int, scale: float = 1.0) -> Any:
        return (torch.randn(shape, device=device, generator=generator) * scale).to(getattr(torch, dtype))

    def weight(*shape: int) -> Any:
        inner = shape[1 if experts.module.is_transposed else 2] if len(shape) == 3 else 1
        return normal(*shape, scale=inner**-0.5)

    weights = [weight(*shape) for shape in experts.shapes.values()]
    ids = routed(tokens, experts.choices, experts.sizes[0], kind == ZIPF, device)
    scores = torch.rand(ids.shape, device=device, generator=generator)
    x = (normal(tokens, hidden), (scores / scores.sum(1, keepdim=True)).to(getattr(torch, dtype)))
    slopes = (normal(tokens, hidden),)
    if kind == FROZEN:
        return Tensors(x, (ids, *weights), slopes)
    if kind == LORA:
        wholes = [shape for shape in experts.shapes.values() if len(shape) == 3]
        factors = [normal(*s, scale=0.1) for n, i, o in wholes for s in ((n, i, RANK), (n, RANK, o))]
        return Tensors((*x, *factors), (ids, *weights), slopes)
    return Tensors((*x, *weights), (ids,), slopes)


def routed(tokens: int, choices: int, experts: int, skewed: bool, device: str) -> Any:
    """Draw the experts [tokens, choices] of each token, in any order: an equal number of rows each, or by Zipf's law.

    For a skewed routing each token draws different experts, like a router; the expert of rank r has a probability
    proportional to 1 / r. The first expert gets fewer rows than by Zipf's law, since no token has it twice.
    """
    import torch

    generator = seeded(device)
    if skewed:
        ranks = torch.arange(1, experts + 1, device=device)
        noise = -(-torch.rand((tokens, experts), device=device, generator=generator).log()).log()
        return (noise - ranks.log()).topk(choices).indices
    token = torch.rand(tokens, device=device, generator=generator).argsort()
    return (token[:, None] * choices + torch.arange(choices, device=device)) % experts


def _of_kind(kind: str, layer: Layer) -> Layer:
    """Return the layer as a case of this kind calls it: inputs with gradients, then constants."""
    import torch

    def trained(x: Any, scores: Any, *rest: Any) -> Any:
        return layer(x, rest[-1], scores, *rest[:-1])

    def frozen(x: Any, scores: Any, ids: Any, *weights: Any) -> Any:
        return layer(x, ids, scores, *weights)

    def adapted(x: Any, scores: Any, *rest: Any) -> Any:
        factors, (ids, *weights) = iter(rest[:4]), rest[4:]
        whole = [torch.baddbmm(w, next(factors), next(factors)) if w.dim() == 3 else w for w in weights]
        return layer(x, ids, scores, *whole)

    return {FROZEN: frozen, LORA: adapted}.get(kind, trained)


def calls_of(layer: Layer) -> dict[str, Layer]:
    """Return a layer's calls by the ops of the cases."""
    return {op: _of_kind(kind, layer) for kind, op in _OPS.items()}


def by_loop(experts: Experts, x: Any, ids: Any, scores: Any, *weights: Any) -> Any:
    """Compute the layer, expert by expert."""
    import torch

    given = experts.given(weights)
    total = torch.zeros_like(x)
    # Else each expert's gradient would be a full-size tensor, zero outside its own part.
    apart = [(name, weight.unbind()) for name, weight in given.items()]
    for number in range(experts.sizes[0]):
        own = {name: parts[number] for name, parts in apart}
        token, slot = (ids == number).nonzero(as_tuple=True)
        y = experts.module._apply_gate(_linear(experts, own, "gate_up_proj", x[token]))
        y = _linear(experts, own, "down_proj", y) * scores[token, slot, None]
        total = total.index_add(0, token, y)
    return total


def _linear(experts: Experts, own: Mapping[str, Any], name: str, rows: Any) -> Any:
    weight, bias = own[name], own.get(f"{name}_bias")
    y = rows @ (weight if experts.module.is_transposed else weight.T)
    return y if bias is None else y + bias


def _expected(loop: Layer, t: Tensors) -> tuple[Any, ...]:
    """Return the loop's result and gradients in float64."""
    import torch

    wide = [x.detach().double().requires_grad_() for x in t.inputs]
    y = loop(*wide, *(x.double() if x.is_floating_point() else x for x in t.constants))
    return y.detach(), *torch.autograd.grad(y, wide, t.slopes[0].double())


class Products:
    """Only the grouped products of a case, by torch: two forward; two of rows and two of weights backward.

    Their factors are made at the first call. Weights' gradients are omitted if they are not needed.
    """

    def __init__(self, experts: Experts, weighted: bool) -> None:
        self.experts, self.weighted = experts, weighted
        self.operands: tuple[Any, ...] | None = None

    def __call__(self, t: Tensors) -> None:
        """Compute the products of a case's tensors."""
        import torch

        if self.operands is None:
            self.operands = self._made(t)
        rows, pre, act, up, down, offsets = self.operands
        torch._grouped_mm(rows, up, offs=offsets)
        torch._grouped_mm(act, down, offs=offsets)
        torch._grouped_mm(rows, down.transpose(1, 2), offs=offsets)
        torch._grouped_mm(pre, up.transpose(1, 2), offs=offsets)
        if self.weighted:
            torch._grouped_mm(pre.t(), rows, offs=offsets)
            torch._grouped_mm(rows.t(), act, offs=offsets)

    def _made(self, t: Tensors) -> tuple[Any, ...]:
        """Make rows of hidden, double and inner columns, both weights as [experts, in, out], and the rows' ends."""
        import torch

        (x, _, *trained), (ids, *frozen) = (tuple(x.detach() for x in part) for part in (t.inputs, t.constants))
        given = self.experts.given(frozen or trained)
        up, down = (self.experts.facing(given[name]) for name in ("gate_up_proj", "down_proj"))
        number, _, double = self.experts.sizes
        _, order, offsets = by_expert(ids, number)
        rows = x[order // self.experts.choices]
        pre, act = (torch.randn(len(rows), n, device=up.device).to(up.dtype) for n in (double, double // 2))
        return rows, pre, act, up, down, offsets


def by_expert(ids: Any, experts: int) -> tuple[Any, Any, Any]:
    """Return each row's expert and slot, sorted by expert, and the ends of the experts' rows; do not wait."""
    import torch

    chosen, order = ids.flatten().sort()
    ends = torch.searchsorted(chosen, torch.arange(experts, device=ids.device), right=True)
    return chosen, order, ends.int()


def _by_hand(experts: Experts) -> Layer:
    """Compute the layer with the fewest torch operations around torch's grouped product."""
    import torch

    def linear(given: Mapping[str, Any], name: str, rows: Any, chosen: Any, offsets: Any) -> Any:
        y = torch._grouped_mm(rows, experts.facing(given[name]), offs=offsets)
        bias = given.get(f"{name}_bias")
        return y if bias is None else y + bias[chosen]

    def layer(x: Any, ids: Any, scores: Any, *weights: Any) -> Any:
        given = experts.given(weights)
        chosen, order, offsets = by_expert(ids, experts.sizes[0])
        tokens = order // experts.choices
        y = experts.module._apply_gate(linear(given, "gate_up_proj", x[tokens], chosen, offsets))
        y = linear(given, "down_proj", y, chosen, offsets) * scores.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, tokens, y)

    return layer


def _by_liger(experts: Experts) -> Layer:
    """Compute the layer by Liger's replacement for Qwen3-MoE's experts.

    Raises:
        InputError: Liger does not support the layer.
    """
    from transformers.integrations.moe import _default_apply_gate

    if type(experts.module)._apply_gate is not _default_apply_gate or len(experts.shapes) > 2:
        raise InputError("its experts have silu and no bias, and these have another gate")
    from liger_kernel.ops import LigerFusedMoEFunction

    def layer(x: Any, ids: Any, scores: Any, gate_up: Any, down: Any) -> Any:
        return LigerFusedMoEFunction.apply(x, gate_up, down, ids.int(), scores)

    return layer


def _compiled(layer: Layer) -> Layer:
    import torch

    compiled: Layer = torch.compile(layer, dynamic=False)
    return compiled


@dataclass(frozen=True)
class Maker:
    """How to make a provider's layer, and its distribution; empty for tilekern.

    A provider that is ``apart`` runs in its own process, because it is known to die or to hang.
    """

    make: Callable[[Experts], Layer]
    distribution: str = ""
    apart: bool = False


MAKERS: Mapping[str, Maker] = {
    OURS: Maker(lambda experts: experts.run(OURS)),
    FP8: Maker(lambda experts: experts.run(OURS, ROWWISE)),
    "transformers": Maker(lambda experts: experts.run("grouped_mm"), "transformers"),
    "torch.compile": Maker(lambda experts: _compiled(experts.run("grouped_mm")), "torch"),
    "torch-grouped": Maker(_by_hand, "torch"),
    "torch.compile-grouped": Maker(lambda experts: _compiled(_by_hand(experts)), "torch"),
    "liger-triton": Maker(_by_liger, "liger-kernel", apart=True),
}


def full_name(name: str) -> str:
    """Return a provider's name with its version, as in the results.

    Raises:
        importlib.metadata.PackageNotFoundError: it is not installed.
    """
    distribution = MAKERS[name].distribution
    return f"{name} {version_of(distribution)}" if distribution else name


def provider(name: str, model: str) -> Provider:
    """Return the provider of a model's layer by its name in :data:`MAKERS`; errors of its import pass through."""
    return Provider(full_name(name), calls_of(MAKERS[name].make(experts_of(model))))
