"""How the next token is chosen, and the launch that chooses it."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from tilekern.arrays import Array
from tilekern.errors import InputError
from tilekern.inference.tape import Launches

# By dtypes: the codes of the standard library's arrays.
_CODES = {"float32": "f", "int32": "i", "int64": "q"}


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
        if not 0 <= self.temperature < math.inf:
            raise InputError(f"temperature must be 0 or a positive number, got {self.temperature}")
        if not 0 <= self.top_k < 1 << 31:
            raise InputError(f"top_k must be a whole number from 0 on, got {self.top_k}")
        for name in ("top_p", "min_p"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"{name} must be from 0 to 1, got {getattr(self, name)}")
        if not -(1 << 63) <= self.seed < 1 << 63:
            raise InputError(f"seed must be a whole number of 64 bits, got {self.seed}")


def numbers(values: Sequence[float], dtype: str) -> bytes:
    """Return numbers as the bytes of ``float32``, ``int32`` or ``int64``."""
    return array(_CODES[dtype], values).tobytes()


class Choice:
    """The launch that writes each sequence's next token.

    Attributes:
        ids: int64 [batch], where it writes.
    """

    def __init__(self, batch: int, launches: Launches) -> None:
        self.ids = launches.array((batch,), "int64")
        self._numbers = {
            name: launches.array((batch,), dtype)
            for name, dtype in (
                ("temperature", "float32"), ("top_k", "int32"), ("top_p", "float32"), ("min_p", "float32"),
                ("seed", "int64"),
            )
        }  # fmt: skip

    def write(self, ways: Sequence[Sampling]) -> None:
        """Copy how each sequence's tokens are drawn to the GPU."""
        for name, to in self._numbers.items():
            to.write(numbers([getattr(way, name) for way in ways], to.dtype))

    def add(self, launches: Launches, logits: Array, positions: Array, *, greedy: bool) -> None:
        """Add the launch.

        Args:
            logits: [batch, vocabulary].
            positions: int64 [batch], those of the tokens to choose.
            greedy: whether all sequences take the largest logit.
        """
        rows, vocabulary = logits.shape
        sizes = {"rows": rows, "vocabulary": vocabulary, "dtype": logits.dtype}
        if greedy:
            launches.launch("greedy", sizes, logits=logits, ids=self.ids)
        else:
            launches.launch("sample", sizes, logits=logits, positions=positions, ids=self.ids, **self._numbers)
