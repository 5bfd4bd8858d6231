"""List the ops of the Liger suite: one entry each, with its formula in torch, its sizes, and the calls of peers.

An entry is enough to measure an op: the providers, the cases and the targets read :data:`SUITE`.
References are the formulas in float64, in chunks of rows where a vocabulary makes them large.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks import suite_formulas as formulas
from benchmarks.cases import EPS, METRICS, Case, Tensors, Work, seeded
from tilekern.spec import ITEM_BYTES

Call = Callable[..., Any]
# Rows of a reference at a time.
CHUNK = 512
# Rows of a head's products at a time: 1 GiB holds their logits for a large vocabulary.
HEAD_CHUNK = 4096
POSITIONS, CHANNELS_OF_A_GROUP = 512, 4


@dataclass(frozen=True)
class Sizes:
    """The sizes of a case: a model's, and the number of tokens."""

    tokens: int
    hidden: int
    intermediate: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int


Maker = Callable[[Sizes, str], Case]


@dataclass(frozen=True, kw_only=True)
class SuiteOp:
    """An op of the suite.

    Attributes:
        formula: the op in torch; eager torch and torch.compile run it, and in float64 it is the reference.
        case: (sizes, dtype) -> the case.
        liger: the name of Liger's autograd function.
        call: calls Liger's ``apply`` with the op's arguments.
        tilegym: calls the function of that name in TileGym's suite.
        ours: calls tilekern's op.
    """

    formula: Call
    case: Maker
    liger: str = ""
    call: Callable[[Call], Call] = lambda apply: apply
    tilegym: Callable[[Call], Call] | None = lambda function: function
    ours: Callable[[Call], Call] = lambda op: op


def sizes_of(config: Any, tokens: int) -> Sizes:
    """Return the sizes of a model's configuration."""
    return Sizes(
        tokens, config.hidden_size, config.intermediate_size, config.vocab_size, config.num_attention_heads,
        config.num_key_value_heads, config.head_dim,
    )  # fmt: skip


def _normal(device: str, dtype: str, *shapes: tuple[int, ...]) -> list[Any]:
    import torch

    generator = seeded(device)
    return [torch.randn(s, device=device, generator=generator).to(getattr(torch, dtype)) for s in shapes]


def _expected(formula: Call, cut: tuple[int, ...], t: Tensors) -> tuple[Any, ...]:
    """Return results and gradients in float32 or wider, by chunks of rows if some tensors are cut.

    ``cut`` has the indices of the cut tensors among the inputs and constants. A result that is one number is a mean
    over rows.
    """
    import torch

    rows = t.inputs[0].shape[0] if cut else 1
    results: list[list[Any]] = []
    # Chunks of a gradient, or their sum so far: chunks of a head's weight are 5 GB each.
    gradients: list[list[Any]] = [[] for _ in t.inputs]
    for start in range(0, rows, CHUNK if cut else 1):
        part = slice(start, start + CHUNK)
        given = [x[part] if n in cut else x for n, x in enumerate((*t.inputs, *t.constants))]
        share = given[0].shape[0] / rows if cut else 1.0
        wide = [x.detach().double().requires_grad_() for x in given[: len(t.inputs)]]
        fixed = [_wide(x) for x in given[len(t.inputs) :]]
        found = formula(*wide, *fixed)
        found = found if isinstance(found, tuple) else (found,)
        found = tuple(y * share if not y.dim() else y for y in found)
        slopes = [(dy[part] if cut and y.dim() else dy).double() for y, dy in zip(found, t.slopes, strict=True)]
        for n, made in enumerate(torch.autograd.grad(found, wide, slopes)):
            if n in cut:
                gradients[n].append(made.float())
            else:
                gradients[n] = [gradients[n][0].add_(made) if gradients[n] else made]
        results.append([y.detach() for y in found])
    outputs = [_joined(parts, parts[0].dim() > 0) for parts in zip(*results, strict=True)]
    return *outputs, *(_joined(tuple(parts), n in cut) for n, parts in enumerate(gradients))


def _wide(x: Any) -> Any:
    import torch

    if not isinstance(x, torch.Tensor):
        return x
    return x.to(torch.complex128) if x.is_complex() else x.double() if x.is_floating_point() else x


def _joined(parts: tuple[Any, ...], rows: bool) -> Any:
    """Concatenate chunks, or add them up."""
    import torch

    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if rows else torch.stack([x.double() for x in parts]).sum(0)


def _case(
    op: str, size: str, dtype: str, tensors: Callable[[str], Tensors], work: Work, *, cut: tuple[int, ...] = (),
    roundings: int = 1, metrics: tuple[str, ...] = METRICS, products: Callable[[Tensors], Any] | None = None,
) -> Case:  # fmt: skip
    label = f"{op} {size}" + ("" if dtype == "bfloat16" else f" {dtype}")
    return Case(
        op=op, label=label, dtype=dtype, tensors=tensors, work=work, roundings=roundings, metrics=metrics,
        products=products, expected=lambda t: _expected(SUITE[op].formula, cut, t),
    )  # fmt: skip


def _over_rows(op: str, weights: Callable[[int], list[tuple[int, ...]]], *constants: Any, roundings: int = 1) -> Maker:
    """Make cases of x [tokens, hidden] and some weights: one matrix is read and one written; the backward reads two."""

    def case(sizes: Sizes, dtype: str) -> Case:
        shape, others = (sizes.tokens, sizes.hidden), weights(sizes.hidden)
        matrix = sizes.tokens * sizes.hidden * ITEM_BYTES[dtype]

        def tensors(device: str) -> Tensors:
            x, dy, *made = _normal(device, dtype, shape, shape, *others)
            return Tensors((x, *made), constants, (dy,))

        return _case(
            op, f"{sizes.tokens}x{sizes.hidden}", dtype, tensors, Work((2 * matrix, 3 * matrix)), roundings=roundings
        )

    return case


def _gated(sizes: Sizes, dtype: str) -> Case:
    shape = (sizes.tokens, sizes.intermediate)
    matrix = sizes.tokens * sizes.intermediate * ITEM_BYTES[dtype]

    def tensors(device: str) -> Tensors:
        gate, up, dy = _normal(device, dtype, shape, shape, shape)
        return Tensors((gate, up), (), (dy,))

    work = Work((3 * matrix, 5 * matrix))
    return _case("geglu", f"{sizes.tokens}x{sizes.intermediate}", dtype, tensors, work)


def _divergence(
    op: str, logs: tuple[bool, bool], matrices: tuple[int, int], metrics: tuple[str, ...] = METRICS
) -> Maker:
    """Make cases of a loss of two distributions [tokens, vocabulary]; each may be given by its logarithms."""

    def case(sizes: Sizes, dtype: str) -> Case:
        import torch

        shape = (sizes.tokens, sizes.vocabulary)
        matrix = sizes.tokens * sizes.vocabulary * ITEM_BYTES[dtype]

        def tensors(device: str) -> Tensors:
            generator, kind = seeded(device), getattr(torch, dtype)
            made = []
            for log in logs:
                x = torch.randn(shape, device=device, generator=generator)
                made.append((x.log_softmax(-1) if log else x.softmax(-1)).to(kind))
            return Tensors((made[0],), (made[1],), (torch.ones((), device=device),))

        work = Work((matrices[0] * matrix, matrices[1] * matrix))
        size = f"{sizes.tokens}x{sizes.vocabulary}"
        return _case(op, size, dtype, tensors, work, cut=(0, 1), roundings=2, metrics=metrics)

    return case


def _images(sizes: Sizes, dtype: str) -> Case:
    """Make images like Liger's benchmark: 512 positions, groups of four channels."""
    channels = max(CHANNELS_OF_A_GROUP, sizes.hidden // 4 // CHANNELS_OF_A_GROUP * CHANNELS_OF_A_GROUP)
    batch = max(1, sizes.tokens * sizes.hidden // (channels * POSITIONS))
    shape, matrix = (batch, channels, POSITIONS), batch * channels * POSITIONS * ITEM_BYTES[dtype]

    def tensors(device: str) -> Tensors:
        x, dy, weight, bias = _normal(device, dtype, shape, shape, (channels,), (channels,))
        return Tensors((x, weight, bias), (channels, channels // CHANNELS_OF_A_GROUP, EPS), (dy,))

    size = f"{batch}x{channels}x{POSITIONS}"
    return _case("group_norm", size, dtype, tensors, Work((2 * matrix, 3 * matrix)))


def _turned(op: str, sizes: Sizes, dtype: str, angles: Callable[[str], tuple[Any, ...]], *, heads_first: bool) -> Case:
    shapes = [(1, sizes.tokens, heads, sizes.head_dim) for heads in (sizes.heads, sizes.kv_heads)]
    matrices = sizes.tokens * (sizes.heads + sizes.kv_heads) * sizes.head_dim * ITEM_BYTES[dtype]

    def tensors(device: str) -> Tensors:
        made = _normal(device, dtype, *shapes, *shapes)
        made = [x.transpose(1, 2) if heads_first else x for x in made]
        return Tensors(tuple(made[:2]), angles(device), tuple(made[2:]))

    size = f"1x{sizes.tokens} {sizes.heads}+{sizes.kv_heads}x{sizes.head_dim}"
    return _case(op, size, dtype, tensors, Work((2 * matrices, 2 * matrices)))


def _complex_turns(sizes: Sizes, dtype: str) -> Case:
    import torch

    def angles(device: str) -> tuple[Any, ...]:
        turns = torch.rand((1, sizes.tokens, sizes.head_dim // 2), device=device, generator=seeded(device)) * 6
        return (torch.complex(turns.cos(), turns.sin()),)

    return _turned("llama4_rope", sizes, dtype, angles, heads_first=False)


def _three_positions(sizes: Sizes, dtype: str) -> Case:
    import torch

    half = sizes.head_dim // 2
    sections = [half - 2 * (3 * half // 8), 3 * half // 8, 3 * half // 8]

    def angles(device: str) -> tuple[Any, ...]:
        turns = torch.rand((3, 1, sizes.tokens, half), device=device, generator=seeded(device)) * 6
        turns = torch.cat((turns, turns), -1)
        return turns.cos().to(getattr(torch, dtype)), turns.sin().to(getattr(torch, dtype)), sections

    return _turned("qwen2vl_mrope", sizes, dtype, angles, heads_first=True)


def _neighbours(sizes: Sizes, dtype: str) -> Case:
    shape = (1, sizes.tokens, sizes.heads, sizes.head_dim)
    matrix = sizes.tokens * sizes.heads * sizes.head_dim * ITEM_BYTES[dtype]

    def tensors(device: str) -> Tensors:
        q, k, v, dout = (x.transpose(1, 2) for x in _normal(device, dtype, *[shape] * 4))
        return Tensors((q, k, v), (), (dout,))

    size = f"1x{sizes.tokens} {sizes.heads}x{sizes.head_dim}"
    op = "fused_neighborhood_attention"
    return _case(op, size, dtype, tensors, Work((4 * matrix, 8 * matrix)), roundings=2)


def _tiled(op: str) -> Maker:
    def case(sizes: Sizes, dtype: str) -> Case:
        hidden, intermediate = sizes.hidden, sizes.intermediate
        product = 2 * sizes.tokens * hidden * intermediate

        def tensors(device: str) -> Tensors:
            shapes = ((sizes.tokens, hidden), (intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
            x, gate, up, down, dy = _normal(device, dtype, *shapes, (sizes.tokens, hidden))
            return Tensors((x, gate * hidden**-0.5, up * hidden**-0.5, down * intermediate**-0.5), (), (dy,))

        size = f"{sizes.tokens}x{hidden}x{intermediate}"
        return _case(op, size, dtype, tensors, Work(flops=(3 * product, 6 * product)), roundings=4)

    return case


def _two_heads(sizes: Sizes, dtype: str) -> Case:
    import torch

    rows, hidden, vocabulary = sizes.tokens, sizes.hidden, sizes.vocabulary
    product = 2 * rows * hidden * vocabulary

    def tensors(device: str) -> Tensors:
        x, weight, teacher, teacher_weight = _normal(device, dtype, *[(rows, hidden), (vocabulary, hidden)] * 2)
        scale = hidden**-0.5
        slopes = (torch.ones((), device=device),)
        return Tensors((x, weight * scale), (teacher, teacher_weight * scale), slopes)

    def products(t: Tensors) -> None:
        """Compute both heads' logits, and both gradients by a matrix of their size, in chunks of rows."""
        (x, weight), (teacher, teacher_weight) = (tuple(y.detach() for y in given) for given in (t.inputs, t.constants))
        gradient = torch.zeros_like(weight)
        for start in range(0, rows, HEAD_CHUNK):
            part = slice(start, start + HEAD_CHUNK)
            logits = x[part] @ weight.T
            torch.mm(teacher[part], teacher_weight.T, out=logits)
            _ = logits @ weight
            gradient.addmm_(logits.T, x[part])

    size, op = f"{rows}x{hidden}x{vocabulary}", "fused_linear_jsd"
    work = Work(flops=(2 * product, 2 * product))
    return _case(
        op, size, dtype, tensors, work, cut=(0, 2), roundings=4, metrics=("forward_backward",), products=products
    )  # fmt: skip


def _log_probs_of_head(sizes: Sizes, dtype: str) -> Case:
    import torch

    rows, hidden, vocabulary = sizes.tokens, sizes.hidden, sizes.vocabulary
    product = 2 * rows * hidden * vocabulary

    def tensors(device: str) -> Tensors:
        x, weight = _normal(device, dtype, (rows, hidden), (vocabulary, hidden))
        slopes = _normal(device, "float32", (rows,), (rows,))
        ids = torch.randint(0, vocabulary, (rows,), device=device, generator=seeded(device))
        return Tensors((x, weight * hidden**-0.5), (ids,), tuple(slopes))

    size, op = f"{rows}x{hidden}x{vocabulary}", "linear_log_probs"
    work = Work(flops=(product, 3 * product))
    return _case(op, size, dtype, tensors, work, cut=(0, 2), roundings=3)


def _liger_linear_log_probs(apply: Call) -> Call:
    """Call Liger's loss, which is minus the log-probability: temperature 1, one tile of rows a cluster, and entropy."""

    def call(hidden: Any, weight: Any, ids: Any) -> tuple[Any, Any]:
        losses, entropy = apply(hidden, weight, ids, 1.0, -100, 1, True)[:2]
        return -losses, entropy

    return call


def _groups_before_weights(function: Call) -> Call:
    return lambda x, weight, bias, channels, groups, eps: function(x, channels, groups, weight, bias, eps)


_ONE_WAY = ("forward_backward",)
SUITE: Mapping[str, SuiteOp] = {
    "softmax": SuiteOp(
        formula=formulas.softmax, case=_over_rows("softmax", lambda _: []), liger="LigerSoftmaxFunction"
    ),
    "sparsemax": SuiteOp(
        formula=formulas.sparsemax, case=_over_rows("sparsemax", lambda _: []), liger="LigerSparsemaxFunction",
        call=lambda apply: lambda x: apply(x, -1),
    ),
    "layer_norm": SuiteOp(
        formula=formulas.layer_norm, case=_over_rows("layer_norm", lambda n: [(n,), (n,)], EPS),
        liger="LigerLayerNormFunction",
    ),
    "dyt": SuiteOp(
        formula=formulas.dyt, case=_over_rows("dyt", lambda n: [(1,), (n,), (n,)]), liger="LigerDyTFunction"
    ),
    "poly_norm": SuiteOp(
        formula=formulas.poly_norm, case=_over_rows("poly_norm", lambda _: [(3,), (1,)], EPS),
        liger="LigerPolyNormFunction",
        # Liger's Triton returns the bias's gradient without a dimension, so the bias is passed as such a view.
        call=lambda apply: lambda x, weight, bias, eps: apply(x, weight, bias.view(()), eps, False),
    ),
    "group_norm": SuiteOp(
        formula=formulas.group_norm, case=_images, liger="LigerGroupNormFunction", tilegym=_groups_before_weights
    ),
    "geglu": SuiteOp(
        formula=formulas.geglu, case=_gated, liger="LigerGELUMulFunction",
        ours=lambda op: lambda gate, up: op(gate, up, tanh=True),
    ),
    "kl_div": SuiteOp(
        formula=formulas.kl_div, case=_divergence("kl_div", (True, False), (2, 2)), liger="LigerKLDivLossFunction",
        call=lambda apply: lambda x, target: apply(x, target, "batchmean", False, 1e-10),
    ),
    # The gradients of these are made with the loss, here and by peers, so one direction alone tells little.
    "jsd": SuiteOp(
        formula=formulas.jsd, case=_divergence("jsd", (True, True), (2, 1), _ONE_WAY), liger="LigerJSDFunction",
        call=lambda apply: lambda x, target: apply(x, target, None, 0.5, -100),
    ),
    "tvd": SuiteOp(
        formula=formulas.tvd, case=_divergence("tvd", (False, False), (2, 1), _ONE_WAY), liger="LigerTVDLossFunction"
    ),
    "llama4_rope": SuiteOp(formula=formulas.llama4_rope, case=_complex_turns, liger="LigerLlama4RopeFunction"),
    "qwen2vl_mrope": SuiteOp(formula=formulas.qwen2vl_mrope, case=_three_positions, liger="LigerQwen2VLMRopeFunction"),
    "fused_neighborhood_attention": SuiteOp(
        formula=formulas.fused_neighborhood_attention, case=_neighbours,
        liger="LigerFusedNeighborhoodAttentionFunction",
    ),
    # Liger and TileGym have one function for both ops, which takes a module; the providers call it.
    "tiled_geglu": SuiteOp(formula=formulas.tiled_geglu, case=_tiled("tiled_geglu"), tilegym=None),
    "tiled_swiglu": SuiteOp(formula=formulas.tiled_swiglu, case=_tiled("tiled_swiglu"), tilegym=None),
    "fused_linear_jsd": SuiteOp(
        formula=formulas.fused_linear_jsd, case=_two_heads, liger="LigerFusedLinearJSDFunction"
    ),
    "linear_log_probs": SuiteOp(
        formula=formulas.linear_log_probs, case=_log_probs_of_head, liger="LigerFusedLinearScaledCrossEntropyFunction",
        call=_liger_linear_log_probs, tilegym=None,
    ),
}  # fmt: skip


def suite_case(op: str, dtype: str = "bfloat16", **sizes: int) -> Case:
    """Make a case of an op of the suite with the sizes that it needs; Llama-3-8B's sizes are the defaults."""
    llama = {
        "tokens": 4096, "hidden": 4096, "intermediate": 14336, "vocabulary": 128256, "heads": 32, "kv_heads": 8,
        "head_dim": 128,
    }  # fmt: skip
    return SUITE[op].case(Sizes(**(llama | sizes)), dtype)


def fixed_suite_cases() -> list[Case]:
    """Return the cases of the sizes that the targets name."""
    return [
        suite_case("jsd", "float32", tokens=2048),
        suite_case("jsd", tokens=4096),
        suite_case("layer_norm", tokens=8192),
        suite_case("softmax", tokens=8192),
        suite_case("fused_linear_jsd", tokens=4096),
        suite_case("linear_log_probs", tokens=8192, vocabulary=151936),
    ]
