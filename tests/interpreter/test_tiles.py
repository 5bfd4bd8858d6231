"""Operations on tiles: the compiler's promotion, rounding, and the result of each function of ``ct``."""

import inspect
import itertools
import math
import operator

import cuda.tile as ct
import pytest
import torch
from cuda.tile._exception import TileError
from cuda.tile._ir.ops_utils import promote_dtypes
from cuda.tile._ir.type import LooselyTypedScalar
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from tilekern.interpreter import OFFERED, InterpreterError, Namespace, launch
from tilekern.interpreter.arrays import Array, TiledView
from tilekern.interpreter.dtypes import FLOATS, IN_MEMORY, INTEGERS
from tilekern.interpreter.races import Launch
from tilekern.interpreter.tiles import Tile

NUMBERS = (*INTEGERS, *FLOATS)


def run(function, *tensors):
    """Return the result of a function of tiles in a kernel, as (ct dtype, list)."""
    results = []

    def kernel(*arrays):
        tiles = [ct.load(array, (0,) * array.ndim, array.shape) for array in arrays]
        result = function(*tiles)
        tiles = result if isinstance(result, tuple) else (result,)
        results.extend((tile.dtype, tile.data.tolist()) for tile in tiles)

    # A variadic function is no kernel, so the tensors travel as one list.
    def outer(arrays):
        kernel(*arrays)

    launch(outer, (1,), (list(tensors),))
    return results[0] if len(results) == 1 else results


def values(dtype, *numbers):
    return torch.tensor(numbers or (1, 2), dtype=IN_MEMORY[dtype])


def test_two_tiles_promote_as_in_the_compiler():
    for left, right in itertools.product(NUMBERS, NUMBERS):
        for apply, force in ((operator.add, False), (operator.truediv, True)):
            try:
                expected = promote_dtypes(left, right, force)
            except TileError:
                with pytest.raises(InterpreterError):
                    run(apply, values(left), values(right))
            else:
                assert run(apply, values(left), values(right))[0] == expected, (left, right)


def test_scalars_are_weakly_typed_as_in_the_compiler():
    for dtype, scalar in itertools.product(NUMBERS, (True, 3, 1 << 40, 0.5)):
        try:
            expected = promote_dtypes(dtype, LooselyTypedScalar(scalar))
        except TileError:
            with pytest.raises(InterpreterError):
                run(lambda tile, scalar=scalar: scalar * tile, values(dtype))
        else:
            assert run(lambda tile, scalar=scalar: scalar * tile, values(dtype))[0] == expected, (dtype, scalar)


def test_a_runtime_float_is_a_float32_and_a_constant_is_weak():
    found = []

    def kernel(x, runtime, constant: ct.Constant[float]):
        tile = ct.load(x, 0, 2)
        found.extend([(tile * runtime).dtype, (tile * constant).dtype, x.dtype == ct.bfloat16])

    launch(kernel, (1,), (torch.zeros(2, dtype=torch.bfloat16), 0.5, 0.5))
    assert found == [ct.float32, ct.bfloat16, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@examples(20)
@given(seed=st.integers(0, 1000), scalar=st.floats(-4, 4))
def test_half_operations_round_once_from_the_exact_result(dtype, seed, scalar):
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(64, generator=generator).to(dtype) for _ in range(2))
    rounded = torch.tensor(scalar).to(dtype).double()
    for apply in (operator.add, operator.sub, operator.mul, operator.truediv):
        assert run(apply, a, b)[1] == apply(a.double(), b.double()).to(dtype).tolist()
    assert run(lambda x: x * scalar, a)[1] == (a.double() * rounded).to(dtype).tolist()


def test_half_sums_round_at_each_addition():
    ones = torch.ones(512, dtype=torch.bfloat16)
    big = torch.tensor([256.0, 1.0, 1.0, 1.0], dtype=torch.bfloat16)
    assert run(ct.sum, ones) == (ct.bfloat16, 512.0)
    assert run(ct.sum, big)[1] == 258.0
    assert run(lambda x: ct.sum(x.astype(ct.float32)), big) == (ct.float32, 259.0)


def test_integers():
    a, b = torch.tensor([7, -7], dtype=torch.int32), torch.tensor([3, 3], dtype=torch.int32)
    assert run(lambda x, y: x // y, a, b)[1] == [2, -3]
    assert run(lambda x, y: x % y, a, b)[1] == [1, 2]
    assert run(ct.cdiv, a, b)[1] == [3, -2]
    assert run(lambda x: ct.cdiv(9, 4) + 0 * x, a)[1] == [3, 3]
    assert run(lambda x: x >> 1, a)[1] == [3, -4]
    assert run(lambda x: ~x & 3, a)[1] == [0, 2]
    assert run(lambda x: x / 2, a) == (ct.float32, [3.5, -3.5])
    assert run(lambda x: x + 1, values(ct.int8, 127, 0))[1] == [-128, 1]


@pytest.mark.parametrize(("dtype", "bits"), [(ct.uint8, 8), (ct.uint16, 16), (ct.uint32, 32)])
def test_unsigned_integers_wrap_around(dtype, bits):
    top = (1 << bits) - 1
    tensor = torch.zeros(2, dtype=torch.int64).to(IN_MEMORY[dtype])
    stored = torch.zeros(2, dtype=IN_MEMORY[dtype])

    def kernel(x, y):
        ct.store(y, 0, (ct.load(x, 0, 2) - 1) * 3)

    launch(kernel, (1,), (tensor, stored))
    assert stored.tolist() == [3 * top % (top + 1)] * 2
    assert run(lambda x: (x - 1) >> 1, tensor)[1] == [top >> 1] * 2
    assert run(lambda x: x - 1 > x, tensor)[1] == [True, True]


def test_casts_and_bits():
    x = torch.tensor([1.0, -2.75])
    assert run(lambda t: t.astype(ct.int32), x) == (ct.int32, [1, -2])
    assert run(lambda t: ct.astype(t, ct.bool_), x) == (ct.bool_, [True, True])
    assert run(lambda t: ct.bitcast(t, ct.uint32), x)[1] == [0x3F800000, 0xC0300000]
    third = torch.tensor([1 / 3, float("inf")])
    assert run(lambda t: t.astype(ct.tfloat32).astype(ct.float32), third)[1] == [0.333251953125, float("inf")]
    assert run(lambda t: t.astype(ct.float8_e4m3fn).astype(ct.float32), x)[1] == [1.0, -2.75]


def test_shapes():
    x = torch.arange(8, dtype=torch.int32)
    square = x.reshape(2, 4).tolist()
    assert run(lambda t: t.reshape((2, -1)), x)[1] == square
    assert run(lambda t: ct.transpose(ct.reshape(t, (2, 4))), x)[1] == x.reshape(2, 4).T.tolist()
    assert run(lambda t: t[None, :] + ct.expand_dims(t, 1), x)[1][7] == list(range(7, 15))
    assert run(lambda t: ct.broadcast_to(t, (2, 8)), x)[1] == [x.tolist()] * 2
    assert run(lambda t: ct.extract(ct.reshape(t, (2, 4)), (1, 1), (1, 2)), x)[1] == [[6, 7]]


def test_reductions_and_scans():
    x = torch.tensor([[3.0, float("nan"), 1.0, 3.0], [0.5, 2.0, -1.0, 2.0]])
    assert run(lambda t: ct.max(t, 1), x)[1] == [3.0, 2.0]
    assert run(ct.min, x)[1] == -1.0
    finite = torch.arange(8, dtype=torch.int32).reshape(2, 4)
    assert run(lambda t: ct.sum(t, (0, 1), keepdims=True), finite) == (ct.int32, [[28]])
    assert run(lambda t: ct.cumsum(t, 1), finite)[1] == [[0, 1, 3, 6], [4, 9, 15, 22]]
    assert run(lambda t: ct.reduce(t, 1, lambda _, b: b, 0), finite)[1] == [3, 7]

    def best(a, i, b, j):
        return ct.where(a > b, a, b), ct.where(a > b, i, j)

    pairs = run(lambda t: ct.reduce((t, ct.arange(4, dtype=ct.int32)), 1, best, (0, 0)), finite)
    assert pairs == [(ct.int32, [3, 7]), (ct.int32, [3, 3])]


def test_selection_and_extrema():
    x = torch.tensor([1.0, float("nan")])
    assert run(lambda t: ct.where(ct.isnan(t), 0.0, t), x) == (ct.float32, [1.0, 0.0])
    assert run(lambda t: ct.maximum(t, 2), x)[1] == [2.0, 2.0]
    assert run(lambda t: min(t, 0.0), x)[1] == [0.0, 0.0]
    assert run(lambda t: ct.isnan(ct.minimum(t, 0.0, propagate_nan=True)), x)[1] == [False, True]
    assert run(lambda t: ct.where(t > 0, 1, 2), x) == (ct.int32, [1, 2])


UNARY = ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "tanh", "floor", "ceil")


@pytest.mark.parametrize("name", [*UNARY, "abs", "negative"])
def test_unary_functions_equal_torch(name):
    x = torch.tensor([0.3, 0.7, 1.0, 2.5])
    assert run(getattr(ct, name), x)[1] == getattr(torch, name)(x).tolist()
    if name in UNARY[:9]:
        assert run(getattr(ct, name), values(ct.int32))[0] == ct.float32


def test_mma():
    a, b = torch.randn(4, 8), torch.randn(8, 2)
    assert (
        run(lambda x, y: ct.mma(x, y, ct.zeros((4, 2), ct.float32)), a.half(), b.half())[1]
        == torch.mm(a.half().float(), b.half().float()).tolist()
    )
    small = torch.full((2, 4), 100, dtype=torch.int8)
    assert run(lambda x: ct.mma(x, ct.transpose(x), ct.full((2, 2), 1, ct.int32)), small)[1] == [[40001] * 2] * 2
    with pytest.raises(InterpreterError, match="acc"):
        run(lambda x: ct.mma(x, x, ct.zeros((4, 4), ct.float16)), torch.zeros(4, 4, dtype=torch.bfloat16))


def test_mma_scaled():
    a, b = torch.randn(4, 64).to(torch.float8_e4m3fn), torch.randn(64, 2).to(torch.float8_e4m3fn)
    # The bits of e8m0: 2^-1, 2^3, NaN and others.
    down = torch.tensor([[126, 130], [127, 127], [255, 127], [100, 150]]).to(torch.uint8).view(torch.int8)
    across = torch.tensor([[127, 128], [120, 130]]).to(torch.uint8).view(torch.int8)

    def product(x, y, x_bits, y_bits):
        scales = (ct.bitcast(bits, ct.float8_e8m0fnu) for bits in (x_bits, y_bits))
        return ct.mma_scaled(x, next(scales), y, next(scales), ct.full((4, 2), 1, ct.float32))

    wide = [2.0 ** (bits.view(torch.uint8).double() - 127) for bits in (down, across)]
    wide[0][2, 0] = math.nan
    left, right = wide[0].repeat_interleave(32, 1) * a.double(), wide[1].repeat_interleave(32, 0) * b.double()
    found = torch.tensor(run(product, a, b, down, across)[1], dtype=torch.float64)
    torch.testing.assert_close(found, left @ right + 1, rtol=1e-5, atol=1e-5, equal_nan=True)
    with pytest.raises(InterpreterError, match="with scales of float8_e8m0fnu"):
        run(lambda x, y: ct.mma_scaled(x, x, y, y, ct.zeros((4, 2), ct.float32)), a, b)


def test_permute():
    x = torch.arange(64).reshape(2, 4, 8)
    assert run(lambda t: ct.permute(t, (2, 0, 1)), x)[1] == x.permute(2, 0, 1).tolist()
    with pytest.raises(InterpreterError, match="each of 3 once"):
        run(lambda t: ct.permute(t, (2, 0, 0)), x)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda t: ct.banana(t, 1), "the interpreter does not know ct.banana"),
        (lambda t: t.sum(), "the interpreter does not know Tile.sum"),
        (lambda t: t.reshape((4, 3)), "cannot reshape"),
        (lambda t: ct.extract(t, (0,), (16,)), "does not divide"),
        (lambda t: ct.extract(t, (4,), (1,)), "no tile"),
        (lambda _: ct.zeros((3,), ct.float32), "powers of two"),
        (lambda _: ct.arange(6, dtype=ct.int32), "powers of two"),
        (lambda t: ct.cumsum(t.astype(ct.float16)), "does not know cumsum of float16"),
        (lambda t: t.astype(ct.uint64), "does not know ct.uint64"),
        (lambda t: ct.atomic_max(t, 0, 1), "does not know ct.atomic_max"),
        (lambda t: t if t > 0 else -t, "where a scalar is needed"),
        (lambda t: t & 1, "bitwise and does not support float32"),
        (lambda t: ct.floor(t > 0), "float tiles only"),
        (lambda t: ct.exp(t, rounding_mode=ct.RoundingMode.RZ), "does not know rounding mode zero of exp"),
        (lambda t: ct.add(t.astype(ct.bfloat16), 1, flush_to_zero=True), "float32 only"),
        (lambda t: ct.static_assert(t.shape == (2,), "four"), "four"),
        (lambda t: [t for _ in ct.static_iter(range(2000))], "1000 at most"),
        (lambda t: t[0], "only add axes"),
    ],
)
def test_what_the_compiler_refuses_is_refused(function, message):
    with pytest.raises(InterpreterError, match=message):
        run(function, torch.zeros(4))


@pytest.mark.parametrize(
    ("value", "target", "refused"),
    [(ct.float32, ct.bfloat16, True), (ct.bfloat16, ct.float32, False), (ct.int32, ct.bfloat16, False)],
)
def test_stores_convert_only_what_the_compiler_converts(value, target, refused):
    def kernel(x, y):
        ct.store(y, 0, ct.load(x, 0, 2))

    y = torch.zeros(2, dtype=IN_MEMORY[target])
    if refused:
        with pytest.raises(InterpreterError, match=r"array 'y': cannot implicitly cast float32 to bfloat16\nin kernel"):
            launch(kernel, (1,), (values(value), y))
    else:
        launch(kernel, (1,), (values(value), y))
        assert y.tolist() == [1, 2]


def test_every_offered_name_exists_in_cuda_tile():
    assert {*OFFERED, *vars(Namespace(Launch("kernel", (1,), True, (0,))))} <= set(ct.__all__)
    with pytest.raises(InterpreterError, match=r"does not know ct\.launch"):
        _ = Namespace(Launch("kernel", (1,), True, (0,))).launch


@pytest.mark.parametrize("name", sorted(name for name in OFFERED if inspect.isfunction(OFFERED[name])))
def test_parameters_are_those_of_cuda_tile(name):
    real = inspect.signature(inspect.unwrap(getattr(ct, name))).parameters
    ours = inspect.signature(OFFERED[name]).parameters
    unnamed = inspect.Parameter.POSITIONAL_ONLY
    assert [p.kind for p in real.values()].count(unnamed) == [p.kind for p in ours.values()].count(unnamed)
    for parameter in (ours[name] for name in ours.keys() & real.keys()):
        if parameter.kind != unnamed:
            assert real[parameter.name].kind == parameter.kind
            assert (real[parameter.name].default is parameter.empty) == (parameter.default is parameter.empty)


@pytest.mark.parametrize("ours", [Array, Tile, TiledView])
def test_methods_take_the_parameters_of_cuda_tile(ours):
    for name, method in vars(ours).items():
        if inspect.isfunction(method) and not name.startswith("_") and name != "refuse":
            real = inspect.signature(inspect.unwrap(getattr(getattr(ct, ours.__name__), name)))
            assert list(inspect.signature(method).parameters) == list(real.parameters)
