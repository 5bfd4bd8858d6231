"""Products of float32 by TF32, beside the tests of all specs: what is rounded, the spaces, the machine code."""

import pytest
import torch
from spec_samples import assert_right, inputs_of, is_float, launched, one_of_each_code, resources_of, sized

from tilekern.compile.cubin import code_of
from tilekern.compile.toolchain import compile_candidate, toolkit
from tilekern.kernels import spec_named
from tilekern.kernels.skinny import int8
from tilekern.spec import ALIGNED, GENERIC
from tilekern.spec.targets import KNOWN, resolve
from tilekern.tuning.compile.machine_code import read_machine_code
from tilekern.tuning.verify.check import errors, expected_results

# Kernels, and the flags that a problem of them must have.
KERNELS = {
    "matmul": {"accumulated": False, "a_transposed": False, "silu": False},
    "skinny_linear": {"accumulated": False},
    "skinny_linear_int8": {},
    "grouped_linear": {"inner_first": False, "biased": False, "partial": False},
}
OPERANDS = ("a", "b", "x", "weight", "up")
every_kernel = pytest.mark.parametrize("name", KERNELS)


def rounded(value):
    """The nearest numbers of TF32, the even ones of two."""
    if not is_float(value):
        return value
    mantissa, exponent = torch.frexp(value.double())
    return torch.ldexp((mantissa * 2**11).round() / 2**11, exponent).float()


@every_kernel
@pytest.mark.parametrize("flags", [False, True])
@pytest.mark.parametrize("rows", [5, 70])
def test_the_operands_and_nothing_else_are_rounded_to_tf32(name, flags, rows):
    """With rounded operands in the reference, errors are those of sums in float32."""
    spec = spec_named(f"{name}_tf32")
    problem = sized(spec, flags=flags, rows=rows, inner=150, columns=84)
    inputs = inputs_of(spec, problem)
    given = inputs | {one: rounded(inputs[one]) for one in OPERANDS if one in inputs}
    expected, whole = expected_results(spec, problem, given), expected_results(spec, problem, inputs)
    for config in one_of_each_code(spec, problem):
        found = launched(spec, problem, config, inputs)["c" if name == "matmul" else "y"]
        (wanted,), (exact,) = expected.values(), whole.values()
        assert max(errors(found, wanted)) < 2e-6, config
        assert errors(found, exact)[0] > 1e-4, config


@every_kernel
def test_numbers_that_tf32_holds_are_multiplied_exactly(name):
    spec = spec_named(f"{name}_tf32")
    problem = sized(spec, rows=70, inner=64, columns=84)
    inputs = {key: x.sign() if is_float(x) else x for key, x in inputs_of(spec, problem).items()}
    assert_right(spec, problem, one_of_each_code(spec, problem), inputs, most=1e-7)


@every_kernel
@pytest.mark.parametrize("target", KNOWN, ids=lambda target: target.key)
def test_candidates_are_those_of_a_half_type_with_half_of_the_depth(name, target):
    spec, plain = spec_named(f"{name}_tf32"), int8.WIDENED if name == "skinny_linear_int8" else spec_named(name)
    for rows, columns in ((4096, 12288), (16, 4096), (64, 1024)):
        problem = spec.bucketed(sized(spec, rows=rows, inner=4096, columns=columns))
        of_half = plain.problem(**dict(problem), **KERNELS[name], dtype="float16")
        wanted = [
            config.but(tile_k=config["tile_k"] // 2, **({"widening": "float32"} if "widening" in config else {}))
            for config in plain.space.candidates(of_half, target)
            if config.get("implementation", "tile") == "tile" and config.get("widening", "float32") == "float32"
        ]
        assert list(spec.space.candidates(problem, target)) == wanted
        assert wanted
        assert spec.default(problem, target) in wanted


@every_kernel
def test_who_asks_the_kernel_itself_for_float32_gets_no_tf32(name):
    """It has another function, name and key; the interpreter's results are exact."""
    plain, spec = spec_named(name), spec_named(f"{name}_tf32")
    with pytest.raises(ValueError, match="dtype"):
        plain.problem(**dict(sized(plain)) | {"dtype": "tfloat32"})
    function = spec.device(sized(spec), spec.generic(sized(spec))).function
    assert function._pyfunc.__name__.endswith("_tf32")
    problem = sized(plain, inner=150)
    assert function is not plain.device(problem, plain.generic(problem)).function
    assert_right(plain, problem, [plain.generic(problem)], inputs_of(plain, problem), most=2e-6)


LARGE = [
    ("matmul", {"rows": 2048, "inner": 4096, "columns": 12288}, ("b_transposed",)),
    ("matmul", {"rows": 2048, "inner": 4096, "columns": 4096}, ("b_transposed", "biased", "gelu_tanh")),
    ("skinny_linear", {"rows": 1, "inner": 4096, "columns": 4096}, ("biased",)),
    ("skinny_linear", {"rows": 64, "inner": 4096, "columns": 12288}, ("gated", "rounded", "silu")),
    ("skinny_linear_int8", {"rows": 64, "inner": 4096, "columns": 12288}, ("gated", "rounded", "silu")),
    ("grouped_linear", {"rows": 65536, "inner": 2048, "columns": 1536, "experts": 128}, ("gathered",)),
    ("grouped_linear", {"rows": 65536, "inner": 768, "columns": 2048, "experts": 128}, ()),
]


@pytest.mark.slow
@pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize(("name", "sizes", "on"), LARGE)
@pytest.mark.share(8)
def test_defaults_of_real_sizes_multiply_by_matrix_units_and_spill_nothing(arch, name, sizes, on):
    """Matrix units take operands of float32 as TF32 alone."""
    spec, target = spec_named(f"{name}_tf32"), resolve(arch)
    problem = sized(spec, **sizes).but(**dict.fromkeys(on, True))
    made = compile_candidate(spec, problem, spec.default(problem, target), target, ALIGNED)
    assert resources_of(spec, problem, made, target).stack_bytes == 0
    assert read_machine_code(code_of(made.cubin, made.symbol), target.capability).whole.products > 0
    generic = compile_candidate(spec, problem, spec.generic(problem), target, GENERIC)
    assert resources_of(spec, problem, generic, target).stack_bytes <= 128
