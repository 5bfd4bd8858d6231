"""Composites over a language model's head, whose logits ``hidden @ weight.T`` never exist as a whole.

For each chunk of rows: logits by a matrix product, a kernel over them that may leave their gradient in their place,
then ``dhidden = dlogits @ weight`` and ``dweight += dlogits.T @ hidden``. Small chunks make ``dweight`` be read and
written more often, large ones need more memory, so the number of rows in a chunk is for the tuner to choose; so is
whether cuBLAS runs the products or what won each of them (:mod:`tilekern.kernels.matmul.product`).

:class:`Head` is what a chunk goes through. A spec has its :func:`space`, its :func:`default` and its :func:`generic`
config from here.
"""

from __future__ import annotations

from typing import Any

from tilekern.kernels.fused_linear_cross_entropy import (
    DHIDDEN,
    DWEIGHT,
    LOGITS,
    MORE_DWEIGHT,
    PlanFor,
    added_wide,
    product_of,
    room_for_logits,
    split,
)
from tilekern.kernels.fused_linear_cross_entropy import SPEC as LOSS
from tilekern.spec import Config, KernelSpec, Problem, Space
from tilekern.targets import Target

__all__ = ["Head", "PlanFor", "chunk_plans", "default", "generic", "space", "split"]


class Head:
    """One head, the memory of a chunk of its logits, and its gradients as far as chunks have made them.

    Args:
        plan_for: gives the plans of the products.
        config: ``products`` says who multiplies.
        hidden: [rows, hidden].
        weight: [vocabulary, hidden], of the same dtype.
        most_rows: of a chunk.
        graded: whether dhidden, dweight and the float32 dbias are wanted.
        wide_sums: add dweight up in float32.

    Attributes:
        gradients: dhidden, dweight and dbias, None where it is not wanted.
    """

    def __init__(
        self, plan_for: PlanFor, config: Config, hidden: Any, weight: Any, most_rows: int,
        graded: tuple[bool, bool, bool] = (False, False, False), *, wide_sums: bool = False,
    ) -> None:  # fmt: skip
        import torch

        self._hidden, self._weight = hidden, weight
        self._held, self._product = room_for_logits(most_rows, weight.shape[0], hidden), product_of(plan_for, config)
        self._graded, self._wide_sums = graded, wide_sums and hidden.dtype != torch.float32
        self.gradients: tuple[Any, Any, Any] = (
            torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device) if graded[0] else None, None, None
        )  # fmt: skip

    def logits(self, part: slice) -> Any:
        """Those of some rows, in memory that the next chunk's take."""
        return self._product(self._hidden[part], self._weight, self.room(part), LOGITS)

    def room(self, part: slice) -> Any:
        """That memory, as it is."""
        return self._held[: part.stop - part.start]

    def take(self, part: slice, dlogits: Any) -> None:
        """Add what the gradient of a chunk's logits makes of the head's gradients."""
        import torch

        (dhidden, dweight, dbias), x = self.gradients, self._hidden[part]
        if dhidden is not None:
            self._product(dlogits, self._weight, dhidden[part], DHIDDEN)
        if self._graded[1] and self._wide_sums:
            dweight = added_wide(dweight, dlogits, x)
        elif self._graded[1]:
            first = dweight is None
            dweight = torch.empty(self._weight.shape, dtype=x.dtype, device=x.device) if first else dweight
            self._product(dlogits, x, dweight, DWEIGHT if first else MORE_DWEIGHT)
        if self._graded[2]:
            added = dlogits.sum(0, dtype=torch.float32)
            dbias = added if dbias is None else dbias.add_(added)
        self.gradients = (dhidden, dweight, dbias)


class WideLogits:
    """Logits of a head as its products add them up, in float32, where the head's own dtype would round them.

    Args:
        hidden: [rows, hidden].
        weight: [vocabulary, hidden], of the same dtype.
        most_rows: whose logits are held.
    """

    def __init__(self, hidden: Any, weight: Any, most_rows: int) -> None:
        import torch

        self._hidden, self._weight = hidden, weight
        self._held = room_for_logits(most_rows, weight.shape[0], hidden.new_empty(0, dtype=torch.float32))

    def logits(self, part: slice) -> Any:
        """Those of some rows, in memory that the next ones take."""
        import torch

        held, hidden, weight = self._held[: part.stop - part.start], self._hidden[part], self._weight
        if hidden.is_cuda and hidden.dtype != torch.float32:
            return torch.mm(hidden, weight.t(), out_dtype=torch.float32, out=held)
        return torch.mm(hidden.float(), weight.float().t(), out=held)


def chunk_plans(
    plan_for: PlanFor, spec: KernelSpec, chunk: int, device: Any, rows: int, *sizes: Any
) -> list[tuple[slice, Any]] | None:
    """The rows of each chunk with the plan of its kernel; None where one has none.

    ``sizes`` are the values of the spec's dimensions behind its rows.
    """
    parts = split(rows, chunk)
    plans = [plan_for(spec, device, part.stop - part.start, *sizes) for part in parts]
    return None if None in plans else list(zip(parts, plans, strict=True))


def space() -> Space:
    """Chunks whose logits take up to 700 MiB, and who multiplies: as for ``fused_linear_cross_entropy``."""
    return LOSS.space


def default(problem: Problem, target: Target) -> Config:
    """The largest chunk, since each one more rounds the weight's gradient once more; cuBLAS needs no record."""
    return LOSS.default(problem, target)


def generic(problem: Problem) -> Config:
    """A small chunk for any machine."""
    return LOSS.generic(problem)
