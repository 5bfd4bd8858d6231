"""Runs at the end of ``import torch``, called by the entry point (``tilekern_startup.py``).

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
    :func:`tilekern.apply`. A wrong value of a variable of tilekern's is a warning, as torch is imported for other
    things, too; a process that imports transformers' code of models ends there, with 2 and one line. Where tilekern
    cannot be loaded for what a variable asks, a broken dependency for example, that is a warning and models run their
    own ops.
    """
    if os.environ.get("TILEKERN_APPLY", "").strip() not in ("", "0"):
        _apply_by_variable()
    if variables():
        from tilekern.runtime.awaiting import Arrivals

        # By name: liger stands above this file.
        Arrivals(_REGISTRY.__eq__, lambda _: _call("tilekern.integrations.liger", "offer", variables()[0])).watch()


def _apply_by_variable() -> None:
    from tilekern.errors import InputError
    from tilekern.runtime.awaiting import Arrivals
    from tilekern.runtime.settings import APPLY, asked_for, check_settings

    try:
        check_settings()
        switches = asked_for() or {}
    except InputError as error:
        from tilekern.warning import warn

        message = str(error)
        Arrivals(_MODELS.__eq__, lambda _: _end(message)).watch()
        warn(f"{message}; this process ends where transformers makes models")
        return
    Arrivals(_MODELS.__eq__, lambda _: _call("tilekern.patch.patcher", "apply_first", APPLY, **switches)).watch()


def _end(message: str) -> None:
    sys.stderr.write(f"tilekern: {message}\n")
    raise SystemExit(2)


def _call(module: str, function: str, variable: str, **options: Any) -> None:
    """Call what a variable asks for, of a module that is named as it stands above this file."""
    try:
        called = getattr(import_module(module), function)
    except Exception as error:  # noqa: BLE001 (a broken dependency may raise anything, and must not end the program)
        from tilekern.warning import warn

        why = f"{type(error).__name__}: {error}"
        warn(f"{variable} asks for tilekern, which cannot be loaded ({why}); models run their own ops")
    else:
        called(**options)


def apply_later(**options: Any) -> None:
    """Have :func:`tilekern.apply` called with some options once transformers can make models; now where it can.

    A program that calls it before, by itself, has its own way.
    """
    from tilekern.runtime.awaiting import Arrivals, is_imported

    # By name: the patches stand above this file.
    if is_imported(_MODELS):
        import_module("tilekern.patch.patcher").apply(**options)
    else:
        Arrivals(_MODELS.__eq__, lambda _: import_module("tilekern.patch.patcher").apply_first(**options)).watch()


def variables() -> list[str]:
    """Return the names of Liger-Kernel's variables in the environment that ask for tilekern."""
    return [name for name, value in os.environ.items() if name.startswith(_LIGER) and value.strip() == "tilekern"]
