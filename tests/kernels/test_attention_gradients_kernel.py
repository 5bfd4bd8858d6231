"""Attention's backward as one spec: who may compute it, and the kernels in a row on sizes that no tile divides."""

import itertools

import pytest
import torch
from spec_samples import interpret, sized

from tilekern.kernels.attention import cudnn as attention_cudnn
from tilekern.kernels.attention.gradients import SPEC, reference
from tilekern.runtime.dispatch import counters, plan_for
from tilekern.spec import Config, LibraryCall
from tilekern.spec.targets import INTERPRETED, KNOWN, resolve

KERNELS, CUDNN = Config(implementation="kernels"), Config(implementation="cudnn")
SIZES = {"batch": 1, "queries": 4096, "keys": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128}
FLAGS = ("causal", "windowed", "capped", "packed")
SMALL = {"batch": 2, "queries": 37, "keys": 37, "heads": 2, "kv_heads": 1, "head_dim": 20}


def problem_of(dtype="bfloat16", sizes=None, **flags):
    given = {"causal": True, "deterministic": False} | flags
    return sized(SPEC, dtype, **SIZES | (sizes or {})).but(**given)


def candidates(problem, target="H200"):
    return list(SPEC.space.candidates(problem, resolve(target)))


@pytest.mark.parametrize("target", ["H200", "B200", "A100", "RTX5090"])
@pytest.mark.parametrize("causal", [True, False])
def test_both_candidates_where_dq_need_not_repeat(target, causal):
    assert candidates(problem_of(causal=causal), target) == [KERNELS, CUDNN]


@pytest.mark.parametrize("target", [target.name for target in KNOWN])
def test_what_must_repeat_is_never_cudnn_s(target):
    problem = problem_of(deterministic=True)
    assert candidates(problem, target) == [KERNELS]
    assert "changes from run to run" in SPEC.space.violated(problem, CUDNN, resolve(target))


@pytest.mark.parametrize(
    "problem",
    [
        problem_of("float32"),
        problem_of(windowed=True),
        problem_of(capped=True),
        problem_of(packed=True),
        problem_of(sizes={"keys": 4097}),
        problem_of(sizes={"head_dim": 100}),
        problem_of(sizes={"head_dim": 512}),
        problem_of(sizes={"kv_heads": 5}),
    ],
    ids=lambda problem: problem.key,
)
def test_what_cudnn_does_not_compute_is_the_kernels(problem):
    assert candidates(problem) == [KERNELS]
    assert SPEC.space.violated(problem, CUDNN, resolve("H200")).startswith("cuDNN's attention takes half types")


def test_queries_and_keys_may_differ_for_cudnn_where_no_query_is_later_than_another():
    assert candidates(problem_of(sizes={"keys": 5000}, causal=False)) == [KERNELS, CUDNN]


def test_large_heads_need_a_newer_gpu():
    problem = problem_of(sizes={"head_dim": 256})
    assert candidates(problem, "H200") == [KERNELS, CUDNN]
    assert candidates(problem, "A100") == [KERNELS]


def test_the_interpreter_and_the_defaults_take_the_kernels():
    problem = problem_of()
    assert list(SPEC.space.candidates(problem, INTERPRETED)) == [KERNELS]
    assert SPEC.default(problem, resolve("H200")) == SPEC.generic(problem) == KERNELS


def test_both_are_calls_without_an_artifact_that_take_the_same_inputs():
    made = [SPEC.implement(problem_of(), config) for config in (KERNELS, CUDNN)]
    assert all(isinstance(found, LibraryCall) and found.inputs == attention_cudnn.BACKWARD_INPUTS for found in made)
    assert [found.composite for found in made] == [True, False]


@pytest.mark.parametrize(
    "flags", [dict(zip(FLAGS, values, strict=True)) for values in itertools.product((False, True), repeat=4)], ids=str
)
def test_the_kernels_in_a_row_with_every_flag(flags):
    problem = problem_of("float32", SMALL, **flags)
    before = [counters(name).launches for name in ("attention_delta", "attention_dkdv", "attention_dq")]
    check = interpret(SPEC, problem, KERNELS, SPEC.inputs(problem, torch.Generator().manual_seed(0), "cpu"))
    assert check.passed, check.reason
    after = [counters(name).launches for name in ("attention_delta", "attention_dkdv", "attention_dq")]
    assert after == [n + 1 for n in before]


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 70), (70, 1), (33, 100), (100, 33), (129, 129)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernels_in_a_row_on_odd_lengths(queries, keys, dtype):
    problem = problem_of(dtype, SMALL | {"queries": queries, "keys": keys})
    check = interpret(SPEC, problem, KERNELS, SPEC.inputs(problem, torch.Generator().manual_seed(0), "cpu"))
    assert check.passed, check.reason


def test_the_kernels_in_a_row_repeat_bit_by_bit():
    problem = problem_of("bfloat16", SMALL, deterministic=True)
    inputs = SPEC.inputs(problem, torch.Generator().manual_seed(0), "cpu")
    call = SPEC.implement(problem, KERNELS)
    runs = [call.bound(plan_for)(*(inputs[name] for name in call.inputs)) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_the_reference_is_what_autograd_says():
    q, k, v = (torch.randn(1, 9, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.3
    scores = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
    dout, starts = torch.randn_like(out), torch.zeros(1, dtype=torch.int32)
    expected = torch.autograd.grad(out, (q, k, v), dout)
    flags = dict.fromkeys(FLAGS, False) | {"causal": True}
    found = reference(
        q=q.detach(), k=k.detach(), v=v.detach(), out=out.detach(), dout=dout, lse=scores.logsumexp(-1).detach(),
        query_starts=starts, key_starts=starts, most_queries=9, most_keys=9, scale=0.3, softcap=1.0, window=1, **flags,
    )  # fmt: skip
    for gradient, wanted in zip(found.values(), expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-12)
