"""Launches that overlap the one before on a GPU: each reads what the one before wrote, all of it."""

import pytest
import torch
from gpu_samples import compiled

from tilekern.compile.toolchain import toolkit
from tilekern.kernels import spec_named
from tilekern.spec.targets import here
from tilekern.tuning.verify.check import compare, expected_results

LINEAR = spec_named("early_linear")
ROWS, WIDTH, LAUNCHES = 1024, 768, 200

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")]


def problem_of(columns=WIDTH, *, biased=False, gelu_tanh=False):
    sizes = {"rows": ROWS, "inner": WIDTH, "columns": columns}
    return LINEAR.problem(**sizes, biased=biased, gelu_tanh=gelu_tanh, dtype="bfloat16")


def test_a_chain_of_products_moves_columns_as_their_weights_say():
    """Weights of one 1 in each row move columns without rounding; a block that does not wait reads older numbers."""
    problem, generator = problem_of(), torch.Generator("cuda").manual_seed(0)
    order = torch.randperm(WIDTH, generator=generator, device="cuda")
    weight = torch.eye(WIDTH, dtype=torch.bfloat16, device="cuda")[order].contiguous()
    first = torch.randn(ROWS, WIDTH, generator=generator, device="cuda").bfloat16()
    wanted = first
    for _ in range(LAUNCHES):
        wanted = wanted[:, order]
    known = {"weight": weight, "bias": weight.new_zeros(1)}
    found = [c for c in LINEAR.space.candidates(problem, here()) if c["more_n"]][:1]
    for config in [LINEAR.default(problem, here()), *found]:
        launch = compiled(LINEAR, problem, config, here())
        both = first.clone(), torch.empty_like(first)
        torch.cuda.synchronize()
        for number in range(LAUNCHES):
            launch(known | {"x": both[number % 2]}, {"y": both[1 - number % 2]})
        assert torch.equal(both[LAUNCHES % 2], wanted), config


@pytest.mark.parametrize("columns", [2304, 2056, 5003])
def test_default_tiles_are_right(columns):
    """Columns of whole shares, and with a rest."""
    problem = problem_of(columns, biased=True, gelu_tanh=True)
    inputs = LINEAR.inputs(problem, torch.Generator("cuda").manual_seed(0), "cuda")
    room = -(-columns // 8) * 8
    y = torch.empty(ROWS, room, dtype=torch.bfloat16, device="cuda")[:, :columns]
    found = compiled(LINEAR, problem, LINEAR.default(problem, here()), here())(inputs, {"y": y})
    check = compare(LINEAR, problem, found, expected_results(LINEAR, problem, inputs))
    assert check.passed, check.reason
