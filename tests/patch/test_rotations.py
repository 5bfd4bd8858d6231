"""Rotations that have forms of their own: what stands in gives what the functions give, or leaves them to it."""

import inspect

import pytest
import torch
from tiny_families import IDS, OWN, make
from tiny_qwen3 import launched, launches, worst
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
from transformers.models.gemma4 import modeling_gemma4 as gemma4
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.llama4 import modeling_llama4 as llama4
from transformers.models.nanochat import modeling_nanochat as nanochat
from transformers.models.nemotron import modeling_nemotron as nemotron
from transformers.models.phi3 import modeling_phi3 as phi3
from transformers.models.pixtral import modeling_pixtral as pixtral
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl

import tilekern

pytestmark = pytest.mark.usefixtures("interpreted")
SIZE = 12
# The function, how many angles there are for a head, and how many heads the turned one has.
CASES = {
    "deepseek_v3": (deepseek_v3, "apply_rotary_pos_emb_interleave", SIZE, True),
    "phi3": (phi3, "apply_rotary_pos_emb", 8, True),
    "nanochat": (nanochat, "apply_rotary_pos_emb", SIZE, True),
    "nemotron": (nemotron, "apply_rotary_pos_emb", 8, True),
    "gpt_oss": (gpt_oss, "apply_rotary_pos_emb", SIZE // 2, False),
}


def angles(width, twice, dtype=torch.float32, batch=1):
    made = torch.rand(batch, 5, width // 2 if twice else width) * 6
    made = torch.cat((made, made), -1) if twice else made
    return made.cos().to(dtype), made.sin().to(dtype)


def turned(function, q, k, *more, **options):
    """What a function makes of q and k, and the gradients by both."""
    q, k = (x.detach().requires_grad_() for x in (q, k))
    made = function(q, k, *more, **options)
    slopes = [torch.ones_like(x).cumsum(-1) for x in made]
    return [*made, *torch.autograd.grad(made, [q, k], slopes)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_stands_in_gives_what_was_there(case, heads_first, dtype):
    module, name, width, twice = case
    original = getattr(module, name)
    cos, sin = angles(width, twice, dtype, batch=2)
    q, k = (torch.randn(2, 5, heads, SIZE).to(dtype) for heads in (3, 1))
    if heads_first:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    options = {"unsqueeze_dim": 1 if heads_first else 2}
    expected = turned(original, q, k, cos, sin, **options)
    assert "rope" in tilekern.apply(model_type=module.__name__.split(".")[-2])
    ours = getattr(module, name)
    assert ours is not original
    before = launches()
    found = turned(ours, q, k, cos, sin, **options)
    assert launched(before) == {"rope": 2}
    assert [x.dtype for x in found] == [x.dtype for x in expected]
    assert worst(found, expected) < (1e-5 if dtype == torch.float32 else 2e-2)
    assert list(inspect.signature(ours).parameters) == list(inspect.signature(original).parameters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_complex_angles(dtype):
    original = deepseek_v2.apply_rotary_emb
    freqs = torch.polar(torch.ones(2, 5, SIZE // 2), torch.rand(2, 5, SIZE // 2) * 6)
    q, k = (torch.randn(2, heads, 5, SIZE).to(dtype) for heads in (3, 1))
    expected = turned(original, q, k, freqs)
    tilekern.apply(model_type="deepseek_v2")
    before = launches()
    found = turned(deepseek_v2.apply_rotary_emb, q, k, freqs)
    assert launched(before) == {"llama4_rope": 2}
    assert worst(found, expected) < (1e-5 if dtype == torch.float32 else 1e-2)
    # Broadcasting over tokens is left to what was there.
    before = launches()
    short = turned(deepseek_v2.apply_rotary_emb, q, k, freqs[:, :1])
    assert not launched(before)
    assert worst(short, turned(original, q, k, freqs[:, :1])) == 0


@pytest.mark.parametrize(
    ("module", "options"), [(gemma4, {"unsqueeze_dim": 1}), (gemma4, {"unsqueeze_dim": 2}), (gptj, {})]
)
def test_rotations_of_one_tensor_turn_the_halves_of_its_heads(module, options):
    """GPT-J's, in pairs, by sines and then cosines that are stored once; of one head it is the function as it was."""
    original, pairs = module.apply_rotary_pos_emb, module is gptj
    given = [x[..., : SIZE // 2] for x in angles(SIZE, True)[::-1]] if pairs else angles(SIZE, True)

    def run(function, x):
        x = x.requires_grad_()
        made = function(x, *given, **options)
        return [made, *torch.autograd.grad(made, [x], torch.ones_like(made).cumsum(-1))]

    q, k = (torch.randn(2, 5, heads, SIZE) for heads in (3, 1))
    if options.get("unsqueeze_dim") == 1:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    expected = [run(original, x) for x in (q, k)]
    assert "rope" in tilekern.apply(model_type=module.__name__.split(".")[-2])
    before = launches()
    found = run(module.apply_rotary_pos_emb, q)
    assert launched(before) == {"llama4_rope" if pairs else "rope": 2}
    assert worst(found, expected[0]) < 1e-5
    before = launches()
    assert worst(run(module.apply_rotary_pos_emb, k), expected[1]) == 0
    assert not launched(before)


def test_angles_without_a_batch():
    """Pixtral's tower has one sequence of all images' patches."""
    original = pixtral.apply_rotary_pos_emb
    (cos,), (sin,) = angles(SIZE, True)
    q, k = torch.randn(2, 1, 3, 5, SIZE)
    expected = turned(original, q, k, cos, sin, unsqueeze_dim=0)
    tilekern.apply(model_type="pixtral")
    before = launches()
    assert worst(turned(pixtral.apply_rotary_pos_emb, q, k, cos, sin, unsqueeze_dim=0), expected) < 1e-5
    assert launched(before) == {"rope": 2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("twice", [True, False])
def test_patches_without_a_batch_are_turned_in_float32(twice, dtype):
    """As Qwen2-VL's tower has q and k, views of one product. The halves of the angles may differ."""
    original = qwen2_vl.apply_rotary_pos_emb_vision
    (cos,), (sin,) = angles(SIZE, twice)
    q, k = torch.randn(5, 2, 3, SIZE).to(dtype).unbind(1)
    expected = turned(original, q, k, cos, sin)
    tilekern.apply(model_type="qwen2_vl")
    ours = qwen2_vl.apply_rotary_pos_emb_vision
    before = launches()
    found = turned(ours, q, k, cos, sin)
    assert launched(before) == {"rope": 2}
    assert [x.dtype for x in found] == [dtype] * 4
    assert worst(found, expected) < (1e-5 if dtype == torch.float32 else 1e-2)
    # With a batch it is the function as it was, and so for angles that only broadcasting makes fit.
    for given in ((q[None], k[None], cos, sin), (q, k, cos[:1], sin[:1])):
        before = launches()
        assert worst(ours(*given), original(*given)) == 0
        assert not launched(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_complex_angles_of_patches(dtype):
    """Llama 4's tower has them for one head, without a batch."""
    original = llama4.vision_apply_rotary_emb
    freqs = torch.polar(torch.ones(5, 1, SIZE // 2), torch.rand(5, 1, SIZE // 2) * 6)
    q, k = torch.randn(2, 2, 5, 3, SIZE).to(dtype)
    expected = turned(original, q, k, freqs_ci=freqs)
    tilekern.apply(model_type="llama4")
    before = launches()
    found = turned(llama4.vision_apply_rotary_emb, q, k, freqs_ci=freqs)
    assert launched(before) == {"llama4_rope": 2}
    assert [x.dtype for x in found] == [dtype] * 4
    assert worst(found, expected) < (1e-5 if dtype == torch.float32 else 1e-2)


def test_what_only_broadcasting_makes_fit_is_left():
    original = deepseek_v3.apply_rotary_pos_emb_interleave
    q, k = torch.randn(2, 3, 5, SIZE), torch.randn(2, 1, 5, SIZE)
    cos, sin = angles(SIZE, True)
    tilekern.apply(model_type="deepseek_v3")
    ours = deepseek_v3.apply_rotary_pos_emb_interleave
    before = launches()
    assert worst(ours(q, k, cos[:, :1], sin[:, :1]), original(q, k, cos[:, :1], sin[:, :1])) == 0
    assert not launched(before)
    assert worst(ours(q, k, cos, sin, None, 1), original(q, k, cos, sin, None, 1)) < 1e-5
    assert launched(before) == {"rope": 1}


@pytest.mark.parametrize("interleave", [True, False])
def test_one_model_has_both_rotations_that_its_attention_calls(interleave, monkeypatch):
    monkeypatch.setitem(OWN, "deepseek_v3", OWN["deepseek_v3"] | {"rope_interleave": interleave})
    model = make("deepseek_v3")[0].eval()
    expected = model(input_ids=IDS).logits
    assert "rope" in tilekern.apply_to_model(model)
    before = launches()
    assert worst([model(input_ids=IDS).logits], [expected]) < 1e-5
    assert launched(before)["rope"] == 2
    assert {row.reason for row in tilekern.report(model).rows if row.op == "rope"} == {""}
    tilekern.reset()
    assert torch.equal(model(input_ids=IDS).logits, expected)
