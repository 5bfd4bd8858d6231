"""token_attention: the rows and results of its two kernels, counters that are 0 again, positions, and bits."""

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from spec_samples import configs, launched, one_of_each, plain_inputs, resources_of, sized

from tilekern.compile.toolchain import compile_candidate, toolkit
from tilekern.kernels import spec_named
from tilekern.spec import ALIGNED, DTYPES
from tilekern.spec.targets import INTERPRETED, resolve
from tilekern.tuning.verify.check import compare, expected_results, make_outputs

SPEC, APPEND = spec_named("token_attention"), spec_named("append_to_cache")
FLAGS = ("normed", "turned", "paged")
SIZES = {"kv_heads": 4, "keys": 300, "page_size": 64, "group": 3, "head_dim": 24}
EVERY = st.sets(st.sampled_from(FLAGS))


def problem_of(*on, dtype="bfloat16", **sizes):
    return sized(SPEC, dtype, **SIZES | sizes).but(**dict.fromkeys(on, True))


def inputs_at(problem, positions):
    """Inputs with positions of the sequences; all pages are there."""
    inputs = plain_inputs(SPEC, problem)
    positions = torch.tensor(positions, dtype=torch.int32).view(-1, 1)
    return inputs | {"positions": positions, "table": inputs["table"].clamp(min=0)}


def config_of(problem, **changes):
    return SPEC.default(problem, INTERPRETED).but(**changes)


def in_place(problem, config, inputs):
    """Run a config as it is used, with the new rows in the caches that are read; return what it leaves there too."""
    inputs = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    blocks = SPEC.device(problem, config).grid(problem, INTERPRETED.sm_count)
    outputs = make_outputs(SPEC, problem, blocks, "cpu")
    outputs |= {"new_keys": inputs["keys"], "new_values": inputs["values"]}
    launched(SPEC, problem, config, inputs, blocks, outputs)
    return outputs | {"counters": inputs["counters"]}


def appended(problem, inputs):
    """The caches after append_to_cache; an angle of 0 turns nothing."""
    (batch, heads, group, size), paged = inputs["q"].shape, problem["paged"]
    half = (batch, 1, size // 2)
    sizes = {
        "tokens": 1,
        "batch": batch,
        "heads": heads * group,
        "kv_heads": heads,
        "head_dim": size,
        "pairs": size // 2,
    }
    sample = sized(APPEND, problem["dtype"], **sizes).but(normed=problem["normed"], paged=paged)
    given = {name: inputs[name] for name in ("q_weight", "k_weight", "positions", "table", "eps")}
    given |= {name: inputs[name].transpose(1, 2) for name in ("k", "v")}
    given |= {"q": inputs["q"].flatten(1, 2)[:, None], "offset": 0.0}
    turned = {name: inputs[name] for name in ("cos", "sin")}
    still = {"cos": inputs["q"].new_ones(half), "sin": inputs["q"].new_zeros(half)}
    caches = {name: inputs[name].clone() for name in ("keys", "values")}
    made = make_outputs(APPEND, sample, 1, "cpu") | caches
    launched(APPEND, sample, APPEND.generic(sample), given | (turned if problem["turned"] else still), 1, made)
    return caches


@examples(25)
@given(
    positions=st.lists(st.integers(-1, 300), min_size=2, max_size=2), on=EVERY, splits=st.sampled_from([1, 2, 4, 16]),
    tile_n=st.sampled_from([16, 64, 128]), group=st.sampled_from([1, 3, 16]), head_dim=st.sampled_from([16, 24]),
    dtype=st.sampled_from(DTYPES), page_size=st.sampled_from([64, 37]), is_first=st.booleans(),
)  # fmt: skip
def test_in_place_it_leaves_the_rows_of_append_to_cache_and_counters_of_0(
    positions, on, splits, tile_n, group, head_dim, dtype, page_size, is_first
):
    problem = problem_of(*on, dtype=dtype, group=group, head_dim=head_dim, page_size=page_size)
    inputs = inputs_at(problem, positions)
    other = {} if is_first or group == 3 else {"keys_first": False, "scalar": group == 1}
    config = config_of(problem, splits=splits, tile_n=tile_n, **other)
    found = in_place(problem, config, inputs)
    expected = expected_results(SPEC, problem, inputs)
    check = compare(SPEC, problem, found, {"out": expected["out"]})
    assert check.passed, check.reason
    caches = appended(problem, inputs)
    for name in ("keys", "values"):
        assert torch.equal(found[f"new_{name}"], caches[name])
    assert not found["counters"].any()
    # The new rows are there already, and the counters as they were left.
    again = in_place(problem, config, inputs | caches | {"counters": found["counters"]})
    assert all(torch.equal(again[name], found[name]) for name in found if name != "parts")


@pytest.mark.parametrize("on", [(), ("paged",)], ids=str)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e30])
def test_rows_behind_the_last_old_key_may_hold_anything(on, splits, value):
    problem = problem_of(*on, page_size=320)
    inputs = inputs_at(problem, (203, 64))
    config = config_of(problem, splits=splits)
    right = in_place(problem, config, inputs)["out"]
    spoiled = {name: inputs[name].clone() for name in ("keys", "values")}
    for x in spoiled.values():
        for b, position in enumerate((203, 64)):
            rows = x[inputs["table"][b, 0], position:] if on else x[b, :, position:]
            rows[:] = value
    assert torch.equal(in_place(problem, config, inputs | spoiled)["out"], right)


@pytest.mark.parametrize("on", [(), ("paged",)], ids=str)
def test_a_token_without_a_place_is_not_written_and_gives_zeros(on):
    problem = problem_of(*on, keys=320)
    for position in (-1, 320, 1 << 30):
        inputs = inputs_at(problem, (position, 77))
        for config in one_of_each(SPEC, problem, "splits", "tile_n"):
            found = launched(SPEC, problem, config, inputs)
            assert torch.equal(found["out"][0], torch.zeros_like(found["out"][0]))
            assert found["out"][1].abs().sum() > 0
            assert int((~found["new_keys"].isnan()).sum()) == 2 * 24


def test_a_token_whose_page_is_not_there_is_not_written_and_gives_zeros():
    problem = problem_of("paged")
    inputs = inputs_at(problem, (100, 77))
    inputs["table"][0, 1] = -1
    found = launched(SPEC, problem, config_of(problem, splits=4), inputs)
    assert not found["out"][0].any()
    assert int((~found["new_values"].isnan()).sum()) == 2 * 24


@pytest.mark.parametrize("splits", [1, 4])
def test_scores_that_are_all_minus_infinity_give_nan(splits):
    problem = problem_of()
    inputs = inputs_at(problem, (77, 77))
    for name in ("keys", "k"):
        inputs[name] = inputs[name].abs()
    inputs["q"][0, 0, 0, 0] = -torch.inf
    out = launched(SPEC, problem, config_of(problem, splits=splits), inputs)["out"]
    assert out[0, 0, 0].isnan().all()
    assert int(out.isnan().sum()) == 24


def test_the_first_token_has_its_own_value():
    problem = problem_of("normed", "turned")
    inputs = inputs_at(problem, (0, 0))
    for config in configs(SPEC, problem):
        out = launched(SPEC, problem, config, inputs)["out"]
        assert torch.equal(out, inputs["v"].expand_as(out)), config


@examples(15)
@given(
    position=st.integers(0, 299), splits=st.sampled_from([1, 2, 4, 16]), room=st.sampled_from([300, 320, 511]), on=EVERY
)
def test_the_bits_of_a_sequence_are_those_of_the_sequence_alone_in_any_room(position, splits, room, on):
    """Its position alone decides which keys a split takes, and the parts have one order."""
    problem = problem_of(*(on - {"paged"}), kv_heads=2, keys=room)
    inputs = inputs_at(problem, (position, room - 1))
    config = config_of(problem, splits=splits)
    right = launched(SPEC, problem, config, inputs)["out"][:1]
    names = ("q", "k", "v", "cos", "sin", "positions", "keys", "values")
    alone = {name: inputs[name][:1] for name in names} | {"counters": torch.zeros(1, dtype=torch.int32)}
    one = problem.but(kv_heads=1, keys=position + 1)
    alone |= {name: alone[name][:, :, : position + 1].contiguous() for name in ("keys", "values")}
    assert torch.equal(launched(SPEC, one, config, inputs | alone)["out"], right)
    whole = {}
    for name in ("keys", "values"):
        rows = torch.full((512, 24), torch.nan, dtype=torch.bfloat16)
        rows[:position] = inputs[name][0, 0, :position]
        whole[name] = rows.view(4, 128, 1, 24).flip(0)
    table = torch.arange(3, -1, -1, dtype=torch.int32).view(1, -1)
    paged = one.but(paged=True, keys=512, page_size=128)
    assert torch.equal(launched(SPEC, paged, config, inputs | alone | whole | {"table": table})["out"], right)


@pytest.mark.parametrize("position", [0, 63, 64, 200, 299])
@pytest.mark.parametrize("splits", [2, 4, 8])
def test_the_new_key_and_the_old_ones_of_its_tile_have_one_block(position, splits):
    """So no block reads the row that another one writes."""
    problem = problem_of(kv_heads=1)
    inputs = inputs_at(problem, (position,))
    inputs["q"] = torch.zeros_like(inputs["q"])  # all weights are 1
    parts = launched(SPEC, problem, config_of(problem, splits=splits), inputs)["parts"]
    shares = [sum(key // 64 % splits == split for key in range(position + 1)) for split in range(splits)]
    assert torch.equal(parts[:, 0, 25], torch.tensor(shares).float())


@pytest.mark.parametrize("gpu", ["H200", "B200"])
@pytest.mark.parametrize("keys", [1, 512, 4096, 1 << 17])
@pytest.mark.parametrize("kv_heads", [1, 8, 96, 512])
def test_the_default_fills_the_gpu_where_there_are_keys_enough(gpu, kv_heads, keys):
    problem, target = problem_of(kv_heads=kv_heads, keys=keys, head_dim=128), resolve(gpu)
    config = SPEC.default(problem, target)
    assert SPEC.space.violated(problem, config, target) is None
    assert SPEC.device(problem, config).grid(problem, target.sm_count) == kv_heads * config["splits"]
    if keys > 1 << 16 and kv_heads > 1:
        assert kv_heads * config["splits"] >= target.sm_count // 2
    assert len(list(SPEC.space.candidates(problem, target))) in range(4, 61)


GPT2 = {"kv_heads": 12, "keys": 512, "group": 1, "head_dim": 64}
QWEN3 = {"kv_heads": 8, "keys": 4096, "group": 4, "head_dim": 128}
MODELS = {
    "gpt2": (GPT2, ()), "gpt2, 8 sequences": (GPT2 | {"kv_heads": 96}, ()), "qwen3": (QWEN3, ("normed", "turned")),
    "qwen3, 8 sequences": (QWEN3 | {"kv_heads": 64}, ("normed", "turned")), "llama": (QWEN3, ("turned",)),
    "qwen3, pages": (QWEN3 | {"page_size": 256}, FLAGS), "gpt2, float32": (GPT2 | {"dtype": "float32"}, ()),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.share(12)
def test_the_defaults_of_models_spill_nothing(arch, name):
    (sizes, on), target = MODELS[name], resolve(arch)
    problem = SPEC.bucketed(problem_of(*on, **sizes))
    default = SPEC.default(problem, target)
    ways = [default] + [default.but(keys_first=False, scalar=True)] * (name == "gpt2")
    for config in ways:
        assert SPEC.space.violated(problem, config, target) is None
        made = compile_candidate(SPEC, problem, config, target, ALIGNED)
        assert resources_of(SPEC, problem, made, target).stack_bytes == 0
