"""Angles of rotary embeddings beside transformers' own."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tilekern.inference.architectures import architecture_of
from tilekern.inference.steps import angles_of

POSITIONS = 4096
OF_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 2048,
}  # fmt: skip
ROPES = [{"rope_type": "default"}, {"rope_type": "linear", "factor": 3.0}, OF_LLAMA3, OF_LLAMA3 | {"factor": 32.0}]


def ulps(x, y):
    """The distance of positive float32 numbers in units of the last place."""
    return (x.view(torch.int32) - y.view(torch.int32)).abs()


@pytest.mark.share(3)
@pytest.mark.parametrize("rope", ROPES, ids=str)
@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6])
def test_angles_are_those_of_transformers(rope, theta):
    """Torch's powers, cosines and sines are not always the nearest float32; the engine's are."""
    config = LlamaConfig(
        head_dim=128, max_position_embeddings=POSITIONS, rope_parameters=rope | {"rope_theta": theta},
    )  # fmt: skip
    architecture, theirs = architecture_of(config.to_dict()), LlamaRotaryEmbedding(config)
    frequencies = torch.tensor(architecture.rotation.frequencies(128))
    # One of 64 powers of 1e6.
    differ = ulps(frequencies, theirs.inv_freq)
    assert differ.count_nonzero() <= (theta == 1e6)
    assert differ.max() <= 2
    exact = (frequencies[None] * torch.arange(POSITIONS)[:, None]).double()
    equal = differ == 0
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        data = bytearray(angles_of(architecture, POSITIONS, str(dtype).removeprefix("torch.")))
        found = torch.frombuffer(data, dtype=dtype).view(POSITIONS, 2, 64)
        assert torch.equal(found, torch.stack([exact.cos(), exact.sin()], 1).float().to(dtype))
        wanted = torch.stack(theirs(torch.zeros(1, dtype=dtype), torch.arange(POSITIONS)[None]), 2)[0, ..., :64]
        off = (found.float() - wanted.float()).abs()[..., equal]
        most, share = {torch.float32: (6e-8, 0.06), torch.bfloat16: (4e-3, 1e-5), torch.float16: (5e-4, 2e-5)}[dtype]
        assert off.max() <= most
        assert off.count_nonzero() <= share * off.numel()
