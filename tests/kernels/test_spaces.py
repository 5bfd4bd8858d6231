"""Search spaces, defaults, byte and operation counts, and the problems that specs accept."""

import itertools
from random import Random

import pytest
from spec_samples import NAMES, SPECS, sized

from tilekern.errors import InputError
from tilekern.kernels import all_specs, spec_named
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
    """Each spec at the sizes of a model."""
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
def test_defaults_of_the_presets_are_candidates(model, gpu):
    """All candidates of one of a spec's problems, each model and GPU of another, and the first one of all others."""
    target, random = resolve(gpu), Random(f"{model} {gpu}")
    for spec, found in itertools.groupby(dict.fromkeys(problems_of(PRESETS[model])), key=lambda pair: pair[0]):
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
def test_dangerous_points_are_refused_with_their_reason_and_are_no_candidates(spec):
    problem = sized(spec, "bfloat16", rows=4096, columns=4096, tokens=4096, heads=32, kv_heads=8, head_dim=128)
    for target in KNOWN:
        for changes, reason in DANGEROUS:
            config = spec.default(problem, target).but(**changes)
            assert reason in spec.space.violated(problem, config, target), (changes, target)
        for config in spec.space.candidates(problem, target):
            assert config.get("occupancy", 1) < 16, (config, target)
            assert config.get("num_ctas", 1) == 1 or config["occupancy"] == 1, (config, target)
            assert not config.get("tma") or target.capability >= 90, (config, target)


@every_spec
def test_two_configs_of_one_implementation_differ_in_what_the_compiler_sees(spec):
    """Each axis reaches the artifact or the grid: an axis that nothing reads would be timed for nothing."""
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
    target = KNOWN[0]
    for rows in (1, 1000, 1 << 20):
        problem = sized(spec, "bfloat16", rows=rows, tokens=rows)
        for config in (spec.default(problem, target), spec.generic(problem)):
            if not spec.is_library(problem, config):
                assert 1 <= spec.device(problem, config).grid(problem, target.sm_count) < 1 << 31


MATRIX = {"rows": 10, "columns": 100}
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
        (
            "rope",
            {"tokens": 4, "batch": 2, "heads": 3, "kv_heads": 1, "head_dim": 10, "full": True, "inverse": False}
            | {"dtype": "bfloat16", "angle_dtype": "bfloat16"},
            2 * 2 * 320 + 2 * 4 * 10 * 2,
            3 * 320,
        ),
        (
            "rope",
            {"tokens": 4, "batch": 2, "heads": 3, "kv_heads": 1, "head_dim": 10, "full": False, "inverse": True}
            | {"dtype": "bfloat16", "angle_dtype": "float32"},
            (2 + 4) * 320 + 2 * 4 * 5 * 4,
            3 * 320,
        ),
    ],
)
def test_bytes_and_operations_of_cases_counted_by_hand(kernel, values, moved, flops):
    spec = spec_named(kernel)
    problem = spec.problem(**values)
    assert spec.bytes_moved(problem) == moved
    assert spec.flops(problem) == flops


@every_spec
def test_bytes_and_operations_are_positive_and_grow(spec):
    small, large = sized(spec, rows=8, tokens=8), sized(spec, rows=80, tokens=80)
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
        assert spec.name == name
        assert spec.summary
        assert spec.module.startswith(("tilekern.kernels.", "tilekern.kernels.composites."))
        assert len({d.name for d in spec.dimensions}) == len(spec.dimensions)


def test_an_unknown_kernel_is_named_with_the_known_ones():
    with pytest.raises(InputError, match=r"unknown kernel 'rmsnorm'; known: .*rms_norm_forward"):
        spec_named("rmsnorm")
