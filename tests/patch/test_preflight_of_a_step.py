"""What a preflight says that a job needs is what a real step of a patched model asks for."""

import pytest
import torch
from tiny_qwen3 import IDS, SINGLE, make, step

import tilekern
from tilekern import dispatch, toolchain
from tilekern.kernels import spec_named
from tilekern.targets import resolve
from tuning.preflight import COMPILE, EXACT, MISSING, OWN, fix

H200 = resolve("H200")
SEQUENCE = IDS.shape[1]
TOKENS = IDS.numel()
OPS = ["rms_norm", "swiglu", "qk_norm_rope", "fused_add_rms_norm", "fused_linear_cross_entropy"]


@pytest.fixture
def step_on_an_h200(interpreted, monkeypatch, tmp_path):
    """The plans of a step that the interpreter runs with an H200's defaults and grids: kernel, sizes."""
    monkeypatch.delenv("TILEKERN_CACHE_PATH", raising=False)
    monkeypatch.setenv("TILEKERN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(dispatch, "INTERPRETED", H200)

    def run(attention="eager", ids=None, **switches):
        tilekern.apply(**switches)
        model = make(attention=attention).train().to(torch.bfloat16)
        if ids is None:
            step(model)
        else:
            model(input_ids=ids, labels=ids).loss.backward()
        return model, [(spec_named(key[0]), key[2:]) for key in dispatch._plans]

    return run


def problem_of(spec, sizes):
    named = zip(spec.dimensions, sizes, strict=True)
    values = {d.name: str(x).removeprefix("torch.") if d.kind == "dtype" else x for d, x in named}
    return spec.bucketed(spec.problem(**values))


@pytest.mark.parametrize("attention", ["eager", "tilekern"])
@pytest.mark.parametrize("switches", [{}, SINGLE], ids=["fused", "single"])
def test_each_problem_that_a_step_asks_for_is_in_the_plan(step_on_an_h200, attention, switches):
    model, asked = step_on_an_h200(attention, **switches)
    found = tilekern.preflight(model, [TOKENS], sequence=[SEQUENCE], gpu="H200")
    planned = {(need.kernel, need.problem) for need in found.needs}
    lacking = {(spec.name, problem_of(spec, sizes)) for spec, sizes in asked} - planned
    assert not lacking
    kernels = {spec.name for spec, _ in asked}
    assert {"rms_norm_backward", "swiglu_forward", "column_sum"} <= kernels
    assert ("attention_forward" in kernels) == (attention == "tilekern")
    assert ("cross_entropy_fused" in kernels) == (not switches)


@pytest.mark.parametrize("tokens", [1, 33, 600, 1100])
def test_steps_of_odd_lengths_are_planned_too(step_on_an_h200, tokens):
    """Beyond a chunk of the fused loss, with a part that is left over."""
    ids = torch.arange(tokens).remainder(331).view(1, -1)
    model, asked = step_on_an_h200(ids=ids)
    planned = {(need.kernel, need.problem) for need in tilekern.preflight(model, [tokens], gpu="H200").needs}
    assert not {(spec.name, problem_of(spec, sizes)) for spec, sizes in asked} - planned


@pytest.mark.skipif(toolchain.toolkit() is None, reason="no tile compiler is installed")
@pytest.mark.slow
def test_after_a_fix_of_an_empty_cache_the_same_step_misses_nothing(step_on_an_h200, monkeypatch):
    model, asked = step_on_an_h200()
    given = {"tokens": [TOKENS], "sequence": [SEQUENCE], "gpu": "H200", "ops": OPS, "need": OWN}
    before = tilekern.preflight(model.config, **given)
    assert len(before.missing) > len(asked) / 2
    assert any(need.state == MISSING for need in before.needs)
    after = fix(before, COMPILE)
    assert after.missing == []
    assert {need.state for need in after.needs} == {EXACT}

    monkeypatch.delenv("TILEKERN_INTERPRET")
    monkeypatch.setattr(dispatch, "here", lambda _device=None: H200)
    monkeypatch.setattr(dispatch, "_counters", {})
    dispatch.forget()
    dispatch.set_miss_policy("error")
    for spec, sizes in asked:
        assert dispatch.plan_for(spec, torch.device("cuda", 0), *sizes) is not None
    counted = tilekern.stats()
    assert sum(counts["misses"] + counts["nearest"] + counts["fallbacks"] for counts in counted.values()) == 0
    assert sum(counts["hits"] for counts in counted.values()) == len(asked)
