"""Define the commands of ``python -m benchmarks``: measure, and make the report."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.environment import RESULTS, require_gpu
from benchmarks.pages import PAGES, files_of, write_files
from benchmarks.pages.readme import with_training
from benchmarks.results import Results, print_table, read_folder, read_results, write_results
from tilekern import __version__
from tilekern.errors import InputError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(f"tilekern {__version__}")
        raise typer.Exit


@app.callback()
def _all(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Measure, and make the report."""


def _folder(path: Path | None) -> Path | None:
    """Return the folder of ``--out``; refuse it before anything is measured if it is not writable."""
    there = path
    while there and not there.exists():
        there = there.parent
    if there and not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise InputError(f"--out {path} cannot be written: {there} is not a folder that this user can write to")
    return path


Out = Annotated[
    Path | None,
    typer.Option("--out", callback=_folder, help="Folder for the JSON file; default benchmarks/results/<gpu key>."),
]
CpuOut = Annotated[Path, typer.Option("--out", callback=_folder, help="Folder for the JSON file.")]
Name = Annotated[str | None, typer.Option("--name", help="Name of the JSON file, without its ending.")]
Providers = Annotated[str, typer.Option("--providers", help="Providers to measure, by commas; default all.")]
Tuned = Annotated[str, typer.Option("--model", help="Model to tune.")]
TunedTokens = Annotated[str, typer.Option("--tokens", help="Tokens of a step, by commas.")]
TUNED, TUNED_TOKENS = "qwen3-8b", "2048,4096,8192,16384,32768"


class Sweep(Enum):
    """The sizes that a model's ops are measured over."""

    tokens = "tokens"


class Device(Enum):
    """The device that a model trains on."""

    cuda = "cuda"
    cpu = "cpu"


@app.command()
def kernels(
    out: Out = None,
    name: Name = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples of each figure.")] = 80,
    seconds: Annotated[float, typer.Option(help="Seconds for each figure, after which there are fewer samples.")] = 6,
    ops: Annotated[
        str, typer.Option(help="Ops to measure, by commas; default all. `suite` stands for those of the Liger suite.")
    ] = "",
    providers: Providers = "",
    model: Annotated[str, typer.Option(help="Take the sizes of this model.")] = "",
    sweep: Annotated[Sweep | None, typer.Option(help="Sizes to measure the model's ops over.")] = None,
    tokens: Annotated[
        str, typer.Option(help="Token counts of the sweep, by commas, in their order.")
    ] = "1024,2048,4096,8192,16384",
    plan: Annotated[
        Path | None, typer.Option(help="Measure nothing; write the plan of these cases for `tilekern.tune --plan`.")
    ] = None,
    gpu: Annotated[str, typer.Option(help="GPU that the plan is for.")] = "auto",
) -> None:
    """Measure GPU time of every op, tilekern, its peers and a copy: at fixed sizes, or a model's over token counts."""
    from benchmarks import kernels as bench
    from benchmarks.providers import LOADERS, OPS
    from benchmarks.suite_cases import SUITE
    from benchmarks.suites import fixed_cases, sweep_cases
    from tilekern.tuning.plan.configs import config_named

    suite = ",".join(SUITE)
    chosen = among(",".join(suite if op.strip() == "suite" else op for op in ops.split(",")), OPS, "op")
    peers = among(providers, list(LOADERS), "provider")
    effort = bench.Effort(samples, seconds)
    if bool(model) != (sweep is not None):
        raise InputError("--model and --sweep tokens go together")
    if plan is not None:
        swept = sweep_cases(config_named(model)[1], counts(tokens), chosen) if model else []
        cases = [case for _, case in swept] if model else [case for case in fixed_cases() if case.op in chosen]
        for note in bench.write_plan(plan, cases, gpu):
            print(f"note: {note}")
        print(f"wrote {plan}")
        return
    stem = name or (f"kernels-{Path(model).name}" if model else "kernels")

    keep = _kept_by_case(out, stem)
    if model:
        _keep(bench.sweep(model, counts(tokens), chosen, peers, effort, keep), out, stem)
    else:
        cases = [case for case in fixed_cases() if case.op in chosen]
        _keep(bench.measure(cases, peers, effort, keep), out, stem)


@app.command()
def train(
    model: Annotated[
        str, typer.Argument(help="A preset, the path of a config.json or of a folder with one, or a hub id.")
    ],
    out: Out = None,
    name: Name = None,
    tokens: Annotated[str, typer.Option(help="Token counts, by commas.")] = "2048,4096,8192,16384",
    sequence: Annotated[int, typer.Option(min=0, help="Tokens of a sequence; 0 means that a step is one.")] = 0,
    layers: Annotated[int, typer.Option(min=0, help="Layers of the model; 0 means all.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps at each length, after four that warm up.")] = 5,
    providers: Annotated[str, typer.Option(help="Trainers, by commas; default the fastest of each family.")] = "",
    lora: Annotated[int, typer.Option(min=0, help="Rank of adapters that train alone; 0 trains all weights.")] = 0,
    autocast: Annotated[
        bool, typer.Option("--autocast", help="Weights are float32, and autocast casts products to bfloat16.")
    ] = False,
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help="Compute activations again.")] = False,
    keep_attention: Annotated[
        bool, typer.Option("--keep-attention", help="With --checkpointing, but not attention; of tilekern alone.")
    ] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Say where tilekern's steps spend the GPU.")] = False,
    turns: Annotated[
        int, typer.Option(min=1, help="How often each trainer takes its steps, after all others; all models must fit.")
    ] = 1,
    device: Annotated[Device, typer.Option(help="Where the model trains.")] = Device.cuda,
) -> None:
    """Measure training steps of a whole model, tilekern and its peers: tokens per second, memory, first steps."""
    from benchmarks import train as bench
    from benchmarks.trainers import TRAINERS, USUAL, has_our_attention

    if device is Device.cpu and profile:
        raise InputError("--profile says where the GPU's time goes; it needs --device cuda")
    _needs_gpu_or_out(device, out)
    lengths = sorted(counts(tokens))
    timed = bench.timed_steps(lengths, steps)
    if sequence and any(length % sequence for length in lengths):
        raise InputError(f"--sequence {sequence}: each of --tokens must be a whole number of sequences")
    names = among(providers, list(TRAINERS), "provider") if providers else list(USUAL)
    if keep_attention and not (checkpointing and all(has_our_attention(name) for name in names)):
        raise InputError("--keep-attention goes with --checkpointing and --providers of tilekern")
    how = "attention" if keep_attention else "full" if checkpointing else ""
    job = bench.Job(
        "", model, layers, tuple(lengths), timed, 4, device.value, how, profile, sequence, lora, autocast=autocast,
        turns=turns,
    )  # fmt: skip
    stem = name or "train"

    def keep(figures: Results, parts: Results) -> None:
        for results, path in ((figures, stem), (parts, f"{stem}_profile")):
            _write_some(results, out, path)

    figures, parts = bench.measure(job, names, keep, say=lambda line: print(line, flush=True))
    _keep(figures, out, stem)
    if parts.rows:
        _keep(parts, out, f"{stem}_profile")


@app.command()
def longest(
    models: Annotated[
        list[str], typer.Argument(help="Presets, paths of a config.json or of a folder with one, or hub ids.")
    ],
    out: Out = None,
    name: Name = None,
    gib: Annotated[str, typer.Option(help="Memory that torch may take, in GiB, by commas: 139 for an H200.")] = "139",
    checkpoints: Annotated[
        str, typer.Option(help="By commas: none, attention (computed again but for it), full, offload.")
    ] = "none,attention,full",
    providers: Annotated[str, typer.Option(help="Trainers, by commas.")] = "tilekern",
    layers: Annotated[int, typer.Option(min=0, help="Layers of the models; 0 means all.")] = 0,
    lora: Annotated[int, typer.Option(min=0, help="Rank of adapters that train alone; 0 trains all weights.")] = 0,
    first: Annotated[int, typer.Option(min=1, help="Tokens of the first sequence that is tried.")] = 8192,
    grid: Annotated[int, typer.Option(min=1, help="Lengths are multiples of this.")] = 1024,
    most: Annotated[int, typer.Option(min=1, help="Tokens of the longest sequence that is tried.")] = 1 << 20,
    limit_s: Annotated[float, typer.Option("--limit-s", help="Seconds for each search.")] = 550.0,
    device: Annotated[Device, typer.Option(help="Where the models train.")] = Device.cuda,
) -> None:
    """Find the longest sequence that trains in some memory, for each model, kind of checkpoints and trainer."""
    from benchmarks import longest as bench
    from benchmarks.trainers import TRAINERS

    _needs_gpu_or_out(device, out)
    kinds = ["" if kind == "none" else kind for kind in among(checkpoints, bench.KINDS, "checkpoints")]
    names = among(providers, list(TRAINERS), "provider")
    common = bench.Search(bench.Job("", "", layers, (), (), device=device.value, lora=lora), 0.0, first, grid, most)
    searches = bench.searches_of(common, models, counts(gib, "numbers of GiB"), kinds, names)
    stem = name or bench.BENCHMARK

    def keep(results: Results) -> None:
        _write_some(results, out, stem)

    _keep(bench.measure(searches, limit_s, keep, say=lambda line: print(line, flush=True)), out, stem)


@app.command()
def memory(
    model: Annotated[
        str, typer.Argument(help="A preset, the path of a config.json or of a folder with one, or a hub id.")
    ] = TUNED,
    tokens: Annotated[str, typer.Option(help="Tokens of the one sequence, by commas.")] = "4096,8192",
    formats: Annotated[
        str, typer.Option(help="By commas: bf16, or formats of 8-bit floats as rowwise.")
    ] = "bf16,rowwise",
    layers: Annotated[int, typer.Option(min=0, help="Layers of the model; 0 means all.")] = 0,
    gpu: Annotated[str, typer.Option(help="GPU whose default configs run.")] = "H200",
) -> None:
    """Foretell, without a GPU, the peak memory of a training step, and what layers keep for the backward."""
    from benchmarks import memory as bench

    for length in counts(tokens):
        for format in among(formats, bench.FORMATS, "format"):
            found = bench.foretell(model, length, "" if format == bench.PLAIN else format, layers=layers, gpu=gpu)
            print(f"{model}, {length} tokens, {format}, {gpu}: {next(lines := found.lines())}")
            print(*(f"  {line}" for line in lines), sep="\n", flush=True)


@app.command()
def families(
    out: Out = None,
    name: Name = None,
    models: Annotated[str, typer.Option(help="Models to train, by commas; default all of the table.")] = "",
    steps: Annotated[int, typer.Option(min=1, help="Timed steps, after two that warm up.")] = 20,
    providers: Annotated[str, typer.Option(help="Trainers, by commas; default all that a model's table has.")] = "",
) -> None:
    """Measure training steps of a model of each family, two layers at real width, tilekern and its peers: one file."""
    from benchmarks import families as bench
    from benchmarks.trainers import TRAINERS

    require_gpu()
    chosen = [bench.FAMILIES[model] for model in among(models, list(bench.FAMILIES), "model")]
    names = among(providers, list(TRAINERS), "provider") if providers else []
    stem = name or bench.BENCHMARK

    def keep(figures: Results, _: Results) -> None:
        _write_some(figures, out, stem)

    _keep(bench.measure(chosen, names, steps, keep, say=lambda line: print(line, flush=True)), out, stem)


@app.command()
def experts(
    out: Out = None,
    name: Name = None,
    models: Annotated[
        str, typer.Option(help="Models whose layers are measured, by commas; default those of the table.")
    ] = "",
    tokens: Annotated[str, typer.Option(help="Token counts, by commas.")] = "4096,8192",
    kinds: Annotated[
        str, typer.Option(help="By commas: trained with `balanced` or `zipf` routing, `frozen`, `lora`; default all.")
    ] = "",
    providers: Annotated[str, typer.Option(help="Implementations of the layers, by commas; default all.")] = "",
    samples: Annotated[int, typer.Option(min=1, help="Samples of each figure.")] = 40,
    seconds: Annotated[float, typer.Option(help="Seconds for each case's times, after which there are fewer.")] = 4,
    device: Annotated[Device, typer.Option(help="Where the layers are computed.")] = Device.cuda,
    plan: Annotated[
        Path | None, typer.Option(help="Measure nothing; write the plan of these cases for `tilekern.tune --plan`.")
    ] = None,
    gpu: Annotated[str, typer.Option(help="GPU that the plan is for.")] = "auto",
) -> None:
    """Measure one layer of experts at real width, forward and backward, tilekern and its peers: time, memory, waits."""
    from benchmarks import experts as bench
    from benchmarks.experts_cases import KINDS, MAKERS, MODELS
    from benchmarks.kernels import Effort

    chosen = [model.strip() for model in models.split(",")] if models else list(MODELS)
    lengths, wanted, peers = counts(tokens), among(kinds, KINDS, "kind"), among(providers, list(MAKERS), "provider")
    if plan is not None:
        for note in bench.write_plan(plan, chosen, lengths, wanted, peers, gpu):
            print(f"note: {note}")
        print(f"wrote {plan}")
        return
    _needs_gpu_or_out(device, out)
    stem = name or bench.BENCHMARK

    def keep(results: Results) -> None:
        _write_some(results, out, stem)

    effort = Effort(samples, seconds)
    results = bench.measure(
        chosen, lengths, wanted, peers, effort, keep, lambda line: print(line, flush=True), device.value
    )
    _keep(results, out, stem)
    if failed := bench.failures(results):
        raise InputError(f"tilekern failed: {'; '.join(failed)}")


@app.command()
def fp8(
    model: Annotated[
        str, typer.Argument(help="A preset, the path of a config.json or of a folder with one, or a hub id.")
    ] = TUNED,
    out: Out = None,
    name: Name = None,
    parts: Annotated[str, typer.Option(help="By commas: errors, gradients, curves; default all.")] = "",
    layers: Annotated[int, typer.Option(min=0, help="Layers of the model; 0 means all.")] = 4,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of a step of the model, in one sequence.")] = 4096,
    first_steps: Annotated[int, typer.Option(min=1, help="Steps whose gradients are compared.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each small model.")] = 2000,
    hidden: Annotated[int, typer.Option(min=128, help="Hidden size of the small models, a multiple of 128.")] = 256,
    device: Annotated[Device, typer.Option(help="Where the models train.")] = Device.cuda,
    plan: Annotated[
        Path | None, typer.Option(help="Measure nothing; write the plan of these parts for `tilekern.tune --plan`.")
    ] = None,
    gpu: Annotated[str, typer.Option(help="GPU that the plan is for.")] = "auto",
) -> None:
    """Measure whether 8-bit floats train rightly: errors of each layer, gradients' cosines, losses of small models."""
    from benchmarks import fp8 as bench
    from benchmarks.fp8_curves import Sizes

    if hidden % 128:
        raise InputError(f"--hidden {hidden}: heads have 64 and sides a multiple of 128; pass a multiple of 128")
    chosen = among(parts, bench.PARTS, "part")
    job = bench.Job(model, layers, tokens, first_steps, steps, Sizes(hidden), device.value)
    if plan is not None:
        bench.write_plan(plan, job, chosen, gpu)
        print(f"wrote {plan}")
        return
    _needs_gpu_or_out(device, out)
    stem = name or bench.BENCHMARK

    def keep(results: Results) -> None:
        _write_some(results, out, stem)

    _keep(bench.measure(job, chosen, keep, lambda line: print(line, flush=True)), out, stem)


@app.command()
def decode(
    model: Annotated[
        str, typer.Argument(help="A preset, the path of a config.json or of a folder with one, or a hub id.")
    ] = TUNED,
    out: Out = None,
    name: Name = None,
    parts: Annotated[
        str, typer.Option(help="By commas: products, attention, bits, prompt, step, generate; default all.")
    ] = "",
    providers: Annotated[str, typer.Option(help="Ways to run a whole model, by commas; default all.")] = "",
    batch: Annotated[str, typer.Option(help="Sequences that decode at once, and rows of products.")] = "1,8,64",
    contexts: Annotated[str, typer.Option(help="Keys of attention alone, by commas.")] = "1024,4096,32768",
    context: Annotated[int, typer.Option(min=2, help="Tokens of a sequence in `step`, the new one included.")] = 4096,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens before those of `generate`.")] = 512,
    new: Annotated[int, typer.Option(min=1, help="Tokens of `generate`.")] = 128,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of `prompt`.")] = 8192,
    layers: Annotated[
        int, typer.Option(min=0, help="Layers of the model; 0 means all, and the first few for `bits`.")
    ] = 0,
    samples: Annotated[int, typer.Option(min=1, help="Samples of each figure.")] = 20,
    seconds: Annotated[float, typer.Option(help="Seconds for an op's figures, after which there are fewer.")] = 1,
    limit_s: Annotated[float, typer.Option("--limit-s", help="Seconds for all; what is measured then is kept.")] = 1e9,
    device: Annotated[Device, typer.Option(help="Where the model is.")] = Device.cuda,
    plan: Annotated[
        Path | None,
        typer.Option(help="Measure nothing; write the plan of the ops in both modes for `tilekern.tune --plan`."),
    ] = None,
    gpu: Annotated[str, typer.Option(help="GPU that the plan is for.")] = "auto",
) -> None:
    """Measure generation, tilekern and its peers: ops of a token, whole steps, prompts, `generate`; and equal bits."""
    from benchmarks import decode as bench
    from benchmarks.decode_models import WAYS
    from benchmarks.decode_ops import BENCHMARK

    chosen, ways = among(parts, list(bench.PARTS), "part"), among(providers, list(WAYS), "provider")
    job = bench.Job(
        model, "", "", layers, counts(batch), counts(contexts), context, prompt, new, tokens, samples, seconds,
        device.value,
    )  # fmt: skip
    if plan is not None:
        bench.write_plan(plan, job, chosen, gpu)
        print(f"wrote {plan}")
        return
    if "step" in chosen and context < (least := bench.least_context(samples)):
        raise InputError(f"--context {context}: --samples {samples} of a step take {least} tokens at least")
    _needs_gpu_or_out(device, out)
    stem = name or BENCHMARK

    def keep(results: Results) -> None:
        _write_some(results, out, stem)

    _keep(bench.measure(job, chosen, ways, limit_s, keep, lambda line: print(line, flush=True)), out, stem)


@app.command()
def inference(
    models: Annotated[
        list[str] | None,
        typer.Argument(help="Presets, paths of a config.json or of a folder with one, or hub ids; default by part."),
    ] = None,
    out: Out = None,
    name: Name = None,
    parts: Annotated[str, typer.Option(help="By commas: forward, decode, start, kernels; default all.")] = "",
    providers: Annotated[str, typer.Option(help="By commas; default all but `tilekern-int8`.")] = "",
    shapes: Annotated[
        str, typer.Option(help="Sequences x tokens of a forward, by commas; default by model, such as 8x128.")
    ] = "",
    batch: Annotated[str, typer.Option(help="Sequences that decode at once, by commas.")] = "1,8,64",
    contexts: Annotated[str, typer.Option(help="Tokens of a decoded sequence at its end, by commas.")] = "512",
    dtype: Annotated[str, typer.Option(help="Of weights, activations and caches.")] = "bfloat16",
    samples: Annotated[int, typer.Option(min=1, help="Timed calls of each figure.")] = 200,
    seconds: Annotated[float, typer.Option(help="Seconds for a case's calls, after which there are fewer.")] = 4,
    limit_s: Annotated[float, typer.Option("--limit-s", help="Seconds for all; what is measured then is kept.")] = 1e9,
) -> None:
    """Measure the engine without torch and its peers: logits, generated tokens, fresh processes; and its kernels."""
    from benchmarks import inference as bench
    from tilekern.inference.weights import DTYPES

    chosen = among(parts, bench.PARTS, "part")
    ways = among(providers, list(bench.WAYS), "provider") if providers else list(bench.USUAL)
    (kind,) = among(dtype, DTYPES, "dtype")[:1]
    sizes = [one.strip() for one in shapes.split(",")] if shapes else []
    for shape in sizes:
        bench.parsed(shape)
    common = bench.Job("", "", (), sizes, counts(batch), counts(contexts), kind, samples, seconds)
    jobs = bench.jobs_of(common, models or [], chosen, ways)
    if not jobs:
        raise InputError(f"no provider of {', '.join(ways)} has a part of {', '.join(chosen)}")
    require_gpu()
    stem = name or bench.BENCHMARK

    def keep(results: Results) -> None:
        _write_some(results, out, stem)

    results = bench.measure(jobs, limit_s, keep, lambda line: print(line, flush=True))
    _keep(results, out, stem)
    path = _path(out, stem)
    if find_spec("bokeh") is None:
        command = f"python -m benchmarks charts {shlex.quote(str(path))}"
        print(f"note: no page of charts, as Bokeh is not installed; elsewhere, run {command}")
    else:
        _write_page(results, path.with_suffix(".html"))


@app.command()
def charts(
    results: Annotated[Path, typer.Argument(help="A JSON file that `inference` has written.")],
    out: Annotated[Path | None, typer.Option("--out", help="The page; default beside the JSON file.")] = None,
) -> None:
    """Make the page of charts of a run of `inference` from its JSON file; needs no GPU."""
    _write_page(read_results(results), out or results.with_suffix(".html"))


@app.command()
def parallel(
    out: Out = None,
    name: Name = None,
    models: Annotated[str, typer.Option(help="Models to train, by commas.")] = "qwen3-8b,qwen3-30b-a3b",
    ways: Annotated[str, typer.Option(help="Ways to share a model, by commas; default all that it has.")] = "",
    providers: Annotated[str, typer.Option(help="Trainers, by commas; default the best peers.")] = "",
    count: Annotated[int, typer.Option("--gpus", min=2, help="How many GPUs of this host share a model.")] = 2,
    layers: Annotated[int, typer.Option(min=0, help="Layers of the model; 0 means all.")] = 2,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences of a step on each GPU.")] = 1,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 4096,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps, after three that warm up.")] = 10,
    device: Annotated[Device, typer.Option(help="Where the models train.")] = Device.cuda,
) -> None:
    """Measure training steps of models on several GPUs of this host and on one GPU, tilekern and its peers."""
    import torch

    from benchmarks import parallel as bench
    from benchmarks.sharing import WAYS
    from benchmarks.trainers import TRAINERS
    from benchmarks.training import Job

    if device is Device.cuda:
        require_gpu()
        if (here := torch.cuda.device_count()) < count:
            raise InputError(f"--gpus {count}: this host has {here}")
    elif out is None:
        raise InputError("on the CPU the figures mean nothing; say with --out where they go")
    names = among(providers, list(TRAINERS), "provider") if providers else list(bench.PROVIDERS)
    stem = name or bench.BENCHMARK
    total = count * sequences * tokens
    job = Job("", "", layers, (total,), (steps,), bench.WARM_UP, device.value, sequence=tokens, ranks=count)

    def keep(figures: Results, _: Results) -> None:
        _write_some(figures, out, stem)

    chosen = among(ways, list(WAYS), "way")
    results = bench.measure(models.split(","), chosen, names, job, keep, say=lambda line: print(line, flush=True))
    _keep(results, out, stem)


@app.command()
def host(out: Out = None, name: Name = None, providers: Providers = "") -> None:
    """Measure the host time of one op call."""
    from benchmarks.host import NAMES, measure

    stem = name or "host"
    _keep(measure(among(providers, NAMES, "provider"), _kept_by_case(out, stem)), out, stem)


@app.command()
def startup(out: Out = None, name: Name = None, providers: Providers = "") -> None:
    """Measure the lag of the first step, the first launch, the import and the cache's command line."""
    from benchmarks.startup import NAMES, measure

    stem = name or "startup"
    _keep(measure(among(providers, NAMES, "provider"), _kept_by_case(out, stem)), out, stem)


@app.command()
def counters(out: Out = None, name: Name = None) -> None:
    """Read the GPU's counters for the kernels whose targets are hard, by Nsight Compute (ncu)."""
    from benchmarks.counters import measure

    _keep(measure(), out, name or "counters")


@app.command()
def sustained(out: Out = None, name: Name = None) -> None:
    """Measure rates held for seconds, with the power drawn and the clock."""
    from benchmarks.sustained import measure

    require_gpu()
    _keep(measure(), out, name or "sustained")


@app.command()
def regret(
    sweep: Annotated[Path, typer.Option("--sweep", help="A sweep folder with measurements.")],
    out: Out = None,
    name: Name = None,
) -> None:
    """Compute the predicted winner's time over the best measured time."""
    from benchmarks.regret import measure
    from tilekern.tuning.sweep import folder as sweeps

    _keep(measure(sweep), out or RESULTS / sweeps.Sweep(sweep).target.key, name or "regret")


@app.command()
def exchange(
    other: Annotated[str, typer.Option("--from", help="The GPU whose records are timed here, such as H100.")],
    out: Out = None,
    name: Name = None,
    kernels: Annotated[str, typer.Option(help="Kernels to compare, by commas; default all.")] = "",
    rounds: Annotated[int, typer.Option(min=8, help="Rounds of both winners of a problem.")] = 100,
    problem_s: Annotated[float, typer.Option(help="GPU seconds for a problem; then there are fewer rounds.")] = 1,
    seconds: Annotated[float, typer.Option(help="Seconds of the whole run; problems left then are noted.")] = 480,
) -> None:
    """Measure what it costs to use another GPU's records: its winners beside this GPU's; needs no compiler."""
    from benchmarks.exchange import BENCHMARK, Effort, measure
    from tilekern.spec.targets import resolve

    stem = name or f"{BENCHMARK}-{resolve(other).key}"
    effort = Effort(rounds, problem_s, seconds)
    _keep(measure(other, effort, _kernels_among(kernels), _kept_by_case(out, stem)), out, stem)


@app.command()
def races(
    sweep: Annotated[Path, typer.Option("--sweep", help="A sweep folder that was measured on the GPU here.")],
    out: Out = None,
    name: Name = None,
    kernels: Annotated[str, typer.Option(help="Kernels to race, by commas; default all of the sweep.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of the candidates that come close to the best.")] = 250,
    seconds: Annotated[float, typer.Option(help="GPU seconds of them for a problem; then there are fewer.")] = 4,
) -> None:
    """Compare the tuner's race with an exhaustive sweep and cuda.tile's own search: their choices and GPU time."""
    from benchmarks.races import Effort, measure

    stem = name or "races"
    _keep(measure(sweep, _kernels_among(kernels), Effort(rounds, seconds), _kept_by_case(out, stem)), out, stem)


@app.command()
def strategies(
    sweep: Annotated[Path, typer.Option("--sweep", help="A sweep folder that was compiled for the GPU here.")],
    out: Out = None,
    name: Name = None,
    kernels: Annotated[str, typer.Option(help="Kernels to time, by commas; default all of the sweep.")] = "",
    chosen: Annotated[str, typer.Option("--strategies", help="Strategies to compare, by commas.")] = "race,exhaustive",
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each strategy.")] = 3,
    rounds: Annotated[int, typer.Option(min=8, help="Rounds that judge the choices.")] = 200,
    seconds: Annotated[float, typer.Option(help="GPU seconds of them for a problem; then there are fewer.")] = 2,
    limit_s: Annotated[float, typer.Option("--limit-s", help="Begin no problem that would end later.")] = 1e9,
) -> None:
    """Compare the tuner's strategies on the same candidates, on a rested GPU and at the power limit: time, regret."""
    from benchmarks.strategies import BENCHMARK, Effort, measure
    from tilekern.tuning.strategies import STRATEGIES

    names, stem = among(chosen, list(STRATEGIES), "strategy"), name or BENCHMARK
    effort = Effort(repeats, rounds, seconds)
    _keep(measure(sweep, _kernels_among(kernels), names, effort, limit_s, _kept_by_case(out, stem)), out, stem)


@app.command("compile")
def compile_stage(
    model: Annotated[str, typer.Option(help="Model to compile for.")] = "qwen3-8b",
    gpu: Annotated[str, typer.Option(help="GPU to compile for.")] = "auto",
    out: Out = None,
    name: Name = None,
    alone: Annotated[bool, typer.Option("--alone", help="Compile all once more on one core, to compare.")] = False,
    sweep: Annotated[
        Path | None,
        typer.Option(help="Compile what this sweep folder plans, and before and after it a sample on one core."),
    ] = None,
    sample: Annotated[int, typer.Option(min=1, help="Artifacts of that sample, at least.")] = 60,
) -> None:
    """Measure the compile stage's use of the cores."""
    from benchmarks.compiling import measure, measure_sample
    from tilekern.spec.targets import resolve

    if sweep is not None:
        _keep(measure_sample(sweep, sample), out, name or "compile_sample")
        return
    _keep(measure(model, gpu, alone=alone), out or RESULTS / resolve(gpu).key, name or "compile")


@app.command()
def tune(
    model: Tuned = TUNED,
    tokens: TunedTokens = TUNED_TOKENS,
    sweep: Annotated[Path | None, typer.Option(help="Where to leave the sweep folder; default nowhere.")] = None,
    out: Out = None,
    name: Name = None,
) -> None:
    """Measure a whole tune in empty folders: the seconds of each stage; candidates timed, wrong and quarantined."""
    from benchmarks.whole_tune import measure

    require_gpu()
    _keep(measure(model, tokens, sweep), out, name or "tune")


@app.command()
def gpus(
    sweep: Annotated[Path, typer.Option("--sweep", help="Folder for the sweeps, without earlier ones.")],
    count: Annotated[int, typer.Option("--gpus", min=2, help="How many GPUs of this host are several.")] = 2,
    model: Tuned = TUNED,
    tokens: TunedTokens = TUNED_TOKENS,
    out: Out = None,
    name: Name = None,
) -> None:
    """Measure the measure stage on one GPU and on several of this host: seconds, and the share of one GPU's time."""
    from benchmarks.several_gpus import measure

    require_gpu()
    _keep(measure(model, tokens, sweep, count), out, name or "gpus")


@app.command("cache-scale")
def cache_scale(
    records: Annotated[int, typer.Option(min=1000, help="Records of the large cache.")] = 100_000,
    out: CpuOut = RESULTS / "cpu",
    name: Name = None,
) -> None:
    """Measure listing, lookups, verify and start-up on a cache of many records; needs no GPU."""
    from benchmarks.cache_scale import FEW_RECORDS, measure

    _keep(measure((FEW_RECORDS, records)), out, name or "cache_scale")


@app.command()
def report(
    results: Annotated[Path, typer.Option(help="Folder with the JSON files.")] = RESULTS,
    out: Annotated[Path, typer.Option("--out", help="Folder for the pages and plots.")] = PAGES,
    readme: Annotated[Path | None, typer.Option(help="A README whose headline and table are written anew.")] = None,
) -> None:
    """Make the result pages, their plots and the README's headline and table from all JSON files."""
    if not results.is_dir():
        raise InputError(f"--results {results} is not a folder; pass the one with the JSON files")
    everything = read_folder(results)
    if not everything:  # all pages would be empty, and the plots deleted
        raise InputError(f"--results {results} holds no results; pass the one with the JSON files")
    files = files_of(everything)
    if readme is not None:
        try:
            text = with_training(readme.read_text(encoding="utf-8"), everything)
            readme.write_text(text, encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot read or write {readme}: {error.strerror}") from None
        print(f"wrote {readme}")
    write_files(out, files)
    print(f"wrote {len(files)} files into {out}")


def _write_page(results: Results, path: Path) -> None:
    """Write the page of charts of a run of ``inference``.

    Raises:
        InputError: Bokeh is not installed, the results are of another benchmark, or the file cannot be written.
    """
    if find_spec("bokeh") is None:
        raise InputError("charts need Bokeh, which is not installed; install it with: pip install 'tilekern[report]'")
    from benchmarks.inference_page import as_html
    from tilekern.tuning.report import write_text

    print(f"wrote {write_text(path, as_html(results))}")


def _needs_gpu_or_out(device: Device, out: Path | None) -> None:
    if device is Device.cuda:
        require_gpu()
    elif out is None:
        raise InputError("on the CPU the figures mean nothing; say with --out where they go")


def counts(text: str, what: str = "token counts") -> list[int]:
    """Parse a comma-separated list of positive numbers; drop repeated ones.

    Raises:
        InputError: one of them is not a positive whole number.
    """
    found = [part.strip() for part in text.split(",")]
    for part in found:
        if not part.isdecimal() or int(part) < 1:
            raise InputError(f"{what} are whole numbers from 1 on, by commas; got {part!r}")
    return list(dict.fromkeys(int(part) for part in found))


def _kernels_among(text: str) -> list[str]:
    """Return the named kernels; none if no name is given, which stands for all of a sweep."""
    from tilekern.kernels import all_specs

    return among(text, list(all_specs()), "kernel") if text else []


def among(text: str, known: Sequence[str], kind: str) -> list[str]:
    """Parse a comma-separated list of names, drop repeated ones; return all known names if it is empty.

    Raises:
        InputError: a name is unknown.
    """
    found = [part.strip() for part in text.split(",")] if text else list(known)
    for part in found:
        if part not in known:
            raise InputError(f"unknown {kind} {part!r}; known: {', '.join(known)}")
    return list(dict.fromkeys(found))


def _path(out: Path | None, name: str) -> Path:
    return (out or RESULTS / require_gpu().key) / f"{name}.json"


def _kept_by_case(out: Path | None, name: str) -> Callable[[str, Results], None]:
    """Return a function that reports a finished case and writes the results so far."""

    def keep(case: str, results: Results) -> None:
        print(case, flush=True)
        _write_some(results, out, name)

    return keep


def _write_some(results: Results, out: Path | None, name: str) -> None:
    """Write the results so far, if any, so that an interrupted run keeps them."""
    if results.rows:
        write_results(_path(out, name), results)


def _keep(results: Results, out: Path | None, name: str) -> None:
    path = _path(out, name)
    write_results(path, results)
    print_table(name, results.rows)
    for note in results.run["notes"]:
        print(f"note: {note}")
    print(f"wrote {path}")
