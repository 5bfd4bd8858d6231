"""Attention's backward: the formula against autograd, and the kernels on what is special to them."""

import itertools

import pytest
import torch
from spec_samples import interpret, launched, sized

from tilekern.compile.cubin import read_resources
from tilekern.compile.toolchain import compile_candidate, toolkit
from tilekern.kernels.attention import backward_problem as attention_backward_problem
from tilekern.kernels.attention import problem as attention_problem
from tilekern.kernels.attention.backward import DELTA, DKDV, DQ
from tilekern.spec import ALIGNED
from tilekern.spec.targets import INTERPRETED, resolve

SIZES = {"batch": 2, "queries": 100, "keys": 100, "heads": 2, "kv_heads": 1, "head_dim": 20}
FLAGS = ("causal", "windowed", "capped", "packed")
every_flag = pytest.mark.parametrize(
    "flags", [dict(zip(FLAGS, values, strict=True)) for values in itertools.product((False, True), repeat=4)], ids=str
)
both = pytest.mark.parametrize("spec", [DKDV, DQ], ids=lambda spec: spec.name)


def problem_of(spec, dtype="float32", flags=None, **sizes):
    return sized(spec, dtype, **SIZES | sizes).but(**(flags or {}))


def inputs_of(spec, problem, seed=0):
    return spec.inputs(problem, torch.Generator().manual_seed(seed), "cpu")


def small(spec, problem, **changes):
    """A config with tiles of 32 rows, so that a few hundred rows are many tiles."""
    return spec.generic(problem).but(tile_m=32, tile_n=32, **changes)


def outputs_of(spec, problem, inputs):
    """The outputs of a spec's small config for inputs that may be another spec's outputs."""
    config = spec.default(problem, INTERPRETED) if spec is DELTA else small(spec, problem)
    return launched(spec, problem, config, inputs)


@every_flag
@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (4, 9), (9, 4)])
def test_the_formula_is_what_autograd_says_of_the_forward(flags, queries, keys):
    problem = problem_of(DKDV, flags=flags, queries=queries, keys=keys)
    given = attention_problem.inputs(problem.but(sinks=False), torch.Generator().manual_seed(1), "cpu")
    leaves = [given[name].double().requires_grad_() for name in ("q", "k", "v")]
    given |= dict(zip(("q", "k", "v"), leaves, strict=True))
    made = attention_problem.formula(**given, **flags, sinks=False)
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


@both
@every_flag
def test_every_flag_over_many_tiles_and_tails(spec, flags):
    problem = problem_of(spec, "bfloat16", flags)
    check = interpret(spec, problem, small(spec, problem), inputs_of(spec, problem))
    assert check.passed, check.reason


@both
@every_flag
def test_queries_and_keys_that_differ_in_number(spec, flags):
    for queries, keys in ((1, 70), (33, 100), (100, 33), (70, 1)):
        problem = problem_of(spec, "float32", flags, batch=1 + flags["packed"], queries=queries, keys=keys)
        check = interpret(spec, problem, small(spec, problem), inputs_of(spec, problem))
        assert check.passed, (queries, keys, check.reason)


@both
@pytest.mark.parametrize("schedule", ["block", "persistent"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1), (3, 3), (4, 2)])
def test_groups_of_heads(spec, schedule, heads, kv_heads):
    problem = problem_of(spec, heads=heads, kv_heads=kv_heads, flags={"causal": True})
    check = interpret(spec, problem, small(spec, problem, schedule=schedule), inputs_of(spec, problem))
    assert check.passed, check.reason


@both
@pytest.mark.parametrize("head_dim", [16, 96, 128, 256])
def test_heads_of_any_size_by_the_default_config(spec, head_dim):
    problem = problem_of(spec, "bfloat16", {"causal": True}, batch=1, queries=200, keys=200, head_dim=head_dim)
    check = interpret(spec, problem, spec.default(problem, INTERPRETED), inputs_of(spec, problem))
    assert check.passed, check.reason


@both
@pytest.mark.parametrize("window", [1, 31, 32, 33, 1000])
@pytest.mark.parametrize("causal", [False, True])
def test_windows_around_the_size_of_a_tile(spec, window, causal):
    problem = problem_of(spec, flags={"causal": causal, "windowed": True})
    inputs = inputs_of(spec, problem)
    inputs = _consistent(problem, inputs | {"window": window})
    check = interpret(spec, problem, small(spec, problem), inputs)
    assert check.passed, check.reason


def _consistent(problem, inputs):
    """The inputs with the lse of their own window: another one's may be far from it."""
    flags = {name: problem[name] for name in FLAGS}
    given = {name: value for name, value in inputs.items() if name not in ("dout", "lse", "delta")}
    made = attention_problem.formula(**given, sink_logits=torch.zeros(1), **flags, sinks=False)
    return inputs | {"lse": made["lse"].float()}


def test_queries_that_see_no_key_get_and_give_nothing():
    problem = problem_of(DQ, flags={"causal": True}, queries=100, keys=60)
    inputs = inputs_of(DQ, problem)
    blind = slice(0, 40)
    assert inputs["lse"][:, :, blind].isneginf().all()
    assert (outputs_of(DQ, problem, inputs)["dq"][:, blind] == 0).all()
    full = outputs_of(DKDV, problem, inputs)
    inputs["dout"][:, blind], inputs["q"][:, blind] = 7.0, -3.0
    again = outputs_of(DKDV, problem, inputs)
    assert all(torch.equal(full[name], again[name]) for name in ("dk", "dv"))


@both
def test_sums_over_many_tiles_are_kept_in_float32(spec):
    """Of terms of one sign, whose sums rounded to bfloat16 after each tile would be off by percents."""
    sizes = {"queries": 16, "keys": 4096} if spec is DQ else {"queries": 4096, "keys": 16}
    problem = problem_of(spec, "bfloat16", batch=1, heads=1, kv_heads=1, head_dim=16, **sizes)
    inputs = inputs_of(spec, problem)
    inputs |= {name: inputs[name].abs() for name in ("q", "k", "v", "dout")}
    inputs = _consistent(problem, inputs | {"delta": torch.zeros_like(inputs["delta"])})
    check = interpret(spec, problem, small(spec, problem), inputs)
    assert check.passed, check.reason


@both
def test_a_packed_sequence_is_not_touched_by_the_nan_of_the_next(spec):
    problem = problem_of(spec, flags={"packed": True}, batch=3)
    inputs = inputs_of(spec, problem)
    last = inputs["query_starts"][-2]
    for name in ("q", "k", "v", "dout"):
        inputs[name][:, last:] = torch.nan
    for name in ("lse", "delta"):
        inputs[name][..., last:] = torch.nan
    check = interpret(spec, problem, small(spec, problem), inputs)
    assert check.passed, check.reason


def test_keys_that_no_query_sees_get_zeros():
    problem = problem_of(DKDV, flags={"causal": True, "windowed": True}, queries=10, keys=150)
    inputs = inputs_of(DKDV, problem)
    outputs = outputs_of(DKDV, problem, inputs)
    unseen = 150 - 10 - inputs["window"] + 1
    assert all((outputs[name][:, :unseen] == 0).all() for name in ("dk", "dv"))
    assert outputs["dv"][:, unseen:].abs().amin(-1).gt(0).all()


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_the_three_kernels_in_a_row_give_the_gradients_of_the_forward(sinks, packed):
    flags = {"causal": True, "windowed": False, "capped": True, "packed": packed}
    problem = problem_of(DKDV, flags=flags, queries=77, keys=77)
    given = attention_problem.inputs(problem.but(sinks=sinks), torch.Generator().manual_seed(2), "cpu")
    leaves = [given[name].double().requires_grad_() for name in ("q", "k", "v")]
    made = attention_problem.formula(**given | dict(zip(("q", "k", "v"), leaves, strict=True)), **flags, sinks=sinks)
    dout = torch.randn(made["out"].shape)
    expected = torch.autograd.grad(made["out"], leaves, dout.double())
    out = made["out"].detach().float()
    sizes = {"batch": out.shape[0], "queries": out.shape[1], "heads": SIZES["heads"], "head_dim": SIZES["head_dim"]}
    delta = outputs_of(DELTA, DELTA.problem(**sizes, dtype="float32"), {"out": out, "dout": dout})["delta"]
    inputs = given | {"dout": dout, "lse": made["lse"].detach().float(), "delta": delta}
    got = outputs_of(DQ, problem, inputs) | outputs_of(DKDV, problem, inputs)
    for name, gradient in zip(("dq", "dk", "dv"), expected, strict=True):
        torch.testing.assert_close(got[name].double(), gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")
@both
@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        ("sm_90", {"head_dim": 64}),
        ("sm_90", {"head_dim": 256}),
        ("sm_90", {"packed": True}),
        ("sm_100", {"packed": True}),
    ],
    ids=str,
)
@pytest.mark.share(8)
def test_default_configs_of_other_heads_and_packed_sequences_spill_nothing(spec, arch, changes):
    target = resolve(arch)
    sizes = {"batch": 1, "queries": 8192, "keys": 8192, "heads": 32, "kv_heads": 8, "head_dim": 128}
    problem = spec.bucketed(sized(spec, "bfloat16", **sizes).but(**{"causal": True, **changes}))
    made = compile_candidate(spec, problem, spec.default(problem, target), target, ALIGNED)
    assert read_resources(made.cubin, made.symbol).stack_bytes == 0
