"""Run at the end of ``import torch``, called by the entry point (``tilekern_startup.py``).

It must cost next to nothing if nobody uses tilekern. So it only reads the environment, and imports the requested
modules when they are used. ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` turns all such entry points off.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

# All model code imports this module, and the module imports torch.
_MODELS = "transformers.modeling_utils"
_REGISTRY = "liger_kernel.ops.backends.registry"
_LIGER = ("LIGER_KERNEL_IMPL", "LIGER_KERNEL_BACKEND")


def begin() -> None:
    """Handle tilekern's environment variables once the packages that they concern are imported.

    If one of Liger-Kernel's variables names ``tilekern``, the ops are offered to Liger. ``TILEKERN_APPLY`` calls
    :func:`tilekern.apply`. A variable of tilekern's with a wrong value causes a warning, since torch may be imported
    for other purposes; a process that then imports transformers' model code exits with code 2 and one line. If tilekern
    cannot be loaded (a broken dependency, for example), this causes a warning and models run their own ops.
    """
    if os.environ.get("TILEKERN_APPLY", "").strip() not in ("", "0"):
        _apply_by_variable()
    if variables():
        from tilekern.runtime.awaiting import Arrivals

        # Imported by name: liger is above this file in the import order.
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
    """Call the function that a variable asks for; its module is named, since it is above this file in import order."""
    try:
        called = getattr(import_module(module), function)
    except Exception as error:  # noqa: BLE001 (a broken dependency may raise any error, which must not end the program)
        from tilekern.warning import warn

        why = f"{type(error).__name__}: {error}"
        warn(f"{variable} asks for tilekern, which cannot be loaded ({why}); models run their own ops")
    else:
        called(**options)


def apply_later(**options: Any) -> None:
    """Call :func:`tilekern.apply` with some options once transformers can make models, or now if it can.

    If the program calls ``apply`` itself before that, its choice wins.
    """
    from tilekern.runtime.awaiting import Arrivals, is_imported

    # Imported by name: the patches are above this file in the import order.
    if is_imported(_MODELS):
        import_module("tilekern.patch.patcher").apply(**options)
    else:
        Arrivals(_MODELS.__eq__, lambda _: import_module("tilekern.patch.patcher").apply_first(**options)).watch()


def variables() -> list[str]:
    """Return the names of Liger-Kernel's variables in the environment that ask for tilekern."""
    return [name for name, value in os.environ.items() if name.startswith(_LIGER) and value.strip() == "tilekern"]
