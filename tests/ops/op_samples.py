"""The ops with inputs of any shape and layout, what they must equal in float64, and how errors are judged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from tilekern.kernels import rms_norm as rms_norm_kernels
from tilekern.kernels import rope as rope_kernels
from tilekern.kernels import swiglu as swiglu_kernels
from tilekern.ops import rms_norm, rope, swiglu

EPS = 1e-3
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Allowed ||error|| / ||reference||: some units in the last place, of which rms_norm rounds twice.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
LAYOUTS = ("contiguous", "transposed", "sliced", "spread", "expanded")


@dataclass(frozen=True)
class Op:
    """An op, its reference, and its inputs; the first ``graded`` inputs take gradients."""

    name: str
    kernel: str
    call: Callable[..., Any]
    reference: Callable[..., Sequence[torch.Tensor]]
    shapes: Callable[[tuple[int, ...]], list[tuple[int, ...]]]
    leading: tuple[int, int]
    graded: int

    def run(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The op's results as a tuple."""
        out = self.call(*inputs)
        return out if isinstance(out, tuple) else (out,)


def _angles(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    batch, heads, tokens, size = shape
    return [shape, (batch, max(1, heads // 2), tokens, size), (1, tokens, size), (1, tokens, size)]


def _rope_reference(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(rope_kernels.reference(*inputs, inverse=False).values())


OPS = {
    op.name: op
    for op in (
        Op(
            "rms_norm",
            "rms_norm_forward",
            lambda x, weight: rms_norm(x, weight, EPS),
            lambda x, weight: (rms_norm_kernels.reference_forward(x, weight, EPS)["y"],),
            lambda shape: [shape, shape[-1:]],
            (0, 3),
            2,
        ),
        Op(
            "swiglu",
            "swiglu_forward",
            swiglu,
            lambda gate, up: (swiglu_kernels.reference_forward(gate, up)["y"],),
            lambda shape: [shape, shape],
            (0, 3),
            2,
        ),
        Op("rope", "rope", rope, _rope_reference, _angles, (3, 3), 2),
    )
}


def shapes(op: Op) -> st.SearchStrategy[tuple[int, ...]]:
    """Any small shape that the op takes; rows are long enough for results to be well conditioned."""
    leading = st.lists(st.sampled_from([0, 1, 1, 2, 3, 5]), min_size=op.leading[0], max_size=op.leading[1])
    last = st.integers(4, 20).map(lambda half: 2 * half) if op.name == "rope" else st.integers(8, 80)
    return st.builds(lambda some, columns: (*some, columns), leading, last)


def laid_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    """``values`` in memory of another layout; ``expanded`` repeats the first entry of the first dimension."""
    shape = values.shape
    if layout == "transposed":
        return values.new_empty(shape[::-1]).permute(*reversed(range(values.dim()))).copy_(values)
    if layout == "sliced":
        return values.new_empty((*shape[:-1], shape[-1] + 3))[..., 1:-2].copy_(values)
    if layout == "spread":
        return values.new_empty((*shape[:-1], 2 * shape[-1]))[..., ::2].copy_(values)
    if layout == "expanded" and values.dim() > 1 and shape[0] > 0:
        return values[:1].clone().expand(shape)
    return values.clone(memory_format=torch.contiguous_format)


def inputs_of(
    op: Op, shape: tuple[int, ...], dtypes: Sequence[torch.dtype], layouts: Sequence[str], seed: int = 0
) -> list[torch.Tensor]:
    """Inputs as leaves; dtypes and layouts are used in turn."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number, size in enumerate(op.shapes(shape)):
        values = torch.randn(size, generator=generator).to(dtypes[number % len(dtypes)])
        leaf = laid_out(values, layouts[number % len(layouts)])
        found.append(leaf.detach().requires_grad_(number < op.graded))
    return found


def expected(op: Op, inputs: Sequence[torch.Tensor], slopes: Sequence[torch.Tensor]) -> tuple[Any, Any]:
    """Results and gradients of the graded inputs in float64."""
    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    results = op.reference(*wide)
    leaves = [x for x in wide if x.requires_grad]
    if not leaves:
        return results, ()
    return results, torch.autograd.grad(results, leaves, [s.double() for s in slopes])


def assert_near(actual: torch.Tensor, reference: torch.Tensor, tolerance: float) -> None:
    """Shapes agree and the norm of the error is small against that of the reference."""
    assert actual.shape == reference.shape
    assert bool(torch.isfinite(actual).all())
    actual, reference = actual.detach().double(), reference.detach().double()
    error, size = float((actual - reference).norm()), float(reference.norm())
    assert error <= tolerance * size + 1e-12, f"relative error {error / size:.2e}, allowed {tolerance}"
