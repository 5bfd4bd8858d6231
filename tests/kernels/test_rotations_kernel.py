"""Heads turned by angles: rope, kernels with other angles, and kernels that normalise heads too."""

import math

import pytest
import torch
from spec_samples import (
    SPECS,
    assert_right,
    both_defaults,
    configs,
    each,
    id_of,
    inputs_of,
    launched,
    resources_of,
    sized,
)

from tilekern.compile.cubin import code_of
from tilekern.compile.toolchain import compile_candidate, toolkit
from tilekern.kernels import spec_named
from tilekern.spec import ALIGNED
from tilekern.spec.targets import INTERPRETED, resolve
from tilekern.tuning.compile.machine_code import read_machine_code

ROPE, LLAMA4, POSITIONS = (spec_named(name) for name in ("rope", "llama4_rope", "qwen2vl_mrope"))
NORMED = FORWARD, BACKWARD = [spec_named(f"qk_norm_rope_{name}") for name in ("forward", "backward")]
GENERAL = [spec_named(f"qk_norm_rope_general_{name}") for name in ("forward", "backward")]
ANGLES = ("cos", "sin", "angles")
TURNING = [spec for spec in SPECS if not inputs_of(spec, sized(spec)).keys().isdisjoint(ANGLES)]
needs_compiler = pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")
both_ways = pytest.mark.parametrize("inverse", [False, True])


def one_of_each_loop(spec, problem):
    """Return the first config of each kind of loop over heads."""
    found = {}
    for config in configs(spec, problem):
        if not spec.is_library(problem, config):
            constants = dict(spec.device(problem, config).constants)
            found.setdefault(tuple(constants.get(name) for name in ("unrolled", "bounded", "persistent")), config)
    return list(found.values())


@each(TURNING)
@pytest.mark.parametrize("flags", [False, True])
def test_the_angles_of_a_single_batch_entry_are_shared(spec, flags):
    problem = sized(spec, batch=3, flags=flags)
    inputs = inputs_of(spec, problem)
    shared = {name: x[..., :1, :, :] for name, x in inputs.items() if name in ANGLES}
    for angles in (shared, {name: x.expand(*x.shape[:-3], 3, -1, -1) for name, x in shared.items()}):
        assert_right(spec, problem, configs(spec, problem)[:3], inputs | angles)


@each([ROPE, *NORMED])
def test_only_the_first_half_of_angles_that_are_stored_twice_is_read(spec):
    problem = sized(spec)
    inputs, half = inputs_of(spec, problem), problem["head_dim"] // 2
    first = {name: inputs[name][..., :half].contiguous() for name in ("cos", "sin")}
    twice = {name: torch.cat((x, torch.full_like(x, torch.nan)), -1) for name, x in first.items()}
    if spec is ROPE:  # its caller slices the angles
        twice = {name: x[..., :half] for name, x in twice.items()}
    for angles in (first, twice):
        assert_right(spec, problem, both_defaults(spec, problem), inputs | angles)


HEADS = {
    ROPE.name: [(33, 9, 128)],
    LLAMA4.name: [(40, 8, 128), (5, 3, 92), (1, 1, 2), (3, 8, 80)],
    POSITIONS.name: [(28, 4, 128), (5, 3, 92), (1, 1, 2), (3, 8, 80)],
    FORWARD.name: [(32, 8, 128), (5, 3, 80), (1, 1, 2), (3, 8, 16)],
}
HEADS[BACKWARD.name] = HEADS[FORWARD.name]
# Heads, kv_heads, head_dim, pairs, norm_last and interleaved of Gemma 3, Qwen3-Next, HunYuan and Llama 4, odd ones, and
# the smallest.
FORMS = {
    "gemma3": (16, 8, 256, 128, False, False),
    "qwen3_next": (16, 2, 256, 32, False, False),
    "hunyuan": (32, 8, 128, 64, True, False),
    "llama4": (40, 8, 128, 64, True, True),
    "odd part": (5, 3, 13, 3, True, False),
    "odd pairs": (3, 8, 15, 5, False, True),
    "one pair": (1, 1, 2, 1, False, False),
}


def form_of(spec, form, **sizes):
    heads, kv_heads, head_dim, pairs, norm_last, interleaved = FORMS[form]
    sizes |= {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "pairs": pairs}
    return sized(spec, "bfloat16", **sizes).but(norm_last=norm_last, interleaved=interleaved)


MODELS = [
    (spec, sized(spec, "bfloat16", flags=flags, tokens=3, batch=2, heads=heads, kv_heads=kv_heads, head_dim=head_dim))
    for spec in (ROPE, LLAMA4, POSITIONS, *NORMED)
    for heads, kv_heads, head_dim in HEADS[spec.name]
    for flags in ((False,) if spec in NORMED else (False, True))
]


@pytest.mark.parametrize(("spec", "problem"), MODELS, ids=id_of)
def test_sizes_of_models(spec, problem):
    assert_right(spec, problem, one_of_each_loop(spec, problem), inputs_of(spec, problem))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("flags", [False, True])
@each([ROPE, *NORMED, *GENERAL])
def test_in_the_dtype_of_q_and_k_results_have_the_bits_of_casts(spec, flags, dtype):
    direction = next((end for end in ("_forward", "_backward") if spec.name.endswith(end)), "")
    to = spec_named(f"{spec.name.removesuffix(direction)}_to{direction}")
    dtypes = {d.name: "float32" for d in to.dimensions if d.kind == "dtype"} | {"dtype": dtype}
    problem = sized(to, dtype, flags=flags, head_dim=16, pairs=6, batch=2, tokens=3).but(**dtypes)
    inputs = inputs_of(to, problem)
    # What the other kernel reads in float32: slopes.
    turns_back = spec is BACKWARD or spec is GENERAL[1] or problem.get("inverse")
    wide = {name: inputs[name].float() for name in list(inputs)[:2]} if turns_back else {}
    for config in one_of_each_loop(to, problem):
        found = launched(to, problem, config, inputs)
        expected = launched(spec, problem, config, inputs | wide)
        assert {found[name].dtype for name in list(found)[:2]} == {getattr(torch, dtype)}
        assert all(torch.equal(y, expected[name].to(y.dtype)) for name, y in found.items())


@each([LLAMA4, ROPE, POSITIONS])
def test_a_number_that_is_not_finite_stays_in_its_pair(spec):
    problem = sized(spec)
    inputs = inputs_of(spec, problem)
    for place, value in ((0, math.nan), (3, math.inf), (6, -math.inf)):
        inputs["q"][..., place] = value
    assert_right(spec, problem, configs(spec, problem)[:6], inputs)


def test_rope_rounds_nothing_but_its_results():
    """Products nearly cancel: if they were rounded, the rest would be lost."""
    problem = sized(ROPE, "bfloat16").but(full=True)
    inputs, half = inputs_of(ROPE, problem), problem["head_dim"] // 2
    for name in ("q", "k"):
        inputs[name][..., half:] = inputs[name][..., :half]
    inputs["cos"].fill_(1)
    inputs["sin"][..., :half], inputs["sin"][..., half:] = 1 - 2**-8, 2**-8 - 1
    assert_right(ROPE, problem, both_defaults(ROPE, problem), inputs)


def test_the_reference_of_llama4_is_the_product_of_complex_numbers():
    inputs = inputs_of(LLAMA4, sized(LLAMA4))
    turned = LLAMA4.reference(**inputs, inverse=False)
    freqs_cis = torch.view_as_complex(inputs["angles"].double().unflatten(-1, (-1, 2))).unsqueeze(2)
    for name in ("q", "k"):
        numbers = torch.view_as_complex(inputs[name].double().unflatten(-1, (-1, 2)))
        torch.testing.assert_close(turned[f"{name}_out"], torch.view_as_real(numbers * freqs_cis).flatten(-2))


# Angles of three positions.


@both_ways
@pytest.mark.parametrize("head_dim", [2, 12, 16])
def test_any_sections(inverse, head_dim):
    """Frequencies of time and of height: none, all, and some."""
    problem, half = sized(POSITIONS, head_dim=head_dim).but(inverse=inverse), head_dim // 2
    inputs = inputs_of(POSITIONS, problem)
    between = ((half // 4, half // 2), (0, 1), (half // 2, half - half // 2))
    for time, height in ((0, 0), (half, 0), (0, half), *between):
        assert_right(POSITIONS, problem, configs(POSITIONS, problem)[:2], inputs | {"time": time, "height": height})


def test_only_the_angle_of_its_position_counts_for_a_frequency():
    problem = sized(POSITIONS)
    inputs = inputs_of(POSITIONS, problem)
    edges = (0, inputs["time"], inputs["time"] + inputs["height"], problem["head_dim"] // 2)
    for name in ("cos", "sin"):
        chosen = torch.full_like(inputs[name], torch.nan)
        for position in range(3):
            part = slice(edges[position], edges[position + 1])
            chosen[position, ..., part] = inputs[name][position, ..., part]
        inputs[name] = chosen
    assert_right(POSITIONS, problem, configs(POSITIONS, problem)[:6], inputs)


@both_ways
def test_the_reference_of_one_section_is_that_of_rope(inverse):
    inputs = inputs_of(POSITIONS, sized(POSITIONS))
    half = inputs["q"].shape[-1] // 2
    for position, (time, height) in enumerate(((half, 0), (0, half), (0, 0))):
        found = POSITIONS.reference(**inputs | {"time": time, "height": height}, inverse=inverse)
        angles = {name: inputs[name][position, ..., :half] for name in ("cos", "sin")}
        right = ROPE.reference(inputs["q"], inputs["k"], **angles, inverse=inverse)
        assert all(torch.equal(found[name], right[name]) for name in right)


# Norms.


def test_gradients_of_both_weights_come_from_their_own_heads():
    problem = sized(BACKWARD, "float32")
    inputs = inputs_of(BACKWARD, problem)
    inputs["dk_out"] = torch.zeros_like(inputs["dk_out"])
    expected = BACKWARD.reference(**inputs)
    assert [bool(expected[name].any()) for name in ("dk", "dk_weight", "dq_weight")] == [False, False, True]
    assert_right(BACKWARD, problem, [BACKWARD.generic(problem)], inputs)


def test_a_head_of_norm_one_is_only_rotated():
    problem = sized(FORWARD, "float32")
    inputs = inputs_of(FORWARD, problem) | {"eps": 0.0}
    for name in ("q", "k"):
        inputs[name] = torch.sign(inputs[name])
        inputs[f"{name}_weight"] = torch.ones(problem["head_dim"])
    given = {name: inputs[name].transpose(1, 2) for name in ("q", "k")}
    turned = ROPE.reference(**given, cos=inputs["cos"], sin=inputs["sin"], inverse=False)
    for name, reference in FORWARD.reference(**inputs).items():
        torch.testing.assert_close(reference, turned[name].transpose(1, 2), rtol=1e-12, atol=1e-12)


def test_the_norm_is_not_rounded_before_the_rotation():
    """The first halves of heads nearly cancel: the rest would be lost."""
    problem = sized(FORWARD, "bfloat16")
    inputs, half = inputs_of(FORWARD, problem), problem["head_dim"] // 2
    for name in ("q", "k"):
        inputs[name][..., half:] = inputs[name][..., :half]
        inputs[f"{name}_weight"][:half], inputs[f"{name}_weight"][half:] = 1, 1 - 2**-8
    inputs["cos"].fill_(1)
    inputs["sin"].fill_(1)
    outputs = launched(FORWARD, problem, FORWARD.default(problem, INTERPRETED), inputs, 1)
    for name, expected in FORWARD.reference(**inputs).items():
        torch.testing.assert_close(outputs[name][..., :half].double(), expected[..., :half], rtol=2**-7, atol=0)


@each(GENERAL)
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_models(spec, form):
    problem = form_of(spec, form, tokens=3, batch=2)
    assert_right(spec, problem, one_of_each_loop(spec, problem), inputs_of(spec, problem))


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_offset_is_added_in_float32(interleaved):
    """bfloat16 would round the weight away beside 1: an error of 2^-8 for every number."""
    spec = GENERAL[0]
    problem = sized(spec, "bfloat16").but(interleaved=interleaved)
    inputs = inputs_of(spec, problem) | {"offset": 1.0}
    for name, value in {"q_weight": 2**-8, "k_weight": 2**-8, "cos": 1, "sin": 0}.items():
        inputs[name].fill_(value)
    assert_right(spec, problem, [spec.default(problem, INTERPRETED)], inputs, 1, most=2**-9)


def test_more_pairs_than_a_head_has_are_refused():
    problem = sized(GENERAL[0]).but(head_dim=10, pairs=6)
    with pytest.raises(ValueError, match="6 pairs are more than heads of 10 numbers have"):
        GENERAL[0].device(problem, GENERAL[0].generic(problem))


# Cubins.


def machine_code_of(spec, problem, target):
    """Return the counts of accesses of the default config's cubin, and its resources."""
    made = compile_candidate(spec, problem, spec.default(problem, target), target, ALIGNED)
    code = read_machine_code(code_of(made.cubin, made.symbol), target.capability)
    return code.whole, resources_of(spec, problem, made, target)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("gpu", ["sm_90", "sm_100"])
@pytest.mark.share(2)
def test_pairs_are_rotated_in_the_threads_that_load_them(gpu):
    """q and k are read and written in vectors of 16 bytes; only the angles go through shared memory."""
    problem = sized(LLAMA4, "bfloat16", tokens=4096, batch=1, heads=40, kv_heads=8, head_dim=128)
    whole, _ = machine_code_of(LLAMA4, problem.but(angle_dtype="float32"), resolve(gpu))
    assert whole.store_bytes == 16 * whole.global_stores > 0
    assert whole.load_bytes >= whole.store_bytes
    assert whole.global_loads <= whole.global_stores + 2
    assert whole.shared_accesses < 2 * whole.global_stores


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("gpu", ["sm_90", "sm_100"])
@both_ways
@pytest.mark.share(4)
def test_heads_are_read_and_written_in_vectors_and_angles_once_for_q_and_k(gpu, inverse):
    problem = sized(POSITIONS, "bfloat16", tokens=8192, batch=1, heads=32, kv_heads=8, head_dim=128)
    whole, resources = machine_code_of(POSITIONS, problem.but(inverse=inverse), resolve(gpu))
    assert resources.stack_bytes == 0
    angles = whole.global_loads - whole.global_stores
    assert whole.store_bytes == 8 * whole.global_stores > 0
    assert whole.load_bytes == whole.store_bytes + 2 * angles
    assert angles < whole.global_stores


@pytest.mark.slow
@needs_compiler
@each(GENERAL)
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("form", ["gemma3", "qwen3_next", "hunyuan", "llama4"])
@pytest.mark.share(16)
def test_the_forms_of_models_compile(spec, arch, form):
    problem, target = spec.bucketed(form_of(spec, form, tokens=4096, batch=1)), resolve(arch)
    assert compile_candidate(spec, problem, spec.default(problem, target), target, ALIGNED).cubin
