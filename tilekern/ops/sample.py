"""sample and greedy: the next token of each row of logits, drawn or the most likely one; without a gradient.

They are written by hand and not declared, as their results are integers.
Parameters of ``sample`` may differ from row to row, so that requests of several users share a batch. The kernel reads
them from the GPU's memory; the host reads none, and a CUDA graph draws by the values of its replay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilekern.errors import NoVariant
from tilekern.kernels import sample as kernels
from tilekern.ops.registration import as_rows, check_devices, check_dtype, constant, is_traced, register
from tilekern.runtime.dispatch import Plan, count_fallback, keep, memo, plan_for, refused
from tilekern.spec import KernelSpec

_INT32 = torch.iinfo(torch.int32)
_PARAMETERS = ("temperature", "top_k", "top_p", "min_p", "seed", "positions")
_known: dict[Any, Plan | None] = memo()


def greedy(logits: Tensor) -> Tensor:
    """Return the id of the largest logit of each row; of equal ones the first.

    NaN counts as the largest, as in ``torch.argmax``, which may return another one of equal logits on a GPU.

    Args:
        logits: [batch, vocabulary]; bfloat16, float16 or float32, any strides.

    Returns:
        int64 [batch].

    Raises:
        ValueError: ``logits`` has another shape or dtype, or the vocabulary is empty.
    """
    _check_logits("greedy", logits)
    found: Tensor = (_registered_greedy if is_traced(logits) else _greedy)(logits.detach())
    return found


def sample(
    logits: Tensor, *, temperature: Tensor | float = 1.0, top_k: Tensor | int = 0, top_p: Tensor | float = 1.0,
    min_p: Tensor | float = 0.0, seed: Tensor | int, positions: Tensor,
) -> Tensor:  # fmt: skip
    """Draw the next token of each row of logits, after temperature, top-k, top-p and min-p.

    Tokens are kept as by transformers' processors in this order, in float32: ``TemperatureLogitsWarper``,
    ``TopKLogitsWarper``, ``TopPLogitsWarper`` and ``MinPLogitsWarper``. Tokens whose logits equal the least one kept
    are kept too; transformers' top-p drops some of them.

    A row's draw depends on its logits, parameters, seed and position only: not on the batch, the row's place in it, the
    GPU, or whether a kernel ran. Rows with the same seed and position use the same random number, so give each sequence
    a seed of its own.

    Each parameter is a number, or a tensor on the device of ``logits`` with a number for each row.

    Args:
        logits: [batch, vocabulary]; bfloat16, float16 or float32, any strides.
        temperature: divides the logits. Rows with 0 return the largest logit, as :func:`greedy` does.
        top_k: keep this many of the largest logits; 0 keeps all.
        top_p: keep the most likely tokens until their probability is at least this; 1 keeps all, 0 the likeliest.
        min_p: keep tokens whose probability is at least this share of the likeliest one's.
        seed: any int64.
        positions: [batch], the position of the token to draw in its sequence; an integer tensor.

    Returns:
        int64 [batch]. A row with NaN or infinity, or only minus infinity, returns what :func:`greedy` does.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, the vocabulary is empty, or a number is out of its range.
            Tensors' values are not checked: they act as the nearest value in the range, and NaN as no filter.
    """
    for name, number, most in (("temperature", temperature, float("inf")), ("top_p", top_p, 1), ("min_p", min_p, 1)):
        if not isinstance(number, Tensor) and not 0 <= number <= most:
            raise ValueError(f"sample: {name} must be from 0 to {most}, got {number}")
    if not isinstance(top_k, Tensor):
        if top_k < 0:
            raise ValueError(f"sample: top_k must be 0, which keeps all tokens, or more, got {top_k}")
        top_k = min(top_k, _INT32.max)
    _check_logits("sample", logits)
    given = {
        name: _numbers(name, value, dtype, logits)
        for name, value, dtype in (
            ("temperature", temperature, torch.float32),
            ("top_k", top_k, torch.int32),
            ("top_p", top_p, torch.float32),
            ("min_p", min_p, torch.float32),
            ("seed", seed, torch.int64),
            ("positions", positions, torch.int64),
        )
    }
    check_devices("sample", logits=logits, **given)
    found: Tensor = (_registered_sample if is_traced(logits) else _sample)(logits.detach(), *given.values())
    return found


def _numbers(name: str, given: Tensor | float, dtype: torch.dtype, logits: Tensor) -> Tensor:
    """Return a parameter as a tensor of one number, or of one for each row."""
    if not isinstance(given, Tensor):
        if is_traced(logits):
            return logits.new_full((1,), given, dtype=dtype)
        return constant(1, given, dtype, logits.device)
    check_dtype("sample", name, given, whole=not dtype.is_floating_point)
    if given.shape != logits.shape[:1]:
        raise ValueError(f"sample: {name} must have the shape [{logits.shape[0]}], got {list(given.shape)}")
    return given.detach().to(dtype)


def _check_logits(op: str, logits: Tensor) -> None:
    if logits.dim() != 2 or not logits.shape[1] or not logits.is_floating_point():
        raise ValueError(f"{op}: logits must be [batch, vocabulary] of floats, got {logits.dtype} {list(logits.shape)}")


def _plan(spec: KernelSpec, logits: Tensor) -> Plan | None:
    """Return the plan of a call; None if torch must choose."""
    key = (spec.name, logits.get_device(), logits.shape, logits.dtype)
    try:
        return _known[key]
    except KeyError:
        plan = None
        if logits.numel() and logits.shape[1] <= kernels.MOST_TOKENS and logits.dtype != torch.float64:
            plan = plan_for(spec, logits.device, *logits.shape, logits.dtype)
        return keep(_known, key, plan) if logits.is_cuda else plan


def _chosen(spec: KernelSpec, formula: Callable[..., Tensor], logits: Tensor, *given: Tensor) -> Tensor:
    """Return the ids of rows, by one launch or by torch."""
    plan = _plan(spec, logits)
    if plan is not None:
        ids = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
        try:
            plan.launch(logits.get_device(), as_rows(logits), *(x.contiguous() for x in given), ids)
        except NoVariant as error:
            refused(spec, error)
        else:
            return ids
    count_fallback(spec)
    return formula(logits, *given)


_sample = functools.partial(_chosen, kernels.SAMPLE, kernels.sample_by_torch)
_greedy = functools.partial(_chosen, kernels.GREEDY, kernels.greedy_by_torch)


def _fake(logits: Tensor, *_: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[:1], dtype=torch.int64)


_registered_sample = register(
    f"sample_rows(Tensor logits, {', '.join(f'Tensor {name}' for name in _PARAMETERS)}) -> Tensor", _sample, _fake
)
_registered_greedy = register("greedy_rows(Tensor logits) -> Tensor", _greedy, _fake)
