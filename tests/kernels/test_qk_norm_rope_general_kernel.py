import pytest
import torch
from spec_samples import assert_right, configs, inputs_of, launched, sized

from tilekern.compile.toolchain import compile_candidate, toolkit
from tilekern.kernels import spec_named
from tilekern.spec import ALIGNED
from tilekern.spec.targets import INTERPRETED, resolve

FORWARD, BACKWARD = spec_named("qk_norm_rope_general_forward"), spec_named("qk_norm_rope_general_backward")
every_spec = pytest.mark.parametrize("spec", [FORWARD, BACKWARD], ids=lambda spec: spec.name)
# Gemma 3's heads, Qwen3-Next's, HunYuan's, Llama 4's, odd ones, and the smallest; norm_last and interleaved.
FORMS = {
    "gemma3": ({"heads": 16, "kv_heads": 8, "head_dim": 256, "pairs": 128}, False, False),
    "qwen3_next": ({"heads": 16, "kv_heads": 2, "head_dim": 256, "pairs": 32}, False, False),
    "hunyuan": ({"heads": 32, "kv_heads": 8, "head_dim": 128, "pairs": 64}, True, False),
    "llama4": ({"heads": 40, "kv_heads": 8, "head_dim": 128, "pairs": 64}, True, True),
    "odd part": ({"heads": 5, "kv_heads": 3, "head_dim": 13, "pairs": 3}, True, False),
    "odd pairs": ({"heads": 3, "kv_heads": 8, "head_dim": 15, "pairs": 5}, False, True),
    "one pair": ({"heads": 1, "kv_heads": 1, "head_dim": 2, "pairs": 1}, False, False),
}


def form_of(spec, dtype, form, **more):
    sizes, norm_last, interleaved = FORMS[form]
    return sized(spec, dtype, **sizes, **more).but(norm_last=norm_last, interleaved=interleaved)


@every_spec
@pytest.mark.parametrize("form", FORMS)
def test_sizes_of_models(spec, form):
    problem = form_of(spec, "bfloat16", form, tokens=3, batch=2)
    inputs = inputs_of(spec, problem)
    seen = {}
    for config in configs(spec, problem):
        constants = dict(spec.device(problem, config).constants)
        seen.setdefault((constants["unrolled"], constants["bounded"]), config)
    assert_right(spec, problem, seen.values(), inputs)


@every_spec
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_angles_of_a_single_batch_entry_are_shared(spec, interleaved):
    problem = sized(spec, batch=3).but(interleaved=interleaved)
    inputs = inputs_of(spec, problem)
    shared = {name: inputs[name][:1] for name in ("cos", "sin")}
    for angles in (shared, {name: value.expand(3, -1, -1) for name, value in shared.items()}):
        assert_right(spec, problem, configs(spec, problem)[:2], {**inputs, **angles})


@every_spec
def test_without_options_it_is_qk_norm_rope(spec):
    plain = spec_named(spec.name.replace("_general", ""))
    problem = sized(spec, head_dim=12, pairs=6)
    inputs = inputs_of(spec, problem) | {"offset": 0.0}
    found = spec.reference(**inputs, norm_last=False, interleaved=False)
    given = {name: value for name, value in inputs.items() if name != "offset"}
    for name, expected in plain.reference(**given).items():
        torch.testing.assert_close(found[name], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_offset_is_added_in_float32(interleaved):
    """A weight that bfloat16 rounds away beside 1."""
    problem = sized(FORWARD, "bfloat16").but(interleaved=interleaved)
    inputs = inputs_of(FORWARD, problem) | {"offset": 1.0}
    for name in ("q_weight", "k_weight"):
        inputs[name].fill_(2**-8)
    inputs["cos"].fill_(1)
    inputs["sin"].fill_(0)
    outputs = launched(FORWARD, problem, FORWARD.default(problem, INTERPRETED), inputs, 1)
    expected = FORWARD.reference(**inputs, norm_last=False, interleaved=interleaved)
    for name in ("q_out", "k_out"):
        error = (outputs[name].double() - expected[name]).norm() / expected[name].norm()
        # Rounding 1 + 2^-8 to 1 would be an error of as much for every number.
        assert error < 2**-9


def test_more_pairs_than_a_head_has_are_refused():
    problem = sized(FORWARD).but(head_dim=10, pairs=6)
    with pytest.raises(ValueError, match="6 pairs are more than heads of 10 numbers have"):
        FORWARD.device(problem, FORWARD.generic(problem))


@pytest.mark.parametrize(
    ("spec", "dtypes", "moved"),
    [
        (FORWARD, ("bfloat16", "bfloat16", "bfloat16"), 320 * 4 + 4 * 6 * 2 + 2 * 10 * 2),
        (FORWARD, ("bfloat16", "float32", "bfloat16"), 320 * 6 + 4 * 6 * 2 + 2 * 10 * 4),
        (BACKWARD, ("bfloat16", "bfloat16", "float32"), 320 * 6 + 4 * 6 * 4 + 2 * 2 * 10 * 2),
    ],
)
def test_bytes_counted_by_hand(spec, dtypes, moved):
    names = dict(zip(("dtype", "weight_dtype", "angle_dtype"), dtypes, strict=True))
    sizes = {"tokens": 4, "batch": 2, "heads": 3, "kv_heads": 1, "head_dim": 10, "pairs": 3}
    problem = spec.problem(**sizes, norm_last=False, interleaved=False, **names)
    assert spec.bytes_moved(problem) == moved


@pytest.mark.slow
@pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")
@every_spec
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("form", ["gemma3", "qwen3_next", "hunyuan", "llama4"])
@pytest.mark.share(8)
def test_the_forms_of_models_compile(spec, arch, form):
    problem, target = spec.bucketed(form_of(spec, "bfloat16", form, tokens=4096, batch=1)), resolve(arch)
    assert compile_candidate(spec, problem, spec.default(problem, target), target, ALIGNED).cubin
