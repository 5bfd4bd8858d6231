"""The contract of every spec: its kernels on the CPU against its reference in float64, and its count of bytes."""

import math

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from spec_samples import (
    NAMES,
    SPECS,
    VIEWS,
    assert_right,
    compiled,
    configs,
    each,
    id_of,
    inputs_of,
    interpret,
    is_float,
    launched,
    launched_in_place,
    one_of_each,
    one_of_each_code,
    plain_inputs,
    problems,
    runs_on,
    seen_as,
    sized,
)

from tilekern.compile.toolchain import assumptions
from tilekern.kernels import spec_named
from tilekern.spec import ALIGNED, DTYPES, ITEM_BYTES, ArrayParameter, LibraryCall
from tilekern.spec.targets import resolve
from tilekern.tuning.verify.check import compare, expected_results, odd_problem

every_spec = pytest.mark.parametrize("spec", SPECS, ids=NAMES)
every_flag = pytest.mark.parametrize("flags", [False, True])
# The axes of a config that decide how it goes over rows.
WAYS = ("schedule", "passes", "tile_m", "tile_n", "unroll")
# The families whose tiles are of rows and columns.
FAMILIES = tuple(f"tilekern.kernels.families.{name}" for name in ("elements", "losses", "rows", "vocabulary"))
OF_ROWS = [spec for spec in SPECS if spec.bytes_moved.__module__ in FAMILIES]
WITH_SUMS = [spec for spec in OF_ROWS if "partial" in spec.outputs(sized(spec), 1)]


@every_flag
@each(compiled())
def test_every_config_gives_its_device_function_what_that_takes(spec, flags):
    """``Implementation`` checks this."""
    problem = sized(spec, flags=flags)
    made = [spec.implement(problem, config) for config in configs(spec, problem)]
    assert any(not isinstance(way, LibraryCall) for way in made)


@every_spec
@examples(20)
@given(data=st.data())
def test_any_config_is_right_on_any_problem_and_any_strides(spec, data):
    problem = data.draw(problems(spec), label="problem")
    found = configs(spec, problem)
    # Half of the draws are the default or the generic config, one of which a miss uses.
    config = data.draw(st.one_of(st.sampled_from(found[:2]), st.sampled_from(found)), label="config")
    inputs = inputs_of(spec, problem, seed=data.draw(st.integers(0, 3), label="seed"))
    arrays = [name for name, value in inputs.items() if isinstance(value, torch.Tensor)]
    views = data.draw(st.fixed_dictionaries({name: st.sampled_from(VIEWS) for name in arrays}), label="views")
    for name, view in views.items():
        inputs[name] = seen_as(inputs[name], view)
    check = interpret(spec, problem, config, inputs)
    assert check.passed, check.reason


@every_spec
@pytest.mark.parametrize(("blocks", "dtype"), [(1, "bfloat16"), (3, "float32"), (200, "bfloat16")])
def test_every_function_is_right_on_any_grid(spec, blocks, dtype):
    """A generic variant runs on the aligned one's grid.

    This holds for the generic config, and for any config with a persistent schedule. A generic config with a block for
    each tile may have the tiles, and so the grid, of all others.
    """
    problem, large = sized(spec, dtype), sized(spec, dtype, rows=64, tokens=64, columns=1000, kv_columns=500)
    inputs, generic = inputs_of(spec, problem), spec.generic(problem)
    looping = {
        spec.device(problem, config).function: config
        for config in configs(spec, problem)
        if config.get("schedule") == "persistent" and not spec.is_library(problem, config)
    }
    if generic.get("schedule") == "block" and len(grids_of(spec, large)) == 1:
        assert_right(spec, problem, [generic], inputs)
    else:
        assert_right(spec, problem, {generic, *looping.values()}, inputs, blocks)


def grids_of(spec, problem):
    """The sizes of the grids of a problem's kernels on an H200, the generic one's too."""
    target = resolve("H200")
    kernels = (spec.generic(problem), *spec.space.candidates(problem, target))
    return {
        spec.device(problem, config).grid(problem, target.sm_count)
        for config in kernels
        if not spec.is_library(problem, config)
    }


@every_spec
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_config_of_one_odd_problem_is_right(spec, dtype):
    problem = sized(spec, dtype, rows=5, columns=83, tokens=3, heads=3, kv_heads=2)
    assert_right(spec, problem, one_of_each_code(spec, problem), inputs_of(spec, problem))


LONG = [
    (spec, rows, columns)
    for spec in OF_ROWS
    for rows, columns in ((1, 4096), (3, 20000), (3, 5121), (2, 9000))[: 2 if "vocabulary" in sized(spec) else 4]
]


@pytest.mark.parametrize(("spec", "rows", "columns"), LONG, ids=id_of)
def test_long_rows(spec, rows, columns):
    """Rows of several tiles, and rows that are read twice, by one config of each combination of axes."""
    flags = "vocabulary" in sized(spec) and rows == 3
    problem = sized(spec, "bfloat16", rows=rows, columns=columns, vocabulary=columns, flags=flags)
    ways = one_of_each(spec, problem, *(way for way in WAYS if way != "tile_m"))
    assert_right(spec, problem, ways, inputs_of(spec, problem))


@pytest.mark.parametrize(("kernel", "rows", "columns"), [("column_sum", 300, 1030), ("scale", 3, 5121)])
def test_many_chunks(kernel, rows, columns):
    """Run a config of each tile; a single resident block computes all rows."""
    spec = spec_named(kernel)
    problem = sized(spec, "bfloat16", rows=rows, columns=columns)
    for config in one_of_each(spec, problem, "tile_n"):
        blocks = 1 if config["schedule"] == "persistent" else None
        assert_right(spec, problem, [config], inputs_of(spec, problem), blocks)


@each([spec for spec in WITH_SUMS if "eps" in plain_inputs(spec, sized(spec))])
@pytest.mark.parametrize("rows", [3, 5])
def test_rows_beyond_the_last_add_nothing_to_the_sums_though_their_rstd_is_infinite(spec, rows):
    problem = sized(spec, rows=rows, columns=83)
    inputs = inputs_of(spec, problem) | {"eps": 0.0}
    assert all(x.isfinite().all() for x in spec.reference(**inputs, **dict.fromkeys(flags_of(spec), False)).values())
    several = [config for config in configs(spec, problem) if config["tile_m"] > 1]
    assert_right(spec, problem, several[:4], inputs)


def flags_of(spec):
    return [d.name for d in spec.dimensions if d.kind == "flag"]


# The input by which a row does not count, and its value there, or the input with that value.
LEFT_OUT = {
    **dict.fromkeys(("cross_entropy_forward", "cross_entropy_backward", "cross_entropy_fused"), ("target", -100)),
    **dict.fromkeys(("log_probs_forward", "log_probs_backward"), ("ids", -100)),
    **dict.fromkeys(("jsd", "tvd", "logits_jsd_forward", "logits_jsd_backward"), ("slope", 0)),
    **dict.fromkeys(("tvd_elements_forward", "tvd_elements_backward"), ("counted", 0)),
    **dict.fromkeys(("router_losses_forward", "router_losses_backward"), ("shares", 0)),
    **dict.fromkeys(("experts_gate", "experts_gate_backward", "experts_combine"), ("experts", "total")),
    **dict.fromkeys(("fp8_experts_gate", "fp8_experts_gate_backward"), ("experts", "total")),
}


@every_flag
@pytest.mark.parametrize("name", LEFT_OUT)
def test_rows_that_do_not_count_add_nothing_even_if_not_finite(name, flags):
    spec, (by, value) = spec_named(name), LEFT_OUT[name]
    # Without its flag router_losses has no shares.
    flags = flags or by == "shares"
    problem = sized(spec, rows=7, columns=83, flags=flags)
    inputs = plain_inputs(spec, problem)
    inputs[by][[1, 3]] = inputs.get(value, value)
    expected = expected_results(spec, problem, inputs)
    # Weights and shares of experts are of slots.
    others = {by, "weights", "shares"}
    for key in [key for key, x in inputs.items() if is_float(x) and len(x) == len(inputs[by]) and key not in others]:
        inputs[key][1], inputs[key][3] = math.nan, math.inf
    for config in one_of_each(spec, problem, *WAYS):
        check = compare(spec, problem, launched(spec, problem, config, inputs), expected)
        assert check.passed, (config, check.reason)


# Results that ops write to the memory of inputs; the tuner and the other tests use separate memory.
IN_PLACE = {
    "advance": {"new_positions": "positions"},
    "adamw": {"new_param": "param", "new_exp_avg": "exp_avg", "new_exp_avg_sq": "exp_avg_sq"},
    "cross_entropy_backward": {"dlogits": "logits"},
    "cross_entropy_fused": {"dlogits": "logits"},
    "log_probs_backward": {"dlogits": "logits"},
    "logits_jsd_backward": {"gradient": "student"},
    "matmul": {"c": "addend"},
    "scale": {"y": "x"},
}


@pytest.mark.parametrize("name", IN_PLACE)
@examples(15)
@given(data=st.data())
def test_in_place_gives_the_same_bits(name, data):
    spec = spec_named(name)
    problem = data.draw(problems(spec), label="problem")
    problem = problem.but(accumulated=True) if name == "matmul" else problem
    if "vocabulary" in problem and data.draw(st.integers(0, 7), label="long") == 7:
        problem = problem.but(rows=3, vocabulary=data.draw(st.sampled_from([700, 8193]), label="vocabulary"))
    kernels = [config for config in configs(spec, problem) if not spec.is_library(problem, config)]
    config, blocks = data.draw(st.sampled_from(kernels), label="config"), None
    if config["schedule"] == "persistent":
        blocks = data.draw(st.sampled_from([None, 1, 3, 50]), label="blocks")
    inputs = plain_inputs(spec, problem)
    apart = launched(spec, problem, config, inputs, blocks)
    together = launched_in_place(spec, problem, config, inputs, IN_PLACE[name], blocks)
    for output, expected in apart.items():
        assert torch.equal(together[output], expected), output


# Kernels whose arrays are shared, gathered or packed; test_spaces.py has their bytes, counted by hand.
OTHER_BYTES = (
    "attention_forward", "attention_backward", "attention_dkdv", "attention_dq", "decode_attention",
    "fp8_grouped_turned", "fp8_grouped_weight", "fused_linear_", "gather_", "group_norm_backward", "grouped_sum",
    "labels", "linear_log_probs", "llama4_rope", "narrow_", "qk_norm", "qwen2vl", "rope", "router_losses",
    "skinny_held_linear", "token_attention",
)  # fmt: skip


@each([spec for spec in SPECS if not spec.name.startswith(OTHER_BYTES)])
@every_flag
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bytes_are_those_of_all_inputs_and_outputs(spec, dtype, flags):
    problem = sized(spec, dtype, rows=7, columns=84, flags=flags)
    read = [x.nbytes for x in plain_inputs(spec, problem).values() if isinstance(x, torch.Tensor) and x.numel() > 1]
    written = [math.prod(shape) * ITEM_BYTES[kind] for shape, kind in spec.outputs(problem, 1).values()]
    # One element is a parameter, or a placeholder for an array that a problem does not have.
    ones = [x.nbytes for x in plain_inputs(spec, problem).values() if isinstance(x, torch.Tensor) and x.numel() == 1]
    assert spec.bytes_moved(problem) - sum(read) - sum(written) in (0, sum(ones))


SIZES = {
    "columns": 1024, "vocabulary": 1024, "hidden": 256, "inner": 256, "heads": 16, "kv_heads": 8, "head_dim": 128,
    "pairs": 64, "experts": 16, "expert_groups": 2, "width": 256, "attended": 256,
}  # fmt: skip


def meets(tensor, assumed):
    """Return whether a tensor at an aligned address meets the assumptions of a variant."""
    strides = tensor.stride()
    if assumed["last_stride_one"] and strides[-1] != 1 and tensor.shape[-1] != 1:
        return False
    if any(stride % assumed["stride_elements"] for stride in strides[:-1]):
        return False
    return tensor.shape[-1] % assumed["extent_elements"] == 0


@each(compiled())
def test_odd_numbers_of_rows_are_aligned(spec):
    """Training runs the aligned variant: ordinary tensors of any number of rows must meet its assumptions."""
    even = sized(spec, "bfloat16", rows=64, tokens=64, queries=64, keys=64, batch=2, **SIZES)
    # Those of lay_out are bucketed too.
    columns = {"columns": even["columns"]} if "columns" in even else {}
    problem = odd_problem(spec, even, 61).but(**columns)
    config = spec.default(problem, resolve("H200" if runs_on(spec, resolve("H200")) else "B200"))
    config = spec.generic(problem) if spec.is_library(problem, config) else config
    implementation = spec.device(problem, config)
    arrays = plain_inputs(spec, problem)
    for name, (shape, dtype) in spec.outputs(problem, implementation.grid(problem, 132)).items():
        arrays[name] = torch.empty(shape, dtype=getattr(torch, dtype))
    for parameter, assumed in zip(implementation.parameters, assumptions(implementation, ALIGNED), strict=False):
        if isinstance(parameter, ArrayParameter):
            assert meets(arrays[parameter.name], assumed), (parameter, arrays[parameter.name].stride(), assumed)
