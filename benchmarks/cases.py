"""Make the cases to measure: an op at a size, its tensors, its expected results and its work. Sizes and references
come from the specs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilekern.kernels import rms_norm as rms_norm_kernels
from tilekern.kernels import rope as rope_kernels
from tilekern.kernels import swiglu as swiglu_kernels
from tilekern.spec import KernelSpec, Problem

METRICS = ("forward", "backward", "forward_backward")
SEED = 20251
EPS = 1e-6
Part = tuple[KernelSpec, Problem]


@dataclass(frozen=True)
class Tensors:
    """An op's arguments: ``inputs`` have gradients, ``constants`` follow, ``slopes`` are gradients of its outputs."""

    inputs: tuple[Any, ...]
    constants: tuple[Any, ...]
    slopes: tuple[Any, ...]


@dataclass(frozen=True)
class Work:
    """The work of forward and backward: bytes moved through device memory, and floating-point operations.

    An op with ``flops`` is bound by arithmetic: its speed is in TFLOP/s. The others are compared with a copy of their
    bytes.
    """

    bytes_moved: tuple[int, int] = (0, 0)
    flops: tuple[int, int] = (0, 0)


@dataclass(frozen=True, kw_only=True)
class Case:
    """An op at one size.

    Attributes:
        op: name of the op; providers have a call of that name.
        label: op and size, the name in the results.
        dtype: the op's dtype; sets the tolerance.
        tensors: device -> random arguments.
        expected: arguments -> outputs and then gradients of the inputs, wider than the dtype.
        work: the bytes and operations.
        roundings: how many times values are rounded to the dtype on the way to a result; widens the tolerance.
        metrics: the ones of :data:`METRICS` to time.
        products: arguments -> the matrix products of forward and backward alone; timed too, if set.
    """

    op: str
    label: str
    dtype: str
    tensors: Callable[[str], Tensors]
    expected: Callable[[Tensors], tuple[Any, ...]]
    work: Work
    roundings: int = 1
    metrics: tuple[str, ...] = METRICS
    products: Callable[[Tensors], Any] | None = None

    def bytes_of(self, metric: str) -> int:
        """Return the bytes that must move for one of :data:`METRICS`."""
        return _of(metric, self.work.bytes_moved)

    def flops_of(self, metric: str) -> int:
        """Return the floating-point operations of one of :data:`METRICS`; 0 if the op is bound by memory."""
        return _of(metric, self.work.flops)


@dataclass(frozen=True, kw_only=True)
class SpecCase(Case):
    """A case whose forward and backward are each one spec's problem, for benchmarks that launch kernels directly."""

    forward: Part
    backward: Part


def _of(metric: str, both: tuple[int, int]) -> int:
    return {"forward": both[0], "backward": both[1]}.get(metric, sum(both))


def _spec_case(
    label: str, dtype: str, tensors: Callable[[str], Tensors], expected: Callable[[Tensors], tuple[Any, ...]],
    forward: Part, backward: Part,
) -> SpecCase:  # fmt: skip
    moved = forward[0].bytes_moved(forward[1]), backward[0].bytes_moved(backward[1])
    return SpecCase(
        op=label.split(" ", maxsplit=1)[0], label=label, dtype=dtype, tensors=tensors, expected=expected,
        work=Work(moved), forward=forward, backward=backward,
    )  # fmt: skip


def seeded(device: str) -> Any:
    """Return a generator with a fixed seed; None on ``meta``, where nothing is drawn."""
    import torch

    return None if device == "meta" else torch.Generator(device=device).manual_seed(SEED)


def rms_norm_case(rows: int, columns: int, dtype: str = "bfloat16") -> SpecCase:
    """Make RMSNorm of ``rows`` rows, weight in the dtype of x."""
    forward, backward = rms_norm_kernels.FORWARD, rms_norm_kernels.BACKWARD
    problem = backward.problem(rows=rows, columns=columns, dtype=dtype, weight_dtype=dtype)

    def tensors(device: str) -> Tensors:
        given = backward.inputs(problem, seeded(device), device)
        return Tensors((given["x"], given["weight"]), (EPS,), (given["dy"],))

    def expected(t: Tensors) -> tuple[Any, ...]:
        gradients = backward.reference(t.slopes[0], *t.inputs, EPS)
        return forward.reference(*t.inputs, EPS)["y"], gradients["dx"], gradients["dweight"]

    label = f"rms_norm {rows}x{columns}"
    return _spec_case(label, dtype, tensors, expected, (forward, problem), (backward, problem))


def swiglu_case(rows: int, columns: int, dtype: str = "bfloat16") -> SpecCase:
    """Make SwiGLU's elementwise part over ``rows`` rows."""
    forward, backward = swiglu_kernels.FORWARD, swiglu_kernels.BACKWARD
    problem = backward.problem(rows=rows, columns=columns, dtype=dtype)

    def tensors(device: str) -> Tensors:
        given = backward.inputs(problem, seeded(device), device)
        return Tensors((given["gate"], given["up"]), (), (given["dy"],))

    def expected(t: Tensors) -> tuple[Any, ...]:
        gradients = backward.reference(t.slopes[0], *t.inputs)
        return forward.reference(*t.inputs)["y"], gradients["dgate"], gradients["dup"]

    label = f"swiglu {rows}x{columns}"
    return _spec_case(label, dtype, tensors, expected, (forward, problem), (backward, problem))


def rope_case(
    batch: int, tokens: int, heads: int = 32, kv_heads: int = 8, head_dim: int = 128, dtype: str = "bfloat16"
) -> SpecCase:
    """Make the rotary embedding of q and k in the projections' layout; all sequences share their positions."""
    spec = rope_kernels.SPEC
    sizes: dict[str, Any] = {"tokens": tokens, "batch": batch, "heads": heads, "kv_heads": kv_heads}
    sizes |= {"head_dim": head_dim, "full": False, "dtype": dtype, "angle_dtype": dtype}
    forward, backward = spec.problem(**sizes, inverse=False), spec.problem(**sizes, inverse=True)

    def tensors(device: str) -> Tensors:
        generator = seeded(device)
        given, slopes = spec.inputs(forward, generator, device), spec.inputs(backward, generator, device)
        cos, sin = angles_of(tokens, head_dim, device, given["q"].dtype)
        return Tensors((given["q"], given["k"]), (cos, sin), (slopes["q"], slopes["k"]))

    def expected(t: Tensors) -> tuple[Any, ...]:
        turned = spec.reference(*t.inputs, *t.constants, inverse=False)
        back = spec.reference(*t.slopes, *t.constants, inverse=True)
        return turned["q_out"], turned["k_out"], back["q_out"], back["k_out"]

    label = f"rope {batch}x{tokens} {heads}+{kv_heads}x{head_dim}"
    return _spec_case(label, dtype, tensors, expected, (spec, forward), (spec, backward))


def angles_of(tokens: int, head_dim: int, device: str, dtype: Any) -> tuple[Any, Any]:
    """Return cos and sin like Qwen3's rotary embedding: two equal halves, [1, tokens, head_dim]."""
    import torch

    half = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    angles = torch.arange(tokens, device=device, dtype=torch.float32)[:, None] * (1.0e6**-half)
    angles = torch.cat((angles, angles), -1)[None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def training_cases() -> list[SpecCase]:
    """Return cases with the sizes of Qwen3-8B's and Llama-3-8B's layers at 8192 tokens and more."""
    return [
        rms_norm_case(8192, 4096),
        rms_norm_case(32768, 4096),
        rms_norm_case(262144, 128),
        swiglu_case(8192, 12288),
        swiglu_case(8192, 14336),
        rope_case(1, 8192),
        rope_case(2, 4096),
    ]


def in_batches(case: SpecCase, batch: int) -> SpecCase:
    """Return a case of rows with matrices [batch, rows, columns], the shape of a model's hidden states."""

    def seen(tensors: tuple[Any, ...], *leading: int) -> tuple[Any, ...]:
        return tuple(x.view(*leading, -1, x.shape[-1]) if x.dim() > 1 else x for x in tensors)

    def tensors(device: str) -> Tensors:
        flat = case.tensors(device)
        return Tensors(seen(flat.inputs, batch), flat.constants, seen(flat.slopes, batch))

    def expected(t: Tensors) -> tuple[Any, ...]:
        return seen(case.expected(Tensors(seen(t.inputs), t.constants, seen(t.slopes))), batch)

    op, size = case.label.split(" ", maxsplit=1)
    rows, columns = size.split("x")
    label = f"{op} {batch}x{int(rows) // batch}x{columns}"
    return dataclasses.replace(case, label=label, tensors=tensors, expected=expected)


def small_cases() -> list[SpecCase]:
    """Return cases so small that the GPU finishes before the host: for host time."""
    rows = [rms_norm_case(16, 4096), swiglu_case(16, 12288)]
    return [*rows, *(in_batches(case, 2) for case in rows), rope_case(1, 16)]
