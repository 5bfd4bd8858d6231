"""tilekern.AdamW's numbers beside torch's, through the kernel on the CPU."""

import math

import pytest
import torch
from adamw_samples import DTYPES, KERNEL, error, give_gradients, launches, parameters, train, twins
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

import tilekern
from tilekern.ops.adamw import _in_order, scalars_of
from tilekern.runtime.dispatch import counters

# Numbers of elements of every width of rows, and around them.
SIZES = (0, 1, 2, 15, 16, 17, 255, 256, 257, 4095, 4096, 4097, 3 * 4096, 5 * 256, 7 * 16)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_steps_are_as_near_to_float64_as_torch_s(dtype, maximize):
    shapes = [(33, 64), (4097,), (256,), (5, 3), ()]
    ours = parameters(shapes, dtype)
    theirs, exact = twins(ours), twins(ours, torch.float64)
    # In float16 torch's own implementation rounds a smaller eps to 0, and divides by that.
    options = {"lr": 3e-2, "weight_decay": 0.1, "maximize": maximize, "eps": 1e-3 if dtype == torch.float16 else 1e-8}
    before = launches()
    train(
        25,
        (tilekern.AdamW(ours, **options), ours),
        (torch.optim.AdamW(theirs, **options, foreach=False), theirs),
        (torch.optim.AdamW(exact, **options), exact),
    )
    assert launches() == before + 25 * len(shapes)
    assert error(ours, exact) <= 1.02 * error(theirs, exact)


@examples(60)
@given(data=st.data())
def test_any_shape_dtype_and_option_against_float64(data):
    """One step from moments that are not zero; the results are rounded once."""
    shape = data.draw(st.one_of(st.sampled_from(SIZES).map(lambda n: (n,)), st.tuples(*[st.integers(0, 9)] * 3)))
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    options = {
        "lr": data.draw(st.sampled_from([0.0, 1e-3, 0.1]), label="lr"),
        "betas": data.draw(st.sampled_from([(0.9, 0.999), (0.0, 0.95), (0.8, 0.0)]), label="betas"),
        "eps": data.draw(st.sampled_from([1e-8, 1e-3, 0.5]), label="eps"),
        "weight_decay": data.draw(st.sampled_from([0.0, 0.1, 2.0]), label="weight_decay"),
        "maximize": data.draw(st.booleans(), label="maximize"),
    }
    ours = parameters([shape], dtype)
    exact = twins(ours, torch.float64)
    one, other = tilekern.AdamW(ours, **options), torch.optim.AdamW(exact, **options)
    train(1, (one, ours), (other, exact))
    for name in ("exp_avg", "exp_avg_sq"):
        one.state[ours[0]][name].normal_(generator=torch.Generator().manual_seed(3)).abs_()
        other.state[exact[0]][name].copy_(one.state[ours[0]][name])
    exact[0].data.copy_(ours[0].detach())
    train(2, (one, ours), (other, exact), first=1)
    # Two steps, each rounded once; what is added may be larger than the sum.
    ulp = 4 * torch.finfo(dtype).eps
    for name in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(one.state[ours[0]][name].double(), other.state[exact[0]][name], rtol=ulp, atol=ulp)
    torch.testing.assert_close(ours[0].double(), exact[0], rtol=ulp, atol=4 * ulp)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_moments_and_the_step_are_kept_as_torch_keeps_them(dtype):
    ours = parameters([(3, 5)], dtype)
    theirs = twins(ours)
    one, other = tilekern.AdamW(ours), torch.optim.AdamW(theirs)
    train(3, (one, ours), (other, theirs))
    assert list(one.state[ours[0]]) == list(other.state[theirs[0]]) == ["step", "exp_avg", "exp_avg_sq"]
    for name, value in other.state[theirs[0]].items():
        found = one.state[ours[0]][name]
        assert (found.dtype, found.shape, found.device) == (value.dtype, value.shape, value.device)
    assert one.state[ours[0]]["step"] == 3
    assert one.defaults == other.defaults


def test_parameters_without_a_gradient_are_left_alone():
    ours = parameters([(4,), (4,)])
    before = [p.detach().clone() for p in ours]
    optimizer = tilekern.AdamW(ours)
    optimizer.step()
    assert not optimizer.state
    ours[1].grad = torch.ones(4)
    optimizer.step()
    assert torch.equal(ours[0], before[0])
    assert not torch.equal(ours[1], before[1])
    assert list(optimizer.state) == [ours[1]]


def test_a_sparse_gradient_is_refused_before_anything_changes():
    ours = parameters([(4,), (4, 2)])
    before = [p.detach().clone() for p in ours]
    ours[0].grad = torch.ones(4)
    ours[1].grad = torch.ones(4, 2).to_sparse()
    with pytest.raises(RuntimeError, match=r"no sparse gradients; use torch\.optim\.SparseAdam"):
        tilekern.AdamW(ours).step()
    assert all(torch.equal(p, q) for p, q in zip(ours, before, strict=True))


def transposed(x):
    return x.t().contiguous().t()


def with_gaps(x):
    return x.new_zeros(x.shape[0], 2 * x.shape[1])[:, ::2].copy_(x)


def channels_last(x):
    return x.view(4, 4, 3, -1).to(memory_format=torch.channels_last)


def one_late(x):
    return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)


LAYOUTS = {"transposed": transposed, "gaps": with_gaps, "channels last": channels_last, "one element late": one_late}


@pytest.mark.parametrize("others", ["alike", "contiguous gradients", "contiguous moments"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(layout, others):
    (start,) = parameters([(12, 20)])
    p = torch.nn.Parameter(LAYOUTS[layout](start.detach()))
    assert layout == "one element late" or not p.is_contiguous()
    strides = p.stride()
    (exact,) = twins([p], torch.float64)
    one, other = tilekern.AdamW([p], lr=0.1), torch.optim.AdamW([exact], lr=0.1)
    before = launches()
    for number in range(3):
        give_gradients(number, [p], [exact])
        if others != "contiguous gradients":
            p.grad = torch.empty_like(p).copy_(p.grad)
        one.step()
        other.step()
        if others == "contiguous moments":
            state = one.state[p]
            state |= {name: state[name].contiguous() for name in ("exp_avg", "exp_avg_sq")}
    assert launches() == before + 3
    assert p.stride() == strides
    for found, expected in ((p, exact), *((one.state[p][n], other.state[exact][n]) for n in ("exp_avg", "exp_avg_sq"))):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", ["transposed", "channels last"])
def test_memory_without_gaps_is_worked_on_where_it_lies(layout):
    (start,) = parameters([(12, 20)])
    p = LAYOUTS[layout](start.detach())
    tensors = (p, *(torch.empty_like(p) for _ in range(3)))
    rows, copies = _in_order((15, 16), *tensors)
    assert [x.data_ptr() for x in rows] == [x.data_ptr() for x in tensors]
    assert all(x.is_contiguous() for x in rows)
    assert copies == []


def test_gaps_hold_what_they_held():
    memory = torch.full((4, 12), 7.0)
    p = torch.nn.Parameter(memory[:, :10])
    p.grad = torch.ones(4, 10)
    tilekern.AdamW([p], lr=0.1).step()
    assert (memory[:, 10:] == 7).all()
    assert (memory[:, :10] != 7).all()


def test_memory_that_several_elements_share_is_refused_as_torch_refuses_it():
    p = torch.nn.Parameter(torch.zeros(3, 1).expand(3, 16))
    p.grad = torch.ones(3, 16)
    before = launches()
    with pytest.raises(RuntimeError, match="refers to a single memory location"):
        tilekern.AdamW([p]).step()
    assert launches() == before


def test_memory_that_moves_between_steps_is_followed():
    """With offloading, the parameter's data and the moments are other tensors at the next step."""
    ours = parameters([(6, 16)])
    exact = twins(ours, torch.float64)
    pairs = (tilekern.AdamW(ours, lr=0.1), ours), (torch.optim.AdamW(exact, lr=0.1), exact)
    train(2, *pairs)
    (p,), state = ours, pairs[0][0].state[ours[0]]
    p.data = p.data.clone()
    state |= {name: value.clone() for name, value in state.items()}
    train(2, *pairs, first=2)
    assert error(ours, exact) < 1e-5


def test_autograd_sees_that_parameters_and_moments_were_changed():
    (p, nothing) = parameters([(4,), (0,)])
    loss = (p * p).sum()
    p.grad, nothing.grad = torch.ones(4), torch.ones(0)
    optimizer = tilekern.AdamW([p, nothing])
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    # No kernel runs for a parameter of no elements, and the interpreter, which counts too, has not seen this one.
    for tensor in (nothing, optimizer.state[nothing]["exp_avg"], optimizer.state[nothing]["exp_avg_sq"]):
        assert tensor._version == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64], ids=str)
@pytest.mark.filterwarnings("ignore::tilekern.errors.TilekernWarning")
def test_other_dtypes_go_through_torch_and_are_counted(dtype):
    ours = [torch.nn.Parameter(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).to(dtype))]
    theirs = twins(ours)
    plain = parameters([(5,)])
    options = {"lr": 0.1, "maximize": True}
    one, other = tilekern.AdamW(ours + plain, **options), torch.optim.AdamW(theirs, **options)
    fallbacks, before = counters(KERNEL).fallbacks, launches()
    for number in range(3):
        give_gradients(number, ours, theirs)
        plain[0].grad = torch.ones(5)
        one.step()
        other.step()
    assert torch.equal(ours[0], theirs[0])
    assert [float(one.state[p]["step"]) for p in (*ours, *plain)] == [3, 3]
    assert counters(KERNEL).fallbacks == fallbacks + 3
    assert launches() == before + 3


def test_moments_of_another_shape_are_refused_as_torch_refuses_them():
    ours = parameters([(4, 3)])
    optimizer = tilekern.AdamW(ours)
    train(1, (optimizer, ours))
    optimizer.state[ours[0]]["exp_avg"] = torch.zeros(3, 4)
    with pytest.raises(RuntimeError, match="size"):
        train(1, (optimizer, ours))


def test_on_the_cpu_torch_does_the_work_with_one_warning(monkeypatch):
    monkeypatch.setenv("TILEKERN_INTERPRET", "0")
    ours = parameters([(4, 16), (3,)])
    theirs = twins(ours)
    fallbacks, before = counters(KERNEL).fallbacks, launches()
    pairs = (tilekern.AdamW(ours, lr=0.1), ours), (torch.optim.AdamW(theirs, lr=0.1), theirs)
    with pytest.warns(UserWarning, match="adamw was called on cpu") as said:
        train(3, *pairs)
    assert len(said) == 1
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))
    assert (counters(KERNEL).fallbacks, launches()) == (fallbacks + 6, before)


def test_the_scalars_of_a_step_by_hand():
    group = {"lr": 0.1, "betas": (0.5, 0.75), "eps": 1e-2, "weight_decay": 0.2, "maximize": True}
    # At the second step 1 - 0.5^2 = 3/4 and 1 - 0.75^2 = 7/16.
    root = math.sqrt(7 / 16)
    assert scalars_of(group, 2) == pytest.approx((-1, 0.98, 0.5, 0.75, 0.25, 0.1 / 0.75 * root, 1e-2 * root))
