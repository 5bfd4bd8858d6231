"""Guard bands: what they notice, and that a guarded array is laid out like an ordinary one."""

import pytest
import torch

from tilekern.tuning.verify.canaries import BAND_BYTES, GuardedInputs, bits, guarded, guarded_copy, in_whole_rows

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
LAYOUTS = pytest.mark.parametrize("padded", [False, True])


def element_after(array):
    """The element of memory that follows the last one of an array."""
    last = sum((size - 1) * stride for size, stride in zip(array.shape, array.stride(), strict=True))
    return array.as_strided((1,), (1,), array.storage_offset() + last + 1)


@LAYOUTS
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_of_it_is_nan_until_it_is_written(dtype, padded):
    found = guarded((3, 5), dtype, "cpu", padded=padded)
    assert found.array.isnan().all()
    assert int(found.unwritten()) == 15
    found.array[1:] = 0
    assert int(found.unwritten()) == 5
    assert not found.is_torn()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_that_arithmetic_gives_is_something_written(dtype):
    found = guarded((4,), dtype, "cpu")
    infinity = torch.tensor(torch.inf)
    found.array.copy_(torch.stack([infinity - infinity, -(infinity - infinity), torch.tensor(torch.nan), infinity * 0]))
    assert found.array.isnan().all()
    assert int(found.unwritten()) == 0


@LAYOUTS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", ["before", "after"])
def test_one_element_beyond_either_end_tears_a_band(dtype, padded, place):
    found = guarded((3, 5), dtype, "cpu", padded=padded)
    found.array.zero_()
    assert not found.is_torn()
    beyond = element_after(found.array)
    if place == "before":
        beyond = found.array.as_strided((1,), (1,), found.array.storage_offset() - 1)
    beyond.zero_()
    assert found.is_torn()


@LAYOUTS
@pytest.mark.parametrize("place", [-1, 15])
def test_8_bit_floats_are_nan_until_they_are_written(place, padded):
    found = guarded((3, 15), torch.float8_e4m3fn, "cpu", padded=padded)
    assert found.array.isnan().all()
    found.array.copy_(torch.tensor(torch.nan))
    assert int(found.unwritten()) == 0
    assert not found.is_torn()
    found.array.as_strided((1,), (1,), found.array.storage_offset() + place).fill_(-0.0)
    assert found.is_torn()


@LAYOUTS
@pytest.mark.parametrize("shape", [(3, 5), (3, 16), (7,)])
def test_single_bytes_are_guarded_too(shape, padded):
    """Numbers from -127 to 127 are none of the pattern."""
    found = guarded(shape, torch.int8, "cpu", padded=padded)
    assert int(found.unwritten()) == found.array.numel()
    found.array.copy_(torch.arange(-127, 127)[-found.array.numel() :].view(shape))
    assert int(found.unwritten()) == 0
    assert not found.is_torn()
    if len(shape) > 1 and found.array.stride(0) > shape[1]:
        element_after(found.array[1]).zero_()
    else:
        found.array.as_strided((1,), (1,), found.array.storage_offset() - 1).zero_()
    assert found.is_torn()


def test_an_element_behind_a_row_tears_only_a_padded_array():
    dense, padded = (guarded((3, 8), torch.float32, "cpu", padded=padded) for padded in (False, True))
    for found in (dense, padded):
        element_after(found.array[1]).zero_()
    assert not dense.is_torn()
    assert padded.is_torn()


@LAYOUTS
@pytest.mark.parametrize("columns", [1, 5, 83, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_begin_where_allocations_do_and_rows_at_16_bytes(dtype, columns, padded):
    found = guarded((2, 3, columns), dtype, "cpu", padded=padded)
    offset = found.array.data_ptr() - found.array.untyped_storage().data_ptr()
    assert offset == BAND_BYTES
    assert offset % 256 == 0
    assert all(stride * dtype.itemsize % 16 == 0 for stride in found.array.stride()[:-1])
    gap = found.array.stride(1) - columns
    assert gap * dtype.itemsize >= 128 if padded else gap * dtype.itemsize < 16


@pytest.mark.parametrize("dtype", DTYPES)
def test_odd_rows_are_laid_out_as_aligned_artifacts_assume(dtype):
    x = torch.ones(2, 3, 83, dtype=dtype)
    found = in_whole_rows(x)
    assert torch.equal(found, x)
    assert all(stride * dtype.itemsize % 16 == 0 for stride in found.stride()[:-1])
    for even in (torch.ones(3, 16, dtype=dtype), torch.ones(83, dtype=dtype), x.transpose(1, 2)):
        assert in_whole_rows(even) is even


@LAYOUTS
def test_a_copy_keeps_the_values_and_the_order_of_the_axes(padded):
    x = torch.randn(2, 5, 3, 4).transpose(1, 2)
    found = guarded_copy(x, padded=padded)
    assert torch.equal(found.array, x)
    assert not found.is_torn()
    if not padded:
        assert found.array.stride() == x.stride()
    assert sorted(range(4), key=found.array.stride) == sorted(range(4), key=x.stride)


def test_inputs_tell_which_of_them_was_written_to():
    given = {"x": torch.tensor([1.0, torch.nan, -0.0]), "label": torch.tensor([3, 4], dtype=torch.int32), "eps": 0.5}
    inputs = GuardedInputs(given)
    assert inputs.values["eps"] == 0.5
    assert not any(inputs.changes().values())
    inputs.values["x"][2] = 0.0  # equal, and yet other bits
    assert {name for name, changed in inputs.changes().items() if changed} == {"x"}
    element_after(inputs.values["label"]).zero_()
    assert all(inputs.changes().values())
    assert given["x"].signbit()[2]


def test_bits_tell_one_nan_from_another():
    one = torch.tensor([torch.nan, 1.0])
    assert torch.equal(bits(one), bits(one.clone()))
    assert not torch.equal(bits(one), bits(-one))
