"""Kernels of a token that are chosen in the engine's own step on the GPU, by the tuner's whole pipeline."""

import engine_models
import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from tilekern.cache import Store
from tilekern.compile.toolchain import toolkit
from tilekern.inference import load
from tilekern.runtime import dispatch
from tilekern.spec.targets import here
from tilekern.tuning.pipeline import Options, Pipeline
from tilekern.tuning.plan.engine import plan_of_engine, problems_of_token
from tilekern.tuning.plan.steps import Steps
from tilekern.tuning.rehearse import stage
from tilekern.tuning.sweep.candidates import candidates
from tilekern.tuning.sweep.folder import Sweep

CONFIG = GPT2Config(vocab_size=5003, n_embd=192, n_layer=2, n_head=6, n_positions=256)
PROMPT, NEW = [*range(100, 170)], 24
# Of each problem, so that the test takes seconds.
MOST_CONFIGS = 5
pytestmark = pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")


@pytest.fixture(autouse=True)
def compiled():
    dispatch.set_miss_policy("compile")
    yield
    dispatch.set_miss_policy(None)
    dispatch.forget()


@pytest.fixture
def swept(tmp_path, monkeypatch):
    """A sweep of a token's problems with few configs each, nearly all of which are tried in the step."""
    monkeypatch.setattr(stage, "_NEAR", 3.0)
    target = here()
    plan = plan_of_engine(CONFIG, Steps(tokens=(), decode=(1,), context=(256,), engine=True), target)
    problems = [named for named in plan.problems if named in set(problems_of_token(plan.tokens[0], target)[1])]
    limits = {}
    for kernel, problem in problems:
        able = [item.config for item in candidates(kernel, problem, target)[:-1] if not item.is_library]
        limits[kernel, problem] = able[:: max(1, len(able) // MOST_CONFIGS)][:MOST_CONFIGS]
    sweep = Sweep(tmp_path / "sweep")
    sweep.begin(target, plan.name, problems, limits, launches=plan.launches, tokens=plan.tokens)
    return sweep


def tokens_of(folder):
    dispatch.forget()
    return [token for (token,) in load(folder, context=256).generate([PROMPT], NEW, ignores_ends=True)]


def test_records_are_chosen_in_the_step_and_generate_the_same_tokens(swept, tmp_path, monkeypatch):
    monkeypatch.setenv("TILEKERN_CACHE_DIR", str(tmp_path / "defaults"))
    engine_models.save(GPT2LMHeadModel, CONFIG, tmp_path / "model")
    wanted, store = tokens_of(tmp_path / "model"), Store(tmp_path / "cache")
    result = Pipeline(swept, store, Options(["compile", "measure"])).run()
    assert not [note for note in result.notes if "does not run" in note or "left out of" in note]
    assert result.step["chosen"] > 3
    assert result.step["tried"] >= result.step["chosen"] >= result.step["changed"]
    chosen = {winner.kernel: winner.in_step for winner in result.winners if winner.in_step}
    for facts in chosen.values():
        assert (facts["of"], facts["layers"]) == (str(swept.tokens[0]), 2)
        assert 5 < facts["token_us"] <= facts["otherwise_us"] < 5000
    assert len(chosen) >= 3
    for winner in result.winners:
        assert not winner.in_step or winner.record.check["cases"]
    monkeypatch.setenv("TILEKERN_CACHE_DIR", str(tmp_path / "cache"))
    found = tokens_of(tmp_path / "model")
    same = next((at for at, pair in enumerate(zip(found, wanted, strict=True)) if pair[0] != pair[1]), NEW)
    assert same >= NEW // 3, "kernels of other configs may round differently, but not the first tokens"
    again = Pipeline(Sweep(swept.folder), store, Options(["measure"])).run()
    assert again.step["chosen"] == 0, "what is chosen stays"
    assert {w.kernel: w.in_step for w in again.winners if w.in_step} == chosen
