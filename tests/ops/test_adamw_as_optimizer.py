"""tilekern.AdamW as one of torch's optimizers: groups, schedules, hooks, state dicts, scalers, shards."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from adamw_samples import DTYPES, error, give_gradients, parameters, train, twins
from rank_jobs import finish, start

import tilekern


def test_groups_have_options_and_steps_of_their_own():
    shapes = [(6, 16), (6,), (16,)]
    ours = parameters(shapes)
    exact = twins(ours, torch.float64)

    def optimizer(kind, params):
        groups = [{"params": params[:1], "lr": 0.1, "weight_decay": 0.5}, {"params": params[1:], "betas": (0.5, 0.9)}]
        return kind(groups, lr=1e-2, eps=1e-4)

    one, other = optimizer(tilekern.AdamW, ours), optimizer(torch.optim.AdamW, exact)
    train(2, (one, ours), (other, exact))
    # A parameter that joins late, and one that misses a step.
    late = parameters([(9,)], seed=5)
    exact_late = twins(late, torch.float64)
    one.add_param_group({"params": late, "maximize": True})
    other.add_param_group({"params": exact_late, "maximize": True})
    train(2, (one, ours + late), (other, exact + exact_late), first=2)
    give_gradients(9, ours + late, exact + exact_late)
    ours[2].grad = exact[2].grad = None
    one.step()
    other.step()
    assert [float(one.state[p]["step"]) for p in ours + late] == [5, 5, 4, 3]
    assert error(ours + late, exact + exact_late) < 1e-5


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6),
    ],
    ids=["cosine", "lambda", "one cycle"],
)
@pytest.mark.filterwarnings("error")
def test_schedules(schedule, tensor):
    ours = parameters([(4, 16)])
    exact = twins(ours, torch.float64)
    lr = torch.tensor(0.05) if tensor else 0.05
    pairs = [(tilekern.AdamW(ours, lr=copy.copy(lr)), ours), (torch.optim.AdamW(exact, lr=copy.copy(lr)), exact)]
    schedules = [schedule(optimizer) for optimizer, _ in pairs]
    for number in range(5):
        train(1, *pairs, first=number)
        for each in schedules:
            each.step()
    assert error(ours, exact) < 1e-5


def test_tensors_for_lr_and_betas_mean_what_numbers_do():
    ours = parameters([(4, 16)])
    others = twins(ours)
    lr, betas = torch.tensor([0.05]), (torch.tensor(0.8), torch.tensor([0.95]))
    one = tilekern.AdamW(ours, lr=lr, betas=betas)
    other = tilekern.AdamW(others, lr=lr.item(), betas=(betas[0].item(), betas[1].item()))
    train(3, (one, ours), (other, others))
    assert torch.equal(ours[0], others[0])
    lr.fill_(0.5)
    other.param_groups[0]["lr"] = 0.5
    train(1, (one, ours), (other, others), first=3)
    assert torch.equal(ours[0], others[0])


def test_a_closure_computes_the_gradients():
    (p,) = parameters([(4,)])
    optimizer = tilekern.AdamW([p], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]


def test_hooks_are_called_around_a_step():
    (p,) = parameters([(4,)])
    optimizer, seen = tilekern.AdamW([p]), []
    optimizer.register_step_pre_hook(lambda *_: seen.append(("before", p.detach().clone())))
    optimizer.register_step_post_hook(lambda *_: seen.append(("after", p.detach().clone())))
    p.grad = torch.ones(4)
    optimizer.step()
    assert [name for name, _ in seen] == ["before", "after"]
    assert not torch.equal(seen[0][1], seen[1][1])


def handed_over(first, second, dtype):
    """The parameters after three steps by one optimizer and, from its state dict, three more by another."""
    params = parameters([(6, 16), (5,)], dtype)
    # In float16 torch's own implementation rounds a smaller eps to 0, and divides by that.
    optimizer = first(params, lr=0.02, weight_decay=0.1, eps=1e-3)
    train(3, (optimizer, params))
    other = second(params, lr=0.5)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(3, (other, params), first=3)
    assert all(float(other.state[p]["step"]) == 6 for p in params)
    return torch.cat([p.detach().double().flatten() for p in params])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_state_dicts_go_both_ways(dtype, fused):
    def theirs(params, **options):
        return torch.optim.AdamW(params, **options, fused=fused)

    expected = handed_over(theirs, theirs, dtype)
    # Each implementation rounds differently: a few ulps of values of about 1, each step.
    tolerance = 16 * torch.finfo(dtype).eps
    for pair in ((tilekern.AdamW, theirs), (theirs, tilekern.AdamW), (tilekern.AdamW, tilekern.AdamW)):
        torch.testing.assert_close(handed_over(*pair, dtype), expected, rtol=tolerance, atol=tolerance)


def test_a_loaded_state_keeps_the_options_of_its_training_and_none_of_torch_s_implementations():
    theirs = parameters([(4,)])
    saved = torch.optim.AdamW(theirs, lr=0.3, betas=(0.5, 0.6), eps=1e-3, weight_decay=0.7, maximize=True, fused=True)
    train(1, (saved, theirs))
    state = saved.state_dict()
    state["param_groups"][0]["capturable"] = True
    optimizer = tilekern.AdamW(twins(theirs))
    optimizer.load_state_dict(state)
    (group,) = optimizer.param_groups
    kept = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay", "maximize")}
    assert kept == {"lr": 0.3, "betas": (0.5, 0.6), "eps": 1e-3, "weight_decay": 0.7, "maximize": True}
    assert (group["fused"], group["foreach"], group["capturable"]) == (None, None, False)
    assert state["param_groups"][0]["fused"] is True


def test_a_state_of_amsgrad_is_refused_and_nothing_is_loaded():
    theirs = parameters([(4,)])
    saved = torch.optim.AdamW(theirs, amsgrad=True)
    train(1, (saved, theirs))
    optimizer = tilekern.AdamW(twins(theirs), lr=0.5)
    with pytest.raises(ValueError, match="amsgrad=True is not served"):
        optimizer.load_state_dict(saved.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert not optimizer.state


@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copied", "pickled"])
def test_a_copy_goes_on_from_where_the_optimizer_was(again):
    ours = parameters([(6, 16)])
    optimizer = tilekern.AdamW(ours, lr=0.1)
    train(2, (optimizer, ours))
    other = again(optimizer)
    copied = other.param_groups[0]["params"]
    assert copied[0] is not ours[0]
    train(2, (optimizer, ours), (other, copied), first=2)
    assert torch.equal(ours[0], copied[0])


@pytest.mark.parametrize("option", ["amsgrad", "capturable", "differentiable", "foreach", "fused"])
def test_options_that_are_not_served_say_what_would_be_right(option):
    (p,) = parameters([(4,)])
    with pytest.raises(
        ValueError, match=rf"AdamW: {option}=True is not served: .*(use torch.optim.AdamW|leave it out)"
    ):
        tilekern.AdamW([p], **{option: True})
    with pytest.raises(ValueError, match=f"{option}=True is not served"):
        tilekern.AdamW([{"params": [p], option: True}])
    assert tilekern.AdamW([p], **{option: False}).param_groups[0][option] is False


@pytest.mark.parametrize("option", ["amsgrad", "capturable", "differentiable", "foreach", "fused"])
def test_options_that_are_set_later_are_refused_by_the_next_step(option):
    """And nothing of any group is changed before."""
    ours, others = parameters([(4,)]), parameters([(6,)])
    give_gradients(0, ours)
    give_gradients(0, others)
    optimizer = tilekern.AdamW([{"params": ours}, {"params": others}])
    before = ours[0].detach().clone()
    optimizer.param_groups[1][option] = True
    with pytest.raises(ValueError, match=rf"AdamW: {option}=True is not served: "):
        optimizer.step()
    assert torch.equal(ours[0], before)
    optimizer.param_groups[1][option] = False
    optimizer.step()
    assert not torch.equal(ours[0], before)


def test_maximize_may_be_set_later():
    ours, others = parameters([(4,)]), parameters([(4,)])
    one, other = tilekern.AdamW(ours), torch.optim.AdamW(others)
    one.param_groups[0]["maximize"] = other.param_groups[0]["maximize"] = True
    train(2, (one, ours), (other, others))
    torch.testing.assert_close(ours[0], others[0])


@pytest.mark.parametrize("name", ["lr", "betas"])
def test_tensors_that_are_not_on_the_cpu_are_refused(name):
    away = torch.tensor(0.5, device="meta")
    later = tilekern.AdamW(parameters([(4,)]))
    later.param_groups[0][name] = away if name == "lr" else (away, away)
    with pytest.raises(ValueError, match=rf"AdamW: {name} is a tensor on meta"):
        later.step()
    with pytest.raises(ValueError, match=rf"AdamW: {name} is a tensor on meta, .* give a float or a tensor on the CPU"):
        tilekern.AdamW(parameters([(4,)]), **{name: away if name == "lr" else (away, away)})


@pytest.mark.parametrize("options", [{"lr": -1.0}, {"eps": -1.0}, {"betas": (1.0, 0.9)}, {"weight_decay": -0.1}])
def test_values_that_torch_refuses_are_refused(options):
    with pytest.raises(ValueError, match="Invalid"):
        tilekern.AdamW(parameters([(4,)]), **options)


def test_a_scaler_divides_the_gradients_itself_and_leaves_out_infinite_ones():
    ours = parameters([(6, 16)])
    exact = twins(ours, torch.float64)
    one, other = tilekern.AdamW(ours, lr=0.1), torch.optim.AdamW(exact, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for number in range(3):
        give_gradients(number, ours, exact)
        scaler.scale(torch.ones(()))
        ours[0].grad *= scaler.get_scale()
        if number == 1:
            ours[0].grad[2, 3] = torch.inf
        else:
            other.step()
        scaler.step(one)
        scaler.update()
    assert one.state[ours[0]]["step"] == 2
    assert error(ours, exact) < 1e-5


@pytest.mark.parametrize("name", ["grad_scale", "found_inf"])
def test_scales_that_only_a_fused_implementation_reads_are_refused(name):
    (p,) = parameters([(4,)])
    p.grad = torch.ones(4)
    optimizer = tilekern.AdamW([p])
    setattr(optimizer, name, torch.ones(()))
    with pytest.raises(RuntimeError, match="leave grad_scale and found_inf to GradScaler"):
        optimizer.step()


def test_a_compiled_step_is_the_same_step():
    ours = parameters([(6, 16)])
    others = twins(ours)
    one, other = tilekern.AdamW(ours, lr=0.1), tilekern.AdamW(others, lr=0.1)
    compiled = torch.compile(one.step, backend="eager")
    for number in range(3):
        give_gradients(number, ours, others)
        compiled()
        other.step()
    assert torch.equal(ours[0], others[0])


@pytest.mark.processes
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")
@pytest.mark.nightly
def test_fsdp2_and_tensor_parallel_on_two_processes_give_the_parameters_of_one(tmp_path):
    worker = Path(__file__).parent / "adamw_fsdp_worker.py"
    ended = finish(start(tmp_path, worker, 2, TILEKERN_INTERPRET="1", GLOO_SOCKET_IFNAME="lo"))
    if any(code == 77 for _, _, code in ended):
        pytest.skip(next(said for said, _, code in ended if code == 77).strip().splitlines()[-1])
    assert [code for _, _, code in ended] == [0, 0], "\n".join(error for _, error, _ in ended)
