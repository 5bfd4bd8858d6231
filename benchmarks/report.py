"""RESULTS.md and the README's table: pure functions of the JSON files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.environment import NO_GPU
from benchmarks.experts import BENCHMARK as EXPERTS
from benchmarks.experts import KEPT, WAITS, left_out
from benchmarks.experts_cases import MAKERS
from benchmarks.families import BENCHMARK as FAMILIES
from benchmarks.goals import GOALS, Goal, Verdict
from benchmarks.kernels import PRODUCTS
from benchmarks.parallel import BENCHMARK as PARALLEL
from benchmarks.parallel import LOSS_ON_ONE
from benchmarks.providers import OURS
from benchmarks.results import ALL, RUN_FIELDS, Results, Row, shown
from tilekern.errors import InputError

_HEAD = """# Results

Made by `python -m benchmarks report` from the JSON files in `benchmarks/results/`; edit nothing here.
GPU times are medians with half the distance between the quartiles; tilekern and its peers took turns in one run.
"A copy" is a device-to-device copy of the bytes that the op must move (each input read once, each output written once).
"""

_MISSES = Path(__file__).with_name("misses.md")
UNEXPLAINED = "not explained yet"
_WITH_TARGETS = ("H200", NO_GPU)

# Between these lines of the README stands the table of this model's training, with the best provider of each family.
_TRAINING = (
    "<!-- training: `python -m benchmarks report --readme README.md` writes this table -->",
    "<!-- training ends -->",
)
_MODEL = "qwen3-8b"
_TRAINERS = {"tilekern": "tilekern", "hf": "Hugging Face", "liger": "Liger", "torch.compile": "torch.compile by layer"}


def render(everything: Sequence[Results]) -> str:
    """Return the report on these results."""
    parts = [_HEAD]
    for gpu in dict.fromkeys(results.run["gpu"] for results in everything):
        mine = [results for results in everything if results.run["gpu"] == gpu]
        parts += [
            f"## {'No GPU' if gpu == NO_GPU else gpu}\n",
            *(_targets(mine, gpu != NO_GPU) if gpu in _WITH_TARGETS else ()),
            *(_of_families(results) for results in mine if results.benchmark == FAMILIES),
            *(_of_experts(results) for results in mine if results.benchmark == EXPERTS),
            *(_of_parallel(results) for results in mine if results.benchmark == PARALLEL),
            *(_against_length(results) for results in mine if results.benchmark == "kernels_sweep"),
            "### All figures\n",
            *(_figures(results) for results in mine),
        ]
    parts += ["## Runs\n", _runs(everything)]
    return "\n".join(parts).rstrip() + "\n"


def with_training(text: str, everything: Sequence[Results]) -> str:
    """Return a Markdown text with the table of the model's newest training run that has all of these peers.

    Raises:
        InputError: the text has no place for the table, or there is no such run.
    """
    begin, end = _TRAINING
    head, begins, rest = text.partition(begin)
    _, ends, tail = rest.partition(end)
    if not (begins and ends):
        raise InputError(f"the line {begin if not begins else end} is missing; put it where the training table belongs")
    trained = [run for run in everything if run.benchmark == "train" and run.run["model"] == _MODEL]
    runs = [run for run in trained if all(_fastest(run, None, family) for family in _TRAINERS)]
    if not runs:
        wanted = f"no results of train {_MODEL} have {', '.join(_TRAINERS.values())}"
        raise InputError(f"{wanted}; run python -m benchmarks train {_MODEL}")
    newest = max(runs, key=lambda run: str(run.run["date"]))
    return f"{head}{begin}\n\n{_training(newest)}\n{end}{tail}"


def _training(run: Results) -> str:
    best = {name: _fastest(run, None, name) for name in _TRAINERS}
    versions = {name: row.provider.partition(" ")[2] for name, row in best.items() if row is not None}
    head = [f"{title} {versions[name]}".rstrip() for name, title in _TRAINERS.items()]
    lines = [(case.split(" ")[1], *(_speed_and_memory(run, case, name) for name in _TRAINERS)) for case in run.cases()]
    return _table(("tokens of a step", *head), lines)


def _fastest(run: Results, case: str | None, family: str) -> Row | None:
    """The row of the family's fastest provider; of tilekern the default alone, as its variants are other choices."""
    rows = [row for row in run.rows if row.metric == "tokens_per_s" and case in (None, row.case)]
    variants = () if family == "tilekern" else (f"{family}-",)
    mine = [row for row in rows if row.provider == family or row.provider.startswith(variants)]
    return max(mine, key=lambda row: row.value, default=None)


def _speed_and_memory(run: Results, case: str, family: str) -> str:
    row = _fastest(run, case, family)
    if row is None:
        notes = [note for note in run.run.get("notes", []) if note.startswith(f"{case}: {family}")]
        return "out of memory" if any("out of memory" in note for note in notes) else "-"
    peak = run.row(case, row.provider, "peak_gib")
    return f"{round(row.value):,} tokens/s" + (f", {peak.value:.1f} GiB" if peak else "")


def _targets(mine: Sequence[Results], has_gpu: bool) -> Iterator[str]:
    judged = [(goal, verdict) for goal in GOALS for results in _of(mine, goal) for verdict in goal.judge(results)]
    met = sum(verdict.met for _, verdict in judged)
    yield f"### Targets: {met} of {len(judged)} figures meet theirs\n"
    if judged:
        lines = [_line(verdict) for _, verdict in judged]
        yield _table(("what", "on", "target", "tilekern", "met", "peers"), lines)
    missed = [verdict for _, verdict in judged if not verdict.met]
    if missed:
        yield "### Misses, and why\n"
        why = explanations()
        yield "".join(f"- **{v.what}, {v.case}**: {why.get((v.what, v.case), UNEXPLAINED)}\n" for v in missed)
    due = [goal for goal in GOALS if goal.needs_gpu == has_gpu]
    missing = [
        f"{goal.title} ({goal.target})" if goal.target else goal.title
        for goal in due
        if goal not in [one for one, _ in judged]
    ]
    if missing:
        yield f"Not measured here: {'; '.join(missing)}.\n"


def explanations() -> dict[tuple[str, str], str]:
    """The text of ``misses.md`` on figures that miss their targets, by what they are and of which case."""
    found: dict[tuple[str, str], str] = {}
    for paragraph in _MISSES.read_text(encoding="utf-8").split("\n\n## ")[1:]:
        headings, _, text = paragraph.partition("\n\n")
        for heading in headings.split("\n## "):
            what, _, case = heading.partition(" | ")
            found[what, case] = " ".join(text.split())
    return found


def _of(mine: Sequence[Results], goal: Goal) -> list[Results]:
    return [results for results in mine if results.benchmark == goal.benchmark]


def _line(verdict: Verdict) -> tuple[str, ...]:
    met = "yes" if verdict.met else "**no**"
    return verdict.what, verdict.case, verdict.target, verdict.figure, met, verdict.peers


def _figures(results: Results) -> str:
    """The rows of a run, a line for each case and metric, a column for each provider; of many problems their sums."""
    chosen = [row for row in results.rows if row.case == ALL] or results.rows
    more = len(results.cases()) - 1 if chosen is not results.rows else 0
    providers = list(dict.fromkeys(row.provider for row in chosen))
    lines: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in chosen:
        lines.setdefault((row.case, row.metric, row.unit), {})[row.provider] = row
    body = [(*key, *(shown(found.get(provider)) for provider in providers)) for key, found in lines.items()]
    said = [*results.run.get("notes", []), *([f"{more} problems are in the JSON file, each by itself"] if more else [])]
    notes = "".join(f"- {note}\n" for note in said)
    title = f"#### {results.benchmark} ({results.run['date']})\n"
    return "\n".join([title, _table(("case", "metric", "unit", *providers), body), *([notes] if notes else [])])


def _against_length(results: Results) -> str:
    """A table for each op of a sweep: time against length in torch, in Liger and here, the speed-up, and the memory."""
    ops: dict[str, list[str]] = {}
    for case in results.cases():
        ops.setdefault(case.split(" ")[0], []).append(case)
    parts = [f"### Ops of {results.run.get('model', 'a model')}, forward and backward ({results.run['date']})\n"]
    for op, cases in ops.items():
        head = ("tokens", "torch us", "Liger us", "tilekern us", "speed-up", "memory: torch, Liger, tilekern MiB")
        by_length = sorted(cases, key=lambda case: int(case.split(" ")[1]))
        parts += [f"#### {op}\n", _table(head, [_length(results, case) for case in by_length])]
    return "\n".join(parts)


def _length(results: Results, case: str) -> tuple[str, ...]:
    """A line: of Liger the fastest back end; the speed-up is over it, or over torch where Liger's op is not there."""
    rows = [row for row in results.rows if (row.case, row.metric) == (case, "forward_backward")]
    liger = min((row for row in rows if row.provider.startswith("liger")), key=lambda row: row.value, default=None)
    torch, ours = results.row(case, "torch", "forward_backward"), results.row(case, OURS, "forward_backward")
    other = liger or torch
    faster = f"{other.value / ours.value:.2f} x {'Liger' if liger else 'torch'}" if other and ours else "-"
    peaks = [results.row(case, row.provider, "extra_peak") if row else None for row in (torch, liger, ours)]
    memory = ", ".join(f"{peak.value:,.0f}" if peak else "-" for peak in peaks)
    return case.split(" ")[1], shown(torch), shown(liger), shown(ours), faster, memory


def _of_families(results: Results) -> str:
    """A table with a line for each model: tilekern and the fastest of each peer's variants, and how they compare."""
    lines = []
    for case in results.cases():
        best = {name: _fastest(results, case, name) for name in _TRAINERS}
        cells = [_with_variant(_speed_and_memory(results, case, name), row) for name, row in best.items()]
        lags = [_lag(results, case, best[name]) for name in ("tilekern", "hf")]
        lines.append((case, *cells, _of_the_best(best), *lags))
    head = ("model", *_TRAINERS.values(), "of the best", "first step's lag, s", "Hugging Face's")
    title = f"### Training of the families ({results.run['date']})\n"
    return "\n".join([title, _table(head, lines)])


def _of_the_best(fastest: Mapping[str, Row | None]) -> str:
    """tilekern's rate over that of the fastest peer, of the fastest rows by trainer."""
    ours, peers = fastest[OURS], [row.value for name, row in fastest.items() if row and name != OURS]
    return f"{ours.value / max(peers):.2f} x" if ours and peers else "-"


def _of_parallel(results: Results) -> str:
    """A table with a line for each model and way: the rates of all GPUs together, and each GPU's peak of memory."""
    lines = []
    names = [name for name in _TRAINERS if any(row.provider.startswith(name) for row in results.rows)]
    for case in results.cases():
        ratio = _of_the_best({name: _fastest(results, case, name) for name in names})
        cells = [_speed_and_memory(results, case, name) for name in names]
        losses = [results.row(case, OURS, metric) for metric in ("loss", LOSS_ON_ONE)]
        lines.append((case, *cells, ratio, *(f"{row.value:.4f}" if row else "-" for row in losses)))
    head = ("model", *(_TRAINERS[name] for name in names), "of the best", "loss", "one GPU's")
    title = f"### Models that {results.run['gpus']} GPUs share ({results.run['date']})\n"
    return "\n".join([title, _table(head, lines)])


def _of_experts(results: Results) -> str:
    """A table with a line for each layer: milliseconds of each provider, what is kept and how often the host waits."""
    lines = []
    for case in results.cases():
        times = {name: results.row(case, name, "forward_backward") for name in (*MAKERS, PRODUCTS)}
        cells = [
            f"{row.value / 1000:.3g}" if row else _why_left_out(results, case, name) for name, row in times.items()
        ]
        pairs = [
            " / ".join(shown(results.row(case, name, metric)) for name in (OURS, "transformers"))
            for metric in (KEPT, WAITS)
        ]
        lines.append((case, *cells, *pairs))
    both = f"{OURS} / transformers"
    head = ("layer", *(f"{name}, ms" for name in (*MAKERS, PRODUCTS)), f"kept, GiB: {both}", f"waits: {both}")
    return "\n".join([f"### A layer of experts, forward and backward ({results.run['date']})\n", _table(head, lines)])


def _why_left_out(results: Results, case: str, provider: str) -> str:
    """The error of a provider that has no figure of a case."""
    for where, names, why in map(left_out, results.run["notes"]):
        if provider in names and where in ("", case, case.partition(",")[0]):
            return why
    return "-"


def _with_variant(cell: str, row: Row | None) -> str:
    """A cell with the attention that the fastest variant runs."""
    if row is None or "-" not in (name := row.provider.split(" ")[0]):
        return cell
    return f"{cell} ({name})"


def _lag(results: Results, case: str, row: Row | None) -> str:
    return shown(results.row(case, row.provider, "first_step_lag_s") if row else None)


def _runs(everything: Sequence[Results]) -> str:
    lines = [(results.benchmark, *(results.run[name] for name in RUN_FIELDS)) for results in everything]
    return _table(("benchmark", *RUN_FIELDS), lines)


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |\n" for row in rows)
