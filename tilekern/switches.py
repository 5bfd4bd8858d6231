"""The ops that ``tilekern.apply`` patches, by name, and how a text chooses among them; nothing heavy is imported."""

from __future__ import annotations

from tilekern.errors import InputError

# In the order in which they are applied.
OPS = (
    "rms_norm", "layer_norm", "swiglu", "mlp", "qk_norm_rope", "rope", "fused_add_rms_norm",
    "fused_linear_cross_entropy",
)  # fmt: skip
# The op that a model's configuration chooses: its attention.
ATTENTION = "attention"
# The op that runs only where it is asked for: layers of experts, with their routers.
EXPERTS = "experts"
# Which families: those whose tests pass here, or all whose code has a form that is known.
FORMS = ("tested", "any")


def switches_of(text: str) -> dict[str, bool]:
    """The arguments of ``tilekern.apply`` that a text asks for.

    Args:
        text: ``1`` for all ops; names with commas between for those alone; names that begin with ``-`` for all others.

    Raises:
        InputError: it has another form, or names an unknown op.
    """
    words = [word.strip() for word in text.split(",")]
    if words == ["1"]:
        return {}
    names = [word.removeprefix("-") for word in words]
    for name in names:
        if name not in OPS:
            raise InputError(
                f"{name!r} is not an op; give 1 for all ops, or some of {', '.join(OPS)}, or -OP for all but"
            )
    left_out = sum(word.startswith("-") for word in words)
    if left_out == len(words):
        return dict.fromkeys(names, False)
    if left_out:
        raise InputError(f"{text!r} names ops and leaves out others; give the names alone, or -OP for all but")
    return {op: op in names for op in OPS}


def text_of(switches: dict[str, bool]) -> str:
    """The text that asks for some switches, of which those that are left out are on."""
    return ",".join(f"-{op}" for op in OPS if not switches.get(op, True)) or "1"
