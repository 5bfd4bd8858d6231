"""Cases on the CPU: torch's formulas equal the specs' references, and a wrong provider is caught before it is timed."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import providers
from benchmarks.cases import METRICS, in_batches, rms_norm_case, rope_case, small_cases, swiglu_case, training_cases
from benchmarks.formulas import swiglu
from benchmarks.fused_cases import (
    attention_case,
    cross_entropy_case,
    fused_add_rms_norm_case,
    fused_linear_cross_entropy_case,
    linear_case,
    qk_norm_rope_case,
)
from benchmarks.kernels import PRODUCTS, check, clone, entrant, rows_of, write_plan
from benchmarks.kernels import right_ones as right
from benchmarks.providers import LOADERS, OPS, OURS, Provider, load, one_line
from benchmarks.suite_cases import SUITE, suite_case
from benchmarks.suites import fixed_cases, model_cases, sweep_cases
from tilekern import ops
from tilekern.errors import InputError
from tilekern.tuning.measure.timing import Timing
from tilekern.tuning.plan.configs import config_named

TINY = [
    rms_norm_case(5, 24, "float32"),
    rms_norm_case(9, 64, "bfloat16"),
    swiglu_case(3, 40, "float32"),
    swiglu_case(7, 48, "bfloat16"),
    rope_case(2, 5, 3, 1, 16, "float32"),
    rope_case(1, 9, 4, 2, 32, "bfloat16"),
    in_batches(rms_norm_case(6, 24, "float32"), 2),
    in_batches(swiglu_case(8, 40, "bfloat16"), 4),
    fused_add_rms_norm_case(5, 24, "float32"),
    fused_add_rms_norm_case(9, 64, "bfloat16"),
    qk_norm_rope_case(2, 5, 3, 1, 16, "float32"),
    qk_norm_rope_case(1, 9, 4, 2, 32, "bfloat16"),
    cross_entropy_case(7, 40, "float32"),
    cross_entropy_case(5, 33, "bfloat16"),
    fused_linear_cross_entropy_case(7, 16, 40, "float32"),
    fused_linear_cross_entropy_case(5, 32, 33, "bfloat16"),
    attention_case(2, 9, 4, 2, 16, "float32"),
    attention_case(1, 12, 2, 2, 32, "bfloat16"),
    linear_case(5, 16, 24, "float32"),
    linear_case(7, 32, 40, "bfloat16"),
    *(
        suite_case(op, dtype, tokens=6, hidden=64, intermediate=48, vocabulary=40, heads=4, kv_heads=2, head_dim=16)
        for op in SUITE
        for dtype in ("float32", "bfloat16")
    ),
]


def attention(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


EAGER = Provider("torch 0", {**LOADERS["torch"]().calls, "attention": attention})


@pytest.mark.parametrize("case", TINY, ids=lambda case: f"{case.label} {case.dtype}")
def test_torchs_formula_equals_the_specs_reference_and_a_wrong_peer_is_noted_and_left_out(case):
    def twice(*given):
        outputs = EAGER.calls[case.op](*given)
        return tuple(2 * x for x in outputs) if isinstance(outputs, tuple) else 2 * outputs

    broken = dict.fromkeys(EAGER.calls, twice)
    tensors, notes = case.tensors("cpu"), []
    assert right(case, tensors, [EAGER, Provider("broken 1", broken), Provider("lacks it", {})], notes) == [EAGER]
    assert len(notes) == 1
    assert "broken 1 left out" in notes[0]


def test_a_peer_after_which_nothing_runs_on_the_gpu_is_named():
    def faulting(*_):
        raise torch.AcceleratorError("an illegal memory access was encountered")

    case, notes = swiglu_case(3, 40, "float32"), []
    peer = Provider("faulting 1", dict.fromkeys(EAGER.calls, faulting))
    with pytest.raises(InputError, match=r"swiglu 3x40: faulting 1 ends.*illegal memory access.*--providers"):
        right(case, case.tensors("cpu"), [EAGER, peer], notes)
    assert not notes


def test_tilekern_being_wrong_is_fatal():
    case = swiglu_case(3, 40, "float32")
    tensors = case.tensors("cpu")
    with pytest.raises(AssertionError, match="tilekern is wrong"):
        right(case, tensors, [Provider(OURS, {"swiglu": lambda gate, up: gate * up})], [])


@pytest.mark.filterwarnings("ignore::tilekern.errors.TilekernWarning")
@pytest.mark.parametrize(
    "case", [case for case in TINY if case.dtype == "float32" and hasattr(ops, case.op)], ids=lambda case: case.label
)
def test_tilekern_takes_the_arguments_of_every_op(case):
    tensors = case.tensors("cpu")
    ours = LOADERS[OURS]()
    assert set(ours.calls) == {op for op in OPS if hasattr(ops, op)}
    check(case, tensors, case.expected(tensors), ours)


def test_arguments_keep_their_strides_and_start_anew():
    case = rope_case(2, 5, 3, 1, 16, "float32")
    tensors = case.tensors("cpu")
    mine = clone(tensors)
    assert [x.stride() for x in mine.inputs] == [x.stride() for x in tensors.inputs]
    assert tensors.inputs[0].stride() == (5 * 3 * 16, 16, 3 * 16, 1)
    assert all(x.requires_grad and x.is_leaf for x in mine.inputs)
    assert torch.equal(tensors.constants[0][..., :8], tensors.constants[0][..., 8:])


@pytest.mark.parametrize("metric", METRICS)
def test_an_entrant_gives_the_same_each_time_although_it_overwrites_its_arguments(metric):
    def overwriting(gate, up):
        out = swiglu(gate, up)
        gate.data.zero_()
        return out

    case = swiglu_case(3, 40, "float32")
    runner = entrant(case, case.tensors("cpu"), Provider("rude 1", {"swiglu": overwriting}), metric)
    found = []
    for _ in range(2):
        runner.prepare()
        found.append([x.detach().clone() for x in runner.run()])
    assert all(map(torch.equal, *found))


def test_bytes_are_the_specs():
    case = swiglu_case(8192, 12288)
    matrix = 8192 * 12288 * 2
    assert [case.bytes_of(metric) for metric in METRICS] == [3 * matrix, 5 * matrix, 8 * matrix]
    assert len({case.label for case in training_cases()}) == 7
    assert {case.op for case in small_cases()} == {"rms_norm", "swiglu", "rope"}


def test_rows_can_be_in_batches_as_a_model_has_them():
    case = in_batches(rms_norm_case(6, 24, "float32"), 2)
    tensors = case.tensors("cpu")
    assert case.label == "rms_norm 2x3x24"
    assert [tuple(x.shape) for x in (*tensors.inputs, *tensors.slopes)] == [(2, 3, 24), (24,), (2, 3, 24)]
    assert [tuple(x.shape) for x in case.expected(tensors)] == [(2, 3, 24), (2, 3, 24), (24,)]
    assert [case.label for case in small_cases()] == [
        "rms_norm 16x4096", "swiglu 16x12288", "rms_norm 2x8x4096", "swiglu 2x8x12288", "rope 1x16 32+8x128",
    ]  # fmt: skip


def test_rows_hold_times_rates_and_shares_of_the_copy():
    case = swiglu_case(1000, 1000)  # moves 6 MB in the forward
    rows = rows_of(case, "forward", {"tilekern": Timing(50.0, 1.0, 60), "copy": Timing(45.0, 0.5, 60)})
    assert [(row.provider, row.metric, row.value, row.unit) for row in rows] == [
        ("tilekern", "forward", 50.0, "us"),
        ("tilekern", "forward_rate", 0.12, "TB/s"),
        ("tilekern", "forward_share_of_copy", 0.9, "1"),
        ("copy", "forward", 45.0, "us"),
        ("copy", "forward_rate", 0.1333, "TB/s"),
    ]


def test_an_op_bound_by_arithmetic_has_operations_a_second_and_no_copy():
    case = linear_case(1000, 1000, 1000)
    rows = rows_of(case, "forward_backward", {"tilekern": Timing(60.0, 0.6, 60)})
    assert [(row.metric, row.value, row.unit) for row in rows] == [
        ("forward_backward", 60.0, "us"),
        ("forward_backward_rate", 100.0, "TFLOP/s"),
    ]
    assert rows[1].spread == 1.0
    causal = attention_case(4, 4096, 32, 32)
    assert causal.flops_of("forward") == 4 * 4 * 32 * 4096 * 4096 * 128 // 2
    assert causal.flops_of("backward") / causal.flops_of("forward") == 2.5


def test_suites_hold_each_op_once_and_the_sizes_of_the_targets():
    assert {case.op for case in fixed_cases()} >= set(OPS) - set(SUITE)
    assert len({case.label for case in fixed_cases()}) == len(fixed_cases())
    qwen, llama = (model_cases(config_named(name)[1], 2048) for name in ("qwen3-8b", "llama-3-8b"))
    assert sorted(case.op for case in qwen) == sorted(OPS)
    assert {case.op for case in llama} == set(OPS) - {"qk_norm_rope"}
    assert "cross_entropy 2048x128256" in [case.label for case in llama]
    swept = sweep_cases(config_named("llama-3-8b")[1], [4096, 1024], ["attention", "linear"])
    assert [(tokens, case.op) for tokens, case in swept] == [
        (4096, "attention"), (4096, "linear"), (1024, "attention"), (1024, "linear"),
    ]  # fmt: skip


def test_the_documentation_names_the_ops_of_the_suite():
    page = Path(__file__).parents[2] / "docs" / "benchmarks.md"
    sentence = page.read_text(encoding="utf-8").partition("`--ops suite` stands for ")[2].partition(".")[0]
    assert re.findall(r"`(\w+)`", sentence) == list(SUITE)


def test_products_are_timed_beside_an_op_that_is_judged_by_them():
    case = suite_case("fused_linear_jsd", tokens=6, hidden=8, vocabulary=12)
    case.products(case.tensors("cpu"))
    rows = rows_of(case, "forward_backward", {"tilekern": Timing(55.0, 1, 60), PRODUCTS: Timing(50.0, 1, 60)})
    assert [(row.provider, row.value) for row in rows if row.metric == "products_time"] == [("tilekern", 1.1)]


@pytest.mark.parametrize(
    ("op", "given", "expected"),
    [
        ("linear_log_probs", ("h", "w", "ids"), ("h", "w", "ids", 1.0, -100, 1, True)),
        ("kl_div", ("x", "t"), ("x", "t", "batchmean", False, 1e-10)),
        ("jsd", ("x", "t"), ("x", "t", None, 0.5, -100)),
    ],
)  # fmt: skip
def test_ligers_functions_take_their_arguments_in_their_order(op, given, expected):
    """Signatures of Liger 0.8.5, all back ends'; its cuTile functions have no defaults."""
    calls = []

    def apply(*arguments):
        calls.append(arguments)
        return torch.ones(2), torch.ones(2)

    SUITE[op].call(apply)(*given)
    assert calls == [expected]


def test_ligers_poly_norm_has_a_bias_without_a_dimension_as_is_its_gradient():
    calls = []
    SUITE["poly_norm"].call(lambda *arguments: calls.append(arguments))("x", "weight", torch.zeros(1), 1e-6)
    assert (*calls[0][:2], calls[0][2].dim(), *calls[0][3:]) == ("x", "weight", 0, 1e-6, False)


def test_tilegyms_ops_take_and_give_what_the_formulas_do(monkeypatch):
    class Suite:
        def __getattr__(self, op):
            return lambda *given: (op, given)

        def fused_add_rms_norm(self, *given):
            return given, "total"

    monkeypatch.setattr(providers.importlib, "import_module", lambda _: Suite())
    monkeypatch.setattr(providers, "version_of", lambda _: "1.5.1")
    calls = LOADERS["tilegym"]().calls
    assert calls["fused_add_rms_norm"]("residual", "x", "w", 1e-6) == ("total", ("x", "residual", "w", 1e-6))
    assert calls["group_norm"]("x", "w", "b", 8, 2, 1e-6) == ("group_norm", ("x", 8, 2, "w", "b", 1e-6))
    for op in ("rms_norm", "swiglu", "rope", "cross_entropy", "fused_linear_cross_entropy", "jsd"):
        assert calls[op]("a", "b") == (op, ("a", "b"))
    others = LOADERS["tilegym-unsloth"]().calls
    assert others["layer_norm"]("x", "w", "b", 1e-6) == ("layernorm", ("x", "w", "b", 1e-6))
    op, (logits, target) = others["cross_entropy"](torch.zeros(6, 40), torch.zeros(6))
    assert (op, logits.shape, target.shape) == ("cross_entropy_loss", (1, 6, 40), (1, 6))


@pytest.mark.parametrize("name", ["trl", "trl-logits"])
def test_trl_gives_log_probabilities_and_entropies(name):
    case = suite_case("linear_log_probs", "float32", tokens=6, hidden=64, vocabulary=40)
    tensors = case.tensors("cpu")
    check(case, tensors, case.expected(tensors), LOADERS[name]())


def test_directions_are_timed_alone_where_the_gradient_is_not_made_with_the_loss():
    together = {case.op for case in TINY if case.metrics != METRICS}
    assert together == {"jsd", "tvd", "fused_linear_jsd", "fused_linear_cross_entropy"}


def turned(x, cos, sin):
    """Rotate in quack's layout: tokens before heads, angles of a half [tokens, head_dim / 2]."""
    low, high = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def layernorm_fwd(x, weight, bias, eps, *, return_rstd, return_mean):
    assert (weight.dtype, bias.dtype, return_rstd, return_mean) == (torch.float32, torch.float32, True, True)
    y, mean, rstd = torch.native_layer_norm(x.float(), x.shape[-1:], weight, bias, eps)
    return y.to(x.dtype), rstd, mean


def layernorm_bwd(x, weight, dout, rstd, mean):
    every, shape = [True] * 3, x.shape[-1:]
    dx, *others = torch.ops.aten.native_layer_norm_backward(
        dout.float(), x.float(), shape, mean, rstd, weight, weight, every
    )
    return dx.to(x.dtype), *others


@pytest.mark.parametrize(
    "case", [rope_case(2, 5, 3, 1, 16, "float32"), suite_case("layer_norm", tokens=6, hidden=64)], ids=lambda c: c.op
)
def test_quacks_functions_get_what_they_take(case, monkeypatch):
    parts = {"rmsnorm": {"rmsnorm": None, "layernorm_fwd": layernorm_fwd, "layernorm_bwd": layernorm_bwd}}
    parts |= {"rotary": {"apply_rotary_emb": turned}, "softmax": {"softmax": None}}
    parts |= {"cross_entropy": {"cross_entropy": None}, "linear_cross_entropy": {}}
    for name, functions in parts.items():
        monkeypatch.setitem(sys.modules, f"quack.{name}", SimpleNamespace(**functions))
    monkeypatch.setitem(sys.modules, "quack", SimpleNamespace(__path__=[]))
    monkeypatch.setattr(providers, "version_of", lambda _: "0.6.5")
    tensors = case.tensors("cpu")
    check(case, tensors, case.expected(tensors), LOADERS["quack"]())


class InShards(torch.autograd.Function):
    """As Liger and TileGym have it: the backward computes again, and adds gradients to the module's parameters."""

    @staticmethod
    def forward(ctx, fn, module, x):
        ctx.fn, ctx.module = fn, module
        ctx.save_for_backward(x)
        return torch.cat([fn(module, part) for part in x.chunk(2)])

    @staticmethod
    def backward(ctx, dy):
        dx = []
        for part, slope in zip(ctx.saved_tensors[0].detach().chunk(2), dy.chunk(2), strict=True):
            leaf = part.detach().requires_grad_()
            with torch.enable_grad():
                torch.autograd.backward(ctx.fn(ctx.module, leaf), slope)
            dx.append(leaf.grad)
        return None, None, torch.cat(dx)


def test_an_mlp_whose_gradients_go_to_a_module_gives_them_back():
    case = suite_case("tiled_swiglu", "float32", tokens=6, hidden=64, intermediate=48)
    tensors = case.tensors("cpu")
    call = providers.tiled_mlp(InShards.apply, swiglu)
    for _ in range(2):  # nothing is left of the first
        check(case, tensors, case.expected(tensors), Provider("tiled 1", {"tiled_swiglu": call}))


SMALL = {"tokens": 8, "hidden": 64, "intermediate": 48, "vocabulary": 40, "heads": 4, "kv_heads": 2, "head_dim": 16}


@pytest.mark.parametrize("op", [op for op in SUITE if hasattr(ops, op)])
def test_the_plan_of_a_case_is_what_its_op_asks_for(op, tmp_path):
    """Forward and backward, without a number of its tensors."""
    path = tmp_path / "plan.json"
    assert write_plan(path, [suite_case(op, **SMALL)], "H200") == []
    planned = {problem["kernel"] for problem in json.loads(path.read_text())["problems"]}
    if op in ("softmax", "dyt", "poly_norm", "group_norm", "layer_norm", "kl_div", "geglu", "sparsemax"):
        assert {f"{op}_forward", f"{op}_backward"} <= planned


def test_an_unknown_provider_is_named():
    with pytest.raises(InputError, match="nobody"):
        load(["nobody"], [])


def test_a_peer_that_is_not_there_is_noted(monkeypatch):
    def missing():
        raise ImportError("no module of that name\nreally")

    monkeypatch.setitem(LOADERS, "quack", missing)
    notes = []
    assert [provider.name.split()[0] for provider in load(["torch", "quack"], notes)] == ["torch"]
    assert notes == ["quack left out: ImportError: no module of that name really"]
    assert len(one_line(ValueError("x" * 1000))) == 300
