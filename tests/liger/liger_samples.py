"""Calls of Liger's functions, each with what it must give in torch's own operations, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

# What Liger's registry of implementations allows its own kernels: (absolute, relative) forward, and backward.
LIGERS_TOLERANCE = {
    torch.float32: ((1e-5, 1e-5), (1e-4, 1e-4)),
    torch.bfloat16: ((2e-2, 1e-2), (1e-1, 2e-2)),
}
EPS = 1e-6
IGNORED = -100


@dataclass(frozen=True)
class Call:
    """Arguments of ``apply`` for a number of rows and columns, and the reference, which takes the same."""

    name: str
    arguments: Callable[[Sizes, torch.dtype, str], tuple[Any, ...]]
    reference: Callable[..., Any]
    also: str = ""

    @property
    def id(self) -> str:
        return f"{self.name.removeprefix('Liger').removesuffix('Function')}{' ' * bool(self.also)}{self.also}"


@dataclass(frozen=True)
class Sizes:
    """Of a call: everything that has rows has these."""

    rows: int = 6
    columns: int = 24
    tokens: int = 5
    heads: int = 4
    head_dim: int = 16
    vocabulary: int = 40


def normal(shape: tuple[int, ...], dtype: torch.dtype, device: str, *, graded: bool = True) -> torch.Tensor:
    values = torch.randn(shape, dtype=torch.float32).to(device, dtype)
    return values.requires_grad_(graded)


def _matrix(s: Sizes, dtype: torch.dtype, device: str) -> torch.Tensor:
    return normal((2, s.rows // 2, s.columns), dtype, device)


def _vector(s: Sizes, dtype: torch.dtype, device: str) -> torch.Tensor:
    return normal((s.columns,), dtype, device)


def _labels(s: Sizes, device: str) -> torch.Tensor:
    labels = torch.randint(s.vocabulary, (s.rows,))
    labels[::3] = IGNORED
    return labels.to(device)


def _log_probabilities(s: Sizes, dtype: torch.dtype, device: str, *, graded: bool) -> torch.Tensor:
    x = torch.randn(s.rows, s.vocabulary).log_softmax(-1)
    return x.to(device, dtype).requires_grad_(graded)


def _probabilities(s: Sizes, dtype: torch.dtype, device: str, *, graded: bool) -> torch.Tensor:
    x = torch.randn(s.rows, s.vocabulary).softmax(-1)
    return x.to(device, dtype).requires_grad_(graded)


def _angles(s: Sizes, dtype: torch.dtype, device: str, first: tuple[int, ...] = (1,)) -> list[torch.Tensor]:
    angles = torch.rand(*first, s.tokens, s.head_dim // 2).repeat_interleave(1, -1) * 6
    twice = torch.cat((angles, angles), -1)
    return [turn(twice).to(device, dtype) for turn in (torch.cos, torch.sin)]


def _heads(s: Sizes, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    shapes = [(2, s.tokens, heads, s.head_dim) for heads in (s.heads, s.heads // 2)]
    # As a projection and a transpose leave them.
    return [normal(shape, dtype, device, graded=False).transpose(1, 2).requires_grad_() for shape in shapes]


def _rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float = 0.0, *_: Any) -> torch.Tensor:
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return normed if weight is None else normed * (offset + weight)


def _add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *rest: Any) -> Any:
    return _rms_norm(x + residual, weight, eps, *rest), x + residual


def _swiglu(a: torch.Tensor, b: torch.Tensor, gate: float = 1.0, down: float = 1.0) -> torch.Tensor:
    return down * functional.silu(gate * a) * b


def _mlp(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, *multipliers: float
) -> torch.Tensor:
    return _swiglu(x @ gate.T, x @ up.T, *multipliers) @ down.T


def _poly_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, _: bool) -> torch.Tensor:
    powers = [x**power for power in (3, 2, 1)]
    normed = [u * torch.rsqrt(u.square().mean(-1, keepdim=True) + eps) for u in powers]
    return sum(w * u for w, u in zip(weight, normed, strict=True)) + bias


def _neighborhood(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, size: int, dilation: int) -> torch.Tensor:
    at = torch.arange(q.shape[2], device=q.device)
    apart = at[:, None] - at
    seen = (apart % dilation == 0) & (apart.abs() <= size // 2 * dilation)
    scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The halves of ``x`` as pairs, turned."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *_: Any) -> Any:
    if cos.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if cos.shape[-1] < q.shape[-1]:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    return turned(q, cos, sin), turned(k, cos, sin)


def _mrope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sections: list[int]) -> Any:
    def chosen(angles: torch.Tensor) -> torch.Tensor:
        parts = angles.split(sections * 2, -1)
        return torch.cat([part[number % 3] for number, part in enumerate(parts)], -1)

    return _rope(q, k, chosen(cos), chosen(sin))


def _part(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    size = cos.shape[-1]
    turned_part = _rope(q[..., :size], k[..., :size], cos, sin)
    return tuple(torch.cat((x, rest[..., size:]), -1) for x, rest in zip(turned_part, (q, k), strict=True))


def _odd(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    """The last number of a head stays, and so does the last angle of each half of cos and sin unread."""
    half = q.shape[-1] // 2
    return _part(q, k, *(torch.cat((x[..., :half], x[..., :half]), -1) for x in (cos, sin)))


def _complex_rope(q: torch.Tensor, k: torch.Tensor, freqs: torch.Tensor) -> Any:
    def rotated(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * freqs[:, :, None]).flatten(-2)

    return rotated(q), rotated(k)


def _llama4_arguments(s: Sizes, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    q, k = (normal((2, s.tokens, heads, s.head_dim), dtype, device) for heads in (s.heads, s.heads // 2))
    angles = torch.rand(1, s.tokens, s.head_dim // 2) * 6
    return q, k, torch.polar(torch.ones_like(angles), angles).to(device)


def _cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int = IGNORED,
    z_loss: float = 0.0, smoothing: float = 0.0, reduction: str = "mean", softcap: float | None = None,
    with_z_loss: bool = False, scaled: bool = False,
) -> Any:  # fmt: skip
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss = functional.cross_entropy(
        logits, target, weight, ignore_index=ignore_index, reduction="none", label_smoothing=smoothing
    )
    counts = target != ignore_index
    z = (z_loss * logits.logsumexp(-1).square()).where(counts, 0)
    if scaled:
        loss = loss * logits.detach().softmax(-1).gather(-1, target.clamp(min=0)[:, None])[:, 0]
    if reduction != "none":
        rows = counts.sum().clamp(min=1) if reduction == "mean" else 1
        weighed = weight is not None and reduction == "mean"
        loss, z = loss.sum() / ((weight[target.clamp(min=0)] * counts).sum() if weighed else rows), z.sum() / rows
    return (loss + z, z.detach()) if with_z_loss else loss + z


def _linear_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None,
    class_weight: torch.Tensor | None, ignored: int = IGNORED, z_loss: float = 0.0, smoothing: float = 0.0,
    reduction: str = "mean", softcap: float | None = None, with_z_loss: bool = False, _: Any = None,
    scaled: bool = False,
) -> Any:  # fmt: skip
    logits = functional.linear(x, weight, bias)
    options = (ignored, z_loss, smoothing, reduction, softcap, with_z_loss, scaled)
    return _cross_entropy(logits, target, class_weight, *options)


def _head(s: Sizes, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    weight = _linear((s.vocabulary, s.columns), dtype, device)
    return normal((s.rows, s.columns), dtype, device), weight, _labels(s, device)


def _linear(shape: tuple[int, int], dtype: torch.dtype, device: str) -> torch.Tensor:
    """The weight of a linear layer whose outputs are of the size of its inputs."""
    return normal(shape, dtype, device, graded=False).mul_(shape[1] ** -0.5).requires_grad_()


def _scaled(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, temperature: float = 1.0, ignored: int = IGNORED,
    *_: Any,
) -> Any:  # fmt: skip
    log = (x @ weight.T / temperature).log_softmax(-1)
    counts = target != ignored
    nll = -log.gather(-1, target.clamp(min=0)[:, None])[:, 0]
    return nll.where(counts, 0), (-(log.exp() * log).sum(-1)).where(counts, 0)


def _class_weight(s: Sizes, device: str) -> torch.Tensor:
    return torch.rand(s.vocabulary).add(0.5).to(device)


def _of_rows(loss: torch.Tensor, labels: torch.Tensor | None, ignore_index: int) -> tuple[torch.Tensor, Any]:
    counts = torch.ones_like(loss[:, 0], dtype=torch.bool) if labels is None else labels != ignore_index
    return loss.where(counts[:, None], 0), counts.sum().clamp(min=1)


def _jsd(
    x: torch.Tensor, y: torch.Tensor, labels: torch.Tensor | None = None, beta: float = 0.5, ignored: int = IGNORED
) -> torch.Tensor:
    q, p = x.exp(), y.exp()
    if beta in (0, 1):
        loss = q * (x - y) if beta else p * (y - x)
    else:
        m = (beta * p + (1 - beta) * q).log()
        loss = beta * p * (y - m) + (1 - beta) * q * (x - m)
    loss, rows = _of_rows(loss, labels, ignored)
    return loss.sum() / rows


def _linear_jsd(
    x: torch.Tensor, weight: torch.Tensor, teacher: torch.Tensor, teacher_weight: torch.Tensor, labels: Any,
    beta: float, ignored: int, temperature: float, _: Any,
) -> torch.Tensor:  # fmt: skip
    heads = ((x, weight), (teacher, teacher_weight))
    return _jsd(*((x @ w.T / temperature).log_softmax(-1) for x, w in heads), labels, beta, ignored)


def _tvd(
    p: torch.Tensor, q: torch.Tensor, labels: torch.Tensor | None = None, reduction: str = "batchmean",
    ignored: int = IGNORED,
) -> torch.Tensor:  # fmt: skip
    loss, rows = _of_rows(0.5 * (p - q).abs(), labels, ignored)
    return {"none": loss, "sum": loss.sum(), "batchmean": loss.sum() / rows, "mean": loss.mean(-1).sum() / rows}[
        reduction
    ]


def _kl_div(x: torch.Tensor, y: torch.Tensor, reduction: str = "batchmean", log_target: bool = False, *_: Any) -> Any:
    return functional.kl_div(x, y, reduction=reduction, log_target=log_target)


def _threshold(x: torch.Tensor, dim: int) -> torch.Tensor:
    values = x.movedim(dim, -1).sort(-1, descending=True).values
    sums, counts = values.cumsum(-1), torch.arange(1, values.shape[-1] + 1, device=x.device)
    size = (1 + counts * values > sums).sum(-1, keepdim=True)
    return ((sums.gather(-1, size - 1) - 1) / size).movedim(-1, dim)


def _sparsemax(x: torch.Tensor, dim: int) -> torch.Tensor:
    return (x - _threshold(x, dim)).clamp(min=0)


def _without_ties(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Numbers of 16 bits often lie on the threshold itself, where sparsemax has no one gradient; these are moved."""
    tied = (x - _threshold(x.detach().double(), dim)).abs() < 1e-4
    return torch.where(tied, -4.0, x.detach()).requires_grad_()


CALLS = [
    Call("LigerRMSNormFunction", lambda *s: (_matrix(*s), _vector(*s), EPS), _rms_norm),
    Call("LigerRMSNormFunction", lambda *s: (_matrix(*s), _vector(*s), EPS, 1.0, "gemma"), _rms_norm, "Gemma's"),
    Call("LigerRMSNormFunction", lambda *s: (_matrix(*s), _vector(*s), EPS, 0.0, "none"), _rms_norm, "without casts"),
    Call("LigerRMSNormFunction", lambda *s: (_matrix(*s), None, EPS), _rms_norm, "without a weight"),
    Call(
        "LigerFusedAddRMSNormFunction", lambda *s: (_matrix(*s), _matrix(*s), _vector(*s), EPS, 1.0, "gemma"),
        _add_norm, "Gemma's",
    ),
    Call(
        "LigerFusedAddRMSNormFunction", lambda *s: (_matrix(*s), _matrix(*s), _vector(*s), EPS, 0.0, "llama", True),
        _add_norm,
    ),
    Call(
        "LigerLayerNormFunction", lambda *s: (_matrix(*s), _vector(*s), _vector(*s), EPS),
        lambda x, weight, bias, eps: functional.layer_norm(x, x.shape[-1:], weight, bias, eps),
    ),
    Call(
        "LigerGroupNormFunction",
        lambda s, *r: (normal((2, 6, s.columns // 4, 4), *r), normal((6,), *r), normal((6,), *r), 6, 3, EPS),
        lambda x, weight, bias, _, groups, eps: functional.group_norm(x, groups, weight, bias, eps),
    ),
    Call(
        "LigerPolyNormFunction", lambda s, *r: (_matrix(s, *r), normal((3,), *r), normal((), *r), EPS, True), _poly_norm
    ),
    Call(
        "LigerDyTFunction", lambda s, *r: (_matrix(s, *r), normal((1,), *r), _vector(s, *r), _vector(s, *r)),
        lambda x, alpha, gamma, beta: gamma * torch.tanh(alpha * x) + beta,
    ),
    Call(
        "LigerDyTFunction", lambda s, *r: (_matrix(s, *r), normal((1,), *r), _vector(s, *r), None),
        lambda x, alpha, gamma, _: gamma * torch.tanh(alpha * x), "without beta",
    ),
    Call("LigerSiLUMulFunction", lambda *s: (_matrix(*s), _matrix(*s)), _swiglu),
    Call("LigerSiLUMulFunction", lambda *s: (_matrix(*s), _matrix(*s), 0.5, 2.0), _swiglu, "with multipliers"),
    Call(
        "LigerFusedGateUpSiLUMulFunction", lambda s, *r: (normal((s.rows, 2 * s.columns), *r),),
        lambda y: functional.silu(y.chunk(2, -1)[0]) * y.chunk(2, -1)[1],
    ),
    Call(
        "LigerMLPFunction",
        lambda s, *r: (_matrix(s, *r), *(_linear(n, *r) for n in [(32, s.columns)] * 2 + [(s.columns, 32)])),
        _mlp,
    ),
    Call(
        "LigerMLPFunction",
        lambda s, *r: (
            _matrix(s, *r), *(_linear(n, *r) for n in [(32, s.columns)] * 2 + [(s.columns, 32)]), 1.7, 0.85,
        ),
        _mlp, "with multipliers",
    ),
    Call(
        "LigerGELUMulFunction", lambda *s: (_matrix(*s), _matrix(*s)),
        lambda a, b: functional.gelu(a, approximate="tanh") * b,
    ),
    Call("LigerSoftmaxFunction", lambda *s: (_matrix(*s),), lambda x: x.softmax(-1)),
    Call("LigerSparsemaxFunction", lambda *s: (_without_ties(_matrix(*s), -1), -1), _sparsemax),
    Call(
        "LigerSparsemaxFunction", lambda *s: (_without_ties(_matrix(*s), 1), 1), _sparsemax, "of another dimension",
    ),
    Call(
        "LigerFusedNeighborhoodAttentionFunction",
        lambda s, *r: (*(normal((2, s.heads, s.tokens, s.head_dim), *r) for _ in range(3)), 3, 2), _neighborhood,
    ),
    Call("LigerRopeFunction", lambda *s: (*_heads(*s), *_angles(*s)), _rope),
    Call("LigerRopeFunction", lambda *s: (*_heads(*s), *_angles(*s, (2, 1))), _rope, "with a dimension for heads"),
    Call(
        "LigerRopeFunction",
        lambda s, *r: (*_heads(s, *r), *(x[..., : s.head_dim // 2] for x in _angles(s, *r)), None, 1, s.head_dim),
        _rope, "with angles that come once",
    ),
    Call(
        "LigerRopeFunction",
        lambda s, *r: (*_heads(s, *r), *_angles(replace(s, head_dim=s.head_dim // 2), *r)), _part, "of half a head",
    ),
    Call(
        "LigerRopeFunction",
        lambda s, *r: (*_heads(replace(s, head_dim=s.head_dim - 1), *r), *_angles(s, *r)), _odd, "of an odd head",
    ),
    Call("LigerLlama4RopeFunction", _llama4_arguments, _complex_rope),
    Call(
        "LigerQwen2VLMRopeFunction",
        lambda s, *r: (
            *_heads(s, *r), *_angles(s, *r, (3, 2)),
            [s.head_dim // 8, s.head_dim // 8, s.head_dim // 4],
        ),
        _mrope,
    ),
    Call(
        "LigerCrossEntropyFunction", lambda s, *r: (normal((s.rows, s.vocabulary), *r), _labels(s, r[1]), None),
        _cross_entropy,
    ),
    Call(
        "LigerCrossEntropyFunction",
        lambda s, *r: (
            normal((s.rows, s.vocabulary), *r), _labels(s, r[1]), None, IGNORED, 1e-2, 0.1, "sum", 30.0,
        ),
        _cross_entropy, "with z-loss, smoothing, softcap",
    ),
    Call(
        "LigerCrossEntropyFunction",
        lambda s, *r: (normal((s.rows, s.vocabulary), *r), _labels(s, r[1]), _class_weight(s, r[1])),
        _cross_entropy, "with class weights",
    ),
    Call(
        "LigerCrossEntropyFunction",
        lambda s, *r: (
            normal((s.rows, s.vocabulary), *r), _labels(s, r[1]), _class_weight(s, r[1]), IGNORED, 1e-2, 0.1, "mean",
            None, True,
        ),
        _cross_entropy, "with class weights and z-loss",
    ),
    Call(
        "LigerCrossEntropyFunction",
        lambda s, *r: (normal((s.rows, s.vocabulary), *r), torch.full((s.rows,), IGNORED, device=r[1]), None),
        _cross_entropy, "of no rows",
    ),
    Call(
        "LigerFusedLinearCrossEntropyFunction", lambda *s: (*_head(*s), None, None), _linear_cross_entropy,
    ),
    Call(
        "LigerFusedLinearCrossEntropyFunction",
        lambda *s: (*_head(*s), None, None, IGNORED, 1e-2, 0.1, "sum", 30.0, False, torch.float32),
        _linear_cross_entropy, "with z-loss, smoothing, softcap",
    ),
    Call(
        "LigerFusedLinearCrossEntropyFunction",
        lambda s, *r: (*_head(s, *r), None, _class_weight(s, r[1]), IGNORED, 0.0, 0.0, "mean"), _linear_cross_entropy,
        "with class weights",
    ),
    Call(
        "LigerFusedLinearCrossEntropyFunction",
        lambda s, *r: (
            *_head(s, *r), normal((s.vocabulary,), *r), _class_weight(s, r[1]), IGNORED, 1e-2, 0.0, "mean", None, True,
        ),
        _linear_cross_entropy, "with bias, class weights and z-loss",
    ),
    Call(
        "LigerFusedLinearCrossEntropyFunction",
        lambda *s: (*_head(*s), None, None, IGNORED, 0.0, 0.0, "mean", None, False, None, True),
        _linear_cross_entropy, "with token scaling",
    ),
    Call(
        "LigerFusedLinearCrossEntropyFunction", lambda *s: (*_head(*s), None, None, IGNORED, 0.0, 0.0, "none"),
        _linear_cross_entropy, "of each row",
    ),
    Call(
        "LigerFusedLinearScaledCrossEntropyFunction", lambda *s: (*_head(*s), 0.7, IGNORED, 1, True), _scaled,
    ),
    Call(
        "LigerFusedLinearScaledCrossEntropyFunction", _head, lambda *given: _scaled(*given)[0], "without entropy",
    ),
    *[
        Call(
            "LigerJSDFunction",
            lambda s, *r, beta=beta: (
                _log_probabilities(s, *r, graded=True), _log_probabilities(s, *r, graded=False), _labels(s, r[1]), beta,
            ),
            _jsd, f"with beta {beta}",
        )
        for beta in (0.0, 0.3, 1.0)
    ],
    *[
        Call(
            "LigerFusedLinearJSDFunction",
            lambda s, *r, beta=beta, dtype=dtype: (
                *_head(s, *r)[:2], *(x.detach() for x in _head(s, *r)[:2]), _labels(s, r[1]), beta, IGNORED, 2.0, dtype,
            ),
            _linear_jsd, f"with beta {beta}",
        )
        for beta, dtype in ((0.0, None), (0.5, torch.float32))
    ],
    *[
        Call(
            "LigerKLDivLossFunction",
            lambda s, *r, reduction=reduction, log_target=log_target: (
                _log_probabilities(s, *r, graded=True),
                (_log_probabilities if log_target else _probabilities)(s, *r, graded=False), reduction, log_target,
            ),
            _kl_div, f"{reduction}{' of logarithms' * log_target}",
        )
        for reduction, log_target in (("batchmean", False), ("mean", True), ("sum", False), ("none", True))
    ],
    *[
        Call(
            "LigerTVDLossFunction",
            lambda s, *r, reduction=reduction: (
                _probabilities(s, *r, graded=True), _probabilities(s, *r, graded=False), _labels(s, r[1]), reduction,
            ),
            _tvd, reduction,
        )
        for reduction in ("batchmean", "mean", "sum", "none")
    ],
]  # fmt: skip


def results_and_gradients(call: Callable[..., Any], arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    """What a call gives, and the gradients of its arguments for slopes that are the same for each call."""
    # Of leaves nothing is overwritten; a loss may write its gradient over the logits that it is given.
    given = [x * 1 if isinstance(x, torch.Tensor) and x.requires_grad else x for x in arguments]
    results = call(*given)
    results = [x for x in (results if isinstance(results, tuple) else (results,)) if x is not None]
    leaves = [x for x in arguments if isinstance(x, torch.Tensor) and x.requires_grad]
    slopes = []
    for number, x in enumerate(results):
        torch.manual_seed(100 + number)  # not the seed of the arguments: along x a norm has no slope
        slopes.append(
            torch.randn(x.shape, dtype=torch.float32).to(x.device, x.dtype) if x.dim() else torch.ones_like(x)
        )
    graded, slopes = zip(
        *((x, slope) for x, slope in zip(results, slopes, strict=True) if x.requires_grad), strict=True
    )
    return [*results, *torch.autograd.grad(graded, leaves, slopes)]


def in_float64(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same arguments, wide."""

    def wide(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if x.is_complex():
            return x.to(torch.complex128)
        return x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x

    return tuple(map(wide, arguments))
