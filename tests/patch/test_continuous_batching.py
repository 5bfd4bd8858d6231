"""``model.generate_batch`` with ``attn_implementation="tilekern"``: the tokens of ``generate``, by the kernels."""

import importlib
import sys

import pytest
import torch
from model_contract import only
from tiny_qwen3 import launches, worst
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GenerationConfig,
    GptOssConfig,
    Qwen2MoeConfig,
    Qwen3Config,
)

import tilekern
from tilekern import ops
from tilekern.errors import InputError
from tilekern.patch import attention as implementation
from tilekern.patch import batching

pytest.importorskip("transformers.generation.continuous_batching.continuous_api")
from transformers import ContinuousBatchingConfig

from tilekern.patch import paged

pytestmark = pytest.mark.usefixtures("interpreted")
SIZES = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "initializer_range": 0.5,
    "tie_word_embeddings": False,
}  # fmt: skip
WINDOW, MIXED = {"sliding_window": 5}, {"layer_types": ["sliding_attention", "full_attention"]}
FAMILIES = {
    "qwen3": (Qwen3Config, {}),
    "gemma2": (Gemma2Config, WINDOW),
    "gemma3": (Gemma3TextConfig, WINDOW | MIXED),
    "gpt_oss": (GptOssConfig, WINDOW | {"num_local_experts": 4}),
}
PROMPTS = [[7, 3, 58, 1, 20], [1 + 7 * n % 59 for n in range(17)], [9]]
TOKENS = 4
HOMES = {
    name: importlib.import_module(f"transformers.generation.continuous_batching.{name}")
    for name in ("initialization", "cache", "continuous_api")
}


@pytest.fixture(autouse=True)
def known():
    tilekern.apply(**only())


def make(family):
    torch.manual_seed(0)
    config, more = FAMILIES[family]
    made = config(**SIZES | more, attn_implementation="tilekern")
    return AutoModelForCausalLM.from_config(made, dtype=torch.float32).eval()


def batched(model, prompts=PROMPTS):
    """Tokens that continuous batching adds to prompts, in chunks of 9, with pages of 4 tokens."""
    how = GenerationConfig(max_new_tokens=TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    pages = ContinuousBatchingConfig(page_size=4, num_blocks=40, max_batch_tokens=9, max_requests_per_batch=4)
    made = model.generate_batch(prompts, generation_config=how, continuous_batching_config=pages)
    assert not any(output.error for output in made.values())
    return [output.generated_tokens for output in made.values()]


def alone(model, prompts=PROMPTS):
    how = GenerationConfig(max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
    return [
        model.generate(torch.tensor([prompt]), generation_config=how)[0, len(prompt) :].tolist() for prompt in prompts
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_gives_the_tokens_of_each_prompt_alone(family):
    """In chunks, with windows, soft caps and sinks; the kernel for decoding reads pages where every layer has them."""
    model = make(family)
    wanted = alone(model)
    assert len({token for tokens in wanted for token in tokens}) > 4, "a model that repeats one token shows nothing"
    before = tilekern.stats()
    assert batched(model) == wanted
    after = tilekern.stats()
    assert after["attention_forward"]["launches"] > before["attention_forward"]["launches"]
    decoded = after["decode_attention"]["launches"] - before["decode_attention"]["launches"]
    assert (decoded > 0) == (family == "qwen3")
    assert [after[name]["fallbacks"] for name in FORWARDS] == [before[name]["fallbacks"] for name in FORWARDS]


FORWARDS = ("attention_forward", "decode_attention")


class Layer(torch.nn.Module):
    """A layer with only the attributes that an attention function reads."""

    num_key_value_groups, is_causal = 2, True

    def __init__(self, layer_idx=0, config=None):
        super().__init__()
        self.layer_idx, self.config = layer_idx, Qwen3Config() if config is None else config


def softmax(q, k, v, window=None, softcap=None, sinks=None):
    """The formula in float64 for the last queries of one sequence; all are [tokens, heads, head_dim]."""
    q, k, v = q.double(), *(x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * 0.25
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    ahead = torch.arange(len(k)) - torch.arange(len(q))[:, None] - len(k) + len(q)
    scores = scores.masked_fill((ahead > 0) | (ahead <= -(window or len(k) + 1)), -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(q), 1)), -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v)


def of_pages(lengths, page_size=4, width=3):
    """A cache of pages in any order with the keys of sequences but for the last one, as transformers hands it over."""
    keys, values = (torch.randn(10, page_size, 2, 16) for _ in "kv")
    count = len(lengths)
    table = torch.full((count, width), -1, dtype=torch.int32)
    order = 1 + torch.randperm(9)
    for row, length in enumerate(lengths):
        pages = -(-length // page_size)
        table[row, :pages], order = order[:pages].int(), order[pages:]
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    given = {"cu_seq_lens_q": torch.arange(count + 1).int(), "cu_seq_lens_k": starts, "max_length_q": 1}
    given |= {
        "max_length_k": 1,
        "block_table": table,
        "k_cache": keys,
        "v_cache": values,
        "write_index": [],
        "read_index": [],
    }
    return given, [torch.randn(1, heads, count, 16) for heads in (4, 2, 2)]


def of_sequence(given, row, length):
    """The keys and values of a sequence, [keys, heads, head_dim]."""
    pages = given["block_table"][row].clamp(min=0).long()
    return [given[name][pages].flatten(0, 1)[:length] for name in ("k_cache", "v_cache")]


@pytest.mark.parametrize("way", ["pages", "gathered", "in parts", "invariant"])
@pytest.mark.parametrize(
    "more", [{}, {"softcap": 2.0, "s_aux": torch.linspace(-1, 1, 4), "sliding_window": 5}], ids=["plain", "special"]
)
def test_one_token_of_each_sequence_writes_its_key_and_attends_through_the_table(way, more, monkeypatch):
    """With sequences that fill up the batch: they write to no sequence's page, and see nothing."""
    lengths = [5, 12, 1, 8, 0, 0]
    given, (q, k, v) = of_pages(lengths)
    if way != "pages":
        monkeypatch.setattr(sys.modules["tilekern.ops.decode_attention"], "tuned_plan_for", lambda *_: None)
    if way == "in parts":
        monkeypatch.setattr(paged, "MOST_KEYS", 30)
    before = dict(launches())
    with torch.no_grad(), tilekern.invariant() if way == "invariant" else torch.no_grad():
        found, weights = implementation.attend(True, Layer(), q, k, v, None, scaling=0.25, **given, **more)
    assert weights is None
    ran = {name: launches()[name] - before.get(name, 0) for name in FORWARDS}
    assert ran == {
        "attention_forward": {"pages": 0, "in parts": 3}.get(way, 1),
        "decode_attention": int(way == "pages"),
    }
    window, softcap, sinks = (more.get(name) for name in ("sliding_window", "softcap", "s_aux"))
    for row, length in enumerate(lengths):
        if not length:
            assert not found[0, row].any()
            continue
        keys, values = of_sequence(given, row, length)
        assert torch.equal(keys[-1], k[0, :, row])
        assert torch.equal(values[-1], v[0, :, row])
        assert worst([found[0, row]], [softmax(q[0, :, row][None], keys, values, window, softcap, sinks)[0]]) < 1e-5
        if way == "invariant":
            options = {"scale": 0.25, "window": window, "softcap": softcap, "sinks": sinks}
            alone = ops.attention(q[:, :, row, None].transpose(1, 2), keys[None], values[None], **options)
            assert torch.equal(found[0, row], alone[0, 0])


def test_layers_share_the_numbers_of_their_step_and_of_no_other():
    """The first layer computes them, also where the next step has the same tensors with other values."""
    given, (q, k, v) = of_pages([5, 8])
    for lengths in ([5, 8], [4, 7]):
        given["cu_seq_lens_k"].copy_(torch.tensor([0, *lengths]).cumsum(0))
        for number in range(2):
            with torch.no_grad():
                found, _ = implementation.attend(True, Layer(number), q, k, v, None, scaling=0.25, **given)
            for row, length in enumerate(lengths):
                wanted = softmax(q[0, :, row][None], *of_sequence(given, row, length))
                assert worst([found[:, row]], [wanted]) < 1e-5
        assert given["cu_seq_lens_k"].tilekern_pages.layer == 1


@pytest.mark.parametrize("bound", [4, 6, None])
def test_chunks_attend_to_gathered_keys_within_their_window(bound):
    """transformers bounds the longest sequence by the size of the cache, which may be that of the window alone."""
    queries, keys, room = (3, 1, 4), (6, 4, 4), 5
    q, k, v = (torch.randn(1, heads, room + sum(n), 16) for heads, n in ((4, queries), (2, keys), (2, keys)))
    starts = {"cu_seq_lens_q": queries, "cu_seq_lens_k": keys}
    given = {name: torch.tensor([0, *n, 0]).cumsum(0).int() for name, n in starts.items()}
    given |= {"max_length_q": 4, "max_length_k": bound, "write_index": [], "block_table": None}
    with torch.no_grad():
        found, _ = implementation.attend(True, Layer(), q, k, v, None, scaling=0.25, sliding_window=4, **given)
    ends = [given[name].tolist() for name in starts]
    for a, b, c, d in zip(ends[0], ends[0][1:-1], ends[1], ends[1][1:], strict=False):
        wanted = softmax(q[0, :, a:b].transpose(0, 1), *(x[0, :, c:d].transpose(0, 1) for x in (k, v)), window=4)
        assert worst([found[0, a:b]], [wanted]) < 1e-5
    assert not found[0, sum(queries) :].any()


@pytest.mark.parametrize(
    ("layer", "more"),
    [
        (Layer(), {"dropout": 0.1}), (Layer(), {"attention_mask": torch.zeros(1, 1, 2, 2)}),
        (Layer(), {"position_bias": torch.zeros(1, 4, 2, 2)}),
        (Layer(), {"cu_seq_lens_k": {"full_attention": torch.tensor([0, 5, 13])}}),
        (Layer(config=Qwen2MoeConfig(use_sliding_window=True, sliding_window=4)), {}),
    ],
)  # fmt: skip
def test_what_it_cannot_compute_is_refused(layer, more):
    from transformers.models.qwen2_moe import modeling_qwen2_moe  # noqa: F401 (its code says that masks hold windows)

    given, (q, k, v) = of_pages([5, 8])
    with pytest.raises(InputError, match="continuous batching"):
        implementation.attend(True, layer, q, k, v, **{"attention_mask": None} | given | more)


def asked():
    return [getattr(HOMES[module], name) for module, name in batching._ASKED]


def test_reset_puts_the_questions_back_and_others_are_answered_as_before():
    exchanged = asked()
    tilekern.apply(**only())
    assert asked() == exchanged, "once"
    is_flash = HOMES["continuous_api"].is_flash_attention_requested
    names = ("tilekern", "tilekern_nondeterministic", "sdpa", "eager", None, "flash_attention_2")
    assert [is_flash(requested_attention_implementation=name) for name in names] == [
        True,
        True,
        False,
        False,
        False,
        True,
    ]
    assert not is_flash(Qwen3Config(attn_implementation="tilekern"), version=[2, 3])
    with pytest.raises(ValueError, match="ambiguous"):
        is_flash(Qwen3Config(), "sdpa")
    tilekern.reset()
    originals = asked()
    assert not any(hasattr(function, "tilekern_original") for function in originals)
    assert [function.tilekern_original for function in exchanged] == originals
    with pytest.raises(ValueError, match="tilekern is not supported for continuous batching"):
        make("qwen3").generate_batch(PROMPTS)


def test_pages_are_read_in_place_where_every_layer_has_them():
    has_table = HOMES["initialization"].ensure_decode_fast_path_is_available
    for config, expected in ((Qwen3Config(), 8), (Gemma2Config(), 0)):
        for name, most in (("tilekern", expected), ("sdpa", 0)):
            config._attn_implementation = name
            pages = ContinuousBatchingConfig(max_blocks_per_request=8)
            has_table(config, pages, False)
            assert pages.max_blocks_per_request == most


def test_a_release_that_asks_otherwise_stays_as_it_is(monkeypatch):
    tilekern.reset()
    monkeypatch.delattr(HOMES["initialization"], "ensure_decode_fast_path_is_available")
    tilekern.apply(**only())
    assert not hasattr(HOMES["continuous_api"].is_flash_attention_requested, "tilekern_original")
