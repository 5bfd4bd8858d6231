"""The mode in which a row depends on itself alone: it has the same bits among 1, 64 or 8192 rows.

Kernels of one bit class run then, which ``python -m tilekern.tune --invariant`` finds and records name. A kernel whose
record names none runs as before; that is said once, and :func:`tilekern.report` lists it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tilekern.runtime import dispatch
from tilekern.warning import warn_once


@contextlib.contextmanager
def invariant() -> Iterator[None]:
    """Run kernels of one bit class inside.

    Each mode keeps its plans, so that entering again looks nothing up. The mode is the whole process's: enter it while
    no other thread calls an op. Code that ``torch.compile`` has traced keeps the mode of its trace, as CUDA graphs do
    that are not :func:`tilekern.graphed`'s.
    """
    before = dispatch.set_invariant(on=True)
    try:
        yield
    finally:
        dispatch.set_invariant(on=before)
        for kernel, reason in dispatch.varying().items():
            warn_once(f"invariant: rows of {kernel} may depend on others: {reason}", about=f"varying {kernel}")
