"""MXFP8: e4m3 numbers with a scale of e8m0 for each 32 of a row (Rouhani et al. 2023, arXiv:2310.10537).

Tensor cores of sm_100 and newer multiply them as they are: a scale is the exponent of a power of two, which the product
adds. A scale here is the least that keeps its numbers inside 448, as in :mod:`tilekern.kernels.fp8.scales`; the
standard's example takes the exponent of the largest, and cuts off numbers above 1.75 times their power of two.

Scales lie as the tensor core reads them, and as ``torch._scaled_mm`` takes them: those of 128 rows by 128 columns are
512 bytes, [32, 16], where row ``32 * n + m`` has its four at ``[m, 4 * n : 4 * n + 4]``. They are stored as int8, the
bits of e8m0. Blocks at the edges of a matrix have fewer numbers; their other scales are the least.
"""

from __future__ import annotations

from typing import Any

from tilekern.errors import InputError
from tilekern.kernels.fp8.block_scales import SIDE, padded
from tilekern.kernels.fp8.scales import scaled_rows
from tilekern.spec import Constraint, cdiv
from tilekern.spec.targets import INTERPRETED, Target

GROUP = 32
# The scales of a row in a block of 128 columns, and the sides of a block of scales.
EACH = SIDE // GROUP
SCALES = (GROUP, SIDE * EACH // GROUP)
# The place of a float's exponent.
EXPONENT = 23
HAS_MX = Constraint(
    "MXFP8 needs a GPU of sm_100 or newer",
    lambda problem, config, target: target.is_blackwell or target == INTERPRETED,
)


def check_target(target: Target) -> None:
    """Refuse a GPU whose tensor cores take no scales.

    Raises:
        InputError: it is older than sm_100.
    """
    if not target.is_blackwell and target != INTERPRETED:
        raise InputError(f"{HAS_MX.reason}; {target.name} is {target.arch}")


def mx_rows(x: Any) -> tuple[Any, Any]:
    """Compute e4m3 numbers [rows, columns] and scales [rows / 128, columns / 128, 32, 16] by torch's operations.

    Args:
        x: [rows, columns], of a float dtype.
    """
    import torch

    rows, columns = x.shape
    down, across = cdiv(rows, SIDE), cdiv(columns, SIDE)
    blocks = padded(x, SIDE * down, SIDE * across)
    numbers, scale = scaled_rows(blocks.view(-1, GROUP))
    exponents = (scale.contiguous().view(torch.int32) >> EXPONENT).to(torch.uint8).view(torch.int8)
    placed = exponents.view(down, EACH, GROUP, across, EACH).permute(0, 3, 2, 1, 4)
    return numbers.view(blocks.shape)[:rows, :columns].contiguous(), placed.reshape(down, across, *SCALES)


def wide_mx(numbers: Any, scale: Any, dtype: Any) -> Any:
    """Return the matrix of the numbers and scales of :func:`mx_rows`, in a dtype."""
    import torch

    (rows, columns), (down, across) = numbers.shape, scale.shape[:2]
    placed = scale.view(down, across, GROUP, EACH, EACH).permute(0, 3, 2, 1, 4)
    factors = placed.reshape(SIDE * down, EACH * across).view(torch.float8_e8m0fnu).to(torch.float32).to(dtype)
    return numbers.to(dtype) * factors.repeat_interleave(GROUP, 1)[:rows, :columns]
