"""Convert labels for the loss kernels, and refuse labels outside the vocabulary without waiting for the GPU.

The kernel that converts labels to int32 (:mod:`tilekern.kernels.labels`) writes a label outside the vocabulary to a
word in host memory. The loss is NaN, and the next call of one of these ops on that device raises. A replayed CUDA graph
calls no op, so :func:`check_labels` lets users check.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from tilekern.kernels import labels as kernels
from tilekern.ops.registration import Rows, shaped, viewed
from tilekern.runtime import dispatch

# The word refers to ops by these numbers, from 1.
OPS = ("cross_entropy", "fused_linear_cross_entropy", "linear_log_probs", "sharded_linear_log_probs", "log_probs")
_SPEC = kernels.SPEC
_HOW_TO_FIND = "find it with ((labels < 0) | (labels >= vocabulary)) & (labels != ignore_index)"


class Seen:
    """The word of one device: a label outside its vocabulary and the op that got it; 0 if there was none.

    ``word.value`` is its content; ``array`` is passed to kernels.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # A GPU writes to pinned memory at its host address.
        self._memory = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        self.word = ctypes.c_int64.from_address(self._memory.data_ptr())
        self.array = Rows(self._memory, (1,)) if device.type == "cuda" else self._memory

    def refuse(self) -> None:
        """Raise ValueError if a label was written, and clear the word."""
        if not (word := self.word.value):
            return
        self.word.value = 0
        number, label = divmod(word + kernels.SPAN // 2, kernels.SPAN)
        raise ValueError(
            f"{OPS[number - 1]} got the label {label - kernels.SPAN // 2} in an earlier call on {self._device}, which "
            f"is outside its vocabulary and not ignore_index; the result of that row is NaN; {_HOW_TO_FIND}"
        )


# By device number; -1 is the CPU.
_seen: dict[int, Seen] = {}
_known = dispatch.memo()


def check_labels(*, wait: bool = True) -> None:
    """Raise for a label outside the vocabulary that no later call of a loss has reported yet.

    Call it after the last step and after replays of CUDA graphs.

    Args:
        wait: wait until the GPUs that losses ran on have finished all queued work. Otherwise only finished work is
            checked.

    Raises:
        ValueError: there was such a label.
    """
    for number, seen in _seen.items():
        if wait and number >= 0:
            torch.cuda.synchronize(number)
        seen.refuse()


def checked(op: str, labels: Tensor, vocabulary: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return labels as kernels accept them, and the number of labels that count.

    Args:
        op: the op that was called, one of :data:`OPS`.
        labels: [...] of an integer dtype, on the device where the op runs its kernels.
        vocabulary: the number of labels.
        ignore_index: the label of rows that do not count; fits into int32.

    Returns:
        int32 [rows], with an invalid label in place of each one outside the vocabulary; int64 numbers whose sum is the
        number of labels that are not ``ignore_index``.

    Raises:
        ValueError: an earlier call of one of these ops got a label outside the vocabulary.
    """
    device = labels.get_device()
    try:
        seen = _seen[device]
    except KeyError:
        # If two threads race, the first word stays: memory that a kernel may write to is never freed.
        seen = _seen.setdefault(device, Seen(labels.device))
    if seen.word.value:
        seen.refuse()
    is_wide = labels.dtype == torch.int64
    if not is_wide:
        labels = labels.to(torch.int32)
    rows = labels.numel()
    plan = _plan(device, labels, rows, is_wide)
    if plan is None:
        dispatch.count_fallback(_SPEC)
        refuse_outside(op, labels, vocabulary, ignore_index)
        return labels.reshape(-1).to(torch.int32), (labels != ignore_index).sum().view(1)
    labels = labels.contiguous()
    found = torch.empty(rows, dtype=torch.int32, device=labels.device)
    counted = torch.empty(plan.blocks, dtype=torch.int64, device=labels.device)
    if labels.dim() != 1:
        labels = (Rows if labels.is_cuda else viewed)(labels, (rows,))
    plan.launch(device, labels, ignore_index, vocabulary, OPS.index(op) + 1, found, counted, seen.array)
    return found, counted


def _plan(device: int, labels: Tensor, rows: int, is_wide: bool) -> Any:
    if not labels.is_cuda:
        return dispatch.plan_for(_SPEC, labels.device, rows, is_wide)
    try:
        return _known[device, rows, is_wide]
    except KeyError:
        plan = dispatch.plan_for(_SPEC, labels.device, rows, is_wide)
        return dispatch.keep(_known, (device, rows, is_wide), plan)


def total(counted: Tensor) -> Tensor:
    """Return the sum of the numbers of :func:`checked`, a scalar."""
    return shaped(counted) if counted.numel() == 1 else counted.sum()


def refuse_outside(op: str, labels: Tensor, vocabulary: int, ignore_index: int) -> None:
    """Refuse labels outside the vocabulary by torch's operations: at once on the CPU, by an assertion on a GPU.

    Raises:
        ValueError: a label is outside, on the CPU.
    """
    outside = (labels != ignore_index) & ((labels < 0) | (labels >= vocabulary))
    if labels.is_cuda:
        torch._assert_async(~outside.any(), f"{op} got a label outside its vocabulary; {_HOW_TO_FIND}")
    elif labels.device.type == "cpu" and bool(outside.any()):
        label = int(labels[outside][0])
        raise ValueError(f"{op} got the label {label}, which is not from 0 to {vocabulary - 1}, and not ignore_index")
