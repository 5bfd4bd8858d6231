"""A plan with ``invariant`` has all that training and generation ask for inside :func:`tilekern.invariant`."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, Qwen3Config

import tilekern
from tilekern.runtime import dispatch
from tilekern.spec.targets import resolve
from tilekern.tuning.plan.models import plan_of_model
from tilekern.tuning.plan.steps import Steps

# One worker makes the plan.
pytestmark = pytest.mark.xdist_group("plan of the invariant mode")
H200 = resolve("H200")
CONFIG = Qwen3Config(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16,
)  # fmt: skip
SEQUENCES, TOKENS, CHUNK, DECODED = 2, 16, 4, (1, 8, 64)
STEPS = Steps(
    tokens=(SEQUENCES * TOKENS,), sequence=(TOKENS,), padded=True, packed=True, decode=DECODED, context=(TOKENS,),
    chunk=(CHUNK,),
)  # fmt: skip


@pytest.fixture(scope="module")
def plan():
    return plan_of_model(CONFIG, Steps(**vars(STEPS) | {"invariant": True}), H200)


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setenv("TILEKERN_INTERPRET", "1")
    dispatch.forget()
    tilekern.apply()
    torch.manual_seed(0)
    yield AutoModelForCausalLM.from_config(CONFIG, attn_implementation="tilekern", dtype=torch.bfloat16)
    tilekern.reset()
    dispatch.forget()


def ids(sequences, tokens=TOKENS):
    return torch.randint(CONFIG.vocab_size, (sequences, tokens))


def mask(sequences, *, first=0, last=0):
    """All tokens, but for some of the first row's."""
    found = torch.ones(sequences, TOKENS, dtype=torch.long)
    found[0, :first] = 0
    found[0, TOKENS - last :] = 0
    return found


def train(model, **more):
    given = ids(SEQUENCES)
    model.train()(input_ids=given, labels=given, use_cache=False, **more).loss.backward()


def train_packed(model):
    given, starts = ids(SEQUENCES).view(1, -1), torch.arange(0, SEQUENCES * TOKENS + 1, TOKENS, dtype=torch.int32)
    lengths = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": TOKENS, "max_length_k": TOKENS}
    places = torch.arange(TOKENS).repeat(SEQUENCES)[None]
    model.train()(input_ids=given, labels=given, use_cache=False, position_ids=places, **lengths).loss.backward()


def filled(model, sequences, tokens, **more):
    """A cache after a prompt of some sequences, which is no part of what is compared."""
    with torch.no_grad():
        return model.eval()(input_ids=ids(sequences, tokens), use_cache=True, **more).past_key_values


def chunks(model):
    cache = DynamicCache(config=CONFIG)
    with torch.no_grad():
        for part in ids(1).split(CHUNK, dim=1):
            model.eval()(input_ids=part, past_key_values=cache, use_cache=True)


RUNS = {
    "training": train,
    "padding behind": lambda model: train(model, attention_mask=mask(SEQUENCES, last=3)),
    "padding in front": lambda model: train(model, attention_mask=mask(SEQUENCES, first=3)),
    "packed": train_packed,
    "logits of all tokens": lambda model: model.eval()(input_ids=ids(SEQUENCES), use_cache=False),
    "a prompt": lambda model: filled(model, 1, TOKENS - 1),
    "a prompt in chunks": chunks,
}


def asked(run):
    with tilekern.trace(gpu="H200", real=True) as found, tilekern.invariant():
        run()
    assert found.invariant
    return set(found.asked) & set(found.invariant)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.share(2)
def test_what_the_mode_asks_for_is_planned(model, plan, name):
    assert asked(lambda: RUNS[name](model)) <= plan.invariant


@pytest.mark.parametrize(("sequences", "padded"), [*((count, False) for count in DECODED), (8, True)])
@pytest.mark.share(2)
def test_what_a_decoded_token_asks_for_is_planned(model, plan, sequences, padded):
    with tilekern.invariant():
        more = {"attention_mask": mask(sequences, first=3)[:, :-1]} if padded else {}
        cache = filled(model, sequences, TOKENS - 1, **more)
    more = {"attention_mask": mask(sequences, first=3)} if padded else {}
    with torch.no_grad():
        found = asked(lambda: model(input_ids=ids(sequences, 1), past_key_values=cache, use_cache=True, **more))
    assert found <= plan.invariant
    attended = {(p["batch"], p["queries"], p["keys"]) for kernel, p in found if kernel == "attention_forward"}
    assert (1 if padded else sequences, 1, TOKENS) in attended


def test_both_modes_are_planned_and_each_problem_once(plan):
    usual = plan_of_model(CONFIG, STEPS, H200)
    assert len(plan.problems) == len(set(plan.problems))
    assert set(usual.problems) < set(plan.problems)
    assert not usual.invariant
    kernels = {kernel for kernel, _ in plan.invariant}
    assert {"decode_attention", "skinny_linear"} <= kernels
    few = [p for kernel, p in plan.problems if kernel == "skinny_linear"]
    gates = [p for p in few if p["gated"]]
    assert {p for p in gates if ("skinny_linear", p) in plan.invariant} == {p for p in gates if p["rounded"]}
    assert {p.but(rounded=True) for p in gates if not p["rounded"]} == {p for p in gates if p["rounded"]} != set()
    assert plan.launches == usual.launches | plan.launches, "a step is of one mode"


def test_a_cache_grows_through_all_numbers_of_keys():
    found = plan_of_model(CONFIG, Steps((64,), decode=(8,), context=(100,), invariant=True), H200).invariant
    sizes = {"attention_forward": ("batch", "queries", "keys", "packed"), "decode_attention": ("keys", "padded")}
    attended, decoded = (
        {tuple(p[n] for n in names) for k, p in found if k == kernel} for kernel, names in sizes.items()
    )
    assert decoded == {(128, False), (128, True)}
    tokens = {(batch, 1, keys, False) for batch in (1, 8) for keys in (16, 32, 64, 128)}
    static = {(1, 1, 128, True)}
    assert attended == tokens | static | {
        (1, 64, 64, False),
        (8, 64, 64, True),
        (1, 128, 128, False),
        (8, 128, 128, True),
    }
