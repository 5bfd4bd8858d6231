"""Accesses outside an array and races are refused by errors that name the place."""

import cuda.tile as ct
import pytest
import torch

from tilekern.interpreter import InterpreterError, OutOfBounds, launch

ZERO, UNDETERMINED = ct.PaddingMode.ZERO, ct.PaddingMode.UNDETERMINED


@ct.kernel
def copy_row(x, y, row, column, tile: ct.Constant[int], padding: ct.Constant, load_checks: ct.Constant[bool]):
    tile_ = ct.load(x, (row, column), shape=(1, tile), padding_mode=padding, check_bounds=load_checks)
    ct.store(y, (0, 0), tile_)


@ct.kernel
def store_row(y, row, column, tile: ct.Constant[int], checks: ct.Constant[bool]):
    ct.store(y, (row, column), ct.zeros((1, tile), y.dtype), check_bounds=checks)


@ct.kernel
def gather_one(x, y, row, column, masked: ct.Constant[bool], checks: ct.Constant[bool]):
    columns = ct.arange(2, dtype=ct.int32) + column
    mask = columns < x.shape[1] if masked else None
    ct.store(y, (0,), ct.gather(x, (row, columns), mask=mask, padding_value=5.0, check_bounds=checks))


@ct.kernel
def scatter_one(x, row, column, masked: ct.Constant[bool], checks: ct.Constant[bool]):
    columns = ct.arange(2, dtype=ct.int32) + column
    mask = columns < x.shape[1] if masked else None
    ct.scatter(x, (row, columns), 1.0, mask=mask, check_bounds=checks)


@ct.kernel
def slice_rows(x, y, start, stop):
    ct.store(y, (0, 0), ct.load(x.slice(axis=0, start=start, stop=stop), (0, 0), (1, 1)))


@ct.kernel
def read_view(x, y, index, padding: ct.Constant):
    ct.store(y, 0, x.tiled_view(4, padding_mode=padding, traversal_steps=2).load(index))


def refused(kernel, arguments, *words):
    with pytest.raises(OutOfBounds) as caught:
        launch(kernel, (1,), arguments)
    message = str(caught.value)
    name = kernel._pyfunc.__name__
    for word in (f"kernel {name}, block (0,)", *words):
        assert word in message, message


X = torch.arange(24.0).reshape(4, 6)


@pytest.mark.parametrize(("row", "column"), [(4, 0), (-1, 0), (0, 2), (0, -1)])
@pytest.mark.parametrize("padding", [UNDETERMINED, ZERO])
@pytest.mark.parametrize("checks", [True, False])
def test_load_entirely_outside(row, column, padding, checks):
    words = ("load of array 'x'", "shape (4, 6)", f"tile index ({row}, {column})", "entirely outside")
    refused(copy_row, (X, torch.empty(1, 4), row, column, 4, padding, checks), *words)


def test_load_partly_outside():
    y = torch.empty(1, 4)
    refused(
        copy_row, (X, y, 1, 1, 4, UNDETERMINED, True), "load of array 'x'", "(1, 1)", "(1, 2) of it", "UNDETERMINED"
    )
    refused(copy_row, (X, y, 1, 1, 4, ZERO, False), "load of array 'x'", "(1, 1)", "check_bounds is False")
    launch(copy_row, (1,), (X, y, 1, 1, 4, ZERO, True))
    assert y.tolist() == [[10.0, 11.0, 0.0, 0.0]]
    launch(copy_row, (1,), (X, y, 1, 0, 4, UNDETERMINED, False))
    assert y.tolist() == [[6.0, 7.0, 8.0, 9.0]]


@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize(("row", "column"), [(4, 0), (-1, 0), (0, 2)])
def test_store_entirely_outside(row, column, checks):
    refused(store_row, (X.clone(), row, column, 4, checks), "store of array 'y'", f"({row}, {column})", "entirely")


def test_store_partly_outside():
    y = X.clone()
    refused(store_row, (y, 2, 1, 4, False), "store of array 'y'", "(2, 1)", "check_bounds is False")
    assert torch.equal(y, X)
    launch(store_row, (1,), (y, 2, 1, 4, True))
    assert y[2].tolist() == [12.0, 13.0, 14.0, 15.0, 0.0, 0.0]
    assert torch.equal(y[[0, 1, 3]], X[[0, 1, 3]])


def test_gather_outside():
    y = torch.empty(2)
    launch(gather_one, (1,), (X, y, 1, 5, False, True))
    assert y.tolist() == [11.0, 5.0]
    launch(gather_one, (1,), (X, y, 1, 5, True, False))
    assert y.tolist() == [11.0, 5.0]
    launch(gather_one, (1,), (X, y, 1, -1, False, True))
    assert y.tolist() == [5.0, 6.0]
    refused(gather_one, (X, y, 1, 5, False, False), "gather of array 'x'", "element index (1, 6)", "shape (4, 6)")
    refused(gather_one, (X, y, 1, -1, True, False), "gather of array 'x'", "element index (1, -1)")
    refused(gather_one, (X, y, 4, 0, False, False), "element index (4, 0)")


def test_scatter_outside():
    x = X.clone()
    launch(scatter_one, (1,), (x, 1, 5, False, True))
    launch(scatter_one, (1,), (x, 2, 5, True, False))
    assert (x != X).nonzero().tolist() == [[1, 5], [2, 5]]
    refused(scatter_one, (x, 3, 5, False, False), "scatter of array 'x'", "element index (3, 6)")
    assert x[3].tolist() == X[3].tolist()


def test_slice_outside():
    for start, stop in ((-1, 2), (2, 5), (4, 4), (3, 2)):
        refused(slice_rows, (X, torch.empty(1, 1), start, stop), "slice of array 'x'", f"from {start} to {stop}")
    y = torch.empty(1, 1)
    refused(slice_rows, (X, y, 1, 1), "load of array 'x.slice(0, 1, 1)'", "shape (0, 6)")


def test_view_outside():
    x, y = torch.arange(7.0), torch.empty(4)
    launch(read_view, (1,), (x, y, 2, ZERO))
    assert y.tolist() == [4.0, 5.0, 6.0, 0.0]
    refused(read_view, (x, y, 2, UNDETERMINED), "TiledView.load of array 'x'", "tile index (2,)")
    refused(read_view, (x, y, 4, ZERO), "TiledView.load of array 'x'", "entirely outside")


def test_strides_of_views_are_respected():
    base = torch.zeros(8, 12)
    window = base[1:5, 2::2]
    launch(store_row, (1,), (window, 3, 1, 4, True))
    base.fill_(1.0)
    launch(store_row, (1,), (window, 3, 1, 4, True))
    assert (base == 0).nonzero().tolist() == [[4, 10]]


@ct.kernel
def store_shared(y, shift: ct.Constant[int]):
    ct.store(y, (ct.bid(0) // shift,), ct.full((4,), 1.0, y.dtype))


@ct.kernel
def scatter_shared(y):
    ct.scatter(y, ct.arange(2, dtype=ct.int32) + ct.bid(0), 1.0)


@ct.kernel
def shift_in_place(x, y):
    ct.store(y, (ct.bid(0),), ct.load(x, (ct.bid(0),), (1,)))


@ct.kernel
def gather_in_place(x, y):
    ct.store(y, (ct.bid(0),), ct.gather(x, (ct.bid(0) + 1,)))


def races(kernel, grid, arguments, pattern):
    with pytest.raises(InterpreterError, match=pattern):
        launch(kernel, grid, arguments)
    launch(kernel, grid, arguments, check_races=False)


def test_two_blocks_that_store_the_same_element():
    launch(store_shared, (2,), (torch.empty(8), 1))
    pairs = r"\(\d,\) and \(\d,\) both store element \([048],\) of array 'y' \(store\)"
    races(store_shared, (6,), (torch.empty(12), 2), "kernel store_shared: blocks " + pairs)
    races(store_shared, (4,), (torch.empty(8), 2), "kernel store_shared: blocks " + pairs)
    pattern = r"kernel scatter_shared: blocks \(\d,\) and \(\d,\) both store element \(\d,\) of array 'y' \(scatter\)"
    races(scatter_shared, (3,), (torch.empty(4),), pattern)


def test_a_load_of_what_another_block_stores_before_or_after():
    x = torch.zeros(9)
    launch(shift_in_place, (9,), (x, x))
    pattern = (
        r"block \(\d,\) reads element \(\d,\) of array 'x' \(load\), which block \(\d,\) stores in the same launch"
    )
    races(shift_in_place, (8,), (x[:-1], x[1:]), "kernel shift_in_place: " + pattern)
    races(shift_in_place, (8,), (x[1:], x[:-1]), "kernel shift_in_place: " + pattern)
    races(gather_in_place, (8,), (x, x), r"element \(\d,\) of array 'x' \(gather\)")


def test_arrays_of_other_element_sizes_share_owners():
    words = torch.zeros(4, dtype=torch.int32)
    halves = words.view(torch.int16)
    launch(shift_in_place, (4,), (words, words))
    races(shift_in_place, (2,), (halves[2:], words), r"block \(\d,\) reads element \(0,\) of array 'x'")


@ct.kernel
def last_adds_up(parts, count, total, order: ct.Constant, is_late: ct.Constant[bool]):
    """Each block stores a part and counts itself; the last one adds up all parts, and sets the count back."""
    if not is_late:
        ct.store(parts, (ct.bid(0),), ct.full((1,), 1.0, ct.float32))
    before = ct.atomic_add(count, (0,), 1, memory_order=order)
    if is_late:
        ct.store(parts, (ct.bid(0),), ct.full((1,), 1.0, ct.float32))
    if before == ct.num_blocks(0) - 1:
        ct.store(total, (0,), ct.sum(ct.load(parts, (0,), (4,)), axis=0, keepdims=True))
        ct.store(count, (0,), 0)


def counted():
    return torch.zeros(4), torch.zeros(1, dtype=torch.int32), torch.zeros(1)


def test_a_block_reads_what_others_stored_before_an_atomic_access_that_it_sees():
    parts, count, total = counted()
    launch(last_adds_up, (4,), (parts, count, total, ct.MemoryOrder.ACQ_REL, False))
    assert (total.item(), count.item()) == (4, 0)


@pytest.mark.parametrize("order", ["RELAXED", "ACQUIRE", "RELEASE"])
def test_other_atomic_accesses_order_nothing(order):
    given = (*counted(), ct.MemoryOrder[order], False)
    races(last_adds_up, (4,), given, r"block \(\d,\) reads element \(\d,\) of array '(parts|count)'")


def test_what_a_block_stores_after_its_atomic_access_is_not_ordered():
    given = (*counted(), ct.MemoryOrder.ACQ_REL, True)
    races(last_adds_up, (4,), given, r"reads element \(\d,\) of array 'parts' \(load\)")


def test_a_block_may_store_an_element_twice():
    @ct.kernel
    def twice(y):
        ct.scatter(y, ct.zeros((4,), ct.int32) + ct.bid(0), 1.0)
        ct.store(y, (ct.bid(0),), ct.load(y, (ct.bid(0),), (1,)) + 1.0)

    y = torch.zeros(3)
    launch(twice, (3,), (y,))
    assert y.tolist() == [2.0, 2.0, 2.0]


def test_errors_name_their_block():
    @ct.kernel
    def broken(x):
        ct.load(x, (ct.bid(0),), (3,))

    with pytest.raises(InterpreterError, match=r"powers of two, got \(3,\)") as caught:
        launch(broken, (1, 2), (torch.zeros(4),))
    assert caught.value.__notes__ == ["in kernel broken, block (0, 1) of grid (1, 2)"]


@ct.kernel
def loads_and_stores(x, y, when: ct.Constant[str]):
    """Waits first, between, or in the blocks that are told to."""
    if when == "first" or when == str(ct.bid(0)):
        ct.grid_dependency_control_wait()
    tile = ct.load(x, (ct.bid(0),), (1,))
    if when == "between":
        ct.grid_dependency_control_wait()
    ct.store(y, (ct.bid(0),), tile)


@ct.kernel
def only_stores(x, y, when: ct.Constant[str]):
    ct.store(y, (ct.bid(0),), ct.zeros((1,), ct.float32))


@pytest.mark.parametrize("when", ["first", "between", "0", "1", "never"])
@pytest.mark.parametrize("kernel", [loads_and_stores, only_stores], ids=lambda kernel: kernel._pyfunc.__name__)
def test_a_dependent_launch_waits_in_each_block_before_it_touches_memory(kernel, when):
    given = kernel, (2,), (torch.ones(2), torch.ones(2), when)
    launch(*given)
    if when == "first" and kernel is loads_and_stores:
        launch(*given, dependent=True)
        return
    with pytest.raises(InterpreterError, match=r"touches array '[xy]' \((load|store)\) before ct.grid_dep"):
        launch(*given, dependent=True)


@ct.kernel
def launches_the_next(x, y, first: ct.Constant[bool]):
    if not first:
        ct.grid_dependency_control_wait()
    ct.grid_dependency_control_launch_dependents()
    ct.grid_dependency_control_wait()
    ct.store(y, (ct.bid(0),), ct.load(x, (ct.bid(0),), (1,)))


def test_a_dependent_launch_waits_before_it_launches_the_next():
    given = launches_the_next, (2,)
    launch(*given, (torch.ones(2), y := torch.zeros(2), False), dependent=True)
    launch(*given, (torch.ones(2), y, True))
    assert y.tolist() == [1.0, 1.0]
    with pytest.raises(InterpreterError, match=r"launch_dependents\(\) before ct.grid_dependency_control_wait"):
        launch(*given, (torch.ones(2), y, True), dependent=True)


@ct.kernel
def reads_early(weight, x, y, stored: ct.Constant[str]):
    tile = ct.load(weight, (ct.bid(0),), (1,))
    ct.grid_dependency_control_wait()
    tile = tile + ct.load(x, (ct.bid(0),), (1,))
    ct.store(weight if stored == "weight" else y, (ct.bid(0),), tile)


def test_a_dependent_launch_may_read_constants_before_it_waits_and_never_stores_to_them():
    given = reads_early, (2,)
    weight, x, y = torch.ones(2), torch.ones(2), torch.zeros(2)
    launch(*given, (weight, x, y, "y"), dependent=True, constants=frozenset(["weight"]))
    assert y.tolist() == [2.0, 2.0]
    for constants in ([], ["x"]):
        with pytest.raises(InterpreterError, match=r"touches array 'weight' \(load\) before ct.grid_dep"):
            launch(*given, (weight, x, y, "y"), dependent=True, constants=frozenset(constants))
    with pytest.raises(InterpreterError, match=r"stores to array 'weight' \(store\), which is a constant"):
        launch(*given, (weight, x, y, "weight"), dependent=True, constants=frozenset(["weight"]))


@pytest.mark.parametrize("constants", [["weight"], []])
def test_a_slice_of_a_constant_may_be_read_early(constants):
    @ct.kernel
    def reads_a_slice(weight, y):
        tile = ct.load(weight.slice(0, 2, 4), (ct.bid(0),), (1,))
        ct.grid_dependency_control_wait()
        ct.store(y, (ct.bid(0),), tile)

    given = (reads_a_slice, (2,), (torch.arange(4.0), y := torch.zeros(2)))
    if constants:
        launch(*given, dependent=True, constants=frozenset(constants))
        assert y.tolist() == [2.0, 3.0]
        return
    with pytest.raises(InterpreterError, match=r"touches array 'weight.slice\(0, 2, 4\)'"):
        launch(*given, dependent=True)
