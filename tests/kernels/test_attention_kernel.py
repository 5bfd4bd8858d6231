"""Attention's forward: the tiles visited and their order, masks over many tiles, costs."""

import itertools

import cuda.tile as ct
import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from spec_samples import assert_right, configs, inputs_of, sized

from tilekern import interpreter
from tilekern.kernels import spec_named
from tilekern.kernels.attention import problem as attention_problem
from tilekern.kernels.attention.tiles import head_and_tile, heads_abreast, key_tiles, query_tiles, seen

SPEC = spec_named("attention_forward")
FLAGS = ("causal", "windowed", "capped", "sinks", "packed")


@ct.kernel
def ranges(
    found, by_key: ct.Constant[bool], rows: ct.Constant[int], tile: ct.Constant[int], queries: ct.Constant[int],
    keys: ct.Constant[int], window: ct.Constant[int], causal: ct.Constant[bool], windowed: ct.Constant[bool],
):  # fmt: skip
    """Row b of ``found``: the ranges of tiles for the b-th tile of rows."""
    b = ct.bid(0)
    tiles = ct.static_eval(query_tiles if by_key else key_tiles)
    parts = tiles(b * rows, rows, queries, keys, window, tile, causal, windowed)
    for i in range(4):
        ct.store(found, (b, i), ct.full((1, 1), parts[i], ct.int32))


@ct.kernel
def masks(
    found, size: ct.Constant[int], queries: ct.Constant[int], keys: ct.Constant[int], window: ct.Constant[int],
    causal: ct.Constant[bool], windowed: ct.Constant[bool],
):  # fmt: skip
    """The whole mask as one tile."""
    query, key = ct.arange(size, dtype=ct.int32)[:, None], ct.arange(size, dtype=ct.int32)[None, :]
    shown = seen(query, key, queries, keys, window, causal, windowed)
    ct.store(found, (0, 0), (shown & (query < queries)).astype(ct.int32))


@ct.kernel
def orders(found, tiles: ct.Constant[int], heads: ct.Constant[int], abreast: ct.Constant[int]):
    """Row b of ``found``: the head and tile of work item b."""
    head, tile = head_and_tile(ct.bid(0), tiles, heads, abreast, True)
    ct.store(found, (ct.bid(0), 0), ct.full((1, 1), head, ct.int32))
    ct.store(found, (ct.bid(0), 1), ct.full((1, 1), tile, ct.int32))


def generic_is_right(problem, inputs):
    assert_right(SPEC, problem, [SPEC.generic(problem)], inputs)


sizes = st.integers(1, 40)


@examples(150)
@given(queries=sizes, keys=sizes, window=sizes, rows=st.sampled_from([1, 4, 8]), tile=st.sampled_from([1, 4, 16]),
       by_key=st.booleans(), causal=st.booleans(), windowed=st.booleans())  # fmt: skip
def test_tiles_that_see_each_other_are_visited_and_only_edges_are_masked(
    queries, keys, window, rows, tile, by_key, causal, windowed
):
    """With tiles of one row every bound that is off by one shows."""
    mask = attention_problem.mask(queries, keys, window, causal, windowed, "cpu")
    mask = mask.T if by_key else mask
    steps, tiles = -(-mask.shape[0] // rows), -(-mask.shape[1] // tile)
    found = torch.full((steps, 4), -1, dtype=torch.int32)
    interpreter.launch(ranges, (steps,), (found, by_key, rows, tile, queries, keys, window, causal, windowed))
    for step, (first, full, edge, stop) in enumerate(found.tolist()):
        assert 0 <= first <= full <= edge <= stop <= max(tiles, first)
        for j in range(tiles):
            part = mask[step * rows : (step + 1) * rows, j * tile : (j + 1) * tile]
            whole = bool(part.all()) and part.shape[1] == tile
            if first <= j < stop:
                assert (full <= j < edge) == whole
            else:
                assert not part.any()


@examples(100)
@given(queries=sizes, keys=sizes, window=sizes, causal=st.booleans(), windowed=st.booleans())
def test_tile_mask_and_operation_count_match_the_formula(queries, keys, window, causal, windowed):
    found = torch.full((64, 64), -1, dtype=torch.int32)
    interpreter.launch(masks, (1,), (found, 64, queries, keys, window, causal, windowed))
    mask = attention_problem.mask(queries, keys, window, causal, windowed, "cpu")
    assert torch.equal(found[:queries, :keys].bool(), mask)
    assert not found[queries:].any()
    assert not found[:, keys:].any()
    assert attention_problem.visible(queries, keys, window, causal, windowed) == int(mask.sum())


@pytest.mark.parametrize(("tiles", "heads", "abreast"), [(1, 1, 1), (3, 5, 2), (4, 6, 6), (2, 3, 16)])
def test_the_work_is_done_once_longest_first_within_a_wave(tiles, heads, abreast):
    found = torch.full((tiles * heads, 2), -1, dtype=torch.int32)
    interpreter.launch(orders, (tiles * heads,), (found, tiles, heads, abreast))
    order = [tuple(item) for item in found.tolist()]
    assert sorted(order) == sorted(itertools.product(range(heads), range(tiles)))
    for wave, items in itertools.groupby(order, key=lambda item: item[0] // abreast):
        rows = [tile for _, tile in items]
        assert rows == sorted(rows, reverse=True), wave


@ct.kernel
def abreasts(found, keys: ct.Constant[int], group: ct.Constant[int]):
    """How many heads of 128 go abreast with a budget of 2^23 elements."""
    ct.store(found, (0,), ct.full((1,), heads_abreast(keys, 128, group, 1 << 23), ct.int32))


@pytest.mark.parametrize(("keys", "heads"), [(1024, 128), (4096, 32), (1 << 20, 4)])
def test_heads_that_share_the_cache_are_whole_groups(keys, heads):
    found = torch.zeros(1, dtype=torch.int32)
    interpreter.launch(abreasts, (1,), (found, keys, 4))
    assert found.item() == heads


@pytest.mark.parametrize("flags", [*itertools.product([False, True], repeat=2)], ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(300, 300), (1, 290), (130, 400), (260, 70)])
def test_many_tiles_by_every_kind_of_config(flags, queries, keys):
    causal, windowed = flags
    problem = sized(SPEC, "bfloat16", batch=1, heads=2, kv_heads=1, head_dim=24, queries=queries, keys=keys)
    problem = problem.but(causal=causal, windowed=windowed)
    inputs = inputs_of(SPEC, problem)
    kinds = {}
    for config in configs(SPEC, problem):
        if config["implementation"] == "tile":
            kinds.setdefault((config["tile_m"], config["tile_n"], config.get("ahead")), config)
    assert_right(SPEC, problem, kinds.values(), inputs)


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("head_dim", [64, 96])
def test_each_flag_alone(flag, head_dim):
    problem = sized(SPEC, "float16", batch=2, heads=2, kv_heads=1, head_dim=head_dim, queries=100, keys=100)
    problem = problem.but(**{flag: True})
    generic_is_right(problem, inputs_of(SPEC, problem))


def test_a_window_of_one_gives_each_query_its_own_value():
    problem = sized(SPEC, "float32", batch=1, queries=70, keys=70, heads=2, kv_heads=2).but(windowed=True)
    inputs = inputs_of(SPEC, problem) | {"window": 1}
    generic_is_right(problem, inputs)
    assert torch.allclose(SPEC.reference(**inputs, **dict.fromkeys(FLAGS, False) | {"windowed": True})["out"].float(),
                          inputs["v"])  # fmt: skip


def test_packed_sequences_may_be_empty():
    problem = sized(SPEC, "float32", batch=4, queries=9, keys=9).but(packed=True, causal=True)
    inputs = inputs_of(SPEC, problem)
    tokens = inputs["q"].shape[1]
    starts = torch.tensor([0, 0, 9, 9, tokens], dtype=torch.int32)
    inputs |= {"query_starts": starts, "key_starts": starts, "most_queries": tokens - 9}
    generic_is_right(problem, inputs)


def test_scores_of_any_size_stay_finite():
    problem = sized(SPEC, "bfloat16", batch=1, queries=40, keys=40).but(causal=True, sinks=True)
    for scale in (1e-30, 1e3):
        generic_is_right(problem, inputs_of(SPEC, problem) | {"scale": scale})
    inputs = inputs_of(SPEC, problem)
    for sink in (-torch.inf, -1e30, 1e4):
        generic_is_right(problem, inputs | {"sink_logits": torch.full_like(inputs["sink_logits"], sink)})
