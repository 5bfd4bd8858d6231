"""Inside :func:`tilekern.invariant` a token's logits have the same bits in training, in a prompt and one by one.

By the interpreter: its default kernels add in one order at all sizes of these models, as kernels of one class do.
"""

import itertools
import os
import subprocess
import sys

import pytest
import torch
from decoding import one_by_one
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    StaticCache,
)

import tilekern
from tilekern import ops
from tilekern.errors import InputError, RowsVary, TilekernWarning
from tilekern.ops.linear_layers import linear
from tilekern.runtime import dispatch

SIZES = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
}  # fmt: skip
TOKENS = 6
IDS = torch.randint(SIZES["vocab_size"], (2, TOKENS), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def patched(monkeypatch):
    monkeypatch.setenv("TILEKERN_INTERPRET", "1")
    dispatch.forget()
    tilekern.apply()
    yield
    tilekern.reset()
    dispatch.forget()


def make(config, dtype, **more):
    torch.manual_seed(0)
    made = config(**SIZES | more, attn_implementation="tilekern")
    return AutoModelForCausalLM.from_config(made, dtype=dtype).eval()


def trained(model, ids, **more):
    logits = model.train()(input_ids=ids, use_cache=False, **more).logits.detach()
    model.eval()
    return logits


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (Qwen3Config, torch.bfloat16),
        (Qwen3Config, torch.float32),
        (LlamaConfig, torch.bfloat16),
        (Qwen2Config, torch.float32),
        (Gemma2Config, torch.bfloat16),
    ],
    ids=lambda of: str(getattr(of, "model_type", of)),
)
def test_a_token_has_the_same_logits_however_it_is_computed(config, dtype):
    model = make(config, dtype)
    with tilekern.invariant():
        whole = trained(model, IDS)
        with torch.no_grad():
            assert torch.equal(model(input_ids=IDS[1:, :5], use_cache=False).logits, whole[1:, :5])
        assert torch.equal(one_by_one(model, IDS), whole)
    if dtype == torch.float32:
        assert not torch.equal(one_by_one(model, IDS), whole), "torch's products and attention decode outside"


def test_a_cache_that_drops_keys_is_said():
    """The window's first key is at the start of a tile then, and in training wherever it is."""
    model = make(Gemma2Config, torch.bfloat16, sliding_window=4)
    with tilekern.invariant():
        one_by_one(model, IDS[:, :3])
        assert not dispatch.varying()
    with pytest.warns(TilekernWarning, match="a cache that drops keys"), tilekern.invariant():
        one_by_one(model, IDS[:, :5])
    assert "rows of attention_forward may depend on others: a cache that drops keys" in str(tilekern.report(model))


def test_a_step_trains_as_outside():
    """Gradients are near those of torch's products, and the loss has a gradient for each weight and bias."""
    model, losses, gradients = make(Qwen2Config, torch.float32).train(), [], []
    for mode in (tilekern.invariant, torch.enable_grad):
        model.zero_grad()
        with mode():
            logits = model(input_ids=IDS, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), IDS.flatten())
            loss.backward()
        losses.append(loss.item())
        gradients.append([x.grad.clone() for x in model.parameters()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for mine, others in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, others, rtol=1e-4, atol=1e-6)


def test_checkpointed_layers_have_the_same_bits():
    """The layers run again in the backward, in autograd's thread."""
    model = make(Qwen3Config, torch.bfloat16)
    found = []
    with tilekern.invariant():
        for checkpointed in (False, True):
            if checkpointed:
                model.gradient_checkpointing_enable()
            model.zero_grad()
            logits = model.train()(input_ids=IDS, use_cache=False).logits
            logits.float().logsumexp(-1).sum().backward()
            found.append([logits.detach(), *(x.grad.clone() for x in model.parameters())])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_linear_layers_run_the_kernel_of_the_class(transposed, biased):
    """Rows of three axes, a weight as torch keeps it or transposed, and the formula in float64."""
    x, weight = torch.randn(2, 3, 40, requires_grad=True), torch.randn(24, 40)
    weight = (weight.t().contiguous().t() if transposed else weight).requires_grad_()
    bias = torch.randn(24, requires_grad=True) if biased else None
    with tilekern.invariant():
        before = tilekern.stats()["matmul"]["launches"]
        assert torch.nn.functional.linear is linear
        y = torch.nn.functional.linear(x, weight, bias)
        assert tilekern.stats()["matmul"]["launches"] == before + 1
        given = [x, weight, *([bias] if biased else [])]
        slope = torch.randn_like(y)
        mine = torch.autograd.grad(y, given, slope)
    right = x.double() @ weight.double().t() + (bias.double() if biased else 0)
    torch.testing.assert_close(y.double(), right, rtol=1e-5, atol=1e-4)
    for one, other in zip(mine, torch.autograd.grad(right, given, slope.double()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


def test_torch_gets_its_products_back():
    own = torch.nn.functional.linear
    with pytest.raises(RuntimeError, match="inside"), tilekern.invariant(), tilekern.invariant():
        raise RuntimeError("inside")
    assert torch.nn.functional.linear is own
    assert not dispatch.is_invariant()


def test_what_another_library_has_put_in_its_place_comes_back_and_is_called(monkeypatch):
    own, seen = torch.nn.functional.linear, []
    other = lambda *given: seen.append(given) or own(*given)  # noqa: E731
    monkeypatch.setattr(torch.nn.functional, "linear", other)
    with tilekern.invariant():
        torch.nn.functional.linear(torch.randn(0, 8), torch.randn(4, 8))
    assert torch.nn.functional.linear is other
    assert len(seen) == 1


def test_what_no_kernel_takes_stays_torch_s():
    """Numbers of other dtypes, in an autocast region too, a subclass, no rows."""

    class Other(torch.Tensor):
        pass

    weight = torch.randn(4, 8)
    with tilekern.invariant():
        before = tilekern.stats()["matmul"]["launches"]
        torch.nn.functional.linear(torch.randn(3, 8, dtype=torch.float64), weight.double())
        torch.nn.functional.linear(torch.randn(3, 8).as_subclass(Other), weight)
        assert torch.nn.functional.linear(torch.randn(0, 8), weight).shape == (0, 4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.nn.functional.linear(torch.randn(3, 8, dtype=torch.float64), weight.double())
        assert tilekern.stats()["matmul"]["launches"] == before


def test_an_autocast_region_casts_and_runs_the_kernel_of_the_class():
    x, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((3, 8), (4, 8), (4,)))
    with tilekern.invariant():
        before = tilekern.stats()["matmul"]["launches"]
        plain = torch.nn.functional.linear(x.bfloat16(), weight.bfloat16(), bias.bfloat16())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = torch.nn.functional.linear(x, weight, bias)
        assert torch.equal(cast, plain)
        assert tilekern.stats()["matmul"]["launches"] == before + 2
    slope = torch.randn(3, 4).bfloat16()
    for mine, other in zip(*(torch.autograd.grad(y, (x, weight, bias), slope) for y in (cast, plain)), strict=True):
        assert mine.dtype == torch.float32
        assert torch.equal(mine, other)


def test_a_job_may_be_in_the_mode_from_the_start():
    code = "import tilekern, torch; tilekern.apply(); print(torch.nn.functional.linear.__module__)"
    environment = {**os.environ, "TILEKERN_INVARIANT": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "tilekern.ops.linear_layers"


def test_apply_turns_the_mode_on_and_reset_ends_it():
    own = torch.nn.functional.linear
    tilekern.apply(invariant=True)
    with tilekern.invariant():
        tilekern.apply()
        assert dispatch.is_invariant(), "the context is still open"
    assert not dispatch.is_invariant()
    assert torch.nn.functional.linear is own
    tilekern.apply(invariant="strict")
    tilekern.apply(invariant=True)
    torch.nn.Linear(2, 2)(torch.zeros(1, 2)).mean(-1)
    tilekern.reset()
    assert not dispatch.is_invariant()
    for wrong in ("Strict", 1, None):
        with pytest.raises(InputError, match='invariant must be False, True or "strict"'):
            tilekern.apply(invariant=wrong)


class Summing(torch.nn.Module):
    """Calls a function in its forward."""

    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, x):
        return self.call(x)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("matmul", lambda x: torch.matmul(x, x)),
        ("matmul", lambda x: x @ x),
        ("einsum", lambda x: torch.einsum("ij,kj->ik", x, x)),
        ("scaled_dot_product_attention", lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x)),
        ("mean", lambda x: x * x.pow(2).mean(-1, keepdim=True)),
        ("sum", lambda x: x.sum(dim=(1,))),
        ("norm", lambda x: torch.norm(x, 2, -1)),
        ("conv1d", lambda x: torch.nn.functional.conv1d(x, x[..., None])),
    ],
)
def test_strict_refuses_what_torch_sums_inside_a_module(name, call):
    x = torch.randn(3, 3)
    with pytest.raises(RowsVary, match=rf"torch\.{name} runs inside"), tilekern.invariant(strict=True):
        Summing(call)(x)
    Summing(call)(x)
    with tilekern.invariant(strict=True):
        call(x)  # outside of a module


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x[:, :1] @ x[:1],  # one term, as in rotary angles
        lambda x: x.sum(0) + x.mean() + x.norm(),
        lambda x: x.long().sum(-1),
        lambda x: torch.softmax(x, -1),
    ],
)
def test_strict_leaves_what_sums_no_row(call):
    with tilekern.invariant(strict=True):
        Summing(call)(torch.randn(3, 3))


def test_a_patched_model_is_strict_and_trains():
    model = make(LlamaConfig, torch.float32)
    with tilekern.invariant():
        whole = trained(model, IDS)
    with tilekern.invariant(strict=True):
        assert torch.equal(trained(model, IDS), whole)
        assert torch.equal(one_by_one(model, IDS), whole)
        model.gradient_checkpointing_enable()
        model.train()(input_ids=IDS, use_cache=False, labels=IDS).loss.backward()


EXPERTS = {
    Qwen3MoeConfig: {"num_experts": 8, "moe_intermediate_size": 48, "norm_topk_prob": True},
    GptOssConfig: {"num_local_experts": 8, "sliding_window": 16},
}


@pytest.mark.parametrize("config", list(EXPERTS), ids=lambda of: of.model_type)
def test_experts_are_strict_too(config):
    """Who else chose its experts changes no bit of a token."""
    tilekern.apply(experts=True)
    model = make(config, torch.bfloat16, num_experts_per_tok=2, **EXPERTS[config])
    with tilekern.invariant(strict=True):
        whole = trained(model, IDS)
        with torch.no_grad():
            assert torch.equal(model(input_ids=IDS[1:, :5], use_cache=False).logits, whole[1:, :5])
        assert torch.equal(one_by_one(model, IDS), whole)


def test_packed_rows_have_the_bits_of_rows_alone():
    model = make(Qwen3Config, torch.bfloat16)
    positions = torch.cat([torch.arange(TOKENS), torch.arange(TOKENS)])[None]
    with tilekern.invariant(strict=True):
        packed = trained(model, IDS.view(1, -1), position_ids=positions)
        assert torch.equal(packed.view(2, TOKENS, -1), trained(model, IDS))


def test_strict_refuses_what_the_model_s_own_ops_compute():
    model = make(LlamaConfig, torch.float32)
    mask = torch.ones_like(IDS)
    mask[0, 2] = 0
    with pytest.raises(RowsVary, match="attention_forward"), tilekern.invariant(strict=True):
        model(input_ids=IDS, attention_mask=mask)
    tilekern.apply(rms_norm=False, fused_add_rms_norm=False)
    with pytest.raises(RowsVary, match=r"torch\.mean runs inside"), tilekern.invariant(strict=True):
        model(input_ids=IDS)
    assert model(input_ids=IDS).logits.shape == (2, TOKENS, SIZES["vocab_size"])


def test_strict_lets_a_norm_run_apart_from_its_sum():
    """In an autocast region of float32 weights the terms are of two dtypes; the norm runs its own kernel."""
    model = make(LlamaConfig, torch.float32)
    with tilekern.invariant(strict=True), torch.autocast("cpu", dtype=torch.bfloat16):
        before = tilekern.stats()["fused_add_rms_norm_forward"]["fallbacks"]
        whole = trained(model, IDS)
        assert tilekern.stats()["fused_add_rms_norm_forward"]["fallbacks"] > before
        assert torch.equal(one_by_one(model, IDS), whole)


def test_strict_refuses_a_linear_layer_that_no_kernel_takes():
    with pytest.raises(RowsVary, match="rows of matmul"), tilekern.invariant(strict=True):
        torch.nn.functional.linear(torch.randn(3, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64))


def test_the_head_without_logits_has_their_bits():
    """Log-probabilities are those of the linear layer's logits, alone and among others."""
    hidden, weight = torch.randn(9, 40).bfloat16(), torch.randn(61, 40).bfloat16()
    ids = torch.arange(9)
    with tilekern.invariant():
        whole = ops.linear_log_probs(hidden, weight, ids)
        alone = [ops.linear_log_probs(hidden[row : row + 1], weight, ids[row : row + 1]) for row in range(9)]
        assert all(map(torch.equal, whole, map(torch.cat, zip(*alone, strict=True))))
        logits = torch.nn.functional.linear(hidden, weight)
        assert all(map(torch.equal, whole, ops.log_probs(logits, ids)))
    right = logits.float().log_softmax(-1).gather(1, ids[:, None])[:, 0]
    torch.testing.assert_close(whole[0], right, rtol=1e-6, atol=1e-6)


def padded(*padding):
    """A batch of :data:`IDS` with tokens before and behind each row, its mask, and positions that count its tokens."""
    width = TOKENS + max(before + behind for before, behind in padding)
    ids, mask = torch.full((len(padding), width), 7), torch.zeros(len(padding), width, dtype=torch.long)
    for row, (before, _) in enumerate(padding):
        ids[row, before : before + TOKENS], mask[row, before : before + TOKENS] = IDS[row], 1
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


@pytest.mark.parametrize("config", [Qwen3Config, Gemma2Config], ids=lambda of: of.model_type)
@pytest.mark.parametrize("padding", [((2, 0), (0, 2)), ((0, 1), (0, 3)), ((3, 0), (1, 1))], ids=str)
def test_padding_changes_no_bit(config, padding):
    """In training, in a prompt, and decoded: tokens stand behind, before, or between padding."""
    model, given = make(config, torch.bfloat16), padded(*padding)
    shown = given["attention_mask"].bool()
    with tilekern.invariant():
        whole = trained(model, IDS)
        before = tilekern.stats()["attention_forward"]["fallbacks"]
        assert torch.equal(trained(model, **given_as(given))[shown], whole.flatten(0, 1))
        with torch.no_grad():
            assert torch.equal(model(**given, use_cache=False).logits[shown], whole.flatten(0, 1))
        assert tilekern.stats()["attention_forward"]["fallbacks"] == before


def given_as(given):
    return {"ids": given["input_ids"]} | {name: x for name, x in given.items() if name != "input_ids"}


@torch.no_grad()
@pytest.mark.parametrize(("cache", "first"), [*((DynamicCache, first) for first in (5, 6, 7)), (StaticCache, 6)])
def test_a_padded_prompt_is_continued_with_the_same_bits(cache, first):
    """A prompt with padding on the left, then a token or several at a time."""
    model, given = make(Qwen3Config, torch.bfloat16), padded((2, 0), (2, 0))
    given["attention_mask"][0, 2] = 0  # the first row begins a token later
    given["position_ids"] = (given["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with tilekern.invariant():
        whole = [trained(model, IDS[:1, 1:]), trained(model, IDS[1:])]
        before = tilekern.stats()["attention_forward"]["fallbacks"]
        held, rows = cache(config=model.config, **({"max_cache_len": 16} if cache is StaticCache else {})), []
        for start, end in itertools.pairwise([0, first, *range(first + 1, TOKENS + 2), TOKENS + 2]):
            some = {name: x[:, start:end] for name, x in given.items()} | {
                "attention_mask": given["attention_mask"][:, :end]
            }
            rows.append(model(**some, past_key_values=held, use_cache=True).logits)
        found = torch.cat(rows, 1)
        assert torch.equal(found[0, 3:], whole[0][0])
        assert torch.equal(found[1, 2:], whole[1][0])
        assert tilekern.stats()["attention_forward"]["fallbacks"] == before


@torch.no_grad()
@pytest.mark.parametrize("masked", [False, True])
def test_a_static_cache_gives_the_bits_of_training(masked):
    model = make(Qwen3Config, torch.bfloat16)
    with tilekern.invariant(strict=True):
        whole, cache, rows = trained(model, IDS), StaticCache(config=model.config, max_cache_len=16), []
        for start, end in itertools.pairwise([0, 4, 5, TOKENS]):
            mask = {"attention_mask": torch.ones(2, end, dtype=torch.long)} if masked else {}
            rows.append(model(input_ids=IDS[:, start:end], past_key_values=cache, use_cache=True, **mask).logits)
        assert torch.equal(torch.cat(rows, 1), whole)


@torch.no_grad()
def test_layers_that_are_compiled_by_themselves_get_the_mask_of_padding():
    """In a graph torch attends with a dense mask, of the batch of this call."""
    plain, compiled = make(Qwen3Config, torch.float32), make(Qwen3Config, torch.float32)
    for layer in compiled.model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    for padding in (((2, 0), (0, 2)), ((1, 2), (3, 0))):
        given = padded(*padding)
        shown = given["attention_mask"].bool()
        with tilekern.invariant():
            found = compiled(**given, use_cache=False).logits[shown]
        torch.testing.assert_close(found, plain(**given, use_cache=False).logits[shown], rtol=1e-5, atol=1e-5)
