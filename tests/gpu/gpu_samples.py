"""The problems of the GPU tests, so that a cache for them can be filled on another machine, and how they are run."""

from __future__ import annotations

from collections.abc import Iterator
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
from tilekern.spec import ALIGNED, ArrayParameter, Config, KernelSpec, LibraryCall, Problem
from tilekern.spec.targets import Target, resolve
from tilekern.tuning.plan.given import plan_of_problem
from tilekern.tuning.plan.models import plan_of_model
from tilekern.tuning.plan.steps import Steps
from tilekern.tuning.verify.check import Check, compare, expected_results, make_outputs

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
}  # fmt: skip
TAILS = {
    "columns": 1000, "vocabulary": 4099, "hidden": 250, "teacher_hidden": 130, "heads": 5, "kv_heads": 3,
    "head_dim": 80, "experts": 60, "choices": 3, "expert_groups": 4, "channels": 6, "positions": 50,
}  # fmt: skip
DECLARED = ((SIXTEENS, BF16, False), (SIXTEENS, BF16, True), (TAILS, FP16, True), ({}, FP32, False), ({}, FP32, True))

Case = tuple[str, dict[str, Any]]


def _flags(spec: KernelSpec, chosen: tuple[str, ...]) -> dict[str, bool]:
    return {d.name: d.name in chosen for d in spec.dimensions if d.kind == "flag"}


def _row_cases() -> Iterator[Case]:
    for columns, dtype, weight in NORMS:
        sizes = {"columns": columns, "dtype": dtype, "weight_dtype": weight}
        # The sum's generic variant takes a minute to compile for longer rows.
        for name in ("rms_norm", "fused_add_rms_norm") if columns <= 8192 else ("rms_norm",):
            yield from ((f"{name}_{direction}", sizes) for direction in ("forward", "backward"))
        yield "column_sum", {"columns": columns, "dtype": weight}
    for columns, dtype in GATES:
        for name in ("swiglu_forward", "swiglu_backward", "swiglu_backward_remake", "scale"):
            yield name, {"columns": columns, "dtype": dtype}
    for columns, dtype in STEPS:
        yield "adamw", {"columns": columns, "dtype": dtype}


def _rotation_cases() -> Iterator[Case]:
    for heads, kv_heads, head_dim, full, dtype, angle_dtype in ROPES:
        sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "full": full}
        for inverse in (False, True):
            yield "rope", sizes | {"inverse": inverse, "dtype": dtype, "angle_dtype": angle_dtype}
    for heads, kv_heads, head_dim, dtype, weight_dtype, angle_dtype in TURNS:
        sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        dtypes = {"dtype": dtype, "weight_dtype": weight_dtype, "angle_dtype": angle_dtype}
        yield from ((f"qk_norm_rope_{direction}", sizes | dtypes) for direction in ("forward", "backward"))
    general = spec_named("qk_norm_rope_general_forward")
    names = [d.name for d in general.dimensions if d.kind != "bucketed"]
    for values in PARTS:
        case = dict(zip(names, values, strict=True))
        yield from ((f"qk_norm_rope_general_{direction}", case) for direction in ("forward", "backward"))


def _attention_cases() -> Iterator[Case]:
    for heads, kv_heads, head_dim, chosen, dtype in ATTENTIONS:
        sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": dtype}
        # The backward launches the three before it.
        for name in ("forward", "delta", "dkdv", "dq", "backward"):
            spec = spec_named(f"attention_{name}")
            names = {d.name for d in spec.dimensions}
            given = {key: value for key, value in sizes.items() if key in names}
            yield spec.name, given | _flags(spec, (*chosen, "deterministic"))


def _product_cases() -> Iterator[Case]:
    for vocabulary, chosen, dtype in VOCABULARIES:
        for name in ("forward", "backward", "fused"):
            spec = spec_named(f"cross_entropy_{name}")
            yield spec.name, {"vocabulary": vocabulary, "dtype": dtype, **_flags(spec, chosen)}
    for inner, columns, chosen, dtype in PRODUCTS:
        flags = _flags(spec_named("matmul"), chosen)
        yield "matmul", {"inner": inner, "columns": columns, "dtype": dtype, **flags}
    for inner, columns, experts, chosen, dtype in EXPERTS:
        sizes = {"inner": inner, "columns": columns, "experts": experts, "dtype": dtype}
        yield "grouped_linear", sizes | _flags(spec_named("grouped_linear"), chosen)
        sides = ("b_gathered",) if "gathered" in chosen else ()
        yield "grouped_weight_gradient", sizes | _flags(spec_named("grouped_weight_gradient"), sides)
        for weighted in (False, True):
            summed = {"columns": columns, "experts": experts, "dtype": dtype, "weight_dtype": dtype}
            yield "grouped_sum", summed | {"weighted": weighted}
    fused = spec_named("cross_entropy_fused")
    for hidden, vocabulary in HEADS:
        # It launches the one after it.
        yield "fused_linear_cross_entropy", {"hidden": hidden, "vocabulary": vocabulary, "dtype": BF16}
        yield fused.name, {"vocabulary": vocabulary, "dtype": BF16, **_flags(fused, ())}


BY_HAND = (
    f"swiglu rows={TOKENS},columns=1536,dtype={BF16}",
    f"cross_entropy rows={TOKENS},vocabulary=256,dtype={BF16}",
    f"matmul rows={TOKENS},inner=512,columns=1536,b_transposed=True,dtype={BF16}",
    f"matmul rows={TOKENS},inner=1536,columns=512,b_transposed=True,dtype={BF16}",
)


def _model_cases() -> Iterator[Case]:
    """What the training of the small model asks for, op by op too, and calls of ops that no patched step makes."""
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
    listed = [*_row_cases(), *_rotation_cases(), *_attention_cases(), *_product_cases(), *_model_cases()]
    found: list[Case] = []
    for name, values in (*listed, *_declared_cases({name for name, _ in listed})):
        order = [d.name for d in spec_named(name).dimensions]
        found.append((name, dict(sorted(values.items(), key=lambda item: order.index(item[0])))))
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
    """What dispatch finds for a problem on the current GPU."""
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
    arguments = [
        outputs[p.name] if isinstance(p, ArrayParameter) and p.role == "output" else inputs[p.name]
        for p in found.parameters
    ]
    plan.launch(torch.cuda.current_device(), *arguments)
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


def compiled_plan(spec: KernelSpec, problem: Problem, config: Config, target: Target) -> plans.Plan:
    """How the aligned variant of a config, compiled here, is launched."""
    made, implementation = compile_candidate(spec, problem, config, target, ALIGNED), spec.device(problem, config)
    variant = Variant(ALIGNED, made.symbol, made.assumptions, lambda: made.cubin, launch_in(made.launch))
    kernel = PrebuiltKernel(implementation.function, [variant])
    return plans.plan_of(kernel, implementation, config, problem, target)
