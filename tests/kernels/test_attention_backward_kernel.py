"""Attention's backward: the formula against autograd, each kernel, and the spec of all kernels or cuDNN."""

import itertools
import math

import pytest
import torch
from spec_samples import assert_right, each, launched, plain_inputs, sized

from tilekern.kernels import spec_named
from tilekern.kernels.attention import apart as attention_apart
from tilekern.kernels.attention import backward_problem as attention_backward_problem
from tilekern.kernels.attention import cudnn as attention_cudnn
from tilekern.kernels.attention import problem as attention_problem
from tilekern.kernels.attention.backward import DKDV, DQ
from tilekern.kernels.attention.gradients import SPEC as GRADIENTS
from tilekern.kernels.attention.kept import room
from tilekern.runtime.dispatch import counters, plan_for
from tilekern.spec import Config, LibraryCall
from tilekern.spec.targets import INTERPRETED, KNOWN, resolve

SIZES = {"batch": 2, "queries": 100, "keys": 100, "heads": 2, "kv_heads": 1, "head_dim": 20}
FLAGS = ("causal", "windowed", "capped", "packed")
every_flag = pytest.mark.parametrize(
    "flags", [dict(zip(FLAGS, values, strict=True)) for values in itertools.product((False, True), repeat=4)], ids=str
)
FORWARD = spec_named("attention_forward")
of_each = each([DKDV, DQ, attention_apart.DKDV])
all_three = each([FORWARD, DKDV, DQ])


def problem_of(spec, dtype="float32", flags=None, **sizes):
    return sized(spec, dtype, **SIZES | sizes).but(**(flags or {}))


def small(spec, problem, **changes):
    """A config with tiles of 32 rows, so that a few hundred rows are many tiles."""
    return spec.generic(problem).but(tile_m=32, tile_n=32, **changes)


def small_is_right(spec, problem, inputs=None, **changes):
    assert_right(spec, problem, [small(spec, problem, **changes)], inputs or plain_inputs(spec, problem))


def outputs_of(spec, problem, inputs):
    return launched(spec, problem, small(spec, problem), inputs)


@every_flag
@pytest.mark.parametrize(("queries", "keys", "sinks"), [(4, 9, False), (9, 4, False), (7, 7, True)])
def test_gradient_formula_matches_autograd(flags, queries, keys, sinks):
    problem = problem_of(DKDV, flags=flags, queries=queries, keys=keys)
    given = attention_problem.inputs(problem.but(sinks=sinks), torch.Generator().manual_seed(1), "cpu")
    leaves = [given[name].double().requires_grad_() for name in ("q", "k", "v")]
    given |= dict(zip(("q", "k", "v"), leaves, strict=True))
    made = attention_problem.formula(**given, **flags, sinks=sinks)
    blind = made["lse"].isneginf()
    dout, dlse = torch.randn_like(made["out"]), torch.randn_like(made["lse"]).masked_fill(blind, 0)
    expected = torch.autograd.grad((made["out"], made["lse"].masked_fill(blind, 0)), leaves, (dout, dlse))
    delta = (made["out"] * dout).sum(-1).transpose(1, 2) - dlse
    del given["sink_logits"]
    given = {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    got = attention_backward_problem.gradients(
        **given, dout=dout, lse=made["lse"].detach(), delta=delta.detach(), **flags
    )
    for found, gradient in zip(got.values(), expected, strict=True):
        torch.testing.assert_close(found, gradient, rtol=1e-10, atol=1e-10)


@of_each
@every_flag
def test_every_flag_over_many_tiles_and_tails(spec, flags):
    problem = problem_of(spec, "bfloat16", flags)
    small_is_right(spec, problem)


@of_each
@every_flag
def test_queries_and_keys_that_differ_in_number(spec, flags):
    for queries, keys in ((1, 70), (33, 100), (100, 33), (70, 1)):
        problem = problem_of(spec, "float32", flags, batch=1 + flags["packed"], queries=queries, keys=keys)
        small_is_right(spec, problem)


@of_each
@pytest.mark.parametrize("schedule", ["block", "persistent"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1), (3, 3), (4, 2)])
def test_groups_of_heads(spec, schedule, heads, kv_heads):
    problem = problem_of(spec, heads=heads, kv_heads=kv_heads, flags={"causal": True})
    small_is_right(spec, problem, schedule=schedule)


@of_each
@pytest.mark.parametrize("head_dim", [16, 96, 128, 256])
def test_heads_of_any_size_by_the_default_config(spec, head_dim):
    problem = problem_of(spec, "bfloat16", {"causal": True}, batch=1, queries=200, keys=200, head_dim=head_dim)
    assert_right(spec, problem, [spec.default(problem, INTERPRETED)], plain_inputs(spec, problem))


@of_each
@pytest.mark.parametrize("window", [1, 31, 32, 33, 1000])
@pytest.mark.parametrize("causal", [False, True])
def test_windows_around_the_size_of_a_tile(spec, window, causal):
    problem = problem_of(spec, flags={"causal": causal, "windowed": True})
    small_is_right(spec, problem, _consistent(problem, plain_inputs(spec, problem) | {"window": window}))


def _consistent(problem, inputs):
    """The inputs with the lse of their own window: another one's may be far from it."""
    flags = {name: problem[name] for name in FLAGS}
    given = {name: value for name, value in inputs.items() if name not in ("dout", "lse", "delta")}
    made = attention_problem.formula(**given, sink_logits=torch.zeros(1), **flags, sinks=False)
    return inputs | {"lse": made["lse"].float()}


def test_queries_without_keys_have_no_gradient():
    problem = problem_of(DQ, flags={"causal": True}, queries=100, keys=60)
    inputs = plain_inputs(DQ, problem)
    blind = slice(0, 40)
    assert inputs["lse"][:, :, blind].isneginf().all()
    assert (outputs_of(DQ, problem, inputs)["dq"][:, blind] == 0).all()
    full = outputs_of(DKDV, problem, inputs)
    inputs["dout"][:, blind], inputs["q"][:, blind] = 7.0, -3.0
    again = outputs_of(DKDV, problem, inputs)
    assert all(torch.equal(full[name], again[name]) for name in ("dk", "dv"))


@all_three
def test_sums_over_many_tiles_are_kept_in_float32(spec):
    """Sum terms of one sign; rounding to bfloat16 after each tile would be off by percents."""
    sizes = {"queries": 4096, "keys": 16} if spec is DKDV else {"queries": 16, "keys": 4096}
    problem = problem_of(spec, "bfloat16", batch=1, heads=1, kv_heads=1, head_dim=16, **sizes)
    inputs = plain_inputs(spec, problem)
    if spec is FORWARD:
        inputs["v"] = inputs["v"].abs()
    else:
        inputs |= {name: inputs[name].abs() for name in ("q", "k", "v", "dout")}
        inputs = _consistent(problem, inputs | {"delta": torch.zeros_like(inputs["delta"])})
    small_is_right(spec, problem, inputs)


@all_three
def test_a_packed_sequence_is_not_touched_by_the_nan_of_the_next(spec):
    problem = problem_of(spec, flags={"packed": True}, batch=3)
    inputs = plain_inputs(spec, problem)
    last = inputs["query_starts"][-2]
    for name in inputs.keys() & {"q", "k", "v", "dout"}:
        inputs[name][:, last:] = torch.nan
    for name in inputs.keys() & {"lse", "delta"}:
        inputs[name][..., last:] = torch.nan
    small_is_right(spec, problem, inputs)


def test_keys_that_no_query_sees_get_zeros():
    problem = problem_of(DKDV, flags={"causal": True, "windowed": True}, queries=10, keys=150)
    inputs = plain_inputs(DKDV, problem)
    outputs = outputs_of(DKDV, problem, inputs)
    unseen = 150 - 10 - inputs["window"] + 1
    assert all((outputs[name][:, :unseen] == 0).all() for name in ("dk", "dv"))
    assert outputs["dv"][:, unseen:].abs().amin(-1).gt(0).all()


# As one spec.

KERNELS, KEPT, APART, CUDNN = (Config(implementation=name) for name in ("kernels", "kept", "apart", "cudnn"))
LARGE = {"batch": 1, "queries": 4096, "keys": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128}
SMALL = {"batch": 2, "queries": 37, "keys": 37, "heads": 2, "kv_heads": 1, "head_dim": 20}


def whole(dtype="bfloat16", sizes=None, **flags):
    given = {"causal": True, "deterministic": False} | flags
    return sized(GRADIENTS, dtype, **LARGE | (sizes or {})).but(**given)


def candidates(problem, target="H200"):
    return list(GRADIENTS.space.candidates(problem, resolve(target)))


@pytest.mark.parametrize(
    ("problem", "target"),
    [
        *((whole(causal=causal), name) for causal in (False, True) for name in ("H200", "B200", "A100", "RTX5090")),
        (whole(sizes={"keys": 5000}, causal=False), "H200"),
        (whole(sizes={"head_dim": 256}), "H200"),
    ],
    ids=str,
)
def test_cudnn_is_a_candidate_unless_deterministic(problem, target):
    assert candidates(problem, target) == [KERNELS, KEPT, APART, CUDNN]


@pytest.mark.parametrize("target", [target.name for target in KNOWN])
def test_deterministic_problems_exclude_cudnn(target):
    problem = whole(deterministic=True)
    assert candidates(problem, target) == [KERNELS, KEPT, APART]
    assert "changes from run to run" in GRADIENTS.space.violated(problem, CUDNN, resolve(target))


@pytest.mark.parametrize(
    "problem",
    [
        whole("float32"),
        whole(windowed=True),
        whole(capped=True),
        whole(packed=True),
        whole(sizes={"keys": 4097}),
        whole(sizes={"head_dim": 100}),
        whole(sizes={"head_dim": 512}),
        whole(sizes={"kv_heads": 5}),
    ],
    ids=lambda problem: problem.key,
)
def test_problems_that_cudnn_does_not_take(problem):
    assert CUDNN not in candidates(problem)
    assert GRADIENTS.space.violated(problem, CUDNN, resolve("H200")).startswith("cuDNN's attention takes half types")


def test_large_heads_need_a_newer_gpu():
    assert candidates(whole(sizes={"head_dim": 256}), "A100") == [KERNELS, KEPT, APART]


def test_the_interpreter_and_the_defaults_take_the_kernels():
    problem = whole()
    assert list(GRADIENTS.space.candidates(problem, INTERPRETED)) == [KERNELS, KEPT, APART]
    assert GRADIENTS.default(problem, resolve("B200")) == GRADIENTS.generic(problem) == KERNELS


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (whole(), KEPT),
        (whole(sizes={"kv_heads": 4}), APART),
        (whole(sizes={"kv_heads": 4, "batch": 2}), KEPT),
        # In eight pieces of one key head, and in pieces of one query head.
        (whole(sizes={"queries": 16384, "keys": 16384}), APART),
        (whole(sizes={"queries": 32768, "keys": 32768}), APART),
        (whole(sizes={"heads": 4, "kv_heads": 4}), KEPT),
        (whole(windowed=True), KERNELS),
        (whole("float32"), KERNELS),
    ],
    ids=lambda found: getattr(found, "key", None),
)
def test_the_default_of_hopper_fills_the_gpu(problem, expected):
    assert GRADIENTS.default(problem, resolve("H200")) == expected


def test_both_are_calls_without_an_artifact_that_take_the_same_inputs():
    made = [GRADIENTS.implement(whole(), config) for config in (KERNELS, KEPT, APART, CUDNN)]
    assert all(isinstance(found, LibraryCall) and found.inputs == attention_cudnn.BACKWARD_INPUTS for found in made)
    assert [found.composite for found in made] == [True, True, True, False]


@every_flag
def test_the_kernels_in_a_row_with_every_flag(flags):
    problem = whole("float32", SMALL, **flags)
    names = ("attention_delta", "attention_dkdv", "attention_dq")
    before = [counters(name).launches for name in names]
    assert_right(GRADIENTS, problem, [KERNELS], plain_inputs(GRADIENTS, problem))
    assert [counters(name).launches for name in names] == [n + 1 for n in before]


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (whole("float32"), [KERNELS]),
        (whole(windowed=True), [KERNELS, APART]),
        (whole(sizes={"kv_heads": 32}, windowed=True), [KERNELS]),
        # Parts of 32 heads of 128 have 1.1 GB at 32768 tokens.
        (whole(sizes={"queries": 32768, "keys": 32768}, windowed=True), [KERNELS, APART]),
        (whole(sizes={"queries": 65536, "keys": 65536}, windowed=True), [KERNELS]),
        (whole(sizes={"kv_heads": 32}, packed=True), [KERNELS, KEPT]),
        (whole(sizes={"kv_heads": 5}), [KERNELS]),
        # A key head's dS has 1.1 GB with four readers at 16384 tokens, 4.3 GB at 32768, and 1.1 GB for each reader.
        (whole(sizes={"queries": 16384, "keys": 16384}), [KERNELS, KEPT, APART]),
        (whole(sizes={"queries": 32768, "keys": 32768}), [KERNELS, APART]),
        (whole(sizes={"queries": 65536, "keys": 65536}), [KERNELS]),
        (whole(sizes={"queries": 32768, "keys": 32768, "kv_heads": 32}), [KERNELS, KEPT]),
    ],
    ids=lambda found: getattr(found, "key", None),
)
def test_what_keeps_the_score_gradients(problem, expected):
    problem = problem.but(deterministic=True)
    assert candidates(problem) == expected


GROUPED = SMALL | {"heads": 6, "kv_heads": 2}


@pytest.mark.parametrize("config", [KEPT, APART], ids=str)
@pytest.mark.parametrize("cut", [1, 2, 6], ids=["in one", "by key heads", "by query heads"])
@pytest.mark.parametrize(
    "flags",
    [
        dict(zip(("causal", "capped", "packed"), found, strict=True))
        for found in itertools.product((False, True), repeat=3)
    ],
    ids=str,
)
def test_score_gradients_are_kept_with_every_flag(config, cut, flags, monkeypatch):
    """dS has the room of the given part of its heads: a key head has three readers, which have parts of their own."""
    problem = whole("bfloat16", GROUPED, **flags)
    tokens = attention_problem.sizes(problem)["query_tokens"]
    given = (problem[name] for name in ("queries", "keys", "heads", "causal", "packed"))
    need = 2 * math.prod(room(problem["batch"], tokens, *given))
    monkeypatch.setattr("tilekern.kernels.attention.gradients.MOST_KEPT", need // cut)
    names = ["attention_dkdv_kept", "attention_dq_kept", *(["attention_sums"] if config is APART else [])]
    before = [counters(name).launches for name in names]
    assert_right(GRADIENTS, problem, [config], plain_inputs(GRADIENTS, problem))
    pieces = cut if config is APART else min(cut, 2)
    assert [counters(name).launches - n for name, n in zip(names, before, strict=True)] == [
        *[pieces] * 2, *([min(cut, 2)] if config is APART else [])
    ]  # fmt: skip


@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_through_a_window_each_query_head_may_have_parts(causal, packed, capped):
    problem = whole("bfloat16", GROUPED, causal=causal, windowed=True, packed=packed, capped=capped)
    names = ("attention_dkdv_apart", "attention_dq", "attention_sums")
    before = [counters(name).launches for name in names]
    assert_right(GRADIENTS, problem, [APART], plain_inputs(GRADIENTS, problem))
    assert [counters(name).launches for name in names] == [n + 1 for n in before]


@pytest.mark.parametrize("config", [KEPT, APART], ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 300), (300, 1), (129, 260), (260, 129), (390, 390)])
@pytest.mark.parametrize("causal", [False, True])
def test_score_gradients_are_kept_on_odd_lengths(config, queries, keys, causal):
    """Lines that two rows of units share must hold both, whatever the lengths."""
    problem = whole("bfloat16", GROUPED | {"batch": 1, "queries": queries, "keys": keys}, causal=causal)
    assert_right(GRADIENTS, problem, [config], plain_inputs(GRADIENTS, problem))


@pytest.mark.parametrize("config", [KEPT, APART], ids=str)
def test_pieces_without_a_plan_run_the_kernels_that_compute_scores_twice(config):
    problem = whole("bfloat16", GROUPED, deterministic=True)
    inputs = plain_inputs(GRADIENTS, problem)

    def without_kept(spec, *sizes):
        return None if spec.name.endswith("_kept") else plan_for(spec, *sizes)

    runs = []
    for way, plans in ((config, without_kept), (KERNELS, plan_for)):
        call = GRADIENTS.implement(problem, way)
        runs.append(call.bound(plans)(*(inputs[name] for name in call.inputs)))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_kept_score_gradients_give_the_bits_of_those_computed_again():
    """dS is rounded alike, and added up in the order of the keys: edges last, as here, where they are the last keys."""
    problem = whole("bfloat16", SMALL | {"queries": 200, "keys": 200}, deterministic=True)
    inputs = plain_inputs(GRADIENTS, problem)
    runs = []
    for config in (KERNELS, KEPT, KEPT):
        call = GRADIENTS.implement(problem, config)
        runs.append(call.bound(plan_for)(*(inputs[name] for name in call.inputs)))
    assert all(torch.equal(a, b) for a, b in zip(*runs[1:], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1:], runs[1][1:], strict=True)), "dk and dv"


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 70), (70, 1), (33, 100), (100, 33), (129, 129)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernels_in_a_row_on_odd_lengths(queries, keys, dtype):
    problem = whole(dtype, SMALL | {"queries": queries, "keys": keys})
    assert_right(GRADIENTS, problem, [KERNELS], plain_inputs(GRADIENTS, problem))


def test_the_kernels_in_a_row_repeat_bit_by_bit():
    problem = whole("bfloat16", SMALL, deterministic=True)
    inputs = plain_inputs(GRADIENTS, problem)
    call = GRADIENTS.implement(problem, KERNELS)
    runs = [call.bound(plan_for)(*(inputs[name] for name in call.inputs)) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
