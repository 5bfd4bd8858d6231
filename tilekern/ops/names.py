"""What the code of declared ops refers to by name."""

from __future__ import annotations

from typing import Any

import torch

from tilekern.errors import NoVariant
from tilekern.kernels import column_sum
from tilekern.kernels.families.placeholders import placeholder
from tilekern.ops import registration
from tilekern.ops.declaration import Declaration
from tilekern.ops.dtensors import by_shards, is_dtensor
from tilekern.runtime import dispatch


def names_of(op: Declaration) -> dict[str, Any]:
    """The names that an op's code refers to, with a memo of its own."""
    # `__op__` tells a trace of a step whose frame it sees.
    names: dict[str, Any] = {
        "__op__": op.name,
        "torch": torch, "FORWARD": op.forward, "BACKWARD": op.backward, "SUM": column_sum.SPEC, "formula": op.formula,
        "known": dispatch.memo(), "keep": dispatch.keep, "plan_for": dispatch.plan_for,
        "count_fallback": dispatch.count_fallback, "refused": dispatch.refused, "NoVariant": NoVariant,
        "empty": torch.empty, "empty_like": torch.empty_like,
        "float32": torch.float32, "is_compiling": torch.compiler.is_dynamo_compiling,
        "is_grad_enabled": torch.is_grad_enabled, "modes": registration.modes,
        "transforms": registration.transforms, "Tensor": torch.Tensor, "by_shards": by_shards,
        "is_dtensor": is_dtensor,
    }  # fmt: skip
    for helper in (
        registration.Rows, registration.as_rows, registration.by_autograd, registration.check_tensors,
        registration.constant_row, registration.differentiable_once, registration.fresh, registration.other,
        placeholder, registration.promoted, registration.readable, registration.uncast,
        registration.viewed,
    ):  # fmt: skip
        names[helper.__name__] = helper
    return names | op.parts.named()
