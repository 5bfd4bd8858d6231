"""Write the README's headline and table: training one model, with the fastest variant of each trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.pages.markdown import table
from benchmarks.pages.models import MEMORY, fastest
from benchmarks.providers import FP8, OURS
from benchmarks.results import Results, Row
from tilekern.errors import InputError

_LINES = (
    "<!-- training: `python -m benchmarks report --readme README.md` writes headline and table -->",
    "<!-- training ends -->",
)
_MODEL = "qwen3-8b"
_PEERS = {"hf": "Hugging Face", "liger": "Liger", "torch.compile": "torch.compile by layer"}
_TRAINERS = {OURS: "tilekern", **_PEERS}
# Beside them, where the run has them.
_IN_8_BITS = {FP8: "8 bits by tilekern", "torchao": "8 bits by torchao"}


def with_training(text: str, everything: Sequence[Results]) -> str:
    """Return a Markdown text with headline and table of the model's training run that has all of these peers.

    Of several it is the one with the most lengths of a step, and of these the newest.

    Raises:
        InputError: the text has no lines for the table, or there is no such run.
    """
    begin, end = _LINES
    head, begins, rest = text.partition(begin)
    _, ends, tail = rest.partition(end)
    if not (begins and ends):
        raise InputError(f"the line {begin if not begins else end} is missing; put it where the training table belongs")
    trained = [run for run in everything if run.benchmark == "train" and run.run["model"] == _MODEL]
    runs = [run for run in trained if all(fastest(run, None, family) for family in _TRAINERS)]
    if not runs:
        wanted = f"no results of train {_MODEL} have {', '.join(_TRAINERS.values())}"
        raise InputError(f"{wanted}; run python -m benchmarks train {_MODEL}")
    run = max(runs, key=lambda run: (len(run.cases()), str(run.run["date"])))
    return f"{head}{begin}\n\n{_headline(run)}\n\n{_training(run)}\n{end}{tail}"


def _headline(run: Results) -> str:
    """Compare speed and memory with each peer's, at the step at which tilekern is fastest; then those of 8 bits."""
    best, in_8_bits = fastest(run, None, OURS), fastest(run, None, FP8)
    assert best is not None
    compared = _compared(run, best, _PEERS)
    said = f"tilekern is fastest at {_tokens(best.case)} tokens of a step. Its speed there: {compared}."
    if in_8_bits is None:
        return said
    compared = _compared(run, in_8_bits, {"torch.compile": "torch.compile in bfloat16", "torchao": "torchao's"})
    return f"{said} By [8-bit floats](docs/fp8.md), at {_tokens(in_8_bits.case)} tokens: {compared}."


def _tokens(case: str) -> str:
    return case.split(" ")[1]


def _compared(run: Results, best: Row, peers: Mapping[str, str]) -> str:
    said = []
    for family, title in peers.items():
        if row := fastest(run, best.case, family):
            ours, theirs = (run.row(best.case, who.provider, MEMORY) for who in (best, row))
            memory = f" in {ours.value / theirs.value:.2f} x of its memory" if ours and theirs else ""
            said.append(f"**{best.value / row.value:.2f} x {title}**{memory}")
    return ", ".join(said)


def _training(run: Results) -> str:
    titles = _TRAINERS | _IN_8_BITS
    best = {name: row for name in titles if (row := fastest(run, None, name))}
    columns = [f"{titles[name]} {row.provider.partition(' ')[2]}".rstrip() for name, row in best.items()]
    lines = [(_tokens(case), *(_speed_and_memory(run, case, name) for name in best)) for case in run.cases()]
    return table(("tokens of a step", *columns), lines)


def _speed_and_memory(run: Results, case: str, family: str) -> str:
    row = fastest(run, case, family)
    if row is None:
        notes = [note for note in run.run.get("notes", []) if note.startswith(f"{case}: {family}")]
        return "out of memory" if any("out of memory" in note for note in notes) else "-"
    peak = run.row(case, row.provider, MEMORY)
    return f"{round(row.value):,} tokens/s" + (f", {peak.value:.1f} GiB" if peak else "")
