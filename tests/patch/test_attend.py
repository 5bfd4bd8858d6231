"""The attention function behind ``attn_implementation="tilekern"``, as transformers and its models call it."""

import functools

import pytest
import torch
from tiny_qwen3 import launches, worst

import tilekern
from tilekern.errors import InputError
from tilekern.patch import attention as implementation
from tilekern.patch import registry

pytestmark = pytest.mark.usefixtures("interpreted")
WINDOW = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
PACKED = torch.tensor([0, 3, 4, 7], dtype=torch.int32)


@pytest.fixture(autouse=True)
def known():
    tilekern.apply(**dict.fromkeys(registry.known_ops(), False))


def forwards():
    return launches().get("attention_forward", 0)


class Layer(torch.nn.Module):
    """What an attention function may ask of its layer."""

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
    "given", [{"dropout": 0.1}, {"attention_mask": torch.ones(1, 1, 7, 7, dtype=torch.bool)}], ids=str
)
@pytest.mark.parametrize("special", [{"softcap": 2.0}, {"s_aux": torch.zeros(4)}], ids=str)
def test_soft_caps_and_sinks_with_a_mask_or_dropout_are_refused(given, special):
    with pytest.raises(InputError, match="without a mask and dropout only"):
        implementation.attend(True, Layer(), *heads(), **{"attention_mask": None} | given, **special)


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


def test_a_tensor_of_another_class_goes_to_sdpa():
    class Other(torch.Tensor):
        pass

    q, k, v = heads()
    before = forwards()
    found, _ = implementation.attend(True, Layer(), q.as_subclass(Other), k, v, None, sliding_window=3)
    seen = torch.ones(7, 7, dtype=torch.bool).tril().triu(-2)
    assert worst([found.as_subclass(torch.Tensor)], [softmax(q, k, v, seen)]) < 1e-5
    assert forwards() == before
