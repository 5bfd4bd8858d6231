"""Define the measured implementations: tilekern and its peers, each with a call for every op that it has.

Calls take the arguments of :mod:`benchmarks.formulas`; ``attention(q, k, v)`` is causal, with [batch, tokens, heads,
head_dim]. Each call is the one that a user of the peer makes. torch's ``linear`` is cuBLAS. Liger's default back end is
Triton; ``LIGER_KERNEL_IMPL=cutile`` and ``=cutedsl`` replace it by the cuTile and CuTe DSL back ends, which are
imported from their modules here so that all three fit in one process. Three of Liger's ops overwrite their arguments:
swiglu's backward writes gradients over gate and up, rope (Triton and cuTile) turns q, k and their gradients in place,
and cross entropy writes the gradient over the logits; tilekern and quack are asked to do the same there. The benchmark
restores all arguments before each call, outside of the timed region. Liger's RMSNorm backward writes dx over dy (its
default, which Qwen3 gets) or fills a new dx with zeros first; both are measured, the default as
``liger-triton-inplace``. TileGym's is measured with its default, dx over dy.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import formulas
from benchmarks.environment import version_of
from benchmarks.suite_cases import SUITE
from tilekern.errors import InputError

Call = Callable[..., Any]
OURS = "tilekern"
FP8 = f"{OURS}-fp8"
# Where steps from graphs ran with both optimizers, the faster counts.
GRAPHS = (f"{OURS}-graphs", f"{OURS}-graphs-adamw")
IN_8_BITS = (FP8, f"{FP8}-graphs")
OPS = (
    "rms_norm", "swiglu", "rope", "fused_add_rms_norm", "qk_norm_rope", "cross_entropy", "fused_linear_cross_entropy",
    "attention", "linear", *SUITE,
)  # fmt: skip
# Peers round more often than tilekern, like the formulas that they replace.
PEER_SLACK = 4.0
# e4m3 has 4 significant bits where bfloat16 has 8.
FP8_SLACK = 16.0


def is_in_bfloat16(provider: str) -> bool:
    """Return whether a provider or trainer of this name computes products in bfloat16, and not by 8-bit floats."""
    return "fp8" not in provider


@dataclass(frozen=True)
class Provider:
    """A provider of ops: its name with its version, and its calls by the op's name."""

    name: str
    calls: Mapping[str, Call]

    @property
    def slack(self) -> float:
        """Return the factor on tilekern's tolerance that its errors may reach."""
        return {OURS: 1.0, FP8: FP8_SLACK}.get(self.name, PEER_SLACK)


def _tilekern() -> Provider:
    """Return all ops; rope and cross entropy are called like the patches for models call them."""
    calls = {op: getattr(importlib.import_module(f"tilekern.ops.{op}"), op) for op in OPS if _has(op)}
    if "rope" in calls:
        calls["rope"] = functools.partial(calls["rope"], twice=True)
    if loss := calls.get("cross_entropy"):
        # A leaf keeps its memory; in a model the logits are not a leaf.
        calls["cross_entropy"] = lambda logits, target: loss(logits.view_as(logits), target, in_place=True)
    calls |= {op: SUITE[op].ours(call) for op, call in calls.items() if op in SUITE}
    return Provider(OURS, calls)


def _has(op: str) -> bool:
    return importlib.util.find_spec(f"tilekern.ops.{op}") is not None


_FORMULAS: Mapping[str, Call] = {
    op: SUITE[op].formula if op in SUITE else getattr(formulas, op) for op in OPS if op != "attention"
}


def _eager() -> Provider:
    return Provider(f"torch {version_of('torch')}", _FORMULAS)


def _compiled() -> Provider:
    import torch

    calls = {op: torch.compile(call, dynamic=False) for op, call in _FORMULAS.items() if op != "linear"}
    return Provider(f"torch.compile {version_of('torch')}", calls)


def _sdpa(name: str, backend: str) -> Provider:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attention(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(getattr(SDPBackend, backend)):
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
            )
        return out.transpose(1, 2)

    return Provider(f"{name} {version_of('torch')}", {"attention": attention})


def _liger_triton() -> Provider:
    return _liger("liger-triton", "liger_kernel.ops")


def _liger_triton_inplace() -> Provider:
    norm = _liger("liger-triton-inplace", "liger_kernel.ops", in_place=True)
    return Provider(norm.name, {"rms_norm": norm.calls["rms_norm"]})


def _liger_cutile() -> Provider:
    return _liger("liger-cutile", "liger_kernel.ops.cutile.ops")


def _liger_cutedsl() -> Provider:
    return _liger("liger-cutedsl", "liger_kernel.ops.cutedsl.ops")


def _liger(name: str, package: str, *, in_place: bool = False) -> Provider:
    """Return one of Liger's back ends, with the ops that it has."""
    ops = importlib.import_module(package)

    def rms_norm(x: Any, weight: Any, eps: float) -> Any:
        return ops.LigerRMSNormFunction.apply(x, weight, eps, 0.0, "llama", in_place)

    def fused_add_rms_norm(residual: Any, x: Any, weight: Any, eps: float) -> tuple[Any, Any]:
        y, total = ops.LigerFusedAddRMSNormFunction.apply(x, residual, weight, eps)
        return total, y

    def cross_entropy(logits: Any, target: Any) -> Any:
        return ops.LigerCrossEntropyFunction.apply(logits, target, None)[0]

    def fused_linear_cross_entropy(hidden: Any, weight: Any, target: Any) -> Any:
        return ops.LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, target)[0]

    calls = {
        "rms_norm": rms_norm,
        "swiglu": ops.LigerSiLUMulFunction.apply,
        "rope": ops.LigerRopeFunction.apply,
        "cross_entropy": cross_entropy,
        "fused_linear_cross_entropy": fused_linear_cross_entropy,
    }
    if hasattr(ops, "LigerFusedAddRMSNormFunction"):  # the CuTe DSL back end has none
        calls["fused_add_rms_norm"] = fused_add_rms_norm
    for op, one in SUITE.items():
        if one.liger and hasattr(ops, one.liger):
            calls[op] = one.call(getattr(ops, one.liger).apply)
    if hasattr(ops, "apply_tiled_mlp"):  # nor this
        calls["tiled_swiglu"] = tiled_mlp(ops.apply_tiled_mlp, ops.LigerSiLUMulFunction.apply)
        calls["tiled_geglu"] = tiled_mlp(ops.apply_tiled_mlp, ops.LigerGELUMulFunction.apply)
    return Provider(f"{name} {version_of('liger-kernel')}", calls)


def tiled_mlp(apply: Call, activation: Call) -> Call:
    """Return a gated MLP by ``apply(fn, module, x)`` of Liger and TileGym; the weights' gradients are results.

    Its backward adds the gradients to the module's parameters; each call makes new parameters in the memory of the
    weights.
    """
    import torch
    from torch.nn.functional import linear

    def mlp(module: Any, x: Any) -> Any:
        gate, up, down = module
        return linear(activation(linear(x, gate), linear(x, up)), down)

    class TiledMLP(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Any) -> Any:
            ctx.leaves = [x.detach().requires_grad_() for x in given]
            with torch.enable_grad():
                ctx.out = apply(mlp, ctx.leaves[1:], ctx.leaves[0])
            return ctx.out.detach()

        @staticmethod
        def backward(ctx: Any, dy: Any) -> tuple[Any, ...]:
            torch.autograd.backward(ctx.out, dy)
            return tuple(x.grad for x in ctx.leaves)

    return TiledMLP.apply


def _tilegym() -> Provider:
    """Return TileGym's suite of Liger's ops: functions of the same names, called with their defaults."""
    suite = importlib.import_module("tilegym.suites.liger")

    def fused_add_rms_norm(residual: Any, x: Any, weight: Any, eps: float) -> tuple[Any, Any]:
        y, total = suite.fused_add_rms_norm(x, residual, weight, eps)
        return total, y

    calls = {"fused_add_rms_norm": fused_add_rms_norm}
    for op in ("rms_norm", "swiglu", "rope", "cross_entropy", "fused_linear_cross_entropy"):
        calls[op] = getattr(suite, op)
    found = {op: (one.tilegym, getattr(suite, op, None)) for op, one in SUITE.items()}
    calls |= {op: fit(function) for op, (fit, function) in found.items() if fit and function}
    calls["tiled_swiglu"] = tiled_mlp(suite.tiled_mlp, suite.swiglu)
    calls["tiled_geglu"] = tiled_mlp(suite.tiled_mlp, suite.geglu)
    return Provider(f"tilegym {version_of('tilegym')}", calls)


def _tilegym_unsloth() -> Provider:
    """Return the ops of TileGym's Unsloth suite that have their own gradients and take the formulas' arguments."""
    suite = importlib.import_module("tilegym.suites.unsloth")

    def cross_entropy(logits: Any, target: Any) -> Any:
        return suite.cross_entropy_loss(logits[None], target[None])

    calls = {"rms_norm": suite.rms_layernorm, "layer_norm": suite.layernorm, "cross_entropy": cross_entropy}
    return Provider(f"tilegym-unsloth {version_of('tilegym')}", calls)


def _trl() -> Provider:
    """Return TRL's log-probabilities and entropies of a head, computed in chunks like its trainers' fused heads."""
    trainers = importlib.import_module("trl.trainer.utils")
    apply, chunk = trainers._ChunkedLogProbFunction.apply, trainers._CHUNKED_LOGPROB_CHUNK_SIZE

    def linear_log_probs(hidden: Any, weight: Any, ids: Any) -> tuple[Any, Any]:
        return apply(hidden, weight, None, ids, 1.0, chunk, None, 1.0, ("log_probs", "entropy"))[:2]

    return Provider(f"trl {version_of('trl')}", {"linear_log_probs": linear_log_probs})


def _trl_logits() -> Provider:
    """Return TRL's log-probabilities and entropies of logits, computed like its trainers without a fused head."""
    trainers = importlib.import_module("trl.trainer.utils")

    def linear_log_probs(hidden: Any, weight: Any, ids: Any) -> tuple[Any, Any]:
        logits = hidden @ weight.T
        return trainers.selective_log_softmax(logits, ids), trainers.entropy_from_logits(logits)

    return Provider(f"trl-logits {version_of('trl')}", {"linear_log_probs": linear_log_probs})


def _quack() -> Provider:
    from quack.cross_entropy import cross_entropy as loss
    from quack.rmsnorm import rmsnorm
    from quack.rotary import apply_rotary_emb
    from quack.softmax import softmax

    def rms_norm(x: Any, weight: Any, eps: float) -> Any:
        return rmsnorm(x, weight, eps=eps)

    def fused_add_rms_norm(residual: Any, x: Any, weight: Any, eps: float) -> tuple[Any, Any]:
        y, total = rmsnorm(x, weight, residual=residual, eps=eps, prenorm=True)
        return total, y

    def cross_entropy(logits: Any, target: Any) -> Any:
        return loss(logits, target, inplace_backward=True)

    def rope(q: Any, k: Any, cos: Any, sin: Any) -> tuple[Any, Any]:
        """Call rope on views: tokens before heads, and one half of the angles, which all sequences share."""
        angles = [x[0, :, : x.shape[-1] // 2] for x in (cos, sin)]
        q, k = (apply_rotary_emb(x.transpose(1, 2), *angles).transpose(1, 2) for x in (q, k))
        return q, k

    calls: dict[str, Call] = {
        "rms_norm": rms_norm,
        "layer_norm": _quack_layer_norm(),
        "fused_add_rms_norm": fused_add_rms_norm,
        "rope": rope,
        "cross_entropy": cross_entropy,
        "softmax": softmax,
    }
    return Provider(f"quack {version_of('quack-kernels')}", calls | _quack_fused_linear_cross_entropy())


def _quack_layer_norm() -> Call:
    """Wrap quack's forward and backward, which have no autograd; convert weights to float32, as quack requires."""
    import torch
    from quack.rmsnorm import layernorm_bwd, layernorm_fwd

    class LayerNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any, bias: Any, eps: float) -> Any:
            y, rstd, mean = layernorm_fwd(x, weight, bias, eps, return_rstd=True, return_mean=True)
            ctx.save_for_backward(x, weight, rstd, mean)
            return y

        @staticmethod
        def backward(ctx: Any, dy: Any) -> tuple[Any, ...]:
            x, weight, rstd, mean = ctx.saved_tensors
            return *layernorm_bwd(x, weight, dy, rstd, mean), None

    return lambda x, weight, bias, eps: LayerNorm.apply(x, weight.float(), bias.float(), eps)


def _quack_fused_linear_cross_entropy() -> dict[str, Call]:
    """Return the op if quack imports with the installed CuTe DSL; its matmuls run untuned, which saves minutes."""
    try:
        from quack.linear_cross_entropy import chunked_linear_cross_entropy
    except Exception:  # noqa: BLE001 (an import that breaks half-way raises what it likes)
        return {}
    return {"fused_linear_cross_entropy": functools.partial(chunked_linear_cross_entropy, tuned=False)}


LOADERS: Mapping[str, Callable[[], Provider]] = {
    OURS: _tilekern,
    "torch": _eager,
    "torch.compile": _compiled,
    "sdpa-flash": functools.partial(_sdpa, "sdpa-flash", "FLASH_ATTENTION"),
    "sdpa-cudnn": functools.partial(_sdpa, "sdpa-cudnn", "CUDNN_ATTENTION"),
    "liger-triton": _liger_triton,
    "liger-triton-inplace": _liger_triton_inplace,
    "liger-cutile": _liger_cutile,
    "liger-cutedsl": _liger_cutedsl,
    "quack": _quack,
    "tilegym": _tilegym,
    "tilegym-unsloth": _tilegym_unsloth,
    "trl": _trl,
    "trl-logits": _trl_logits,
}


def load(names: Sequence[str], notes: list[str]) -> list[Provider]:
    """Return the named providers; a peer that cannot be imported is left out and noted.

    Raises:
        InputError: a provider is unknown.
    """
    found = []
    for name in names:
        if name not in LOADERS:
            raise InputError(f"unknown provider {name!r}; known: {', '.join(LOADERS)}")
        try:
            provider = LOADERS[name]()
        except Exception as error:
            if name == OURS:
                raise
            notes.append(f"{name} left out: {one_line(error)}")
            continue
        found.append(provider)
        if name == OURS:
            notes.extend(f"tilekern has no {op}" for op in OPS if op not in provider.calls)
    return found


def one_line(error: BaseException) -> str:
    """Return an error as one short line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
