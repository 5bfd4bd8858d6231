"""The problems of the GPU tests, so that a cache for them can be filled on another machine, and how they are run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from gpu_training import CONFIG, TOKENS
from spec_samples import inputs_of, sized

from tilekern.compile.toolchain import compile_candidate
from tilekern.kernels import all_specs, spec_named
from tilekern.patch.warmup import sizes_of
from tilekern.runtime import dispatch, plans
from tilekern.runtime.launcher import PrebuiltKernel, Variant
from tilekern.runtime.records import launch_in
from tilekern.spec import ALIGNED, Config, KernelSpec, LibraryCall, Problem
from tilekern.spec.targets import Target, resolve
from tilekern.tuning.plan.choosing import plan_of_problem
from tilekern.tuning.plan.models import plan_of_model
from tilekern.tuning.plan.steps import Steps
from tilekern.tuning.verify.check import Check, arguments_of, compare, expected_results, make_outputs

ROWS = (1, 13, 1009)
BF16, FP16, FP32 = "bfloat16", "float16", "float32"
# Columns and dtypes: aligned sizes, tails, odd sizes, more columns than registers hold, and the tiny model's.
NORMS = (
    (4096, BF16, BF16), (1000, FP16, FP16), (83, FP32, FP32), (128, BF16, FP32), (1000, FP32, BF16),
    (20000, BF16, BF16), (8192, BF16, BF16), (80, BF16, BF16), (16, BF16, BF16), (4097, BF16, BF16), (1, FP32, FP32),
    (16, FP32, FP32), (80, FP32, FP32),
)  # fmt: skip
GATES = (
    (12288, BF16), (1000, FP16), (83, FP32), (208, BF16), (208, FP32), (8192, BF16), (4097, BF16), (1, BF16),
)  # fmt: skip
# Columns: all widths of rows that the optimizer sees memory as.
STEPS = tuple((columns, dtype) for dtype in (BF16, FP32) for columns in (4096, 256, 16, 1))
# heads, kv_heads, head_dim, full, dtype, angle_dtype
ROPES = (
    (32, 8, 128, False, BF16, BF16), (32, 8, 128, True, BF16, BF16), (5, 3, 80, True, FP32, FP32),
    (5, 5, 16, False, BF16, BF16), (5, 5, 16, False, FP32, FP32), (16, 1, 64, False, BF16, FP32),
    (4, 2, 10, True, FP16, FP16), (4, 2, 64, False, FP32, FP32), (4, 2, 64, False, BF16, BF16),
)  # fmt: skip
# heads, kv_heads, head_dim, flags, dtype: grouped heads, sizes of heads that are no powers of two, every flag.
ATTENTIONS = (
    (8, 2, 128, ("causal",), BF16), (6, 3, 64, (), BF16), (5, 5, 80, ("causal", "windowed"), BF16),
    (4, 1, 256, ("causal", "windowed", "capped"), BF16), (8, 8, 64, ("causal", "windowed", "sinks"), BF16),
    (4, 2, 128, ("causal", "packed"), BF16), (4, 2, 64, ("windowed", "capped", "packed"), FP16),
    (5, 3, 10, ("causal",), BF16), (3, 1, 40, ("causal",), FP32),
)  # fmt: skip
# vocabulary, flags, dtype
VOCABULARIES = (
    (50304, (), BF16), (50257, ("weighted", "smoothed"), BF16), (4099, ("capped",), FP16), (331, (), FP32),
    (1, (), BF16), (83, ("weighted", "smoothed", "capped"), BF16),
)  # fmt: skip
# inner, columns, flags, dtype
PRODUCTS = (
    (512, 1536, ("b_transposed",), BF16), (250, 83, ("b_transposed", "biased", "gelu_tanh"), BF16),
    (83, 250, ("silu",), FP16), (264, 520, ("a_transposed",), BF16),
    (264, 520, ("a_transposed", "accumulated"), BF16), (131, 67, ("a_transposed", "b_transposed"), BF16),
    (1, 1, ("biased",), BF16), (250, 83, ("b_transposed",), FP32),
)  # fmt: skip
# inner, columns, experts, flags of the product, dtype
EXPERTS = (
    (512, 1536, 8, ("partial",), BF16), (256, 512, 4, ("gathered", "biased", "inner_first"), BF16),
    (250, 83, 3, ("gathered", "biased", "partial"), FP16), (83, 250, 5, ("inner_first",), BF16), (64, 96, 1, (), FP32),
)  # fmt: skip
# heads, kv_heads, head_dim, dtype, weight_dtype, angle_dtype
TURNS = (
    (32, 8, 128, BF16, BF16, BF16), (5, 3, 80, BF16, BF16, BF16), (5, 5, 16, FP32, FP32, FP32),
    (16, 1, 64, BF16, FP32, FP32), (4, 2, 10, FP16, FP16, FP16),
)  # fmt: skip
# heads, kv_heads, head_dim, pairs, norm_last, interleaved, dtype, weight_dtype, angle_dtype: Gemma 3's, Qwen3-Next's,
# HunYuan's, Llama 4's, and odd ones.
PARTS = (
    (16, 8, 256, 128, False, False, BF16, BF16, BF16), (16, 2, 256, 32, False, False, BF16, FP32, FP32),
    (32, 8, 128, 64, True, False, BF16, BF16, BF16), (40, 8, 128, 64, True, True, BF16, BF16, FP32),
    (5, 3, 13, 3, True, False, FP32, FP32, FP32), (4, 2, 10, 5, False, True, FP16, FP16, FP16),
)  # fmt: skip
# rows' sizes of the head's input and its vocabulary
HEADS = ((512, 331), (83, 4099))
# Sizes, dtype, all flags set or none: for a spec without cases of its own. Aligned sizes first, tails, odd sizes.
SIXTEENS = {
    "columns": 4096, "vocabulary": 50304, "hidden": 512, "teacher_hidden": 512, "heads": 32, "kv_heads": 8,
    "head_dim": 128, "experts": 128, "choices": 8, "expert_groups": 8, "channels": 32, "positions": 64,
    "inner": 512, "group": 4, "splits": 4,
}  # fmt: skip
TAILS = {
    "columns": 1000, "vocabulary": 4099, "hidden": 250, "teacher_hidden": 130, "heads": 5, "kv_heads": 3,
    "head_dim": 80, "experts": 60, "choices": 3, "expert_groups": 4, "channels": 6, "positions": 50,
    "inner": 250, "group": 5, "splits": 3,
}  # fmt: skip
DECLARED = ((SIXTEENS, BF16, False), (SIXTEENS, BF16, True), (TAILS, FP16, True), ({}, FP32, False), ({}, FP32, True))

Case = tuple[str, dict[str, Any]]


def _named(name: str, *kinds: str) -> list[str]:
    return [f"{name}_{kind}" for kind in kinds]


def _listed() -> Iterator[tuple[list[str], str, Iterable[tuple[Any, ...]]]]:
    """Kernels, the names of some of their dimensions, and values of these; \"flags\" are those that are on."""
    ways = ("forward", "backward")
    norm = "columns dtype weight_dtype"
    yield _named("rms_norm", *ways), norm, NORMS
    # The sum's generic variant takes a minute to compile for longer rows.
    yield _named("fused_add_rms_norm", *ways), norm, [line for line in NORMS if line[0] <= 8192]
    yield ["column_sum"], "columns - dtype", NORMS
    yield [*_named("swiglu", *ways, "backward_remake"), "scale"], "columns dtype", GATES
    yield ["adamw"], "columns dtype", STEPS
    heads = "heads kv_heads head_dim"
    for inverse in (False, True):
        yield ["rope"], f"{heads} full dtype angle_dtype inverse", [(*line, inverse) for line in ROPES]
    dtypes = "dtype weight_dtype angle_dtype"
    yield _named("qk_norm_rope", *ways), f"{heads} {dtypes}", TURNS
    yield _named("qk_norm_rope_general", *ways), f"{heads} pairs norm_last interleaved {dtypes}", PARTS
    appended = [(*line, *flags) for line in PARTS for flags in ((True, False), (False, True))]
    yield ["append_to_cache"], f"{heads} pairs norm_last interleaved {dtypes} normed paged", appended
    # The backward launches the three before it.
    attentions = [(*sizes, (*flags, "deterministic"), dtype) for *sizes, flags, dtype in ATTENTIONS]
    yield _named("attention", "forward", "delta", "dkdv", "dq", "backward"), f"{heads} flags dtype", attentions
    yield _named("cross_entropy", *ways, "fused"), "vocabulary flags dtype", VOCABULARIES
    yield ["matmul"], "inner columns flags dtype", PRODUCTS
    yield ["grouped_linear"], "inner columns experts flags dtype", EXPERTS
    gradients = [(*sizes, ("b_gathered",) if "gathered" in flags else (), dtype) for *sizes, flags, dtype in EXPERTS]
    yield ["grouped_weight_gradient"], "inner columns experts flags dtype", gradients
    sums = [(columns, experts, dtype, dtype) for _, columns, experts, _, dtype in EXPERTS]
    for weighted in (False, True):
        yield ["grouped_sum"], "columns experts dtype weight_dtype weighted", [(*line, weighted) for line in sums]
    # It launches the one after it.
    yield ["fused_linear_cross_entropy", "cross_entropy_fused"], "hidden vocabulary dtype", [(*h, BF16) for h in HEADS]


def _listed_cases() -> Iterator[Case]:
    for kernels, names, lines in _listed():
        for kernel, line in itertools.product(kernels, lines):
            values = dict(zip(names.split(), line, strict=True))
            kept = [d.name for d in spec_named(kernel).dimensions if d.kind != "bucketed"]
            yield kernel, {name: values.get(name, name in values.get("flags", ())) for name in kept}


BY_HAND = (
    f"swiglu rows={TOKENS},columns=1536,dtype={BF16}",
    f"cross_entropy rows={TOKENS},vocabulary=256,dtype={BF16}",
    f"matmul rows={TOKENS},inner=512,columns=1536,b_transposed=True,dtype={BF16}",
    f"matmul rows={TOKENS},inner=1536,columns=512,b_transposed=True,dtype={BF16}",
)


def _model_cases() -> Iterator[Case]:
    """Yield the problems of the small model's training, patched as a whole and op by op, and calls of other ops."""
    target, single = resolve("H200"), ["rms_norm", "swiglu", "rope"]
    steps = (Steps([TOKENS], attention=("tilekern", "tilekern_nondeterministic")), Steps([TOKENS], ops=single))
    plans = [plan_of_model(CONFIG, step, target) for step in steps]
    plans += [plan_of_problem(text, target) for text in BY_HAND]
    for kernel, problem in dict.fromkeys(named for plan in plans for named in plan.problems):
        kept = [d.name for d in spec_named(kernel).dimensions if d.kind != "bucketed"]
        yield kernel, {name: problem[name] for name in kept}


def _declared_cases(named: set[str]) -> Iterator[Case]:
    """Cases of the specs that no list above names, out of their dimensions."""
    for spec in all_specs().values():
        if spec.name in named:
            continue
        kept = [d.name for d in spec.dimensions if d.kind != "bucketed"]
        for sizes, dtype, flags in DECLARED:
            problem = sized(spec, dtype, flags=flags, **sizes)
            yield spec.name, {name: problem[name] for name in kept}


def cases() -> list[Case]:
    """(kernel, values of its dimensions but the bucketed ones), in the order of those dimensions."""
    listed = [*_listed_cases(), *_model_cases()]
    found = [*listed, *_declared_cases({name for name, _ in listed})]
    return [case for number, case in enumerate(found) if case not in found[:number]]


def name_of(case: Case) -> str:
    """The case for pytest's list."""
    return "-".join([case[0], *(str(value) for value in case[1].values())])


def problem_of(case: Case, rows: int) -> tuple[KernelSpec, Problem]:
    """The spec and the problem of ``rows`` rows, or of two batch entries with as many tokens."""
    spec = spec_named(case[0])
    bucketed = {"rows": rows, "tokens": rows, "queries": rows, "keys": rows, "batch": 2}
    return spec, spec.problem(**{d.name: case[1].get(d.name, bucketed.get(d.name, rows)) for d in spec.dimensions})


def plan_of(spec: KernelSpec, problem: Problem) -> dispatch.Plan:
    """Return the plan that dispatch finds for a problem on the current GPU."""
    plan = dispatch.plan_for(spec, torch.device("cuda", torch.cuda.current_device()), *sizes_of(spec, problem))
    assert plan is not None
    return plan


def run(spec: KernelSpec, problem: Problem, inputs: dict[str, Any]) -> Check:
    """Launch the plan of a problem into outputs full of NaN, and judge the results."""
    plan = plan_of(spec, problem)
    found = spec.implement(problem, plan.config)
    if isinstance(found, LibraryCall):
        given = plan.run(torch.cuda.current_device(), tuple(inputs[name] for name in found.inputs), tuple)
        return _judged(spec, problem, given, inputs)
    outputs = make_outputs(spec, problem, plan.blocks, "cuda")
    plan.launch(torch.cuda.current_device(), *arguments_of(found, inputs, outputs))
    torch.cuda.synchronize()
    return compare(spec, problem, outputs, expected_results(spec, problem, inputs))


def run_library(spec: KernelSpec, problem: Problem, library: LibraryCall, inputs: dict[str, Any]) -> Check:
    """Call a library that no plan chose, and judge the results."""
    given = library.bound(dispatch.plan_for)(*(inputs[name] for name in library.inputs))
    return _judged(spec, problem, given, inputs)


def _judged(spec: KernelSpec, problem: Problem, given: tuple[Any, ...], inputs: dict[str, Any]) -> Check:
    outputs = dict(zip(spec.outputs(problem, 1), given, strict=True))
    return compare(spec, problem, outputs, expected_results(spec, problem, inputs))


def inputs_on_gpu(spec: KernelSpec, problem: Problem) -> dict[str, Any]:
    """The spec's inputs on the GPU."""
    return inputs_of(spec, problem, device="cuda")


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Any wait of the host for the GPU is an error inside."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def watch_variants(monkeypatch: Any) -> list[str]:
    """Note the name of every variant that the launcher asks for from here on."""
    seen: list[str] = []
    original = PrebuiltKernel._compile

    def noted(self: PrebuiltKernel, *arguments: Any) -> Any:
        made = original(self, *arguments)
        seen.append(next(variant.name for variant in self.variants if variant.load() is made[0]))
        return made

    monkeypatch.setattr(PrebuiltKernel, "_compile", noted)
    return seen


def compiled(
    spec: KernelSpec, problem: Problem, config: Config, target: Target
) -> Callable[[dict[str, Any], dict[str, Any] | None], dict[str, Any]]:
    """The aligned variant of a config, compiled here: a function of inputs and outputs, or of outputs of its own."""
    made, implementation = compile_candidate(spec, problem, config, target, ALIGNED), spec.device(problem, config)
    variant = Variant(ALIGNED, made.symbol, made.assumptions, lambda: made.cubin, launch_in(made.launch))
    kernel = PrebuiltKernel(implementation.function, [variant])
    plan = plans.plan_of(kernel, implementation, config, problem, target)

    def launch(inputs: dict[str, Any], outputs: dict[str, Any] | None = None) -> dict[str, Any]:
        outputs = outputs or make_outputs(spec, problem, plan.blocks, "cuda")
        plan.launch(torch.cuda.current_device(), *arguments_of(implementation, inputs, outputs))
        return outputs

    return launch
