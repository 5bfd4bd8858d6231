"""A composite's config is timed by the kernels that it says, or not at all."""

from types import SimpleNamespace

import pytest
import torch

from tilekern.errors import CannotRun
from tilekern.kernels import spec_named
from tilekern.runtime import dispatch
from tilekern.spec import Config
from tilekern.tuning.measure.bench import Bench

SPEC = spec_named("attention_backward")
PROBLEM = SPEC.problem(
    batch=1, queries=32, keys=32, heads=2, kv_heads=1, head_dim=16, causal=True, windowed=False, capped=False,
    packed=False, dtype="bfloat16", deterministic=True,
)  # fmt: skip


@pytest.mark.parametrize("way", ["kept", "apart", "kernels"])
def test_a_config_whose_kernels_have_no_plan_is_not_timed_by_others(way, monkeypatch):
    monkeypatch.setenv("TILEKERN_INTERPRET", "1")
    dispatch.forget()
    real, bench = dispatch.plan_for, Bench.__new__(Bench)
    bench._spec = SPEC
    inputs = SPEC.inputs(PROBLEM, torch.Generator().manual_seed(0), "cpu")
    entrant = SimpleNamespace(candidate=SimpleNamespace(config=Config(implementation=way)))
    run = bench._launch(None, entrant, PROBLEM, inputs, {})
    assert len(run()) == 3

    def without_pieces(spec, *sizes):
        return None if spec.name.endswith("_kept") else real(spec, *sizes)

    monkeypatch.setattr(dispatch, "plan_for", without_pieces)
    if way == "kernels":
        assert len(run()) == 3
        return
    with pytest.raises(CannotRun, match=r"no cache holds attention_dkdv_kept at .*, which the config launches; tune"):
        run()
