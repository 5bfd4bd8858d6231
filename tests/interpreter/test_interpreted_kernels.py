"""Whole kernels in forms that those of the library do not have, each against the same computation in torch."""

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
    for step in range(ct.num_tiles(a, axis=1, shape=(m, k))):
        left = ct.load(a, (row, step), shape=(m, k), padding_mode=zero)
        right = ct.load(b, index=(step, column), shape=(k, n), order=(1, 0), padding_mode=zero)
        total = ct.mma(left, right, total)
    ct.store(c, (row, column), total.astype(c.dtype))


@FEW
@given(rows=SIZES, columns=SIZES, inner=SIZES, dtype=DTYPES)
def test_matmul_equals_torch(rows, columns, inner, dtype):
    a, b = torch.randn(rows, inner).to(dtype), torch.randn(columns, inner).to(dtype)
    c = torch.empty(rows, columns, dtype=dtype)
    launch(matmul, (ct.cdiv(rows, 16), ct.cdiv(columns, 32)), (a, b, c, 16, 32, 8))
    close(c / inner**0.5, (a.float() @ b.float().T) / inner**0.5)


@ct.kernel
def column_partials(x, partials, tile_m: ct.Constant[int], tile_n: ct.Constant[int]):
    block, column = ct.bid(0), ct.bid(1)
    total = ct.zeros((1, tile_n), ct.float32)
    for step in range(block, ct.num_tiles(x, 0, (tile_m, tile_n)), ct.num_blocks(0)):
        part = ct.load(x, (step, column), (tile_m, tile_n), padding_mode=ct.PaddingMode.ZERO)
        total = total + ct.sum(part.astype(ct.float32), axis=0, keepdims=True)
    ct.store(partials, (block, column), total)


@ct.kernel
def column_sums(partials, y, blocks: ct.Constant[int], tile_n: ct.Constant[int]):
    view = partials.tiled_view((blocks, tile_n), padding_mode=ct.PaddingMode.ZERO)
    for column in range(ct.bid(0), view.num_tiles(1), ct.num_blocks(0)):
        y.tiled_view(tile_n).store(column, ct.sum(view.load((0, column)), axis=0))


@FEW
@given(rows=SIZES, columns=SIZES, blocks=st.integers(1, 5))
def test_column_sums_by_partials(rows, columns, blocks):
    x = torch.randn(rows, columns)
    partials, y = torch.empty(blocks, columns), torch.empty(columns)
    launch(column_partials, (blocks, ct.cdiv(columns, 16)), (x, partials, 4, 16))
    launch(column_sums, (2,), (partials, y, 8, 16))
    close(y, x.sum(0))


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
    ct.store_advanced_indexing(y, (ct.arange(4, dtype=ct.int32), ct.Slice(0, width)), tile)


def test_advanced_indexing():
    x, index = torch.randn(6, 5), torch.tensor([3, 0, 9, 5], dtype=torch.int32)
    y = torch.empty(4, 4)
    launch(rows_by_index, (1,), (x, index, y, 4))
    expected = torch.stack([x[3, 1:], x[0, 1:], torch.zeros(4), x[5, 1:]])
    torch.testing.assert_close(y, expected)


@ct.kernel
def histogram(x, counts, greatest, order, tile: ct.Constant[int]):
    values = ct.load(x, (ct.bid(0),), shape=(tile,))
    ct.atomic_add(counts, values, 1)
    ct.atomic_max(greatest, 0, ct.max(values))
    ticket = ct.atomic_add(order, 0, 1)
    ct.scatter(order, ticket + 1, ct.bid(0))


def test_atomics_see_duplicates_and_blocks_run_shuffled():
    x = torch.randint(0, 5, (64,), dtype=torch.int32)
    counts, greatest = torch.zeros(5, dtype=torch.int32), torch.full((1,), -9, dtype=torch.int32)
    orders = []
    for _ in range(2):
        counts.zero_()
        order = torch.zeros(9, dtype=torch.int32)
        launch(histogram, (8,), (x, counts, greatest, order, 8))
        orders.append(order[1:].tolist())
    assert counts.tolist() == torch.bincount(x, minlength=5).tolist()
    assert greatest.item() == x.max()
    assert orders[0] == orders[1] != sorted(orders[0]) == list(range(8))


@ct.kernel
def swap_and_bits(x, old):
    at = ct.arange(4, dtype=ct.int32)
    ct.scatter(old, at, ct.atomic_cas(x, at, 0, 42))
    ct.atomic_xchg(x, 3, 5)
    ct.atomic_or(x, 0, ct.full((), 1, ct.int32))
    x.tiled_view(2).atomic_store_add(0, ct.full((2,), 100, ct.int32))


def test_compare_and_swap_exchange_and_views():
    x, old = torch.tensor([0, 1, 0, 1], dtype=torch.int32), torch.empty(4, dtype=torch.int32)
    launch(swap_and_bits, (1,), (x, old))
    assert old.tolist() == [0, 1, 0, 1]
    assert x.tolist() == [143, 101, 42, 5]


@ct.kernel
def last_block_reduces(x, partials, counter, y, blocks: ct.Constant[int]):
    ct.store(partials, (ct.bid(0),), ct.sum(ct.load(x, (ct.bid(0),), (4,))))
    if ct.atomic_add(counter, 0, 1) == ct.num_blocks(0) - 1:
        ct.store(y, (0,), ct.sum(ct.load(partials, (0,), (blocks,))))
        ct.store(counter, (0,), 0)


def test_a_block_that_acquired_may_read_what_others_stored():
    x, y, counter = torch.randn(16), torch.empty(1), torch.zeros(1, dtype=torch.int32)
    launch(last_block_reduces, (4,), (x, torch.empty(4), counter, y, 4))
    close(y, x.sum()[None])
    assert counter.item() == 0


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
