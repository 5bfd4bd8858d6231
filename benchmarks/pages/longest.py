"""Write the page on the longest sequences that train on one GPU, by models and kinds of checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.longest import BENCHMARK
from benchmarks.pages.markdown import by_gpu, head, link, table
from benchmarks.results import Results, Row
from benchmarks.sources import described
from benchmarks.training import CHECKPOINTS

NAME = "long-sequences.md"
_NONE = "No run is recorded yet: `python -m benchmarks longest` on a GPU.\n"
_TEXT = """
The tokens of the longest sequence with which one GPU trains a whole model: forward, backward and a step of AdamW, all
in bfloat16, with random weights and tokens. `python -m benchmarks longest` measures it, and
[long sequences](../long-sequences.md) tells what to switch on. The memory is what torch's allocator may take: 78 GiB
stand for an H100, 139 GiB for an H200. In brackets is the shortest length that was tried and did not fit; without it no
longer one was tried.
"""
_KINDS = {kind: words or "no checkpoints" for kind, words in CHECKPOINTS.items()}


def page(everything: Sequence[Results]) -> dict[str, str]:
    """Return the page, by its file name."""
    parts = [head("How long a sequence fits?", _TEXT)]
    gpus = {gpu: [run for run in runs if run.benchmark == BENCHMARK] for gpu, runs in by_gpu(everything).items()}
    for gpu, runs in gpus.items():
        if runs:
            parts += [f"## {gpu}\n", _table(runs)]
    return {NAME: "\n".join(parts if any(gpus.values()) else [*parts, _NONE])}


def _table(runs: Sequence[Results]) -> str:
    lines = []
    for run in runs:
        names = dict.fromkeys(
            (_model(case), row.provider) for case in run.cases() for row in run.figures(case, "tokens")
        )
        for (model, gib), provider in names:
            cases = [_case(model, words, gib) for words in CHECKPOINTS.values()]
            cells = [_cell(run, case, provider) for case in cases]
            first = next(case for case in cases if run.row(case, provider, "tokens"))
            lines.append((model, gib, provider, *cells, described(run, first), link(run)))
    return table(("model", "memory", "trainer", *_KINDS.values(), "source", "data"), lines)


def _case(model: str, words: str, gib: str) -> str:
    return ", ".join(filter(None, (model, words, gib)))


def _model(case: str) -> tuple[str, str]:
    """Return a case without its kind of checkpoints: the model, and the cap of memory."""
    model, _, gib = case.rpartition(", ")
    words = max(
        (words for words in CHECKPOINTS.values() if words and model.endswith(f", {words}")), key=len, default=""
    )
    return model.removesuffix(f", {words}"), gib


def _cell(run: Results, case: str, provider: str) -> str:
    """Return the longest length, and the shortest too long one."""
    row, longer = (run.row(case, provider, metric) for metric in ("tokens", "too_long_tokens"))
    if row is None:
        return "-"
    return _tokens(row) + (f" ({_tokens(longer)})" if longer else "")


def _tokens(row: Row) -> str:
    return f"{round(row.value):,}"
