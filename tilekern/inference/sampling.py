"""How the next token is chosen."""

from __future__ import annotations

from dataclasses import dataclass

from tilekern.errors import InputError
from tilekern.inference.architectures import LARGEST_FLOAT32


@dataclass(frozen=True)
class Sampling:
    """How a sequence's tokens are drawn.

    Tokens are kept as by :func:`tilekern.ops.sample`: temperature, then top-k, top-p and min-p.

    Attributes:
        temperature: divides the logits; 0 takes the largest.
        top_k: keep this many of the largest logits; 0 keeps all.
        top_p: keep the most likely tokens until their probability is at least this.
        min_p: keep tokens whose probability is at least this share of the likeliest one's.
        seed: of the draws; a sequence with the same seed and tokens draws the same.

    Raises:
        InputError: a number is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, most in (("temperature", LARGEST_FLOAT32), ("top_p", 1), ("min_p", 1)):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= most:
                raise InputError(f"{name} must be a number from 0 to {most:.3g}, got {value!r:.40}")
        for name, least, bits in (("top_k", 0, 31), ("seed", -(1 << 63), 63)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value < 1 << bits:
                raise InputError(f"{name} must be a whole number from {least} to 2^{bits} - 1, got {value!r:.40}")
