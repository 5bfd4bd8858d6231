"""Runs at the end of ``import torch``, as an entry point of the group ``torch.backends``.

It must cost next to nothing where nobody asks for tilekern, so it looks at the environment and imports what is asked
for when that is used. ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` turns all such entry points off.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

# All code of models imports it, and it imports torch.
_MODELS = "transformers.modeling_utils"
_REGISTRY = "liger_kernel.ops.backends.registry"
_LIGER = ("LIGER_KERNEL_IMPL", "LIGER_KERNEL_BACKEND")


def begin() -> None:
    """Do what variables in the environment ask for, once the packages that it is about are imported.

    Liger-Kernel is offered the ops where one of its variables names ``tilekern``; ``TILEKERN_APPLY`` calls
    :func:`tilekern.apply`. Its value is checked at once, with the other variables of tilekern's: a process exits with 2
    and one line where one is wrong.
    """
    if os.environ.get("TILEKERN_APPLY", "").strip() not in ("", "0"):
        _apply_by_variable()
    if variables():
        from tilekern.awaiting import Arrivals

        # By name: liger stands above this file.
        Arrivals(_REGISTRY.__eq__, lambda _: import_module("tilekern.liger").offer()).watch()


def _apply_by_variable() -> None:
    from tilekern.errors import InputError
    from tilekern.settings import asked_for, check_settings

    try:
        check_settings()
    except InputError as error:
        # Torch would wrap any other exception in one of its own that says nothing.
        sys.stderr.write(f"tilekern: {error}\n")
        raise SystemExit(2) from None
    apply_later(**asked_for() or {})


def apply_later(**options: Any) -> None:
    """Have :func:`tilekern.apply` called with some options once transformers can make models; now where it can.

    A program that calls it before, by itself, has its own way.
    """
    from tilekern.awaiting import Arrivals, is_imported

    # By name: the patches stand above this file.
    if is_imported(_MODELS):
        import_module("tilekern.patch.patcher").apply(**options)
    else:
        Arrivals(_MODELS.__eq__, lambda _: import_module("tilekern.patch.patcher").apply_first(**options)).watch()


def variables() -> list[str]:
    """The names of Liger-Kernel's variables in the environment that ask for tilekern."""
    return [name for name, value in os.environ.items() if name.startswith(_LIGER) and value.strip() == "tilekern"]
