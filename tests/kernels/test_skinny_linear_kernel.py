"""Linear layers of few rows, beside the tests of all specs."""

import itertools

import pytest
import torch
from spec_samples import assert_right, both_defaults, configs, inputs_of, launched, one_of_each

from tilekern.kernels import spec_named
from tilekern.kernels.matmul.space import is_tile
from tilekern.kernels.skinny.linear import sizes
from tilekern.kernels.skinny.split import FLAGS, JOIN
from tilekern.kernels.skinny.tiles import count
from tilekern.runtime.dispatch import counters
from tilekern.spec import Config
from tilekern.spec.targets import INTERPRETED, KNOWN, resolve
from tilekern.tuning.measure.stage import is_composite

SPEC, PROJECTIONS = spec_named("skinny_linear"), spec_named("skinny_projections")
EPILOGUES = ("gated", *FLAGS)
# The shapes of tiles, and how the tiles are gone over.
SHAPES = ("tile_m", "tile_n", "tile_k")


def problem_of(rows, inner, columns, *on, dtype="bfloat16"):
    return SPEC.problem(**sizes(rows, inner, columns, dtype, on))


def some(problem, *axes):
    """The first tile config of each combination of values of some axes."""
    return [config for config in one_of_each(SPEC, problem, *axes) if is_tile(config)]


@pytest.mark.parametrize("on", [on for n in range(6) for on in itertools.combinations(EPILOGUES, n)], ids="-".join)
def test_every_epilogue_with_tails_on_all_sides(on):
    problem = problem_of(5, 150, 131, *on, dtype="float32")
    assert_right(SPEC, problem, both_defaults(SPEC, problem), inputs_of(SPEC, problem))


@pytest.mark.parametrize("rows", [1, 8, 9, 33, 64, 65, 150])
def test_any_number_of_rows_by_every_shape_of_tile(rows):
    """More rows than a tile holds take several."""
    problem = problem_of(rows, 300, 70, "gated", "silu", dtype="float32")
    assert_right(SPEC, problem, some(problem, *SHAPES), inputs_of(SPEC, problem))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_leaves_the_bits_of_the_others(value):
    problem = problem_of(9, 300, 70, "gated", "biased", "accumulated")
    inputs = inputs_of(SPEC, problem)
    spoilt = {name: x.clone() for name, x in inputs.items()}
    spoilt["x"][4] = value
    others = [row for row in range(9) if row != 4]
    for config in some(problem, *SHAPES):
        wanted, found = (launched(SPEC, problem, config, given)["y"] for given in (inputs, spoilt))
        assert torch.equal(found[others], wanted[others])
        assert not found[4].isfinite().any()


def test_gate_factor_and_addend_are_rounded_once():
    """bfloat16 has no 1 + 2^-8 and no 257: rounded between, the result would be 0."""
    problem = problem_of(1, 2, 1, "gated", "accumulated")
    inputs = {
        "x": torch.tensor([[1, 2**-8]]), "weight": torch.ones(1, 2), "up": torch.tensor([[256.0, 0.0]]),
        "bias": torch.zeros(1), "addend": torch.tensor([[-256.0]]),
    }  # fmt: skip
    inputs = {name: x.bfloat16() for name, x in inputs.items()}
    for config in both_defaults(SPEC, problem):
        assert launched(SPEC, problem, config, inputs)["y"].item() == 1


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_a_rounded_gate_has_the_bits_of_its_parts(kind):
    problem = problem_of(9, 300, 70, "gated", "rounded", kind)
    inputs = inputs_of(SPEC, problem)
    inputs["weight"] = 8 * inputs["weight"]
    spec = spec_named("swiglu_forward" if kind == "silu" else "geglu_forward")
    of_parts = spec.problem(rows=9, columns=70, dtype="bfloat16", **({} if kind == "silu" else {"tanh": True}))
    for config in some(problem, *SHAPES):
        gate, up = (
            launched(SPEC, problem_of(9, 300, 70), config, inputs | {"weight": inputs[name]})["y"]
            for name in ("weight", "up")
        )
        right = launched(spec, of_parts, spec.default(of_parts, INTERPRETED), {"gate": gate, "up": up})["y"]
        assert torch.equal(launched(SPEC, problem, config, inputs)["y"], right)
    once = launched(SPEC, problem_of(9, 300, 70, "gated", kind), config, inputs)["y"]
    assert not torch.equal(once, right)


@pytest.mark.parametrize(("rows", "columns", "others"), [(1, 128, 64), (9, 70, 131), (70, 150, 5)])
def test_projections_have_the_bits_of_each_product_alone(rows, columns, others):
    problem = PROJECTIONS.problem(rows=rows, inner=300, columns=columns, kv_columns=others, dtype="bfloat16")
    inputs = inputs_of(PROJECTIONS, problem)
    for config in filter(is_tile, [*configs(PROJECTIONS, problem), *both_defaults(PROJECTIONS, problem)]):
        found = launched(PROJECTIONS, problem, config, inputs)
        for name, across in (("q", columns), ("k", others), ("v", others)):
            weight = inputs[f"{name}_weight"]
            given = inputs_of(SPEC, problem_of(rows, 300, across)) | {"x": inputs["x"], "weight": weight}
            assert torch.equal(found[name], launched(SPEC, problem_of(rows, 300, across), config, given)["y"])


@pytest.mark.parametrize("target", KNOWN, ids=lambda target: target.key)
def test_spaces_are_small_and_tiles_have_instructions(target):
    """An instruction of the matrix units has 16 x 8 sums, and each of four warps runs one."""
    for rows, columns, on in ((1, 1024, ()), (16, 4096, ("biased",)), (64, 12288, ("gated", "silu")), (1, 151936, ())):
        problem = problem_of(rows, 4096, columns, *on)
        found = list(SPEC.space.candidates(problem, target))
        assert 8 <= len(found) <= 48
        assert [config["implementation"] for config in found].count("cublas") == 1
        for config in [*filter(is_tile, found), SPEC.generic(problem)]:
            assert config["tile_m"] * config["tile_n"] >= 4 * 16 * 8


@pytest.mark.parametrize(("columns", "inner", "on", "splits"), [
    (4096, 4096, (), [2, 4]), (1024, 4096, ("biased",), [8]), (1024, 12288, (), [8, 16]), (12288, 4096, (), []),
    (4096, 4096, ("gated",), []), (4096, 512, (), []),
])  # fmt: skip
def test_sums_are_split_where_whole_ones_would_leave_sms_idle(columns, inner, on, splits):
    """The tuner then has the parts' kernels first."""
    problem, target = problem_of(8, inner, columns, *on), resolve("H200")
    configs = list(SPEC.space.candidates(problem, target))
    assert [config["splits"] for config in configs if "splits" in config] == splits
    assert is_composite(SPEC.name, problem, configs) == bool(splits)


@pytest.mark.parametrize("splits", [2, 3, 8])
@pytest.mark.parametrize("on", [(), ("biased", "silu"), ("gelu_tanh", "accumulated")], ids="-".join)
def test_split_sums_have_every_epilogue_and_may_have_empty_parts(splits, on):
    """300 terms are three steps of 128."""
    problem, config = problem_of(9, 300, 70, *on), Config(implementation="split", splits=splits)
    before = counters("skinny_join").launches
    assert_right(SPEC, problem, [config], inputs_of(SPEC, problem))
    assert counters("skinny_join").launches == before + 1


def test_parts_are_added_in_their_order():
    """Backwards, or by pairs, both ones would be lost beside 1e8."""
    parts = torch.tensor([1e8, 1.0, -1e8, 1.0]).view(4, 1, 1)
    problem = JOIN.problem(rows=1, columns=1, splits=4, dtype="float32", **dict.fromkeys(FLAGS, False))
    inputs = {"parts": parts, "bias": torch.zeros(1), "addend": torch.zeros(1, 1)}
    for config in configs(JOIN, problem):
        assert launched(JOIN, problem, config, inputs)["y"].item() == 1


@pytest.mark.parametrize(("columns", "tile_n", "blocks"), [(1024, 16, 64), (4096, 32, 128), (12288, 64, 192)])
def test_the_default_has_tiles_so_narrow_that_most_sms_read(columns, tile_n, blocks):
    problem = problem_of(8, 4096, columns)
    config = SPEC.default(problem, resolve("H200"))
    assert (config["tile_n"], count(problem, config)) == (tile_n, blocks)


@pytest.mark.parametrize("target", KNOWN, ids=lambda target: target.key)
def test_float32_is_left_to_the_library_on_a_gpu_and_exact_in_the_interpreter(target):
    problem = problem_of(8, 80, 96, "gated", dtype="float32")
    assert [is_tile(config) for config in SPEC.space.candidates(problem, target)] == [False]
    assert SPEC.is_library(problem, SPEC.default(problem, target))
    assert any(is_tile(config) for config in configs(SPEC, problem))
    assert is_tile(SPEC.default(problem, INTERPRETED))
