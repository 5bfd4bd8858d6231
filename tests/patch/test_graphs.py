"""Which steps are captured and which are not, on the CPU: a recording runs again what it recorded.

What CUDA's graphs add is in ``tests/gpu/test_graphs_on_gpu.py``.
"""

import copy
import gc
import pickle
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import rerunning
import torch
from tiny_qwen3 import IDS, make

import tilekern
from tilekern.errors import InputError
from tilekern.patch import captured, graphs
from tilekern.patch.captured import CapturedStep

pytestmark = pytest.mark.filterwarnings("ignore::tilekern.errors.TilekernWarning")
STEPS = 6
REPLAYS = STEPS - graphs.EAGER_STEPS


@pytest.fixture(autouse=True)
def recorded(monkeypatch):
    rerunning.use(monkeypatch)


def ids(seed, rows=2, tokens=7):
    return torch.randint(0, 331, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def loss_of(model, x, **more):
    return model(**{"input_ids": x, "labels": x, **more}).loss


def plain(model, optimizer, number):
    optimizer.zero_grad()
    loss = loss_of(model, ids(number))
    loss.backward()
    optimizer.step()
    return loss


def trained(model, loop=plain, steps=STEPS):
    optimizer = torch.optim.SGD([x for x in model.parameters() if x.requires_grad], lr=0.5)
    return [loop(model, optimizer, number).item() for number in range(steps)]


def twins(**options):
    eager, mine = make(**options).train(), make(**options).train()
    return eager, tilekern.graphed(mine)


def of(model):
    return graphs.graphs_of(model)[""]


def check(loop, replays=REPLAYS, **options):
    eager, mine = twins(**options)
    assert trained(mine, loop) == trained(eager, loop)
    assert all(map(torch.equal, mine.parameters(), eager.parameters()))
    assert of(mine).replays == replays
    return of(mine)


# Loops.


def test_a_form_is_captured_when_it_comes_for_the_third_time():
    found = check(plain)
    assert found.captured == 1
    assert str(found) == "1 form captured, 4 replays; eager: 2 x a new form"


def test_gradients_are_added_up_over_forms():
    def loop(model, optimizer, number):
        optimizer.zero_grad()
        total = 0.0
        for part, tokens in enumerate((7, 7, 5)):
            loss = loss_of(model, ids(3 * number + part, tokens=tokens)) / 3
            loss.backward()
            total = total + loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return total

    assert check(loop, replays=10 + 4).captured == 2


@pytest.mark.parametrize("to_none", [False, True])
def test_gradients_may_be_emptied_before_the_backward(to_none):
    def loop(model, optimizer, number):
        loss = loss_of(model, ids(number))
        optimizer.zero_grad(set_to_none=to_none)
        loss.backward()
        optimizer.step()
        return loss

    check(loop)


def test_a_gradient_is_the_memory_of_the_graph_until_another_is_added():
    _, model = twins()
    trained(model, steps=4)
    weight = model.model.norm.weight
    model.zero_grad()
    loss_of(model, ids(1)).backward()
    first, place = weight.grad.clone(), weight.grad.data_ptr()
    model.zero_grad()
    loss_of(model, ids(1)).backward()
    assert weight.grad.data_ptr() == place
    loss_of(model, ids(1)).backward()
    assert weight.grad.data_ptr() != place
    assert torch.equal(weight.grad, 2 * first)


def test_masks_of_ones_positions_and_numbers_of_labels_make_no_new_form():
    def loop(model, optimizer, number):
        optimizer.zero_grad()
        x = ids(number)
        labels = x.clone()
        labels[:, : number % 3] = -100
        positions = torch.arange(7).expand(2, -1)
        loss = loss_of(
            model, x, labels=labels, attention_mask=torch.ones_like(x), position_ids=positions,
            num_items_in_batch=int((labels != -100).sum()) - number,
        )  # fmt: skip
        loss.backward()
        optimizer.step()
        return loss

    assert check(loop).captured == 1


def test_a_mask_that_hides_tokens_is_an_input():
    def loop(model, optimizer, number):
        optimizer.zero_grad()
        x = ids(number)
        mask = torch.ones_like(x)
        mask[0, : 1 + number % 3] = 0
        loss = loss_of(model, x, labels=x.masked_fill(mask == 0, -100), attention_mask=mask)
        loss.backward()
        optimizer.step()
        return loss

    assert check(loop).captured == 1


@pytest.mark.usefixtures("interpreted")
def test_a_packed_row_is_captured_with_the_starts_of_its_sequences():
    def loop(model, optimizer, number):
        optimizer.zero_grad()
        x, first = ids(number, 1, 12), 4 + number % 4
        positions = torch.cat([torch.arange(first), torch.arange(12 - first - 2), torch.arange(2)])[None]
        loss = loss_of(model, x, position_ids=positions)
        loss.backward()
        optimizer.step()
        return loss

    tilekern.apply(model_type="qwen3")
    before = tilekern.stats().get("attention_forward", {"fallbacks": 0})["fallbacks"]
    found = check(loop, attention="tilekern")
    assert found.captured == 1
    assert tilekern.stats()["attention_forward"]["fallbacks"] == before


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("with_starts", [False, True])
def test_padding_of_a_packed_row_is_a_sequence(with_starts):
    """As TRL and the collators of transformers make rows: each has another length."""

    def loop(model, optimizer, number):
        optimizer.zero_grad()
        tokens = 14 + number % 3
        x, first = ids(number, 1, tokens), 3 + number % 2
        starts = torch.tensor([0, first, tokens], dtype=torch.int32)
        more = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), starts)
        more |= dict.fromkeys(("max_length_q", "max_length_k"), max(first, tokens - first))
        more["seq_idx"] = (torch.arange(tokens)[None] >= first).int()
        positions = torch.cat([torch.arange(first), torch.arange(tokens - first)])[None]
        labels = x.clone()
        labels[:, [0, first]] = -100
        loss = loss_of(model, x, labels=labels, position_ids=positions, **(more if with_starts else {}))
        loss.backward()
        optimizer.step()
        return loss

    tilekern.apply(model_type="qwen3")
    eager, mine = (make(attention="tilekern", layers=1).train() for _ in range(2))
    tilekern.graphed(mine, lengths=[16])
    assert trained(mine, loop) == pytest.approx(trained(eager, loop), rel=1e-5)
    assert (of(mine).captured, of(mine).replays, dict(of(mine).reasons)) == (1, STEPS - 2, {})


def test_positions_that_nothing_reads_run_eagerly():
    def loop(model, optimizer, number):
        optimizer.zero_grad()
        loss = loss_of(model, ids(number), position_ids=torch.arange(3, 10).expand(2, -1))
        loss.backward()
        optimizer.step()
        return loss

    found = check(loop, replays=0)
    assert found.reasons == {"positions that do not count up from 0 in each row": STEPS}


def test_values_are_read_again_when_a_tensor_has_changed():
    _, model = twins()
    mask = torch.ones_like(IDS)
    for _ in range(3):
        loss_of(model, IDS, attention_mask=mask).backward()
    whole = loss_of(model, IDS, attention_mask=mask)
    whole.backward()
    mask[0, :3] = 0
    hidden = loss_of(model, IDS, attention_mask=mask)
    assert of(model).captured == 1
    assert hidden.item() != whole.item()


@pytest.mark.parametrize(("hidden", "reasons"), [(slice(4, 7), 0), (slice(0, 3), 1)], ids=["behind", "before"])
def test_padding_behind_the_tokens_needs_no_mask(hidden, reasons):
    """Captured steps do as eager ones, and padding before the tokens is another form, which runs SDPA."""
    mask = torch.ones_like(IDS)
    mask[0, hidden] = 0

    def loop(model, optimizer, number):
        optimizer.zero_grad()
        x = ids(number)
        loss = loss_of(model, x, attention_mask=mask.clone(), labels=x.masked_fill(mask == 0, -100))
        loss.backward()
        optimizer.step()
        return loss

    def masked():
        return tilekern.runtime.dispatch.reasons().get("attention_forward", {}).get("a mask, as of padding", 0)

    before = masked()
    check(loop, attention="tilekern")
    assert bool(masked() - before) == bool(reasons)


@pytest.mark.parametrize("named", ["input_ids", ""])
def test_arguments_by_position_are_the_same_form(named):
    _, model = twins()
    for _ in range(3):
        given = {named: IDS} if named else {}
        model(*(() if named else (IDS,)), labels=IDS, **given).loss.backward()
    loss_of(model, IDS).backward()
    assert of(model).captured == 1
    assert of(model).replays == 2


def test_results_are_the_user_s():
    _, model = twins()
    trained(model)
    first = model(input_ids=ids(1), labels=ids(1))
    kept, logits = first.loss.item(), first.logits.clone()
    first.loss.backward()
    second = model(input_ids=ids(2), labels=ids(2))
    assert type(second) is type(first)
    assert second.keys() == first.keys()
    assert first.loss.item() == kept != second.loss.item()
    assert torch.equal(first.logits, logits)


def test_a_result_beside_the_loss_has_its_gradient():
    def loop(model, optimizer, number):
        optimizer.zero_grad()
        x = ids(number)
        made = model(input_ids=x, labels=x)
        loss = made.loss + made.logits.float().pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss

    check(loop)


def test_a_loss_of_the_logits_alone():
    def loop(model, optimizer, number):
        optimizer.zero_grad()
        x = ids(number)
        loss = torch.nn.functional.cross_entropy(model(input_ids=x, use_cache=False).logits.flatten(0, 1), x.flatten())
        loss.backward()
        optimizer.step()
        return loss

    check(loop)


def test_embeddings_as_inputs_have_gradients():
    eager, mine = twins()
    slopes = []
    for model in (eager, mine):
        for number in range(4):
            x = torch.randn(2, 7, 80, generator=torch.Generator().manual_seed(number)).requires_grad_()
            model(inputs_embeds=x, labels=IDS).loss.backward()
        slopes.append(x.grad)
    assert of(mine).replays == 2
    assert torch.equal(*slopes)


def test_hooks_of_parameters_see_each_gradient():
    _, model = twins()
    seen = []
    model.model.norm.weight.register_hook(lambda slope: seen.append(slope.clone()))
    trained(model)
    assert len(seen) == STEPS
    assert len({x.sum().item() for x in seen}) == STEPS


# What runs as it is.


def test_evaluation_and_generation_run_as_they_are():
    _, model = twins()
    trained(model)
    with torch.no_grad():
        loss_of(model, IDS)
    model.eval()
    loss_of(model, IDS)
    assert model.generate(IDS[:, :3], max_new_tokens=2, do_sample=False, pad_token_id=0).shape == (2, 5)
    assert of(model).replays == REPLAYS
    assert not of(model).reasons


def test_a_call_before_the_backward_of_the_last_runs_eagerly():
    def loop(model, optimizer, number):
        optimizer.zero_grad()
        loss = loss_of(model, ids(number)) + loss_of(model, ids(number + 9))
        loss.backward()
        optimizer.step()
        return loss

    found = check(loop, replays=5)
    assert found.reasons == {"it came before the backward of the last captured call": 5}


def test_a_loss_that_is_dropped_ends_its_step():
    def loop(model, optimizer, number):
        return loss_of(model, ids(number)).detach() if number % 2 else plain(model, optimizer, number)

    assert not check(loop).reasons


def test_a_second_backward_is_refused():
    _, model = twins()
    trained(model)
    loss = loss_of(model, IDS)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="the backward of a captured step runs once"):
        loss.backward()


def test_steps_that_change_buffers_are_refused_and_their_buffers_put_back():
    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return {"loss": (self.weight * x).sum()}

    model = tilekern.graphed(Counting().train())
    for number in range(5):
        model(x=torch.full((3,), float(number)))["loss"].backward()
    assert model.calls == 5
    assert list(of(model).reasons) == ["its buffers change in training"]


def test_a_wrapper_of_ranks_is_refused(tmp_path):
    distributed = torch.distributed
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        wrapper = torch.nn.parallel.DistributedDataParallel(make().train())
        trained(tilekern.graphed(wrapper), steps=3)
        reason = "DistributedDataParallel works beside its module's forward: give the model inside it"
        assert of(wrapper).reasons == {reason: 3}
    finally:
        distributed.destroy_process_group()


def test_a_model_whose_forward_takes_labels_and_nothing_else():
    class Plain(torch.nn.Linear):
        def forward(self, x, labels):
            return {"loss": (super().forward(x) - labels).square().mean()}

    model = tilekern.graphed(Plain(3, 3).train())
    for _ in range(4):
        model(x=torch.ones(2, 3), labels=torch.ones(2, 3))["loss"].backward()
    assert of(model).replays == 2


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ([1, 2], "the argument extra of the type list"),
        (torch.nn.Parameter(torch.ones(1)), "the argument extra of the type Parameter"),
        (torch.ones(1, device="meta"), "the argument extra on meta"),
    ],
)
def test_arguments_that_no_graph_takes_are_named(argument, reason):
    class Scaling(torch.nn.Linear):
        def forward(self, x, extra=None):  # noqa: ARG002
            return {"loss": super().forward(x).sum()}

    model = tilekern.graphed(Scaling(3, 3).train())
    for _ in range(3):
        model(x=torch.ones(2, 3), extra=argument)["loss"].backward()
    assert of(model).reasons == {reason: 3}


def test_the_reason_of_a_model_is_said_once(recwarn):
    _, model = twins()
    model.model.norm.register_forward_hook(lambda *_: None)
    trained(model)
    assert of(model).reasons == {"hooks on Qwen3RMSNorm": STEPS}
    said = [str(x.message) for x in recwarn if "graphed" in str(x.message)]
    assert said == ["graphed: Qwen3ForCausalLM runs eagerly: hooks on Qwen3RMSNorm"]


def test_a_model_elsewhere_is_refused(monkeypatch):
    monkeypatch.setattr(graphs, "DEVICES", ("cuda",))
    _, model = twins()
    trained(model)
    assert of(model).reasons == {"it is on the device cpu": STEPS}


def test_more_forms_than_most_run_eagerly():
    model = tilekern.graphed(make().train(), most=1)
    for tokens in (7, 5):
        for _ in range(3):
            loss_of(model, ids(1, tokens=tokens)).backward()
    assert of(model).captured == 1
    assert of(model).reasons == {"more than 1 forms; lengths= pads batches to few": 1}


def test_compiled_and_traced_calls_pass_through():
    _, model = twins()
    trained(model)
    loss = torch.compile(model, backend="eager")(input_ids=IDS, labels=IDS).loss
    loss.backward()
    with torch.autograd.graph.save_on_cpu():
        loss_of(model, IDS).backward()
    assert of(model).replays == REPLAYS


# What has changed is captured anew.


def hooked(model):
    handle = model.model.layers[0].register_forward_hook(lambda *_: None)
    return handle.remove


def frozen(model):
    model.model.norm.weight.requires_grad_(False)


def exchanged(model):
    model.model.layers[1] = copy.deepcopy(model.model.layers[1])


def moved(model):
    model.lm_head.weight.data = model.lm_head.weight.data.clone()


def assigned(model):
    state = {name: x.clone() for name, x in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def put_by_itself(model):
    forward = model.model.norm.forward
    model.model.norm.forward = lambda x: forward(x) * 2


def partly_evaluated(model):
    model.model.layers[0].eval()


def checkpointed(model):
    model.gradient_checkpointing_enable({"use_reentrant": False})


def of_another_class(model):
    norm = model.model.norm
    norm.__class__ = type(
        "Norm", (type(norm),), {"forward": lambda self, x: type(norm).__mro__[1].forward(self, x) * 3}
    )


def patched(_):
    tilekern.apply(model_type="qwen3")


def configured(model):
    model.config.initializer_range = 0.03


def rescaled(model):
    model.model.norm.scaling["default"] = 2.0


def forgotten(_):
    tilekern.clear_autotune_cache()


CHANGES = [
    frozen, exchanged, moved, assigned, put_by_itself, partly_evaluated, checkpointed, of_another_class, patched,
    configured, rescaled, forgotten,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_captured_anew(change):
    eager, mine = twins()
    for model in (eager, mine):
        model.model.norm.scaling = {"default": 1.0}  # as an adapter's layers have
    assert trained(mine) == trained(eager)
    for model in (eager, mine):
        change(model)
    captures = len(made := [])

    def noted(*given, original=CapturedStep.__init__):
        made.append(given)
        original(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CapturedStep, "__init__", noted)
        assert trained(mine) == trained(eager)
    assert len(made) == captures + 1


def test_a_hook_that_comes_and_goes():
    eager, mine = twins()
    assert trained(mine) == trained(eager)
    remove = hooked(mine)
    loss_of(mine, IDS).backward()
    assert of(mine).reasons == {"hooks on Qwen3DecoderLayer": 1}
    remove()
    mine.zero_grad()
    trained(mine)
    assert of(mine).replays == 2 * REPLAYS + graphs.EAGER_STEPS


def test_a_model_that_changes_in_each_step_runs_eagerly_in_the_end():
    _, model = twins()
    for number in range(40):
        loss_of(model, ids(number)).backward()
        moved(model)
    found = of(model)
    assert found.replays == 1 + graphs._MOST_LOSSES
    assert list(found.reasons) == ["it changes too often, as if its parameters moved in each step"]


def test_nothing_changed_captures_nothing_anew():
    _, model = twins()
    trained(model)
    step = next(iter(of(model)._steps.values()))
    model.eval()
    model.train()
    trained(model)
    assert next(iter(of(model)._steps.values())) is step


# Lengths.


def varied(model, optimizer, number):
    optimizer.zero_grad()
    x = ids(number, tokens=3 + number)
    mask = torch.ones_like(x)
    mask[0, 2 + number // 2 :] = 0
    loss = loss_of(model, x, labels=x.masked_fill(mask == 0, -100), attention_mask=mask)
    loss.backward()
    optimizer.step()
    return loss


def test_lengths_pad_batches_and_keep_their_loss():
    eager, mine = make().train(), tilekern.graphed(make().train(), lengths=[8, 4])
    assert trained(mine, varied) == pytest.approx(trained(eager, varied), rel=1e-5)
    assert of(mine).captured == 1
    assert of(mine).replays == 2


def test_a_model_around_takes_the_lengths_of_the_one_inside():
    """So a model that PEFT wraps later keeps them."""
    from peft import LoraConfig, get_peft_model

    tilekern.apply(model_type="qwen3", graphs=True)
    model = get_peft_model(tilekern.graphed(make().train(), lengths=[8, 4]), LoraConfig(r=2, target_modules=["q_proj"]))
    for tokens in (5, 6, 7, 8):
        loss_of(model, ids(1, tokens=tokens)).backward()
    assert (of(model).captured, of(model).replays) == (1, 2)


def test_what_lengths_cannot_pad_runs_eagerly():
    model = tilekern.graphed(make().train(), lengths=[8])
    loss_of(model, ids(1, tokens=9)).backward()
    mask = torch.ones_like(IDS)
    mask[:, 0] = 0
    loss_of(model, IDS, attention_mask=mask).backward()
    mask = torch.ones_like(IDS)
    mask[:, -1] = 0
    loss_of(model, IDS, attention_mask=mask).backward()  # a label that counts is hidden
    loss_of(model, IDS, position_ids=torch.arange(7).expand(2, -1)).backward()  # these say nothing
    loss_of(model, IDS, position_ids=torch.arange(3, 10).expand(2, -1)).backward()
    assert dict(of(model).reasons) == {
        "more tokens than 8, the longest of lengths=": 1,
        "a mask that hides more than padding at the right": 2,
        "lengths= cannot pad position_ids": 1,
    }


# Switches, copies, errors.


def test_copies_and_pickles_have_no_graphs():
    eager, model = twins()
    trained(model)
    trained(eager)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not graphs.graphs_of(other)
        assert loss_of(other, IDS).item() == loss_of(eager, IDS).item()
    replica = model._replicate_for_data_parallel()
    assert replica._compiled_call_impl is None


def test_a_model_that_is_gone_takes_its_graphs_along():
    _, model = twins()
    trained(model)
    gone = weakref.ref(model), weakref.ref(next(iter(of(model)._steps.values())))
    del model
    gc.collect()
    assert [one() for one in gone] == [None, None]


def test_reset_puts_back():
    _, model = twins()
    trained(model)
    tilekern.reset("graphs")
    assert not graphs.graphs_of(model)
    assert model._compiled_call_impl is None
    trained(model)


def test_apply_gives_graphs_to_the_outermost_models():
    assert "graphs" in tilekern.apply(model_type="qwen3", graphs=True)
    places = tilekern.get_patched_ops()["graphs"]  # PEFT's too, if another test has loaded it
    assert places[-1] == "transformers.modeling_utils.PreTrainedModel._compiled_call_impl"
    model = make().train()
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert list(graphs.graphs_of(model)) == [""]
    tilekern.apply(model_type="qwen3")
    other = make().train()
    other(input_ids=IDS, labels=IDS).loss.backward()
    assert not graphs.graphs_of(other)
    assert "graphs" not in tilekern.get_patched_ops()


def test_report_tells_of_graphs():
    _, model = twins()
    trained(model)
    said = str(tilekern.report(model)).splitlines()[-1]
    assert said == "graphs of the model: 1 form captured, 4 replays; eager: 2 x a new form"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lengths": []}, "lengths must be positive"),
        ({"lengths": [0, 8]}, "lengths must be positive"),
        ({"lengths": [8.0]}, "lengths must be positive"),
        ({"most": 0}, "most must be a positive number"),
        ({"most": True}, "most must be a positive number"),
    ],
)
def test_odd_options_are_refused(options, said):
    with pytest.raises(InputError, match=said):
        tilekern.graphed(make(), **options)


def test_what_is_no_model_is_refused():
    with pytest.raises(InputError, match=r"graphed takes a model, a torch\.nn\.Module, got str"):
        tilekern.graphed("qwen3")


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_waits_are_refused_in_one_thread_alone(monkeypatch, mode):
    """torch's debug mode, which all threads share, is stood in for by the warnings that it gives."""
    modes, shown = [mode], []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: shown.append(str(message)))
    waited = "called a synchronizing CUDA operation (Triggered internally at CUDAFunctions.cpp)"
    with ThreadPoolExecutor(1) as other, captured._waiting_refused(torch.device("cuda")):
        assert modes[-1] == "warn"
        theirs = other.submit(warnings.warn, waited).exception()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="synchronizing"):
                warnings.warn(waited, stacklevel=1)
        with pytest.raises(RuntimeError, match="synchronizing") as refused:
            warnings.warn(waited, stacklevel=1)
    assert isinstance(theirs, RuntimeError) == (mode == 2)
    assert shown == [waited] * (mode == 1)
    assert modes[-1] == mode
    assert captured.why(refused.value).startswith(f"{__file__}:")
