import pytest
import torch
from experts_samples import GATES, by_loop, layer, results, wide

import tilekern
from tilekern import ops

TOLERANCES = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def launches():
    return {name: counts["launches"] for name, counts in tilekern.stats().items() if counts["launches"]}


def differences(given, **how):
    """The relative error of the result and of each gradient."""
    slope = torch.randn(given["x"].shape, generator=torch.Generator().manual_seed(1))
    found = results(ops.experts, given, slope, **how)
    expected = results(by_loop, wide(given), slope, **how)
    assert found.keys() == expected.keys()
    for name, x in found.items():
        assert x.shape == expected[name].shape
        assert x.dtype == (given[name] if name in given else given["x"]).dtype
    return {
        name: float((found[name].double() - x).norm() / (x.norm() if float(x.norm()) else 1.0))
        for name, x in expected.items()
    }


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("biased", [False, True])
def test_result_and_gradients_are_those_of_a_loop_in_float64(gate, biased):
    given = layer(11, 3, 5, 7, 9, biased=biased, transposed=biased)
    before = launches().get("experts_gate", 0)
    errors = differences(given, **GATES[gate])
    assert max(errors.values()) < TOLERANCES[torch.float32], errors
    assert launches()["experts_gate"] == before + 1


@pytest.mark.parametrize(("tokens", "choices", "experts"), [(1, 1, 1), (3, 8, 16), (40, 2, 3), (700, 1, 4), (5, 5, 4)])
def test_any_number_of_choices_and_experts(tokens, choices, experts):
    errors = differences(layer(tokens, choices, experts, 8, 16))
    assert max(errors.values()) < TOLERANCES[torch.float32], errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_halves_of_precision_with_weights_of_another_dtype(dtype, weight_dtype):
    given = layer(13, 4, 6, 16, 24, dtype=dtype, weight_dtype=weight_dtype, biased=True, transposed=True)
    errors = differences(given, **GATES["gpt_oss"])
    assert max(errors.values()) < TOLERANCES[dtype], errors
