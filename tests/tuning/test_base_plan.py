"""The base plan, and how much of a model that is not in it finds its kernels there."""

from collections import Counter
from pathlib import Path

import pytest
import transformers

from tilekern.errors import InputError
from tilekern.kernels import spec_named
from tilekern.spec.targets import resolve
from tilekern.tuning.options import PlanRequest
from tilekern.tuning.plan import base, sizes
from tilekern.tuning.plan.choosing import plan_of
from tilekern.tuning.plan.configs import fields_named
from tilekern.tuning.plan.models import plan_of_model
from tilekern.tuning.plan.presets import PRESETS
from tilekern.tuning.plan.steps import Steps
from tilekern.tuning.publishing import pack_paths

H100 = resolve("H100")

# Its plan takes ten seconds, in each worker that has a test of it.
pytestmark = pytest.mark.xdist_group("base plan")


def config(kind, hidden, intermediate, layers, heads, vocabulary):
    return {
        "model_type": kind, "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": heads[2],
        "vocab_size": vocabulary, "tie_word_embeddings": False,
    }  # fmt: skip


# Models of published sizes that no preset has, and two that nobody has published.
UNKNOWN = {
    "llama-2-13b": config("llama", 5120, 13824, 40, (40, 40, 128), 32000),
    "yi-6b": config("llama", 4096, 11008, 32, (32, 4, 128), 64000),
    "internlm2-20b": config("llama", 6144, 16384, 48, (48, 8, 128), 92544),
    "mistral-nemo": config("mistral", 5120, 14336, 40, (32, 8, 128), 131072) | {"sliding_window": None},
    "smollm2-1.7b": config("llama", 2048, 8192, 24, (32, 32, 64), 49152),
    "a llama": config("llama", 3072, 12288, 36, (32, 8, 128), 100352),
    "a qwen3": config("qwen3", 3072, 10240, 40, (32, 8, 128), 151936),
}


@pytest.fixture(scope="module")
def planned():
    return plan_of(requested(), H100, Path("no-cache"))


def requested(**steps):
    return PlanRequest(("base",), (), (), Steps(**{"tokens": (4096,)} | steps), None)


def served_by(problems):
    """Return what a lookup compares: kernels and their problems without the buckets, which need not agree."""
    return {unbucketed(*named) for named in problems}


def unbucketed(kernel, problem):
    return kernel, *(problem[d.name] for d in spec_named(kernel).dimensions if d.kind != "bucketed")


@pytest.mark.parametrize("tokens", [4096, 6000])
@pytest.mark.parametrize("name", UNKNOWN)
def test_a_model_in_no_preset_has_four_fifths_of_its_launches_in_the_base(planned, name, tokens):
    plan = plan_of_model(UNKNOWN[name], Steps((tokens,)), H100)
    assert not [preset for preset, fields in PRESETS.items() if fields.items() >= UNKNOWN[name].items()]
    known = served_by(planned.problems) if tokens > 4096 else set(planned.problems)
    # Pieces of attention's backward have heads of their own; without them it runs kernels of whole heads.
    launches = Counter({named: times for named, times in plan.launches.items() if not named[0].endswith("_kept")})
    found = Counter({named: times for named, times in launches.items() if key_of(named, tokens) in known})
    assert found.total() >= 0.8 * launches.total(), set(launches) - set(found)


def key_of(named, tokens):
    return unbucketed(*named) if tokens > 4096 else named


def test_heads_that_no_public_config_has_are_not_found_and_little_else_is_missing(planned):
    plan = plan_of_model(config("llama", 4096, 11008, 8, (32, 16, 96), 32000), Steps((4096,)), H100)
    missing = {kernel for kernel, problem in plan.launches if (kernel, problem) not in planned.problems}
    assert missing == {
        "rope", "attention_forward", "attention_backward", "attention_delta", "attention_dkdv_kept",
        "attention_dq_kept",
    }  # fmt: skip


def test_the_base_is_of_some_thousand_problems_and_has_those_of_whole_presets(planned):
    assert planned.name == "base"
    assert planned.notes == ()
    assert len(set(planned.problems)) == len(planned.problems) <= 1150
    for name in ("gemma-3-1b", "llama-4-scout", "deepseek-v2-lite", "gpt2"):
        plan = plan_of_model(name, Steps((4096,)), H100)
        assert set(plan.problems) <= set(planned.problems), name


def test_the_sizes_are_those_that_transformers_has():
    """On the release that was counted; another adds models, and hardly changes those it has."""
    found = sizes.counted()
    if transformers.__version__.startswith(f"{sizes.COUNTED}."):
        assert found == (sizes.LAYERS, sizes.VOCABULARIES), "python -m tilekern.tuning.plan.sizes prints them anew"
    parts = [{part for layer in layers for part in layer.parts()} for layers in (found[0], sizes.LAYERS)]
    assert len(parts[0] & parts[1]) >= 0.7 * len(parts[1])


@pytest.fixture
def few(monkeypatch):
    """A base of two models, a layer and a loss."""
    monkeypatch.setattr(base, "MODELS", ("qwen3-0.6b", "gpt2"))
    monkeypatch.setattr(base, "LAYERS", sizes.LAYERS[-1:])
    monkeypatch.setattr(base, "VOCABULARIES", ((sizes.LAYERS[-1].hidden, 1000),))


@pytest.mark.usefixtures("few")
def test_it_is_one_pack_beside_those_of_other_models():
    request = PlanRequest(("base", "llama-3.2-1b"), (), (), Steps((64,), ops=["rope"]), None)
    plan = plan_of(request, H100, Path("no-cache"))
    assert [path.name for path in pack_paths(Path("packs"), plan.models, H100)] == [
        "base-h100-80gb-hbm3.pack", "llama-3.2-1b-h100-80gb-hbm3.pack",
    ]  # fmt: skip
    assert {kernel for kernel, _ in plan.problems} == {"rope"}


@pytest.mark.usefixtures("few")
def test_a_model_that_cannot_be_shared_by_so_many_ranks_is_left_out_with_a_note():
    plan = plan_of(requested(tp=8, tokens=(64,)), H100, Path("no-cache"))
    assert [note.split(":")[0] for note in plan.notes] == ["gpt2 is left out"]
    assert plan.name == "base-tp8"
    assert plan.problems


@pytest.mark.usefixtures("few")
def test_steps_that_no_model_can_take_are_an_error():
    with pytest.raises(InputError, match=r"qwen3-0\.6b is left out: --tp 5: .*key-value heads"):
        plan_of(requested(tp=5), H100, Path("no-cache"))


def test_the_engine_and_a_config_need_a_model_of_their_own():
    with pytest.raises(InputError, match="with --engine name the models"):
        plan_of(requested(engine=True, tokens=()), H100, Path("no-cache"))
    with pytest.raises(InputError, match="base stands for many models"):
        fields_named("base")
