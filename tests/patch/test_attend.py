"""The attention function behind ``attn_implementation="tilekern"``, as transformers and its models call it."""

import functools
from importlib import metadata
from pathlib import Path

import pytest
import torch
from tiny_qwen3 import launches, worst

import tilekern
from tilekern.errors import InputError
from tilekern.patch import attention as implementation
from tilekern.patch import registry
from tilekern.patch.told import ToldMask
from tilekern.runtime import dispatch

RELEASE = tuple(map(int, metadata.version("transformers").split(".")[:2]))
TROUBLESHOOTING = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
pytestmark = pytest.mark.usefixtures("interpreted")
WINDOW = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
PACKED = torch.tensor([0, 3, 4, 7], dtype=torch.int32)


@pytest.fixture(autouse=True)
def known():
    tilekern.apply(**dict.fromkeys(registry.known_ops(), False))


def forwards():
    return launches().get("attention_forward", 0)


class Layer(torch.nn.Module):
    """A layer with only the attributes that an attention function reads."""

    num_key_value_groups, is_causal = 2, True


def heads(queries=7, keys=7, batch=1):
    shapes = [(batch, 4, queries, 16), (batch, 2, keys, 16), (batch, 2, keys, 16)]
    return [torch.randn(shape, generator=torch.Generator().manual_seed(n)) for n, shape in enumerate(shapes)]


def softmax(q, k, v, seen, softcap=None, sinks=None):
    """The formula, [batch, queries, heads, head_dim]."""
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * 0.25
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)), -1)
    return (scores.softmax(-1)[..., : k.shape[2]] @ v).transpose(1, 2)


@pytest.mark.parametrize("queries", [7, 1])
def test_soft_caps_and_sinks_run_the_kernels_while_decoding_too(queries):
    q, k, v = heads(queries)
    seen, sinks = torch.ones(queries, 7, dtype=torch.bool).tril(7 - queries), torch.linspace(-1, 1, 4)
    with torch.no_grad():
        found, weights = implementation.attend(True, Layer(), q, k, v, None, softcap=2.0, s_aux=sinks)
    assert weights is None
    assert worst([found], [softmax(q, k, v, seen, 2.0, sinks)]) < 1e-5


@pytest.mark.parametrize(
    ("more", "runs"),
    [
        ({}, 1), ({"sliding_window": 3}, 1), ({"is_causal": False}, 1), ({"s_aux": torch.zeros(4).bfloat16()}, 1),
        ({"attention_mask": torch.ones(1, 1, 1, 7, dtype=torch.bool)}, 0), ({"dropout": 0.1}, 0),
        ({"position_bias": torch.zeros(1, 4, 1, 7)}, 0),
    ],
    ids=str,
)  # fmt: skip
def test_one_new_token_runs_the_kernel_for_decoding(more, runs):
    q, k, v = heads(1)
    before, given = launches().get("decode_attention", 0), {"attention_mask": None} | more
    with torch.no_grad():
        found, _ = implementation.attend(True, Layer(), q, k, v, **given)
    assert launches().get("decode_attention", 0) == before + runs
    seen = torch.ones(1, 7, dtype=torch.bool).triu(4 if "sliding_window" in more else 0)
    if "dropout" not in more:
        assert worst([found], [softmax(q, k, v, seen, sinks=more.get("s_aux"))]) < 1e-5
    implementation.attend(True, Layer(), q, k, v, **given)
    assert launches().get("decode_attention", 0) == before + runs, "with gradients"


def test_decoding_with_values_of_another_width_or_dtype_goes_to_sdpa():
    q, k, v = heads(1)
    before = launches().get("decode_attention", 0)
    with torch.no_grad():
        found, _ = implementation.attend(True, Layer(), q, k, v[..., :8], None)
        wanted, _ = implementation.attend(True, Layer(), q, k, v, None)
        assert worst([found], [wanted[..., :8]]) < 1e-5
        assert launches()["decode_attention"] == before + 1
        with torch.autocast("cpu", torch.bfloat16):
            cast, _ = implementation.attend(True, Layer(), q, k, v.bfloat16(), None)
    assert cast.dtype == torch.bfloat16
    assert launches()["decode_attention"] == before + 2
    assert worst([cast.float()], [wanted]) < 2e-2


@pytest.mark.parametrize(("softcap", "sinks"), [(2.0, None), (None, True), (2.0, True)])
@pytest.mark.parametrize("queries", [7, 1])
def test_soft_caps_and_sinks_with_a_mask_of_padding(queries, softcap, sinks):
    leaves = [x.requires_grad_() for x in heads(queries, batch=2)]
    sinks = torch.linspace(-1, 1, 4, requires_grad=True) if sinks else None
    seen = torch.ones(queries, 7, dtype=torch.bool).tril(7 - queries).repeat(2, 1, 1, 1)
    seen[1, :, :, 0] = seen[1, :, :, 1:3] = False
    room = torch.nn.functional.pad(seen, (0, 2))
    out, weights = implementation.attend(True, Layer(), *leaves, room, softcap=softcap, s_aux=sinks)
    assert weights is None
    blind = ~seen.any(-1)[:, 0]
    wanted = softmax(*leaves, seen | blind[:, None, :, None], softcap, sinks)
    leaves += [] if sinks is None else [sinks]
    wanted = wanted.masked_fill(blind[:, :, None, None], 0)
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    assert worst([out], [wanted]) < 1e-5
    assert worst(torch.autograd.grad(out, leaves, slope), torch.autograd.grad(wanted, leaves, slope)) < 1e-5


@pytest.mark.parametrize("room", [0, 2])
@pytest.mark.parametrize("more", [{}, {"sliding_window": 3}, {"is_causal": False}], ids=str)
def test_a_position_bias_is_added_to_the_scores(more, room):
    """Also where a static cache has room behind the last query."""
    q, k, v = heads(7, 7 + room)
    bias = torch.randn(1, 4, 7, 7 + room, generator=torch.Generator().manual_seed(3)).requires_grad_()
    causal = more.get("is_causal") is not False
    told = ToldMask(PACKED[:0], 7, more.get("sliding_window"), 7, 9, 1) if room and causal else None
    found, _ = implementation.attend(True, Layer(), q, k, v, told, position_bias=bias, **more)
    seen = torch.ones(7, 7 + room, dtype=torch.bool)
    seen = seen if more.get("is_causal") is False else seen.tril()
    seen = seen.triu(-2) if "sliding_window" in more else seen
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    wanted = ((q @ k.transpose(2, 3) * 0.25 + bias).masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(1, 2)
    slopes = [torch.autograd.grad(out.square().sum(), bias)[0] for out in (found, wanted)]
    assert worst([found, slopes[0]], [wanted, slopes[1]]) < 1e-5


DROPPED, ADDED = {"dropout": 0.1}, {"attention_mask": torch.zeros(1, 1, 7, 7)}
BIASED = {"position_bias": torch.zeros(1, 4, 7, 7)}
REFUSED = [
    *(
        (given | special, message)
        for special in ({"softcap": 2.0}, {"s_aux": torch.zeros(4)})
        for given, message in (
            (DROPPED, "without dropout and with a boolean mask or none"),
            (ADDED, "without dropout and with a boolean mask or none"),
            (BIASED, "adds no position_bias to them"),
        )
    ),
    *(
        ({name: torch.zeros(1)}, f'does not compute what {name} asks for; use "eager"')
        for name in ("indices", "block_indices", "sinks", "cache")
    ),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_what_neither_the_kernels_nor_sdpa_compute_is_refused_and_not_counted(given, message, monkeypatch):
    monkeypatch.setattr(dispatch._state, "counters", {})
    with pytest.raises(InputError, match=message):
        implementation.attend(True, Layer(), *heads(), **{"attention_mask": None} | given)
    assert not any(tilekern.stats().get("attention_forward", {}).values())
    implementation.attend(True, Layer(), *heads(), None, **dict.fromkeys(given.keys() - {"dropout", "attention_mask"}))


@pytest.mark.parametrize("padded", [False, True])
def test_a_t5_and_the_gradients_of_its_position_biases(padded):
    from transformers import T5Config, T5ForConditionalGeneration

    ids = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(0))
    given = torch.ones_like(ids)
    given[0, 6:] = 1 - padded

    def run(attention):
        torch.manual_seed(0)
        sizes = {"vocab_size": 97, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2}
        config = T5Config(**sizes, dropout_rate=0, decoder_start_token_id=0, attn_implementation=attention)
        model = T5ForConditionalGeneration(config)
        biases = [p for name, p in model.named_parameters() if "relative" in name]
        for bias in biases:
            torch.nn.init.normal_(bias, 0, 2)
        loss = model(input_ids=ids, attention_mask=given, labels=ids).loss
        return [loss, *torch.autograd.grad(loss, biases)]

    assert worst(run("tilekern"), run("eager")) < 1e-5


def tiny(kind, attention):
    """A model of another family than Qwen3, always with the same weights, in training."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"intermediate_size": 48, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 3}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**sizes, **ids, **({} if kind in {"bloom", "trocr"} else more))
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).float().train()


def test_a_batch_with_padding_of_a_model_with_soft_caps():
    """Gemma 2 caps its scores, and every second layer has a window."""
    ids = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(0))
    given = torch.ones_like(ids)
    given[0, :4] = 0
    found, wanted = (tiny("gemma2", name)(ids, attention_mask=given).logits for name in ("tilekern", "eager"))
    assert worst([found[given.bool()]], [wanted[given.bool()]]) < 1e-5


@pytest.mark.parametrize(("kind", "name"), [("bloom", "BloomModel"), ("trocr", "TrOCRDecoder")])
def test_a_model_that_asks_for_no_attention_function_is_refused(kind, name):
    """Bloom and TrOCR read the mask themselves, and where that is None let each token see those after it."""
    with pytest.raises(InputError, match=f'{name} computes its attention by itself; use "eager"'):
        tiny(kind, "tilekern")(torch.arange(3, 12)[None])


def test_a_part_of_a_model_that_asks_for_no_attention_function_is_refused():
    """No auto class knows the text part of BLIP, a decoder."""
    from transformers.models.blip.configuration_blip import BlipTextConfig
    from transformers.models.blip.modeling_blip_text import BlipTextLMHeadModel

    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BlipTextLMHeadModel._from_config(BlipTextConfig(**sizes), attn_implementation="tilekern")
    with pytest.raises(InputError, match="BlipTextModel computes its attention by itself"):
        model(torch.arange(3, 12)[None])


SMALL = {"vocab_size": 97, "max_position_embeddings": 64}
DEEP = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
SEQ2SEQ = SMALL | DEEP | {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
ENCODER = SMALL | {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("nllb-moe", SEQ2SEQ | {"num_experts": 4, "expert_capacity": 64}),
        ("bigbird_pegasus", SEQ2SEQ),
        ("splinter", ENCODER | {"question_token_id": 96}),
    ],
)
def test_a_model_for_which_transformers_has_eager_attention_alone(kind, sizes, padded):
    """Its decoder may say that it is not causal, its encoder may say nothing, and a layer may add the mask itself."""
    from transformers import CONFIG_MAPPING, AutoModel

    ids = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(0))
    given = torch.ones_like(ids)
    given[0, 6:] = 1 - padded

    def run(attention):
        torch.manual_seed(0)
        model = AutoModel.from_config(CONFIG_MAPPING[kind](**sizes), attn_implementation=attention).eval()
        for weight in model.parameters():
            torch.nn.init.normal_(weight, 0, 0.2)
        more = {} if kind == "splinter" else {"decoder_input_ids": ids}
        last = model(input_ids=ids, attention_mask=given, **more).last_hidden_state
        return last if more else last[given.bool()]

    assert worst([run("tilekern")], [run("eager")]) < 1e-5


@pytest.mark.parametrize(
    ("family", "kind", "more"),
    [
        pytest.param(
            "GPT-J",
            "gptj",
            {"rotary_dim": 8},
            marks=pytest.mark.skipif(RELEASE >= (5, 24), reason="GPT-J asks for its attention since transformers 5.24"),
        ),
        ("GPT-Neo", "gpt_neo", {"attention_types": [[["global", "local"], 1]]}),
        ("Falcon", "falcon", {}),
    ],
)
def test_a_model_with_classes_for_each_attention_is_in_the_documentation(family, kind, more):
    """What the table of messages says of it holds: transformers' own error with the name, and a model without it."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    (row,) = (line for line in TROUBLESHOOTING.read_text().splitlines() if "`KeyError: 'tilekern'`" in line)
    assert family in row
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CONFIG_MAPPING[kind](**sizes, **more)
    AutoModelForCausalLM.from_config(config)
    with pytest.raises(KeyError, match=r"^'tilekern'$"):
        AutoModelForCausalLM.from_config(config, attn_implementation="tilekern")


@pytest.mark.parametrize(("keys", "batch"), [(9, 1), (7, 2)])
def test_packed_sequences_in_a_batch_or_with_a_cache_are_refused(keys, batch):
    with pytest.raises(InputError, match="batch of one without a cache"):
        implementation.attend(True, Layer(), *heads(7, keys, batch), None, cu_seq_lens_q=PACKED)


@pytest.mark.parametrize("keys", [7, 9])
def test_attention_that_is_not_causal(keys):
    q, k, v = heads(7, keys)
    layer = Layer()
    layer.is_causal = False
    everything = torch.ones(7, keys, dtype=torch.bool)
    for call in (
        functools.partial(implementation.attend, True, layer),
        functools.partial(implementation.attend, True, Layer(), is_causal=False),
    ):
        found, _ = call(query=q, key=k, value=v, attention_mask=None)
        assert worst([found], [softmax(q, k, v, everything)]) < 1e-5


@pytest.mark.parametrize(("kind", "kernels"), [("phimoe", 0), ("mistral", 2), ("phi3", 2)])
def test_a_window_is_in_the_mask_where_layers_keep_it_to_themselves(kind, kernels):
    ids = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(0))
    wanted, before = tiny(kind, "eager")(ids).logits, forwards()
    assert worst([tiny(kind, "tilekern")(ids).logits], [wanted]) < 1e-5
    assert forwards() == before + kernels


def test_local_masks_of_chunks_and_in_both_directions_are_made():
    from transformers import Qwen3Config
    from transformers.masking_utils import create_bidirectional_sliding_window_mask, create_chunked_causal_mask

    config = Qwen3Config(**WINDOW, attn_implementation="tilekern")
    given = {"config": config, "inputs_embeds": torch.zeros(1, 7, 8), "attention_mask": None}
    both = create_bidirectional_sliding_window_mask(**given)
    place = torch.arange(7)
    assert torch.equal(both[0, 0], (place[:, None] - place).abs() <= 3)
    config.attention_chunk_size = 3
    chunked = create_chunked_causal_mask(**given, past_key_values=None)
    same_chunk = place[:, None] // 3 == place // 3
    assert torch.equal(chunked[0, 0], same_chunk & (place[:, None] >= place))


@pytest.mark.parametrize("more", [{}, {"softcap": 2.0}, {"position_bias": torch.zeros(1, 4, 7, 7)}], ids=str)
def test_what_runs_without_the_kernels_is_counted_among_the_fallbacks(more, monkeypatch):
    monkeypatch.setattr(dispatch._state, "counters", {})
    seen = None if "position_bias" in more else torch.ones(1, 1, 7, 7, dtype=torch.bool).tril()
    implementation.attend(True, Layer(), *heads(), seen, **more)
    count = tilekern.stats()["attention_forward"]
    assert (count["fallbacks"], count["launches"]) == (1, 0)
    implementation.attend(True, Layer(), *heads(), None)
    assert tilekern.stats()["attention_forward"]["fallbacks"] == 1


def test_a_tensor_of_another_class_goes_to_sdpa():
    class Other(torch.Tensor):
        pass

    q, k, v = heads()
    before = forwards()
    found, _ = implementation.attend(True, Layer(), q.as_subclass(Other), k, v, None, sliding_window=3)
    seen = torch.ones(7, 7, dtype=torch.bool).tril().triu(-2)
    assert worst([found.as_subclass(torch.Tensor)], [softmax(q, k, v, seen)]) < 1e-5
    assert forwards() == before
