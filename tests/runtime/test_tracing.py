"""A trace on its own: what it notes, what it answers with, and the file that it writes."""

import json

import pytest
import torch

import tilekern
from tilekern.errors import InputError
from tilekern.kernels import spec_named
from tilekern.kernels.composites.head import split
from tilekern.ops import fused_linear_cross_entropy, gated_mlp, rms_norm, swiglu
from tilekern.runtime import dispatch
from tilekern.runtime.recorder import Trace, ordinary_values, tracing
from tilekern.spec import bucket
from tilekern.spec.targets import resolve

H200 = resolve("H200")
COLUMNS = 512


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.delenv("TILEKERN_INTERPRET", raising=False)
    dispatch.forget()
    yield
    dispatch.forget()


def norm(rows, device="meta", dtype=torch.bfloat16):
    x = torch.zeros(rows, COLUMNS, device=device, dtype=dtype, requires_grad=True)
    rms_norm(x, torch.ones(COLUMNS, device=device, dtype=dtype, requires_grad=True)).sum().backward()
    return x


def loss(rows, vocabulary=151936, dtype=torch.bfloat16, device="meta"):
    hidden = torch.zeros(rows, 64, device=device, dtype=dtype, requires_grad=True)
    head = torch.zeros(vocabulary, 64, device=device, dtype=dtype, requires_grad=True)
    fused_linear_cross_entropy(hidden, head, torch.zeros(rows, device=device, dtype=torch.long)).backward()


def of(kernel, problems):
    return [problem for name, problem in problems if name == kernel]


def test_an_op_on_meta_is_noted_at_its_bucket_and_launches_nothing():
    before = tilekern.stats()
    with tilekern.trace(gpu="H200") as found:
        x = norm(3000)
    assert x.grad.shape == x.shape
    forward = spec_named("rms_norm_forward")
    sizes = {"rows": 4096, "columns": COLUMNS, "dtype": "bfloat16", "weight_dtype": "bfloat16"}
    assert of("rms_norm_forward", found.asked) == [forward.problem(**sizes)]
    assert [kernel for kernel, _ in found.asked] == ["rms_norm_forward", "rms_norm_backward", "column_sum"]
    assert tilekern.stats() == before


def test_a_problem_is_dispensable_until_a_call_needs_it():
    wanted = spec_named("swiglu_forward"), torch.device("meta"), 64, 48, torch.bfloat16
    with tilekern.trace(gpu="H200") as found:
        assert dispatch.tuned_plan_for(*wanted) is not None
        assert found.dispensable == list(found.asked) != []
        dispatch.plan_for(*wanted)
        dispatch.tuned_plan_for(*wanted)
    assert (found.dispensable, len(found.asked)) == ([], 1)


def test_the_innermost_patch_or_the_outermost_op_is_noted_as_asker():
    """An op asks for the kernels of others: ``gated_mlp`` for SwiGLU's, which stand in for an MLP here."""

    def stand_in(x):
        return gated_mlp(x, weight, weight, weight)

    def around(x):
        norm(8)
        return stand_in(x)

    x, weight = torch.zeros(8, 16, device="meta"), torch.zeros(16, 16, device="meta", requires_grad=True)
    found = Trace(H200)
    with tracing(found):
        stand_in(x).sum().backward()
    assert {name for names in found.askers.values() for name in names} == {"gated_mlp"}
    found = Trace(H200)
    found.patches = {stand_in.__code__: "swiglu", around.__code__: "layer"}
    with tracing(found):
        norm(64)
        around(x)
    assert {kernel: names for (kernel, problem), names in found.askers.items() if problem.get("rows") == 8} == {
        "swiglu_forward": {"swiglu"}, "swiglu_backward_remake": {"swiglu"}, "rms_norm_forward": {"layer"},
        "rms_norm_backward": {"layer"},
    }  # fmt: skip
    assert {name for named in found.asked for name in found.askers[named]} == {"swiglu", "layer", "rms_norm"}


def test_sums_are_traced_for_the_grids_of_all_configs():
    with tilekern.trace(gpu="H200") as found:
        norm(8192)
    spec = spec_named("rms_norm_backward")
    (problem,) = of(spec.name, found.asked)
    grids = {spec.device(problem, c).grid(problem, H200.sm_count) for c in spec.space.candidates(problem, H200)}
    assert {sums["rows"] for sums in of("column_sum", found.problems)} == set(map(bucket, grids))
    assert len(of("column_sum", found.asked)) == 1
    default = spec.device(problem, spec.default(problem, H200)).grid(problem, H200.sm_count)
    assert of("column_sum", found.asked)[0]["rows"] == bucket(default)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_composites_are_traced_config_by_config(dtype):
    """In float16 the loss comes from another kernel before its gradients: it is planned for each chunk as well."""
    with tilekern.trace(gpu="H200") as found:
        loss(32768, dtype=dtype)
    spec = spec_named("fused_linear_cross_entropy")
    (problem,) = of(spec.name, found.asked)
    parts = {
        c: {bucket(p.stop - p.start) for p in split(32768, c["chunk"])} for c in spec.space.candidates(problem, H200)
    }
    default = parts[spec.default(problem, H200)]
    assert default < set().union(*parts.values())
    kernels = ["cross_entropy_fused", *(["cross_entropy_forward"] if dtype == torch.float16 else [])]
    for kernel in kernels:
        assert {part["rows"] for part in of(kernel, found.problems)} == set().union(*parts.values())
        assert {part["rows"] for part in of(kernel, found.asked)} == default
    assert of("matmul", found.asked) == [], "the default multiplies by cuBLAS"
    assert {p["accumulated"] for p in of("matmul", found.others)} == {True, False}


def test_the_options_of_a_loss_reach_the_parts_of_all_configs():
    with tilekern.trace(gpu="H200") as found:
        hidden, head = (torch.zeros(n, 64, device="meta", requires_grad=True) for n in (32768, 151936))
        target = torch.zeros(32768, device="meta", dtype=torch.long)
        fused_linear_cross_entropy(hidden, head, target, softcap=30.0).backward()
    assert {part["capped"] for part in of("cross_entropy_fused", found.problems)} == {True}


def test_a_problem_is_taken_apart_without_a_call():
    found, spec = Trace(H200), spec_named("fused_linear_cross_entropy")
    with tracing(found):
        found.take_apart(spec, spec.problem(rows=32768, hidden=64, vocabulary=151936, dtype="bfloat16"))
    with tilekern.trace(gpu="H200") as called:
        loss(32768)
    parts = {named for named in called.problems if named[0] in ("cross_entropy_fused", "matmul")}
    assert set(found.others) == parts
    assert not found.asked


def test_a_call_that_no_kernel_serves_is_counted_by_the_trace_alone():
    before = tilekern.stats()
    with tilekern.trace(gpu="H200") as found:
        gate = torch.zeros(0, 8, device="meta")
        swiglu(gate, gate)
    assert dict(found.fallbacks) == {"swiglu_forward": 1}
    assert tilekern.stats() == before
    assert not found.problems


def test_without_a_trace_meta_tensors_run_torch():
    assert dispatch.plan_for(spec_named("swiglu_forward"), torch.device("meta"), 4, 8, torch.bfloat16) is None


def test_real_tensors_are_of_no_interest_unless_asked(monkeypatch):
    monkeypatch.setenv("TILEKERN_INTERPRET", "1")
    with tilekern.trace(gpu="H200") as found:
        norm(4, "cpu")
    assert not found.problems


def test_real_tensors_run_by_their_own_plans_and_are_noted(monkeypatch):
    """The interpreter stands for a GPU; it has been asked for the same before, which a trace must see all the same."""
    monkeypatch.setenv("TILEKERN_INTERPRET", "1")
    monkeypatch.setattr(dispatch, "INTERPRETED", H200)
    norm(40, "cpu")
    launches = tilekern.stats()["rms_norm_backward"]["launches"]
    with tilekern.trace(gpu="H200", real=True) as real:
        x = norm(40, "cpu")
        loss(300, vocabulary=700, device="cpu")
    assert torch.isfinite(x.grad).all()
    assert tilekern.stats()["rms_norm_backward"]["launches"] == launches + 1
    with tilekern.trace(gpu="H200") as meta:
        norm(40)
        loss(300, vocabulary=700)
    assert set(real.asked) == set(meta.asked)
    assert set(real.problems) == set(meta.problems)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_grouped_products_have_a_shape_in_every_dtype(dtype):
    x, slope = (torch.empty(64, columns, dtype=dtype, device="meta") for columns in (32, 48))
    weight, offsets = (
        torch.empty(4, 32, 48, dtype=dtype, device="meta"),
        torch.empty(4, dtype=torch.int32, device="meta"),
    )
    with ordinary_values():
        assert torch._grouped_mm(x, weight, offs=offsets).shape == (64, 48)
        assert torch._grouped_mm(x.t(), slope, offs=offsets).shape == (4, 32, 48)
        assert torch._grouped_mm(x.t(), slope, offs=offsets).dtype == dtype


def test_questions_about_values_are_answered_as_for_an_ordinary_batch():
    mask = torch.ones(2, 3, device="meta", dtype=torch.bool)
    with tilekern.trace(gpu="H200"):
        assert mask.all()
        assert mask.sum() == mask.numel()
        assert not mask.any(), "nothing is out of the ordinary"
        assert not bool(mask.sum().ne(0))
        with pytest.raises(RuntimeError, match="meta"):
            mask.sum().item()
    with pytest.raises(RuntimeError, match="meta"):
        bool(mask.all())


def test_one_trace_at_a_time():
    with (
        tilekern.trace(gpu="H200"),
        pytest.raises(InputError, match="a trace runs already in this process"),
        tilekern.trace(gpu="H200"),
    ):
        pass
    with tilekern.trace(gpu="H200"):
        pass


def test_the_file_has_the_target_and_the_problems(tmp_path):
    path = tmp_path / "plan.json"
    with tilekern.trace(path, gpu="H200") as found:
        norm(4096)
    plan = json.loads(path.read_text())
    assert plan["target"] == H200.describe()
    items = [(item["kernel"], spec_named(item["kernel"]).problem(**item["problem"])) for item in plan["problems"]]
    assert items == found.problems


def test_a_step_that_fails_leaves_no_file(tmp_path):
    with pytest.raises(ZeroDivisionError), tilekern.trace(tmp_path / "plan.json", gpu="H200"):
        norm(1 // 0)
    assert not list(tmp_path.iterdir())


def test_an_empty_plan_is_not_written(tmp_path):
    with (
        pytest.raises(InputError, match="is not written, since no problem was asked for; patch the model"),
        tilekern.trace(tmp_path / "plan.json", gpu="H200"),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_missing_is_named_before_the_step(tmp_path):
    with (
        pytest.raises(InputError, match="is not a folder; make it before the step runs"),
        tilekern.trace(tmp_path / "no" / "plan.json", gpu="H200"),
    ):
        pytest.fail("the step ran")


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines with no GPU")
def test_a_machine_with_no_gpu_needs_a_name():
    with pytest.raises(InputError, match="name one, for example gpu='H200'"), tilekern.trace():
        pass
