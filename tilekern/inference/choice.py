"""The launches that choose the next token."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from tilekern.arrays import Array
from tilekern.inference.launches import Launches
from tilekern.inference.sampling import Sampling
from tilekern.kernels.families.overlap import is_few
from tilekern.kernels.greedy import stretches_of
from tilekern.runtime.driver import Fetched

# By dtypes: the codes of the standard library's arrays.
_CODES = {"float32": "f", "int32": "i", "int64": "q"}
# The int64 ids in the 4096 bytes that the driver's binding fetches at once.
_FETCHED_IDS = 512


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
