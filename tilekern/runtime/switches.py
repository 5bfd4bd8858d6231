"""The names of the ops that ``tilekern.apply`` patches, and texts that choose among them; imports nothing heavy."""

from __future__ import annotations

from typing import Any

from tilekern.errors import InputError, did_you_mean

# The ops of models' code, in the order in which they are applied.
OF_MODELS = (
    "rms_norm", "layer_norm", "swiglu", "mlp", "qk_norm_rope", "rope", "fused_add_rms_norm",
    "fused_linear_cross_entropy",
)  # fmt: skip
# The op of PEFT's layers, which are of no family.
LORA = "lora"
# The ops that are on by default.
OPS = (*OF_MODELS, LORA)
# The op that a model's configuration selects: its attention.
ATTENTION = "attention"
# The op that runs only if requested: layers of experts, with their routers.
EXPERTS = "experts"
# The optimizer, which replaces torch's.
ADAMW = "adamw"
# CUDA graphs of training steps.
GRAPHS = "graphs"
# Linear layers, and chosen experts, whose products are of 8-bit floats.
FP8 = "fp8"
# Their formats: a scale for each row of a matrix, for each 128 numbers of it, or for each 32.
ROWWISE, BLOCKWISE, MXFP8 = FP8_FORMATS = ("rowwise", "blockwise", "mxfp8")
# The name by which a model's configuration selects tilekern's code, and the attentions by name: whether gradients have
# the same bits in every run.
IMPLEMENTATION = "tilekern"
ATTENTIONS = {IMPLEMENTATION: True, "tilekern_nondeterministic": False}
# Ops that are off by default.
EXTRAS = (EXPERTS, ATTENTION, ADAMW, GRAPHS, FP8)
# The families to patch: those with tests in tilekern, or all whose code has a known form.
FORMS = ("tested", "any")
_ALL = "1"


def switches_of(text: str) -> dict[str, bool]:
    """Return the arguments of ``tilekern.apply`` that a text requests.

    Args:
        text: words separated by commas. ``1`` is all of :data:`OPS`; names of :data:`EXTRAS` after it are on too, and
            ``-OP`` leaves an op out. Names without ``1`` select only those ops; ``-OP`` without it selects all others.

    Raises:
        InputError: a word is unknown or empty, is named and left out, or names are mixed with ``-OP`` without ``1``.
    """
    words = [word.strip() for word in text.split(",")]
    names = [word.removeprefix("-") for word in words if word != _ALL]
    for name in names:
        if name not in (*OPS, *EXTRAS):
            known = (*OPS, *EXTRAS)
            raise InputError(
                f"{name!r} is not an op; give 1 for all ops, some of {', '.join(known)}, 1,OP for all and one that is "
                f"off by default, or -OP for all but one{did_you_mean(name, known)}"
            )
    left_out = {word[1:] for word in words if word.startswith("-")}
    asked = {word for word in words if word != _ALL and not word.startswith("-")}
    if both := sorted(left_out & asked):
        raise InputError(f"{text!r} both names {both[0]} and leaves it out; keep one of the two")
    if left_out and asked and _ALL not in words:
        raise InputError(
            f"{text!r} names ops and leaves out others; give the names alone, 1 before them for all ops, or -OP for all"
            " but one"
        )
    if _ALL in words or left_out:
        return dict.fromkeys(left_out, False) | dict.fromkeys(asked.intersection(EXTRAS), True)
    return {op: op in asked for op in (*OPS, *EXTRAS)}


def format_of(fp8: Any, asker: str) -> str:
    """Return the format that a value of ``fp8`` asks for; empty for none.

    Args:
        fp8: False or None; True for the first format; or a format's name.
        asker: the function that was given it, for the error.

    Raises:
        InputError: it is another value.
    """
    if not isinstance(fp8, bool) and fp8 not in (None, "", *FP8_FORMATS):
        names = ", ".join(map(repr, FP8_FORMATS))
        raise InputError(f"{asker}: fp8 must be {names}, True for {ROWWISE!r}, or False, got {fp8!r:.40}")
    return ROWWISE if fp8 is True else fp8 or ""


def text_of(switches: dict[str, bool]) -> str:
    """Return the text that requests some switches; ops that are not named have ``apply``'s defaults."""
    left_out = [f"-{op}" for op in OPS if not switches.get(op, True)]
    asked = [op for op in EXTRAS if switches.get(op)]
    return ",".join([*([] if left_out and not asked else [_ALL]), *left_out, *asked])


def fp8_format(word: str, follows: str) -> str:
    """Return the format that the word behind ``--fp8`` on a command line names.

    Args:
        word: the word; of an option whose word may be left out, it may be the next argument by mistake.
        follows: what that argument is.

    Raises:
        InputError: it names no format.
    """
    if word not in FP8_FORMATS:
        raise InputError(
            f"--fp8 {word!r:.60}: unknown format; known: {', '.join(FP8_FORMATS)}; write --fp8 {ROWWISE} before "
            f"{follows}"
        )
    return word
