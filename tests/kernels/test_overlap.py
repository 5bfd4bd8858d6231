"""Kernels of few rows let the next be launched early, once they have waited; of many rows some kernels alone do."""

import pytest
from spec_samples import each, inputs_of, launched, one_of_each_code, sized

from tilekern.interpreter.races import Launch
from tilekern.kernels import spec_named
from tilekern.kernels.families.overlap import is_few
from tilekern.spec import LibraryCall
from tilekern.spec.targets import resolve

# Kernels between a token's products, or around its attention, or between two tokens.
IF_FEW = [
    spec_named(name)
    for name in (
        "rms_norm_forward", "rms_norm_offset_forward", "fused_add_rms_norm_forward",
        "fused_add_rms_norm_offset_forward", "fused_rms_norm_add_forward", "fused_rms_norm_add_rms_norm_forward",
        "layer_norm_forward", "fused_add_layer_norm_forward", "qk_norm_rope_forward", "qk_norm_rope_general_forward",
        "rope", "llama4_rope", "qwen2vl_mrope", "append_to_cache", "embedding", "advance",
    )
]  # fmt: skip
# Their problems always have few rows, or their kernels are for chains of many rows.
ALWAYS = [
    spec_named(name)
    for name in (
        "skinny_linear", "skinny_linear_int8", "skinny_parts", "skinny_join", "skinny_projections",
        "skinny_held_linear", "decode_attention", "decode_join", "token_attention", "cache_rows", "greedy_parts",
        "greedy_join", "early_linear", "early_attention_forward", "early_fused_add_layer_norm_forward",
        "early_fused_add_rms_norm_forward",
    )
]  # fmt: skip
# Gradients of the same families.
NEVER = [
    spec_named(name)
    for name in ("rms_norm_backward", "fused_add_rms_norm_backward", "layer_norm_backward", "qk_norm_rope_backward")
]


@pytest.fixture
def blocks(monkeypatch):
    """The blocks that ran, and those that let the next kernel be launched."""
    found = {"enter": set(), "launch_next": set()}
    enter, launch_next = Launch.enter, Launch.launch_next

    def entered(launch, number):
        found["enter"].add(number)
        enter(launch, number)

    def launched_next(launch):
        found["launch_next"].add(launch.number)
        launch_next(launch)

    monkeypatch.setattr(Launch, "enter", entered)
    monkeypatch.setattr(Launch, "launch_next", launched_next)
    return found


def few_and_many(spec):
    """A problem with the most rows that are few, and one with the fewest that are many."""
    if any(dimension.name == "rows" for dimension in spec.dimensions):
        return sized(spec, rows=64), sized(spec, rows=65)
    return sized(spec, tokens=1, batch=64), sized(spec, tokens=1, batch=65)


def interpreted(spec, problem, most):
    """The first configs of cuTile with different device functions or constants."""
    found = [c for c in one_of_each_code(spec, problem) if not isinstance(spec.implement(problem, c), LibraryCall)]
    return found[:most]


def which_launch(spec, problem, config, blocks):
    """Which blocks let the next kernel be launched: all or none, whatever their number."""
    for found in blocks.values():
        found.clear()
    launched(spec, problem, config, inputs_of(spec, problem))
    if blocks["launch_next"] == blocks["enter"]:
        return "all"
    return "some" if blocks["launch_next"] else "none"


@each(IF_FEW)
def test_few_rows_let_the_next_kernel_be_launched_and_many_do_not(spec, blocks):
    few, many = few_and_many(spec)
    for problem, which in ((few, "all"), (many, "none")):
        for config in interpreted(spec, problem, 3):
            assert which_launch(spec, problem, config, blocks) == which, config


@each(ALWAYS)
def test_a_kernel_of_few_rows_alone_or_of_a_chain_lets_the_next_one_be_launched(spec, blocks):
    problem = sized(spec)
    for config in interpreted(spec, problem, 2):
        assert which_launch(spec, problem, config, blocks) == "all", config


@each(NEVER)
def test_a_gradient_of_few_rows_does_not(spec, blocks):
    problem, _ = few_and_many(spec)
    [config] = interpreted(spec, problem, 1)
    assert which_launch(spec, problem, config, blocks) == "none"


@each(IF_FEW)
def test_all_candidates_of_a_problem_agree_at_its_size_and_at_its_bucket(spec):
    """Of both compilers: the tuner never chooses."""
    target = resolve("H100")
    for problem, few in zip(few_and_many(spec), (True, False), strict=True):
        candidates = list(spec.space.candidates(spec.bucketed(problem), target))
        for size in (problem, spec.bucketed(problem)):
            found = {dict(spec.device(size, config).constants)["few"] for config in candidates}
            assert found == {few}


@pytest.mark.parametrize(
    ("sizes", "few"), [((1,), True), ((64,), True), ((65,), False), ((4, 16), True), ((3, 20), False), ((1, 65), False)]
)
def test_rows_are_few_if_their_buckets_are(sizes, few):
    """60 rows of 3 and 20 share the record of 4 and 32."""
    assert is_few(*sizes) is few
