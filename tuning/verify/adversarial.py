"""Make adversarial inputs for any spec, and their right results.

A spec draws its inputs with ``torch.randn`` and ``torch.rand`` and derives others from them (the log-sum-exp of a
backward, the sum of class weights, angles). So the draws are changed, not the inputs: derived ones follow, and no rule
depends on a spec.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tilekern.spec import KernelSpec, Problem
from tilekern.tuning.verify.check import expected_results, widened

# One seed for all, so that a change of one draw leaves the others as they were.
SEED = 20251
# Maps the number of a draw and its values to other values of the same shape.
Change = Callable[[int, Any], Any]
# Draws are scaled by two to one of these powers; cubes of the largest stay inside float32.
POWERS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 13, 16, 20, 25, 30)
# This value is put in place of NaN or infinity, to see which results depend on the element.
PROBE = 3.0
# These in place of infinity, to see what it leaves alone: what is the same for both is the limit of larger numbers.
FAR_PROBES = (1e6, 2e6)
_HALVES = (torch.bfloat16, torch.float16)


class _Draws(TorchFunctionMode):
    """Counts the random draws made inside it, and changes them."""

    def __init__(self, change: Change | None) -> None:
        super().__init__()
        self.count, self._change = 0, change

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.randn, torch.rand):
            return found
        self.count += 1
        return found if self._change is None else self._change(self.count - 1, found)


class _Exponents(TorchFunctionMode):
    """Finds the largest magnitude of a finite number whose exponential is taken inside it."""

    _BY_NAME = ("exp", "softmax", "log_softmax", "logsumexp")

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in self._BY_NAME:
            self.largest = max(self.largest, float(args[0].where(args[0].isfinite(), 0).abs().max()))
        return func(*args, **(kwargs or {}))


class _Narrowed(TorchFunctionMode):
    """Computes a reference in another dtype than float64, without intermediate roundings to half types."""

    def __init__(self, dtype: Any) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.double:
            return args[0].to(self._dtype)
        if func is torch.Tensor.to and any(value in _HALVES for value in (*args[1:], *kwargs.values())):
            return args[0]
        if func in (torch.Tensor.bfloat16, torch.Tensor.half):
            return args[0]

        def narrow(value: Any) -> Any:
            return self._dtype if value is torch.float64 else value

        return func(*map(narrow, args), **{name: narrow(value) for name, value in kwargs.items()})


def drawn(spec: KernelSpec, problem: Problem, device: str, change: Change | None = None) -> dict[str, Any]:
    """Return the spec's inputs with changed draws."""
    return drawn_and_counted(spec, problem, device, change)[0]


def drawn_and_counted(
    spec: KernelSpec, problem: Problem, device: str, change: Change | None = None
) -> tuple[dict[str, Any], int]:
    """Return the spec's inputs, and the number of their draws."""
    with _Draws(change) as counted:
        found = spec.inputs(problem, torch.Generator(device=device).manual_seed(SEED), device)
    return found, counted.count


def _rows(values: Any) -> Any:
    """Return the draw as rows along its last axis."""
    return values.reshape(-1, values.shape[-1])


def zeros(number: int, values: Any) -> Any:
    """Zero half of a draw's rows; eight rows have all combinations with two other draws."""
    rows = _rows(values)
    kept = torch.arange(len(rows), device=rows.device) >> number % 3 & 1
    return (rows * kept[:, None]).view(values.shape)


def one_hot_rows(number: int, values: Any) -> Any:
    """Keep one nonzero element in each row, so large that the row has a mean square of 1."""
    rows = _rows(values)
    place = (7 * torch.arange(len(rows), device=rows.device) + number) % rows.shape[-1]
    return torch.zeros_like(rows).scatter_(1, place[:, None], math.sqrt(rows.shape[-1])).view(values.shape)


def scaled(power: int) -> Change:
    """Scale every draw by two to a power."""
    return lambda _, values: values * 2.0**power


def placed(draw: int, mark: float) -> Change:
    """Set one element of one draw, at two thirds of it, to another value."""

    def change(number: int, values: Any) -> Any:
        if number != draw:
            return values
        flat = values.reshape(-1).clone()
        flat[2 * len(flat) // 3] = mark
        return flat.view(values.shape)

    return change


def results_in(dtype: Any, spec: KernelSpec, problem: Problem, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reference's results in another dtype than float64, without intermediate rounding."""
    with _Narrowed(dtype):
        return expected_results(spec, problem, dict(inputs))


def largest_exponent(spec: KernelSpec, problem: Problem, inputs: Mapping[str, Any]) -> float:
    """Return the largest magnitude of a finite number whose exponential the reference takes; 0 if it takes none."""
    with _Exponents() as found:
        expected_results(spec, problem, dict(inputs))
    return found.largest


def reached(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return which elements of the results depend on the difference of two inputs.

    Args:
        one: the results of the first, without intermediate rounding, which would hide small dependences.
        other: the results of the second.
    """
    return {name: value != other[name] for name, value in one.items()}


def changed_names(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the inputs in which an element that was finite is not any more."""
    return [
        name
        for name, value in after.items()
        if isinstance(value, torch.Tensor)
        and bool((~widened(value).isfinite() & widened(before[name]).isfinite()).any())
    ]
