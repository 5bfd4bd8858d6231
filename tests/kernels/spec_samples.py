"""Problems, inputs and runs of any spec, for the tests that go over all of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from examples import profile
from hypothesis import strategies as st

from tilekern import interpreter
from tilekern.compile.cubin import Resources, read_resources
from tilekern.compile.toolchain import Compiled
from tilekern.kernels import all_specs
from tilekern.runtime.dispatch import plan_for
from tilekern.spec import ALIGNED, DTYPES, Config, Implementation, KernelSpec, LibraryCall, Problem
from tilekern.spec.source import source_digest
from tilekern.spec.targets import INTERPRETED, Target
from tilekern.tuning.verify.check import Check, arguments_of, compare, expected_results, make_outputs

SPECS = list(all_specs().values())
NAMES = [spec.name for spec in SPECS]
# Small sizes by the name of a dimension, for all specs; other sizes go up to 40.
SIZES = {
    # A sum over one or two hidden states is often a small difference of rounded terms.
    "hidden": st.integers(16, 64),
    "rows": st.integers(1, 40),
    "columns": st.one_of(st.integers(1, 300), st.sampled_from([1, 2, 63, 64, 65, 127, 128, 255, 256, 257])),
    "vocabulary": st.one_of(st.integers(1, 300), st.sampled_from([255, 256, 257])),
    "tokens": st.integers(1, 9),
    "choices": st.integers(1, 10),
    "batch": st.integers(1, 3),
    "heads": st.integers(1, 9),
    "kv_heads": st.integers(1, 5),
    "head_dim": st.integers(1, 24).map(lambda half: 2 * half),
    "experts": st.integers(1, 9),
}
# Large sizes by the name of a dimension; other sizes go up to 65536. Heads are as large as attention's kernels allow:
# its gradients for 512 would take the compiler up to 4 s, for 1024 up to 12 s. Blocks hold rows of narrow models whole.
LARGE = {
    "vocabulary": 300_000, "batch": 64, "heads": 256, "kv_heads": 256, "head_dim": 256, "experts": 256, "choices": 64,
    "group": 32, "width": 256, "attended": 256,
}  # fmt: skip
VIEWS = ("contiguous", "wide_rows", "offset", "reversed")
# Sizes that are not powers of two, for tests that need a single problem of each spec.
ODD = {
    "rows": 13, "columns": 83, "vocabulary": 83, "tokens": 7, "batch": 2, "heads": 5, "kv_heads": 3, "head_dim": 10,
    "pairs": 3,
}  # fmt: skip


# Dimensions that take the size of another if none is given for them.
SAME = {"groups": "tokens", "kv_columns": "columns", "queries": "tokens", "keys": "tokens"}


def compiled() -> list[KernelSpec]:
    """Return the specs that make artifacts; the others are composites of them and of library calls."""
    return [spec for spec in SPECS if not spec.is_library(sized(spec), spec.generic(sized(spec)))]


def runs_on(spec: KernelSpec, target: Target) -> bool:
    """Return whether a GPU has the dtypes of a spec: 8-bit floats begin with Hopper, their scales with Blackwell."""
    if spec.name.startswith("mxfp8_"):
        return target.is_blackwell or target == INTERPRETED
    return target.has_fp8 or not spec.name.startswith("fp8_")


def each(specs: Iterable[KernelSpec]) -> Any:
    """Parametrise a test with specs, as ``spec``."""
    return pytest.mark.parametrize("spec", list(specs), ids=lambda spec: spec.name)


def id_of(value: Any) -> str:
    """Return a parameter's name in a test id, the same in every process: a spec's name, a problem's key."""
    return getattr(value, "name", None) or getattr(value, "key", None) or str(value)


def is_float(value: Any) -> bool:
    """Return whether an input is a floating-point tensor."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def draws_of(spec: KernelSpec) -> Random:
    """Return a generator seeded by the kernel's source; the profile ``thorough`` draws anew at every run.

    For tests that take seconds for each spec and try a share of its problems or configs.
    """
    return Random(None if profile == "thorough" else source_digest(spec.module))


def problems(spec: KernelSpec) -> st.SearchStrategy[Problem]:
    """Draw any small problem of a spec."""
    kinds = {"dtype": st.sampled_from(DTYPES), "flag": st.booleans()}
    fallback = st.integers(1, 40)
    dimensions = {d.name: kinds.get(d.kind, SIZES.get(d.name, fallback)) for d in spec.dimensions}
    return st.fixed_dictionaries(dimensions).map(lambda values: spec.problem(**fitting(values)))


def fitting(values: dict[str, Any]) -> dict[str, Any]:
    """Limit the pairs to those that a head has."""
    if "pairs" not in values:
        return values
    return values | {"pairs": 1 + (values["pairs"] - 1) % (values["head_dim"] // 2)}


def drawn_problem(spec: KernelSpec, random: Random) -> Problem:
    """Draw a bucketed problem of a spec with any dtypes and flags: small, or larger than any model's."""
    kinds = {"dtype": DTYPES, "flag": (False, True)}
    is_large = random.random() < 0.5
    values: dict[str, Any] = {}
    for d in spec.dimensions:
        most = LARGE.get(d.name, 65536)
        size = random.randint(1, most if is_large else min(most, 300))
        values[d.name] = random.choice(kinds[d.kind]) if d.kind in kinds else size
    if "head_dim" in values and ("rope" in spec.name or "turned" in values):
        values["head_dim"] += values["head_dim"] % 2
    return spec.bucketed(spec.problem(**fitting(values)))


def config_of(spec: KernelSpec, problem: Problem, target: Target, variant: str) -> Config:
    """Return the default config if a kernel runs it and the variant is aligned, else the generic one."""
    default = spec.default(problem, target)
    return default if variant == ALIGNED and not spec.is_library(problem, default) else spec.generic(problem)


def resources_of(spec: KernelSpec, problem: Problem, made: Compiled, target: Target) -> Resources:
    """Return the resources of a cubin, after checks that hold for every cubin."""
    resources = read_resources(made.cubin, made.symbol)
    assert resources.registers > 0
    assert 32 <= resources.threads <= 1024
    assert 0 <= resources.shared_bytes <= target.shared_bytes
    assert resources.code_bytes > 0
    # A config may have a device function of its own, decode_tile beside decode_attention.
    function = spec.device(problem, spec.generic(problem)).function
    assert made.symbol.startswith(function._pyfunc.__name__.partition("_")[0])
    for folder in (Path(__file__).parents[2], Path.home()):
        assert str(folder).encode() not in made.cubin
    assert spec.module.rpartition(".")[2].encode() + b".py" not in made.cubin
    return resources


def sized(spec: KernelSpec, dtype: str = "float32", *, flags: bool = False, **sizes: int) -> Problem:
    """Return the problem of a spec with the given sizes, :data:`ODD` ones elsewhere, and one dtype throughout."""
    values: dict[str, Any] = {"dtype": dtype, "flag": flags}
    sizes = {name: sizes[other] for name, other in SAME.items() if other in sizes} | sizes
    for d in spec.dimensions:
        values[d.name] = values[d.kind] if d.kind in ("dtype", "flag") else sizes.get(d.name, ODD.get(d.name, 5))
    return spec.problem(**fitting({d.name: values[d.name] for d in spec.dimensions}))


def alike(spec: KernelSpec, size: int, dtype: str, *, flags: bool = False) -> Problem:
    """Return the problem of a spec whose sizes are all the same, and its dtypes as well."""
    values = {"dtype": dtype, "flag": flags}
    return spec.problem(**fitting({d.name: values.get(d.kind, size) for d in spec.dimensions}))


def configs(spec: KernelSpec, problem: Problem) -> list[Config]:
    """Return the default and generic configs, then the whole space."""
    found = [spec.default(problem, INTERPRETED), spec.generic(problem), *spec.space.candidates(problem, INTERPRETED)]
    return list(dict.fromkeys(found))


def inputs_of(spec: KernelSpec, problem: Problem, seed: int = 0, device: str = "cpu") -> dict[str, Any]:
    """Return the spec's inputs; tame ones if rows are so short that a result may be a small difference of large terms.

    Such a result has no relative accuracy in any implementation, torch's included.
    """
    inputs = spec.inputs(problem, torch.Generator(device).manual_seed(seed), device)
    if problem.get("columns", 16) >= 16:
        return inputs
    # beta stays inside (0, 1).
    numbers = {name: 1.0 for name, value in inputs.items() if isinstance(value, float) and name != "beta"}
    tame = {name: value.abs() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()} | numbers
    return tame | {name: tame[name] / 4 for name in ("x",) if "dy" in tame and name in tame}


def plain_inputs(spec: KernelSpec, problem: Problem, seed: int = 0) -> dict[str, Any]:
    """Return the spec's inputs as the tuner draws them."""
    return spec.inputs(problem, torch.Generator().manual_seed(seed), "cpu")


def seen_as(x: torch.Tensor, view: str) -> torch.Tensor:
    """Copy ``x`` to memory of another layout."""
    shape = x.shape
    if view == "wide_rows":
        out = x.new_zeros((*shape[:-1], shape[-1] + 3))[..., : shape[-1]]
    elif view == "offset":
        out = x.new_zeros(x.numel() + 1)[1:].view(shape)
    elif view == "reversed":
        out = x.new_zeros(shape[::-1]).permute(*reversed(range(x.dim())))
    else:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return out.copy_(x)


def one_of_each(spec: KernelSpec, problem: Problem, *axes: str) -> list[Config]:
    """Return the first config of each combination of values of some axes; a missing axis is None."""
    found: dict[tuple[Any, ...], Config] = {}
    for config in configs(spec, problem):
        found.setdefault(tuple(config.get(axis) for axis in axes), config)
    return list(found.values())


def one_of_each_code(spec: KernelSpec, problem: Problem) -> list[Config]:
    """Return the first config of each device function and its constants, and each config that a library runs."""
    found: dict[Any, Config] = {}
    for config in configs(spec, problem):
        made = spec.implement(problem, config)
        found.setdefault(config if isinstance(made, LibraryCall) else (made.function, made.constants), config)
    return list(found.values())


def launch_arguments(
    implementation: Implementation, inputs: dict[str, Any], outputs: dict[str, Any]
) -> tuple[Any, ...]:
    """Return all arguments in the device function's order, as the interpreter takes them."""
    return (*arguments_of(implementation, inputs, outputs), *(value for _, value in implementation.constants))


def launched(
    spec: KernelSpec, problem: Problem, config: Config, inputs: dict[str, Any], blocks: int | None = None,
    outputs: dict[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Run one config on the CPU, on its own grid or another, and return its outputs.

    Outputs that are not given are allocated full of NaN; those of a library's call are new tensors.
    """
    made = spec.implement(problem, config)
    if isinstance(made, LibraryCall):
        given = made.bound(plan_for)(*(inputs[name] for name in made.inputs))
        return dict(zip(spec.outputs(problem, 1), given, strict=True))
    blocks = blocks or made.grid(problem, INTERPRETED.sm_count)
    outputs = make_outputs(spec, problem, blocks, "cpu") if outputs is None else outputs
    given = launch_arguments(made, inputs, outputs)
    interpreter.launch(made.function, (blocks,), given, dependent=made.dependent, constants=made.constant_arrays)
    return outputs


def interpret(
    spec: KernelSpec, problem: Problem, config: Config, inputs: dict[str, Any], blocks: int | None = None
) -> Check:
    """Run one config by :func:`launched`, and compare the results with the reference."""
    outputs = launched(spec, problem, config, inputs, blocks)
    return compare(spec, problem, outputs, expected_results(spec, problem, inputs))


def launched_in_place(
    spec: KernelSpec, problem: Problem, config: Config, inputs: dict[str, Any], places: dict[str, str],
    blocks: int | None = None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Run one config with outputs in the memory of (copies of) inputs: ``places`` maps outputs to inputs."""
    inputs = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    grid = blocks or spec.device(problem, config).grid(problem, INTERPRETED.sm_count)
    outputs = make_outputs(spec, problem, grid, "cpu") | {name: inputs[place] for name, place in places.items()}
    return launched(spec, problem, config, inputs, grid, outputs)


def both_defaults(spec: KernelSpec, problem: Problem) -> list[Config]:
    """Return the default and the generic config."""
    return configs(spec, problem)[:2]


def assert_right(
    spec: KernelSpec, problem: Problem, found: Iterable[Config], inputs: dict[str, Any], blocks: int | None = None,
    most: float | None = None,
) -> None:  # fmt: skip
    """Compare configs, at least one, with the reference; their relative error must be below ``most``."""
    tried, expected = list(found), expected_results(spec, problem, inputs)
    assert tried
    for config in tried:
        check = compare(spec, problem, launched(spec, problem, config, inputs, blocks), expected)
        assert check.passed or most is not None, (config, check.reason)
        assert most is None or check.relative_error < most, (config, check.reason)
