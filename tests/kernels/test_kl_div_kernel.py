import math

import pytest
import torch
from spec_samples import configs, interpret, sized

from tilekern.kernels import spec_named

ROWS, ELEMENTS = spec_named("kl_div_forward"), spec_named("kl_div_elements_forward")
both = pytest.mark.parametrize("spec", [ROWS, ELEMENTS], ids=lambda spec: spec.name)
forms = pytest.mark.parametrize("log_target", [False, True])


@both
@forms
def test_infinite_logarithms_and_probabilities_of_0_give_what_torch_gives(spec, log_target):
    least = -math.inf if log_target else 0.0
    logs = torch.tensor([[-math.inf, -1.0, 0.0], [-1.0, -1.0, -2.0], [-math.inf, -2.0, -1.0]])
    targets = torch.tensor([[least, 0.5, 0.5], [least, 0.5, 0.5], [0.5, least, 0.5]])
    if log_target:
        targets[1, 0] = -200.0  # exp gives 0
    problem = sized(spec, rows=3, columns=3).but(log_target=log_target)
    for config in configs(spec, problem):
        check = interpret(spec, problem, config, {"input": logs, "target": targets})
        assert check.passed, (config, check.reason)


@forms
@pytest.mark.parametrize("columns", [83, 1500, 20000])
def test_what_is_beyond_the_end_of_a_row_adds_nothing(log_target, columns):
    """Zeros there would add exp(0) * 0, or 0 * log(0)."""
    problem = sized(ROWS, rows=3, columns=columns).but(log_target=log_target)
    inputs = ROWS.inputs(problem, torch.Generator().manual_seed(0), "cpu")
    found = {(config["passes"], config["tile_n"]): config for config in configs(ROWS, problem)}
    for config in found.values():
        check = interpret(ROWS, problem, config, inputs)
        assert check.relative_error < 1e-6, (config, check.reason)
