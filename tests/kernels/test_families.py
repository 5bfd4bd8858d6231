"""What the families over matrices derive from a kernel's arrays."""

import math

import pytest
import torch
from spec_samples import SPECS, assert_right, configs, inputs_of, one_of_each, sized

from tilekern.kernels import spec_named
from tilekern.spec import ITEM_BYTES
from tilekern.spec.targets import resolve

# The other families' tiles are not of rows and columns, or a problem may lack one of their arrays: they have tests of
# their own.
FAMILIES = tuple(f"tilekern.kernels.families.{name}" for name in ("elements", "losses", "rows"))
MEMBERS = [spec for spec in SPECS if spec.bytes_moved.__module__ in FAMILIES]


every_member = pytest.mark.parametrize("spec", MEMBERS, ids=lambda spec: spec.name)


@every_member
@pytest.mark.parametrize(("rows", "columns"), [(1, 4096), (3, 5121), (2, 9000), (3, 20000)])
def test_long_rows(spec, rows, columns):
    """Rows of several tiles, and rows so long that they are read twice, by a config of each way to go over them."""
    problem = sized(spec, "bfloat16", rows=rows, columns=columns)
    inputs = inputs_of(spec, problem)
    assert_right(spec, problem, one_of_each(spec, problem, "schedule", "passes", "tile_n"), inputs)


@pytest.mark.parametrize("spec", [spec for spec in MEMBERS if "partial" in spec.outputs(sized(spec), 1)])
def test_rows_beyond_the_last_add_nothing_to_the_sums_though_their_rstd_is_infinite(spec):
    problem = sized(spec, rows=5, columns=83)
    inputs = inputs_of(spec, problem) | {"eps": 0.0}
    several = [config for config in configs(spec, problem) if config["tile_m"] > 1]
    assert_right(spec, problem, several[:4], inputs)


@every_member
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bytes_are_those_of_all_inputs_and_outputs(spec, dtype):
    problem = sized(spec, dtype, rows=7, columns=84)
    inputs = spec.inputs(problem, torch.Generator().manual_seed(0), "cpu")
    read = sum(x.nbytes for x in inputs.values() if isinstance(x, torch.Tensor))
    written = sum(math.prod(shape) * ITEM_BYTES[kind] for shape, kind in spec.outputs(problem, 1).values())
    assert spec.bytes_moved(problem) == read + written


def test_sums_are_added_up_and_taken_apart_by_name():
    spec = spec_named("layer_norm_backward")
    partial = torch.arange(12.0).view(2, 6)
    found = spec.results({"dx": torch.ones(1), "partial": partial})
    assert {name: x.tolist() for name, x in found.items()} == {
        "dx": [1.0], "dweight": [6.0, 8.0, 10.0], "dbias": [12.0, 14.0, 16.0],
    }  # fmt: skip


def test_kernels_that_hold_more_run_fewer_blocks_on_an_sm():
    spec = spec_named("layer_norm_forward")
    problem = sized(spec, "bfloat16", rows=4096, columns=4096)
    target = resolve("H200")
    full = spec.default(problem, target)
    assert spec.space.violated(problem, full, target) is None
    assert "2 live values" in spec.space.violated(problem, full.but(tile_m=2), target)
