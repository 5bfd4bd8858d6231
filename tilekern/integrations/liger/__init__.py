"""tilekern as an implementation in Liger-Kernel: ``apply_liger_kernel_to_*`` then runs the ops from the cache.

If both are installed, ``LIGER_KERNEL_IMPL=tilekern`` in the environment is enough; :func:`register` does the same in a
running process. Liger's code still runs for functions (:func:`left`) and single calls (:func:`calls`) that the ops do
not serve.
"""

from __future__ import annotations

from typing import Any

from tilekern.errors import InputError, needing
from tilekern.integrations.startup import variables

with needing(__name__):
    from tilekern.integrations.liger import binding
    from tilekern.integrations.liger.binding import offer
    from tilekern.integrations.liger.table import TABLE

__all__ = ["calls", "left", "offer", "register", "served", "unregister"]
_pins: list[Any] = []


def register() -> list[str]:
    """Make Liger-Kernel run tilekern's ops, also in models that it has patched before; repeated calls change nothing.

    Functions that other packages have imported from ``liger_kernel.ops`` before stay as they were.

    Returns:
        The names of Liger's functions that tilekern now serves. Empty, with a warning, if this version of Liger does
        not fit.

    Raises:
        ImportError: Liger-Kernel or one of its dependencies is not installed.
    """
    import liger_kernel.ops  # noqa: F401 (raises if Liger-Kernel is missing)
    from liger_kernel.backends import get_impl, set_impl

    if not offer():
        return []
    binding.bind(ours=True)
    if get_impl() != binding.NAME:
        _pins.append(get_impl())
        set_impl(binding.NAME)
    return sorted(binding.replacements())


def unregister() -> list[str]:
    """Restore Liger-Kernel's functions; return the names of those that tilekern served.

    Raises:
        ImportError: as in :func:`register`.
        InputError: an environment variable of Liger's asks for tilekern, which Liger would then not find.
    """
    import liger_kernel.ops  # noqa: F401
    from liger_kernel.backends import get_impl, set_impl

    if asking := variables():
        raise InputError(f"{', '.join(asking)} asks for tilekern; remove it from the environment before unregister()")
    bound = sorted(binding.replacements()) if binding.is_bound() else []
    binding.bind(ours=False)
    if get_impl() == binding.NAME:
        set_impl(_pins.pop() if _pins else None)
    binding.withdraw()
    return bound


def served() -> dict[str, str]:
    """Return the op that serves each of Liger's functions, whether registered or not."""
    return {name: row.op for name, row in sorted(TABLE.items())}


def left() -> list[str]:
    """Return the names of the functions of the installed Liger that tilekern does not serve."""
    return [name for name in binding.all_functions() if name not in binding.replacements()]


def calls() -> dict[str, dict[str, Any]]:
    """Return for each called function how often an op ran (``served``) and how often Liger's, by reason (``left``)."""
    names = sorted({*binding.calls, *(name for name, reasons in binding.kept.items() if reasons)})
    return {name: {"served": binding.calls[name], "left": dict(binding.kept.get(name, {}))} for name in names}
