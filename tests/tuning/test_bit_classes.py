"""Candidates that give a row the same bits are of one class; those whose rows depend on others are of none."""

import functools
from dataclasses import replace

import cuda.tile as ct
import pytest
import torch
from spec_samples import launch_arguments

from tilekern import interpreter
from tilekern.kernels import own_specs, spec_named
from tilekern.kernels.attention.problem import keys_apart
from tilekern.kernels.tiles import ConstInt
from tilekern.runtime.rows import has_rows
from tilekern.spec import Implementation, LibraryCall
from tilekern.spec.bits import agree, joined, sizes_of_class, text_of
from tilekern.spec.targets import INTERPRETED
from tilekern.tuning.sweep.folder import Sweep
from tilekern.tuning.verify import adversarial
from tilekern.tuning.verify.axes import Axes
from tilekern.tuning.verify.battery import Battery
from tilekern.tuning.verify.bit_classes import placements
from tilekern.tuning.verify.telling import adds


def interpret(spec, config, problem, inputs, outputs):
    implementation = spec.implement(problem, config)
    if isinstance(implementation, LibraryCall):
        return implementation.call(*(inputs[name] for name in implementation.inputs))
    grid = (implementation.grid(problem, INTERPRETED.sm_count),)
    return interpreter.launch(implementation.function, grid, launch_arguments(implementation, inputs, outputs))


def class_of(spec, problem, config=None):
    """The bit class by the interpreter; empty if placements differ, None if results are not by rows."""
    config = config or spec.default(problem, INTERPRETED)
    battery = Battery(spec, problem, INTERPRETED.sm_count, "cpu")
    run = functools.partial(interpret, spec, config)
    found = [battery.digests(placements, config, run) for placements in battery.placements()]
    return text_of(found) if found else None


def swiglu(rows, **more):
    return spec_named("swiglu_forward").problem(**{"rows": rows, "columns": 40, "dtype": "bfloat16"} | more)


def matmul(rows, *on, dtype="float32"):
    spec = spec_named("matmul")
    flags = {d.name: d.name in on for d in spec.dimensions if d.kind == "flag"}
    return spec.problem(rows=rows, inner=160, columns=48, dtype=dtype, **flags)


def attention(batch, queries, keys, *, kernel="attention_forward", **on):
    spec = spec_named(kernel)
    flags = {d.name: on.get(d.name, d.name == "causal") for d in spec.dimensions if d.kind == "flag"}
    sizes = {"batch": batch, "queries": queries, "keys": keys, "heads": 2, "kv_heads": 1, "head_dim": 16}
    return spec.problem(**sizes, dtype="float32", **flags)


def test_all_buckets_share_a_class():
    spec = spec_named("swiglu_forward")
    found = {class_of(spec, swiglu(rows)) for rows in (1, 2, 8, 16, 64)}
    assert len(found) == 1
    assert len(found.pop()) == 16
    assert class_of(spec, swiglu(8, columns=48)) != class_of(spec, swiglu(8))


def test_sums_in_another_order_are_another_class():
    spec = spec_named("matmul")
    first = spec.default(matmul(32, "b_transposed"), INTERPRETED)
    by_depth = {
        depth: {class_of(spec, matmul(rows, "b_transposed"), first.but(tile_k=depth)) for rows in (2, 32)}
        for depth in (32, 128)
    }
    assert all(len(found) == 1 and "" not in found for found in by_depth.values())
    assert by_depth[32] != by_depth[128]


def test_a_library_has_a_class_too():
    """The CPU's products differ with the number of rows, or not: a class is what it is found to be."""
    spec = spec_named("matmul")
    library = spec.default(matmul(32, "b_transposed"), INTERPRETED).but(implementation="cublas")
    assert class_of(spec, matmul(32, "b_transposed"), library) is not None


@pytest.mark.parametrize(
    ("kernel", "problem"),
    [
        ("matmul", matmul(32, "a_transposed")),
        ("rms_norm_backward", None),
        ("group_norm_forward", None),
        ("attention_forward", None),
        ("attention_dkdv", attention(1, 64, 64, kernel="attention_dkdv")),
        ("attention_backward", attention(1, 64, 64, kernel="attention_backward", deterministic=True)),
    ],
)
def test_results_without_a_row_for_each_row_have_no_class(kernel, problem):
    """Gradients of weights, parts of sums, groups with weights of their own, sums over ranks, keys that come later."""
    spec = spec_named(kernel)
    sizes = {"bucketed": 8, "exact": 16, "dtype": "float32", "flag": False}
    problem = problem or spec.problem(**{d.name: sizes[d.kind] for d in spec.dimensions})
    assert class_of(spec, problem) is None


@ct.kernel
def centred(
    gate, up, y, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, persistent: ConstInt, bounded: ConstInt
):
    """Subtracts the mean of its tile's rows: a row depends on its neighbours."""
    index = (ct.bid(0), 0)
    x = ct.load(gate, index, (8, 64), padding_mode=ct.PaddingMode.ZERO).astype(ct.float32)
    ct.store(y, index, (x - ct.sum(x, axis=0, keepdims=True) / 8.0).astype(y.dtype))


def test_a_row_that_depends_on_its_neighbours_is_of_no_class():
    spec, problem = spec_named("swiglu_forward"), swiglu(32)
    config = spec.default(problem, INTERPRETED)
    right = spec.implement(problem, config)
    wrong = Implementation(centred, right.parameters, right.constants, lambda real, _: -(-real["rows"] // 8))
    assert class_of(replace(spec, implement=lambda *_: wrong), problem, config) == ""


ROTATION = {"heads": 4, "kv_heads": 2, "head_dim": 16, "dtype": "bfloat16", "angle_dtype": "float32"}


@pytest.mark.parametrize(
    ("kernel", "more"),
    [("rope", {"full": False, "inverse": False}), ("qk_norm_rope_forward", {"weight_dtype": "bfloat16"})],
)
def test_tokens_of_several_sequences_are_rows(kernel, more):
    spec = spec_named(kernel)
    sizes = [(1, 1), (1, 64), (4, 1), (2, 8)]
    found = {class_of(spec, spec.problem(batch=batch, tokens=tokens, **ROTATION, **more)) for batch, tokens in sizes}
    assert len(found) == 1
    assert found.pop()


def sums(bits):
    """The digests of sums by the number of keys; each stands beside one of log-sum-exps."""
    found = dict(part.split(":") for part in bits.split())
    summed = [sight for sight in found if not sight.endswith("lse")]
    assert sorted(found) == sorted([*summed, *(f"{sight}lse" for sight in summed)])
    return [f"{sight}:{found[sight]}" for sight in summed]


def sights(bits, mark=""):
    found = [one.partition(":")[0].rstrip("w") for one in sums(bits)]
    return [int(sight.rstrip("+")) for sight in found if sight.endswith("+") == bool(mark)]


@pytest.mark.parametrize("on", [{}, {"windowed": True}, {"sinks": True, "capped": True}])
def test_queries_have_a_digest_for_each_number_of_keys(on):
    spec = spec_named("attention_forward")
    config = spec.default(attention(1, 256, 256, **on), INTERPRETED)
    whole, short, last, chunk = (
        class_of(spec, attention(*sizes, **on), config)
        for sizes in ((2, 256, 256), (3, 64, 64), (4, 1, 128), (1, 32, 128))
    )
    assert sights(whole) == [1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256]
    assert sights(whole, "+") == [8, 16, 32, 64, 128, 256]
    assert sums(short) == sums(whole)[:16], "up to 64 keys"
    assert sights(last) == [65, 128], "the least and the most keys of the bucket"
    assert sights(chunk) == [64, 65, 128]
    assert not sights(last, "+")
    assert not sights(chunk, "+"), "half of a bucket"
    assert set(last.split()) < set(chunk.split()) < set(whole.split())
    assert agree(whole, last)
    assert sums(joined(short, last)) == [*sums(whole)[:16], *sums(last)]


@pytest.mark.parametrize("keys", [1, 2, 8, 2048, 8192])
def test_a_decoded_token_has_rows_to_compare_whatever_its_context(keys):
    """Of its bucket's least and largest number of keys; tokens of a sequence begin anew after 4096."""
    spec = spec_named("attention_forward")
    placed = [one for [one] in placements(spec, attention(2, 1, keys), "cpu")]
    assert [one.rows for one in placed] == [[f"{keys}"], [f"{keys}"], [f"{keys // 2 + 1}"]]
    k = placed[0].case.inputs["k"]
    assert k.shape[1] == keys
    assert torch.equal(k[:, 4096:], k[:, : max(0, keys - 4096)])


@pytest.mark.parametrize("on", [{"packed": True}, {"windowed": True}, {"packed": True, "windowed": True}])
def test_a_row_is_the_same_packed_and_in_a_window_that_shows_all(on):
    """After more keys than the window it is another row."""
    spec = spec_named("attention_forward")
    config = spec.default(attention(1, 256, 256), INTERPRETED)
    plain = class_of(spec, attention(1, 256, 256), config)
    found = sums(class_of(spec, attention(3, 256, 256, **on), config))
    assert found[:-2] == sums(plain)[:-2]
    assert (found[-2:] == sums(plain)[-2:]) == (not on.get("windowed")), "the window is 200"
    alone = {name: class_of(spec, attention(2, 1, 1024, **more), config) for name, more in (("on", on), ("off", {}))}
    assert (alone["on"] == alone["off"]) == (not on.get("windowed"))
    assert alone["on"].count("w:") == alone["on"].count("wlse:") == 2 * on.get("windowed", False)


def test_keys_that_are_added_in_other_steps_are_another_class():
    spec, problem = spec_named("attention_forward"), attention(1, 256, 256)
    config = spec.default(problem, INTERPRETED)
    others = (config.but(tile_n=tile) for tile in (16, 32, 64) if tile != config["tile_n"])
    found = [class_of(spec, problem, one) for one in (config, *others)]
    assert all(found)
    assert len({sums(one)[-1] for one in found}) > 1


def cached(keys, kv_heads=2, **on):
    spec = spec_named("decode_attention")
    flags = {d.name: on.get(d.name, False) for d in spec.dimensions if d.kind == "flag"}
    sizes = {"kv_heads": kv_heads, "keys": keys, "page_size": on.get("page_size", 1), "group": 2, "head_dim": 16}
    return spec.problem(**sizes, dtype="bfloat16", **flags)


@pytest.mark.parametrize(
    "on",
    [{}, {"padded": True}, {"windowed": True}, {"sinks": True, "capped": True}, {"paged": True, "page_size": 128}],
    ids=str,
)
def test_a_token_after_a_cache_is_of_the_class_of_training_in_tiles_that_are_summed_apart(on):
    """By one block and by one for each tile; from the first key on, behind padding, in pages, behind a window."""
    training, decoding = spec_named("attention_forward"), spec_named("decode_attention")
    flags = {name: on.get(name, False) for name in ("windowed", "sinks", "capped")}
    whole = attention(2, 256, 256, **flags).but(dtype="bfloat16")
    apart = {"apart": True, "tile_n": keys_apart(whole)}
    right = class_of(training, whole, training.default(whole, INTERPRETED).but(**apart))
    of_training = dict(part.split(":") for part in right.split())
    ways = ((256, 2, 0, "tile"), (256, 2, 0, "block"), (256, 2, 1, "block"), (3, 12, 1, "block"))
    for keys, kv_heads, splits, schedule in ways:
        problem = cached(keys, kv_heads, **on)
        config = decoding.default(problem, INTERPRETED).but(splits=splits, schedule=schedule, **apart)
        found = class_of(decoding, problem, config)
        assert dict(part.split(":") for part in found.split()).items() <= of_training.items()
        assert found.startswith("1:")
        assert keys < 256 or f"{256}{'w' * on.get('windowed', False)}:" in found
    assert not agree(right, class_of(training, whole, training.default(whole, INTERPRETED)))


def test_keys_come_in_their_order_whatever_a_window_cuts_for_the_other_queries_of_a_tile():
    """Query 511 sees keys from 312 on: alone it cuts the tile from 256 on, with its 127 neighbours two more are cut."""
    training = spec_named("attention_forward")
    many, one = (attention(1, queries, 512, windowed=True).but(dtype="bfloat16") for queries in (512, 1))
    for apart in (False, True):
        config = training.default(many, INTERPRETED).but(tile_m=128, tile_n=64, apart=apart)
        of_many, of_one = (
            dict(part.split(":") for part in class_of(training, problem, config).split()) for problem in (many, one)
        )
        assert of_many["512w"] == of_one["512w"]


@pytest.mark.parametrize("on", [[], ["biased"]], ids=str)
def test_few_rows_are_of_the_class_of_many(on):
    """The tile's sums are added up in the order of the inner dimension in both, in each number of terms a step."""
    many, few = spec_named("matmul"), spec_named("skinny_linear")
    layer = matmul(64, "b_transposed", *on)
    right = class_of(many, layer)
    flags = {d.name: d.name in on for d in few.dimensions if d.kind == "flag"}
    found = []
    for rows in (1, 8, 64):
        problem = few.problem(rows=rows, inner=160, columns=48, dtype="float32", **flags)
        assert sizes_of_class(few, problem) == sizes_of_class(many, layer)
        depth = many.default(layer, INTERPRETED)["tile_k"]
        found.append(class_of(few, problem, few.default(problem, INTERPRETED).but(tile_k=depth)))
    assert set(found) == {right}
    depth = {"tile_k": many.default(layer, INTERPRETED)["tile_k"]}
    for kind in ("silu", "gelu_tanh"):
        gate = few.problem(rows=8, inner=160, columns=48, dtype="float32", **flags | {"gated": True, kind: True})
        assert sizes_of_class(few, gate)[0] == "skinny_linear"
        rounded = gate.but(rounded=True)
        assert (sizes_of_class(few, rounded) == sizes_of_class(many, layer)) == (not on)
        if on:
            continue
        assert class_of(few, rounded, few.default(rounded, INTERPRETED).but(**depth)) == right
        assert class_of(few, rounded, few.default(rounded, INTERPRETED).but(tile_k=32)) != right


def test_key_heads_are_no_size_of_a_class():
    """Their groups of query heads are: rows of one matrix."""
    spec, sizes = spec_named("attention_forward"), {"heads": 6, "kv_heads": 3}
    config = spec.default(attention(1, 16, 16), INTERPRETED)
    assert class_of(spec, attention(1, 16, 16), config) == class_of(spec, attention(2, 16, 16).but(**sizes), config)
    assert not agree(*(class_of(spec, attention(1, 16, 16).but(**sizes | more), config) for more in ({}, {"heads": 9})))
    uneven = class_of(spec, attention(1, 16, 16).but(heads=5, kv_heads=2), config)
    assert sights(uneven) == [1, 2, 3, 4, 5, 8, 9, 16]


@pytest.mark.parametrize("splits", [1, 2])
def test_a_kernel_for_decoding_that_does_not_sum_tiles_apart_is_of_no_class(splits):
    """It adds up weights across threads, or joins parts that were rounded elsewhere than in training."""
    spec, problem = spec_named("decode_attention"), cached(256)
    config = spec.default(problem, INTERPRETED).but(splits=1, apart=True, tile_n=128)
    assert class_of(spec, problem, config)
    assert class_of(spec, problem, config.but(splits=splits, apart=False)) == ""


@pytest.mark.parametrize("seed", range(12))
def test_whether_a_kernel_adds_does_not_depend_on_the_draw(seed, monkeypatch):
    """Of seeds 6 and 7 no two elements, changed by 1, changed one and the same rounded result."""
    spec = spec_named("fused_add_rms_norm_forward")
    problem = spec.problem(rows=8, columns=4096, dtype="bfloat16", weight_dtype="bfloat16")
    monkeypatch.setattr(adversarial, "SEED", seed)
    axes = Axes.of(spec, problem, "cpu", ("rows",))
    assert adds(spec, problem, axes, adversarial.drawn(spec, problem, "cpu"))


def test_configs_for_bits_are_tried_where_a_problem_needs_a_class(tmp_path, h200):
    problems = [("attention_forward", attention(1, n, n).but(dtype="bfloat16")) for n in (64, 128)]
    sweep = Sweep(tmp_path)
    sweep.begin(h200, "", problems, invariant=problems[:1])
    with_class, without = ({item.config for item in sweep.candidates(*named)} for named in problems)
    assert {config for config in with_class if config.get("apart")} == with_class - without
    assert len(with_class) > len(without) > 0


def summed_by(width):
    """A norm that adds up squares by threads of so many elements, one after the other, and then the threads' sums."""

    def run(problem, inputs, outputs):
        outputs["y"].copy_(normed(inputs["x"], inputs["weight"], inputs["eps"], width)[1])

    return run


def normed(x, weight, eps, width):
    """Return rows that are normed so, in float32 and as they are rounded before the weights."""
    squares = x.float().square().unflatten(-1, (-1, width))
    for axis in (-1, -1):
        first, *rest = squares.unbind(axis)
        squares = functools.reduce(torch.add, rest, first)
    wide = x.float() * torch.rsqrt(squares / x.shape[-1] + eps)[..., None]
    return wide * weight.float(), wide.to(x.dtype) * weight


def test_a_norm_that_adds_up_in_another_order_is_of_another_class():
    """Most rows have the same bits, and those that differ are rounded alike but for an element or two."""
    spec, widths, found = spec_named("rms_norm_forward"), (4, 8, 32), {}
    for rows in (1, 64, 4096):
        problem = spec.problem(rows=rows, columns=256, dtype="bfloat16", weight_dtype="bfloat16")
        battery, config = Battery(spec, problem, INTERPRETED.sm_count, "cpu"), spec.default(problem, INTERPRETED)
        placed = list(battery.placements())
        for width in widths:
            found[rows, width] = text_of(battery.digests(one, config, summed_by(width)) for one in placed)
    for width in widths:
        assert found[1, width] == found[64, width] == found[4096, width] != ""
    assert len({found[1, width] for width in widths}) == 3
    assert len({found[1, width].split()[0] for width in widths}) == 1, "rows that are not chosen do not tell"


def test_each_head_tells_how_its_sum_is_added_up():
    """On an H200 a key head had other threads than a query head: 1 of 500,000 elements of drawn rows was another."""
    spec = spec_named("qk_norm_rope_forward")
    sizes = {"tokens": 1, "batch": 64, "heads": 2, "kv_heads": 2, "head_dim": 64}
    dtypes = dict.fromkeys(("dtype", "weight_dtype", "angle_dtype"), "bfloat16")
    problem = spec.problem(**sizes, **dtypes)
    battery, config = Battery(spec, problem, INTERPRETED.sm_count, "cpu"), spec.default(problem, INTERPRETED)
    placed = list(battery.placements())

    def by(*widths):
        """The class of the kernel with such widths for each head of q, then of k."""

        def run(problem, inputs, outputs):
            for n, name in enumerate("qk"):
                x, weight = inputs[name], inputs[f"{name}_weight"]
                heads = [
                    normed(x[:, :, head], weight, inputs["eps"], widths[2 * n + head])[0] for head in range(x.shape[2])
                ]
                wide = torch.stack(heads, 2)
                c, s = (inputs[angle].float()[:, :, None, : x.shape[3] // 2] for angle in ("cos", "sin"))
                one, other = wide.chunk(2, -1)
                outputs[f"{name}_out"].copy_(torch.cat((one * c - other * s, other * c + one * s), -1))

        return text_of(battery.digests(one, config, run) for one in placed)

    found = [by(4, 4, 4, 4), by(4, 8, 4, 4), by(4, 4, 8, 4), by(4, 4, 4, 8)]
    assert "" not in found
    assert len(set(found)) == 4


def telling(spec, problem):
    """The inputs of the first placement of rows."""
    [[placed], *_] = placements(spec, problem, "cpu")
    return placed.case.inputs


def grouped(rows, *on, experts=3):
    spec = spec_named("grouped_linear")
    flags = {d.name: d.name in on for d in spec.dimensions if d.kind == "flag"}
    return spec.problem(rows=rows, inner=40, columns=24, experts=experts, dtype="float32", **flags)


@pytest.mark.parametrize("on", [(), ("biased",)], ids=str)
@pytest.mark.parametrize(
    ("spec", "names"),
    [("matmul", ("a", "b")), ("skinny_linear", ("x", "weight")), ("grouped_linear", ("x", "weight"))],
)
def test_terms_of_products_cancel_so_that_results_are_their_rounding(spec, names, on):
    """With a bias those of half of the columns, which has none."""
    few = {d.name: d.name in on for d in spec_named("skinny_linear").dimensions if d.kind == "flag"}
    problem = {
        "matmul": matmul(64, "b_transposed", *on),
        "skinny_linear": spec_named("skinny_linear").problem(rows=64, inner=160, columns=48, dtype="float32", **few),
        "grouped_linear": grouped(64, *on),
    }[spec]
    given = telling(spec_named(spec), problem)
    x, w = (given[name].double() for name in names)
    products = (x @ w.mT).abs() / (x.abs() @ w.mT.abs())
    half = products.shape[-1] // 2
    assert products[..., :half].max() < 1e-9
    assert (products[..., half:].max() < 1e-9) == (not on)
    if on:
        assert not given["bias"][..., :half].any()
        assert given["bias"][..., half:].all()


def combined(tokens, *on, choices=3):
    spec = spec_named("experts_combine")
    flags = {d.name: d.name in on for d in spec.dimensions if d.kind == "flag"}
    sizes = {"tokens": tokens, "choices": choices, "columns": 40}
    return spec.problem(**sizes, dtype="bfloat16", weight_dtype="float32", **flags)


@pytest.mark.parametrize(
    "problems",
    [
        [grouped(rows) for rows in (1, 8, 128)],
        [grouped(rows, "gathered", "biased", "partial", "inner_first") for rows in (1, 4, 8, 64)],
        [grouped(rows, "biased", experts=1) for rows in (2, 16)],
        [combined(tokens, "weighted", "biased") for tokens in (1, 2, 64)],
        [combined(tokens, choices=1) for tokens in (4, 16)],
    ],
)
def test_a_row_of_an_expert_does_not_depend_on_who_shares_it(problems):
    spec = spec_named("experts_combine" if "choices" in problems[0] else "grouped_linear")
    found = {class_of(spec, problem) for problem in problems}
    assert len(found) == 1
    assert len(found.pop()) == 16


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("on", ["", "gathered"])
@pytest.mark.parametrize(
    "wrong",
    [
        lambda _, offsets: 1e-3 * offsets.diff(prepend=offsets[:1] * 0).max(),
        lambda y, _: 1e-3 * torch.arange(len(y))[:, None],
        lambda y, _: 0 * y.sum(),
    ],
    ids=["rows of an expert", "place", "another row"],
)
def test_a_row_that_depends_on_who_shares_its_expert_is_of_no_class(on, rows, wrong):
    spec, problem = spec_named("grouped_linear"), grouped(rows, *on.split())
    config = spec.default(problem, INTERPRETED)
    right = spec.implement(problem, config.but(implementation="torch"))

    def call(*given):
        offsets = given[2]
        y = spec.reference(*given, inner_first=False)["y"].float()
        return (y + wrong(y, offsets),)

    found = class_of(replace(spec, implement=lambda *_: LibraryCall(call, right.inputs)), problem, config)
    assert (found == "") == (rows == 64), "a row alone has no others"


@pytest.mark.parametrize("by_rank", [False, True])
def test_a_sum_in_the_order_of_ranks_is_of_the_class_only_if_it_is_that_of_choices(by_rank):
    """Ranks depend on other tokens: here the sum starts with what a rank's parity says."""
    spec, problem = spec_named("experts_combine"), combined(64, "weighted")
    config = spec.default(problem, INTERPRETED)

    def call(x, ranks, experts, weights, bias, total):
        rows = x[ranks.long()].float() * weights[..., None]
        rows = rows.where((experts[ranks.long()] < total)[..., None], 0.0)
        first = (ranks[:, :1] % 2 if by_rank else ranks[:, :1] * 0)[..., None]
        forth = rows[:, 0] + rows[:, 1] + rows[:, 2]
        back = rows[:, 2] + rows[:, 1] + rows[:, 0]
        return (torch.where(first[:, 0] > 0, back, forth),)

    names = tuple(array.name for array in spec.implement(problem, config).parameters if array.name != "y")
    found = class_of(replace(spec, implement=lambda *_: LibraryCall(call, names)), problem, config)
    assert (found == "") == by_rank


def test_attention_to_later_keys_has_no_class():
    assert class_of(spec_named("attention_forward"), attention(1, 64, 64, causal=False)) is None


def test_classes_agree_where_both_have_a_digest():
    assert text_of([{"16": "a", "128": "b"}, {"128": "b", "1024w": "c"}]) == "16:a 128:b 1024w:c"
    assert text_of([{"": "a"}, {"": "a"}]) == "a"
    assert text_of([{"": "a"}, {"": "b"}]) == ""
    assert agree("16:a 128:b", "128:b 1024:c")
    assert agree("16:a", "128:b")
    assert not agree("16:a 128:b", "128:c")
    assert not agree("a", "b")
    assert text_of([{"16": "a"}, {"16": "a", "128": ""}]) == ""
    assert joined("16:a 16lse:b", "128w:c 128wlse:d") == "16:a 16lse:b 128w:c 128wlse:d"
    assert joined("16:a", "128:b") == "16:a 128:b"


def test_each_kernel_with_rows_of_tokens_has_a_class():
    """A new kernel has one, or is a sum, or is named here with what docs/same-bits.md says; no other is judged."""
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 16, "queries": 16, "keys": 16}
    values = {"bucketed": 8, "exact": 16, "flag": False, "dtype": "float32"}
    without = set()
    for spec in own_specs():
        given = {d.name: sizes.get(d.name, d.name == "causal" or values[d.kind]) for d in spec.dimensions}
        is_judged = any(True for _ in placements(spec, spec.problem(**given), "cpu"))
        assert has_rows(spec.name) or not is_judged
        if has_rows(spec.name) and not is_judged:
            without.add(spec.name)
    assert without == {"append_to_cache", "group_norm_forward"}
