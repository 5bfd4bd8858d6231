"""What the families derive from a kernel's arrays."""

import math

import pytest
import torch
from spec_samples import SPECS, sized

from tilekern.kernels import spec_named
from tilekern.spec import ITEM_BYTES
from tilekern.targets import resolve

MEMBERS = [spec for spec in SPECS if ".common." in spec.bytes_moved.__module__]


@pytest.mark.parametrize("spec", MEMBERS, ids=lambda spec: spec.name)
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
    full = spec.default(problem, target).but(tile_m=2)
    assert spec.space.violated(problem, full, target) is None
    assert "3 live values" in spec.space.violated(problem, full.but(tile_m=4), target)
