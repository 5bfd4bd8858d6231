"""Make the routings of rows to experts with which kernels are timed and checked.

A tuned record serves any routing, so a routing is not part of a problem. Candidates of grouped products are timed on
equal shares and on shares that fall as 1 / rank (Zipf), and checked on extremes as well. The layer's other kernels have
one uneven routing: their work for a row hardly depends on its expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilekern.spec import Problem

# Slots of a token of gathered rows: GPT-OSS has four experts for each token.
SLOTS = 4


def held(problem: Problem) -> int:
    """Count the rows that belong to an expert: all, or seven eighths of a ``partial`` problem's."""
    rows = int(problem["rows"])
    return rows - rows // 8 if problem.get("partial", False) else rows


def _ends(problem: Problem, device: str, shares: list[float]) -> Any:
    """Return offsets of experts that get these shares of the rows that belong to an expert."""
    import torch

    total, rows, sums = sum(shares), held(problem), [sum(shares[: n + 1]) for n in range(len(shares))]
    ends = [min(rows, int(rows * part / total + 0.5)) for part in sums]
    return torch.tensor([*ends[:-1], rows], dtype=torch.int32, device=device)


def balanced(problem: Problem, device: str) -> Any:
    """Return offsets [experts] of equal shares."""
    return _ends(problem, device, [1.0] * problem["experts"])


def _varied(shares: Callable[[Problem], list[float]]) -> Callable[[Problem, Any, str], dict[str, Any]]:
    return lambda problem, generator, device: {"offsets": _ends(problem, device, shares(problem))}


def _one_each(problem: Problem) -> list[float]:
    """Give each expert one row while rows remain, and the rest to the last expert."""
    rows, others = held(problem), problem["experts"] - 1
    return [float(n < rows) for n in range(others)] + [float(max(0, rows - others))]


# Offsets that replace the balanced ones, by name.
VARIATIONS = {
    "zipf": _varied(lambda problem: [1.0 / rank for rank in range(1, problem["experts"] + 1)]),
    "one expert gets all": _varied(
        lambda problem: [float(n == problem["experts"] // 2) for n in range(problem["experts"])]
    ),
    "empty experts": _varied(
        lambda problem: [float(n % 3 == 1 or problem["experts"] < 2) for n in range(problem["experts"])]
    ),
    "one row each": _varied(_one_each),
}
# Offsets for sums over rows: rows beyond the last offset add nothing.
OF_SUMS = VARIATIONS | {
    "rows of nobody": lambda problem, generator, device: {"offsets": balanced(problem, device) * 7 // 8}
}


def shuffled(rows: int, generator: Any, device: str) -> Any:
    """Draw an order [rows] of all slots."""
    import torch

    return torch.rand(rows, generator=generator, device=device).argsort(stable=True).int()


def expert_rows(offsets: Any, rows: int) -> Any:
    """Return the expert of each row [rows] (int64), or the number of experts for rows beyond the last offset."""
    import torch

    return torch.searchsorted(offsets, torch.arange(rows, dtype=torch.int32, device=offsets.device), right=True)


def drawn_experts(rows: int, experts: int, generator: Any, device: str) -> Any:
    """Draw the expert of each slot [rows] (int64): half of the slots have the same, a quarter have none.

    Expert 0 has no slot; a slot without an expert has the number ``experts``.
    """
    import torch

    ids = torch.randint(experts, (rows,), generator=generator, device=device)
    ids[ids == 0] = experts - 1
    ids[::2] = experts // 2
    ids[1::4] = experts
    return ids
