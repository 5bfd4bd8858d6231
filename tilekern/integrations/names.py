"""``attn_implementation="tilekern"`` and ``experts_implementation="tilekern"``, available after ``import tilekern``.

The functions here import the real ones when they are first called; :func:`tilekern.apply` registers the real ones.
"""

from __future__ import annotations

import contextlib
from typing import Any

from tilekern.runtime.awaiting import Arrivals, is_imported

_MODELS = "transformers.modeling_utils"


def register_later() -> None:
    """Register the names once transformers can make models; older releases cannot make models with these names."""
    if is_imported(_MODELS):
        _register()
    else:
        Arrivals(_MODELS.__eq__, _register).watch()


def _register(_: str = _MODELS) -> None:
    from tilekern.runtime.implementation import register, register_experts

    with contextlib.suppress(ImportError):
        register(_attend, _mask)
    register_experts(_experts)


# torch.compile can trace import statements.
def _attend(deterministic: bool, *args: Any, **kwargs: Any) -> Any:
    from tilekern.patch.attention import attend

    return attend(deterministic, *args, **kwargs)


def _mask(**kwargs: Any) -> Any:
    from tilekern.patch.masking import mask

    return mask(**kwargs)


def _experts(*args: Any, **kwargs: Any) -> Any:
    from tilekern.patch.experts import run_experts

    return run_experts(*args, **kwargs)
