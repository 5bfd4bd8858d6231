"""Ops refuse, by the argument's name, dtypes that they cannot compute and numbers that lead out of an array."""

import re

import pytest
import torch
from op_samples import SHIPPED, public, tensors_of
from test_settings_of_torch import BY_HAND

from tilekern import ops

CALLS = {op.name: (public(op), tensors_of(op), {}) for op in SHIPPED.values()} | BY_HAND
# A mask is cast, whatever its dtype, and torch's own layers refuse what they are given.
UNCHECKED = {"router_losses": ("shares",), "gated_mlp": tuple(BY_HAND["gated_mlp"][1])}
CASES = [
    pytest.param(name, argument, id=f"{name} {argument}")
    for name, (_, given, _) in CALLS.items()
    for argument, x in given.items()
    if x is not None and argument not in UNCHECKED.get(name, ())
]


@pytest.mark.filterwarnings("ignore:Casting complex")
@pytest.mark.parametrize(("name", "argument"), CASES)
def test_a_dtype_that_an_op_cannot_compute_is_refused_by_the_argument_s_name(name, argument):
    function, known, options = CALLS[name]
    first = next(iter(known))
    for graded in {False, argument != first and known[first].is_floating_point()}:
        for dtype in (
            torch.complex64,
            torch.bool,
            torch.int32 if known[argument].is_floating_point() else torch.float32,
        ):
            given = {k: x if x is None else x.to(dtype if k == argument else x.dtype) for k, x in known.items()}
            if graded:
                given[first] = given[first].clone().requires_grad_()
            with pytest.raises((ValueError, TypeError)) as caught:
                function(**given, **options)
            said = str(caught.value)
            assert re.search(rf"\b{argument.lstrip('_')}\b", said), said
            assert str(dtype) in said
            assert "\n" not in said


X, WEIGHT = torch.randn(6, 8), torch.randn(3, 5, 8)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("offsets", [[2, 2, 7], [2, 1, 6], [-1, 2, 6], [7, 7, 7], [0, 2, 2**31 - 1]])
def test_offsets_that_leave_the_rows_are_refused(offsets, dtype):
    with pytest.raises(
        ValueError, match=r"offsets must be from 0 to 6, the number of rows, and never fall, got \["
    ) as e:
        ops.grouped_linear(X, WEIGHT, torch.tensor(offsets, dtype=dtype))
    assert str(offsets) in str(e.value)


def test_offsets_beyond_int32_are_not_wrapped():
    with pytest.raises(ValueError, match="offsets must be from 0 to 6"):
        ops.grouped_linear(X, WEIGHT, torch.tensor([0, 2, 2**32 + 3]))


@pytest.mark.parametrize("offsets", [[0, 0, 0], [0, 0, 6], [6, 6, 6], [1, 1, 3]])
def test_offsets_at_the_ends_are_taken(offsets):
    assert ops.grouped_linear(X, WEIGHT, torch.tensor(offsets, dtype=torch.int32)).shape == (6, 5)


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 6], [-1, 1, 2, 3, 4, 5], [0, 0, 2, 3, 4, 5]])
def test_an_order_that_is_no_permutation_is_refused(order):
    given = torch.tensor([2, 4, 6], dtype=torch.int32), None, torch.tensor(order, dtype=torch.int32)
    with pytest.raises(ValueError, match="order must be a permutation of the numbers from 0 to 5, got"):
        ops.grouped_linear(X[:3], WEIGHT, *given, 2)


def test_numbers_on_another_device_are_not_waited_for():
    """As on a GPU: there is an assertion on the device, and no number comes to the host."""
    on_meta = torch.zeros(3, dtype=torch.int32, device="meta")
    assert ops.grouped_linear(X.to("meta"), WEIGHT.to("meta"), on_meta).shape == (6, 5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 0), (3, 2), (2, 4)])
def test_heads_that_are_no_multiple_of_the_key_heads_are_refused(heads, kv_heads):
    q, k = torch.randn(1, 8, heads, 16), torch.randn(1, 8, kv_heads, 16)
    with pytest.raises(ValueError, match=f"{heads} heads must be a multiple of the {kv_heads} key heads"):
        ops.attention(q, k, k)
