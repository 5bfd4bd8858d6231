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
from tilekern.spec import ALIGNED, DTYPES, Config, KernelSpec, LibraryCall, Problem
from tilekern.spec.source import source_digest
from tilekern.spec.targets import INTERPRETED, Target
from tilekern.tuning.verify.check import Check, compare, expected_results, launch_arguments, make_outputs

SPECS = list(all_specs().values())
NAMES = [spec.name for spec in SPECS]
# Small sizes by the name of a dimension, whatever the spec; a size of another name goes up to 40.
SIZES = {
    # Of one or two terms, a sum over hidden states is often a small difference of rounded ones.
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
# Sizes without a bound in practice by the name of a dimension; a size of another name goes up to 65536. Heads go up to
# what attention has kernels for: its gradients for 512 would take the compiler up to 4 s, for 1024 up to 12 s.
LARGE = {
    "vocabulary": 300_000, "batch": 64, "heads": 256, "kv_heads": 256, "head_dim": 256, "experts": 256, "choices": 64,
}  # fmt: skip
VIEWS = ("contiguous", "wide_rows", "offset", "reversed")
# A problem of each spec with sizes that are no powers of two, for what a single case suffices for.
ODD = {
    "rows": 13, "columns": 83, "vocabulary": 83, "tokens": 7, "batch": 2, "heads": 5, "kv_heads": 3, "head_dim": 10,
    "pairs": 3,
}  # fmt: skip


# Dimensions that take the size given for another where none is given for them.
SAME = {"groups": "tokens", "queries": "tokens", "keys": "tokens"}


def compiled() -> list[KernelSpec]:
    """The specs that make artifacts; the others are composites of them and of library calls."""
    return [spec for spec in SPECS if not spec.is_library(sized(spec), spec.generic(sized(spec)))]


def each(specs: Iterable[KernelSpec]) -> Any:
    """Let a test take each of some specs, as ``spec``."""
    return pytest.mark.parametrize("spec", list(specs), ids=lambda spec: spec.name)


def id_of(value: Any) -> str:
    """A parameter in the name of a test, which must be the same in every process: a spec's name, a problem's key."""
    return getattr(value, "name", None) or getattr(value, "key", None) or str(value)


def is_float(value: Any) -> bool:
    """Whether an input is a tensor of numbers that are not whole."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def draws_of(spec: KernelSpec) -> Random:
    """Draws that are others where the kernel's source is another, and at every run of the profile ``thorough``.

    For tests that take seconds for each spec: what one of them compiles or runs is a share of all that there is, and
    what another source can break is drawn anew for it.
    """
    return Random(None if profile == "thorough" else source_digest(spec.module))


def problems(spec: KernelSpec) -> st.SearchStrategy[Problem]:
    """Any small problem of a spec."""
    kinds = {"dtype": st.sampled_from(DTYPES), "flag": st.booleans()}
    fallback = st.integers(1, 40)
    dimensions = {d.name: kinds.get(d.kind, SIZES.get(d.name, fallback)) for d in spec.dimensions}
    return st.fixed_dictionaries(dimensions).map(lambda values: spec.problem(**fitting(values)))


def fitting(values: dict[str, Any]) -> dict[str, Any]:
    """Values of dimensions with no more pairs than a head has."""
    if "pairs" not in values:
        return values
    return values | {"pairs": 1 + (values["pairs"] - 1) % (values["head_dim"] // 2)}


def drawn_problem(spec: KernelSpec, random: Random) -> Problem:
    """A problem of a spec at its buckets, of any dtypes and flags: small, or up to sizes that no model has."""
    kinds = {"dtype": DTYPES, "flag": (False, True)}
    is_large = random.random() < 0.5
    values: dict[str, Any] = {}
    for d in spec.dimensions:
        most = LARGE.get(d.name, 65536)
        size = random.randint(1, most if is_large else min(most, 300))
        values[d.name] = random.choice(kinds[d.kind]) if d.kind in kinds else size
    if "head_dim" in values and "rope" in spec.name:
        values["head_dim"] += values["head_dim"] % 2
    return spec.bucketed(spec.problem(**fitting(values)))


def config_of(spec: KernelSpec, problem: Problem, target: Target, variant: str) -> Config:
    """The default config for a variant that a kernel runs, else the generic one."""
    default = spec.default(problem, target)
    return default if variant == ALIGNED and not spec.is_library(problem, default) else spec.generic(problem)


def resources_of(spec: KernelSpec, problem: Problem, made: Compiled, target: Target) -> Resources:
    """What a cubin takes; it is checked for what is so of every one."""
    resources = read_resources(made.cubin, made.symbol)
    assert resources.registers > 0
    assert 32 <= resources.threads <= 1024
    assert 0 <= resources.shared_bytes <= target.shared_bytes
    assert resources.code_bytes > 0
    assert made.symbol.startswith(spec.device(problem, spec.generic(problem)).function._pyfunc.__name__[:8])
    for folder in (Path(__file__).parents[2], Path.home()):
        assert str(folder).encode() not in made.cubin
    assert spec.module.rpartition(".")[2].encode() + b".py" not in made.cubin
    return resources


def sized(spec: KernelSpec, dtype: str = "float32", *, flags: bool = False, **sizes: int) -> Problem:
    """The problem of a spec with the given sizes, :data:`ODD` ones elsewhere, and one dtype throughout."""
    values: dict[str, Any] = {"dtype": dtype, "flag": flags}
    sizes = {name: sizes[other] for name, other in SAME.items() if other in sizes} | sizes
    for d in spec.dimensions:
        values[d.name] = values[d.kind] if d.kind in ("dtype", "flag") else sizes.get(d.name, ODD.get(d.name, 5))
    return spec.problem(**fitting({d.name: values[d.name] for d in spec.dimensions}))


def alike(spec: KernelSpec, size: int, dtype: str, *, flags: bool = False) -> Problem:
    """The problem of a spec whose sizes are all the same, and its dtypes as well."""
    values = {"dtype": dtype, "flag": flags}
    return spec.problem(**fitting({d.name: values.get(d.kind, size) for d in spec.dimensions}))


def configs(spec: KernelSpec, problem: Problem) -> list[Config]:
    """The default and generic configs, then the whole space."""
    found = [spec.default(problem, INTERPRETED), spec.generic(problem), *spec.space.candidates(problem, INTERPRETED)]
    return list(dict.fromkeys(found))


def inputs_of(spec: KernelSpec, problem: Problem, seed: int = 0, device: str = "cpu") -> dict[str, Any]:
    """The spec's inputs; tame ones where rows are so short that a result may be a small difference of large terms.

    Such a result has no relative accuracy in any implementation, torch's own included.
    """
    inputs = spec.inputs(problem, torch.Generator(device).manual_seed(seed), device)
    if problem.get("columns", 16) >= 16:
        return inputs
    # A share of something stays one that leaves a rest.
    numbers = {name: 1.0 for name, value in inputs.items() if isinstance(value, float) and name != "beta"}
    tame = {name: value.abs() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()} | numbers
    return tame | {name: tame[name] / 4 for name in ("x",) if "dy" in tame and name in tame}


def plain_inputs(spec: KernelSpec, problem: Problem, seed: int = 0) -> dict[str, Any]:
    """The spec's inputs as the tuner draws them."""
    return spec.inputs(problem, torch.Generator().manual_seed(seed), "cpu")


def seen_as(x: torch.Tensor, view: str) -> torch.Tensor:
    """The values of ``x`` in memory of another layout."""
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
    """The first config of each combination of values that some axes have, an axis that a config lacks being None."""
    found: dict[tuple[Any, ...], Config] = {}
    for config in configs(spec, problem):
        found.setdefault(tuple(config.get(axis) for axis in axes), config)
    return list(found.values())


def one_of_each_code(spec: KernelSpec, problem: Problem) -> list[Config]:
    """The first config of each device function and its constants, and each config that a library runs."""
    found: dict[Any, Config] = {}
    for config in configs(spec, problem):
        made = spec.implement(problem, config)
        found.setdefault(config if isinstance(made, LibraryCall) else (made.function, made.constants), config)
    return list(found.values())


def launched(
    spec: KernelSpec, problem: Problem, config: Config, inputs: dict[str, Any], blocks: int | None = None,
    outputs: dict[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """The outputs of one config on the CPU: on its own grid or another, in some memory or in one full of NaN.

    Those of a library's call are new tensors.
    """
    made = spec.implement(problem, config)
    if isinstance(made, LibraryCall):
        given = made.bound(plan_for)(*(inputs[name] for name in made.inputs))
        return dict(zip(spec.outputs(problem, 1), given, strict=True))
    blocks = blocks or made.grid(problem, INTERPRETED.sm_count)
    outputs = make_outputs(spec, problem, blocks, "cpu") if outputs is None else outputs
    given = launch_arguments(made, inputs, outputs)
    interpreter.launch(made.function, (blocks,), given, dependent=made.dependent)
    return outputs


def interpret(
    spec: KernelSpec, problem: Problem, config: Config, inputs: dict[str, Any], blocks: int | None = None
) -> Check:
    """Run one config as :func:`launched` does, and judge the results."""
    outputs = launched(spec, problem, config, inputs, blocks)
    return compare(spec, problem, outputs, expected_results(spec, problem, inputs))


def launched_in_place(
    spec: KernelSpec, problem: Problem, config: Config, inputs: dict[str, Any], places: dict[str, str],
    blocks: int | None = None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """The outputs of one config, of which some are the memory of (copies of) inputs; ``places`` says of which."""
    inputs = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    grid = blocks or spec.device(problem, config).grid(problem, INTERPRETED.sm_count)
    outputs = make_outputs(spec, problem, grid, "cpu") | {name: inputs[place] for name, place in places.items()}
    return launched(spec, problem, config, inputs, grid, outputs)


def both_defaults(spec: KernelSpec, problem: Problem) -> list[Config]:
    """The default and the generic config."""
    return configs(spec, problem)[:2]


def assert_right(
    spec: KernelSpec, problem: Problem, found: Iterable[Config], inputs: dict[str, Any], blocks: int | None = None,
    most: float | None = None,
) -> None:  # fmt: skip
    """Hold some configs, of which there must be one, to the reference, and to a relative error below ``most``."""
    tried, expected = list(found), expected_results(spec, problem, inputs)
    assert tried
    for config in tried:
        check = compare(spec, problem, launched(spec, problem, config, inputs, blocks), expected)
        assert check.passed or most is not None, (config, check.reason)
        assert most is None or check.relative_error < most, (config, check.reason)
