"""8-bit floats at the widths of models whose kernels are shipped: no compiler, no miss, no fallback."""

import json
from pathlib import Path

import pytest
from gpu_processes import ended

from tilekern.spec.targets import here, resolve

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("preset", ["qwen3-8b", "llama-3.2-3b", "gemma-3-4b", "qwen2.5-1.5b", "phi-4-mini"])
def test_a_step_finds_all_its_kernels(preset, tmp_path):
    if here().key != resolve("H200").key:
        pytest.skip("records are shipped for an H200")
    # A kernel without a record would raise.
    script = Path(__file__).with_name("fp8_from_packs.py")
    run = ended(script, preset, TILEKERN_CACHE_DIR=str(tmp_path), TILEKERN_ON_MISS="error")
    assert run.returncode == 0, run.stderr[-2000:]
    counts = json.loads(run.stdout.splitlines()[-1])
    assert set(counts) == {"fp8_matmul", "fp8_rows", "fp8_turned", "fp8_gated_forward", "fp8_gated_backward"}
    for kernel, (launches, fallbacks, misses) in counts.items():
        assert launches, kernel
        assert not fallbacks, kernel
        assert not misses, kernel
