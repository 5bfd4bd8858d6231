"""Find the longest sequence that trains in some memory, by whole steps at one length after another.

python -m benchmarks.longest SEARCH LINES

Each search has its own process. Peaks of memory rise by the same amount for each token, so two lengths foretell where
to look; a result is a length whose step was taken, never a foretold one. torch's allocator refuses more than the cap,
so that a large GPU stands for a smaller one.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.environment import facts
from benchmarks.results import Results, Row
from benchmarks.served import doubts
from benchmarks.sources import kernels_used, with_sources
from benchmarks.train import GIB, Process, Say, label
from benchmarks.trainers import full_name, has_our_attention, trainer_named
from benchmarks.training import CHECKPOINTS, Job, Line, Loop, begin, has_a_turn, prepare
from tilekern.errors import InputError

BENCHMARK = "longest"
# Kinds of checkpoints as the command line names them.
KINDS = ("none", *filter(None, CHECKPOINTS))
# Tokens of a step before the search, which makes the states of the optimizer.
_WARM_UP = 128
# The result is within this share of a length that does not fit.
_SHARE = 32


@dataclass(frozen=True)
class Search:
    """A search: its job without lengths, its cap of memory, and the lengths that may be tried.

    Attributes:
        job: the training; ``tokens`` and ``timed`` are not used.
        gib: what torch's allocator may take, in GiB.
        first: tokens of the first try.
        grid: lengths are multiples of this.
        most: tokens of the longest sequence that is tried.
    """

    job: Job
    gib: float
    first: int
    grid: int
    most: int

    @classmethod
    def read(cls, text: str) -> Search:
        """Parse the text of :meth:`written`."""
        found = json.loads(text)
        return cls(**{**found, "job": Job.read(json.dumps(found["job"]))})

    def written(self) -> str:
        """Return the search as text."""
        return json.dumps(asdict(self))

    @property
    def case(self) -> str:
        """The name in the results."""
        model, _, rest = label(self.job, 0).partition(" 0 tokens")
        return f"{model}{rest}, {self.gib:g} GiB"

    def following(self, tried: Mapping[int, int | None]) -> int | None:
        """Return the length to try after others; None if the longest one is found.

        Args:
            tried: peak of memory in bytes of each length that was tried; None where it did not fit.
        """
        top = self._on_grid(self.most)
        fit = sorted(length for length, peak in tried.items() if peak is not None)
        too_long = sorted(length for length, peak in tried.items() if peak is None)
        high = too_long[0] if too_long else top + self.grid
        if not tried:
            return min(self._on_grid(self.first), top)
        if not fit:
            return self._on_grid(high // 2) if high >= 2 * self.grid else None
        low = fit[-1]
        fine = max(self.grid, self._on_grid(low // _SHARE))
        if high - low <= fine:
            return None
        length = self._foretold(fit, tried)
        if not too_long:
            return self._on_grid(min(max(length, low + fine), top))
        if not low < length < high:
            # The line was a little wrong, or much.
            length = high - max(fine, high // _SHARE) if len(too_long) == 1 else (low + high) // 2
        return min(max(self._on_grid(length), low + self.grid), high - self.grid)

    def _foretold(self, fit: Sequence[int], tried: Mapping[int, int | None]) -> int:
        """Return where the line through the peaks of the two longest lengths meets the cap."""
        if len(fit) < 2:
            return 2 * fit[-1]
        (one, few), (other, many) = ((length, tried[length] or 0) for length in fit[-2:])
        each = (many - few) / (other - one)
        return other + int((self.gib * GIB - many) / each) if each > 0 else 2 * other

    def _on_grid(self, length: int) -> int:
        return max(self.grid, length - length % self.grid)


def searches_of(
    common: Search, models: Sequence[str], gib: Sequence[float], kinds: Sequence[str], providers: Sequence[str]
) -> list[Search]:
    """Return all searches; only tilekern's attention can be kept by checkpoints, so others are left out there."""
    return [
        replace(common, gib=cap, job=replace(common.job, model=model, provider=provider, checkpointing=kind))
        for model in models
        for cap in gib
        for kind in kinds
        for provider in providers
        if kind in ("", "full") or has_our_attention(provider)
    ]


def measure(searches: Sequence[Search], limit_s: float, keep: Any, say: Say) -> Results:
    """Do searches one after the other; return the longest length of each, its peak, and the shortest too long one.

    Args:
        searches: the searches.
        limit_s: seconds that one may take; what fitted until then counts, and a note says so.
        keep: called after each with the results so far.
        say: called with the current search.

    Raises:
        InputError: an unknown model, or no step was taken.
    """
    results = Results(facts() | {"models": list(dict.fromkeys(search.job.model for search in searches))})
    notes = results.run["notes"]

    for search in searches:
        say(f"{full_name(search.job.provider)}: {search.case}")
        process = _start(search, limit_s)
        try:
            process.wait_until_ready()
            trouble, lines = process.done()
        finally:
            process.end()
        results.rows.extend(rows_of(lines, search))
        notes += [f"{search.case}: {line['text']}" for line in lines if line["kind"] == "note"]
        if trouble:
            notes.append(f"{search.case}: {search.job.provider}: the search ended early: {trouble}")
        keep(results)
    if not results.rows:
        raise InputError(f"nothing was measured, and nothing is written: {'; '.join(notes)}")
    return results


def _start(search: Search, limit_s: float) -> Process:
    """Start the process of a search; no other holds memory of the GPU meanwhile."""
    command = [sys.executable, "-m", "benchmarks.longest", search.written()]
    # Segments that grow leave no holes between the tries.
    environment = {**os.environ, "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    return Process(command, environment | dict(trainer_named(search.job.provider).environment), limit_s)


def rows_of(lines: Sequence[Line], search: Search) -> list[Row]:
    """Return the rows of a search: the longest length that fitted, its peak, and the shortest that did not."""
    tried = [line for line in lines if line["kind"] == "tried"]
    longest = max((line for line in tried if line["fits"]), key=lambda line: line["tokens"], default=None)
    too_long = min((line["tokens"] for line in tried if not line["fits"]), default=None)
    values: list[tuple[str, float, str]] = [("tokens", longest["tokens"] if longest else 0, "tokens")]
    if longest and "peak_bytes" in longest:
        values.append(("peak_gib", round(longest["peak_bytes"] / GIB, 3), "GiB"))
    if too_long:
        values.append(("too_long_tokens", too_long, "tokens"))
    name = full_name(search.job.provider)
    rows = [Row(BENCHMARK, search.case, name, metric, value, unit) for metric, value, unit in values] if tried else []
    return with_sources(rows, longest.get("kernels", ()) if longest else ())


def run(search: Search) -> Iterator[Line]:
    """Try lengths until the longest is found; the first line tells of the model."""
    _cap(search)
    loop = begin(search.job)
    yield {"kind": "begun", "attention": loop.trainer.attention}
    tried: dict[int, int | None] = {}
    if not _try(loop, min(_WARM_UP, search.most))["fits"]:
        yield {"kind": "tried", "tokens": _WARM_UP, "fits": False}
        return
    held = _held(loop)
    while (length := search.following(tried)) is not None:
        line = _try(loop, length)
        tried[length] = line.get("peak_bytes", 0) if line["fits"] else None
        yield line
        if not line["fits"] and (left := _held(loop) - held) > GIB // 8:
            yield {"kind": "note", "text": f"{left / GIB:.1f} GiB of the step at {length} tokens were not freed"}
            return
    yield from ({"kind": "note", "text": text} for text in doubts())


def _cap(search: Search) -> None:
    import torch

    if search.job.device != "cuda":
        return
    total = torch.cuda.get_device_properties(0).total_memory
    if search.gib * GIB > total:
        raise InputError(f"--gib {search.gib:g}: this GPU has {total / GIB:.1f} GiB")
    torch.cuda.set_per_process_memory_fraction(search.gib * GIB / total)


def _try(loop: Loop, tokens: int) -> Line:
    """Take a step of one sequence; say whether it fits, and the peak of memory."""
    import torch

    loop.free()
    try:
        with kernels_used() as used:
            loss = float(loop.step(loop.tokens(tokens, 0)))
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "ALLOC_FAILED" not in str(error):
            raise
        return {"kind": "tried", "tokens": tokens, "fits": False}
    peak = {"peak_bytes": torch.cuda.max_memory_allocated()} if loop.device == "cuda" else {}
    return {"kind": "tried", "tokens": tokens, "fits": True, "loss": loss, "kernels": used, **peak}


def _held(loop: Loop) -> int:
    """Return the bytes of what lives between steps."""
    import torch

    loop.free()
    return torch.cuda.memory_allocated() if loop.device == "cuda" else 0


def main(text: str, lines: str) -> None:
    """Do a search when told to; append each line to a file at once, so that none is lost if the process dies."""
    search = Search.read(text)
    prepare(search.job)
    if not has_a_turn(lines):
        return
    with Path(lines).open("a", encoding="utf-8") as file:
        for line in run(search):
            file.write(json.dumps(line) + "\n")
            file.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
