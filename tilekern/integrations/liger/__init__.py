"""tilekern as an implementation in Liger-Kernel: ``apply_liger_kernel_to_*`` then runs the ops from the cache.

``LIGER_KERNEL_IMPL=tilekern`` in the environment is enough where both are installed; :func:`register` does the same in
a running process. What the ops do not serve stays Liger's: whole functions (:func:`left`) and single calls
(:func:`calls`).
"""

from __future__ import annotations

from typing import Any

from tilekern.errors import InputError
from tilekern.integrations.liger import binding
from tilekern.integrations.liger.binding import offer
from tilekern.integrations.liger.table import TABLE
from tilekern.integrations.startup import variables

__all__ = ["calls", "left", "offer", "register", "served", "unregister"]
_pins: list[Any] = []


def register() -> list[str]:
    """Have Liger-Kernel run tilekern's ops, also in models that it has patched before; again changes nothing.

    Functions that other packages have taken out of ``liger_kernel.ops`` before stay what they were.

    Returns:
        The names of Liger's functions that are tilekern's now. None where this version of Liger does not fit, of which
        a warning tells.

    Raises:
        ImportError: Liger-Kernel or what it needs is not installed.
    """
    import liger_kernel.ops  # noqa: F401 (what is asked for must be there)
    from liger_kernel.backends import get_impl, set_impl

    if not offer():
        return []
    binding.bind(ours=True)
    if get_impl() != binding.NAME:
        _pins.append(get_impl())
        set_impl(binding.NAME)
    return sorted(binding.replacements())


def unregister() -> list[str]:
    """Give Liger-Kernel its functions back; the names of those that were tilekern's.

    Raises:
        ImportError: as of :func:`register`.
        InputError: a variable of Liger's in the environment asks for tilekern, so that Liger would not find it.
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
    """Which of tilekern's ops serves which of Liger's functions, whether they are registered or not."""
    return {name: row.op for name, row in sorted(TABLE.items())}


def left() -> list[str]:
    """Return the names of the functions of the installed Liger that tilekern does not serve."""
    return [name for name in binding.all_functions() if name not in binding.replacements()]


def calls() -> dict[str, dict[str, Any]]:
    """Of each function that was called: how often an op ran (``served``), and Liger's own, by the reason (``left``)."""
    names = sorted({*binding.calls, *(name for name, reasons in binding.kept.items() if reasons)})
    return {name: {"served": binding.calls[name], "left": dict(binding.kept.get(name, {}))} for name in names}
