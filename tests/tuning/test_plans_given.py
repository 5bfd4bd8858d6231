"""Plans that no model is stepped for: files of a trace, the wanted list, calls of ops, and several of them at once."""

import json

import pytest
import torch

import tilekern
from tilekern import cache
from tilekern.errors import InputError
from tilekern.kernels import all_specs, spec_named
from tilekern.ops import __all__ as ops
from tilekern.spec.targets import resolve
from tilekern.tuning import cli
from tilekern.tuning.options import PLAN_OPTIONS, PlanRequest
from tilekern.tuning.plan.choosing import plan_of, plan_of_file, plan_of_problem, plan_of_wanted, with_parts

H200, B200 = resolve("H200"), resolve("B200")
LOSS = spec_named("fused_linear_cross_entropy").problem(rows=32768, hidden=64, vocabulary=151936, dtype="bfloat16")
SWIGLU = spec_named("swiglu_forward").problem(rows=64, columns=512, dtype="bfloat16")


@pytest.fixture
def plan(tmp_path):
    """A file that a trace wrote, and its problems."""
    path = tmp_path / "plan.json"
    with tilekern.trace(path, gpu="H200") as found:
        x, weight = torch.zeros(64, 512, device="meta", requires_grad=True), torch.ones(512, device="meta")
        tilekern.ops.rms_norm(x, weight).sum().backward()
    return path, tuple(found.problems)


def requested(**changes):
    return PlanRequest.of(dict.fromkeys(PLAN_OPTIONS) | {"models": (), "plans": (), "problems": ()} | changes)


def kernels(problems):
    return {kernel for kernel, _ in problems}


def test_a_trace_s_file_is_a_plan(plan, tmp_path):
    path, problems = plan
    assert plan_of_file(path, H200).problems == problems
    assert plan_of(requested(models=(str(path),)), H200, tmp_path).problems == problems
    assert plan_of(requested(plans=(str(path),)), H200, tmp_path).problems == problems


def test_dimensions_in_another_order_are_the_same_problem(plan):
    path, problems = plan
    path.write_text(json.dumps(json.loads(path.read_text()), sort_keys=True))
    found = plan_of_file(path, H200)
    assert [problem.key for _, problem in found.problems] == [problem.key for _, problem in problems]
    assert found.problems == problems


def test_a_plan_is_for_the_gpu_that_it_was_traced_for(plan):
    with pytest.raises(InputError, match=r"plan\.json was traced for H200, not B200; pass --gpu H200, or trace"):
        plan_of_file(plan[0], B200)


def test_a_plan_in_the_place_of_a_model_has_its_own_sizes(plan, tmp_path):
    with pytest.raises(InputError, match="--tokens describes the steps of a model"):
        plan_of(requested(models=(str(plan[0]),), tokens="64"), H200, tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "does not exist; give a file that tilekern.trace wrote"),
        ("{", "cannot be read"),
        ('{"format": 99, "problems": []}', "is not a plan of this version of tilekern"),
        ('{"format": 1, "problems": [{}]}', "is damaged"),
    ],
)
def test_a_file_that_is_not_a_plan_is_named(tmp_path, text, words):
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=words):
        plan_of_file(path, H200)


def test_a_plan_of_another_version_is_named(plan):
    path = plan[0]
    path.write_text(path.read_text().replace("rms_norm_forward", "norm"))
    with pytest.raises(InputError, match="names a problem of norm that this version of tilekern does not have"):
        plan_of_file(path, H200)


def test_what_jobs_wanted_is_planned_with_the_parts_of_composites(tmp_path):
    for kernel, problem, target in (
        ("fused_linear_cross_entropy", LOSS, H200),
        ("swiglu_forward", SWIGLU.but(rows=50), H200),
        ("swiglu_forward", SWIGLU, B200),
    ):
        assert cache.note_wanted(tmp_path, kernel, dict(problem), target.describe(), "a test")
    found = plan_of_wanted(tmp_path, H200)
    assert found.name == "wanted"
    assert set(found.problems[:2]) == {("fused_linear_cross_entropy", LOSS), ("swiglu_forward", SWIGLU)}
    assert kernels(found.problems[2:]) == {"cross_entropy_fused", "matmul"}
    assert plan_of(requested(plans=("wanted",)), H200, tmp_path).problems == found.problems
    with pytest.raises(InputError, match="nothing is wanted for A10 in"):
        plan_of_wanted(tmp_path, resolve("A10"))


def test_problems_that_are_not_composites_have_no_parts():
    assert with_parts([("swiglu_forward", SWIGLU)], H200) == [("swiglu_forward", SWIGLU)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rms_norm rows=8192,columns=4096,dtype=bfloat16", {"rms_norm_forward", "rms_norm_backward", "column_sum"}),
        ("swiglu rows=64,columns=512,dtype=float16", {"swiglu_forward", "swiglu_backward"}),
        ("rope tokens=64,batch=1,heads=4,kv_heads=2,head_dim=64,dtype=bfloat16", {"rope"}),
        (
            "attention batch=1,queries=64,keys=64,heads=4,kv_heads=2,head_dim=64,causal=True,dtype=bfloat16",
            {
                *(f"attention_{name}" for name in ("forward", "backward", "delta", "dkdv", "dq")),
                *(f"attention_{name}" for name in ("dkdv_kept", "dq_kept", "sums")),
            },
        ),
        (
            "cross_entropy rows=64,vocabulary=512,dtype=bfloat16",
            {"cross_entropy_forward", "cross_entropy_backward", "labels"},
        ),
        (
            "fused_linear_cross_entropy rows=64,hidden=64,vocabulary=512,dtype=bfloat16",
            {"fused_linear_cross_entropy", "cross_entropy_fused", "matmul", "scale", "labels"},
        ),
        ("matmul rows=64,inner=64,columns=64,b_transposed=True,dtype=bfloat16", {"matmul"}),
        ("adamw rows=64,columns=64,dtype=float32", {"adamw"}),
        (
            "grouped_linear rows=64,inner=32,columns=64,experts=4,gathered=True,biased=True,dtype=bfloat16",
            {"grouped_linear", "grouped_weight_gradient", "grouped_sum", "column_sum"},
        ),
        ("grouped_linear rows=64,inner=32,columns=64,experts=4,inner_first=True,dtype=bfloat16", {"grouped_linear"}),
        ("attention_forward batch=1,queries=8,keys=8,heads=1,kv_heads=1,head_dim=16,windowed=True,dtype=float32",
         {"attention_forward"}),
    ],
)  # fmt: skip
def test_a_named_problem_is_a_call_of_the_op_or_of_the_kernel(text, expected):
    found = plan_of_problem(text, H200)
    assert kernels(found.problems) == expected
    assert found.name == text


def test_what_is_left_out_is_like_the_rest_or_off():
    found = dict(plan_of_problem("rms_norm rows=8192,columns=4096,dtype=float16", H200).problems)
    assert found["rms_norm_forward"]["weight_dtype"] == "float16"
    assert not dict(plan_of_problem("matmul rows=64,inner=64,columns=64,dtype=float16", H200).problems)["matmul"][
        "silu"
    ]


def test_every_op_that_is_called_on_what_its_kernel_takes_can_be_named():
    losses = {"cross_entropy", "fused_linear_cross_entropy"}
    served = losses | {"fused_add_rms_norm", "attention", "qk_norm_rope", "rms_norm", "rope"}
    assert served | {"swiglu"} <= set(ops)
    for name in served | {"swiglu"}:
        spec = all_specs().get(f"{name}_forward") or spec_named(name)
        sizes = {"exact": 64, "bucketed": 64, "flag": False, "dtype": "bfloat16"}
        text = ",".join(f"{d.name}={sizes[d.kind]}" for d in spec.dimensions)
        assert len(plan_of_problem(f"{name} {text}", H200).problems) >= 2, name


def test_every_kernel_can_be_named():
    """One of an op without a gradient too, whose name may be the op's."""
    for name, spec in all_specs().items():
        sizes = {"exact": 64, "bucketed": 64, "flag": False, "dtype": "bfloat16", "pairs": 16}
        text = ",".join(f"{d.name}={sizes.get(d.name, sizes[d.kind])}" for d in spec.dimensions)
        target = B200 if name.startswith("mxfp8_") else H200
        assert name in kernels(plan_of_problem(f"{name} {text}", target).problems), name


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fly rows=1", "unknown op or kernel 'fly'; known: .*rms_norm"),
        ("", "unknown op or kernel ''"),
        ("rmsnorm rows=1", "unknown op or kernel 'rmsnorm'; did you mean rms_norm\\? A kernel of your own"),
        ("rms_norm", "is not a problem key"),
        ("rms_norm rows", "is not a problem key"),
        ("rms_norm rows=64,columns=64", "expected the dimensions rows, columns, dtype, weight_dtype"),
        ("rms_norm rows=0,columns=64,dtype=bfloat16", "rows must be a whole number from 1 to"),
        (f"rms_norm rows={10**18},columns=64,dtype=bfloat16", f"rows must be a whole number from 1 to {10**18 - 1}"),
        (f"rms_norm rows={10**17},columns=640,dtype=bfloat16", "no tensor can be so large: .*sizes="),
        ("rms_norm rows=64,columns=64,dtype=int8", "unknown dtype 'int8'; known: bfloat16, float16, float32, and bf16"),
        (
            "attention batch=1,queries=8,keys=8,heads=1,kv_heads=1,head_dim=16,windowed=True,dtype=float32",
            "a call of attention cannot be made of these sizes; name the kernel, attention_forward",
        ),
    ],
)
def test_a_problem_that_cannot_be_is_named(text, words):
    with pytest.raises(InputError, match=words):
        plan_of_problem(text, H200)


def test_several_plans_are_one(plan, tmp_path):
    text = "swiglu rows=64,columns=512,dtype=bfloat16"
    found = plan_of(requested(plans=(str(plan[0]), str(plan[0])), problems=(text,)), H200, tmp_path)
    assert found.problems == (*plan[1], *plan_of_problem(text, H200).problems)
    assert found.name == f"{plan[0]}, {plan[0]}, {text}"
    models = plan_of(requested(models=(str(plan[0]), str(plan[0]))), H200, tmp_path)
    assert (models.name, models.problems) == (f"{plan[0]}, {plan[0]}", tuple(plan[1]))


def test_a_request_without_a_model_or_plan_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"name a model: a preset such as qwen3-8b, .*; else give --plan or --problem"):
        plan_of(requested(), H200, tmp_path)


def test_the_command_line_takes_them(plan, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TILEKERN_CACHE_DIR", str(tmp_path / "cache"))
    arguments = ["--gpu", "H200", "--plan", str(plan[0]), "--problem", "swiglu rows=64,columns=512,dtype=bfloat16"]
    assert cli.main([*arguments, "--dry-run", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["problems"]
    with pytest.raises(SystemExit) as ended:
        cli.main(["preflight", *arguments, "--json"])
    assert ended.value.code == 3
    asked = json.loads(capsys.readouterr().out)["problems"]
    names = {"rms_norm_forward", "rms_norm_backward", "column_sum", "swiglu_forward", "swiglu_backward"}
    assert {item["kernel"] for item in planned} == {item["kernel"] for item in asked} == names
    assert cli.main([*arguments, "--tokens", "64", "--dry-run"]) == 2
    assert "--tokens describes the steps of a model" in capsys.readouterr().err
