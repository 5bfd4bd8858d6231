import pytest
import torch
from spec_samples import interpret, launched, sized

from tilekern.kernels import spec_named
from tilekern.spec.targets import INTERPRETED

FORWARD, BACKWARD = spec_named("geglu_forward"), spec_named("geglu_backward")
forms = pytest.mark.parametrize("tanh", [False, True])


@forms
@pytest.mark.parametrize("spec", [FORWARD, BACKWARD], ids=lambda spec: spec.name)
def test_gates_far_from_zero_are_right(spec, tanh):
    """There gelu is 0 or the gate itself, and its exponentials overflow or vanish."""
    problem = sized(spec, rows=4, columns=256).but(tanh=tanh)
    inputs = spec.inputs(problem, torch.Generator().manual_seed(0), "cpu")
    for scale in (5.0, 50.0, 1e4):
        check = interpret(spec, problem, spec.default(problem, INTERPRETED), inputs | {"gate": inputs["gate"] * scale})
        assert check.passed, (scale, check.reason)


def test_the_exact_form_differs_from_that_by_tanh_as_erf_does():
    """Element by element, no further from erf than torch's float32 is from float64 by some units."""
    problem = sized(FORWARD, rows=1, columns=4096).but(tanh=False)
    gate = torch.linspace(-8, 8, 4096)[None]
    given = {"gate": gate, "up": torch.ones_like(gate)}
    made = launched(FORWARD, problem, FORWARD.default(problem, INTERPRETED), given, 4)
    exact = torch.nn.functional.gelu(gate.double())
    assert (made["y"].double() - exact).abs().max() < 1e-6
    by_tanh = torch.nn.functional.gelu(gate.double(), approximate="tanh")
    assert (by_tanh - exact).abs().max() > 1e-4
