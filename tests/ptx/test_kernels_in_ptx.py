"""Kernels of CuTe DSL, run by the interpreter of PTX and held to float64; broken ones must be found."""

import functools
import importlib
import itertools
import math
import re
import tempfile

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from ptx_machine import PtxError, run
from spec_samples import draws_of, inputs_of

from tilekern.kernels import spec_named
from tilekern.kernels.families.cute_configs import is_cute
from tilekern.spec import DTYPES, ITEM_BYTES, Config, cdiv
from tilekern.spec.targets import resolve
from tilekern.tuning.verify.bit_classes import placements
from tilekern.tuning.verify.check import arguments_of, compare, expected_results, make_outputs

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

INFINITY, NAN = math.inf, math.nan

ROWS = (
    "rms_norm_forward", "rms_norm_backward", "layer_norm_forward", "layer_norm_backward", "softmax_forward",
    "softmax_backward", "fused_add_rms_norm_forward", "fused_add_rms_norm_backward",
    "fused_rms_norm_add_rms_norm_forward", "fused_rms_norm_add_rms_norm_backward",
)  # fmt: skip
# Kernels that also have configs whose rows come into a ring in shared memory.
RINGS = (
    "rms_norm_backward", "layer_norm_backward", "fused_add_rms_norm_backward", "fused_rms_norm_add_rms_norm_backward",
)  # fmt: skip
HEADS, LOSS, SUM = "qk_norm_rope_backward", "cross_entropy_fused", "column_sum"
EVERY = (*ROWS, HEADS, LOSS, SUM)

# Dimensions of a problem where a test says nothing.
SIZES = {
    "rows": 7, "columns": 1000, "vocabulary": 1000, "tokens": 5, "batch": 2, "heads": 8, "kv_heads": 4, "head_dim": 128,
    "dtype": "bfloat16", "weight_dtype": "bfloat16", "angle_dtype": "bfloat16", "cast": True,
}  # fmt: skip
# Axes of a config where a test says nothing.
_OF_ROWS = {"schedule": "persistent", "rows": 1, "cluster": 1, "ahead": False, "occupancy": 1}
AXES = dict.fromkeys(ROWS, _OF_ROWS) | {
    HEADS: {"schedule": "persistent", "warps": 4, "together": 1, "ahead": 1, "occupancy": 1},
    LOSS: {"schedule": "persistent", "threads": 64, "cluster": 1, "occupancy": 1},
    SUM: {"schedule": "block", "threads": 128, "width": 32, "cluster": 1, "loads": 4},
}  # fmt: skip
RING_AXES = {"schedule": "persistent", "threads": 64, "stages": 2, "early": False, "occupancy": 1}


def problem_of(name, **values):
    spec = spec_named(name)
    known = dict.fromkeys((d.name for d in spec.dimensions), False) | SIZES
    known |= {"weight_dtype": "float32"} if name in ROWS else {}
    return spec.problem(**{d.name: (known | values)[d.name] for d in spec.dimensions})


def kernel_of(name, problem, **axes):
    """The kernel of a config, whether the search space has it or not."""
    axes = (RING_AXES if "stages" in axes else AXES[name]) | axes
    return spec_named(name).implement(problem, Config(implementation="cute", **axes))


def ptx_of(kernel, arch="sm_90"):
    """What CuTe DSL makes of a kernel, as :func:`tilekern.compile.cute_compiler.compile_kernel` has it compiled."""
    parameters, constants = tuple(kernel.parameters), tuple(kernel.constants)
    return made_of(kernel.kernel, kernel.function, parameters, kernel.block, kernel.cluster, constants, arch)


@functools.lru_cache(maxsize=64)
def made_of(where, function, parameters, block, cluster, constants, arch):
    cute = pytest.importorskip("cutlass.cute", reason="nvidia-cutlass-dsl is not installed")
    module, _, name = where.partition(":")
    program = getattr(importlib.import_module(module), name)(
        function, parameters, capability=int(arch.removeprefix("sm_")), block=block, cluster=cluster, **dict(constants)
    )
    with tempfile.TemporaryDirectory() as folder:
        made = cute.compile(program, program.sample, options=f"--gpu-arch {arch} --keep-ptx --dump-dir {folder}")
        text = made.artifacts.PTX
    return text if isinstance(text, str) else text.decode()


def drawn(name, problem, **changes):
    """The inputs of a spec."""
    return inputs_of(spec_named(name), problem) | changes


def with_gaps(x, gap):
    """A tensor with NaN between its rows, of whole 16 bytes; a weight and a number as they are."""
    if not isinstance(x, torch.Tensor) or x.dim() < 2 or gap == 0:
        return x
    *leading, size = x.shape
    return x.new_full((*leading, size + gap * 16 // x.element_size()), NAN)[..., :size].copy_(x)


def launched(name, problem, kernel, inputs, clusters=None, *, gap=0, seed=0, arch="sm_90", text=None, outputs=None):
    """The outputs of a kernel on some clusters, as many as its problem takes or others, its rows apart."""
    spec, clusters = spec_named(name), clusters or kernel.grid(problem, 64) // kernel.cluster
    inputs = {key: with_gaps(x, gap) for key, x in inputs.items()}
    made = make_outputs(spec, problem, clusters, "cpu")
    made = {key: x if key == "partial" else with_gaps(x, gap) for key, x in made.items()} | (outputs or {})
    run(
        text or ptx_of(kernel, arch), clusters * kernel.cluster, arguments_of(kernel, inputs, made),
        cluster=kernel.cluster, shared_bytes=kernel.shared_bytes, seed=seed,
    )  # fmt: skip
    return made


def assert_right(name, problem, kernel, clusters=None, inputs=None, *, expected=None, **how):
    """Hold a kernel to the reference in float64."""
    spec, inputs = spec_named(name), inputs or drawn(name, problem)
    outputs = launched(name, problem, kernel, inputs, clusters, **how)
    check = compare(spec, problem, outputs, expected or expected_results(spec, problem, inputs))
    assert check.passed, check.reason


# Launches that a list names.


def each(names, *cases, clusters=None, **how):
    """Yield the cases of each spec: sizes and flags of a problem, and axes of a config."""
    names = (names,) if isinstance(names, str) else names
    return [(name, sizes, axes, clusters, how) for name in names for sizes, axes in cases]


def named(text, *values):
    """Dictionaries with one list of names."""
    return [dict(zip(text.split(), line, strict=True)) for line in values]


SHARES = named("threads cluster", (32, 1), (64, 1), (256, 1), (32, 2), (64, 4), (256, 2), (128, 8))


def split(case, *axes):
    """The sizes and the axes of a line that has both."""
    return {k: v for k, v in case.items() if k not in axes}, {k: v for k, v in case.items() if k in axes}


def _row_cases():
    # Rows that leave threads idle, short rows of which four share a warp and the last block has one, rows of a cluster,
    # and blocks without a row, which read nothing. Kernels with sums over rows have one row a block.
    backward = [name for name in ROWS if "backward" in name]
    forward = [name for name in ROWS if name not in backward]
    yield from each(ROWS, *(({}, {"threads": 128, "ahead": ahead}) for ahead in (False, True)), clusters=3, gap=1)
    short = {"rows": 9, "columns": 64, "dtype": "float16", "weight_dtype": "float16"}
    yield from each(forward, (short, {"threads": 8, "rows": 4, "schedule": "block"}), gap=2)
    yield from each(backward, (short, {"threads": 8}), gap=2)
    shared = {"rows": 5, "columns": 1992, "dtype": "float32", "weight_dtype": "bfloat16", "cast": False}
    pairs = named("cluster threads", (2, 256), (4, 64))
    yield from each(ROWS, *((shared, axes) for axes in pairs), clusters=2, gap=1)
    yield from each(ROWS, ({"rows": 3, "columns": 520}, {"threads": 64, "ahead": True}), clusters=5)
    # With blocks that have no row, rows for less than a round of the ring, one round, and several and a part.
    for rows, blocks in ((2, 3), (6, 2), (11, 1)):
        axes = {"stages": 3, "early": rows > 2}
        yield from each(RINGS, ({"rows": rows, "columns": 520}, axes), clusters=blocks, gap=1)
        wide = {"rows": rows, "columns": 264, "dtype": "float32", "weight_dtype": "float16"}
        yield from each(RINGS, (wide, axes), clusters=blocks, gap=1, arch="sm_100")


def _head_cases():
    # Warps whose heads are of several tokens or fewer than they have room for, and some whose steps are cut short.
    lines = named(
        "heads kv_heads together ahead", (8, 4, 1, 1), (8, 4, 2, 3), (16, 8, 2, 1), (16, 8, 2, 2), (5, 3, 1, 1),
        (5, 3, 1, 2), (1, 1, 2, 1), (6, 6, 4, 2),
    )  # fmt: skip
    yield from each(HEADS, *(split(line, "together", "ahead") for line in lines), clusters=3, gap=1)
    dtypes = named(
        "dtype head_dim weight_dtype angle_dtype", ("bfloat16", 16, "bfloat16", "float32"),
        ("bfloat16", 256, "float32", "bfloat16"), ("float16", 512, "float16", "float16"),
        ("float32", 8, "float32", "float32"), ("float32", 128, "bfloat16", "float16"),
    )  # fmt: skip
    few = {"tokens": 3, "heads": 4, "kv_heads": 2}
    yield from each(HEADS, *((few | line, {"warps": 2, "ahead": 2}) for line in dtypes), clusters=2, gap=2)
    alone = {"tokens": 1, "batch": 1, "heads": 5, "kv_heads": 1}
    yield from each(HEADS, (alone, {"ahead": 2}), clusters=2)
    yield from each(HEADS, (alone, {"ahead": 2}), clusters=40)


def _loss_cases():
    # With threads that have no vector, with one or several of them, and with a last one that some do not have.
    for axes, (schedule, clusters) in itertools.product(SHARES, (("persistent", 2), ("block", None))):
        yield from each(LOSS, ({}, axes | {"schedule": schedule}), clusters=clusters, gap=1)
    small = (("float16", 512), ("float32", 1020), ("float32", 4))
    for dtype, columns in (*small, ("bfloat16", 8)):
        sizes = {"rows": 5, "vocabulary": columns, "dtype": dtype}
        yield from each(LOSS, (sizes, {"cluster": 2}), clusters=7, gap=2)


def _sum_cases():
    # With threads that have no row, one or several of them; the last block has fewer columns than others.
    for wide, many in itertools.product(
        named("threads width", (128, 16), (128, 128), (256, 32), (512, 64), (1024, 16)),
        named("cluster loads", (1, 1), (1, 8), (2, 4), (4, 2)),
    ):
        yield from each(SUM, ({"rows": 133, "columns": 180}, wide | many), gap=1)
    for dtype, (rows, columns) in itertools.product(DTYPES, [(1, 16), (3, 20), (65, 64), (300, 4)]):
        sizes = {"rows": rows, "columns": columns, "dtype": dtype}
        yield from each(SUM, (sizes, {"width": 16, "cluster": 2}), gap=2)


CASES = [*_row_cases(), *_head_cases(), *_loss_cases(), *_sum_cases()]


@pytest.mark.parametrize(("name", "sizes", "axes", "clusters", "how"), CASES, ids=str)
def test_listed_launches_are_right(name, sizes, axes, clusters, how):
    problem = problem_of(name, **sizes)
    assert_right(name, problem, kernel_of(name, problem, **axes), clusters, **how)


# Any launch.


def _of_vectors(draw, most, dtype):
    """A number of columns: so many whole vectors, or fewer."""
    return 16 // ITEM_BYTES[dtype] * draw(st.one_of(st.just(most), st.integers(1, most)))


def _any_rows(draw):
    name, dtype = draw(st.sampled_from(ROWS)), draw(st.sampled_from(DTYPES))
    is_backward = "backward" in name
    threads, cluster = draw(st.sampled_from([8, 16, 32, 64, 128, 256])), draw(st.sampled_from([1, 1, 2, 4]))
    rows = 1 if is_backward else draw(st.sampled_from([1, 2, 4]))
    persistent = is_backward or draw(st.booleans())
    columns = _of_vectors(draw, threads * cluster * draw(st.integers(1, 3)), dtype)
    sizes = {"rows": draw(st.integers(1, 9)), "columns": columns, "dtype": dtype, "cast": draw(st.booleans())}
    steps = cdiv(sizes["rows"], rows)
    axes = {"threads": threads, "rows": rows, "cluster": cluster, "ahead": persistent and draw(st.booleans())}
    axes |= {"schedule": "persistent" if persistent else "block"}
    weight = {"weight_dtype": draw(st.sampled_from(DTYPES))}
    return name, sizes | weight, axes, draw(st.integers(1, steps + 2)) if persistent else steps


def _any_ring(draw):
    dtype, weight_dtype = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))
    threads = draw(st.sampled_from([64, 128, 256, 512]))
    columns = _of_vectors(draw, threads * draw(st.integers(1, 2)), dtype)
    sizes = {"rows": draw(st.integers(1, 12)), "columns": columns, "dtype": dtype, "weight_dtype": weight_dtype}
    axes = {"threads": threads, "stages": draw(st.integers(1, 6)), "early": draw(st.booleans())}
    return draw(st.sampled_from(RINGS)), sizes | {"cast": draw(st.booleans())}, axes, draw(st.integers(1, 4))


def _any_tokens(draw, threads):
    """Sizes of heads that so many threads share, and any dtypes."""
    dtype = draw(st.sampled_from(DTYPES))
    return {
        "tokens": draw(st.integers(1, 5)), "batch": draw(st.integers(1, 3)), "heads": draw(st.integers(1, 17)),
        "kv_heads": draw(st.integers(1, 9)), "head_dim": 2 * draw(st.sampled_from(threads)) * 16 // ITEM_BYTES[dtype],
        "dtype": dtype, "weight_dtype": draw(st.sampled_from(DTYPES)), "angle_dtype": draw(st.sampled_from(DTYPES)),
    }  # fmt: skip


def _any_heads(draw):
    axes = {"warps": draw(st.sampled_from([1, 2, 4, 8])), "together": draw(st.sampled_from([1, 2, 4]))}
    sizes = _any_tokens(draw, [1, 2, 4, 8, 16, 32])
    return HEADS, sizes, axes | {"ahead": draw(st.integers(1, 3))}, draw(st.integers(2, 9))


def _any_losses(draw):
    dtype, cluster = draw(st.sampled_from(DTYPES)), draw(st.sampled_from([1, 1, 2, 4]))
    schedule, rows = draw(st.sampled_from(["persistent", "block"])), draw(st.integers(1, 9))
    sizes = {"rows": rows, "vocabulary": 16 // ITEM_BYTES[dtype] * draw(st.integers(1, 400)), "dtype": dtype}
    axes = {"threads": draw(st.sampled_from([32, 64, 128, 256])), "cluster": cluster, "schedule": schedule}
    return LOSS, sizes, axes, draw(st.integers(1, 9)) if schedule == "persistent" else rows


def _any_sums(draw):
    sizes = {"rows": draw(st.integers(1, 300)), "columns": 4 * draw(st.integers(1, 80))}
    axes = {"threads": draw(st.sampled_from([128, 256, 512])), "width": draw(st.sampled_from([16, 32, 64, 128]))}
    axes |= {"cluster": draw(st.sampled_from([1, 1, 2, 4])), "loads": draw(st.sampled_from([1, 2, 4, 8]))}
    return SUM, sizes | {"dtype": draw(st.sampled_from(DTYPES))}, axes, None


# There are no clusters before Hopper, and no copies in bulk.
ANY = {
    "rows": _any_rows, "rings": _any_ring, "heads": _any_heads, "losses": _any_losses, "sums": _any_sums,
}  # fmt: skip


@pytest.mark.parametrize("family", ANY)
@examples(12)
@given(data=st.data())
def test_any_launch_is_right(family, data):
    name, sizes, axes, clusters = data.draw(st.composite(ANY[family])(), label="launch")
    gpus = ["sm_80", "sm_90", "sm_100"][axes.get("cluster", 1) > 1 or "stages" in axes :]
    how = {"arch": data.draw(st.sampled_from(gpus), label="GPU"), "gap": data.draw(st.integers(0, 2), label="gap")}
    problem = problem_of(name, **sizes)
    assert_right(name, problem, kernel_of(name, problem, **axes), clusters, **how)


def _sizes_for_candidates(name, random):
    """Sizes for which the search space has configs, small enough to run them."""
    if name in ROWS:
        return {"rows": random.randint(1, 9), "columns": random.choice([520, 1000]), "dtype": random.choice(DTYPES)}
    if name == SUM:
        return {"rows": random.randint(100, 300), "columns": random.choice([128, 260]), "dtype": random.choice(DTYPES)}
    if name == LOSS:
        return {"rows": 5, "vocabulary": 8192, "dtype": "float32"}
    heads = random.choice(named("heads kv_heads", (16, 8), (8, 1), (5, 3)))
    return heads | {"tokens": random.choice([5, 9]), "dtype": random.choice(DTYPES)}


@pytest.mark.parametrize("name", EVERY)
def test_candidates_of_the_search_space_are_right(name):
    spec = spec_named(name)
    random = draws_of(spec)
    problem = problem_of(name, **_sizes_for_candidates(name, random))
    candidates = [config for config in spec.space.candidates(problem, resolve("H200")) if is_cute(config)]
    for config in random.sample(candidates, 2):
        kernel = spec.implement(problem, config)
        few = None if name == SUM else kernel.grid(problem, 16) // kernel.cluster
        assert_right(name, problem, kernel, few)


# Numbers that are not finite, and rows that do not count.


@pytest.mark.parametrize(
    "options", [{"threads": 128, "ahead": True}, {"threads": 32, "cluster": 2, "rows": 2}], ids=str
)
@pytest.mark.parametrize("level", [-1000.0, 0.0])
def test_softmax_of_numbers_that_are_not_finite_is_torchs(options, level):
    """Zeros beyond the end of a row must not be the maximum of a row of negative numbers."""
    name = "softmax_forward"
    x = torch.randn(6, 1000, generator=torch.Generator().manual_seed(0)) + level
    x[1, 999], x[2, 0], x[3, 500], x[4] = INFINITY, NAN, -INFINITY, -INFINITY
    problem = problem_of(name, rows=6, dtype="float32")
    assert_right(name, problem, kernel_of(name, problem, **options), clusters=2, inputs={"x": x})


@pytest.mark.parametrize(("x", "y"), [("q", "k"), ("dq_out", "dk_out")])
def test_a_number_that_is_not_finite_stays_in_its_head(x, y):
    problem = problem_of(HEADS, tokens=3, batch=1, heads=5, kv_heads=3)
    inputs = drawn(HEADS, problem)
    inputs[x][0, 2, 4, 3], inputs[y][0, 0, 0, 127] = NAN, NAN
    assert_right(HEADS, problem, kernel_of(HEADS, problem, ahead=2), 3, inputs)


@pytest.mark.parametrize("cluster", [1, 2])
def test_a_number_that_is_not_finite_stays_in_its_column(cluster):
    problem = problem_of(SUM, rows=70, columns=96, dtype="float32")
    inputs = drawn(SUM, problem)
    inputs["x"][69, 41], inputs["x"][3, 7] = INFINITY, NAN
    found = launched(SUM, problem, kernel_of(SUM, problem, cluster=cluster), inputs)["y"]
    assert found[41] == INFINITY
    assert (~found.isfinite()).nonzero().flatten().tolist() == [7, 41]


@pytest.mark.parametrize("value", [NAN, INFINITY])
def test_a_logit_that_is_not_finite_makes_its_row_nan(value):
    problem = problem_of(LOSS, rows=3, dtype="float32")
    inputs = drawn(LOSS, problem)
    inputs["logits"][1, 777] = value
    inputs["target"][:] = torch.tensor([777, 5, 777])
    found = launched(LOSS, problem, kernel_of(LOSS, problem, cluster=2), inputs, 2)
    assert found["loss"].isnan().tolist() == [False, True, False]
    assert found["dlogits"].isnan().all(1).tolist() == [False, True, False]


@pytest.mark.parametrize("cluster", [1, 2])
def test_rows_that_do_not_count_are_not_read(cluster):
    problem = problem_of(LOSS, rows=9)
    inputs, ignored = drawn(LOSS, problem), [0, 2, 3, 8]
    inputs["target"][ignored] = -100
    expected = expected_results(spec_named(LOSS), problem, inputs)
    inputs["logits"][ignored] = NAN
    kernel = kernel_of(LOSS, problem, cluster=cluster)
    assert_right(LOSS, problem, kernel, 2, inputs, expected=expected)
    found = launched(LOSS, problem, kernel, inputs, 2)
    assert not any(x[ignored].any() for x in found.values())
    assert all(x.isfinite().all() for x in found.values())


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("label", [-1, 1000, 1 << 30, -(1 << 31)])
def test_a_label_outside_the_classes_gives_nan(label, cluster):
    problem = problem_of(LOSS, rows=3)
    inputs = drawn(LOSS, problem)
    inputs["target"][:] = torch.tensor([7, label, 999])
    found = launched(LOSS, problem, kernel_of(LOSS, problem, cluster=cluster), inputs, 2)
    for key in ("loss", "dlogits"):
        assert found[key][1].isnan().all()
        assert found[key][[0, 2]].isfinite().all()
    assert found["lse"].isfinite().all()


@pytest.mark.parametrize("level", [-3e38, -1000.0, 1000.0, 3e38])
def test_losses_of_large_logits_are_those_of_their_differences(level):
    """Nothing behind the end of a row is its maximum; a class that cannot be adds nothing."""
    problem = problem_of(LOSS, rows=4, dtype="float32")
    inputs = drawn(LOSS, problem, z_loss=0.0)
    inputs["target"][:] = torch.tensor([0, 999, 500, 3])
    inputs["logits"][:] = level
    inputs["logits"][:, 10:20] = -INFINITY
    found = launched(LOSS, problem, kernel_of(LOSS, problem, cluster=4), inputs, 2)
    torch.testing.assert_close(found["loss"], torch.full((4,), math.log(990)))
    expected = torch.full((4, 1000), 1 / 990)
    expected[:, 10:20] = 0
    expected[range(4), inputs["target"]] -= 1
    torch.testing.assert_close(found["dlogits"], expected * inputs["scale"][:, None])


# Layouts of heads, and angles.


def test_no_heads_give_sums_of_zero():
    problem = problem_of(HEADS, tokens=1, batch=1, heads=5, kv_heads=1).but(tokens=0)
    inputs = {key: x[:, :0] if getattr(x, "ndim", 0) > 2 else x for key, x in drawn(HEADS, problem_of(HEADS)).items()}
    for blocks in (2, 40):
        assert not launched(HEADS, problem, kernel_of(HEADS, problem), inputs, blocks)["partial"].any()


@pytest.mark.parametrize("columns", [128, 64])
def test_heads_share_the_angles_of_one_batch_entry(columns):
    """If angles are stored twice, only the first ones are read."""
    problem = problem_of(HEADS, batch=3)
    inputs = drawn(HEADS, problem)
    inputs |= {key: inputs[key][..., :1, :, :64] for key in ("cos", "sin")}
    expected = expected_results(spec_named(HEADS), problem, inputs)
    for key in ("cos", "sin"):
        angles = inputs[key]
        inputs[key] = angles.new_full((*angles.shape[:-1], columns), NAN)
        inputs[key][..., :64] = angles
    assert_right(HEADS, problem, kernel_of(HEADS, problem, ahead=2), 5, inputs, expected=expected)


def _projection(order):
    """q, k and v of 16 heads [3 tokens, 2 batch entries], which change places."""
    both = torch.randn(3, 2, 8 + 4 + 4, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    return both.permute(order)


def test_heads_may_be_parts_of_one_projection():
    """Tokens are further apart than their heads are, and batch entries and tokens change places."""
    problem, both = problem_of(HEADS, tokens=3), _projection((1, 0, 2, 3))
    inputs = drawn(HEADS, problem, q=both[:, :, :8], k=both[:, :, 8:12])
    assert_right(HEADS, problem, kernel_of(HEADS, problem, together=2), 4, inputs)


# The same bits.


@pytest.mark.parametrize("axes", SHARES, ids=str)
@pytest.mark.parametrize(("schedule", "clusters"), [("persistent", 2), ("block", 7)])
def test_a_gradient_in_place_has_the_same_bits(axes, schedule, clusters):
    """No block reads what another one stores, whatever their order, not even the target's logit."""
    problem = problem_of(LOSS)
    kernel, inputs = kernel_of(LOSS, problem, schedule=schedule, **axes), drawn(LOSS, problem)
    expected = launched(LOSS, problem, kernel, inputs, clusters)
    found = launched(LOSS, problem, kernel, inputs, clusters, outputs={"dlogits": inputs["logits"]})
    assert all(found[key].equal(x) for key, x in expected.items())


def test_sums_over_rows_of_a_ring_have_a_fixed_order():
    name = "rms_norm_backward"
    problem = problem_of(name, rows=11, columns=520)
    kernel, inputs = kernel_of(name, problem, stages=3), drawn(name, problem)
    one, other = (launched(name, problem, kernel, inputs, 4, seed=seed) for seed in (0, 1))
    assert all(one[key].equal(other[key]) for key in one)


@pytest.mark.parametrize("cluster", [1, 4])
def test_sums_have_a_fixed_order_and_the_same_bits_in_each_column(cluster):
    """Columns of equal numbers, which lie in different lanes, vectors and blocks, have equal sums."""
    problem = problem_of(SUM, rows=264, columns=128, dtype="float32")
    kernel, inputs = kernel_of(SUM, problem, threads=256, cluster=cluster), drawn(SUM, problem)
    inputs["x"][:] = inputs["x"][:, :1]
    found, again = (launched(SUM, problem, kernel, inputs)["y"] for _ in range(2))
    assert found.equal(found[0].expand(128))
    assert found.equal(again)


# The text of kernels.


def text_of(name, axes, **sizes):
    return ptx_of(kernel_of(name, problem_of(name, **sizes), **axes))


@pytest.mark.parametrize(
    ("name", "axes"),
    [(HEADS, {}), (LOSS, {"cluster": 2}), (SUM, {}), (SUM, {"cluster": 4})],
)
def test_no_thread_adds_to_what_another_has_stored_in_global_memory(name, axes):
    assert not re.search(r"\b(atom|red)\b", text_of(name, axes))


def test_a_row_of_logits_is_read_once_in_vectors_and_written_once():
    """In each of two branches the gradient: of rows that are ignored and of others; and the target's logit alone."""
    text = text_of(LOSS, {"threads": 256, "cluster": 2, "schedule": "block"}, vocabulary=4096)
    counts = {"ld.global.v4.b32": 1, "st.global.v4.b32": 2, "ld.global.b16": 1, "ld.global.nc": 0}
    assert {word: text.count(word) for word in counts} == counts


def test_a_matrix_is_read_in_vectors_which_are_on_their_way_at_once():
    text = text_of(SUM, {"threads": 256, "loads": 8}, rows=264, columns=4096)
    lines = [line for line in text.splitlines() if re.search(r"ld\.global|add(\.rn)?\.f32", line)]
    assert "ld.global.nc" not in text
    assert [("ld.global.v4" in line) for line in lines[:9]] == [True] * 8 + [False]


@pytest.mark.parametrize("name", [*(name for name in ROWS if name.startswith("fused")), HEADS, SUM])
def test_a_dependent_kernel_waits_before_it_touches_memory(name):
    problem = problem_of(name, rows=9, columns=64)
    kernel = kernel_of(name, problem, **({"threads": 16} if name in ROWS else {}))
    assert kernel.dependent
    before, _, after = ptx_of(kernel).partition("griddepcontrol.wait")
    assert "ld.global" not in before
    assert "ld.global" in after


@pytest.mark.parametrize("name", [name for name in ROWS if name.endswith("norm_forward")])
def test_a_norm_of_few_rows_lets_the_next_kernel_be_launched_before_it_loads(name):
    def made(rows):
        problem = problem_of(name, rows=rows, columns=64)
        return ptx_of(kernel_of(name, problem, threads=16))

    before, _, after = made(64).partition("griddepcontrol.launch_dependents")
    assert ("griddepcontrol.wait" in before) is name.startswith("fused")
    assert not re.search(r"\b(ld|st)\.global", before)
    assert "ld.global" in after
    assert "griddepcontrol.launch_dependents" not in made(65)


def test_gpus_without_early_launches_compile_none():
    problem = problem_of("fused_add_rms_norm_forward", columns=64)
    assert "griddepcontrol" not in ptx_of(kernel_of("fused_add_rms_norm_forward", problem, threads=16), "sm_80")


# Kernels that somebody has broken: the interpreter finds it.

BARRIERS = {1: ["bar.sync"], 2: ["barrier.cluster.arrive", "barrier.cluster.wait"]}


def without_last(cluster):
    """A change that takes the last barrier out of a text."""

    def change(text):
        lines = text.splitlines()
        last = [max(n for n, line in enumerate(lines) if word in line) for word in BARRIERS[cluster]]
        return "\n".join(line for n, line in enumerate(lines) if n not in last)

    return change


def without(pattern, instead=""):
    return lambda text: re.sub(pattern, instead, text)


RACE, OUTSIDE = "race|nobody has written", "outside of all tensors"
RING = ("rms_norm_backward", {"rows": 5, "columns": 520}, {"stages": 2})
NORM = ("rms_norm_forward", {"rows": 4}, {"threads": 64})
ODD_HEADS = (HEADS, {"heads": 5, "kv_heads": 3}, {})
# Some row does not count.
LOSSES = (LOSS, {"rows": 5}, {})
ONE_PLACE = without(r"xor.b32.*;")
# A row that does not count has no exchange: a fast warp would store for the next row where a slow one still reads.
TAKES_A_TURN = without(r"selp.b32(\s+%r\d+), 1, 0, %p\d+;(\s+xor)", r"mov.b32\1, 1;\2")
SOME_SUMS = (SUM, {"rows": 70, "columns": 100}, {"loads": 2})
BROKEN = {
    # The turn changes with each row: a fast warp may be at the next one.
    "norm in one place": (NORM, ONE_PLACE, "race"),
    "losses in one place": (LOSSES, ONE_PLACE, "race"),
    "losses of ignored rows": (LOSSES, TAKES_A_TURN, "race"),
    "sums beyond the last column": (SOME_SUMS, without(r", (99|100);", ", 999;"), OUTSIDE),
}
BROKEN = {f"{name}, {n} blocks": (*what, {"cluster": n}) for name, what in BROKEN.items() for n in BARRIERS}
BROKEN |= {
    f"{case[0]} without its barrier, {n} blocks": (case, without_last(n), RACE, {"cluster": n})
    for case in (NORM, LOSSES, SOME_SUMS)
    for n in BARRIERS
}
BROKEN |= {
    # Thread 125 would read the gap behind column 1000.
    "norm beyond the end of a row": (NORM, without(", 124;", ", 999;"), OUTSIDE, {"threads": 128}),
    "heads without their barrier": (ODD_HEADS, without("bar.sync", "// bar.sync"), RACE, {}),
    "heads beyond the last": (ODD_HEADS, without("setp.lt.s32", "setp.ne.s32"), OUTSIDE, {}),
    "ring that does not wait": (
        RING, without(r"@P1 bra.uni DONE;\s+bra.uni\s+LAB_WAIT;"), "has not seen the end", {},
    ),
    "ring that waits for one phase": (RING, without(r"xor.b32[^;]*%r\d+;"), "has not seen the end|deadlock", {}),
    "ring without a fence": (RING, without("fence.mbarrier_init", "// fence"), "no fence.mbarrier_init", {}),
    "ring of late barriers": (RING, lambda text: text.replace("bar.sync", "// bar.sync", 1), "init by another", {}),
    "ring beyond the last row": (
        RING, without(r"(or\.pred\s+%p\d+, )(%p\d+), %p\d+", r"\1\2, \2"), "elements of one tensor|outside of all", {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("which", BROKEN)
def test_a_broken_kernel_fails_and_the_whole_one_does_not(which):
    (name, sizes, axes), change, what, more = BROKEN[which]
    problem = problem_of(name, **sizes)
    kernel, inputs = kernel_of(name, problem, **axes | more), drawn(name, problem)
    if name == LOSS:
        inputs["target"][1] = -100
    clusters = {HEADS: 3, SUM: None}.get(name, 1)
    gap = int(name in (SUM, *ROWS))
    assert_right(name, problem, kernel, clusters, inputs, gap=gap)
    text = ptx_of(kernel)
    assert change(text) != text
    with pytest.raises(PtxError, match=what):
        launched(name, problem, kernel, inputs, clusters, gap=gap, text=change(text))


def test_a_ring_of_one_warp_is_refused():
    """Its sums need no barrier, so that none is between reads of a stage and the copy that fills it again."""
    with pytest.raises(AssertionError, match="a single warp meet at no barrier"):
        text_of("rms_norm_backward", {"threads": 32, "stages": 2}, rows=5, columns=256)


@pytest.mark.parametrize("name", ["rms_norm_forward", "fused_add_rms_norm_forward"])
def test_other_numbers_of_threads_have_other_bits_which_rows_that_tell_show(name):
    """The tuner's bit classes compare the first eight drawn rows, to which all of these are alike, and then those."""
    spec = spec_named(name)
    problem = spec.problem(rows=4096, columns=4096, dtype="bfloat16", weight_dtype="bfloat16")
    [[drawn_rows], *_, [telling]] = placements(spec, problem, "cpu")

    def differing(placed):
        """How many rows have other bits by 64 and by 512 threads than by 256."""
        at, chosen = problem.but(rows=len(placed.rows)), [place for place, *_ in placed.places["y"]]
        given = placed.case.inputs.items()
        inputs = {key: x[chosen] if isinstance(x, torch.Tensor) and x.dim() > 1 else x for key, x in given}
        kernels = (kernel_of(name, at, threads=threads) for threads in (256, 64, 512))
        first, *others = (launched(name, at, kernel, inputs)["y"] for kernel in kernels)
        return [int((x != first).any(-1).sum()) for x in others]

    assert differing(drawn_rows) == [0, 0]
    assert min(differing(telling)) > len(telling.rows) // 20
