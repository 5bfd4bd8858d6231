"""Attention's forward at addresses that held another call's arrays: its loads are described in rows of its result."""

import pytest
import torch
from gpu_tolerances import OF_OPS

from tilekern.ops import attention
from tilekern.runtime import dispatch

HEADS, KEY_HEADS, DEPTH = 32, 8, 128


def drawn(seed, tokens):
    """q, k and v of Qwen3-8B's heads, whose records ship for some GPUs."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return [
        torch.randn(1, tokens, heads, DEPTH, device="cuda", dtype=torch.bfloat16, generator=generator)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]


def expected(q, k, v):
    whole = [x.transpose(1, 2).repeat_interleave(HEADS // x.shape[2], 1) for x in (q, k, v)]
    return torch.nn.functional.scaled_dot_product_attention(*whole, is_causal=True).transpose(1, 2)


def assert_near(found, wanted):
    assert (found.float() - wanted.float()).norm() <= OF_OPS[torch.bfloat16] * wanted.float().norm()


@pytest.mark.parametrize("tokens", [4096, 8192])
def test_a_result_at_the_last_one_s_address_has_its_own_keys(tokens):
    given = [drawn(seed, tokens) for seed in range(4)]
    wanted = [expected(*arrays) for arrays in given]
    places = set()
    for n in range(40):
        found = attention(*given[n % 4])
        places.add(found.data_ptr())
        assert_near(found, wanted[n % 4])
        del found
    assert len(places) == 1
    assert not dispatch.stats()["attention_forward"]["fallbacks"]


def test_a_graph_sees_the_keys_of_its_replay():
    given = drawn(0, 4096)
    attention(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attention(*given)
    for seed in (1, 2):
        for old, new in zip(given, drawn(seed, 4096), strict=True):
            old.copy_(new)
        graph.replay()
        assert_near(found, expected(*given))


def test_streams_side_by_side_have_the_bits_of_one():
    given = [drawn(seed, 4096) for seed in range(3)]
    wanted = [attention(*arrays) for arrays in given]
    streams = [torch.cuda.Stream() for _ in given]
    for _ in range(10):
        torch.cuda.synchronize()
        found = []
        for arrays, stream in zip(given, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(attention(*arrays))
        torch.cuda.synchronize()
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
