"""What may change between two steps of tilekern.AdamW, with small parameters that go together, as on a GPU."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from adamw_samples import KERNEL, FusedCalls, give_gradients, launches, parameters, train, twins

import tilekern
from tilekern.ops import adamw
from tilekern.runtime.dispatch import counters

SHAPES = [(4, 6), (8,), (4, 6), (9, 9)]
# Each rounds in its own way; float16 is far coarser, and float64 begins as float32.
TOLERANCE = {torch.float16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-5}

pytestmark = pytest.mark.usefixtures("on_cpu")


def transposed(x):
    return x.t().contiguous().t()


def with_gaps(x):
    return x.new_zeros(x.shape[0], 2 * x.shape[1])[:, ::2].copy_(x)


def appended(optimizer, params):
    (late,) = parameters([(5,)], seed=3)
    optimizer.param_groups[0]["params"].append(late)
    params.append(late)


def in_a_group_of_its_own(optimizer, params):
    late = parameters([(5,), (70,)], seed=3)
    optimizer.add_param_group({"params": late, "lr": 0.5, "maximize": True})
    params += late


def left_out(optimizer, params):
    del optimizer.param_groups[0]["params"][0], params[0]


def in_another_order(optimizer, params):
    optimizer.param_groups[0]["params"].reverse()


def replaced(optimizer, params):
    """A longer parameter takes the place and the state of another one, as in Gaussian splatting."""
    old, state = params[1], optimizer.state.pop(params[1])
    params[1] = optimizer.param_groups[0]["params"][1] = torch.nn.Parameter(old.detach().repeat(2))
    optimizer.state[params[1]] = {n: x if n == "step" else x.repeat(2) for n, x in state.items()}


def its_data(new):
    def change(optimizer, params):
        params[0].data = new(params[0].data)

    return change


def its_data_and_state(new):
    def change(optimizer, params):
        state = optimizer.state[params[0]]
        params[0].data = new(params[0].data)
        state |= {name: new(state[name]) for name in ("exp_avg", "exp_avg_sq")}
        params[0].grad = None

    return change


def moments_in_place(optimizer, params):
    moment = optimizer.state[params[0]]["exp_avg"]
    moment.data = transposed(moment.data)


def another_state(optimizer, params):
    optimizer.state[params[0]] = {name: x.clone() for name, x in optimizer.state[params[0]].items()}
    optimizer.state[params[1]]["step"] = torch.tensor(7.0)
    optimizer.state[params[2]]["step"].zero_()


def no_state(optimizer, params):
    optimizer.state.clear()


def loaded(optimizer, params):
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["lr"] = 0.3
    optimizer.load_state_dict(state)


def shared_memory(optimizer, params):
    params[2].data = params[0].data


def options(**changes):
    return lambda optimizer, _: optimizer.param_groups[0].update(changes)


CHANGES = {
    "a parameter is appended": appended,
    "a group is added": in_a_group_of_its_own,
    "a parameter is left out": left_out,
    "another order": in_another_order,
    "a parameter is replaced": replaced,
    "data in another order of memory": its_data(transposed),
    "data with gaps": its_data(with_gaps),
    "data and moments in another order of memory": its_data_and_state(transposed),
    "a large parameter": its_data_and_state(lambda x: x.repeat(4, 1)),
    "a parameter of no elements": its_data_and_state(lambda x: x[:0]),
    "float16": its_data_and_state(torch.Tensor.half),
    "float64": its_data_and_state(torch.Tensor.double),
    "a moment in another order of memory": moments_in_place,
    "another state": another_state,
    "no state": no_state,
    "a state is loaded": loaded,
    "two parameters in the same memory": shared_memory,
    "lr is a tensor": options(lr=torch.tensor(0.2)),
    "other options": options(lr=0.2, betas=(0.5, torch.tensor(0.6)), eps=1e-2, weight_decay=0.3, maximize=True),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_step_is_torch_s_whatever_changed_before_it(change):
    ours = parameters(SHAPES)
    theirs = twins(ours)
    pairs = [(kind(params, lr=0.1, eps=1e-3), params) for kind, params in (
        (tilekern.AdamW, ours), (lambda *a, **k: torch.optim.AdamW(*a, **k, foreach=False), theirs)
    )]  # fmt: skip
    train(2, *pairs)
    for optimizer, params in pairs:
        change(optimizer, params)
    train(2, *pairs, first=2)
    for p, q in zip(ours, theirs, strict=True):
        assert (p.dtype, p.stride()) == (q.dtype, q.stride())
        assert float(pairs[0][0].state[p]["step"]) == float(pairs[1][0].state[q]["step"])
        torch.testing.assert_close(p, q, rtol=TOLERANCE[p.dtype], atol=TOLERANCE[p.dtype])


def test_gradients_may_be_absent_or_in_another_layout_for_some_steps():
    ours = parameters(SHAPES)
    theirs = twins(ours)
    one, other = tilekern.AdamW(ours, lr=0.1), torch.optim.AdamW(theirs, lr=0.1, foreach=False)
    calls, before = FusedCalls(), (launches(), counters(KERNEL).fallbacks)
    for number in range(6):
        give_gradients(number, ours, theirs)
        for params in (ours, theirs):
            if number in (2, 3):
                params[1].grad = None
            if number in (3, 4):
                params[2].grad = transposed(params[2].grad)
        with calls:
            one.step()
        other.step()
    # Torch refuses those whose gradient is transposed, and takes the rest at once.
    together = [(numbers, count) for _, numbers, count in calls.seen]
    assert together == [
        ([24, 8, 24], 1), ([24, 8, 24], 2), ([24, 24], 3), ([24], 4), ([24], 5), ([8], 3), ([24, 24], 6), ([8], 4),
    ]  # fmt: skip
    assert (launches(), counters(KERNEL).fallbacks) == (before[0] + 6 + 2, before[1])
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)


def test_small_parameters_on_a_gpu_are_not_looked_at_one_by_one(monkeypatch):
    """That they are alike is left to torch, whose fused step checks it anyway."""
    monkeypatch.setattr(adamw, "_goes_together", None)
    ours = parameters(SHAPES[:3])
    train(2, (tilekern.AdamW(ours), ours))


def test_an_error_of_torch_that_is_not_about_layouts_is_raised_after_one_try(monkeypatch):
    tries = []

    def fail(*_, **__):
        tries.append(1)
        raise RuntimeError("the GPU has fallen off the bus")

    monkeypatch.setattr(torch, "_fused_adamw_", fail)
    ours = parameters(SHAPES[:2])
    optimizer = tilekern.AdamW(ours)
    with pytest.raises(RuntimeError, match="fallen off"):
        train(1, (optimizer, ours))
    assert tries == [1]
    assert [float(optimizer.state[p]["step"]) for p in ours] == [0, 0]


def test_a_refused_parameter_that_torch_s_own_step_refuses_too_raises_before_others_change():
    ours = [*parameters([(4,)]), torch.nn.Parameter(torch.zeros(3, 1).expand(3, 4))]
    before = ours[0].detach().clone()
    for p in ours:
        p.grad = torch.ones(p.shape)
    with pytest.raises(RuntimeError, match="refers to a single memory location"):
        tilekern.AdamW(ours).step()
    assert torch.equal(ours[0], before)


def test_two_threads_step_an_optimizer_each():
    def trained(seed):
        params = parameters(SHAPES, seed=seed)
        train(10, (tilekern.AdamW(params, lr=0.1), params))
        return params

    expected = [trained(seed) for seed in range(4)]
    with ThreadPoolExecutor(2) as pool:
        for found, params in zip(pool.map(trained, range(4)), expected, strict=True):
            assert all(torch.equal(p, q) for p, q in zip(found, params, strict=True))


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")
def test_shards_go_together_beside_whole_parameters():
    """The shards of one of two ranks, beside an optimizer of just these; the gradients of one lie otherwise."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        local = parameters([(4, 6), (8,), (5,), (9, 9)])
        placements = [[Shard(0)], [Shard(0)], None, [Shard(0)]]
        ours = [
            p if place is None else torch.nn.Parameter(DTensor.from_local(p.detach().clone(), mesh, place))
            for p, place in zip(twins(local), placements, strict=True)
        ]
        one, other = tilekern.AdamW(ours, lr=0.1), tilekern.AdamW(local, lr=0.1)
        calls = FusedCalls()
        for number in range(3):
            give_gradients(number, local)
            for p, q, place in zip(ours, local, placements, strict=True):
                p.grad = q.grad.clone() if place is None else DTensor.from_local(q.grad.clone(), mesh, place)
            ours[1].grad = DTensor.from_local(local[1].grad.repeat(2), mesh, [Replicate()])
            with calls:
                one.step()
            other.step()
        assert [(sizes, count) for _, sizes, count in calls.seen] == [([24, 8, 5], count) for count in (1, 2, 3)]
        for p, q, place in zip(ours, local, placements, strict=True):
            assert torch.equal(p if place is None else p.to_local(), q)
            assert float(one.state[p]["step"]) == 3
            assert p._version >= 3
            assert place is None or p.to_local()._version >= 3
    finally:
        torch.distributed.destroy_process_group()
