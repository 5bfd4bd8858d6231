"""Write the page for users who generate: tokens and prompts of whole models, ops of a token, and the mode's price."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.decode_ops import BENCHMARK, INVARIANT
from benchmarks.pages.markdown import by_gpu, head, link, table
from benchmarks.providers import OURS
from benchmarks.results import Results, Row, shown
from benchmarks.sources import described

NAME = "decoding.md"
_TEXT = """
Generation in bfloat16 with random weights and tokens. A figure is a median, with half the distance between the
quartiles. tilekern and its peers were measured in one run.

- `tilekern-graph`, `tilekern-invariant-graph`: the step of a token is replayed from a CUDA graph of a static cache.
- `tilekern-compiled`, `hf-compiled`: transformers' static cache with `torch.compile`, as `generate` compiles a step.
- `tilekern-invariant`: inside [`tilekern.invariant()`](../same-bits.md).
- **share of the limit**: the time to read all weights and the cache once, as fast as a copy in the same run moves
  bytes, over the time of a token.
- **source**: the digest of the source of the kernels that ran. *Stale* means that this source has changed since.
"""
# Titles of the sections with the metric that each shows, and its unit.
_SECTIONS = (
    ("Tokens of a second by `generate`", "tokens_per_s", "generate"),
    ("One token of each sequence, ms", "token_ms", "decode"),
    ("Share of the limit", "share_of_limit", "decode"),
    ("A prompt, ms", "prompt_ms", "prompt"),
    ("Ops of a token, us", "time", ""),
)


def page(everything: Sequence[Results]) -> dict[str, str]:
    """Return the page by its file name."""
    parts = [head("Is generation faster, and what do equal bits cost?", _TEXT)]
    for gpu, results in by_gpu(everything).items():
        if mine := [run for run in results if run.benchmark == BENCHMARK]:
            parts.append(f"## {gpu}\n")
            parts += filter(None, (_section(*section, mine) for section in _SECTIONS))
            parts.append(_bits(mine))
    return {NAME: "\n".join(filter(None, parts))}


def _section(title: str, metric: str, kind: str, runs: Sequence[Results]) -> str:
    """Make a line for each case, and a column for each provider."""
    cases = [(run, case) for run in runs for case in run.cases() if f" {kind}" in case and run.figures(case, metric)]
    providers = dict.fromkeys(_short(row) for run, case in cases for row in run.figures(case, metric))
    lines = [
        (case, *(shown(run.row(case, who, metric)) for who in providers), described(run, case), link(run))
        for run, case in cases
    ]
    return f"### {title}\n\n{table(('of', *providers, 'source', 'data'), lines)}" if lines else ""


def _short(row: Row) -> str:
    return row.provider.split(" ")[0]


def _bits(runs: Sequence[Results]) -> str:
    """Make a line for each way to compute logits: how many differ from those of training."""
    lines = [line for run in runs for line in _compared(run)]
    columns = ("of", "compared", "inside `tilekern.invariant()`", "outside", "source", "data")
    return f"### Logits that differ from those of training\n\n{table(columns, lines)}" if lines else ""


def _compared(run: Results) -> Iterator[tuple[str, ...]]:
    for case in run.cases():
        rows = [run.row(case, who, metric) for who, metric in _COMPARED]
        if any(rows):
            cells = (f"{row.value:,.0f}" if row else "-" for row in rows)
            yield case, *cells, described(run, case), link(run)


_COMPARED = ((INVARIANT, "logits"), (INVARIANT, "differing_logits"), (OURS, "differing_logits"))
