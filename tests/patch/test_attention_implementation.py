"""``attn_implementation="tilekern"`` in a Qwen3, against SDPA's and the eager one: masks, windows, caches, packing."""

import functools
import itertools
import warnings

import pytest
import torch
from model_contract import as_exact, in_one_graph, only
from tiny_qwen3 import IDS, apply, launches, make, same, step, worst
from transformers import DynamicCache, StaticCache

import tilekern
from tilekern.patch import attention as implementation
from tilekern.patch.told import ToldMask
from tilekern.runtime.switches import ATTENTIONS as NAMES

pytestmark = pytest.mark.usefixtures("interpreted")
NONE = only()
WINDOW = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
GENERATE = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
PACKED = torch.tensor([0, 3, 4, 7], dtype=torch.int32)


@pytest.fixture(autouse=True)
def known():
    tilekern.apply(**NONE)


def pair(other="eager", name="tilekern", **changes):
    """Two models that differ in their attention alone."""
    return make(attention=name, **changes).train(), make(attention=other, **changes).train()


def forwards():
    return launches().get("attention_forward", 0)


def check(run, ours, theirs, number):
    """``run`` of both models agrees, and the first launched the forward kernel ``number`` times."""
    reference, before = run(theirs), forwards()
    assert worst(run(ours), reference) < 1e-5
    assert forwards() - before == number


def logits(model, **given):
    return [model(**given).logits]


@pytest.mark.parametrize("other", ["sdpa", "eager"])
@pytest.mark.parametrize("kv_heads", [1, 5])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.share(2)
def test_loss_and_gradients_agree(name, kv_heads, other):
    check(step, *pair(other, name, kv_heads=kv_heads), 2)


def test_together_with_every_patch():
    ours, theirs = pair()
    reference, before = step(theirs), forwards()
    apply()
    assert worst(step(ours), reference) < 1e-5
    assert forwards() == before + 2


def test_backward_runs_the_kernels_and_repeats_bit_by_bit():
    ours, _ = pair()
    before = launches().get("attention_backward", 0)
    first = step(ours)
    assert launches()["attention_backward"] == before + 2
    assert same(step(ours), first)


@pytest.mark.parametrize("other", ["sdpa", "eager"])
@pytest.mark.parametrize(("padded", "number"), [(slice(0, 3), 0), (slice(5, 7), 2)], ids=["left", "right"])
@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.share(2)
def test_padding_on_the_left_goes_to_sdpa_and_causality_hides_what_stands_behind(other, padded, number, windowed):
    given = torch.ones_like(IDS)
    given[0, padded] = 0
    # Nor does the last token of padding predict anything: what a query that sees no key makes is nobody's promise.
    labels = IDS.masked_fill((given & given.roll(1, 1).index_fill(1, torch.tensor([0]), 1)) == 0, -100)

    def run(model):
        model.zero_grad()
        out = model(input_ids=IDS, attention_mask=given, labels=labels)
        out.loss.backward()
        return [out.loss, out.logits[given.bool()], *(p.grad.clone() for p in model.parameters())]

    check(run, *pair(other, **(WINDOW if windowed else {})), number)


def test_a_mask_of_ones_counts_as_no_mask():
    check(functools.partial(logits, input_ids=IDS, attention_mask=torch.ones_like(IDS)), *pair(), 2)


def test_a_mask_of_four_dimensions_is_taken_as_it_is():
    shown = torch.ones(2, 1, 7, 7, dtype=torch.bool).tril()
    shown[:, :, :, 2] = False
    shown[:, :, 2, 2] = True
    for mask in (additive(shown), shown):
        ours, _ = pair()
        before = forwards()
        with torch.no_grad():
            found = ours(input_ids=IDS, attention_mask=mask).logits
            wanted = pair("sdpa")[1](input_ids=IDS, attention_mask=mask).logits
        assert worst([found], [wanted]) < 1e-5
        assert forwards() == before


@pytest.mark.parametrize("window", [2, 3, 6, 7, 50])
def test_layers_with_a_sliding_window(window):
    ours, theirs = pair(**WINDOW | {"sliding_window": window})
    assert [layer.self_attn.sliding_window for layer in ours.model.layers] == [None, window]
    check(step, ours, theirs, 2)


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("cache", ["default", "dynamic", "static", None])
@pytest.mark.share(2)
def test_generation_gives_the_same_tokens(cache, windowed):
    ours, theirs = pair(**(WINDOW if windowed else {}))

    def run(model):
        made = {
            "dynamic": DynamicCache,  # of full length in every layer, whatever the window
            "static": lambda: StaticCache(config=model.config, max_cache_len=20),
        }.get(cache)
        more = {} if made is None else {"past_key_values": made()}
        if cache is None:
            more["use_cache"] = False
        with torch.no_grad():
            return model.eval().generate(
                IDS, **GENERATE, **more, disable_compile=True, output_logits=True, return_dict_in_generate=True
            )

    wanted, before = run(theirs), forwards()
    found = run(ours)
    assert torch.equal(found.sequences, wanted.sequences)
    assert worst(found.logits, wanted.logits) < 1e-5
    assert forwards() > before


@pytest.mark.parametrize("kv_heads", [1, 5])
@pytest.mark.parametrize("windowed", [False, True])
def test_tokens_after_the_prompt_run_the_kernels_for_decoding(windowed, kv_heads):
    ours, theirs = pair("sdpa", kv_heads=kv_heads, **(WINDOW if windowed else {}))

    def run(model):
        how = GENERATE | {"output_logits": True, "return_dict_in_generate": True}
        return model.eval().generate(IDS, attention_mask=torch.ones_like(IDS), **how)

    wanted, before = run(theirs), dict(launches())
    found = run(ours)
    after = launches()
    assert torch.equal(found.sequences, wanted.sequences)
    assert worst(found.logits, wanted.logits) < 1e-5
    assert after["attention_forward"] == before.get("attention_forward", 0) + 2
    assert after["decode_attention"] == before.get("decode_attention", 0) + 2 * 5


@pytest.mark.parametrize("windowed", [False, True])
def test_generation_with_padding_on_the_left(windowed):
    ours, theirs = pair(**(WINDOW if windowed else {}))
    given = torch.ones_like(IDS)
    given[1, :4] = 0
    found, wanted = (model.eval().generate(IDS, attention_mask=given, **GENERATE) for model in (ours, theirs))
    assert torch.equal(found, wanted)


CACHES = {
    "full cache": lambda _: DynamicCache(),
    "model's cache": lambda config: DynamicCache(config=config),
    "longer than the prompt": lambda config: StaticCache(config=config, max_cache_len=16),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize(
    ("parts", "cache"),
    [*itertools.product([(4, 3), (6, 1), (1, 6), (1, 1, 5)], list(CACHES)[:2]), ((7,), "longer than the prompt")],
    ids=str,
)
@pytest.mark.share(9)
def test_a_prompt_at_once_or_in_parts_with_and_without_gradients(parts, cache, windowed, grad):
    def run(model):
        held = CACHES[cache](model.config)
        with torch.set_grad_enabled(grad):
            pieces = IDS.split(list(parts), 1)
            return [model(input_ids=ids, past_key_values=held, use_cache=True).logits for ids in pieces]

    ours, theirs = pair(**(WINDOW if windowed else {}))
    assert worst(run(ours), run(theirs)) < 1e-5


def separate(model, ids=IDS[:1], starts=PACKED):
    """The logits of each sequence by itself, joined."""
    bounds = starts.tolist()
    parts = [model(input_ids=ids[:, a:b], use_cache=False).logits for a, b in itertools.pairwise(bounds)]
    return torch.cat(parts, 1)


def positions(starts=PACKED):
    return torch.cat([torch.arange(n) for n in starts.diff().tolist()])[None]


STARTS = {"cu_seq_lens_q": PACKED, "cu_seq_lens_k": PACKED, "max_length_k": 3}


def packed(model, told=STARTS | {"max_length_q": 3}, **more):
    return model(input_ids=IDS[:1], position_ids=positions(), **told, **more).logits


def stepped(model, call, slope):
    """The output of a call, and the gradients of all parameters for a gradient of the output."""
    model.zero_grad()
    out = call(model)
    out.backward(slope)
    return [out.detach(), *(p.grad.clone() for p in model.parameters())]


# How the sequences of a row are told: by the longest of them, or by positions alone.
TOLD = [
    *(STARTS | {"use_cache": cache, "max_length_q": longest}
      for cache in (False, True) for longest in (3, None, PACKED.diff().max())),
    {"use_cache": False}, {}, {"attention_mask": torch.ones_like(IDS[:1])},
]  # fmt: skip


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("told", TOLD)
@pytest.mark.share(4)
def test_packed_sequences_are_the_same_as_separate_ones(windowed, told):
    ours, theirs = pair(**(WINDOW | {"sliding_window": 2} if windowed else {}))
    slope = torch.randn(1, 7, 331)
    before = forwards()
    found = stepped(ours, functools.partial(packed, told=told), slope)
    assert forwards() == before + 2
    assert worst(found, stepped(theirs, separate, slope)) < 1e-5


def additive(shown):
    return torch.zeros(shown.shape).masked_fill(~shown, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("kind", ["padding", "boolean", "additive"])
def test_packed_sequences_with_a_mask_of_the_user_s_heed_both(kind, windowed):
    """The third token is hidden: it is padding, or no query but itself sees it."""
    ours, theirs = pair("sdpa", **(WINDOW | {"sliding_window": 2} if windowed else {}))
    visible = torch.ones(1, 7, dtype=torch.bool)
    visible[0, 2] = False
    number = torch.searchsorted(PACKED.long(), torch.arange(7), right=True)
    same_sequence = (number[:, None] == number)[None, None]
    shown = torch.ones(1, 1, 7, 7, dtype=torch.bool).tril() & (visible[:, None, None] | torch.eye(7, dtype=torch.bool))
    given = {"padding": visible.long(), "boolean": shown, "additive": additive(shown)}[kind]
    before = forwards()
    found = packed(ours, attention_mask=given, use_cache=False)
    assert forwards() == before
    # A mask of four dimensions is the mask of every layer; a window comes with others alone.
    place = torch.arange(7)
    near = place[:, None] - place < 2
    full = shown & same_sequence
    masks = {"full_attention": full, "sliding_attention": full & near if kind == "padding" else full}
    wanted = theirs(input_ids=IDS[:1], position_ids=positions(), attention_mask=masks, use_cache=False).logits
    assert worst([found[visible]], [wanted[visible]]) < 1e-5


def test_a_mask_that_says_more_than_where_sequences_begin_is_kept():
    from transformers import Qwen3Config
    from transformers import masking_utils as makers

    config = Qwen3Config(**WINDOW, attn_implementation="tilekern")
    given = {"config": config, "inputs_embeds": torch.zeros(1, 7, 8), "position_ids": positions()}
    given |= {"attention_mask": None, "past_key_values": None}
    for make_mask in (makers.create_causal_mask, makers.create_sliding_window_causal_mask):
        assert isinstance(make_mask(**given), ToldMask)
        shown = {"attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 1]])}
        block = {"block_sequence_ids": torch.tensor([[-1, 0, 0, 0, -1, -1, -1]])}
        custom = {"and_mask_function": lambda _batch, _head, query, key: query - key != 1}
        for more in (shown, block, custom):
            assert not isinstance(make_mask(**given | more), ToldMask)
    config.attention_chunk_size = 2
    assert not isinstance(makers.create_chunked_causal_mask(**given), ToldMask)


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("packing", [False, True])
def test_dropout_goes_to_sdpa_with_the_mask_that_the_kernels_need_not(packing, windowed, monkeypatch):
    changes = WINDOW | {"sliding_window": 2} if windowed else {}
    ours, theirs = pair(attention_dropout=0.5, **changes)
    real, dropped = torch.nn.functional.scaled_dot_product_attention, []

    def kept(*given, dropout_p=0.0, **more):
        """Notes the dropout and leaves it out, so that results can be compared."""
        dropped.append(dropout_p)
        return real(*given, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", kept)
    before = forwards()
    found = packed(ours) if packing else ours(input_ids=IDS[:1]).logits
    assert dropped == [0.5, 0.5]
    assert forwards() == before
    wanted = separate(theirs.eval()) if packing else theirs.eval()(input_ids=IDS[:1]).logits
    assert worst([found], [wanted]) < 1e-5


def test_evaluation_of_a_model_with_dropout_runs_the_kernels():
    ours, theirs = pair(attention_dropout=0.5)
    check(functools.partial(logits, input_ids=IDS), ours.eval(), theirs.eval(), 2)


def test_set_attn_implementation_on_a_model_that_exists():
    model = make(attention="sdpa").train()
    reference, before = step(model), forwards()
    model.set_attn_implementation("tilekern")
    assert worst(step(model), reference) < 1e-5
    assert forwards() == before + 2
    model.set_attn_implementation("sdpa")
    assert same(step(model), reference)
    assert forwards() == before + 2


def test_apply_to_model_makes_the_names_known_too():
    from transformers import AttentionInterface, AttentionMaskInterface

    for interface in (AttentionInterface, AttentionMaskInterface):
        for name in NAMES:
            del interface._global_mapping[name]
    model = make(attention="sdpa").train()
    tilekern.apply_to_model(model, **only("rms_norm"))
    reference, before = step(model), forwards()
    model.set_attn_implementation("tilekern_nondeterministic")
    assert worst(step(model), reference) < 1e-5
    assert forwards() == before + 2


def test_the_names_promise_what_they_say(monkeypatch):
    promised = []
    monkeypatch.setattr(
        implementation, "attention", lambda q, *_, deterministic, **__: promised.append(deterministic) or q
    )
    for name in NAMES:
        make(attention=name, layers=1)(input_ids=IDS)
    assert promised == [True, False]


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "autocast"])
def test_two_bytes_are_as_exact_as_sdpa(windowed, autocast):
    ours, theirs = pair("sdpa", **(WINDOW if windowed else {}))
    exact = step(theirs)
    if not autocast:
        ours, theirs = ours.bfloat16(), theirs.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plain, before = step(theirs), forwards()
        found = step(ours)
    assert forwards() == before + 2
    as_exact(found, plain, exact)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_gradient_checkpointing(reentrant):
    ours, theirs = pair()
    ours.gradient_checkpointing_enable({"use_reentrant": reentrant})
    check(step, ours, theirs, 4)
    before = forwards()
    packed(ours, use_cache=False).sum().backward()
    assert forwards() == before + 4


@pytest.mark.slow
@pytest.mark.share(2)
@pytest.mark.parametrize("packing", [True, False])
def test_compiled_in_one_graph(packing):
    ours, theirs = pair(layers=1)
    compiled, wanted = in_one_graph(ours), [separate(theirs)] if packing else step(theirs)
    before = forwards()
    assert worst([packed(compiled, use_cache=False)] if packing else step(compiled), wanted) < 1e-5
    assert forwards() == before + 1


def test_on_a_cpu_without_the_interpreter_torch_s_operations_run(monkeypatch):
    monkeypatch.delenv("TILEKERN_INTERPRET", raising=False)
    ours, theirs = pair()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(step, ours, theirs, 0)


def test_what_a_rotation_made_goes_on_without_transposes_back_and_forth():
    """Of each layer only the value is transposed by the model's code, and back."""
    tilekern.apply(swiglu=False)  # or a layer is one node
    model = make(attention="tilekern", layers=1).train()
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    nodes, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            waiting += [other for other, _ in node.next_functions]
    assert sum(type(node).__name__ == "TransposeBackward0" for node in nodes) == 2
