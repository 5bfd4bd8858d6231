"""How the next token is chosen, and the launches that choose it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from tilekern.arrays import Array
from tilekern.errors import InputError
from tilekern.inference.architectures import LARGEST_FLOAT32
from tilekern.inference.launches import Launches
from tilekern.kernels.families.overlap import is_few
from tilekern.kernels.greedy import stretches_of
from tilekern.runtime.driver import Fetched

# By dtypes: the codes of the standard library's arrays.
_CODES = {"float32": "f", "int32": "i", "int64": "q"}
# The int64 ids in the 4096 bytes that the driver's binding fetches at once.
_FETCHED_IDS = 512


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


def numbers(values: Sequence[float], dtype: str) -> bytes:
    """Return numbers as the bytes of ``float32``, ``int32`` or ``int64``."""
    return array(_CODES[dtype], values).tobytes()


class Choice:
    """The launches that write each sequence's next token.

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

    def fetch(self) -> list[Fetched]:
        """Queue copies of the ids to the host, in pieces of what is fetched at once."""
        batch = self.ids.shape[0]
        return [
            self.ids.view((min(batch - first, _FETCHED_IDS),), offset=first).fetch()
            for first in range(0, batch, _FETCHED_IDS)
        ]

    def add(self, launches: Launches, logits: Array, positions: Array, *, greedy: bool) -> None:
        """Add the launch, or two for the likeliest tokens of few rows.

        Args:
            logits: [batch, vocabulary].
            positions: int64 [batch], those of the tokens to choose.
            greedy: whether all sequences take the largest logit.
        """
        rows, vocabulary = logits.shape
        sizes = {"rows": rows, "vocabulary": vocabulary, "dtype": logits.dtype}
        if greedy and is_few(rows):
            # One block a row takes tens of microseconds, and leaves the GPU empty.
            stretches = stretches_of(vocabulary)
            parts = launches.array((rows, stretches), "int64")
            launches.launch("greedy_parts", sizes, logits=logits, parts=parts)
            launches.launch("greedy_join", {"rows": rows, "stretches": stretches}, parts=parts, ids=self.ids)
        elif greedy:
            launches.launch("greedy", sizes, logits=logits, ids=self.ids)
        else:
            launches.launch("sample", sizes, logits=logits, positions=positions, ids=self.ids, **self._numbers)
