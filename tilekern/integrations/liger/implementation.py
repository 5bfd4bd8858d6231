"""The module that Liger-Kernel loads for ``LIGER_KERNEL_IMPL=tilekern``: its names replace Liger's."""

from tilekern.integrations.liger.binding import replacements

globals().update(replacements())
__all__ = sorted(replacements())  # noqa: PLE0605 (a list of the table's names)
