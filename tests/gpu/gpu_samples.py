"""The problems of the GPU tests, so that a cache for them can be filled on another machine, and how they are run."""

from __future__ import annotations

from typing import Any

import torch
from spec_samples import inputs_of

from tilekern import dispatch
from tilekern.kernels import spec_named
from tilekern.launcher import PrebuiltKernel
from tilekern.spec import ArrayParameter, KernelSpec, LibraryCall, Problem
from tuning.verifying import Check, compare, expected_results, make_outputs

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
# heads, kv_heads, head_dim, full, dtype, angle_dtype
ROPES = (
    (32, 8, 128, False, BF16, BF16), (32, 8, 128, True, BF16, BF16), (5, 3, 80, True, FP32, FP32),
    (5, 5, 16, False, BF16, BF16), (5, 5, 16, False, FP32, FP32), (16, 1, 64, False, BF16, FP32),
    (4, 2, 10, True, FP16, FP16), (4, 2, 64, True, FP32, FP32), (4, 2, 64, True, BF16, BF16),
)  # fmt: skip


def cases() -> list[tuple[str, dict[str, Any]]]:
    """(kernel, values of its dimensions but the bucketed ones)."""
    found: list[tuple[str, dict[str, Any]]] = []
    for columns, dtype, weight in NORMS:
        sizes = {"columns": columns, "dtype": dtype, "weight_dtype": weight}
        found += [("rms_norm_forward", sizes), ("rms_norm_backward", sizes)]
        found.append(("column_sum", {"columns": columns, "dtype": weight}))
    for columns, dtype in GATES:
        found += [(name, {"columns": columns, "dtype": dtype}) for name in ("swiglu_forward", "swiglu_backward")]
    for heads, kv_heads, head_dim, full, dtype, angle_dtype in ROPES:
        for inverse in (False, True):
            sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "full": full, "inverse": inverse}
            found.append(("rope", sizes | {"dtype": dtype, "angle_dtype": angle_dtype}))
    return [case for number, case in enumerate(found) if case not in found[:number]]


def name_of(case: tuple[str, dict[str, Any]]) -> str:
    """The case for pytest's list."""
    return "-".join([case[0], *(str(value) for value in case[1].values())])


def problem_of(case: tuple[str, dict[str, Any]], rows: int) -> tuple[KernelSpec, Problem]:
    """The spec and the problem of ``rows`` rows, or of two batch entries with as many tokens."""
    spec = spec_named(case[0])
    bucketed = {"rows": rows, "tokens": rows, "batch": 2}
    return spec, spec.problem(**{d.name: case[1].get(d.name, bucketed.get(d.name)) for d in spec.dimensions})


def plan_of(spec: KernelSpec, problem: Problem) -> dispatch.Plan:
    """What dispatch finds for a problem on the current GPU."""
    kinds = {d.name: d.kind for d in spec.dimensions}
    sizes = [getattr(torch, value) if kinds[name] == "dtype" else value for name, value in problem.items()]
    plan = dispatch.plan_for(spec, torch.device("cuda", torch.cuda.current_device()), *sizes)
    assert plan is not None
    return plan


def run(spec: KernelSpec, problem: Problem, inputs: dict[str, Any]) -> Check:
    """Launch the plan of a problem into outputs full of NaN, and judge the results."""
    plan = plan_of(spec, problem)
    found = spec.implement(problem, plan.config)
    if isinstance(found, LibraryCall):
        given = plan.run(torch.cuda.current_device(), tuple(inputs[name] for name in found.inputs), tuple)
        outputs = dict(zip(spec.outputs(problem, 1), given, strict=True))
        return compare(spec, problem, outputs, expected_results(spec, problem, inputs))
    outputs = make_outputs(spec, problem, plan.blocks, "cuda")
    arguments = [
        outputs[p.name] if isinstance(p, ArrayParameter) and p.role == "output" else inputs[p.name]
        for p in found.parameters
    ]
    plan.launch(torch.cuda.current_device(), *arguments)
    torch.cuda.synchronize()
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
        seen.append(next(variant.name for variant in self._variants if variant.load() is made[0]))
        return made

    monkeypatch.setattr(PrebuiltKernel, "_compile", noted)
    return seen
