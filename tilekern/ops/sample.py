"""sample and greedy: the next token of each row of logits, drawn or the most likely one.

Parameters of ``sample`` may differ from row to row, so that requests of several users share a batch. The kernel reads
them from the GPU's memory; the host reads none, and a CUDA graph draws by the values of its replay.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilekern.kernels import sample as kernels
from tilekern.ops.operation import operation
from tilekern.ops.registration import check_dtype, constant, is_traced

_INT32 = torch.iinfo(torch.int32)
_SERVED = f"logits.shape[-1] <= {kernels.MOST_TOKENS}"


def _rows(op: str, logits: Tensor) -> Tensor:
    """Return logits as [rows, vocabulary]."""
    if not logits.shape[-1]:
        raise ValueError(f"{op}: the vocabulary of logits must not be empty, got {list(logits.shape)}")
    return logits.detach().reshape(-1, logits.shape[-1])


@operation(kernels.GREEDY, served=_SERVED)
def greedy(logits: Tensor) -> Tensor:
    """Return the id of the largest logit of each row; of equal ones the first.

    NaN counts as the largest, as in ``torch.argmax``, which may return another one of equal logits on a GPU.

    Args:
        logits: [..., vocabulary]; bfloat16, float16 or float32, any strides.

    Returns:
        int64 [...].

    Raises:
        ValueError: ``logits`` are not of a floating dtype, or the vocabulary is empty.
    """
    return kernels.greedy_by_torch(_rows("greedy", logits)).view(logits.shape[:-1])


@operation(kernels.SAMPLE, name="sample", served=_SERVED)
def _sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seed: Tensor, positions: Tensor
) -> Tensor:
    """Draw by parameters that are tensors, with a number for each row."""
    given = (x.reshape(-1) for x in (temperature, top_k, top_p, min_p, seed, positions))
    return kernels.sample_by_torch(_rows("sample", logits), *given).view(logits.shape[:-1])


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
    if logits.dim() != 2:
        raise ValueError(f"sample: logits must be [batch, vocabulary], got {list(logits.shape)}")
    return _sample(
        logits,
        _numbers("temperature", temperature, torch.float32, logits),
        _numbers("top_k", top_k, torch.int32, logits),
        _numbers("top_p", top_p, torch.float32, logits),
        _numbers("min_p", min_p, torch.float32, logits),
        _numbers("seed", seed, torch.int64, logits),
        _numbers("positions", positions, torch.int64, logits),
    )


def _numbers(name: str, given: Tensor | float, dtype: torch.dtype, logits: Tensor) -> Tensor:
    """Return a parameter as a tensor with a number for each row."""
    if not isinstance(given, Tensor):
        if is_traced(logits):
            return logits.new_full(logits.shape[:1], given, dtype=dtype)
        return constant(logits.shape[0], given, dtype, logits.device)
    check_dtype("sample", name, given, whole=not dtype.is_floating_point)
    return given.detach().to(dtype)
