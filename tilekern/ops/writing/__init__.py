"""Write the code of an op's functions from its declaration.

``python -m tilekern.ops.writing`` writes the code of tilekern's own ops to ``tilekern/ops/_generated/``; processes that
use them do not need this package.

The functions share a tuple of plans: the forward's, the backward's or None, the sum's if the op has one, and then other
facts that depend only on the kind of a call, so that they are computed once.
"""

from __future__ import annotations

from tilekern.ops.declaration import Declaration, names_of
from tilekern.ops.writing import functions, launches, plans

_WRITERS = {
    "check": plans.check, "find": plans.find, "plans_of": plans.plans_of, "launch": launches.launch,
    "launch_backward": launches.launch_backward, "fallback": functions.fallback,
    "fallback_backward": functions.fallback_backward, "autograd": functions.autograd, "refuse": functions.refuse,
    "public": functions.public, "fake": functions.fake, "fake_backward": functions.fake_backward, "run": functions.run,
    "run_backward": functions.run_backward, "save": functions.save, "derive": functions.derive,
}  # fmt: skip
_OF_GRADIENTS = {
    "launch_backward", "fallback_backward", "autograd", "fake_backward", "run_backward", "save", "derive"
}  # fmt: skip
# Names of variables and functions in the text; no tensor or scalar may use them.
RESERVED = {
    *_WRITERS, "absent", "otherwise", "rest", "apply", "registered", "registered_backward", "plans", "needs", "graded",
    "key", "sizes", "forward_plan", "backward_plan", "sum_plan", "summed", "device", "index", "flat", "see", "rows",
    "ctx", "inputs", "output", "error",
}  # fmt: skip


def text_of(op: Declaration) -> str:
    """Return the text of all functions of an op that its declaration does not bring.

    Raises:
        TypeError: the name of a tensor or scalar has another meaning in the text.
    """
    names = {*op.arguments, *op.results, *op.made, *(array.name for spec in op.specs for array in spec.arrays)}
    if clash := sorted(names & {*names_of(op), *RESERVED}):
        raise TypeError(f"{op.name}: {clash[0]} has another meaning in an op's text; call it something else")
    left_out = {*op.overrides, *([] if op.no_gradient else ["refuse"])}
    if not op.is_differentiable:
        left_out |= _OF_GRADIENTS
    own = [write(op) for name, write in _WRITERS.items() if name not in left_out]
    return "\n\n".join(own)


def module_of(op: Declaration) -> str:
    """Return the text of an op's file."""
    head = (
        f'"""{op.name}, made from its declaration by ``python -m tilekern.ops.writing``; change that and not this."""'
    )
    return f"{head}\n\n\n{text_of(op)}"
