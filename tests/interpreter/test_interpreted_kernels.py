"""Whole kernels, in forms that the library's kernels do not have, compared to torch."""

import cuda.tile as ct
import interpreter_helpers
import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from tilekern.interpreter import launch

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SIZES = st.integers(1, 70)
FEW = examples(15)


def power_of_two(n):
    return 1 << (n - 1).bit_length()


def close(got, expected):
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[got.dtype]
    torch.testing.assert_close(got, expected.to(got.dtype), rtol=tolerance, atol=tolerance)


@ct.kernel
def softmax(x, y, tile: ct.Constant[int]):
    row = ct.bid(0)
    values = ct.load(x, (row, 0), shape=(1, tile), padding_mode=ct.PaddingMode.NEG_INF).astype(ct.float32)
    powers = ct.exp2((values - ct.max(values, axis=1, keepdims=True)) * 1.4426950408889634)
    ct.store(y, (row, 0), (powers / ct.sum(powers, axis=1, keepdims=True)).astype(y.dtype))


@FEW
@given(rows=SIZES, columns=SIZES, dtype=DTYPES)
def test_softmax_works_in_place_and_on_transposed_input(rows, columns, dtype):
    x = torch.randn(columns, rows).to(dtype).T
    expected = torch.softmax(x.float(), 1)
    launch(softmax, (rows,), (x, x, power_of_two(columns)))
    close(x, expected)


@ct.kernel
def matmul(a, b, c, m: ct.Constant[int], n: ct.Constant[int], k: ct.Constant[int]):
    row, column = ct.bid(0), ct.bid(1)
    total = ct.full((m, n), 0, dtype=ct.float32)
    zero = ct.PaddingMode.ZERO
    for step in range(ct.cdiv(a.shape[1], k)):
        left = ct.load(a, (row, step), shape=(m, k), padding_mode=zero)
        right = ct.load(b, index=(column, step), shape=(n, k), padding_mode=zero)
        total = ct.mma(left, ct.transpose(right), total)
    ct.store(c, (row, column), total.astype(c.dtype))


@FEW
@given(rows=SIZES, columns=SIZES, inner=SIZES, dtype=DTYPES)
def test_matmul_equals_torch(rows, columns, inner, dtype):
    a, b = torch.randn(rows, inner).to(dtype), torch.randn(columns, inner).to(dtype)
    c = torch.empty(rows, columns, dtype=dtype)
    launch(matmul, (ct.cdiv(rows, 16), ct.cdiv(columns, 32)), (a, b, c, 16, 32, 8))
    close(c / inner**0.5, (a.float() @ b.float().T) / inner**0.5)


@ct.kernel
def overlapping_sums(x, y, tile: ct.Constant[int]):
    view = x.tiled_view(tile, padding_mode=ct.PaddingMode.ZERO, traversal_steps=2)
    for step in range(ct.bid(0), y.shape[0], ct.num_blocks(0)):
        ct.store(y, (step,), ct.sum(view.load(step)))


def test_tiles_of_views_overlap():
    x, y = torch.arange(9.0), torch.empty(5)
    launch(overlapping_sums, (2,), (x, y, 4))
    assert y.tolist() == [6.0, 14.0, 22.0, 21.0, 8.0]


@ct.kernel
def embed(table, ids, y, tile: ct.Constant[int]):
    row = ct.bid(0)
    token = ct.load(ids, (row,), shape=())
    columns = ct.arange(tile, dtype=ct.int32)
    values = ct.gather(table, (token, columns), padding_value=7.0)
    ct.scatter(y, (row, columns), values, mask=columns < y.shape[1] - 1)


def test_gather_and_scatter_mask_what_is_outside():
    table, ids = torch.randn(5, 6), torch.tensor([4, -1, 0, 5], dtype=torch.int32)
    y = torch.zeros(4, 7)
    launch(embed, (4,), (table, ids, y, 8))
    expected = torch.zeros(4, 7)
    expected[:, :6] = 7.0
    expected[0, :6], expected[2, :6] = table[4], table[0]
    torch.testing.assert_close(y, expected)


@ct.kernel
def rows_by_index(x, index, y, width: ct.Constant[int]):
    rows = ct.load(index, (0,), shape=(4,))
    tile = ct.load_advanced_indexing(x, (rows, ct.Slice(1, width)), padding_mode=ct.PaddingMode.ZERO)
    ct.store(y, (0, 0), tile)


def test_advanced_indexing():
    x, index = torch.randn(6, 5), torch.tensor([3, 0, 9, 5], dtype=torch.int32)
    y = torch.empty(4, 4)
    launch(rows_by_index, (1,), (x, index, y, 4))
    expected = torch.stack([x[3, 1:], x[0, 1:], torch.zeros(4), x[5, 1:]])
    torch.testing.assert_close(y, expected)


def test_blocks_run_in_a_shuffled_order_that_repeats():
    found = []

    def note():
        found.append(ct.bid(0))

    for _ in range(2):
        launch(note, (8,), ())
    assert found[:8] == found[8:] != sorted(found[:8]) == list(range(8))


def test_helpers_are_rebound_from_modules_closures_and_recursion():
    from cuda.tile import exp

    table = {"twice": interpreter_helpers.doubled}

    def count_down(n, tile):
        return tile if n == 0 else count_down(n - 1, tile + 1)

    def kernel(x, y):
        tile = ct.load(x, (0,), (4,))
        tile = interpreter_helpers.rectify(count_down(3, tile))
        ct.store(y, (0,), exp(table["twice"](tile)))

    x, y = torch.tensor([-4.0, -3.0, -2.0, 0.0]), torch.empty(4)
    launch(kernel, (1,), (x, y))
    torch.testing.assert_close(y, torch.exp(2 * (x + 3).clamp(min=0)))


def test_cuda_tile_is_found_by_any_name_and_arrays_in_lists():
    import cuda

    def kernel(xs, y):
        for i in range(len(xs)):
            cuda.tile.store(y, (i,), cuda.tile.load(xs[i], (ct.bid(0),), ()))

    y = torch.zeros(3)
    launch(kernel, (1,), ([torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0])], y))
    assert y.tolist() == [1.0, 2.0, 3.0]


def test_wrong_calls_are_refused():
    from tilekern.interpreter import InterpreterError

    x = torch.zeros(4)
    with pytest.raises(InterpreterError, match="takes 3 arguments, got 1"):
        launch(softmax, (1,), (x,))
    with pytest.raises(InterpreterError, match="one to three positive sizes"):
        launch(softmax, (0,), (x, x, 4))
    with pytest.raises(InterpreterError, match="takes CPU tensors"):
        launch(softmax, (1,), (torch.empty(2, 2, device="meta"), x, 4))
