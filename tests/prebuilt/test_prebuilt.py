"""The packs that ship with the wheel: whole, of today's kernels, and honest about what was measured."""

from pathlib import Path

import pytest

import tilekern
from tilekern.cache import DATED, FRESH, PackLayer, freshness, lookup
from tilekern.cache.packs.pack import Pack, checked_contents
from tilekern.kernels import spec_named
from tilekern.spec import INVARIANT, Config, Problem
from tilekern.spec.source import source_digest
from tilekern.spec.targets import resolve
from tilekern.tuning import preflight
from tilekern.tuning.plan.models import plan_of_model
from tilekern.tuning.plan.steps import Steps

FOLDER = Path(tilekern.__file__).parent / "prebuilt"
MODELS = {"qwen3-8b-h200.pack": ("H200", "measured"), "qwen3-8b-b200.pack": ("B200", "predicted")}
# The first has ops of the Liger suite at the sizes of a model, too.
OTHERS = {
    f"{model}-{gpu.lower()}.pack": (gpu, provenance)
    for model in ("llama-3-8b", "qwen2.5-7b", "gemma-2-9b", "mistral-7b", "gpt-oss-20b", "qwen3-30b-a3b")
    for gpu, provenance in (("H200", "measured"), ("B200", "predicted"))
}
# Of single runs, which did not reach all problems of their models.
OF_H100 = {f"{model}-h100.pack": ("H100", "measured") for model in ("qwen3-8b", "qwen3-30b-a3b")}
# Of the engine without torch; those of the engine have what its first run on a GPU would compile.
OF_ENGINE = {
    "gpt2-h200.pack": ("H200", "measured"), "engine-h200.pack": ("H200", "default"),
    "engine-b200.pack": ("B200", "default"),
}  # fmt: skip
# Of the sizes of many models; nobody had a B200 to measure, and its defaults are what a compiler there would make.
BASE = {"base-h200.pack": ("H200", "measured"), "base-b200.pack": ("B200", "default")}
# The sizes of minGPT.
SMALL = "nano", "tile-small", "micro", "tile-medium", "mini", "tile-large"
# Of linear layers by 8-bit floats, at the sizes of nine models.
OF_FP8 = {"fp8-h200.pack": ("H200", "measured"), "fp8-b200.pack": ("B200", "predicted")}
# Of transformers' `generate`, for 1, 8 and 64 sequences of 21 models.
OF_DECODE = {"decode-h200.pack": ("H200", "measured")}
PACKS = MODELS | OTHERS | OF_H100 | OF_ENGINE | BASE | OF_FP8 | OF_DECODE
# Kernels of which a pack has records that are not of its kind: no run has come to them yet. They are predicted or
# defaults, and say so.
OTHERWISE = {
    "base-h200.pack": {
        "matmul", "attention_backward", "attention_dkdv_kept", "fused_linear_cross_entropy", "rms_norm_to_forward",
        "fused_add_rms_norm_to_forward", "rope_to", "qk_norm_rope_to_forward", "qk_norm_rope_to_backward",
        "qk_norm_rope_general_to_forward", "qk_norm_rope_general_to_backward",
    },
    # The run's time was over.
    "decode-h200.pack": {"skinny_linear"},
    "gpt2-h200.pack": {"narrow_block", "narrow_linear", "lay_out", "sample"},
    # The smallest sizes' logits were tuned.
    "engine-h200.pack": {
        "early_attention_forward", "early_fused_add_layer_norm_forward", "early_linear", "narrow_block",
        "narrow_linear",
    },
    "gemma-2-9b-h200.pack": {"matmul", "attention_backward"},
    "llama-3-8b-h200.pack": {"attention_forward", "attention_backward", "attention_dkdv_kept"},
    "gpt-oss-20b-h200.pack": {"attention_forward", "attention_backward"},
    "qwen3-8b-h200.pack": {"attention_backward"},
    "qwen3-30b-a3b-h200.pack": {"attention_backward", "attention_dkdv_kept"},
    "qwen3-8b-h100.pack": {"attention_dkdv"},
    "qwen3-30b-a3b-h100.pack": {"attention_dkdv", "attention_backward"},
}  # fmt: skip
# Kernels whose space has grown since a pack's run: what is new there was not raced on that GPU yet.
_KEPT = {"attention_dkdv_kept", "attention_dq_kept", "attention_sums", "attention_backward"}
GROWN = {
    "qwen3-8b-h100.pack": {"decode_attention", "skinny_linear"},
    # Before the keys' kernel of CuTe DSL; and cuDNN's backward, which raced with one way of the kernels alone.
    "base-h200.pack": _KEPT | {"attention_delta", "attention_dq"},
    **{
        f"{model}-h200.pack": _KEPT
        for model in (
            "gemma-2-9b",
            "gpt-oss-20b",
            "llama-3-8b",
            "mistral-7b",
            "qwen2.5-7b",
            "qwen3-30b-a3b",
            "qwen3-8b",
        )
    },
}
# What the driver calls them.
GPUS = {"H200": "NVIDIA H200", "H100": "NVIDIA H100 80GB HBM3"}
MEASURED = [name for name, (_, provenance) in PACKS.items() if provenance == "measured"]
TOKENS = [2048, 4096, 8192, 16384, 32768]
# Models in no pack, one with the sizes of SmolLM2-1.7B and one that nobody has published.
UNKNOWN = {
    "llama": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": 49152,
    },
    "qwen3": {
        "hidden_size": 3072, "intermediate_size": 10240, "num_hidden_layers": 40, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False,
    },
}  # fmt: skip


def test_these_packs_ship():
    assert {path.name for path in FOLDER.glob("*.pack")} == set(PACKS)


@pytest.mark.share(1)  # each pack, whatever else is left to the nightly run
@pytest.mark.parametrize("name", PACKS)
def test_every_record_is_whole_and_of_todays_source(name: str):
    gpu, provenance = PACKS[name]
    records = [record for record, _ in checked_contents(Pack(FOLDER / name))]
    assert len(records) >= 30
    for record in records:
        worth = freshness(record, source_digest(record.module))
        may_be = {FRESH, DATED} if record.kernel in GROWN.get(name, ()) else {FRESH}
        assert worth in may_be, f"{record.kernel} is {worth}: tune again"
        assert record.target["name"] == resolve(gpu).name
        assert record.provenance == provenance or record.kernel in OTHERWISE.get(name, ())
        # Where a library runs the winner, the artifacts are the best kernel's.
        runs = record.config if record.best_kernel is None else record.best_kernel.config
        library = spec_named(record.kernel).is_library(Problem(record.problem), Config(runs))
        facts = (record.measurement or {}).get(INVARIANT)
        # The kernel of the class has an artifact of its own if it is another one.
        invariant = {INVARIANT} if facts and Config(facts["config"]) != Config(runs) else set()
        assert set(record.artifacts) - invariant == (set() if library else {"aligned", "generic"})
        assert record.failed < record.candidates


@pytest.mark.parametrize("name", MEASURED)
def test_measured_records_name_their_gpu_and_passed_their_check(name: str):
    records = [record for record, _ in checked_contents(Pack(FOLDER / name)) if record.provenance == "measured"]
    assert len(records) >= 30
    for record in records:
        assert record.check is not None
        assert record.check["passed"]
        assert record.measurement is not None
        assert record.measurement["gpu"] == GPUS[PACKS[name][0]]
        assert record.measurement["driver"]
        assert record.measurement["samples"] >= 3
        assert {"random", "bucket", "zeros", "repeat"} <= {case["case"] for case in record.check["cases"]}


@pytest.mark.share(2)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_the_models_problems_are_all_there(name: str):
    target = resolve(PACKS[name][0])
    layer = PackLayer(FOLDER / name)
    steps = Steps(TOKENS, attention=("tilekern", "tilekern_nondeterministic"))
    for kernel, problem in plan_of_model("qwen3-8b", steps, target).problems:
        spec = spec_named(kernel)
        hit = lookup(
            kernel,
            dict(problem),
            bucketed=[d.name for d in spec.dimensions if d.kind == "bucketed"],
            target_key=target.key,
            arch=target.arch,
            toolkit_key=None,
            source=source_digest(spec.module),
            layers=[layer],
        )
        assert hit is not None, f"{kernel} {problem.key}"
        assert hit.exact_bucket


@pytest.mark.parametrize("gpu", ["H200", "H100", "B200"])
@pytest.mark.parametrize("kind", UNKNOWN)
def test_a_model_in_no_pack_has_four_fifths_of_its_launches_in_the_packs_of_a_gpu(kind, gpu, monkeypatch):
    """The base has what the packs of models lack; the H100's package brings along the H200's."""
    packs = FOLDER.glob("*-b200.pack" if gpu == "B200" else "*-h200.pack")
    monkeypatch.setattr(preflight, "default_layers", lambda *_, **__: [*map(PackLayer, packs)])
    target = resolve(gpu)
    found = preflight.preflight_of(plan_of_model({"model_type": kind} | UNKNOWN[kind], Steps((4096,)), target), target)
    assert found.share.percent >= 80, found.share
    assert {need.state for need in found.needs} <= {"other_gpu" if gpu == "H100" else "exact", "nearest", "missing"}


@pytest.mark.parametrize("gpu", ["H200", "B200"])
@pytest.mark.parametrize(("model", "more"), [
    ("gpt2", {"context": [64, 512], "tokens": [1024], "sequence": [128]}),
    ("qwen3-8b", {"context": [4096]}),
    ("qwen3-8b", {"context": [4096], "weight_dtype": "int8"}),
    ("llama-3.2-1b", {"context": [512]}),
    *((f"mingpt-{size}", {"context": [512], "tokens": [256], "sequence": [64]}) for size in SMALL),
])  # fmt: skip
def test_the_engine_compiles_nothing(model, more, gpu):
    found = preflight.preflight(model, gpu=gpu, engine=True, decode=[1, 8], **more)
    assert not found.missing, found.share


@pytest.mark.parametrize("model", ["qwen3-0.6b", "llama-3.2-1b", "qwen2.5-7b", "gemma-3-4b"])
def test_tokens_of_small_models_have_their_records(model):
    """Without, attention and products of `generate` are torch's."""
    found = preflight.preflight(model, gpu="H200", tokens=[4096], decode=[1, 8, 64])
    assert found.share.percent == 100, found.share


def test_no_predicted_winner_spills():
    for record, _ in checked_contents(Pack(FOLDER / "qwen3-8b-b200.pack")):
        assert all(artifact.resources["stack_bytes"] == 0 for artifact in list(record.artifacts.values())[:1]), (
            record.address
        )
