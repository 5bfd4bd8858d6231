import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from spec_samples import configs, inputs_of, launched, problems, sized

from tilekern.compile.cubin import read_resources
from tilekern.compile.toolchain import compile_candidate, toolkit
from tilekern.kernels import spec_named
from tilekern.kernels.adamw import WIDTHS, flat_shape
from tilekern.spec import ALIGNED, DTYPES, GENERIC
from tilekern.spec.targets import INTERPRETED, KNOWN, resolve
from tilekern.tuning.verify.check import compare, expected_results

SPEC = spec_named("adamw")
PLACES = {"new_param": "param", "new_exp_avg": "exp_avg", "new_exp_avg_sq": "exp_avg_sq"}
needs_compiler = pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")


def step(problem, config, inputs, *, in_place=False, blocks=None):
    """The results by name, in outputs of their own or in the memory of the inputs."""
    if not in_place:
        return launched(SPEC, problem, config, inputs, blocks)
    inputs = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    return launched(SPEC, problem, config, inputs, blocks, {name: inputs[place] for name, place in PLACES.items()})


@examples(60)
@given(data=st.data())
def test_in_place_gives_the_same_bits(data):
    """As the optimizer launches it; the tuner and the tests of all specs give it outputs of their own."""
    problem = data.draw(problems(SPEC), label="problem")
    config = data.draw(st.sampled_from(configs(SPEC, problem)), label="config")
    inputs = SPEC.inputs(problem, torch.Generator().manual_seed(0), "cpu")
    blocks = (
        data.draw(st.sampled_from([None, 1, 3, 50]), label="blocks") if config["schedule"] == "persistent" else None
    )
    apart, together = (step(problem, config, inputs, in_place=place, blocks=blocks) for place in (False, True))
    for name, expected in apart.items():
        assert torch.equal(together[name], expected), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_moves_where_gradient_and_moments_are_zero(dtype):
    problem = sized(SPEC, dtype)
    inputs = inputs_of(SPEC, problem)
    zeros = {name: torch.zeros_like(inputs[name]) for name in ("grad", "exp_avg", "exp_avg_sq")}
    found = step(problem, SPEC.default(problem, INTERPRETED), inputs | zeros | {"decay": 1.0, "eps": 1e-8})
    assert torch.equal(found["new_param"], inputs["param"])
    assert not found["new_exp_avg"].any()
    assert not found["new_exp_avg_sq"].any()


def test_nothing_but_the_results_is_rounded():
    """A step that brings the parameter near zero: what is left would be lost if anything were rounded on the way."""
    problem = sized(SPEC, "bfloat16")
    inputs = inputs_of(SPEC, problem)
    alone = SPEC.reference(**inputs | {"param": torch.zeros_like(inputs["param"])})["new_param"]
    inputs["param"] = (-alone / inputs["decay"]).bfloat16()
    found = step(problem, SPEC.default(problem, INTERPRETED), inputs)
    check = compare(SPEC, problem, found, expected_results(SPEC, problem, inputs))
    assert check.passed, check.reason


def test_a_second_moment_that_has_overflowed_stops_the_parameter_and_does_not_spoil_it():
    """As in torch: in float16 the square of a gradient above 256 does not fit."""
    problem = sized(SPEC, "float16")
    inputs = inputs_of(SPEC, problem) | {"decay": 1.0}
    inputs["exp_avg_sq"] = torch.full_like(inputs["exp_avg_sq"], torch.inf)
    found = step(problem, SPEC.default(problem, INTERPRETED), inputs)
    assert torch.equal(found["new_param"], inputs["param"])
    assert found["new_exp_avg_sq"].isposinf().all()


def test_the_sign_turns_the_gradient_alone():
    problem = sized(SPEC, "bfloat16")
    config, inputs = SPEC.default(problem, INTERPRETED), inputs_of(SPEC, problem)
    turned = step(problem, config, inputs | {"sign": 1.0, "grad": -inputs["grad"]})
    for name, expected in step(problem, config, inputs | {"sign": -1.0}).items():
        assert torch.equal(turned[name], expected), name


def test_what_changes_from_step_to_step_is_in_no_artifact():
    problem = sized(SPEC, "bfloat16")
    for config in configs(SPEC, problem):
        made = SPEC.device(problem, config)
        assert [name for name, _ in made.constants] == ["columns", "tile_m", "tile_n", "persistent", "bounded"]
        arrays_and_scalars = {p.name for p in made.parameters}
        assert arrays_and_scalars == set(SPEC.inputs(problem, torch.Generator(), "cpu")) | set(PLACES)


@given(elements=st.one_of(st.integers(1, 1 << 40), st.integers(1, 1 << 20).map(lambda n: 256 * n)))
def test_memory_is_seen_as_whole_rows_of_the_widest_width(elements):
    rows, columns = flat_shape(elements)
    assert rows * columns == elements
    assert columns == max(width for width in WIDTHS if elements % width == 0)


@pytest.mark.parametrize(
    ("elements", "shape"),
    [
        (1, (1, 1)),
        (128, (8, 16)),
        (2560, (10, 256)),
        (4096, (1, 4096)),
        (4097, (4097, 1)),
        (50257 * 768, (150771, 256)),
    ],
)
def test_some_sizes_by_hand(elements, shape):
    assert flat_shape(elements) == shape


def test_bytes_and_operations_counted_by_hand():
    problem = SPEC.problem(rows=10, columns=256, dtype="bfloat16")
    assert SPEC.bytes_moved(problem) == 7 * 2 * 2560
    assert SPEC.flops(problem) == 15 * 2560


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("target", KNOWN, ids=lambda target: target.key)
def test_the_space_is_small_but_real(columns, target):
    problem = SPEC.problem(rows=4096, columns=columns, dtype="bfloat16")
    found = list(SPEC.space.candidates(problem, target))
    assert 10 <= len(found) <= 30
    assert {config["schedule"] for config in found} == {"persistent", "block"}
    assert {config["tile_m"] * config["tile_n"] for config in found} == {1024, 2048, 4096}


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(("dtype", "arch"), [("float32", "sm_90"), ("bfloat16", "sm_100")])
@pytest.mark.nightly
def test_every_width_compiles_without_spills(dtype, arch):
    target = resolve(arch)
    for columns in WIDTHS:
        problem = SPEC.problem(rows=4096, columns=columns, dtype=dtype)
        for variant, config in ((ALIGNED, SPEC.default(problem, target)), (GENERIC, SPEC.generic(problem))):
            made = compile_candidate(SPEC, problem, config, target, variant)
            resources = read_resources(made.cubin, made.symbol)
            assert resources.stack_bytes == 0
            # A step waits for memory alone: no exchange between threads.
            assert resources.shared_bytes == 0 or variant == GENERIC
