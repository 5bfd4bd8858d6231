"""Warming up: which records are taken, and that their kernels run on small inputs."""

import warnings

import pytest
import torch

import tilekern
from tilekern import cache
from tilekern.errors import InputError
from tilekern.kernels import all_specs
from tilekern.patch import warmup
from tilekern.runtime import dispatch
from tilekern.spec.targets import INTERPRETED, resolve

SIZES = {
    "rows": 4096, "columns": 96, "tokens": 2048, "batch": 4, "heads": 3, "kv_heads": 1, "head_dim": 16,
    "pairs": 8, "exact": 48, "bucketed": 128, "dtype": "float32", "flag": False,
}  # fmt: skip


def problem_of(spec):
    return spec.problem(**{d.name: SIZES.get(d.name, SIZES[d.kind]) for d in spec.dimensions})


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.delenv("TILEKERN_INTERPRET", raising=False)
    dispatch.forget()
    yield
    dispatch.forget()


def put(root, target, toolkit, kernel, key):
    path = root / "v1" / target / toolkit / kernel / f"{key}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines with no GPU")
def test_without_a_gpu_it_says_so():
    with pytest.warns(UserWarning, match="no CUDA GPU"):
        assert tilekern.warmup_all_kernels() == {"kernels": 0, "skipped": 0}


def test_under_the_interpreter_there_is_nothing_to_load(monkeypatch):
    monkeypatch.setenv("TILEKERN_INTERPRET", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tilekern.warmup_all_kernels() == {"kernels": 0, "skipped": 0}


def test_a_model_needs_a_configuration():
    with pytest.raises(InputError, match="Linear has no configuration"):
        tilekern.warmup_all_kernels(torch.nn.Linear(2, 2))


def test_problems_are_those_of_the_arch_each_once(tmp_path):
    h200, h100, b200 = resolve("H200"), resolve("H100"), resolve("B200")
    keys = {name: cache.problem_key(dict(problem_of(spec))) for name, spec in all_specs().items()}
    for target, toolkit in ((h200, "a-1"), (h200, "b-1"), (h100, "a-1")):
        put(tmp_path / "one", target.key, toolkit, "swiglu_forward", keys["swiglu_forward"])
    put(tmp_path / "two", h200.key, "a-1", "swiglu_forward", keys["swiglu_forward"])
    put(tmp_path / "two", h100.key, "a-1", "rope", keys["rope"])
    put(tmp_path / "two", b200.key, "a-1", "column_sum", keys["column_sum"])
    put(tmp_path / "two", h200.key, "a-1", "swiglu_forward", "other=1")
    put(tmp_path / "two", h200.key, "a-1", "swiglu_forward", "no problem")
    put(tmp_path / "two", h200.key, "a-1", "gone", keys["rope"])
    layers = [cache.FolderLayer(tmp_path / name, name) for name in ("one", "two")]
    found = [(spec.name, problem) for spec, problem in warmup.problems_for(h200, layers)]
    specs = all_specs()
    assert sorted(found, key=str) == [(n, problem_of(specs[n])) for n in ("rope", "swiglu_forward")]


def test_a_model_chooses_what_its_step_asks_for():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16}
    config = Qwen3Config(**sizes, intermediate_size=48, num_hidden_layers=1, vocab_size=1 << 16)
    model = torch.nn.Sequential(Qwen3ForCausalLM(config))
    specs, h200 = all_specs(), resolve("H200")
    assert {kernel for kernel, _ in warmup.asked_by(model, h200)} == {"adamw"}, "nothing is patched"
    tilekern.apply_to_model(model, qk_norm_rope=False)
    asked = warmup.asked_by(model, h200)
    for kernel, sizes in (("rope", (3, 1, 16)), ("rms_norm_backward", (96,)), ("rms_norm_forward", (16,))):
        assert (kernel, sizes) in asked
    assert warmup.exact_part(specs["rope"], problem_of(specs["rope"])) in asked
    assert warmup.exact_part(specs["rope"], problem_of(specs["rope"]).but(head_dim=64)) not in asked
    assert not any(kernel.startswith("qk_norm_rope") for kernel, _ in asked)
    assert not any(kernel.startswith("attention") for kernel, _ in asked), "it runs through SDPA"


@pytest.mark.parametrize("name", sorted(all_specs()))
def test_every_kernel_runs_on_small_inputs(monkeypatch, name):
    """The interpreter would raise if a block of the big problem's grid reached over the small one's arrays."""
    monkeypatch.setenv("TILEKERN_INTERPRET", "1")
    spec = all_specs()[name]
    problem, device = problem_of(spec), torch.device("cpu")
    plan = dispatch.plan_for(spec, device, *problem.values())
    grid, before = plan.grid, tilekern.stats()
    warmup.launch_small(spec, problem, plan, device, INTERPRETED.sm_count)
    assert (plan.grid, tilekern.stats()) == (grid, before), "the plan itself stays as it is"


def test_forgetting(monkeypatch):
    monkeypatch.setenv("TILEKERN_INTERPRET", "1")
    dispatch.plan_for(all_specs()["rope"], torch.device("cpu"), *problem_of(all_specs()["rope"]).values())
    assert dispatch._state.plans
    tilekern.clear_autotune_cache()
    assert not dispatch._state.plans
