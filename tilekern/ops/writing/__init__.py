"""The text of an op's functions, as a person would write them for this op alone.

The plans that they hand to each other are a tuple: the forward's, the backward's or None, the sum's where the op has
one, and behind them what else depends on the kind of a call alone, so that no call works it out again.
"""

from __future__ import annotations

from tilekern.ops.declaration import Declaration
from tilekern.ops.writing import functions, launches, plans
from tilekern.ops.writing.functions import title as title

_WRITERS = {
    "check": plans.check, "find": plans.find, "plans_of": plans.plans_of, "launch": launches.launch,
    "launch_backward": launches.launch_backward, "fallback": functions.fallback,
    "fallback_backward": functions.fallback_backward, "autograd": functions.autograd, "public": functions.public,
    "fake": functions.fake, "fake_backward": functions.fake_backward, "run": functions.run,
    "run_backward": functions.run_backward, "save": functions.save, "derive": functions.derive,
}  # fmt: skip
# Names of variables and functions in the text, which no tensor and no scalar may have.
RESERVED = {
    *_WRITERS, "absent", "otherwise", "rest", "apply", "registered", "registered_backward", "plans", "needs", "graded",
    "key", "sizes", "forward_plan", "backward_plan", "sum_plan", "summed", "device", "index", "flat", "see", "rows",
    "ctx", "inputs", "output", "error",
}  # fmt: skip


def text_of(op: Declaration) -> str:
    """The text of all functions of an op but those that its declaration brings."""
    own = [write(op) for name, write in _WRITERS.items() if name not in op.parts.named()]
    return "\n\n".join(own)
