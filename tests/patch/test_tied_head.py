"""A table that is embedding and head: its one gradient has autograd's bits, and no second one is made."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_qwen3 import IDS, apply, same
from tiny_qwen3 import make as make_tiny
from torch.nn.functional import embedding
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, GPT2Config, GPT2LMHeadModel

import tilekern
from tilekern.ops.tied_embedding import tied_embedding


class Tables(TorchDispatchMode):
    """Counts the new tensors of a table's shape that operations return."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.made = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        given = {x.data_ptr() for x in args if isinstance(x, torch.Tensor)}
        if isinstance(made, torch.Tensor) and made.shape == self.shape and made.data_ptr() not in given:
            self.made += 1
        return made


def loss_of(rows, table):
    """A loss of both, whose gradient of the table is its own."""
    logits = rows.reshape(-1, rows.shape[-1]) @ table.t()
    return (logits.sin() * torch.linspace(-1, 1, logits.numel()).view_as(logits).to(logits.dtype)).sum()


def plain(ids, weight, padding_idx):
    return loss_of(embedding(ids, weight, padding_idx), weight)


def tied(ids, weight, padding_idx):
    return loss_of(*tied_embedding(ids, weight, padding_idx))


@given(
    st.sampled_from([(), (1,), (2,), (5, 3), (2, 30)]), st.sampled_from([1, 7, 31, 200]), st.integers(1, 20),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]), st.booleans(),
    st.sampled_from([torch.int32, torch.int64]), st.integers(0, 2**31),
)  # fmt: skip
def test_the_gradient_has_the_bits_of_autograd_s(shape, vocabulary, columns, dtype, is_padded, kind, seed):
    generator = torch.Generator().manual_seed(seed)
    # Ids from a few, so that most come more than once.
    ids = torch.randint(0, min(vocabulary, 9), (*shape, 2), generator=generator).to(kind)[..., 0]
    weight = torch.randn((vocabulary, columns), generator=generator).to(dtype).requires_grad_()
    padding_idx = int(ids.flatten()[0]) if is_padded else None
    (a,), (b,) = (torch.autograd.grad(way(ids, weight, padding_idx), weight) for way in (plain, tied))
    assert torch.equal(a, b)


def test_no_tokens_and_either_result_alone():
    weight = torch.randn(50, 4, requires_grad=True)
    rows, table = tied_embedding(IDS[:, :0] % 50, weight)
    (gradient,) = torch.autograd.grad(rows.sum() + (3 * table).sum(), weight)
    assert torch.equal(gradient, torch.full_like(weight, 3.0))
    ids = torch.tensor([1, 1, 7])
    for at, counts in ((0, {1: 2.0, 7: 1.0}), (1, dict.fromkeys(range(50), 1.0))):
        (gradient,) = torch.autograd.grad(tied_embedding(ids, weight)[at].sum(), weight)
        assert gradient[:, 0].tolist() == [counts.get(row, 0.0) for row in range(50)]


def test_a_kept_graph_and_second_derivatives():
    ids, weight = torch.tensor([3, 5, 3]), torch.randn(40, 6, dtype=torch.float64, requires_grad=True)
    loss = tied(ids, weight, None)
    first, again = (torch.autograd.grad(loss, weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, again)
    second = []
    for way in (plain, tied):
        (slope,) = torch.autograd.grad(way(ids, weight, None), weight, create_graph=True)
        second += torch.autograd.grad(slope.square().sum(), weight)
    assert torch.equal(*second)


def qwen3(**changes):
    return make_tiny(layers=1, tie_word_embeddings=True, pad_token_id=int(IDS[0, 0]), **changes).train()


def gemma3():
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32, intermediate_size=96, vocab_size=331,
        num_hidden_layers=1,
    )  # fmt: skip
    return Gemma3ForCausalLM(config).train()


def gpt2():
    torch.manual_seed(0)
    without = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=331, n_embd=64, n_layer=1, n_head=2, n_positions=64, **without)
    ).train()


def run(model, ids=IDS, **more):
    """The gradients of a step, and whether the embedding's results are of a tied one."""
    model.zero_grad()
    seen = []
    hook = model.get_input_embeddings().register_forward_hook(lambda _, __, rows: seen.append(graph_of(rows)))
    loss = model(labels=ids, **(more or {"input_ids": ids})).loss
    hook.remove()
    with Tables(model.get_input_embeddings().weight.shape) as tables:
        loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return gradients, any("TiedEmbedding" in x for x in seen), tables.made


def graph_of(x):
    """The names of the last two functions that made a tensor."""
    made = x.grad_fn
    return "" if made is None else " ".join([made.name(), *(y.name() for y, _ in made.next_functions if y)])


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("make", [qwen3, gemma3, gpt2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_patched_model_makes_one_gradient_of_its_table(make, dtype):
    model = make().to(dtype)
    tilekern.apply(model_type=model.config.model_type.removesuffix("_text"))
    gradients, is_tied, made = run(model)
    rows = model.get_input_embeddings()(IDS)  # Called before the model runs, it is torch's.
    others, others_are_tied, others_made = run(model, inputs_embeds=rows)
    assert (is_tied, others_are_tied) == (True, False)
    assert same(gradients, others)
    assert made == 0 < others_made


def bent(model):
    """An embedding with a forward of its own."""
    table = model.get_input_embeddings()
    table.forward = lambda ids: embedding(ids, table.weight) * 1.0


def frozen(model):
    model.lm_head.weight.requires_grad_(False)


def apart(model):
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())


def hooked(model):
    model.lm_head.register_forward_hook(lambda *_: None)


def scarce(model):
    model.get_input_embeddings().scale_grad_by_freq = True


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("change", [bent, frozen, apart, hooked, scarce])
def test_other_tables_and_heads_run_as_they_are(change):
    reference, model = qwen3(), qwen3()
    for one in (reference, model):
        change(one)
    expected, *_ = run(reference)
    apply()
    gradients, is_tied, _ = run(model)
    assert not is_tied
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("interpreted")
def test_where_logits_are_made_the_embedding_is_torch_s():
    model = qwen3()
    apply()
    assert not run(model, input_ids=IDS, skip_logits=False)[1]
    with torch.no_grad():
        model(input_ids=IDS, labels=IDS)
    model.eval()
    assert not run(model)[1]


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("way", ["inside", "around"])
def test_a_compiled_model_is_one_graph_and_compiled_once(way):
    model = qwen3()
    reference, *_ = run(model)
    apply()
    if way == "inside":
        model.model.compile(backend="aot_eager", fullgraph=True)
    else:
        model.model = torch.compile(model.model, backend="aot_eager", fullgraph=True)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            model.zero_grad()
            model(input_ids=IDS, labels=IDS).loss.backward()
    for a, b in zip([p.grad for p in model.parameters()], reference, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("interpreted")
def test_rows_may_be_changed_by_hooks_and_under_checkpoints():
    """As by NEFTune, and as by transformers for checkpoints of layers."""
    model = qwen3()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.get_input_embeddings().register_forward_hook(lambda _, __, rows: rows * 1.5)
    apply()
    gradients, is_tied, _ = run(model)
    model.get_input_embeddings().scale_grad_by_freq = True
    model.get_input_embeddings().forward = lambda ids: embedding(ids, model.lm_head.weight, int(IDS[0, 0]))
    others, is_other_tied, _ = run(model)
    assert (is_tied, is_other_tied) == (True, False)
    assert same(gradients, others)


@pytest.mark.usefixtures("interpreted")
def test_an_error_and_another_thread_leave_the_embedding_as_it_was(monkeypatch):
    model = qwen3()
    apply()
    table, rows = model.get_input_embeddings(), []
    layer = model.model.layers[0]

    def meanwhile(*_, **__):
        worker = threading.Thread(target=lambda: rows.append(table(IDS)))
        worker.start()
        worker.join()
        rows.append(table(IDS))
        raise RuntimeError("stopped")

    monkeypatch.setattr(layer, "forward", meanwhile)
    with pytest.raises(RuntimeError, match="stopped"):
        model(input_ids=IDS, labels=IDS)
    assert [graph_of(x).split()[0] for x in rows] == ["EmbeddingBackward0"] * 2
    assert "forward" not in vars(table)
    monkeypatch.undo()
    assert run(model)[1]
