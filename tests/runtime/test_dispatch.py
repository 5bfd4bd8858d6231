"""Lookups of calls in a real cache for a GPU that is not here, and misses."""

import dataclasses
import hashlib
import json
import shutil
import sys
import warnings
import weakref

import msgspec
import pytest
import torch
from marks import needs_compiler
from one_record import GPU, H200, PROBLEM, SIZES, SPEC, numbers, record_of

from tilekern import cache
from tilekern.compile.garbage import search_put_off
from tilekern.errors import CacheMiss, CannotRun, InputError, TilekernWarning
from tilekern.interpreter import InterpreterError
from tilekern.kernels import spec_named
from tilekern.runtime import dispatch
from tilekern.runtime.launcher import PrebuiltKernel
from tilekern.runtime.plans import DependentPlan
from tilekern.runtime.provisional import is_settled
from tilekern.runtime.ranks.agreement import Agreement
from tilekern.runtime.ranks.snapshot import Snapshot
from tilekern.spec import Config
from tilekern.spec.source import source_digest
from tilekern.spec.targets import INTERPRETED, resolve

H100, B200 = resolve("H100"), resolve("B200")

pytestmark = [needs_compiler, pytest.mark.usefixtures("root")]


@pytest.fixture
def signed(monkeypatch, tmp_path):
    """The policy ``signed``, settings of this test's own, and a process that has warned of nothing yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.setenv("TILEKERN_TRUST", "signed")


def test_an_unsigned_record_is_not_launched_and_warned_about_once(filled, no_compiler, signed):
    with pytest.warns(RuntimeWarning, match="a record of user is not loaded: no trust root signed it") as caught:
        plans = [dispatch.plan_for(SPEC, GPU, rows, *SIZES[1:]) for rows in (50, 51, 52)]
    assert plans == [None] * 3
    assert len([one for one in caught if "trust" in str(one.message)]) == 1
    assert dispatch.stats()[SPEC.name]["misses"] == 3


def test_a_user_s_own_artifacts_are_trusted_under_signed(root, signed):
    dispatch.compile_default(SPEC, PROBLEM, H200)
    assert isinstance(dispatch.plan_for(SPEC, GPU, *SIZES)._kernel, PrebuiltKernel)


def test_a_problem_in_the_cache_becomes_a_plan(filled, no_compiler):
    plan = dispatch.plan_for(SPEC, GPU, *SIZES)
    assert isinstance(plan._kernel, PrebuiltKernel)
    assert plan.config == SPEC.default(PROBLEM, H200)
    real = SPEC.problem(rows=50, columns=48, dtype="bfloat16")
    assert plan.blocks == SPEC.implement(real, plan.config).grid(real, H200.sm_count)
    assert plan.grid == (plan.blocks,)
    assert dispatch.stats() == {SPEC.name: numbers(hits=1)}
    assert cache.read_wanted(filled) == []


def test_a_refusal_on_the_cpu_is_none_of_the_first_gpu(filled, no_compiler):
    assert dispatch.plan_for(SPEC, torch.device("cpu"), *SIZES) is None
    assert isinstance(dispatch.plan_for(SPEC, GPU, *SIZES)._kernel, PrebuiltKernel)


def test_the_plan_s_kernel_holds_both_variants_and_their_bytes(filled):
    kernel = dispatch.plan_for(SPEC, GPU, *SIZES)._kernel
    record = json.loads(record_of(filled).read_text())
    assert [variant.name for variant in kernel.variants] == ["aligned", "generic"]
    for variant in kernel.variants:
        assert variant.load()[:4] == b"\x7fELF"
        assert variant.symbol == record["artifacts"][variant.name]["symbol"]


def test_find_gives_the_record_with_its_provenance(filled):
    hit = dispatch.find(SPEC, SPEC.bucketed(PROBLEM), H200)
    assert hit.exact_bucket
    assert hit.exact_target
    assert hit.record.provenance == "default"
    assert hit.record.source_digest == hit.record.space_digest == source_digest(SPEC.module)
    assert Config(hit.record.artifacts["generic"].config) == SPEC.generic(PROBLEM)


def test_all_rows_of_a_bucket_share_a_kernel_and_have_grids_of_their_own(filled):
    few, many = (dispatch.plan_for(SPEC, GPU, rows, 48, torch.bfloat16) for rows in (33, 64))
    assert few is not many
    assert few._kernel is many._kernel
    assert few.blocks < many.blocks or few.blocks == 1


@pytest.mark.parametrize("rows", [1, 65, 5000])
def test_another_bucket_is_served_by_the_nearest(filled, no_compiler, rows):
    plan = dispatch.plan_for(SPEC, GPU, rows, 48, torch.bfloat16)
    assert plan.blocks >= 1
    assert dispatch.stats()[SPEC.name] == numbers(hits=1, nearest=1)


def test_a_composite_s_default_of_another_bucket_gives_way_to_the_problem_s_own(root):
    """A chunk of 64 rows for 2048 rows would round the weight's gradient 32 times."""
    spec = spec_named("fused_linear_cross_entropy")
    for rows in (64, 2048):
        plan = dispatch.plan_for(spec, GPU, rows, 128, 256, torch.bfloat16)
        assert plan.config == spec.default(spec.problem(rows=rows, hidden=128, vocabulary=256, dtype="bfloat16"), H200)
    assert dispatch.stats()[spec.name] == numbers(hits=1, misses=1, compiled=1)


def test_a_composite_s_default_of_another_bucket_serves_where_none_may_be_made(root):
    spec, sizes = spec_named("fused_linear_cross_entropy"), (128, 256, torch.bfloat16)
    few = dispatch.plan_for(spec, GPU, 64, *sizes)
    dispatch.set_miss_policy("fallback")
    assert dispatch.plan_for(spec, GPU, 2048, *sizes).config == few.config
    assert dispatch.stats()[spec.name]["nearest"] == 1


def test_another_gpu_of_the_arch_serves(filled, no_compiler, monkeypatch):
    monkeypatch.setattr(dispatch, "here", lambda _device=None: H100)
    assert dispatch.plan_for(SPEC, GPU, *SIZES) is not None
    assert not dispatch.find(SPEC, SPEC.bucketed(PROBLEM), H100).exact_target


def test_of_other_gpus_of_the_arch_the_likest_serves(filled, no_compiler):
    hit = dispatch.find(SPEC, SPEC.bucketed(PROBLEM), H200)
    for gpu in ("H100 PCIe", "H20"):
        moved = msgspec.structs.replace(hit.record, target=resolve(gpu).describe())
        cache.Store(filled).write(moved, {one.sha256: hit.load(name) for name, one in moved.artifacts.items()})
    for gpu, served in (("H200 NVL", "H200"), ("GH200", "H200"), ("H20-3e", "H20"), ("sm_90:100", "H100 PCIe")):
        hit = dispatch.find(SPEC, SPEC.bucketed(PROBLEM), resolve(gpu))
        assert (hit.record.target["name"], hit.exact_target) == (served, False)


def test_an_agreement_does_not_serve_another_arch(filled, no_compiler, monkeypatch):
    """A process with GPUs of two archs has agreed for one of them, though its caches have kernels for both."""
    gpus = {0: H200, 1: B200}
    monkeypatch.setattr(dispatch, "here", gpus.get)
    snapshot = Snapshot.take("sm_90", cache.default_layers(), None, lambda spec, _: spec.name == SPEC.name)
    dispatch.agree_on(Agreement(snapshot, H200, "compile"))
    try:
        assert dispatch.plan_for(SPEC, torch.device("cuda", 0), *SIZES) is not None
        with pytest.warns(TilekernWarning, match="agreed on kernels for a H200, which do not run on a B200; the model"):
            assert dispatch.plan_for(SPEC, torch.device("cuda", 1), *SIZES) is None
        assert dispatch.stats()[SPEC.name] == numbers(hits=1, misses=1)
        dispatch.set_miss_policy("error")
        dispatch.forget()
        with pytest.raises(CacheMiss, match="which do not run on a B200; give each rank GPUs of one architecture"):
            dispatch.plan_for(SPEC, torch.device("cuda", 1), *SIZES)
    finally:
        dispatch.agree_on(None)


def test_another_arch_exact_size_or_dtype_does_not_serve(filled, no_compiler, monkeypatch):
    dispatch.set_miss_policy("fallback")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert dispatch.plan_for(SPEC, GPU, 50, 49, torch.bfloat16) is None
        assert dispatch.plan_for(SPEC, GPU, 50, 48, torch.float16) is None
        monkeypatch.setattr(dispatch, "here", lambda _device=None: B200)
        dispatch.forget()
        assert dispatch.plan_for(SPEC, GPU, *SIZES) is None
    assert dispatch.stats()[SPEC.name] == numbers(misses=3)


def test_a_record_of_another_source_is_a_miss(filled, no_compiler):
    path = record_of(filled)
    path.write_text(msgspec.structs.replace(cache.Record.from_json(path.read_text()), source_digest="0" * 64).to_json())
    dispatch.set_miss_policy("error")
    with pytest.raises(CacheMiss):
        dispatch.plan_for(SPEC, GPU, *SIZES)


def test_a_record_of_another_search_space_is_a_hit_that_may_be_bettered(filled, no_compiler):
    path = record_of(filled)
    record = cache.Record.from_json(path.read_text())
    dated = msgspec.structs.replace(
        record, space_digest="0" * 64, provenance="measured", measurement={"median_us": 1.0}
    )
    path.write_text(dated.to_json())
    dispatch.set_miss_policy("error")
    assert dispatch.plan_for(SPEC, GPU, *SIZES) is not None
    assert dispatch.stats()[SPEC.name] == numbers(hits=1)
    hit = dispatch.find(SPEC, SPEC.bucketed(SPEC.problem(**dict(record.problem))), H200)
    assert (hit.fresh, is_settled(hit)) == (False, False)
    assert is_settled(dataclasses.replace(hit, fresh=True))


def test_a_blob_that_was_changed_is_a_miss(filled, no_compiler):
    for blob in (filled / "v1" / "blobs").rglob("*"):
        if blob.is_file():
            blob.write_bytes(blob.read_bytes()[:-1] + b"?")
    dispatch.set_miss_policy("error")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CacheMiss):
            dispatch.plan_for(SPEC, GPU, *SIZES)


def test_a_miss_compiles_the_default_and_keeps_it(root):
    assert dispatch.miss_policy() == "compile"
    plan = dispatch.plan_for(SPEC, GPU, *SIZES)
    assert plan.config == SPEC.default(PROBLEM, H200)
    assert dispatch.stats()[SPEC.name] == numbers(misses=1, compiled=1)
    dispatch.forget()
    assert dispatch.plan_for(SPEC, GPU, *SIZES) is not None
    assert dispatch.stats()[SPEC.name] == numbers(misses=1, compiled=1, hits=1)
    (wanted,) = cache.read_wanted(root)
    assert (wanted["kernel"], wanted["problem"]) == (SPEC.name, dict(PROBLEM))
    assert wanted["target"]["key"] == H200.key


def test_a_winner_that_was_published_while_the_default_compiled_stays(filled):
    (entry,) = cache.Store(filled).entries()
    measured = msgspec.structs.replace(entry.record, provenance="measured", measurement={"median_us": 1.0})
    cache.Store(filled).write(measured, {})
    dispatch.compile_default(SPEC, PROBLEM, H200)
    (entry,) = cache.Store(filled).entries()
    assert entry.record == measured


def test_a_miss_where_nothing_can_be_compiled_falls_back_and_says_how_to_tune(root, no_compiler):
    with pytest.warns(UserWarning, match="tilekern.tune MODEL --gpu H200") as said:
        assert dispatch.plan_for(SPEC, GPU, *SIZES) is None
    assert any("tilekern[compile]" in str(warning.message) for warning in said)
    assert dispatch.stats()[SPEC.name] == numbers(misses=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dispatch.plan_for(SPEC, GPU, *SIZES) is None
        assert dispatch.plan_for(SPEC, GPU, 5000, 48, torch.bfloat16) is None


def test_the_policy_fallback_compiles_nothing(root):
    dispatch.set_miss_policy("fallback")
    with pytest.warns(UserWarning, match="the model's own op runs"):
        assert dispatch.plan_for(SPEC, GPU, *SIZES) is None
    assert not [path for path in root.rglob("*.json") if SPEC.name in path.parts]


def test_the_policy_error_names_kernel_problem_target_and_the_way_out(root):
    dispatch.set_miss_policy("error")
    for _ in range(2):
        with pytest.raises(CacheMiss, match="swiglu_forward for rows=64,columns=48,dtype=bfloat16 on H200; tune it"):
            dispatch.plan_for(SPEC, GPU, *SIZES)


@pytest.mark.parametrize("policy", ["compile", "fallback", "error"])
def test_the_wanted_list_is_written_once(root, no_compiler, policy):
    dispatch.set_miss_policy(policy)
    for _ in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                dispatch.plan_for(SPEC, GPU, *SIZES)
            except CacheMiss:
                assert policy == "error"
        dispatch.forget()
    (wanted,) = cache.read_wanted(root)
    assert f"policy {policy}" in wanted["reason"]


def test_the_environment_sets_the_policy_and_the_argument_wins(monkeypatch):
    monkeypatch.setenv("TILEKERN_ON_MISS", "error")
    assert dispatch.miss_policy() == "error"
    dispatch.set_miss_policy("fallback")
    assert dispatch.miss_policy() == "fallback"
    dispatch.set_miss_policy(None)
    assert dispatch.miss_policy() == "error"


def test_an_unknown_policy_is_named_with_the_known_ones(monkeypatch):
    with pytest.raises(InputError, match="on_miss: unknown miss policy 'panic'; known: compile, fallback, error"):
        dispatch.set_miss_policy("panic")
    monkeypatch.setenv("TILEKERN_ON_MISS", "Error")
    with pytest.raises(InputError, match="TILEKERN_ON_MISS: unknown miss policy 'Error'"):
        dispatch.miss_policy()


def test_the_second_call_touches_no_disk(filled, monkeypatch):
    first = dispatch.plan_for(SPEC, GPU, *SIZES)
    shutil.rmtree(filled)
    monkeypatch.setattr(dispatch, "_resolve", None)
    assert dispatch.plan_for(SPEC, GPU, *SIZES) is first
    assert dispatch.stats()[SPEC.name] == numbers(hits=1)


@pytest.fixture
def refused(filled, monkeypatch):
    """A driver that refuses the cubins of today's toolkit, and the cubins that it refuses."""
    monkeypatch.setattr(dispatch._state, "kernels", {})
    found = dispatch.find(SPEC, PROBLEM, H200)
    refused = [found.load(variant) for variant in found.record.artifacts]

    def check(cubin):
        if cubin in refused:
            raise CannotRun("the driver refuses it")

    monkeypatch.setattr("tilekern.runtime.driver.check_accepts", check)
    return refused


def add_record_of_older_toolkit(root):
    """A record of the same problem whose cubins have other bytes."""
    found = dispatch.find(SPEC, PROBLEM, H200)
    blobs, artifacts = {}, {}
    for variant, artifact in found.record.artifacts.items():
        cubin = found.load(variant) + b"of an older toolkit"
        sha256 = hashlib.sha256(cubin).hexdigest()
        blobs[sha256] = cubin
        artifacts[variant] = msgspec.structs.replace(artifact, sha256=sha256, size=len(cubin))
    toolkit = found.record.toolkit | {"key": "tileiras-13.3.0"}
    cache.Store(root).write(msgspec.structs.replace(found.record, toolkit=toolkit, artifacts=artifacts), blobs)


def test_the_next_record_serves_if_the_driver_refuses_one(filled, refused):
    add_record_of_older_toolkit(filled)
    dispatch.forget()
    with pytest.warns(RuntimeWarning, match="this machine cannot run swiglu_forward .*another record serves"):
        plan = dispatch.plan_for(SPEC, GPU, *SIZES)
    assert plan._kernel.variants[0].load().endswith(b"of an older toolkit")
    assert dispatch.resolved()[SPEC.name, PROBLEM].toolkit["key"] == "tileiras-13.3.0"


def test_the_model_s_own_op_runs_if_the_driver_refuses_all_records(refused):
    with pytest.warns(RuntimeWarning, match="this machine cannot run swiglu_forward .*the model's own op runs"):
        assert dispatch.plan_for(SPEC, GPU, *SIZES) is None
    dispatch.set_miss_policy("error")
    dispatch.forget()
    with pytest.raises(CacheMiss, match=r"swiglu_forward for rows=64.*made by tileiras-.*refuses it.*driver: "):
        dispatch.plan_for(SPEC, GPU, *SIZES)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("setting", ["root", "filled", "no_compiler", "refused", "cannot_compile"])
def test_a_first_call_keeps_no_tensors_of_its_callers(setting, request, monkeypatch, root):
    """Neither a plan nor why there is none holds a frame; by a cycle, tensors would live until a search for garbage."""
    if setting == "cannot_compile":
        monkeypatch.setitem(sys.modules, "elftools.elf.elffile", None)
    else:
        request.getfixturevalue(setting)

    def call():
        mine = torch.empty(1)
        dispatch.plan_for(SPEC, GPU, *SIZES)
        return weakref.ref(mine)

    with search_put_off():
        assert call()() is None


def test_a_compiler_without_the_reader_of_cubins_ends_no_step(root, monkeypatch):
    monkeypatch.setitem(sys.modules, "elftools.elf.elffile", None)
    with pytest.warns(RuntimeWarning, match="pyelftools.* is not installed.*; the model's own op runs"):
        assert dispatch.plan_for(SPEC, GPU, *SIZES) is None


def test_forget_looks_again_and_keeps_the_counters_and_the_code_of_captured_graphs(filled):
    first = dispatch.plan_for(SPEC, GPU, *SIZES)
    first.launches = 7
    dispatch.forget()
    assert dispatch.stats()[SPEC.name] == numbers(hits=1, launches=7)
    second = dispatch.plan_for(SPEC, GPU, *SIZES)
    assert second is not first
    assert second._kernel is first._kernel
    second.launches = 2
    assert dispatch.stats()[SPEC.name] == numbers(hits=2, launches=9)


def test_memory_of_plans_is_bounded_and_all_their_launches_count(filled, monkeypatch):
    monkeypatch.setattr(dispatch, "MOST_PLANS", 4)
    for rows in range(1, 20):
        dispatch.plan_for(SPEC, GPU, rows, 48, torch.bfloat16).launches += 1
    assert len(dispatch._state.plans) <= 4
    assert dispatch.stats()[SPEC.name]["launches"] == 19


def test_each_device_has_plans_of_its_own(filled):
    one, other = (dispatch.plan_for(SPEC, torch.device("cuda", index), *SIZES) for index in (0, 1))
    assert one is not other
    assert one._kernel is not other._kernel


def test_a_dependent_kernel_gets_a_dependent_plan(root):
    spec = spec_named("column_sum")
    plan = dispatch.plan_for(spec, GPU, 132, 48, torch.float32)
    assert type(plan) is DependentPlan
    assert type(dispatch.plan_for(SPEC, GPU, *SIZES)) is dispatch.Plan


def test_a_dtype_that_no_kernel_takes_runs_the_model_s_own_op(root):
    with pytest.warns(UserWarning, match="dtype must be one of bfloat16, float16, float32, got 'float64'"):
        assert dispatch.plan_for(SPEC, GPU, 50, 48, torch.float64) is None
    assert not root.exists()


def test_the_cpu_runs_the_model_s_own_op_unless_interpreted(monkeypatch):
    cpu = torch.device("cpu")
    with pytest.warns(UserWarning, match="was called on cpu"):
        assert dispatch.plan_for(SPEC, cpu, *SIZES) is None
    monkeypatch.setenv("TILEKERN_INTERPRET", "1")
    plan = dispatch.plan_for(SPEC, cpu, *SIZES)
    assert type(plan) is dispatch.InterpretedPlan
    gate, up = torch.randn(2, 50, 48).bfloat16()
    y = torch.full_like(gate, torch.nan)
    plan.launch(None, gate, up, y)
    torch.testing.assert_close(y, torch.nn.functional.silu(gate.float()).mul(up).bfloat16(), rtol=2e-2, atol=2e-2)
    assert plan.config == SPEC.default(SPEC.problem(rows=50, columns=48, dtype="bfloat16"), INTERPRETED)
    assert dispatch.stats()[SPEC.name]["launches"] == 1


@pytest.mark.parametrize(("strides", "taken"), [((48, 1), True), ((1, 50), True), ((0, 1), False), ((47, 1), False)])
def test_the_cpu_takes_no_array_that_the_launcher_of_a_gpu_refuses(monkeypatch, strides, taken):
    monkeypatch.setenv("TILEKERN_INTERPRET", "1")
    plan, memory = dispatch.plan_for(SPEC, torch.device("cpu"), *SIZES), torch.ones(50 * 48).bfloat16()
    arrays = memory.as_strided((50, 48), strides), memory.view(50, 48), torch.empty(50, 48).bfloat16()
    if taken:
        plan.launch(None, *arrays)
    else:
        with pytest.raises(InterpreterError, match=rf"gate has .* that share memory, .* strides \({strides[0]}, 1"):
            plan.launch(None, *arrays)


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("yes", True), ("0", False), ("", False)])
def test_interpreting_goes_by_the_environment(monkeypatch, value, expected):
    monkeypatch.setenv("TILEKERN_INTERPRET", value)
    assert dispatch.interpreting() is expected


def test_a_further_layer_serves_and_is_not_written_to(root, compiled, no_compiler, monkeypatch):
    before = sorted((path, path.stat().st_mtime_ns) for path in compiled.rglob("*"))
    monkeypatch.setenv("TILEKERN_CACHE_PATH", str(compiled))
    assert dispatch.plan_for(SPEC, GPU, *SIZES) is not None
    assert sorted((path, path.stat().st_mtime_ns) for path in compiled.rglob("*")) == before
    assert not root.exists()
