"""decode_attention: lengths, edges of tiles and pages, splits and their join, and bits that depend on a row alone."""

import itertools

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from spec_samples import assert_right, configs, launched, one_of_each, plain_inputs, sized

from tilekern.kernels import spec_named
from tilekern.kernels.decode_attention import joined
from tilekern.spec.targets import resolve

SPEC, JOIN = spec_named("decode_attention"), spec_named("decode_join")
FLAGS = ("windowed", "capped", "sinks", "padded", "paged")


def problem_of(dtype="bfloat16", *on, **sizes):
    sizes = {"kv_heads": 4, "keys": 300, "page_size": 64, "group": 3, "head_dim": 24} | sizes
    return sized(SPEC, dtype, **sizes).but(**dict.fromkeys(on, True))


def numbers(*values):
    return torch.tensor(values, dtype=torch.int32)


def ways_apart(problem=None):
    """A config of tiles that are summed apart for each kernel: by one block, and by a block for each tile."""
    ways = one_of_each(SPEC, problem or problem_of(), "apart", "schedule", "splits")
    found = {(config["schedule"], config["splits"]): config for config in ways if config.get("apart")}
    assert found.keys() == {("block", 1), ("block", 0), ("tile", 0)}
    return dict(sorted(found.items(), key=lambda way: -way[0][1]))


def hidden(problem, inputs, value):
    """Inputs with a value in all rows of the cache that no sequence sees."""
    found = {name: inputs[name].clone() for name in ("keys", "values")}
    window = inputs["window"] if problem["windowed"] else problem["keys"]
    for b, length in enumerate(inputs["lengths"].tolist()):
        first = max(0, int(inputs["starts"][b]) if problem["padded"] else 0, length - window)
        for x in found.values():
            x[b, :, :first] = x[b, :, max(first, length) :] = value
    return inputs | found


@pytest.mark.parametrize("on", [(), ("padded",), ("paged",)], ids=str)
def test_sequences_are_timed_with_equal_lengths_but_in_pages_and_checked_with_their_own(on):
    problem = problem_of("bfloat16", *on, kv_heads=32, keys=4096)
    inputs = plain_inputs(SPEC, problem)
    assert len(set(inputs["lengths"].tolist())) == (4 if "paged" in on else 1)
    (vary,) = SPEC.variations.values()
    ends = (inputs | vary(problem, torch.Generator(), "cpu"))["lengths"].tolist()
    assert ends == ([4096] * 4 if "padded" in on else [4096, 3584, 3072, 2560])


@pytest.mark.parametrize("on", [(), FLAGS[:4], FLAGS], ids=str)
@pytest.mark.parametrize("lengths", [(300, 257), (64, 0), (1, 128), (65, 299)], ids=str)
def test_lengths_at_the_edges_of_tiles_by_each_tile_and_number_of_splits(on, lengths):
    problem = problem_of("bfloat16", *on)
    inputs = plain_inputs(SPEC, problem) | {"lengths": numbers(*lengths), "window": 70}
    if "padded" in on:
        inputs["starts"] = numbers(0, 129)
    if "paged" in on:
        inputs["table"] = inputs["table"].clamp(min=0)
    ways = one_of_each(SPEC, problem, "tile_n", "splits", "schedule", "apart")
    assert len({config["splits"] for config in ways}) >= 3
    assert_right(SPEC, problem, ways, inputs)


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (16, 96), (5, 80)])
def test_each_flag_alone_by_both_sides_of_the_products(flag, group, head_dim):
    problem = problem_of("float16", flag, group=group, head_dim=head_dim, keys=150)
    for config in one_of_each(SPEC, problem, "keys_first"):
        assert_right(SPEC, problem, [config.but(splits=1), config.but(splits=2)], plain_inputs(SPEC, problem))


@pytest.mark.parametrize("on", [(), ("padded", "windowed")], ids=str)
@pytest.mark.parametrize("splits", [1, 4])
def test_rows_of_the_cache_that_no_sequence_sees_may_hold_anything(on, splits):
    problem = problem_of("bfloat16", *on)
    inputs = plain_inputs(SPEC, problem) | {"lengths": numbers(203, 77)}
    config = SPEC.default(problem, resolve("H200")).but(splits=splits, tile_n=64)
    right = SPEC.results(launched(SPEC, problem, config, inputs))["out"]
    for value in (torch.nan, torch.inf, 1e30):
        spoiled = hidden(problem, inputs, value)
        assert not all(x.isfinite().all() for x in (spoiled["keys"], spoiled["values"])) or value == 1e30
        assert torch.equal(SPEC.results(launched(SPEC, problem, config, spoiled))["out"], right)


@pytest.mark.parametrize("lengths", [(0, 0), (-3, 5)], ids=str)
@pytest.mark.parametrize("sinks", [False, True])
def test_a_sequence_without_keys_gives_zeros(lengths, sinks):
    problem = problem_of("bfloat16", *(["sinks"] if sinks else []))
    inputs = plain_inputs(SPEC, problem) | {"lengths": numbers(*lengths)}
    for config in one_of_each(SPEC, problem, "splits"):
        out = SPEC.results(launched(SPEC, problem, config, inputs))["out"]
        assert torch.equal(out[0], torch.zeros_like(out[0]))
        assert bool(out[1].any()) == (lengths[1] > 0)


@examples(20)
@given(
    length=st.integers(1, 300), tile_n=st.sampled_from([64, 128]), splits=st.sampled_from([1, 2, 4, 16]),
    windowed=st.booleans(), room=st.sampled_from([300, 320, 511]),
)  # fmt: skip
def test_the_bits_of_a_row_are_those_of_the_row_alone_in_any_room(length, tile_n, splits, windowed, room):
    """Neither the batch, nor the room, nor pages decide which keys a split takes."""
    problem = problem_of("bfloat16", *(["windowed"] if windowed else []), kv_heads=2, keys=room)
    inputs = plain_inputs(SPEC, problem) | {"lengths": numbers(length, room), "window": 90}
    config = SPEC.default(problem, resolve("H200")).but(tile_n=tile_n, splits=splits)

    def out_of(problem, inputs):
        return SPEC.results(launched(SPEC, problem, config, inputs))["out"]

    right = out_of(problem, inputs)[:1]
    alone = {name: inputs[name][:1] for name in ("q", "keys", "values", "lengths")}
    assert torch.equal(out_of(problem.but(kv_heads=1), inputs | alone), right)
    short = {name: alone[name][:, :, :length].contiguous() for name in ("keys", "values")}
    assert torch.equal(out_of(problem.but(kv_heads=1), inputs | alone | short), right)
    pages = -(-length // 128)
    cache = {}
    for name in ("keys", "values"):
        whole = torch.full((pages * 128, 24), torch.nan, dtype=torch.bfloat16)
        whole[:length] = inputs[name][0, 0, :length]
        cache[name] = whole.view(pages, 128, 1, 24).flip(0)
    table = torch.arange(pages - 1, -1, -1, dtype=torch.int32).view(1, -1)
    paged = problem.but(kv_heads=1, paged=True, page_size=128)
    assert torch.equal(out_of(paged, inputs | alone | cache | {"table": table}), right)


@pytest.mark.parametrize("length", [64, 65, 200, 300])
@pytest.mark.parametrize(("window", "splits"), [(400, 4), (400, 8), (100, 4), (65, 2), (10, 4)])
def test_a_tile_belongs_to_the_same_split_whatever_is_seen(length, window, splits):
    problem = problem_of("bfloat16", "windowed", kv_heads=1)
    inputs = plain_inputs(SPEC, problem) | {"lengths": numbers(length), "window": window}
    config = SPEC.default(problem, resolve("H200")).but(tile_n=64, splits=splits)
    parts = launched(SPEC, problem, config, inputs)["parts"]
    seen = range(max(0, length - window), length)
    shares = [sum(key // 64 % splits == split for key in seen) for split in range(splits)]
    assert (parts[:, 0, 25] > 0).tolist() == [share > 0 for share in shares]
    inputs["q"].zero_()  # all weights are 1
    parts = launched(SPEC, problem, config, inputs)["parts"]
    assert torch.equal(parts[:, 0, 25], torch.tensor(shares).float())
    assert torch.equal(parts[0, 0, 26:30], torch.tensor([-1e30, 0, 0, splits]))


@pytest.mark.parametrize("on", [(), ("paged",)], ids=str)
def test_a_length_beyond_the_room_is_the_room(on):
    problem = problem_of("bfloat16", *on, keys=320)
    inputs = plain_inputs(SPEC, problem)
    inputs |= {"table": inputs["table"].clamp(min=0)}
    found = []
    for length in (320, 321, 1 << 30):
        out = launched(SPEC, problem, SPEC.generic(problem), inputs | {"lengths": numbers(length, 9)})
        found.append(SPEC.results(out)["out"])
    assert torch.equal(found[1], found[0])
    assert torch.equal(found[2], found[0])


@pytest.mark.parametrize("page_size", [5, 37, 64, 200])
def test_pages_of_any_size(page_size):
    problem = problem_of("float16", "paged", "windowed", page_size=page_size, keys=230)
    inputs = plain_inputs(SPEC, problem) | {"lengths": numbers(230, 171)}
    assert (inputs["table"] == -1).any() or page_size == 200
    assert_right(SPEC, problem, one_of_each(SPEC, problem, "tile_n", "splits", "schedule"), inputs)


def test_one_large_score_takes_all_of_the_weight():
    problem = problem_of("float16", keys=300, head_dim=16)
    inputs = plain_inputs(SPEC, problem)
    inputs["keys"] = torch.zeros_like(inputs["keys"])
    inputs["keys"][:, :, 199] = 100 * inputs["q"][:, :, 0]
    for splits in (1, 4):
        config = SPEC.generic(problem) if splits == 1 else SPEC.default(problem, resolve("H200")).but(splits=splits)
        out = SPEC.results(launched(SPEC, problem, config, inputs))["out"]
        assert torch.equal(out[:, :, 0], inputs["values"][:, :, 199])


@pytest.mark.parametrize(("splits", "head_dim"), [(2, 10), (9, 4), (70, 40), (300, 10)])
def test_parts_between_the_first_and_the_last_are_added_up_in_their_order(splits, head_dim):
    """Whatever stands in the others; parts without a key add nothing, and a denominator of 0 gives 0."""
    problem = JOIN.problem(kv_heads=3, splits=splits, group=2, head_dim=head_dim, dtype="float32")
    inputs = plain_inputs(JOIN, problem)
    of_pairs = inputs["parts"].view(3, splits, 2, -1)
    numbers = of_pairs[..., head_dim : head_dim + 6]
    numbers[0, 1:, :, 0] = -1e30
    of_pairs[0, 1:, :, :head_dim] = numbers[0, 1:, :, 1] = 0
    numbers[1, 0, :, 4] = 1
    of_pairs[1, 0, :, : head_dim + 2] = torch.nan
    numbers[2, 0, :, 3:6] = 0
    every = configs(JOIN, problem)
    assert_right(JOIN, problem, every, inputs)
    # Exponents are whole, so neither scaling rounds.
    right = joined(inputs["parts"], splits)
    for config in every:
        assert torch.equal(launched(JOIN, problem, config, inputs)["out"], right), config
    out = joined(inputs["parts"].double(), splits)
    assert not out[2].any()
    one, start = of_pairs[0, 0], numbers[0, 0, :, 2:4]
    weight = torch.exp2(one[:, head_dim] - start[:, 0]).double()
    total = one[:, head_dim + 1] * weight + start[:, 1]
    assert torch.allclose(out[0], one[:, :head_dim] * (weight / total)[:, None])


@pytest.mark.parametrize(
    ("on", "lengths"), [((), (257, 128)), (FLAGS[:4], (300, 0)), (("paged", "windowed"), (129, 257))], ids=str
)
def test_tiles_that_are_summed_apart_give_the_same_bits_by_one_block_and_by_one_each(on, lengths):
    """By each config of the joined kernel, and by torch."""
    problem = problem_of("bfloat16", *on, page_size=128)
    inputs = plain_inputs(SPEC, problem) | {"lengths": numbers(*lengths), "window": 70}
    if "paged" in on:
        inputs["table"] = inputs["table"].clamp(min=0)
    ways = ways_apart(problem)
    whole, *of_tiles = (launched(SPEC, problem, config, inputs) for config in ways.values())
    right = whole["out"]
    join = JOIN.problem(kv_heads=4, splits=3, group=3, head_dim=24, dtype="bfloat16")
    for parts in of_tiles:
        assert torch.equal(SPEC.results(parts)["out"], right)
        for config in configs(JOIN, join):
            out = launched(JOIN, join, config, {"parts": parts["parts"], "splits": 3})["out"]
            assert torch.equal(out.view_as(right), right)


@examples(20)
@given(
    length=st.integers(0, 300), padding=st.integers(0, 140), window=st.integers(1, 300),
    on=st.sets(st.sampled_from(FLAGS[:4])), group=st.sampled_from([1, 3, 16]),
)  # fmt: skip
def test_a_tile_by_itself_is_masked_where_an_edge_crosses_it(length, padding, window, on, group):
    """At any edges it leaves the bits of one block, and rows that no sequence sees may hold NaN."""
    problem = problem_of("bfloat16", *on, kv_heads=1, keys=300, group=group)
    inputs = plain_inputs(SPEC, problem) | {"lengths": numbers(length), "window": window}
    if "padded" in on:
        inputs["starts"] = numbers(padding)
    inputs = hidden(problem, inputs, torch.nan)
    whole, *of_tiles = (launched(SPEC, problem, config, inputs) for config in ways_apart(problem).values())
    assert whole["out"].isfinite().all()
    for parts in of_tiles:
        assert torch.equal(SPEC.results(parts)["out"], whole["out"])


@pytest.mark.parametrize("on", [(), FLAGS[:4]], ids=str)
@pytest.mark.parametrize("length", [0, 1, 77, 128])
def test_a_room_of_one_tile_leaves_the_result_itself(on, length):
    """A record of a larger room may serve it."""
    problem = problem_of("bfloat16", *on, kv_heads=1, keys=128)
    inputs = plain_inputs(SPEC, problem) | {"lengths": numbers(length), "window": 70}
    inputs = hidden(problem, inputs, torch.nan)
    whole, *of_tiles = (launched(SPEC, problem, config, inputs)["out"] for config in ways_apart().values())
    for out in of_tiles:
        assert torch.equal(out, whole)


@pytest.mark.parametrize(
    ("gpu", "kv_heads", "keys"), [*itertools.product(["H200", "B200"], [1, 8, 512], [1, 4096, 1 << 17])]
)
def test_the_default_fills_the_gpu_where_there_are_keys_enough(gpu, kv_heads, keys):
    problem, target = problem_of(kv_heads=kv_heads, keys=keys, head_dim=128), resolve(gpu)
    config = SPEC.default(problem, target)
    assert SPEC.space.violated(problem, config, target) is None
    blocks = SPEC.device(problem, config).grid(problem, target.sm_count)
    assert blocks == kv_heads * config["splits"] > 0
    assert config["splits"] == 1 or config["splits"] * config["tile_n"] * 2 <= keys
    if keys > 1 << 16:
        assert blocks >= min(target.sm_count // 2, 64 * kv_heads)
    assert len(list(SPEC.space.candidates(problem, target))) in range(4, 101)
