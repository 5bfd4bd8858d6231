"""Steps replayed from CUDA graphs have the losses and weights of eager ones, bit by bit, however a loop is written."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, Qwen3Config

import tilekern
from tilekern.patch.graphs import EAGER_STEPS, graphs_of

pytestmark = pytest.mark.gpu
STEPS = 30
SIZES = {
    "vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096,
    "tie_word_embeddings": True, "use_cache": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def patched():
    tilekern.apply()
    yield
    tilekern.reset()


def make(attention="tilekern", dtype=torch.bfloat16, **more):
    config = Qwen3Config(**SIZES | more, attn_implementation=attention)
    torch.manual_seed(0)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).train()


def gpt2():
    """A model with dropout, and with weights whose gradients have other strides."""
    tokens = {"vocab_size": 2048, "bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(**tokens, n_embd=256, n_layer=3, n_head=4, use_cache=False)
    torch.manual_seed(0)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()


def ids(seed, tokens=256):
    return torch.randint(0, 2048, (2, tokens), device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


def loss_of(model, x, **more):
    return model(**{"input_ids": x, "labels": x, **more}).loss


def learned(optimizer, loss):
    """Take the step of a loss, and return the loss."""
    loss.backward()
    optimizer.step()
    return loss


def plain(model, optimizer, number):
    optimizer.zero_grad()
    loss = loss_of(model, ids(number))
    return learned(optimizer, loss)


def accumulating(model, optimizer, number):
    """Two forms in one step, whose gradients are added up and clipped."""
    optimizer.zero_grad()
    total = 0.0
    for part, tokens in enumerate((256, 256, 128)):
        loss = loss_of(model, ids(3 * number + part, tokens)) / 3
        loss.backward()
        total = total + loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return total


def accumulating_over_steps(model, optimizer, number):
    loss = loss_of(model, ids(number))
    loss.backward()
    if number % 3 == 2:
        optimizer.step()
        optimizer.zero_grad()
    return loss


def emptied_late(model, optimizer, number):
    loss = loss_of(model, ids(number))
    optimizer.zero_grad()
    return learned(optimizer, loss)


def zeroed(model, optimizer, number):
    optimizer.zero_grad(set_to_none=False)
    loss = loss_of(model, ids(number))
    return learned(optimizer, loss)


def scheduled(model, optimizer, number):
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * (1 - number / 100)
    return plain(model, optimizer, number)


def counting(model, optimizer, number):
    """Labels of any number, a mask of ones and positions that say nothing."""
    optimizer.zero_grad()
    x = ids(number)
    labels = x.clone()
    labels[:, : number % 7] = -100
    positions = torch.arange(256, device="cuda").expand(2, -1)
    count = int((labels != -100).sum()) - number % 3
    loss = loss_of(
        model, x, labels=labels, attention_mask=torch.ones_like(x), position_ids=positions, num_items_in_batch=count
    )
    return learned(optimizer, loss)


def padded(model, optimizer, number):
    """Rows of different lengths, padded at the left or the right."""
    optimizer.zero_grad()
    x = ids(number)
    mask = torch.ones_like(x)
    mask[0, : number % 5 * 8] = 0
    mask[1, 256 - number % 7 * 8 :] = 0
    loss = loss_of(model, x, labels=x.masked_fill(mask == 0, -100), attention_mask=mask)
    return learned(optimizer, loss)


def of_logits(model, optimizer, number):
    optimizer.zero_grad()
    x = ids(number)
    logits = model(input_ids=x).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), x[:, 1:].flatten())
    return learned(optimizer, loss)


def of_hidden_states(model, optimizer, number):
    """Another result than the loss is differentiated too."""
    optimizer.zero_grad()
    x = ids(number)
    result = model(input_ids=x, labels=x, output_hidden_states=True)
    loss = result.loss + result.hidden_states[-1].float().pow(2).mean()
    return learned(optimizer, loss)


def autocast(model, optimizer, number):
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        loss = loss_of(model, ids(number))
    return learned(optimizer, loss)


def scaled(model, optimizer, number):
    """Float16 with a loss scale, which the loop keeps beside the optimizer."""
    scaler = vars(optimizer).setdefault("scaler", torch.amp.GradScaler())
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.float16):
        loss = loss_of(model, ids(number))
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    return loss


def evaluating_between(model, optimizer, number):
    loss = plain(model, optimizer, number)
    if number % 5 == 4:
        model.eval()
        with torch.no_grad():
            loss_of(model, ids(7))
        model.generate(ids(3, 8), max_new_tokens=4, do_sample=False, pad_token_id=0)
        model.train()
    return loss


def freezing(model, optimizer, number):
    if number == 10:
        model.model.embed_tokens.requires_grad_(False).weight.grad = None
    if number == 20:
        model.model.layers[0].requires_grad_(False)
    return plain(model, optimizer, number)


def moving(model, optimizer, number):
    if number in (10, 11):
        model.to("cpu")
        torch.cuda.empty_cache()
        model.to("cuda")
        optimizer.state.clear()
    return plain(model, optimizer, number)


def forgetting(model, optimizer, number):
    if number == 15:
        tilekern.clear_autotune_cache()
    return plain(model, optimizer, number)


def abandoning(model, optimizer, number):
    """Some losses are never differentiated."""
    return loss_of(model, ids(number)).detach() if number % 4 == 3 else plain(model, optimizer, number)


def keeping(model, optimizer, number):
    """What a step gives is kept beyond the next step."""
    loss = plain(model, optimizer, number)
    model.kept = [*getattr(model, "kept", []), loss][-5:]
    assert all(x.item() != loss.item() for x in model.kept[:-1])
    return loss


LOOPS = [
    plain, accumulating, accumulating_over_steps, emptied_late, zeroed, scheduled, counting, padded, of_logits,
    of_hidden_states, evaluating_between, freezing, moving, forgetting, abandoning, keeping,
]  # fmt: skip


def trained(model, loop, steps=STEPS):
    optimizer = torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], lr=1e-3, fused=True)
    torch.manual_seed(1)
    return [loop(model, optimizer, number).item() for number in range(steps)]


def check(loop=plain, make_model=make, prepare=lambda model: model, steps=STEPS, replays=STEPS - EAGER_STEPS):
    """Train a model and its twin with graphs; return the graphs."""
    eager, mine = prepare(make_model()), prepare(make_model())
    tilekern.graphed(mine)
    assert trained(mine, loop, steps) == trained(eager, loop, steps)
    for one, other in zip(mine.parameters(), eager.parameters(), strict=True):
        assert torch.equal(one, other)
    graphs = graphs_of(mine)[""]
    assert graphs.replays >= replays, str(graphs)
    return graphs


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_has_the_same_bits(loop):
    # Freezing, moving and forgetting capture anew, after two more eager steps each at most.
    check(loop, lambda: make(tie_word_embeddings=False), replays=20)


def test_tied_weights_have_the_same_bits_for_200_steps():
    assert check(steps=200, replays=198).reasons == {}


@pytest.mark.parametrize("loop", [autocast, scaled])
def test_a_model_in_float32_under_autocast_has_the_same_bits(loop):
    check(loop, lambda: make(dtype=torch.float32))


def test_a_model_as_it_is_has_the_same_bits():
    tilekern.reset()
    check(plain, lambda: make("sdpa"))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_has_the_same_bits(reentrant):
    def prepare(model):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        return model

    check(prepare=prepare)


def test_dropout_draws_the_same_numbers():
    check(make_model=gpt2)


def test_dropout_inside_checkpoints_is_refused():
    def prepare(model):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    graphs = check(make_model=gpt2, prepare=prepare, replays=0)
    assert list(graphs.reasons) == ["random numbers, as of dropout, with gradient checkpointing"]


def test_an_adapter_has_the_same_bits():
    peft = pytest.importorskip("peft")

    def prepare(model):
        torch.manual_seed(5)
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable()
        return peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"])).train()

    check(prepare=prepare)


def test_hooks_of_parameters_run_in_each_step():
    def prepare(model):
        for x in model.parameters():
            x.register_hook(lambda slope: slope * 0.5)
        return model

    check(prepare=prepare)


def test_an_optimizer_in_the_backward_runs_in_each_step():
    def prepare(model):
        for x in model.parameters():
            own = torch.optim.SGD([x], lr=0.1)

            def take(_, own=own):
                own.step()
                own.zero_grad()

            x.register_post_accumulate_grad_hook(take)
        return model

    def loop(model, _, number):
        loss = loss_of(model, ids(number))
        loss.backward()
        return loss

    check(loop, prepare=prepare)


def waiting_forward(model):
    norm = model.model.norm
    forward = norm.forward
    norm.forward = lambda x: forward(x * (1.0 if x.float().sum().item() else 2.0))
    return model


class Waits(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x.view_as(x)

    @staticmethod
    def backward(_, slope):
        slope.sum().item()
        return slope


def waiting_backward(model):
    norm = model.model.norm
    forward = norm.forward
    norm.forward = lambda x: forward(Waits.apply(x))
    return model


@pytest.mark.parametrize("prepare", [waiting_forward, waiting_backward])
def test_what_waits_for_the_gpu_is_named_and_runs_eagerly(prepare):
    graphs = check(prepare=prepare, replays=0)
    assert graphs.captured == 0
    (reason,) = graphs.reasons
    assert "test_graphs_on_gpu.py:" in reason
    assert "waits for the GPU" in reason


def test_two_calls_before_a_backward_are_right():
    def loop(model, optimizer, number):
        optimizer.zero_grad()
        loss = loss_of(model, ids(number)) + loss_of(model, ids(number + 99))
        return learned(optimizer, loss)

    graphs = check(loop, lambda: make(tie_word_embeddings=False))
    assert list(graphs.reasons) == ["it came before the backward of the last captured call"]


def test_a_second_backward_is_refused():
    model = tilekern.graphed(make())
    trained(model, plain, 5)
    loss = loss_of(model, ids(1))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="runs once"):
        loss.backward()


def test_lengths_pad_batches_to_few_forms():
    def loop(model, optimizer, number):
        optimizer.zero_grad()
        x = ids(number, 100 + 17 * (number % 9))
        loss = loss_of(model, x)
        return learned(optimizer, loss)

    eager, mine = make(), tilekern.graphed(make(), lengths=[128, 256])
    pairs = zip(trained(mine, loop), trained(eager, loop), strict=True)
    assert max(abs(a - b) for a, b in pairs) < 2e-3
    assert graphs_of(mine)[""].captured == 2


@pytest.mark.parametrize("view", [False, True])
def test_ranks_have_the_same_bits(view, tmp_path):
    distributed = torch.distributed
    distributed.init_process_group(
        "nccl", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1, device_id=torch.device("cuda:0")
    )
    try:
        models = [make(), tilekern.graphed(make())]
        eager, mine = (
            torch.nn.parallel.DistributedDataParallel(x, device_ids=[0], gradient_as_bucket_view=view) for x in models
        )
        assert trained(mine, plain) == trained(eager, plain)
        assert graphs_of(mine)["module"].replays == STEPS - EAGER_STEPS
    finally:
        distributed.destroy_process_group()


def test_other_threads_go_on_during_a_capture():
    ended = threading.Event()

    def copy():
        stream, total = torch.cuda.Stream(), 0.0
        while not ended.is_set():
            with torch.cuda.stream(stream):
                x = torch.ones(1000, 1000).pin_memory().to("cuda", non_blocking=True)
                torch.cuda.Event().record(stream)
                total += x.sum().item()
        return total

    with ThreadPoolExecutor(1) as thread:
        copied = thread.submit(copy)
        try:
            check()
        finally:
            ended.set()
        assert copied.result() > 0


def test_a_capture_that_fails_leaves_nothing_behind():
    """A wait for the whole GPU, which a rehearsal does not see, has CUDA end the capture."""

    def waiting(model):
        embed = model.model.embed_tokens
        forward = embed.forward

        def wait(x):
            torch.cuda.synchronize()
            return forward(x)

        embed.forward = wait
        return model

    def drawing(model, optimizer, number):
        return plain(model, optimizer, number) + torch.rand(1, device="cuda")

    eager, mine = make(), tilekern.graphed(waiting(make()))
    assert trained(mine, drawing, 6) == trained(eager, drawing, 6)
    found = graphs_of(mine)[""]
    assert found.replays == 0
    assert next(iter(found.reasons)).startswith("its capture failed")
    assert trained(tilekern.graphed(make()), plain, 6) == trained(make(), plain, 6)


def test_graphs_take_little_memory_beside_the_eager_step():
    def peak(model):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        trained(model, plain, 6)
        return torch.cuda.max_memory_reserved()

    eager = peak(make())
    assert peak(tilekern.graphed(make())) < 1.3 * eager


def test_a_model_that_goes_takes_its_graphs_with_it():
    import gc

    model = tilekern.graphed(make())
    trained(model, plain, 5)
    del model
    gc.collect()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated()
    other = tilekern.graphed(make())
    trained(other, plain, 5)
    del other
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() <= held + 2**20
