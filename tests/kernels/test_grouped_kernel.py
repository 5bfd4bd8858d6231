"""Grouped products, beside the tests of all specs."""

import itertools

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from spec_samples import assert_right, both_defaults, configs, each, inputs_of, launched

from tilekern import interpreter
from tilekern.kernels import spec_named
from tilekern.kernels.grouped import product, weight_gradient
from tilekern.kernels.grouped.routing import OF_SUMS, VARIATIONS, held
from tilekern.kernels.grouped.space import first_tile, readable
from tilekern.kernels.grouped.tiles import group_at, rows_of
from tilekern.kernels.matmul.space import is_tile
from tilekern.kernels.tiles import ConstInt
from tilekern.spec import DTYPES
from tilekern.spec.targets import KNOWN, resolve
from tilekern.tuning.verify.check import compare, expected_results

LINEAR, GRADIENT, SUM = map(spec_named, ("grouped_linear", "grouped_weight_gradient", "grouped_sum"))
SPECS = (LINEAR, GRADIENT, SUM)
FLAGS = ("inner_first", "gathered", "biased", "partial")
GPT_OSS = (32768, 2880, 5760, 32, "bfloat16")
QWEN3 = (65536, 2048, 1536, 128, "bfloat16")


def problem_of(spec, rows, inner, columns, experts, *on, dtype="float32"):
    if spec is SUM:
        sizes = {"rows": rows, "columns": columns, "experts": experts, "weighted": "weighted" in on}
        return spec.problem(**sizes, dtype=dtype, weight_dtype=dtype)
    sizes = product.sizes if spec is LINEAR else weight_gradient.sizes
    return spec.problem(**sizes(rows, inner, columns, experts, dtype, on))


def offsets_of(counts):
    return {"offsets": torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)}


MATRIX = torch.arange(5 * 64.0).view(5, 64).bfloat16()


@pytest.mark.parametrize(
    "given",
    [
        MATRIX,
        MATRIX.t(),
        MATRIX.view(-1)[1:257].view(4, 64),  # whole, at an address that is not
        MATRIX.view(-1)[:310].view(5, 62)[:, :56],  # rows of 124 bytes
        MATRIX[:, ::2],
        MATRIX[:, 4:60],
    ],
    ids=["whole", "transposed", "offset", "wide rows", "every second column", "columns within"],
)
def test_torchs_product_reads_whole_16_bytes(given):
    """A GPU's refuses any other; the CPU's does not say so."""
    read = readable(given)
    assert torch.equal(read, given)
    assert read.data_ptr() % 16 == 0
    assert sorted(stride * 2 % 16 for stride in read.stride()) == [0, 2]
    assert (read is given) == (given is MATRIX or given.stride(0) == 1)


@each(SPECS)
@examples(40)
@given(data=st.data())
def test_any_routing(spec, data):
    """Empty experts anywhere, rows beyond the last one, tiles that end with an expert or go on behind it."""
    counts = data.draw(st.lists(st.sampled_from([0, 0, 1, 3, 63, 64, 65, 150]), min_size=1, max_size=7))
    flags = data.draw(st.sets(st.sampled_from([d.name for d in spec.dimensions if d.kind == "flag"] or ["none"])))
    nobody = data.draw(st.sampled_from([0, 1, 70])) if spec is not LINEAR or "partial" in flags else 0
    rows = max(1, sum(counts) + nobody)
    if not sum(counts) + nobody:
        counts[-1] = 1
    sizes = (rows, data.draw(st.integers(1, 100)), data.draw(st.integers(1, 100)), len(counts))
    problem = problem_of(spec, *sizes, *flags, dtype=data.draw(st.sampled_from(DTYPES)))
    config = data.draw(st.sampled_from(configs(spec, problem)))
    assert_right(spec, problem, [config], inputs_of(spec, problem) | offsets_of(counts))


@each(SPECS)
def test_nan_rows_of_other_experts_reach_no_result(spec):
    """Each expert's rows, and those of nobody, stand beside rows of the others in the same tiles."""
    counts, flags = [5, 0, 66, 3], ("partial", "inner_first", "biased")
    problem = problem_of(spec, sum(counts) + 7, 20, 24, 4, *(f for f in flags if spec is LINEAR))
    plain = inputs_of(spec, problem) | offsets_of(counts)
    ends = [0, *plain["offsets"].tolist(), problem["rows"]]
    for group, (begin, end) in enumerate(itertools.pairwise(ends)):
        inputs = {
            name: value.clone().index_fill_(0, torch.arange(begin, end), torch.nan)
            if name in ("x", "a", "b", "dy")
            else value
            for name, value in plain.items()
        }
        expected = expected_results(spec, problem, plain)
        for config in both_defaults(spec, problem):
            outputs = launched(spec, problem, config, inputs)
            (result,), (right,) = spec.results(outputs).values(), expected.values()
            own = torch.zeros(len(result), dtype=torch.bool)
            if spec is LINEAR:
                own[begin:end] = group < len(counts)
            elif group < len(counts):
                own[group] = begin < end
            assert result[own].isnan().all()
            torch.testing.assert_close(result[~own].double(), right[~own], rtol=1e-4, atol=1e-5)


def test_gathered_rows_are_those_of_the_slots_tokens():
    """The result is that of copied rows, whatever the number of slots."""
    counts, slots = [9, 0, 12], 3
    order = torch.randperm(21)
    x = torch.randn(7, 16)
    flags = {"gathered": True, "inner_first": True}
    problem = problem_of(LINEAR, 21, 16, 24, 3, *flags)
    inputs = inputs_of(LINEAR, problem) | offsets_of(counts) | {"x": x, "order": order.int(), "slots": slots}
    copied = problem_of(LINEAR, 21, 16, 24, 3, "inner_first")
    rows = {"x": x[order // slots], "weight": inputs["weight"], "offsets": inputs["offsets"]}
    expected = expected_results(LINEAR, copied, rows)
    for config in configs(LINEAR, problem):
        assert compare(LINEAR, problem, launched(LINEAR, problem, config, inputs), expected).passed


def test_the_products_are_those_of_each_expert_s_linear_layer():
    x, weight = torch.randn(10, 12, requires_grad=True), torch.randn(2, 8, 12, requires_grad=True)
    bias = torch.randn(2, 8, requires_grad=True)
    offsets = offsets_of([4, 6])["offsets"]
    y = torch.cat(
        [torch.nn.functional.linear(x[:4], weight[0], bias[0]), torch.nn.functional.linear(x[4:], weight[1], bias[1])]
    )
    dy = torch.randn_like(y)
    dx, dweight, dbias = torch.autograd.grad(y, (x, weight, bias), dy)
    x, weight, bias = x.detach(), weight.detach(), bias.detach()
    near = torch.testing.assert_close
    near(LINEAR.reference(x, weight, offsets, bias=bias, inner_first=False)["y"].float(), y.detach())
    near(LINEAR.reference(x, weight.mT, offsets, bias=bias, inner_first=True)["y"].float(), y.detach())
    near(LINEAR.reference(dy, weight, offsets, inner_first=True)["y"].float(), dx)
    of_weight = GRADIENT.reference(dy, x, offsets, a_gathered=False, b_gathered=False)["c"]
    near(of_weight.float(), dweight)
    near(GRADIENT.reference(x, dy, offsets, a_gathered=False, b_gathered=False)["c"].mT.float(), dweight)
    near(SUM.reference(dy, offsets, weighted=False)["partial"].float(), dbias)


@examples(20)
@given(data=st.data())
def test_every_row_has_exactly_one_place(data):
    """The places that the grid goes over, as blocks find them, against a list of each group's tiles."""
    import cuda.tile as ct

    def find(offsets, found, rows, experts: ConstInt, groups: ConstInt, turns: ConstInt, tile_m: ConstInt):
        place = ct.bid(0)
        group = group_at(offsets, place, tile_m, groups, turns)
        begin, end = rows_of(offsets, group, experts, rows)
        ct.store(found, (place, 0), ct.full((1, 1), group, ct.int32))
        ct.store(found, (place, 1), ct.full((1, 1), begin + (place - (begin // tile_m + group)) * tile_m, ct.int32))
        ct.store(found, (place, 2), ct.full((1, 1), end, ct.int32))

    counts = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=9))
    nobody, tile_m = data.draw(st.integers(0, 20)), data.draw(st.sampled_from([1, 4, 16]))
    experts, rows, groups = len(counts), sum(counts) + nobody, len(counts) + 1
    found = torch.full((rows // tile_m + groups, 3), -1, dtype=torch.int32)
    given_to = (offsets_of(counts)["offsets"], found, rows, experts, groups, (groups - 1).bit_length(), tile_m)
    interpreter.launch(find, (len(found),), given_to)
    begins = [0, *offsets_of(counts)["offsets"].tolist(), rows]
    wanted = {
        (group, first, begins[group + 1])
        for group in range(groups)
        for first in range(begins[group], begins[group + 1], tile_m)
    }
    taken = [tuple(line) for line in found.tolist() if line[1] < line[2]]
    assert len(taken) == len(set(taken))
    assert set(taken) == wanted


@pytest.mark.parametrize("name", OF_SUMS)
@pytest.mark.parametrize("on", [(), ("partial",)])
def test_variations_route_every_owned_row(name, on):
    for rows, experts in ((1, 1), (3, 8), (1000, 7), (64, 64)):
        problem = problem_of(LINEAR, rows, 8, 8, experts, *on)
        offsets = OF_SUMS[name](problem, torch.Generator(), "cpu")["offsets"]
        assert offsets.dtype == torch.int32
        assert offsets.shape == (experts,)
        ends = [0, *offsets.tolist()]
        assert ends == sorted(ends)
        assert ends[-1] == (held(problem) if name in VARIATIONS else held(problem) * 7 // 8)
        counts = [end - begin for begin, end in itertools.pairwise(ends)]
        if rows == 1000 and name == "zipf":
            assert counts == sorted(counts, reverse=True)
            assert counts[0] > 3 * counts[-1]
        if rows == 1000 and name == "one expert gets all":
            assert sorted(counts)[:-1] == [0] * (experts - 1)


@pytest.mark.parametrize("target", KNOWN, ids=lambda target: target.key)
@pytest.mark.parametrize("sizes", [GPT_OSS, QWEN3, (64, 64, 64, 256, "bfloat16"), (1, 80, 96, 4, "float16")], ids=str)
def test_spaces_are_small_and_hold_the_library_once(target, sizes):
    *sizes, dtype = sizes
    for spec, flags in ((LINEAR, ()), (LINEAR, FLAGS), (GRADIENT, ()), (GRADIENT, ("b_gathered",))):
        problem = problem_of(spec, *sizes, *flags, dtype=dtype)
        found = list(spec.space.candidates(problem, target))
        assert 2 <= len(found) <= 48
        assert sum(not is_tile(config) for config in found) == 1
        assert is_tile(first_tile(problem, target))
        assert is_tile(spec.default(problem, target)) == (dtype == "float16")


def test_persistent_blocks_take_as_many_sms_as_their_cluster():
    *sizes, dtype = QWEN3
    for spec in (LINEAR, GRADIENT):
        problem, target = problem_of(spec, *sizes, dtype=dtype), resolve("H200")
        config = first_tile(problem, target)
        assert spec.device(problem, config).grid(problem, 132) == 132
        assert spec.device(problem, config.but(num_ctas=2)).grid(problem, 132) == 66
        clusters = [c for c in spec.space.candidates(problem, target) if c["num_ctas"] == 2]
        assert {(256, 256), (256, 128)} <= {(c["tile_m"], c["tile_n"]) for c in clusters}


def test_sizes_that_torch_refuses_have_kernels_only():
    target = resolve("H200")
    for dtype, inner in (("bfloat16", 20), ("float32", 6)):
        problem = problem_of(LINEAR, 64, inner, 64, 4, dtype=dtype)
        assert all(is_tile(config) for config in LINEAR.space.candidates(problem, target))
        assert is_tile(LINEAR.default(problem, target))
    assert not is_tile(LINEAR.default(problem_of(LINEAR, 64, 8, 64, 4), target))


@each(SPECS)
def test_two_runs_and_two_grids_give_the_same_bits(spec):
    """Each element is summed by one block in one order, so neither the grid nor the order of blocks matters."""
    problem = problem_of(spec, 300, 70, 90, 3, dtype="bfloat16")
    inputs = inputs_of(spec, problem) | VARIATIONS["zipf"](problem, torch.Generator(), "cpu")
    first, *others = (launched(spec, problem, spec.generic(problem), inputs, blocks) for blocks in (1, 7, 7, 100))
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)
