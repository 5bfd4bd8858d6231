"""Runs at the end of ``import torch``, as an entry point of the group ``torch.backends``.

It must cost next to nothing where nobody asks for tilekern, so it looks at the environment and imports what is asked
for when that is used. ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` turns all such entry points off.
"""

from __future__ import annotations

import os
from importlib import import_module

_REGISTRY = "liger_kernel.ops.backends.registry"
_LIGER = ("LIGER_KERNEL_IMPL", "LIGER_KERNEL_BACKEND")


def begin() -> None:
    """Offer the ops to Liger-Kernel once it is imported, where one of its variables names ``tilekern``."""
    if variables():
        from tilekern.awaiting import Arrivals

        # By name: liger stands above this file.
        Arrivals(_REGISTRY.__eq__, lambda _: import_module("tilekern.liger").offer()).watch()


def variables() -> list[str]:
    """The names of Liger-Kernel's variables in the environment that ask for tilekern."""
    return [name for name, value in os.environ.items() if name.startswith(_LIGER) and value.strip() == "tilekern"]
