"""lay_out: the bits of torch's ``.to`` by any config, and nothing written around a part of a larger matrix."""

import itertools
import math

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from spec_samples import VIEWS, configs, launched, one_of_each_code, resources_of, seen_as

from tilekern.compile.toolchain import compile_candidate, toolkit
from tilekern.kernels import spec_named
from tilekern.spec import ALIGNED, DTYPES, GENERIC
from tilekern.spec.targets import resolve

SPEC = spec_named("lay_out")
PAIRS = list(itertools.product(DTYPES, DTYPES))
# Around the sides of tiles and whole vectors, and below them.
SIDES = st.one_of(st.integers(1, 80), st.sampled_from([8, 16, 64, 120, 128, 129, 256, 264]))
# As long as the widest tile, and longer.
LONG = st.tuples(st.integers(1, 9), st.sampled_from([1000, 2048, 2056]))


def bits(x):
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])


def problem_of(x, dtype, *, transposed):
    x_dtype, dtype = (str(one).removeprefix("torch.") for one in (x.dtype, dtype))
    return SPEC.problem(rows=x.shape[0], columns=x.shape[1], transposed=transposed, x_dtype=x_dtype, dtype=dtype)


def laid_out(x, dtype, config, blocks=None, *, transposed, around):
    """Return a matrix, a part of which the kernel wrote, and the matrix that torch makes.

    ``around`` are the rows above and below the part, and the columns left and right of it.
    """
    wanted = (x.T if transposed else x).to(dtype)
    above, below, left, right = around
    rows, columns = wanted.shape
    whole = torch.full((above + rows + below, left + columns + right), 7.0, dtype=dtype)
    expected = whole.clone()
    expected[above : above + rows, left : left + columns] = wanted
    part = whole[above : above + rows, left : left + columns]
    launched(SPEC, problem_of(x, dtype, transposed=transposed), config, {"x": x}, blocks, {"y": part})
    return whole, expected


@examples(100)
@given(data=st.data())
def test_a_part_of_a_larger_matrix_gets_the_bits_of_torch_and_the_rest_stays(data):
    rows, columns = data.draw(st.one_of(st.tuples(SIDES, SIDES), LONG.flatmap(st.permutations)), label="sizes")
    x_dtype, dtype = (getattr(torch, data.draw(st.sampled_from(DTYPES), label=name)) for name in ("x_dtype", "dtype"))
    transposed = data.draw(st.booleans(), label="transposed")
    around = data.draw(st.tuples(*(st.sampled_from([0, 1, 8]),) * 4), label="around")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 3), label="seed"))
    x = seen_as(torch.randn(rows, columns, generator=generator).to(x_dtype), data.draw(st.sampled_from(VIEWS)))
    # A record's config is that of a bucket.
    problem = SPEC.bucketed(problem_of(x, dtype, transposed=transposed))
    config = data.draw(st.sampled_from(configs(SPEC, problem)), label="config")
    persistent = config["schedule"] == "persistent"
    blocks = data.draw(st.sampled_from([None, 1, 3]), label="blocks") if persistent else None
    whole, expected = laid_out(x, dtype, config, blocks, transposed=transposed, around=around)
    assert torch.equal(bits(whole), bits(expected))


# Ties between two neighbours of each half dtype, numbers next to the largest, and the least ones.
NUMBERS = [
    math.nan, math.inf, -math.inf, 0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-11 + 2**-23,
    65504.0, 65519.0, 65520.0, -65520.0, 7e4, 3.3895e38, 3.39e38, 3.4e38, -3.4e38, 2**-14, 2**-24, 2**-25, 3 * 2**-26,
    -(2**-25), 2**-126, 2**-127, 3 * 2**-134, 2**-133, 2**-134, -(2**-149),
]  # fmt: skip


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("x_dtype", "dtype"), PAIRS)
def test_numbers_that_a_dtype_cannot_hold_become_what_torch_makes_of_them(x_dtype, dtype, transposed):
    x = torch.tensor(NUMBERS).to(getattr(torch, x_dtype)).reshape(5, 6)
    problem = problem_of(x, getattr(torch, dtype), transposed=transposed)
    for config in one_of_each_code(SPEC, problem):
        whole, expected = laid_out(x, getattr(torch, dtype), config, transposed=transposed, around=(0, 1, 0, 2))
        assert torch.equal(bits(whole), bits(expected)), config


@pytest.mark.slow
@pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("x_dtype", "dtype"), PAIRS)
@pytest.mark.share(16)
def test_any_dtypes_compile_and_spill_nothing(arch, transposed, x_dtype, dtype):
    target = resolve(arch)
    problem = SPEC.problem(rows=1024, columns=4096, transposed=transposed, x_dtype=x_dtype, dtype=dtype)
    for config, variant in ((SPEC.default(problem, target), ALIGNED), (SPEC.generic(problem), GENERIC)):
        made = compile_candidate(SPEC, problem, config, target, variant)
        assert resources_of(SPEC, problem, made, target).stack_bytes == 0
