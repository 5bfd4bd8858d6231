"""The candidate that launches of a kernel of decoding alternate with: the one that fills the GPU's shared memory."""

import pytest

from tilekern.kernels import spec_named
from tilekern.spec import ALIGNED
from tilekern.spec.targets import resolve
from tilekern.tuning.measure.bench import filled_bytes
from tilekern.tuning.measure.tasks import Entrant
from tilekern.tuning.sweep.candidates import candidate

H200 = resolve("H200")
SPEC = spec_named("skinny_linear")


@pytest.mark.parametrize(
    ("columns", "tile_n", "shared_kib", "filled_kib"),
    [
        (4096, 64, 200, 64 * 200),  # 64 blocks, and 68 SMs have none
        (4096, 32, 200, 128 * 200),
        (12288, 64, 100, 192 * 100),  # two blocks of 100 KiB fit an SM
        (12288, 64, 120, 132 * 120),  # one
        (151936, 64, 100, 264 * 100),
    ],
)
def test_shared_memory_of_blocks_that_are_resident_at_once(columns, tile_n, shared_kib, filled_kib):
    problem = SPEC.problem(**SPEC.with_flags_off({"rows": 8, "inner": 4096, "columns": columns, "dtype": "bfloat16"}))
    config = SPEC.default(problem, H200).but(tile_n=tile_n, tile_m=8 if tile_n == 64 else 16)
    item = candidate(SPEC.name, problem, config, ALIGNED, H200)
    assert filled_bytes(Entrant(item, {"resources": {"shared_bytes": shared_kib << 10}}), H200) == filled_kib << 10
