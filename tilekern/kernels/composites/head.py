"""Composites over a language model's head; its logits ``hidden @ weight.T`` never exist as a whole.

For each chunk of rows: logits by a matrix product, a kernel over them that may replace them by their gradient, then
``dhidden = dlogits @ weight`` and ``dweight += dlogits.T @ hidden``. The memory besides inputs and gradients is one
chunk of logits. With small chunks ``dweight`` is read and written more often, large ones need more memory: the tuner
chooses the rows of a chunk, and whether cuBLAS or the tuned winner runs each product
(:mod:`tilekern.kernels.matmul.product`).

:class:`Head` computes a chunk; :func:`spec_of_head` makes the spec of a composite.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from tilekern.kernels.matmul import product
from tilekern.spec import (
    ITEM_BYTES,
    Config,
    Constraint,
    Dimension,
    KernelSpec,
    LibraryCall,
    Problem,
    Space,
    Value,
    cdiv,
)

PlanFor = Callable[..., Any]
# The products, as the flags of the spec ``matmul``.
_LOGITS, _DHIDDEN, _DWEIGHT, _MORE_DWEIGHT = ("b_transposed",), (), ("a_transposed",), ("a_transposed", "accumulated")
_MOST_CHUNK_BYTES = 700 << 20
_PITCH = 16
# Chunks are whole tiles of the products.
STEP = 128
GENERIC_CHUNK = 256


class Head:
    """One head, the memory of a chunk of its logits, and its gradients so far.

    Memory is allocated when it is first needed.

    Args:
        plan_for: gives the plans of the products.
        config: ``products`` chooses the implementation of products.
        hidden: [rows, hidden].
        weight: [vocabulary, hidden], of the same dtype.
        most_rows: the most rows of a chunk.
        bias: [vocabulary], of that dtype too, or None; added to the logits.
        graded: whether to compute dhidden, dweight and the float32 dbias.
        wide_sums: add dweight up in float32.
        wide_logits: keep logits in float32, the products' accumulator, not in the head's dtype.
        memory: memory of an earlier head, used if it has enough rows.

    Attributes:
        gradients: dhidden, dweight and dbias; an unwanted one is None.
    """

    def __init__(
        self, plan_for: PlanFor, config: Config, hidden: Any, weight: Any, most_rows: int, *, bias: Any = None,
        graded: tuple[bool, bool, bool] = (False, False, False), wide_sums: bool = False, wide_logits: bool = False,
        memory: Any = None,
    ) -> None:  # fmt: skip
        import torch

        tuned = functools.partial(product.by_winner, plan_for)
        self._product = tuned if config["products"] == "tuned" else product.by_cublas
        self._hidden, self._weight, self._bias, self._most_rows = hidden, weight, bias, most_rows
        self._graded, self._wide_sums, self._wide_logits = graded, wide_sums, wide_logits
        dhidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device) if graded[0] else None
        self.gradients: tuple[Any, Any, Any] = (dhidden, None, None)
        self._given = memory if memory is not None and len(memory) >= most_rows else None

    def logits(self, part: slice) -> Any:
        """Return the logits of some rows, in memory that the next chunk reuses."""
        multiplied = _wide_logits if self._wide_logits else self._product
        logits = multiplied(self._hidden[part], self._weight, self.room(part), _LOGITS)
        return logits if self._bias is None else logits.add_(self._bias)

    def room(self, part: slice) -> Any:
        """Return the memory of some rows without a change."""
        return self.memory[: part.stop - part.start]

    @functools.cached_property
    def memory(self) -> Any:
        """Return the memory of a chunk of logits."""
        import torch

        if self._given is not None:
            return self._given
        dtype = torch.float32 if self._wide_logits else self._hidden.dtype
        return room_for_logits(self._most_rows, self._weight.shape[0], dtype, self._hidden.device)

    def take(self, part: slice) -> None:
        """Add a chunk's share to the head's gradients; the logits' memory holds their gradient."""
        import torch

        (dhidden, dweight, dbias), dlogits = self.gradients, self.room(part)
        if dhidden is not None:
            self._product(dlogits, self._weight, dhidden[part], _DHIDDEN)
        if self._graded[1]:
            dweight = self._added(dweight, dlogits, self._hidden[part])
        if self._graded[2]:
            added = dlogits.sum(0, dtype=torch.float32)
            dbias = added if dbias is None else dbias.add_(added)
        self.gradients = (dhidden, dweight, dbias)

    def _added(self, dweight: Any, dlogits: Any, x: Any) -> Any:
        """Return ``dweight + dlogits.T @ x``; a new tensor for the first chunk."""
        import torch

        first = dweight is None
        if not self._wide_sums or x.dtype == torch.float32:
            dweight = torch.empty(self._weight.shape, dtype=x.dtype, device=x.device) if first else dweight
            return self._product(dlogits, x, dweight, _DWEIGHT if first else _MORE_DWEIGHT)
        if not x.is_cuda:
            added = torch.mm(dlogits.t().float(), x.float())
            return added if first else dweight.add_(added)
        if first:
            return torch.mm(dlogits.t(), x, out_dtype=torch.float32)
        return torch.addmm(dweight, dlogits.t(), x, out_dtype=torch.float32)


def _wide_logits(hidden: Any, weight: Any, out: Any, _: tuple[str, ...]) -> Any:
    import torch

    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32, out=out)
    return torch.mm(hidden.float(), weight.float().t(), out=out)


def room_for_logits(rows: int, vocabulary: int, dtype: Any, device: Any) -> Any:
    """Allocate a chunk of logits; rows begin at multiples of 16 elements for any vocabulary."""
    import torch

    # oneDNN's bfloat16 products on AMX read elements after a row, and NaN there would spread.
    make = torch.zeros if device.type == "cpu" else torch.empty
    return make((rows, cdiv(vocabulary, _PITCH) * _PITCH), dtype=dtype, device=device)[:, :vocabulary]


def split(rows: int, chunk: int) -> list[slice]:
    """Return the fewest parts of at most ``chunk`` rows; all except the last have one size."""
    size = min(chunk, whole(cdiv(rows, cdiv(rows, chunk))))
    return [slice(first, min(rows, first + size)) for first in range(0, rows, size)]


def whole(rows: int) -> int:
    """Round rows up to whole tiles of the products."""
    return cdiv(rows, STEP) * STEP


def chunk_plans(
    plan_for: PlanFor, specs: Sequence[KernelSpec | None], chunk: int, device: Any, rows: int, *sizes: Any
) -> list[tuple[Any, ...]] | None:
    """Return the rows of each chunk with its plan of each spec; None if a spec has no plan.

    A spec that is None has the plan None. ``sizes`` are the values of the specs' dimensions after their rows.
    """
    parts = split(rows, chunk)
    plans = [[spec and plan_for(spec, device, part.stop - part.start, *sizes) for part in parts] for spec in specs]
    if any(spec and None in of_parts for spec, of_parts in zip(specs, plans, strict=True)):
        return None
    return list(zip(parts, *plans, strict=True))


def rows_that_fit(problem: Problem) -> int:
    """Return the most rows of a chunk, in whole tiles; one tile even if it does not fit."""
    row_bytes = problem["vocabulary"] * ITEM_BYTES[problem["dtype"]]
    return int(max(_MOST_CHUNK_BYTES // row_bytes // STEP, 1) * STEP)


def chunks(problem: Problem) -> list[int]:
    """Return sizes of chunks: all rows, the fewest parts that fit, and 2^n or 3 * 2^n parts."""
    rows = problem["rows"]
    halvings = [1 << n for n in range(rows.bit_length())]
    parts = {cdiv(rows, rows_that_fit(problem)), *halvings, *(3 * n for n in halvings)}
    return sorted({whole(cdiv(rows, n)) for n in parts}, reverse=True)


def _largest(problem: Problem) -> int:
    return next(chunk for chunk in chunks(problem) if chunk <= rows_that_fit(problem))


_FEW_BYTES = Constraint(
    "a chunk of logits takes more than 700 MiB",
    lambda problem, config, target: config["chunk"] <= rows_that_fit(problem),
)
_FEW_CHUNKS = Constraint(
    "with half the rows that fit, the weight's gradient is read and written twice as often: 1 to 4 % more time on H200",
    lambda problem, config, target: 2 * config["chunk"] > _largest(problem),
)


def _products(problem: Problem) -> str:
    return "tuned" if problem["vocabulary"] * ITEM_BYTES[problem["dtype"]] % 16 else "cublas"


def axes(problem: Problem) -> dict[str, list[Value]]:
    """Return the axes: the rows of a chunk, and the implementation of products."""
    return {"chunk": [*chunks(problem)], "products": ["cublas", "tuned"]}


def spec_of_head(
    run: Callable[..., Any], exact: tuple[str, ...] = ("hidden", "vocabulary"), **fields: Any
) -> KernelSpec:
    """Return the spec of a composite, which launches ``run(plan_for, config, *inputs)``.

    The default config has the largest chunk, since each further one rounds the weight's gradient once more, and cuBLAS,
    which needs no record; but not for rows that are no whole 16 bytes, for which cuBLAS has slow products only.

    Args:
        run: the composite; the names of its parameters are those of the inputs.
        exact: names of the exact dimensions.
        fields: the other fields of the spec, and replacements of the fields for a single head.
    """
    reads = run.__code__.co_varnames[2 : run.__code__.co_argcount]
    usual: dict[str, Any] = {
        "space": Space(axes, (_FEW_BYTES, _FEW_CHUNKS)),
        "default": lambda problem, target: Config(chunk=_largest(problem), products=_products(problem)),
        "generic": lambda problem: Config(chunk=GENERIC_CHUNK, products="cublas"),
    }
    return KernelSpec(
        module=run.__module__,
        dimensions=(
            Dimension("rows", "bucketed"),
            *(Dimension(name, "exact") for name in exact),
            Dimension("dtype", "dtype"),
        ),
        implement=lambda problem, config: LibraryCall(
            lambda plan_for, *inputs: run(plan_for, config, *inputs), reads, composite=True
        ),
        result_dtype=lambda problem: problem["dtype"],
        roundings=2,
        **usual | fields,
    )


def matrices(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """Draw hidden states and a weight; logits are about as large as the hidden states."""
    import torch

    rows, width, vocabulary = problem["rows"], problem["hidden"], problem["vocabulary"]
    dtype = getattr(torch, problem["dtype"])
    hidden = torch.randn((rows, width), generator=generator, device=device).to(dtype)
    weight = torch.randn((vocabulary, width), generator=generator, device=device).div_(width**0.5).to(dtype)
    return {"hidden": hidden, "weight": weight}


def gradients_of(problem: Problem) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return the outputs dhidden and dweight of a spec."""
    width, dtype = problem["hidden"], problem["dtype"]
    return {"dhidden": ((problem["rows"], width), dtype), "dweight": ((problem["vocabulary"], width), dtype)}


def matrix_bytes(problem: Problem) -> int:
    """Return the bytes of hidden and weight."""
    return int(problem["hidden"] * (problem["rows"] + problem["vocabulary"]) * ITEM_BYTES[problem["dtype"]])


def product_flops(problem: Problem) -> int:
    """Return the floating-point operations of one of the products."""
    return int(2 * problem["rows"] * problem["hidden"] * problem["vocabulary"])
