"""The declared ops with inputs of any shape and layout, what they must equal in float64, and how errors are judged."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import tilekern
from tilekern import ops
from tilekern.ops.declaration import Declaration, arrays_of
from tilekern.ops.operation import DECLARED
from tilekern.spec import Array, size_of

EPS = 1e-3
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("contiguous", "transposed", "sliced", "spread", "expanded")
# Weights whose rows are all the same make sums that cancel, of which rounded terms say nothing.
APART = tuple(layout for layout in LAYOUTS if layout != "expanded")
# Sizes of dimensions, for tensors of which nobody asks for others; a batch of one can be packed. Others are 16.
SIZES = {
    "rows": 6, "vocabulary": 12, "batch": 1, "tokens": 5, "queries": 5, "keys": 5, "heads": 4, "kv_heads": 2,
    "head_dim": 8, "in_features": 12, "out_features": 6, "starts": 2, "terms": 3, "pairs": 3, "experts": 3,
    "positions": 3, "angles": 8, "room": 2,
}  # fmt: skip
# Numbers in tensors that mean something.
NUMBERS = {
    **{name: torch.tensor([0, 5], dtype=torch.int32) for name in ("cu_seqlens", "cu_seqlens_k")},
    "offsets": torch.tensor([2, 2, 4], dtype=torch.int32), "order": torch.tensor([3, 0, 4, 1, 2], dtype=torch.int32),
    "lengths": torch.tensor([2], dtype=torch.int32), "table": torch.tensor([[0, -1]], dtype=torch.int32),
    "append_to_cache positions": torch.arange(5)[None], "top_k": torch.tensor([0, 3, 0, 1, 5, 0], dtype=torch.int32),
}  # fmt: skip


@dataclass(frozen=True)
class Op:
    """An op whose launches are written for it, and its reference; the first ``graded`` inputs take gradients."""

    name: str
    kernel: str
    call: Callable[..., Any]
    reference: Callable[..., Sequence[torch.Tensor]]
    arrays: tuple[Array, ...]
    shapes: Callable[[tuple[int, ...]], list[tuple[int, ...]]]
    leading: tuple[int, int]
    graded: int
    even: bool

    def run(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The op's results as a tuple."""
        out = self.call(*inputs)
        return out if isinstance(out, tuple) else (out,)


def public(op: Declaration) -> Callable[..., Any]:
    """The function that is called: that of ``tilekern.ops``, or an op that such a function calls."""
    return getattr(ops, op.name, None) or getattr(sys.modules[op.formula.__module__], op.formula.__name__)


def scalars_of(op: Declaration) -> dict[str, Any]:
    """Values of the scalars: what a caller gets who gives none, but a larger ``eps``; flags of the op's own are off."""
    known = inspect.signature(public(op)).parameters
    found = {name: known[name].default if name in known else False for name in op.scalars}
    return found | {name: EPS for name in found if name == "eps"}


def tensors_of(op: Declaration, *, optional: bool = True, seed: int = 0) -> dict[str, Any]:
    """Tensors of :data:`SIZES`; None for those that may be, unless ``optional``."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Any] = {}
    for name, array in op.inputs.items():
        if name in op.optional and not optional:
            found[name] = None
        elif "int" in array.dtype:
            zeros = torch.zeros(_shape(array.shape, SIZES), dtype=torch.int64)
            found[name] = NUMBERS.get(f"{op.name} {name}", NUMBERS.get(name, zeros))
        else:
            found[name] = _normal(array, _shape(array.shape, SIZES), generator)
    return found


def _normal(array: Array, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(shape, generator=generator)
    return values.abs() if array.nonnegative else values


def _shape(sizes: Sequence[str], values: dict[str, int]) -> tuple[int, ...]:
    return tuple(times * values.get(name, 16) // by for name, times, by in map(size_of, sizes))


def _op(op: Declaration) -> Op:
    """Return the facts on an op that tests of all ops need, from its declaration and its spec's reference."""
    first = next(iter(op.inputs.values()))
    rows = first.shape[0] == "rows"
    scalars, names = scalars_of(op), inspect.signature(op.forward.reference).parameters
    # All tensors are there.
    flags = {name: eval(said, {}, scalars | dict.fromkeys(op.tensors, ...)) for name, said in op.flags.items()}
    known = {name: value for name, value in (scalars | flags).items() if name in names}
    call = public(op)
    mine = {name: value for name, value in scalars.items() if name in inspect.signature(call).parameters}

    def shapes(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        leading = shape[: len(shape) - len(first.shape) + 1] if rows else ()
        values = dict(zip(first.shape[rows:], shape[len(leading) :], strict=True))
        values["kv_heads"] = max(1, values.get("heads", 0) // 2)
        values["pairs"] = values.get("head_dim", 0) // 3
        values |= {"positions": 3, "angles": values.get("head_dim", 0)}
        return [
            (*(leading if a.shape[:1] == ("rows",) else ()), *_shape(a.shape[a.shape[:1] == ("rows",) :], values))
            for a in op.inputs.values()
        ]

    return Op(
        name=op.name, kernel=op.forward.name, call=lambda *tensors: call(*tensors, **mine),
        reference=lambda *tensors: tuple(
            op.forward.reference(**dict(zip(op.tensors, tensors, strict=True)), **known).values()
        ),
        arrays=tuple(op.inputs.values()), shapes=shapes, graded=len(op.gradients),
        leading=(0, 3) if rows else (len(first.shape) - 1,) * 2,
        even=any("/" in size for array in op.inputs.values() for size in array.shape),
    )  # fmt: skip


SHIPPED = {name: op for name, op in DECLARED.items() if op.formula.__module__.startswith("tilekern.ops.")}
# Those whose launches are written for them.
WITH_ARRAYS = [op for op in SHIPPED.values() if op.forward.arrays and not op.launch]
OPS = {name: _op(op) for name, op in SHIPPED.items() if op.gradients and arrays_of(op.forward, "output")}


def laid_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    """``values`` in memory of another layout; ``expanded`` repeats the first entry of the first dimension."""
    shape = values.shape
    if not shape:
        return values.clone()
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
    for number, (array, size) in enumerate(zip(op.arrays, op.shapes(shape), strict=True)):
        values = _normal(array, size, generator).to(dtypes[number % len(dtypes)])
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


def slopes_of(results: Sequence[torch.Tensor], layout: str = "contiguous", seed: int = 100) -> list[torch.Tensor]:
    """Normal numbers as gradients of results, others than inputs are drawn from: along x a norm has no slope."""
    generator = torch.Generator().manual_seed(seed)
    return [laid_out(torch.randn(y.shape, generator=generator).to(y.dtype), layout) for y in results]


def assert_near(actual: torch.Tensor, reference: torch.Tensor, tolerance: float) -> None:
    """Shapes agree and the norm of the error is small against that of the reference."""
    assert actual.shape == reference.shape
    assert bool(torch.isfinite(actual).all())
    actual, reference = actual.detach().double(), reference.detach().double()
    error, size = float((actual - reference).norm()), float(reference.norm())
    assert error <= tolerance * size + 1e-12, f"relative error {error / size:.2e}, allowed {tolerance}"


def launched_by(step: Callable[[], Any]) -> dict[str, int]:
    """How often a step launches each kernel, of those that it launches."""

    def launches() -> dict[str, int]:
        return {name: counts["launches"] for name, counts in tilekern.stats().items()}

    before = launches()
    step()
    more = {name: count - before.get(name, 0) for name, count in launches().items()}
    return {name: count for name, count in more.items() if count}
