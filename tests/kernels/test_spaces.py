"""Search spaces, defaults, counts of bytes and operations, dimensions, and the registry of specs."""

import dataclasses
import itertools
from random import Random

import pytest
import torch
from spec_samples import NAMES, SPECS, runs_on, sized

import tilekern
from tilekern.errors import InputError
from tilekern.kernels import all_specs, by_name, spec_named
from tilekern.kernels.adamw import WIDTHS
from tilekern.runtime import dispatch
from tilekern.spec import DTYPES, Config, CuteKernel
from tilekern.spec.targets import INTERPRETED, KNOWN, resolve
from tilekern.tuning.plan.presets import PRESETS

every_spec = pytest.mark.parametrize("spec", SPECS, ids=NAMES)
# Sizes of other models, and odd ones.
OTHERS = [
    {"columns": 1, "heads": 1, "kv_heads": 1, "head_dim": 16},
    {"columns": 80, "heads": 5, "kv_heads": 5, "head_dim": 16},
    {"columns": 208, "heads": 14, "kv_heads": 2, "head_dim": 64},
    {"columns": 1100, "heads": 1, "kv_heads": 1, "head_dim": 128},
    {"columns": 11008, "heads": 32, "kv_heads": 32, "head_dim": 80},
    {"columns": 16384, "heads": 128, "kv_heads": 8, "head_dim": 128},
    {"columns": 18944, "heads": 16, "kv_heads": 8, "head_dim": 256},
    {"columns": 53248, "heads": 28, "kv_heads": 4, "head_dim": 128},
]


def problems_of(config):
    """Yield each spec with its problems at the sizes of a model."""
    config = config.get("text_config", config)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    widths = (config["hidden_size"], config["intermediate_size"], head_dim)
    for spec, dtype, tokens, columns in itertools.product(SPECS, DTYPES, (2048, 8192), widths):
        sizes = {"rows": tokens, "tokens": tokens, "batch": 1, "heads": heads, "kv_heads": kv_heads}
        sizes |= {"head_dim": head_dim, "hidden": widths[0], "inner": widths[0], "vocabulary": config["vocab_size"]}
        yield spec, spec.bucketed(sized(spec, dtype, columns=columns, **sizes))


@pytest.mark.parametrize("gpu", ["H200", "B200"])
@pytest.mark.parametrize("model", PRESETS)
@pytest.mark.share(12)
@pytest.mark.slow
def test_defaults_of_the_presets_are_candidates(model, gpu):
    """All candidates of one problem of a spec, drawn by model and GPU, and the first candidate of all others."""
    target, random = resolve(gpu), Random(f"{model} {gpu}")
    found_by_spec = itertools.groupby(dict.fromkeys(problems_of(PRESETS[model])), key=lambda pair: pair[0])
    for spec, found in ((spec, found) for spec, found in found_by_spec if runs_on(spec, target)):
        problems = [problem for _, problem in found]
        whole = random.choice(problems)
        for problem in problems:
            default = spec.default(problem, target)
            assert spec.space.violated(problem, default, target) is None, (spec.name, problem, default)
            most = None if problem == whole else 1
            candidates = list(itertools.islice(spec.space.candidates(problem, target), most))
            assert len(candidates) == len(set(candidates)) == len({config.key for config in candidates})
            assert candidates
            assert set(spec.generic(problem)) == set(default) == set(candidates[0])


@pytest.mark.parametrize("gpu", ["H200", "B200"])
@every_spec
def test_candidates_are_all_points_that_no_constraint_turns_down(spec, gpu):
    target = resolve(gpu)
    problem = next(problem for other, problem in problems_of(PRESETS["qwen3-8b"]) if other is spec)
    allowed = []
    for space in (spec.space, *spec.space.beside):
        axes = space.axes(problem)
        points = (Config(dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values()))
        allowed += [point for point in points if spec.space.violated(problem, point, target) is None]
    assert list(spec.space.candidates(problem, target)) == allowed


@every_spec
def test_there_are_candidates_and_an_allowed_default_for_other_models(spec):
    for sizes, rows, target in itertools.product(OTHERS, (1, 4096), (*KNOWN, INTERPRETED)):
        problem = spec.bucketed(sized(spec, "bfloat16", rows=rows, tokens=rows, batch=1, **sizes))
        if not runs_on(spec, target):
            needs = "MXFP8 needs a GPU of sm_100" if spec.name.startswith("mx") else "8-bit floats need a GPU of sm_90"
            with pytest.raises(InputError, match=f"^{needs} or newer; {target.name} is "):
                spec.default(problem, target)
            assert next(spec.space.candidates(problem, target), None) is None
            continue
        default = spec.default(problem, target)
        assert spec.space.violated(problem, default, target) is None, (problem, default, target.arch)
        assert next(spec.space.candidates(problem, target), None) is not None, (problem, target.arch)


DANGEROUS = [
    ({"num_ctas": 2, "occupancy": 2}, "destroys the CUDA context"),
    ({"num_ctas": 4, "occupancy": 8}, "destroys the CUDA context"),
    ({"occupancy": 16}, "was seen to hang"),
    ({"occupancy": 32}, "was seen to hang"),
]


@every_spec
def test_dangerous_points_are_refused_with_a_reason_and_are_not_candidates(spec):
    problem = sized(spec, "bfloat16", rows=4096, columns=4096, tokens=4096, heads=32, kv_heads=8, head_dim=128)
    for target in (target for target in KNOWN if runs_on(spec, target)):
        for changes, reason in DANGEROUS:
            config = spec.default(problem, target).but(**changes)
            assert reason in spec.space.violated(problem, config, target), (changes, target)
        for config in spec.space.candidates(problem, target):
            assert config.get("occupancy", 1) < 16, (config, target)
            assert config.get("num_ctas", 1) == 1 or config["occupancy"] == 1, (config, target)
            assert not config.get("tma") or target.capability >= 90, (config, target)


@every_spec
def test_two_configs_of_one_implementation_differ_in_what_the_compiler_sees(spec):
    """Each axis must reach the artifact or the grid; an axis that nothing reads would be timed in vain."""
    problem = sized(spec, "bfloat16", rows=4096, columns=4096, tokens=4096, heads=32, kv_heads=8, head_dim=128)
    target = KNOWN[-3]
    seen = {}
    for config in spec.space.candidates(problem, target):
        if spec.is_library(problem, config):
            continue
        made = spec.device(problem, config)
        options = (made.block, made.cluster) if isinstance(made, CuteKernel) else tuple(made.hints.items())
        key = (type(made), made.function, made.constants, options, made.grid(problem, target.sm_count))
        assert seen.setdefault(key, config) is config, (config, seen[key])


@every_spec
def test_every_config_has_a_grid_for_any_rows(spec):
    target = next(target for target in KNOWN if runs_on(spec, target))
    for rows in (1, 1000, 1 << 20):
        problem = sized(spec, "bfloat16", rows=rows, tokens=rows)
        for config in (spec.default(problem, target), spec.generic(problem)):
            if not spec.is_library(problem, config):
                assert 1 <= spec.device(problem, config).grid(problem, target.sm_count) < 1 << 31


# Kernels, sizes of a problem, and the allowed numbers of candidates.
SMALL = [
    *(("adamw", {"columns": columns}, range(10, 31)) for columns in WIDTHS),
    *(("attention_forward", {"head_dim": n, "batch": 4}, range(4, 30)) for n in (64, 96, 128, 256)),
    *((f"cross_entropy_{name}", {"vocabulary": 151936}, range(10, 61)) for name in ("forward", "backward", "fused")),
]


@pytest.mark.parametrize(("kernel", "sizes", "counts"), SMALL, ids=str)
@pytest.mark.parametrize("target", KNOWN, ids=lambda target: target.key)
def test_spaces_are_small_but_real(kernel, sizes, counts, target):
    spec, large = spec_named(kernel), {"rows": 4096, "queries": 4096, "keys": 4096, "heads": 32, "kv_heads": 8}
    found = list(spec.space.candidates(sized(spec, "bfloat16", **large | sizes), target))
    assert len(found) in counts
    if kernel == "adamw":
        assert {config["schedule"] for config in found} == {"persistent", "block"}
        assert {config["tile_m"] * config["tile_n"] for config in found} == {1024, 2048, 4096}


def test_kernels_that_hold_more_run_fewer_blocks_on_an_sm():
    spec = spec_named("layer_norm_forward")
    problem, target = sized(spec, "bfloat16", rows=4096, columns=4096), resolve("H200")
    full = spec.default(problem, target)
    assert spec.space.violated(problem, full, target) is None
    assert "2 live values" in spec.space.violated(problem, full.but(tile_m=2), target)


MATRIX = {"rows": 10, "columns": 100}
TURNED = {"tokens": 4, "batch": 2, "heads": 3, "kv_heads": 1, "head_dim": 10, "pairs": 3}
NARROW = {"rows": 10, "width": 3, "columns": 5, "attended": 2, "hidden": 4, "dtype": "bfloat16"}
PRODUCT = {"rows": 10, "inner": 3, "columns": 5, "dtype": "bfloat16", "weight_dtype": "bfloat16"}
DECODE = {"kv_heads": 6, "keys": 20, "page_size": 4, "group": 4, "head_dim": 8, "dtype": "bfloat16"}
HALF = dict.fromkeys(("dtype", "weight_dtype", "angle_dtype"), "bfloat16")
LOSS = {"rows": 10, "vocabulary": 100, "dtype": "bfloat16", "smoothed": False, "capped": False}


@pytest.mark.parametrize(
    ("kernel", "values", "moved", "flops"),
    [
        ("rms_norm_forward", {**MATRIX, "dtype": "bfloat16", "weight_dtype": "bfloat16"}, 4200, 4000),
        ("rms_norm_forward", {**MATRIX, "dtype": "bfloat16", "weight_dtype": "float32"}, 2000 + 4000 + 400, 4000),
        ("rms_norm_backward", {**MATRIX, "dtype": "float16", "weight_dtype": "float16"}, 3 * 2000 + 200 + 400, 10000),
        ("rms_norm_backward", {**MATRIX, "dtype": "bfloat16", "weight_dtype": "float32"}, 4000 + 4000 + 800, 10000),
        ("column_sum", {**MATRIX, "dtype": "bfloat16"}, 4000 + 200, 1000),
        ("swiglu_forward", {**MATRIX, "dtype": "float32"}, 3 * 4000, 5000),
        ("swiglu_backward", {**MATRIX, "dtype": "bfloat16"}, 5 * 2000, 12000),
        ("cross_entropy_forward", {**LOSS, "weighted": False}, 2000 + 120, 5000),
        ("cross_entropy_backward", {**LOSS, "weighted": True}, 2 * 2000 + 120 + 404, 6000),
        ("cross_entropy_fused", {**LOSS, "weighted": False}, 2 * 2000 + 160, 11000),
        ("adamw", {**MATRIX, "dtype": "bfloat16"}, 7 * 2000, 15000),
        ("matmul", PRODUCT | {"b_transposed": True}, 2 * (30 + 15 + 50), 300),
        ("matmul", PRODUCT | {"accumulated": True, "biased": True}, 2 * (30 + 15 + 50 + 50 + 5), 300),
        ("grouped_linear", PRODUCT | {"experts": 2}, 2 * (30 + 2 * 15 + 50) + 4 * 2, 300),
        ("fp8_grouped_turned", PRODUCT | {"experts": 2}, 10 * 5 * 2 + 4 * (10 + 2 + 1), None),
        ("fp8_grouped_turned", PRODUCT | {"experts": 2, "gathered": True}, 3 * (5 + 4) + 4 * 12 + 50 + 4, None),
        ("fp8_grouped_weight_gradient", PRODUCT | {"experts": 2}, 10 * 8 + 2 * 4 + 4 * 2 + 2 * 30, 300),
        ("grouped_sum", PRODUCT | {"experts": 2}, 2 * 50 + 4 * 2 * 5, None),
        ("grouped_sum", PRODUCT | {"experts": 2, "weighted": True}, 2 * (50 + 10) + 4 * (10 + 2 * 5), None),
        ("skinny_held_linear", PRODUCT, 2 * (30 + 15 + 50), 300),
        ("skinny_held_linear", PRODUCT | {"normed": True}, 2 * (30 + 3 + 15 + 50), 300),
        ("skinny_held_linear", PRODUCT | {"normed": True, "added": True}, 2 * (3 * 30 + 3 + 15 + 50), 300),
        (
            "skinny_held_linear",
            PRODUCT | dict.fromkeys(("normed", "layer", "added", "gated", "biased"), True),
            2 * (3 * 30 + 2 * 3 + 2 * 15 + 5 + 50),
            600,
        ),
        ("narrow_linear", NARROW, 2 * (30 + 3 + 15 + 50), 300),
        ("narrow_linear", NARROW | dict.fromkeys(("layer", "added", "biased"), True), 2 * (98 + 2 * 30 + 3 + 5), 300),
        ("narrow_block", NARROW, 2 * (2 * 30 + 20 + 6 + 2 * 3 + 2 * 12), 600),
        ("narrow_block", NARROW | {"gated": True, "ended": True}, 2 * (116 + 12 + 30), 840),
        (
            "narrow_block",
            NARROW | dict.fromkeys(("layer", "biased", "out_biased", "followed", "next_biased"), True),
            2 * (116 + 4 * 3 + 4 + 15 + 5 + 50),
            900,
        ),
        # Two sequences of 3 key heads, with 20 keys each, or behind padding 20 and 15.
        ("decode_attention", DECODE, 2 * (2 * 24 * 8 + 2 * 3 * 40 * 8), 4 * 3 * 40 * 4 * 8),
        ("decode_attention", DECODE | {"padded": True}, 2 * (2 * 24 * 8 + 2 * 3 * 35 * 8), 4 * 3 * 35 * 4 * 8),
        ("decode_attention", DECODE | {"windowed": True}, 2 * (2 * 24 * 8 + 2 * 3 * 10 * 8), 4 * 3 * 10 * 4 * 8),
        # Keys and values of the new tokens are read and written, and 19 old ones are read.
        ("token_attention", DECODE, 2 * (2 * 24 * 8 + 4 * 6 * 8 + 2 * 6 * 19 * 8), 4 * 6 * 20 * 4 * 8),
        ("token_attention", DECODE | {"paged": True}, 2 * (2 * 24 * 8 + 4 * 6 * 8 + 2 * 3 * (19 + 14) * 8), None),
        ("rope", TURNED | HALF | {"full": True}, 2 * 2 * 320 + 2 * 4 * 10 * 2, 3 * 320),
        ("rope", TURNED | HALF | {"inverse": True, "angle_dtype": "float32"}, (2 + 4) * 320 + 2 * 4 * 5 * 4, 3 * 320),
        ("llama4_rope", TURNED | HALF | {"angle_dtype": "float32"}, 2 * 320 * 2 + 4 * 10 * 4, 3 * 320),
        ("qwen2vl_mrope", TURNED | HALF, 2 * 2 * 320 + 2 * 4 * 5 * 2, 3 * 320),
        ("qwen2vl_mrope", TURNED | HALF | {"angle_dtype": "float32"}, (2 + 4) * 320 + 2 * 4 * 5 * 4, 3 * 320),
        *(
            (f"qk_norm_rope_{name}", TURNED | HALF | dtypes, moved, None)
            for name, dtypes, moved in [
                ("forward", {}, 320 * 4 + 4 * 10 * 2 + 2 * 10 * 2),
                ("forward", {"weight_dtype": "float32"}, 320 * 6 + 4 * 10 * 2 + 2 * 10 * 4),
                ("backward", {}, 320 * 6 + 4 * 10 * 2 + 2 * 2 * 10 * 2),
                ("backward", {"angle_dtype": "float32"}, 320 * 8 + 4 * 10 * 4 + 2 * 2 * 10 * 2),
                ("general_forward", {}, 320 * 4 + 4 * 6 * 2 + 2 * 10 * 2),
                ("general_forward", {"weight_dtype": "float32"}, 320 * 6 + 4 * 6 * 2 + 2 * 10 * 4),
                ("general_backward", {"angle_dtype": "float32"}, 320 * 6 + 4 * 6 * 4 + 2 * 2 * 10 * 2),
            ]
        ),
    ],
)
def test_bytes_and_operations_of_cases_counted_by_hand(kernel, values, moved, flops):
    spec = spec_named(kernel)
    problem = spec.problem(**{d.name: values.get(d.name, False) for d in spec.dimensions})
    assert spec.bytes_moved(problem) == moved
    assert flops is None or spec.flops(problem) == flops


@every_spec
def test_bytes_and_operations_are_positive_and_grow(spec):
    small, large = (sized(spec, rows=n, tokens=n, splits=n) for n in (8, 80))
    assert 0 < spec.bytes_moved(small) < spec.bytes_moved(large)
    assert 0 < spec.flops(small) < spec.flops(large)


@every_spec
def test_a_bad_value_is_refused_by_its_dimension_s_name(spec):
    good = dict(sized(spec))
    bad = {"exact": (0, -1, 2.0, True, "8"), "bucketed": (0, True, None), "dtype": ("float64", 4), "flag": (1, "yes")}
    for dimension in spec.dimensions:
        for value in bad[dimension.kind]:
            with pytest.raises(ValueError, match=rf"{spec.name}: {dimension.name} must be .* got"):
                spec.problem(**{**good, dimension.name: value})


@every_spec
def test_a_missing_or_unknown_dimension_is_refused(spec):
    good = dict(sized(spec))
    first = next(iter(good))
    with pytest.raises(ValueError, match=f"{spec.name}: expected the dimensions"):
        spec.problem(**{name: value for name, value in good.items() if name != first})
    with pytest.raises(ValueError, match="depth"):
        spec.problem(**good, depth=3)


def test_specs_have_a_name_a_summary_and_a_module_of_their_own():
    for name, spec in all_specs().items():
        assert spec_named(name) is spec
        assert spec.name == name
        assert spec.summary
        assert spec.module.startswith(("tilekern.kernels.", "tilekern.kernels.composites."))
        assert len({d.name for d in spec.dimensions}) == len(spec.dimensions)


def test_an_unknown_kernel_is_named_with_the_known_ones():
    with pytest.raises(InputError, match=r"unknown kernel 'rmsnorm'; known: .*rms_norm_forward"):
        spec_named("rmsnorm")


def test_a_name_that_occurs_twice_is_refused_with_both_places():
    first = spec_named("swiglu_forward")
    second = dataclasses.replace(first, module="tilekern.kernels.other")
    with pytest.raises(InputError, match=r"in tilekern.kernels.swiglu and tilekern.kernels.other; rename one"):
        by_name([first, second])


def test_stats_have_every_kernel_from_the_start(monkeypatch):
    monkeypatch.setattr(dispatch._state, "counters", {})
    assert list(tilekern.stats()) == sorted(all_specs())
    assert {count for counts in tilekern.stats().values() for count in counts.values()} == {0}
    dispatch.counters("swiglu_forward").misses += 1
    assert tilekern.stats()["swiglu_forward"]["misses"] == 1


def test_sums_are_added_up_and_taken_apart_by_name():
    found = spec_named("layer_norm_backward").results({"dx": torch.ones(1), "partial": torch.arange(12.0).view(2, 6)})
    assert {name: x.tolist() for name, x in found.items()} == {
        "dx": [1.0], "dweight": [6.0, 8.0, 10.0], "dbias": [12.0, 14.0, 16.0],
    }  # fmt: skip
