import pytest
import torch
from spec_samples import assert_right, configs, inputs_of, interpret, one_of_each, plain_inputs, sized

from tilekern.kernels import spec_named
from tilekern.kernels.families.stripes import groups_of, stripe_of, stripes_of
from tilekern.spec.targets import resolve

FORWARD, BACKWARD, SUMS = (spec_named(f"dyt_{name}") for name in ("forward", "backward", "sums"))


def test_numbers_near_0_keep_their_digits():
    """1 - exp(-2 u) keeps one digit of a u of 1e-6, the series all; they meet at 1/4."""
    problem = sized(FORWARD, rows=2, columns=2000, flags=False)
    inputs = plain_inputs(FORWARD, problem)
    tiny = torch.logspace(-30, -6, 1000)
    inputs |= {"alpha": torch.ones(1), "gamma": torch.cat((1 / tiny, torch.ones(1000)))}
    inputs["x"] = torch.cat((tiny, torch.linspace(-0.5, 0.5, 1000))).repeat(2, 1)
    check = interpret(FORWARD, problem, FORWARD.generic(problem), inputs)
    assert check.elementwise_error < 3e-7, check.reason


@pytest.mark.parametrize("flags", [False, True])
@pytest.mark.parametrize("columns", [1500, 5121])
def test_rows_of_several_stripes(columns, flags):
    """Run one block for each group, one block for all stripes, and more blocks than rows."""
    problem = sized(BACKWARD, "bfloat16", rows=7, columns=columns, flags=flags)
    inputs = inputs_of(BACKWARD, problem)
    ways = one_of_each(BACKWARD, problem, "tile_m", "tile_n")
    for config, blocks in zip(ways, [None, 1, 3, None, 40, *[None] * len(ways)], strict=False):
        assert_right(BACKWARD, problem, [config], inputs, blocks)


def test_stripes_waste_little_and_partial_sums_are_few():
    assert [stripe_of(n) for n in (7, 300, 1100, 4096, 4608, 11008)] == [8, 256, 256, 1024, 1024, 1024]
    assert all(stripes_of(n) * stripe_of(n) <= 1.125 * n for n in range(2048, 20000, 37))
    problem = sized(BACKWARD, "bfloat16", rows=8192, columns=4096, flags=True)
    config = BACKWARD.default(problem, resolve("H200"))
    blocks = BACKWARD.device(problem, config).grid(problem, 132)
    assert blocks % stripes_of(4096) == 0
    assert BACKWARD.outputs(problem, blocks)["partial"][0] == (groups_of(blocks, 4096), 2 * 4096)
    assert groups_of(blocks, 4096) == blocks // 4


def test_numbers_near_0_are_rounded_once_in_16_bits():
    """Below 2^-8 tanh is a straight line; gamma makes all results about 1."""
    problem = sized(FORWARD, "bfloat16", rows=2, columns=2000, flags=False)
    inputs = plain_inputs(FORWARD, problem)
    x = torch.cat((torch.logspace(-30, 1, 1000), -torch.logspace(-3, -2, 1000))).bfloat16()
    inputs |= {"x": x.repeat(2, 1), "alpha": torch.ones(1).bfloat16(), "gamma": (1 / x.float()).bfloat16()}
    check = interpret(FORWARD, problem, FORWARD.generic(problem), inputs)
    assert check.elementwise_error < 1.02 * 2**-8, check.reason


@pytest.mark.parametrize("flags", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(1, 5), (37, 300), (300, 1500)])
def test_all_sums_are_added_up_by_any_number_of_blocks(rows, columns, flags):
    problem = sized(SUMS, "bfloat16", rows=rows, columns=columns, flags=flags)
    inputs = inputs_of(SUMS, problem)
    for config, blocks in zip(configs(SUMS, problem)[::5], [None, 1, 3, 200, None], strict=False):
        assert_right(SUMS, problem, [config], inputs, blocks)


def test_a_few_rows_take_few_blocks():
    problem = sized(BACKWARD, "bfloat16", rows=3, columns=4096)
    config = BACKWARD.default(problem, resolve("H200"))
    assert BACKWARD.device(problem, config).grid(problem, 132) == -(-3 // config["tile_m"]) * 4
