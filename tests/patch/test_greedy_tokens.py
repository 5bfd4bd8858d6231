"""Patched models of ten families choose the tokens of transformers' own code, by the interpreter.

tests/gpu/test_decoding_on_gpu.py compares 256 tokens of the same models.
"""

import pytest
import torch
from decoding import TEN, greedy
from tiny_families import make

import tilekern


@pytest.mark.share(2)
@pytest.mark.parametrize("family", TEN)
def test_ten_families_choose_the_tokens_of_their_own_code(interpreted, family):
    """With the kernels for decoding, and in the invariant mode, where those of training decode."""
    model, ids, _ = make(family)
    wanted, logits = greedy(model, ids, 3)
    model.set_attn_implementation("tilekern")
    for invariant in (False, True):
        tilekern.apply(experts=True, invariant=invariant)
        before = {name: counts["launches"] for name, counts in tilekern.stats().items()}
        found, near = greedy(model, ids, 3)
        assert torch.equal(found, wanted)
        torch.testing.assert_close(near, logits, rtol=1e-5, atol=1e-5)
        ran = {name for name, counts in tilekern.stats().items() if counts["launches"] > before.get(name, 0)}
        assert {"attention_forward", "matmul" if invariant else "decode_attention"} <= ran
