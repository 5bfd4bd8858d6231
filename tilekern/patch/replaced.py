"""Say once in training which patches no longer run, as something else has replaced them.

A trainer may switch on another library's kernels after tilekern has patched a family, as Liger's. Their code then runs
in place of ours, which is never called and could say nothing. What they put into the class of a model that is patched
by itself does not run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from tilekern.patch.ledger import Touch
from tilekern.warning import warn

# What returns the patches to look at when a step ends, if any are to be looked at.
_pending: list[Callable[[], Iterable[Touch]]] = []


def look_at_step(touches: Callable[[], Iterable[Touch]]) -> None:
    """Warn at the end of the next step of any of torch's optimizers if other code replaced a patch or is hidden by one.

    Args:
        touches: called then; returns the patches. A later call takes the place of this one.
    """
    _pending[:] = [touches]
    _hook()


@functools.cache
def _hook() -> None:
    # It stays: a hook that is removed while it runs ends the step if another one follows.
    register_optimizer_step_post_hook(_look)


def _look(*_: Any) -> None:
    if not _pending:
        return
    touches = list(_pending.pop()())
    hidden = {f"{touch.where} (now {_named(there)})" for touch in touches if (there := touch.hidden)}
    if hidden:
        warn(
            f"put into a class by something else after tilekern had patched a model: {', '.join(sorted(hidden))}; the "
            "model does not run it; call tilekern.apply_to_model after it"
        )
    found = {f"{touch.where} (now {_named(there)})" for touch in touches if (there := touch.in_its_place)}
    if found:
        warn(
            f"replaced by something else after tilekern had patched it: {', '.join(sorted(found))}; switch off the "
            "option for other kernels, of the trainer for example, to run tilekern's"
        )


def _named(value: Any) -> str:
    return f"{getattr(value, '__module__', '?')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
