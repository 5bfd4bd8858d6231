"""``python -m benchmarks``: measure, and make the report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.environment import RESULTS
from benchmarks.results import Results, print_table, read_folder, write_results

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
Out = Annotated[
    Path | None, typer.Option("--out", help="Folder for the JSON file; default benchmarks/results/<gpu key>.")
]
Name = Annotated[str | None, typer.Option("--name", help="Name of the JSON file, without its ending.")]


@app.command()
def kernels(
    out: Out = None,
    name: Name = None,
    samples: Annotated[int, typer.Option(help="Samples of each figure.")] = 80,
    ops: Annotated[str, typer.Option(help="Ops to measure, by commas.")] = "rms_norm,swiglu,rope",
    providers: Annotated[str, typer.Option(help="Providers to measure, by commas; default all.")] = "",
) -> None:
    """GPU time of every op, tilekern and its peers, beside a copy."""
    from benchmarks.cases import training_cases
    from benchmarks.kernels import measure
    from benchmarks.providers import LOADERS

    cases = [case for case in training_cases() if case.op in ops.split(",")]
    names = providers.split(",") if providers else list(LOADERS)
    _keep(measure(cases, names, samples, say=lambda line: print(line, flush=True)), out, name or "kernels")


@app.command()
def host(out: Out = None, name: Name = None) -> None:
    """Host time of one op call."""
    from benchmarks.host import measure

    _keep(measure(), out, name or "host")


@app.command()
def startup(out: Out = None, name: Name = None) -> None:
    """Lag of the first step, the first launch, the import and the cache's command line."""
    from benchmarks.startup import measure

    _keep(measure(), out, name or "startup")


@app.command()
def regret(
    sweep: Annotated[Path, typer.Option("--sweep", help="A sweep folder with measurements.")],
    out: Out = None,
    name: Name = None,
) -> None:
    """Predicted winner's time over the best measured one."""
    from benchmarks.regret import measure
    from tuning.sweep import Sweep

    _keep(measure(sweep), out or RESULTS / Sweep(sweep).target.key, name or "regret")


@app.command("compile")
def compile_stage(
    model: Annotated[str, typer.Option(help="Model to compile for.")] = "qwen3-8b",
    gpu: Annotated[str, typer.Option(help="GPU to compile for.")] = "auto",
    out: Out = None,
    name: Name = None,
) -> None:
    """The compile stage's use of the cores."""
    from benchmarks.compiling import measure
    from tilekern.targets import resolve

    _keep(measure(model, gpu), out or RESULTS / resolve(gpu).key, name or "compile")


@app.command()
def report(
    results: Annotated[Path, typer.Option(help="Folder with the JSON files.")] = RESULTS,
    out: Annotated[Path, typer.Option("--out", help="The Markdown file.")] = RESULTS.parent / "RESULTS.md",
) -> None:
    """Make RESULTS.md from all JSON files."""
    from benchmarks.report import render

    out.write_text(render(read_folder(results)), encoding="utf-8")
    print(f"wrote {out}")


def _keep(results: Results, out: Path | None, name: str) -> None:
    from benchmarks.environment import require_gpu

    path = (out or RESULTS / require_gpu().key) / f"{name}.json"
    write_results(path, results)
    print_table(name, results.rows)
    for note in results.run["notes"]:
        print(f"note: {note}")
    print(f"wrote {path}")
