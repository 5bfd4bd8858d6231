import pytest
import torch
from spec_samples import assert_right, configs, inputs_of, interpret, launched, one_of_each_code, sized

from tilekern.kernels import spec_named
from tilekern.spec.targets import INTERPRETED

FORWARD, BACKWARD = spec_named("qk_norm_rope_forward"), spec_named("qk_norm_rope_backward")
every_spec = pytest.mark.parametrize("spec", [FORWARD, BACKWARD], ids=lambda spec: spec.name)


@every_spec
def test_the_angles_of_a_single_batch_entry_are_shared(spec):
    problem = sized(spec, batch=3)
    inputs = inputs_of(spec, problem)
    shared = {name: inputs[name][:1] for name in ("cos", "sin")}
    for config in configs(spec, problem)[:6]:
        for angles in (shared, {name: value.expand(3, -1, -1) for name, value in shared.items()}):
            check = interpret(spec, problem, config, {**inputs, **angles})
            assert check.passed, check.reason


@every_spec
def test_only_the_first_half_of_the_angles_is_read(spec):
    problem = sized(spec)
    inputs = inputs_of(spec, problem)
    half = problem["head_dim"] // 2
    for name in ("cos", "sin"):
        inputs[name] = inputs[name].clone()
        inputs[name][..., half:] = torch.nan
    for config in configs(spec, problem)[:2]:
        assert interpret(spec, problem, config, inputs).passed
        halves = {name: inputs[name][..., :half].contiguous() for name in ("cos", "sin")}
        assert interpret(spec, problem, config, {**inputs, **halves}).passed


@every_spec
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (5, 3, 80), (1, 1, 2), (3, 8, 16)], ids=str)
def test_sizes_of_models(spec, heads, kv_heads, head_dim):
    problem = sized(spec, "bfloat16", tokens=3, batch=2, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    inputs = inputs_of(spec, problem)
    assert_right(spec, problem, one_of_each_code(spec, problem), inputs)


def test_gradients_of_both_weights_come_from_their_own_heads():
    problem = sized(BACKWARD, "float32")
    inputs = inputs_of(BACKWARD, problem)
    inputs["dk_out"] = torch.zeros_like(inputs["dk_out"])
    expected = BACKWARD.reference(**inputs)
    assert not expected["dk"].any()
    assert not expected["dk_weight"].any()
    assert expected["dq_weight"].any()
    check = interpret(BACKWARD, problem, BACKWARD.generic(problem), inputs)
    assert check.passed, check.reason


def test_a_head_of_norm_one_is_only_rotated():
    problem = sized(FORWARD, "float32")
    inputs = inputs_of(FORWARD, problem) | {"eps": 0.0}
    for name in ("q", "k"):
        inputs[name] = torch.sign(inputs[name])
        inputs[f"{name}_weight"] = torch.ones(problem["head_dim"])
    rope = spec_named("rope")
    given = {name: inputs[name].transpose(1, 2) for name in ("q", "k")}
    turned = rope.reference(**given, cos=inputs["cos"], sin=inputs["sin"], inverse=False)
    for name, reference in FORWARD.reference(**inputs).items():
        torch.testing.assert_close(reference, turned[name].transpose(1, 2), rtol=1e-12, atol=1e-12)


def test_the_norm_is_not_rounded_before_the_rotation():
    """First halves of heads that nearly cancel: what is left of them would be lost."""
    problem = sized(FORWARD, "bfloat16")
    inputs = inputs_of(FORWARD, problem)
    half = problem["head_dim"] // 2
    for name in ("q", "k"):
        inputs[name][..., half:] = inputs[name][..., :half]
        inputs[f"{name}_weight"][:half], inputs[f"{name}_weight"][half:] = 1, 1 - 2**-8
    inputs["cos"].fill_(1)
    inputs["sin"].fill_(1)
    outputs = launched(FORWARD, problem, FORWARD.default(problem, INTERPRETED), inputs, 1)
    for name, expected in FORWARD.reference(**inputs).items():
        torch.testing.assert_close(outputs[name][..., :half].double(), expected[..., :half], rtol=2**-7, atol=0)


@pytest.mark.parametrize(
    ("spec", "dtypes", "moved"),
    [
        (FORWARD, ("bfloat16", "bfloat16", "bfloat16"), 320 * 4 + 4 * 10 * 2 + 2 * 10 * 2),
        (FORWARD, ("bfloat16", "float32", "bfloat16"), 320 * 6 + 4 * 10 * 2 + 2 * 10 * 4),
        (BACKWARD, ("bfloat16", "bfloat16", "bfloat16"), 320 * 6 + 4 * 10 * 2 + 2 * 2 * 10 * 2),
        (BACKWARD, ("bfloat16", "bfloat16", "float32"), 320 * 8 + 4 * 10 * 4 + 2 * 2 * 10 * 2),
    ],
)
def test_bytes_counted_by_hand(spec, dtypes, moved):
    names = dict(zip(("dtype", "weight_dtype", "angle_dtype"), dtypes, strict=True))
    problem = spec.problem(tokens=4, batch=2, heads=3, kv_heads=1, head_dim=10, **names)
    assert spec.bytes_moved(problem) == moved
