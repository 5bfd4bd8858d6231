"""Calls of Liger's functions, each with what it must give in torch's own operations, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import formulas
import torch

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
    """Sizes of a call, shared by all arguments with rows."""

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


def _add_norm(x: torch.Tensor, residual: torch.Tensor, *rest: Any) -> Any:
    return formulas.fused_add_rms_norm(x, residual, *rest)[::-1]


def _rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *_: Any) -> Any:
    """Of as many numbers of a head as there are angles; the last one of an odd head stays, and their last is unread."""
    half = q.shape[-1] // 2
    if q.shape[-1] % 2:
        cos, sin = cos[..., :half], sin[..., :half]
    size = 2 * half if cos.shape[-1] == half and (q.shape[-1] % 2 or _) else cos.shape[-1]
    return formulas.rope(q, k, cos, sin, rotary_dim=size)


def _llama4_arguments(s: Sizes, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    q, k = (normal((2, s.tokens, heads, s.head_dim), dtype, device) for heads in (s.heads, s.heads // 2))
    angles = torch.rand(1, s.tokens, s.head_dim // 2) * 6
    return q, k, torch.polar(torch.ones_like(angles), angles).to(device)


def _cross_entropy(*given: Any) -> Any:
    """Liger divides the z-loss by the rows that count, and by 1 where none does; it gives it beside the loss."""
    found = formulas.cross_entropy(*given[:8], scaled=given[9:] == (True,), z_by_rows=True, least=1)
    return (found[0], found[1].detach()) if given[8:9] == (True,) else found[0]


def _linear_cross_entropy(x: Any, weight: Any, target: Any, bias: Any, class_weight: Any, *options: Any) -> Any:
    logits = torch.nn.functional.linear(x, weight, bias)
    return _cross_entropy(logits, target, class_weight, *options[:6], *options[7:8])


def _head(s: Sizes, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    weight = _linear((s.vocabulary, s.columns), dtype, device)
    return normal((s.rows, s.columns), dtype, device), weight, _labels(s, device)


def _linear(shape: tuple[int, int], dtype: torch.dtype, device: str) -> torch.Tensor:
    """The weight of a linear layer whose outputs are of the size of its inputs."""
    return normal(shape, dtype, device, graded=False).mul_(shape[1] ** -0.5).requires_grad_()


def _scaled(x: Any, weight: Any, target: Any, temperature: float = 1.0, ignored: int = IGNORED, *_: Any) -> Any:
    log, entropy = formulas.log_probs(x, weight, target, temperature=temperature, ignore_index=ignored)
    return -log, entropy


def _class_weight(s: Sizes, device: str) -> torch.Tensor:
    return torch.rand(s.vocabulary).add(0.5).to(device)


CALLS = [
    Call("LigerRMSNormFunction", lambda *s: (_matrix(*s), _vector(*s), EPS), formulas.rms_norm),
    Call(
        "LigerRMSNormFunction", lambda *s: (_matrix(*s), _vector(*s), EPS, 1.0, "gemma"),
        formulas.rms_norm, "Gemma's",
    ),
    Call(
        "LigerRMSNormFunction", lambda *s: (_matrix(*s), _vector(*s), EPS, 0.0, "none"),
        formulas.rms_norm, "without casts",
    ),
    Call("LigerRMSNormFunction", lambda *s: (_matrix(*s), None, EPS), formulas.rms_norm, "without a weight"),
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
        formulas.layer_norm,
    ),
    Call(
        "LigerGroupNormFunction",
        lambda s, *r: (normal((2, 6, s.columns // 4, 4), *r), normal((6,), *r), normal((6,), *r), 6, 3, EPS),
        formulas.group_norm,
    ),
    Call(
        "LigerPolyNormFunction", lambda s, *r: (_matrix(s, *r), normal((3,), *r), normal((), *r), EPS, True),
        formulas.poly_norm
    ),
    Call(
        "LigerDyTFunction", lambda s, *r: (_matrix(s, *r), normal((1,), *r), _vector(s, *r), _vector(s, *r)),
        formulas.dyt,
    ),
    Call(
        "LigerDyTFunction", lambda s, *r: (_matrix(s, *r), normal((1,), *r), _vector(s, *r), None),
        formulas.dyt, "without beta",
    ),
    Call("LigerSiLUMulFunction", lambda *s: (_matrix(*s), _matrix(*s)), formulas.swiglu),
    Call("LigerSiLUMulFunction", lambda *s: (_matrix(*s), _matrix(*s), 0.5, 2.0), formulas.swiglu, "with multipliers"),
    Call(
        "LigerFusedGateUpSiLUMulFunction", lambda s, *r: (normal((s.rows, 2 * s.columns), *r),),
        lambda y: formulas.swiglu(*y.chunk(2, -1)),
    ),
    Call(
        "LigerMLPFunction",
        lambda s, *r: (_matrix(s, *r), *(_linear(n, *r) for n in [(32, s.columns)] * 2 + [(s.columns, 32)])),
        formulas.gated_mlp,
    ),
    Call(
        "LigerMLPFunction",
        lambda s, *r: (
            _matrix(s, *r), *(_linear(n, *r) for n in [(32, s.columns)] * 2 + [(s.columns, 32)]), 1.7, 0.85,
        ),
        formulas.gated_mlp, "with multipliers",
    ),
    Call(
        "LigerGELUMulFunction", lambda *s: (_matrix(*s), _matrix(*s)),
        formulas.geglu,
    ),
    Call("LigerSoftmaxFunction", lambda *s: (_matrix(*s),), lambda x: x.softmax(-1)),
    Call("LigerSparsemaxFunction", lambda *s: (formulas.without_ties(_matrix(*s), -1), -1), formulas.sparsemax),
    Call(
        "LigerSparsemaxFunction", lambda *s: (formulas.without_ties(_matrix(*s), 1), 1),
        formulas.sparsemax, "of another dimension",
    ),
    Call(
        "LigerFusedNeighborhoodAttentionFunction",
        lambda s, *r: (*(normal((2, s.heads, s.tokens, s.head_dim), *r) for _ in range(3)), 3, 2),
        formulas.neighborhood,
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
        lambda s, *r: (*_heads(s, *r), *_angles(replace(s, head_dim=s.head_dim // 2), *r)), _rope, "of half a head",
    ),
    Call(
        "LigerRopeFunction",
        lambda s, *r: (*_heads(replace(s, head_dim=s.head_dim - 1), *r), *_angles(s, *r)), _rope, "of an odd head",
    ),
    Call("LigerLlama4RopeFunction", _llama4_arguments, formulas.llama4_rope),
    Call(
        "LigerQwen2VLMRopeFunction",
        lambda s, *r: (
            *_heads(s, *r), *_angles(s, *r, (3, 2)),
            [s.head_dim // 8, s.head_dim // 8, s.head_dim // 4],
        ),
        formulas.qwen2vl_mrope,
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
            formulas.jsd, f"with beta {beta}",
        )
        for beta in (0.0, 0.3, 1.0)
    ],
    *[
        Call(
            "LigerFusedLinearJSDFunction",
            lambda s, *r, beta=beta, dtype=dtype: (
                *_head(s, *r)[:2], *(x.detach() for x in _head(s, *r)[:2]), _labels(s, r[1]), beta, IGNORED, 2.0, dtype,
            ),
            formulas.linear_jsd, f"with beta {beta}",
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
            formulas.kl_div, f"{reduction}{' of logarithms' * log_target}",
        )
        for reduction, log_target in (("batchmean", False), ("mean", True), ("sum", False), ("none", True))
    ],
    *[
        Call(
            "LigerTVDLossFunction",
            lambda s, *r, reduction=reduction: (
                _probabilities(s, *r, graded=True), _probabilities(s, *r, graded=False), _labels(s, r[1]), reduction,
            ),
            formulas.tvd, reduction,
        )
        for reduction in ("batchmean", "mean", "sum", "none")
    ],
]  # fmt: skip


def results_and_gradients(call: Callable[..., Any], arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the results of a call, and the arguments' gradients for slopes that are equal in each call."""
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
