"""The public calls of all ops: what they are called with, and what they must give; ``test_contract.py`` holds them so.

A declared op is here by its declaration and its spec's reference. A public function that is more than one, or that
takes options, is a row of :data:`BY_HAND`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import formulas
import torch
from experts_samples import GATES, by_loop, clear_limit, layer
from hypothesis import strategies as st
from op_samples import APART, EPS, LAYOUTS, OPS, SHIPPED, laid_out, scalars_of, slopes_of
from tolerances import ONCE, TOLERANCE

from tilekern import interpreter, ops
from tilekern.ops.activation import CURVES
from tilekern.ops.fused_rms_norm_add import fused_rms_norm_add
from tilekern.ops.fused_rms_norm_add_rms_norm import fused_rms_norm_add_rms_norm
from tilekern.ops.lora_linear import Adapted
from tilekern.ops.lora_linear import lora_linears as _lora_linears
from tilekern.ops.registration import promoted

Given = dict[str, Any]
FLOAT32 = torch.float32
KINDS = tuple(CURVES)


class Drawn:
    """Sizes, options and numbers of a call: those that hypothesis draws, or without it the usual ones.

    ``variant`` is the number of the option that is taken of each; the first one is the default.
    """

    def __init__(self, data: Any = None, *, variant: int = 0, leading: tuple[int, ...] | None = None) -> None:
        self._data, self._variant, self._leading = data, variant, leading
        self.generator = torch.Generator().manual_seed(self.size(0, 0, 5))

    def one_of(self, *options: Any) -> Any:
        if self._data is None:
            return options[self._variant % len(options)]
        return options[self._data.draw(st.integers(0, len(options) - 1), label=f"one of {options!r:.80}")]

    def size(self, usual: int, least: int, most: int) -> int:
        return usual if self._data is None else self._data.draw(st.integers(least, most), label="size")

    def leading(self, least: int = 0, most: int = 3) -> tuple[int, ...]:
        """The sizes of so many leading dimensions; without hypothesis 2, 3 and 4, or those that the test names."""
        if self._data is None:
            usual = (2, 3, 4)[:most] if least == most else (2, 3)[: max(1, most)]
            return usual if self._leading is None else (*self._leading, *usual)[: max(least, len(self._leading))]
        sizes = st.lists(st.sampled_from([0, 1, 1, 2, 3, 5]), min_size=least, max_size=most)
        return tuple(self._data.draw(sizes, label="leading"))

    def rows(self) -> tuple[int, ...]:
        """Leading dimensions that are not 0: where no row counts, a mean is NaN."""
        return tuple(max(1, size) for size in self.leading(0, 2)) if self._leading is None else self._leading

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def positive(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator) + 0.1

    def whole(self, most: int, *shape: int) -> torch.Tensor:
        return torch.randint(most, shape, generator=self.generator)

    def labels(self, vocabulary: int, shape: tuple[int, ...], ignored: int) -> torch.Tensor:
        """The second one does not count, and the first one does."""
        labels = self.whole(vocabulary, *shape)
        if labels.numel() > 1:
            labels.view(-1)[1] = ignored
        if labels.numel():
            labels.view(-1)[0] = (ignored + 1) % vocabulary
        return labels


@dataclass(frozen=True)
class Case:
    """A public function and the calls of it.

    Attributes:
        name: of the case.
        call: takes what ``make`` gives, by name.
        make: the tensors, in float32 where they are floats, and the options of a call.
        formula: the call in torch's own operations, on float64.
        ungraded: the floats that get no gradient.
        apart: the tensors that may have another dtype than the first one.
        fixed: those that are float32 whatever the others are.
        kernel: the counter of launches and fallbacks; empty where those of torch's products are no fallback.
        launches: of a step of the usual call, by kernel; empty where other tests have it.
        dtype: that of all results or of each, from the arguments; None where torch promotes these to it.
        factors: of the tolerance, for results and gradients.
        least: of a tolerance, what errors may be whatever the size: where gradients cancel, or vanish in float16.
        table: of tolerances for usual calls; rows that hypothesis draws may be less well conditioned.
        layouts: that inputs may have. Weights whose rows are all the same make sums that cancel.
        is_cast: whether autocast casts what goes into products; it changes no bit of any other op.
        rounds: whether the formula takes, as ``rounded``, the dtype in which the op holds what is between.
        variants: how many sets of options the contract's points with a usual call try.
        skips: the points of the contract that are not for it.
    """

    name: str
    call: Callable[..., Any]
    make: Callable[[Drawn], Given]
    formula: Callable[..., Any]
    ungraded: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    kernel: str = ""
    launches: dict[str, int] = field(default_factory=dict)
    dtype: Callable[[Given], torch.dtype | tuple[torch.dtype, ...]] | None = None
    factors: tuple[float, float] = (1, 1)
    least: float = 0.0
    table: dict[torch.dtype, float] = field(default_factory=lambda: TOLERANCE)
    layouts: tuple[str, ...] = LAYOUTS
    is_cast: bool = False
    rounds: bool = False
    variants: int = 1
    skips: frozenset[str] = frozenset()

    def given(self, drawn: Drawn, dtype: torch.dtype = torch.float32, other: torch.dtype | None = None,
              layouts: tuple[str, ...] = ("contiguous",)) -> Given:  # fmt: skip
        """The arguments of a call; those of ``apart`` have another dtype if there is one; layouts are used in turn."""
        found: Given = {}
        for number, (name, x) in enumerate(self.make(drawn).items()):
            found[name] = x
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                kind = FLOAT32 if name in self.fixed else other or dtype if name in self.apart else dtype
                leaf = laid_out(x.to(kind), layouts[number % len(layouts)])
                found[name] = leaf.detach().requires_grad_(name not in self.ungraded)
        return found

    def run(self, given: Given) -> tuple[torch.Tensor, ...]:
        return several(self.call(**given))

    def reference(self, given: Given) -> tuple[torch.Tensor, ...]:
        return several(self.formula(**given))

    def dtypes(self, given: Given, count: int) -> list[torch.dtype]:
        """Return the dtypes of this number of results."""
        if self.dtype is None:
            floats = [x.dtype for x in given.values() if isinstance(x, torch.Tensor) and x.is_floating_point()]
            return [promoted(*floats)] * count
        found = self.dtype(given)
        return list(found) if isinstance(found, tuple) else [found] * count


@contextlib.contextmanager
def set_by_a_user():
    """All defaults that another tensor than the one that was meant may come from."""
    warns = torch.is_warn_always_enabled()
    torch.set_default_dtype(torch.bfloat16)
    torch._C._set_deterministic_algorithms(True)  # what torch has around it imports its compiler, for seconds
    torch.set_warn_always(True)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_warn_always(warns)
        torch._C._set_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)


def is_the_same_under_defaults(case, given):
    """Hold results and gradients under a user's defaults to those without them, bit for bit."""
    with set_by_a_user():
        results = case.run(given)
        found = torch.autograd.grad([y.sum() for y in results if y.requires_grad], leaves(given).values())
    right = case.run(given)
    wanted = torch.autograd.grad([y.sum() for y in right if y.requires_grad], leaves(given).values())
    for one, other in zip((*results, *found), (*right, *wanted), strict=True):
        assert (one.dtype, one.device) == (other.dtype, other.device)
        assert torch.equal(one, other)


def several(results: Any) -> tuple[torch.Tensor, ...]:
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def leaves(given: Given) -> dict[str, torch.Tensor]:
    return {name: x for name, x in given.items() if isinstance(x, torch.Tensor) and x.requires_grad}


def mapped(given: Given, change: Callable[[torch.Tensor], torch.Tensor]) -> Given:
    """Arguments of which the floats are changed; those that needed a gradient do again."""
    return {
        name: change(x.detach()).requires_grad_(x.requires_grad)
        if isinstance(x, torch.Tensor) and x.is_floating_point()
        else x
        for name, x in given.items()
    }


def wide(given: Given) -> Given:
    return mapped(given, torch.Tensor.double)


def gradients(results: Any, of: Given, layout: str = "contiguous", **more: Any) -> dict[str, torch.Tensor]:
    """Return the gradients of the results times normal slopes, by the name of each leaf."""
    return dict(zip(of, _pulled(results, of, slopes_of(results, layout), **more), strict=True))


def step(case: Case, given: Given) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """Results and gradients."""
    results = case.run(given)
    return results, gradients(results, leaves(given))


def _pulled(results: Any, of: Given, slopes: list[torch.Tensor], **more: Any) -> tuple[torch.Tensor, ...]:
    """The gradients of results times slopes; some results have none."""
    pairs = [(y, slope.to(y.dtype)) for y, slope in zip(results, slopes, strict=True) if y.requires_grad]
    outputs, given = [y for y, _ in pairs], [slope for _, slope in pairs]
    return torch.autograd.grad(outputs, [*of.values()], given, materialize_grads=True, **more)


def check(
    case: Case, given: Given, layout: str = "contiguous", *, tolerance: float | None = None, least: float = 0.0,
    slopes: list[torch.Tensor] | None = None, table: dict[torch.dtype, float] = TOLERANCE,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Hold the results and the gradients, which are given back, to the formula's in float64.

    ``tolerance`` stands in the place of the case's, of a table; ``least`` is a share of it that errors may have.
    """
    results, of = case.run(given), leaves(given)
    exact, slopes = wide(given), slopes or slopes_of(results, layout)
    right = case.reference(exact | ({"rounded": first_dtype(given)} if case.rounds else {}))
    found, wanted = (_pulled(*pair, slopes) for pair in ((results, of), (right, leaves(exact))))
    unit = max(table[x.dtype] for x in of.values())
    least = unit * max(case.least, least)
    assert [y.dtype for y in results] == case.dtypes(given, len(results))
    for y, reference in zip(results, right, strict=True):
        near(y, reference, tolerance or max(table[FLOAT32], case.factors[0] * unit), least)
    for (name, leaf), gradient, reference in zip(of.items(), found, wanted, strict=True):
        assert gradient.dtype == leaf.dtype, name
        near(gradient, reference, tolerance or case.factors[1] * unit, least, name)
    return dict(zip(of, found, strict=True))


def near(
    found: torch.Tensor, reference: torch.Tensor, tolerance: float, least: float = 0.0, name: str = "result"
) -> None:
    """Shapes agree, and the norm of the error is small against that of the reference, or at all."""
    assert found.shape == reference.shape, name
    found, reference = found.detach().double(), reference.detach().double()
    error, size = float((found - reference).norm()), float(reference.norm())
    assert error <= tolerance * size + least + 1e-12, f"{name}: error {error:.2e} of {size:.2e}, allowed {tolerance}"


def same(found: Any, right: Any, tolerance: float = 0.0) -> None:
    """Hold tensors to the same bits, or near each other."""
    for one, other in zip(found, right, strict=True):
        if tolerance:
            near(one, other, tolerance, 1e-6)
        else:
            assert torch.equal(one, other)


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """The interpreter's products are torch's, which autocast would round; a kernel's own are out of its reach."""
    launch = interpreter.launch

    def uncast(*arguments: Any, **options: Any) -> None:
        with torch.autocast("cpu", enabled=False):
            launch(*arguments, **options)

    interpreter.launch = uncast
    try:
        yield
    finally:
        interpreter.launch = launch


def rows(matrices: str, vectors: str = "", optional: str = "", **options: tuple[Any, ...]) -> Callable[[Drawn], Given]:
    """Tensors [..., columns] and [columns], those that may be None, and one of each option's values."""

    def make(d: Drawn) -> Given:
        columns = d.size(33, 8, 80)
        shape = (*d.leading(), columns)
        found: Given = {name: d.normal(*shape) for name in matrices.split()}
        found |= {name: d.normal(columns) for name in vectors.split()}
        found |= {name: d.one_of(d.normal(columns), None) for name in optional.split()}
        return found | {name: d.one_of(*values) for name, values in options.items()}

    return make


def first_dtype(given: Given) -> torch.dtype:
    return next(iter(given.values())).dtype


def wide_dtype(given: Given) -> torch.dtype:
    return torch.promote_types(first_dtype(given), torch.float32)


def norm_dtype(given: Given) -> torch.dtype:
    weight = given.get("weight")
    if weight is None or given.get("casting_mode", "llama") != "llama":
        return first_dtype(given)
    return torch.promote_types(first_dtype(given), weight.dtype)


# Of a norm: the usual one, Gemma's, and others.
NORM = {"eps": (EPS,), "offset": (0.0, 1.0, 0.5), "casting_mode": ("llama", "gemma", "none", "llama")}


def of_dyt(d: Drawn) -> Given:
    columns = d.size(33, 8, 80)
    return {
        "x": d.normal(*d.leading(), columns), "alpha": d.normal(*d.one_of((1,), ())), "gamma": d.normal(columns),
        "beta": d.one_of(d.normal(columns), None),
    }  # fmt: skip


def of_poly_norm(d: Drawn) -> Given:
    x = d.normal(*d.leading(), d.size(33, 8, 80))
    return {"x": x, "weight": d.normal(3), "bias": d.normal(*d.one_of((), (1,))), "eps": EPS}


def of_group_norm(d: Drawn) -> Given:
    batch, groups, each = d.leading(1, 1)[0], d.one_of(4, 1, 3), d.size(3, 1, 4)
    shape = d.one_of((5, 7), (9,), (2, 3, 5), (1, 8))
    x = d.normal(batch, groups * each, *shape)
    weights = {name: d.normal(groups * each) for name in ("weight", "bias")}
    return {"x": x, **weights, "num_channels": groups * each, "num_groups": groups, "eps": EPS}


def of_sparsemax(d: Drawn) -> Given:
    dim = d.one_of(-1, 0, 1, -2)
    x = d.normal(d.size(9, 1, 30), d.size(5, 1, 30), d.size(33, 8, 80))
    return {"x": formulas.without_ties(x.bfloat16().float(), dim).detach(), "dim": dim}


def of_linear(d: Drawn) -> Given:
    inner, out = d.size(24, 8, 80), d.size(19, 8, 80)
    x, weight, bias = d.normal(*d.leading(), inner), d.normal(out, inner), d.one_of(d.normal(out), None)
    return {"x": x, "weight": weight, "bias": bias, "activation": d.one_of(None, "silu", "gelu", "gelu_tanh")}


def of_lora_linear(d: Drawn) -> Given:
    inner, out, rank = d.size(24, 8, 80), d.size(19, 8, 80), d.size(4, 1, 20)
    x, weight = d.normal(*d.leading(), inner), d.normal(out, inner)
    return {
        "x": x, "weight": weight, "a": d.normal(rank, inner), "b": d.normal(out, rank) / 2,
        "scaling": d.one_of(2.0, 0.25, 1), "bias": d.one_of(None, d.normal(out)),
        "dropped": d.one_of(None, None, x * (d.normal(*x.shape) > -1)),
    }  # fmt: skip


def of_lora_linears(d: Drawn) -> Given:
    inner, layers = d.size(24, 8, 80), {}
    for number in range(d.one_of(3, 2)):
        out, rank = d.size(19 - number, 1, 40), d.size(4 - number, 1, 20)
        layers |= {f"weight{number}": d.normal(out, inner), f"a{number}": d.normal(rank, inner)}
        layers[f"b{number}"] = d.normal(out, rank) / 2
    return {"x": d.normal(*d.leading(), inner), **layers}


def lora_linears(x: torch.Tensor, **given: torch.Tensor) -> tuple[torch.Tensor, ...]:
    parts = [given[name] for name in given]
    return _lora_linears(x, [Adapted(*parts[n : n + 3], 2.0) for n in range(0, len(parts), 3)])


def apart_lora_linears(x: torch.Tensor, *parts: torch.Tensor) -> list[torch.Tensor]:
    return [formulas.lora_linear(x, *parts[n : n + 3], 2.0) for n in range(0, len(parts), 3)]


def of_gated_linear(d: Drawn) -> Given:
    inner, out = d.size(24, 8, 80), d.size(19, 8, 80)
    weights = {name: d.normal(out, inner) / math.sqrt(inner) for name in ("gate_weight", "up_weight")}
    return {"x": d.normal(*d.leading(), inner), **weights, "activation": d.one_of("silu", "gelu_tanh")}


def of_mlp(d: Drawn, *, gated: bool = True) -> Given:
    hidden, inner = d.size(24, 8, 80), d.size(37, 8, 80)
    up, down = ((d.normal(*shape) / math.sqrt(shape[1])) for shape in ((inner, hidden), (hidden, inner)))
    x = d.normal(*d.rows(), hidden)
    if gated:
        return {"x": x, "gate_weight": up, "up_weight": up.flip(0), "down_weight": down}
    biases = (d.one_of(d.normal(size), None) for size in (inner, hidden))
    return {
        "x": x, "up_weight": up, "up_bias": next(biases), "down_weight": down, "down_bias": next(biases),
        "kind": d.one_of(*KINDS),
    }  # fmt: skip


def of_tiled(d: Drawn) -> Given:
    return of_mlp(d) | {"num_shards": d.one_of(3, None, 8)}


def of_projections(d: Drawn) -> Given:
    inner = d.size(24, 8, 80)
    weights = {f"weight{n}": d.normal(d.size(19 - n, 1, 40), inner) for n in range(d.one_of(3, 1, 2))}
    made = [d.normal(len(weight)) for weight in weights.values()] if d.one_of(True, False) else []
    return {"x": d.normal(*d.leading(), inner), **weights, **{f"bias{n}": bias for n, bias in enumerate(made)}}


def parted(parameters):
    """Return the weights and the biases of linear layers, all in one sequence."""
    return [x for x in parameters if x.dim() == 2], [x for x in parameters if x.dim() == 1]


def projected(x, *parameters):
    weights, biases = parted(parameters)
    return [x @ w.T + (biases[n] if biases else 0) for n, w in enumerate(weights)]


def call_projections(x, **parameters):
    weights, biases = parted(parameters.values())
    return ops.projections(x, *weights, biases=biases)


def of_grouped_linear(d: Drawn) -> Given:
    slots, nobody, turned = d.one_of(1, 2, 3), d.one_of(2, 0), d.one_of(False, True)
    counts = [slots * d.size(number, 0, 9) for number in (4, 0, 6)]
    counts[0] += slots
    rows = sum(counts) + slots * nobody
    inner, columns = d.size(24, 8, 70), d.size(19, 8, 70)
    weight = d.normal(3, inner, columns).transpose(1, 2) if turned else d.normal(3, columns, inner)
    return {
        "x": d.normal(rows // slots, inner), "weight": weight, "bias": d.one_of(d.normal(3, columns), None),
        "offsets": torch.tensor(counts).cumsum(0).int(),
        "order": torch.randperm(rows, generator=d.generator).int() if slots > 1 else None, "slots": slots,
    }  # fmt: skip


def of_experts(d: Drawn) -> Given:
    sizes = [d.size(usual, 1, most) for usual, most in ((11, 20), (3, 4), (5, 8), (8, 24), (12, 24))]
    how = d.one_of(*GATES.values())
    is_biased = d.one_of(True, False)
    found = layer(*sizes, biased=is_biased, transposed=is_biased, seed=d.size(0, 0, 5))
    how = how | {"limit": clear_limit(found)} if "limit" in how else how
    return {name: x.detach() for name, x in found.items()} | how


def of_attention(d: Drawn) -> Given:
    head, group, size = d.one_of(2, 1), d.one_of(2, 3), d.one_of(16, 24, 8)
    packed = d.one_of(False, True, "apart")
    batch = 1 if packed else d.size(2, 1, 2)
    queries = d.size(23, 1, 24)
    keys = queries if packed is True else d.one_of(queries, queries + 7, max(1, queries - 9))
    found: Given = {"q": d.normal(batch, queries, head * group, size)}
    found |= {name: d.normal(batch, keys, head, size) for name in "kv"}
    if packed:
        found["cu_seqlens"] = torch.tensor([0, queries // 4, queries // 4, queries // 3, queries], dtype=torch.int32)
    if packed == "apart":  # with rows behind the last sequence, and sequences without queries, keys or both
        found["cu_seqlens"][3:] -= queries // 12
        starts = torch.tensor([0, keys // 3, keys // 2, keys // 2, keys - keys // 4], dtype=torch.int32)
        found["cu_seqlens_k"] = starts
    return found | {
        "sinks": d.one_of(None, torch.linspace(-1, 2, head * group)), "causal": d.one_of(True, False, True),
        "window": d.one_of(None, 5, 7), "softcap": d.one_of(None, 2.0), "scale": d.one_of(None, 0.3),
    }  # fmt: skip


def of_neighborhood(d: Drawn) -> Given:
    """With fewer tokens than neighbours, than the dilation, or of any remainder by it."""
    batch, tokens, heads = d.size(2, 1, 2), d.size(13, 1, 14), d.one_of(1, 2)
    found = [d.normal(batch, number, tokens, 8) for number in (2, heads, heads)]
    return {
        **dict(zip(("query", "key", "value"), found, strict=True)), "kernel_size": d.one_of(5, 1, 3, 7),
        "dilation": d.size(2, 1, 6), "scale": d.one_of(None, 0.3),
    }  # fmt: skip


def of_rope(d: Drawn) -> Given:
    size, rotary = d.one_of((12, None), (16, 8), (15, 6), (16, 16))
    batch, tokens, interleaved = d.size(2, 1, 3), d.size(5, 1, 7), d.one_of(False, True)
    q, k = (d.normal(batch, heads, tokens, size) for heads in (4, 2))
    form, of_each = d.one_of("half", "twice", "full"), d.one_of(1, batch)
    return {
        "q": q, "k": k, **_angles(d, (of_each, tokens), rotary or size, form, interleaved), "twice": form == "twice",
        "rotary_dim": rotary, "interleaved": interleaved,
    }  # fmt: skip


def _angles(d: Drawn, leading: tuple[int, ...], size: int, form: str, interleaved: bool = False) -> Given:
    """cos and sin of a half, each angle ``twice``, or all of them by themselves; some without a first dimension."""
    theta = 6 * torch.rand(*leading, size if form == "full" and not interleaved else size // 2, generator=d.generator)
    if form != "half" and theta.shape[-1] < size:
        theta = formulas._whole(theta, size, interleaved)
    theta = theta[0] if leading[0] == 1 and d.one_of(False, True) else theta
    return {"cos": theta.cos(), "sin": theta.sin()}


def of_qk_norm_rope(d: Drawn) -> Given:
    batch, tokens, size, rotary = d.size(2, 1, 3), d.size(5, 1, 7), d.one_of(12, 16), d.one_of(None, 6, 8)
    q, k = (d.normal(batch, tokens, heads, size) for heads in (3, 2))
    interleaved, is_weighted = d.one_of(False, True), d.one_of(True, True, False)
    weights = {name: 1 + d.normal(size) / 4 if is_weighted else None for name in ("q_weight", "k_weight")}
    angles = _angles(d, (d.one_of(1, batch), tokens), rotary or size, d.one_of("twice", "half"), interleaved)
    return {
        "q": q, "k": k, **weights, **angles, "eps": EPS, "offset": d.one_of(0.0, 1.0, 0.5),
        "casting_mode": d.one_of("llama", "gemma", "none"), "rotary_dim": rotary, "interleaved": interleaved,
        "norm_last": d.one_of(False, True),
    }  # fmt: skip


def of_llama4_rope(d: Drawn) -> Given:
    batch, tokens, size = d.size(2, 1, 3), d.size(5, 1, 6), d.one_of(12, 2, 80)
    xq, xk = (d.normal(batch, tokens, heads, size) for heads in (4, d.one_of(2, 1, 5)))
    theta = 6 * torch.rand(d.one_of(1, batch), tokens, size // 2, generator=d.generator)
    turns = torch.polar(torch.full_like(theta, 1.5), theta)
    turns = turns[0] if len(turns) == 1 and d.one_of(False, True) else turns
    return {"xq": xq, "xk": xk, "freqs_cis": d.one_of(turns, turns.conj().resolve_conj().conj())}


def of_mrope(d: Drawn) -> Given:
    sections = d.one_of([1, 3, 2], [4, 0, 2], (1, 1, 1), [0, 0, 5], [2, 4], [1, 2, 1, 2], [6])
    batch, size = d.size(2, 1, 3), 2 * sum(sections)
    q, k = (d.normal(batch, heads, 5, size) for heads in (4, 2))
    dim = d.one_of(1, 2)
    q, k = (x.transpose(1, 2) if dim == 2 else x for x in (q, k))
    angles = _angles(d, (3, d.one_of(batch, 1), 5), size, "twice")
    return {"q": q, "k": k, **angles, "mrope_section": sections, "unsqueeze_dim": dim}


def _vocabulary(d: Drawn, least: int = 2) -> int:
    return d.one_of(83, d.size(40, least, 40), 63, 64, 65, 255)


def _loss_options(d: Drawn, vocabulary: int, name: str) -> Given:
    """The options that both cross entropies have; of all smoothed and two classes, nothing but rounding is left."""
    return {
        "ignore_index": d.one_of(-100, -1, 0, 1), "reduction": d.one_of("mean", "sum", "none"),
        "label_smoothing": d.one_of(0.0, 0.1, 0.9), "softcap": d.one_of(None, 2.0, 30.0),
        "z_loss": d.one_of(0.0, 1e-2, 0.5), name: d.one_of(None, d.positive(vocabulary)),
    }  # fmt: skip


def of_cross_entropy(d: Drawn) -> Given:
    vocabulary, shape = _vocabulary(d), d.rows()
    options = _loss_options(d, vocabulary, "weight")
    logits = 3 * torch.rand(*shape, vocabulary, generator=d.generator)
    return {"logits": logits, "target": d.labels(vocabulary, shape, options["ignore_index"]), **options}


def of_head(d: Drawn) -> Given:
    vocabulary, shape, width = _vocabulary(d), d.rows(), d.size(24, 16, 80)
    options = _loss_options(d, vocabulary, "class_weight")
    if options["reduction"] == "mean":
        options["num_items"] = d.one_of(None, 3, 2.5, torch.tensor(5), torch.tensor([4]))
    hidden, weight = (torch.rand(*size, width, generator=d.generator) for size in (shape, (vocabulary,)))
    return {
        "hidden": hidden, "weight": weight, "target": d.labels(vocabulary, shape, options["ignore_index"]), **options,
        "wide_sums": d.one_of(False, True), "bias": d.one_of(d.normal(vocabulary), None),
    }  # fmt: skip


# Results beside a loss, and the options that change them.
BESIDE = {f"return_{name}": True for name in ("z_loss", "token_accuracy", "predicted_tokens")}


def of_cross_entropy_with_others(d: Drawn) -> Given:
    found = of_cross_entropy(d)
    likely = found["logits"].reshape(-1, found["logits"].shape[-1]).argmax(-1)
    if likely.numel() and likely[0] != found["ignore_index"]:
        found["target"].view(-1)[0] = likely[0]
    return found | {"z_loss": d.one_of(0.1, 0.5), "z_loss_by_rows": d.one_of(False, True), **BESIDE}


def of_head_with_others(d: Drawn) -> Given:
    """One class is far more likely than all others, so that rounding does not change which."""
    found = of_head(d)
    likely = len(found["weight"]) // 2
    likely -= likely == found["ignore_index"]
    found["weight"][likely] *= 3
    found["target"].view(-1)[:1] = likely
    found["bias"] = None if found["bias"] is None else found["bias"] / 4
    more = {"z_loss_by_rows": d.one_of(False, True), "use_token_scaling": d.one_of(False, True, True)}
    return found | {"z_loss": d.one_of(0.1, 0.5), **more, **BESIDE}


def of_log_probs(d: Drawn) -> Given:
    vocabulary, shape, width, ignored = _vocabulary(d, 9), d.rows(), d.size(24, 16, 80), d.one_of(-100, -1, 0, 3)
    return {
        "hidden": d.normal(*shape, width), "weight": d.normal(vocabulary, width) / 4,
        "ids": d.labels(vocabulary, shape, ignored), "bias": d.one_of(d.normal(vocabulary), None),
        "ignore_index": ignored, "temperature": d.one_of(1.0, 0.7, 3.0), "softcap": d.one_of(None, 2.0, 30.0),
        "wide_sums": d.one_of(False, True),
    }  # fmt: skip


def of_linear_jsd(d: Drawn) -> Given:
    vocabulary, shape, ignored = _vocabulary(d, 9), d.rows(), d.one_of(-100, 1, 2)
    return {
        "student_input": d.normal(*shape, 24), "student_weight": d.normal(vocabulary, 24) / 4,
        "teacher_input": d.normal(*shape, 40), "teacher_weight": d.normal(vocabulary, 40) / 5,
        "shift_labels": d.one_of(d.labels(3, shape, ignored), None), "jsd_beta": d.one_of(0.5, 0.0, 0.1, 0.9, 1.0),
        "ignore_index": ignored, "temperature": d.one_of(1.0, 0.7, 3.0), "accum_dtype": d.one_of(None, torch.float32),
        "wide_logits": d.one_of(False, True),
    }  # fmt: skip


def divergence(first: str, second: str, log: bool, **options: tuple[Any, ...]) -> Callable[[Drawn], Given]:
    """Two distributions of rows, or their logarithms, and labels of the rows that count."""

    def make(d: Drawn) -> Given:
        shape, ignored = (*d.rows(), d.size(83, 9, 300)), d.one_of(1, -100)
        made = (d.normal(*shape) for _ in range(2))
        found = [x.log_softmax(-1) if log else x.softmax(-1) for x in made]
        labels = d.one_of(d.labels(3, shape[:-1], ignored), None)
        chosen = {name: d.one_of(*values) for name, values in options.items()}
        return {first: found[0], second: found[1], "shift_labels": labels, **chosen, "ignore_index": ignored}

    return make


def of_kl_div(d: Drawn) -> Given:
    shape, log = (*d.rows(), d.size(83, 8, 300)), d.one_of(False, True)
    input, target = (d.normal(*shape).log_softmax(-1) for _ in range(2))
    reduction = d.one_of("batchmean", "none", "sum", "mean")
    return {"input": input, "target": target if log else target.exp(), "reduction": reduction, "log_target": log}


def of_router(d: Drawn) -> Given:
    """Logits from -2 to 2, as far apart as so many experts can be: rounding decides nothing."""
    tokens, experts = d.leading(1, 1)[0], d.size(24, 8, 130)
    order = torch.rand(tokens, experts, generator=d.generator).argsort(1)
    return {
        "logits": (order - experts / 2) * (4 / experts),
        "choices": d.one_of(3, 8),
        "normalized": d.one_of(True, False),
    }


def router(logits: torch.Tensor, choices: int, normalized: bool) -> torch.Tensor:
    weights = logits.softmax(-1).topk(choices, -1).values
    return weights / weights.sum(-1, keepdim=True) if normalized else weights


def of_router_losses(d: Drawn) -> Given:
    experts = d.size(9, 1, 20)
    choices = min(d.one_of(2, 9), experts)
    count = d.leading(1, 1)[0] or 1
    logits, shares = d.normal(count, experts), d.positive(count).round()
    shares[0] = 1
    return {"logits": logits, "ids": logits.topk(choices).indices, "shares": d.one_of(None, shares)}


def router_losses(logits: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    shares = torch.ones_like(logits[:, 0]) if shares is None else shares.to(logits.dtype)
    rows, experts = shares.sum(), logits.shape[1]
    chosen = torch.zeros_like(logits).scatter(1, ids, 1.0)
    counts, probable = ((shares[:, None] * x).sum(0) / rows for x in (chosen, logits.softmax(-1)))
    return experts * (counts * probable).sum(), (shares * logits.logsumexp(-1).square()).sum() / rows


def with_others(
    logits: torch.Tensor, target: torch.Tensor, label_smoothing: float = 0.0, ignore_index: int = -100,
    z_loss_by_rows: bool = False, use_token_scaling: bool = False, return_z_loss: bool = False, **how: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The loss, and, if asked for, its z-loss, the accuracy and the predicted tokens, without gradients."""
    how = {name: value for name, value in how.items() if not name.startswith("return_")}
    loss, z = formulas.cross_entropy(
        logits, target, smoothing=label_smoothing, ignore_index=ignore_index, z_by_rows=z_loss_by_rows,
        scaled=use_token_scaling, **how,
    )  # fmt: skip
    if not return_z_loss:
        return (loss,)
    counts, predicted = target != ignore_index, logits.argmax(-1)
    right = ((predicted == target) & counts).to(loss.dtype)
    accuracy = right if how["reduction"] == "none" else right.sum() / counts.sum()
    return loss, z.detach(), accuracy, predicted.masked_fill(~counts, -1)


def fields(op: Callable[..., Any]) -> Callable[..., Any]:
    """An op that returns a loss with others, as a tuple."""

    def call(**given: Any) -> tuple[torch.Tensor, ...]:
        found = op(**given)
        return found.loss, found.z_loss, found.token_accuracy, found.predicted_tokens

    return call


def dtypes_with_others(given: Given) -> tuple[torch.dtype, ...]:
    return wide_dtype(given), wide_dtype(given), FLOAT32, torch.int64


def head_loss(
    hidden: Any, weight: Any, target: Any, class_weight: Any = None, wide_sums: bool = False, bias: Any = None,
    rounded: Any = torch.float64, **how: Any,
) -> Any:  # fmt: skip
    """Where two classes are almost as likely, gradients are smaller than what rounding the logits makes of them."""

    def held(x: torch.Tensor) -> torch.Tensor:
        return x + (x.to(rounded).to(x.dtype) - x).detach()

    logits = held(hidden @ weight.mT)
    logits = logits if bias is None else held(logits + bias)
    found = with_others(logits, target, weight=class_weight, **how)
    return found if len(found) > 1 else found[0]


def positional(formula: Callable[..., Any]) -> Callable[..., Any]:
    """A formula whose arguments have other names than the op's, in the op's order."""
    return lambda **given: formula(*given.values())


def case(op: Callable[..., Any], make: Callable[[Drawn], Given], formula: Callable[..., Any], **more: Any) -> Case:
    name = more.pop("name", op.__name__)
    return Case(name, more.pop("call", op), make, positional(formula), **more)


def named(op: Callable[..., Any], make: Callable[[Drawn], Given], formula: Callable[..., Any], **more: Any) -> Case:
    """A case whose formula takes the names of the op."""
    return Case(op.__name__, op, make, formula, **more)


MLPS = {"layouts": APART, "is_cast": True, "factors": (2, 4)}
WEIGHTS = ("weight", "bias")
# Torch, or the op that is called, refuses a tensor on another device or of another dtype.
BY_TORCH = frozenset({"device", "dtype"})
# Other cases of these ops have such derivatives.
BY_WRAPPER = frozenset({"functorch", "forward"})
TILED = MLPS | {"skips": frozenset({"second", "kept", "cast backward", "functorch"}), "variants": 2}
BY_HAND = [
    case(ops.rms_norm, rows("x", optional="weight", **NORM), formulas.rms_norm, name="rms_norm with options",
         apart=WEIGHTS, dtype=norm_dtype, variants=3),
    case(ops.fused_add_rms_norm, rows("residual x", optional="weight", **NORM), formulas.fused_add_rms_norm,
         name="fused_add_rms_norm with options", variants=3),
    case(fused_rms_norm_add, rows("residual x", optional="weight", **NORM), formulas.fused_rms_norm_add,
         apart=WEIGHTS, dtype=norm_dtype, variants=3),
    case(fused_rms_norm_add_rms_norm, rows("residual x", "weight", "next_weight", **NORM),
         formulas.fused_rms_norm_add_rms_norm, apart=("weight", "next_weight"), dtype=norm_dtype, variants=3),
    case(ops.layer_norm, rows("x", optional="weight bias", eps=(EPS,)), formulas.layer_norm, table=ONCE, apart=WEIGHTS,
         name="layer_norm with options", variants=2),
    case(ops.fused_add_layer_norm, rows("residual x", optional="weight bias", eps=(EPS,)),
         formulas.fused_add_layer_norm, name="fused_add_layer_norm with options", variants=2),
    case(ops.dyt, of_dyt, formulas.dyt, table=ONCE, name="dyt with options", apart=("alpha", "gamma", "beta"),
         variants=2, kernel="dyt_forward", launches={"dyt_forward": 1, "dyt_backward": 1, "dyt_sums": 1}),
    case(ops.poly_norm, of_poly_norm, formulas.poly_norm, table=ONCE, apart=WEIGHTS, kernel="poly_norm_forward",
         launches={"poly_norm_forward": 1, "poly_norm_backward": 1, "column_sum": 1}),
    case(ops.group_norm, of_group_norm, formulas.group_norm, table=ONCE, apart=WEIGHTS, kernel="group_norm_forward",
         variants=2, launches={"group_norm_forward": 1, "group_norm_backward": 1, "column_sum": 1}),
    case(ops.swiglu, rows("gate up", gate_multiplier=(0.88, 1.0, 3.0), down_multiplier=(0.35, 2.0, 1.0)),
         formulas.swiglu, name="swiglu with multipliers", variants=2),
    case(ops.geglu, rows("gate up", tanh=(True, False)), formulas.geglu, table=ONCE, name="geglu by tanh"),
    case(ops.activation, rows("x", kind=KINDS), lambda x, kind: formulas.CURVES[kind](x), table=ONCE,
         variants=len(KINDS), kernel="activation_forward",
         launches={"activation_forward": 1, "activation_backward": 1}),
    case(ops.sparsemax, of_sparsemax, formulas.sparsemax, table=ONCE, kernel="sparsemax_forward", variants=3,
         launches={"sparsemax_forward": 1, "sparsemax_backward": 1}, layouts=("contiguous", "transposed", "spread")),
    case(ops.linear, of_linear, formulas.linear, kernel="matmul", is_cast=True, variants=4),
    case(ops.projections, of_projections, projected, layouts=APART, is_cast=True,
         call=call_projections, factors=(1, 2), variants=2, skips=BY_TORCH),
    case(ops.lora_linear, of_lora_linear, formulas.lora_linear, layouts=APART, is_cast=True, factors=(2, 4), variants=3,
         skips=BY_TORCH),
    case(ops.lora_linear, of_lora_linears, apart_lora_linears, name="lora_linear of several layers", call=lora_linears,
         layouts=APART, is_cast=True, factors=(2, 6), variants=2, skips=BY_TORCH),
    case(ops.gated_linear, of_gated_linear, formulas.gated_linear, kernel="matmul", is_cast=True, variants=2,
         factors=(2, 4)),
    case(ops.gated_mlp, of_mlp, formulas.gated_mlp, kernel="swiglu_forward", **MLPS,
         launches={"swiglu_forward": 1, "swiglu_backward_remake": 1}, skips=frozenset({"dtype"})),
    case(ops.mlp, functools.partial(of_mlp, gated=False), formulas.mlp, kernel="activation_forward", variants=3, **MLPS,
         launches={"activation_forward": 1, "activation_backward_remake": 1, "column_sum": 1},
         skips=frozenset({"dtype"})),
    case(ops.tiled_swiglu, of_tiled, lambda *given: formulas.gated_mlp(*given[:4]), kernel="swiglu_forward", **TILED),
    case(ops.tiled_geglu, lambda d: of_tiled(d) | {"tanh": d.one_of(True, False)}, formulas.tiled_geglu,
         kernel="geglu_forward", **TILED),
    named(ops.grouped_linear, of_grouped_linear, formulas.grouped_linear, kernel="grouped_linear", is_cast=True,
          variants=3),
    named(ops.experts, of_experts, by_loop, kernel="experts_gate", is_cast=True, layouts=APART, variants=5, least=0.1,
          dtype=first_dtype, factors=(1, 2)),
    named(ops.attention, of_attention, formulas.attention, kernel="attention_forward", factors=(2, 3), variants=4,
          least=1),
    case(ops.fused_neighborhood_attention, of_neighborhood, formulas.neighborhood, factors=(2, 2), least=1,
         kernel="attention_forward", skips=BY_TORCH),
    case(ops.rope, of_rope, lambda *given: formulas.rope(
        *given[:4], rotary_dim=given[5], interleaved=given[6]), name="rope with options", ungraded=("cos", "sin"),
         apart=("cos", "sin"), variants=4),
    case(ops.qk_norm_rope, of_qk_norm_rope, formulas.qk_norm_rope, name="qk_norm_rope with options", variants=3,
         ungraded=("cos", "sin"), factors=(2, 2)),
    case(ops.llama4_rope, of_llama4_rope, formulas.llama4_rope, kernel="llama4_rope", variants=2,
         launches={"llama4_rope": 2}, skips=BY_TORCH),
    case(ops.qwen2vl_mrope, of_mrope, formulas.qwen2vl_mrope, ungraded=("cos", "sin"), apart=("cos", "sin"),
         variants=5),
    named(ops.cross_entropy, of_cross_entropy, with_others, ungraded=("weight",), kernel="cross_entropy_forward",
          factors=(0.01, 1),
          dtype=wide_dtype, variants=3,
          launches={"labels": 1, "cross_entropy_forward": 1, "cross_entropy_backward": 1}),
    Case("cross_entropy in place", lambda logits, **more: ops.cross_entropy(logits * 1, **more, in_place=True),
         of_cross_entropy, with_others, ungraded=("weight",), dtype=wide_dtype, skips=frozenset({"dtype"})),
    Case("cross_entropy with others", fields(ops.cross_entropy), of_cross_entropy_with_others, with_others,
         ungraded=("weight",), factors=(0.01, 1), dtype=dtypes_with_others, variants=3, skips=BY_WRAPPER),
    Case("fused_linear_cross_entropy with others", fields(ops.fused_linear_cross_entropy), of_head_with_others,
         head_loss, ungraded=("class_weight",), is_cast=True, variants=3, dtype=dtypes_with_others, factors=(2, 3),
         layouts=APART, least=0.03, rounds=True, skips=BY_WRAPPER),
    named(ops.fused_linear_cross_entropy, of_head, head_loss, ungraded=("class_weight",), is_cast=True, variants=3,
          kernel="fused_linear_cross_entropy", dtype=wide_dtype, factors=(2, 3), layouts=APART, least=0.03,
          rounds=True),
    named(ops.linear_log_probs, of_log_probs, formulas.log_probs, kernel="linear_log_probs_forward", dtype=wide_dtype,
          is_cast=True, factors=(2, 2), variants=3, layouts=APART),
    case(ops.fused_linear_jsd, of_linear_jsd, formulas.linear_jsd, ungraded=("teacher_input", "teacher_weight"),
         kernel="fused_linear_jsd", dtype=wide_dtype, is_cast=True, factors=(2, 2), variants=3, layouts=APART,
         least=1e-3),
    case(ops.jsd, divergence("_input", "target", True, beta=(0.5, 0.0, 0.1, 0.9, 1.0)), formulas.jsd,
         ungraded=("target",), kernel="jsd", launches={"jsd": 1, "scale": 1}, variants=5, least=5e-3),
    case(ops.tvd, divergence("p", "q", False, reduction=("batchmean", "none", "sum", "mean")), formulas.tvd,
         ungraded=("q",), factors=(0.01, 1), kernel="tvd", launches={"tvd": 1, "scale": 1}, dtype=wide_dtype,
         variants=4, least=1e-3),
    case(ops.kl_div, of_kl_div, formulas.kl_div, ungraded=("target",), kernel="kl_div_forward", variants=4,
         dtype=lambda given: (first_dtype if given["reduction"] == "none" else wide_dtype)(given), least=1e-3,
         launches={"kl_div_forward": 1, "kl_div_backward": 1}),
    case(ops.router, of_router, router, kernel="router_softmax_forward", variants=2, least=0.2,
         call=lambda **given: ops.router(**given, dtype=torch.float32).weights, dtype=lambda _: torch.float32,
         launches={"router_softmax_forward": 1, "router_softmax_backward": 1}),
    case(ops.router_losses, of_router_losses, router_losses, kernel="router_losses_forward", ungraded=("shares",),
         dtype=wide_dtype, variants=2, least=0.1,
         launches={"router_losses_forward": 1, "router_losses_backward": 1}),
]  # fmt: skip


ROUNDED_ONCE = (
    "layer_norm",
    "softmax",
    "geglu",
    "curved",
    "dyt",
    "group_norm_groups",
    "kl_div_rows",
    "kl_div_elements",
)


def declared(name: str) -> Case:
    """The case of an op that its declaration says all of."""
    op, said, scalars = OPS[name], SHIPPED[name], scalars_of(SHIPPED[name])

    def make(d: Drawn) -> Given:
        leading = d.leading(*op.leading)
        columns = 2 * d.size(5, 4, 20) if op.even else d.size(33, 8, 80)
        shapes = op.shapes((*leading, columns))
        made = [d.normal(*shape) for shape in shapes]
        made = [x.abs() if array.nonnegative else x for x, array in zip(made, op.arrays, strict=True)]
        return dict(zip(said.tensors, made, strict=True))

    def dtypes(given: Given) -> tuple[torch.dtype, ...]:
        known = {array.dtype: given[name].dtype for name, array in said.inputs.items()}
        known |= {kind: scalars[name] for kind, name in said.flags.items() if name in scalars}
        kinds = [said.outputs[result].dtype.split("*") for result in said.shown]
        return tuple(promoted(*(known.get(kind) or getattr(torch, kind) for kind in each)) for each in kinds)

    return Case(
        name, lambda **given: op.call(*given.values()), make, positional(op.reference),
        table=ONCE if name in ROUNDED_ONCE else TOLERANCE, ungraded=said.tensors[op.graded :], kernel=op.kernel,
        dtype=dtypes,
        apart=tuple(each for each, array in said.inputs.items() if array.dtype not in ("dtype", "float32")),
        fixed=tuple(each for each, array in said.inputs.items() if array.dtype == "float32"),
        launches={} if said.launch_backward else Counter(
            [said.forward.name, said.backward.name, *(["column_sum"] if said.sums else [])]
        ),
    )  # fmt: skip


CASES = {each.name: each for each in (*map(declared, OPS), *BY_HAND)}
# Those that no case calls, and why.
ELSEWHERE = {
    **dict.fromkeys(("append_to_cache", "decode_attention", "embedding", "log_probs"), "it has no gradient"),
    **dict.fromkeys(("greedy", "route", "sample"), "it gives whole numbers"),
    "sharded_linear_log_probs": "it needs processes",
}


def uncalled() -> set[str]:
    """Functions of ``tilekern.ops`` that no case calls."""
    public = {name for name in ops.__all__ if inspect.isfunction(getattr(ops, name)) and name[0].islower()}
    called = {each.name.split()[0] for each in CASES.values()} | ELSEWHERE.keys()
    return public - called
