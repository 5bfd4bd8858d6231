import pytest
import torch
from spec_samples import assert_right, inputs_of, interpret, one_of_each, sized

from tilekern.kernels import spec_named
from tilekern.spec.targets import KNOWN

FORWARD, BACKWARD = spec_named("group_norm_forward"), spec_named("group_norm_backward")
both = pytest.mark.parametrize("spec", [FORWARD, BACKWARD], ids=lambda spec: spec.name)
# Channels of a group and positions: some groups a step, one, and groups that no step holds, in pieces of each form.
SIZES = [(2, 9), (5, 300), (3, 5000), (20, 700), (200, 49), (9000, 1)]
# The shape of tiles.
WAYS = ("tile_g", "tile_c", "tile_n")


@both
@pytest.mark.parametrize(("channels", "positions"), SIZES)
@pytest.mark.share(8)
def test_groups_of_every_size(spec, channels, positions):
    problem = sized(spec, "bfloat16", batch=2, groups=3, channels=channels, positions=positions)
    inputs = inputs_of(spec, problem)
    assert_right(spec, problem, one_of_each(spec, problem, *WAYS), inputs)


@both
@pytest.mark.parametrize(("channels", "positions"), [(3, 83), (3, 5000)])
def test_a_mean_far_from_zero_costs_no_more_than_its_own_rounding(spec, channels, positions):
    problem = sized(spec, batch=1, groups=2, channels=channels, positions=positions)
    inputs = spec.inputs(problem, torch.Generator().manual_seed(0), "cpu")
    inputs["x"] += 256
    for config in one_of_each(spec, problem, *WAYS):
        assert interpret(spec, problem, config, inputs).relative_error < 1e-4, config


@both
@pytest.mark.parametrize(("channels", "positions"), SIZES)
@pytest.mark.parametrize("target", KNOWN, ids=lambda target: target.key)
def test_there_are_candidates_and_an_allowed_default(spec, channels, positions, target):
    problem = spec.bucketed(sized(spec, batch=16, groups=32, channels=channels, positions=positions))
    default = spec.default(problem, target)
    assert spec.space.violated(problem, default, target) is None, default
    assert next(spec.space.candidates(problem, target), None) is not None
