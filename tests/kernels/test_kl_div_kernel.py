import math

import pytest
import torch
from spec_samples import assert_right, configs, interpret, launched, one_of_each, sized

from tilekern.kernels import spec_named
from tilekern.spec.targets import INTERPRETED
from tilekern.tuning.verify.adversarial import one_hot_rows

ROWS, ELEMENTS = spec_named("kl_div_forward"), spec_named("kl_div_elements_forward")
SPECS = [spec_named(f"kl_div_{name}backward") for name in ("", "elements_")] + [ROWS, ELEMENTS]
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
    assert_right(spec, problem, configs(spec, problem), {"input": logs, "target": targets})


def test_every_probability_and_what_is_none_adds_what_torch_adds():
    """The entropies alone: logarithms of 0 take the other product out."""
    tiny = torch.finfo(torch.float32).tiny
    numbers = torch.cat([
        torch.linspace(0, 1, 4001), torch.logspace(-38, 6, 4001), 1 + torch.linspace(-1e-3, 1e-3, 101),
        torch.tensor([0.0, -0.0, tiny, tiny / 8, 1.0, math.inf, -1.0, -tiny, -math.inf, math.nan]),
    ])[None]  # fmt: skip
    problem = sized(ELEMENTS, rows=1, columns=numbers.shape[1]).but(log_target=False)
    inputs = {"input": torch.zeros_like(numbers), "target": numbers}
    made = launched(ELEMENTS, problem, ELEMENTS.default(problem, INTERPRETED), inputs)
    expected = torch.xlogy(numbers.double(), numbers.double()) - numbers * 0
    assert torch.equal(made["loss"].isnan(), expected.isnan())
    torch.testing.assert_close(made["loss"].double(), expected, rtol=3e-7, atol=1.5e-7, equal_nan=True)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@forms
def test_inputs_are_what_the_target_is_taken_for_whatever_is_drawn(spec, log_target, monkeypatch):
    """Of a long row with one large number in the place of normal ones, the exponential would not fit float32."""
    problem = sized(spec, rows=3, columns=20000).but(log_target=log_target)
    randn = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *size, **rest: one_hot_rows(0, randn(*size, **rest)))
    inputs = spec.inputs(problem, torch.Generator().manual_seed(0), "cpu")
    assert bool((-inputs["target"] if log_target else inputs["target"]).ge(0).all())
    assert_right(spec, problem, configs(spec, problem)[:2], inputs)


@forms
@pytest.mark.parametrize("columns", [83, 1500, 20000])
def test_what_is_beyond_the_end_of_a_row_adds_nothing(log_target, columns):
    """Zeros there would add exp(0) * 0, or 0 * log(0)."""
    problem = sized(ROWS, rows=3, columns=columns).but(log_target=log_target)
    inputs = ROWS.inputs(problem, torch.Generator().manual_seed(0), "cpu")
    for config in one_of_each(ROWS, problem, "passes", "tile_n"):
        check = interpret(ROWS, problem, config, inputs)
        assert check.relative_error < 1e-6, (config, check.reason)
