"""Inside :func:`tilekern.invariant` the kernels of one bit class run, outside the fastest."""

import shutil

import pytest
import torch
from marks import needs_compiler
from msgspec.structs import replace
from one_record import GPU, H200, PROBLEM, SIZES, SPEC

import tilekern
from tilekern import cache
from tilekern.cache.keys import blob_path
from tilekern.cache_tools.__main__ import main
from tilekern.compile import library, toolchain
from tilekern.errors import NoVariant, TilekernWarning
from tilekern.kernels import spec_named
from tilekern.patch.report import report
from tilekern.runtime import dispatch
from tilekern.runtime.plans import LibraryPlan
from tilekern.runtime.records import artifact_of, record_of
from tilekern.spec import ALIGNED, GENERIC, INVARIANT, variant_of

FAST = SPEC.default(PROBLEM, H200)
SAME = FAST.but(schedule="block" if FAST["schedule"] == "persistent" else "persistent")

pytestmark = [needs_compiler, pytest.mark.usefixtures("root")]


@pytest.fixture(scope="module")
def made():
    """The artifacts of a record with an invariant kernel, and their bytes."""
    configs = {ALIGNED: FAST, GENERIC: SPEC.generic(PROBLEM), INVARIANT: SAME}
    found = {
        name: (toolchain.compile_candidate(SPEC, PROBLEM, config, H200, variant_of(name)), config)
        for name, config in configs.items()
    }
    artifacts = {name: artifact_of(*one) for name, one in found.items()}
    return artifacts, {artifacts[name].sha256: one.cubin for name, (one, _) in found.items()}


def write(made, root, invariant, spec=SPEC, problem=PROBLEM, config=FAST):
    tools = toolchain.toolkit().describe()
    measurement = {"median_us": 9.0} | ({INVARIANT: invariant} if invariant else {})
    record = record_of(spec, problem, config, H200, tools, made[0], "measured", measurement=measurement)
    cache.Store(root).write(record, made[1])


def facts(bits="a", *, config=SAME, generic=False):
    return {"config": dict(config), "bits": bits, "median_us": 10.0, "generic": generic}


def variants_of(plan):
    return [variant.name for variant in plan._kernel.variants]


@pytest.mark.parametrize("generic", [False, True])
def test_the_invariant_kernel_runs_inside_and_the_fastest_outside(made, root, generic):
    write(made, root, facts(generic=generic))
    fast = dispatch.plan_for(SPEC, GPU, *SIZES)
    with tilekern.invariant():
        same = dispatch.plan_for(SPEC, GPU, *SIZES)
        assert dispatch.plan_for(SPEC, GPU, *SIZES) is same
        with tilekern.invariant():
            assert dispatch.plan_for(SPEC, GPU, *SIZES) is same
    assert dispatch.plan_for(SPEC, GPU, *SIZES) is fast
    with tilekern.invariant():
        assert dispatch.plan_for(SPEC, GPU, *SIZES) is same, "each mode keeps its plans"
    assert (fast.config, same.config) == (FAST, SAME)
    assert variants_of(fast) == [ALIGNED, GENERIC]
    assert variants_of(same) == ([INVARIANT, GENERIC] if generic else [INVARIANT])
    assert not dispatch.varying()


def test_a_generic_variant_of_another_class_is_not_launched(made, root):
    write(made, root, facts())
    x = torch.empty(0)
    with tilekern.invariant():
        plan = dispatch.plan_for(SPEC, GPU, *SIZES)
    with pytest.raises(NoVariant, match="none of the variants invariant"):
        plan._kernel._compile(type("Signature", (), {"parameters": (x,)})(), None)


def test_the_winner_of_the_class_needs_no_artifact_of_its_own(made, root):
    artifacts = {name: one for name, one in made[0].items() if name != INVARIANT}
    blobs = {one.sha256: made[1][one.sha256] for one in artifacts.values()}
    write((artifacts, blobs), root, facts(config=FAST, generic=True))
    with tilekern.invariant():
        plan = dispatch.plan_for(SPEC, GPU, *SIZES)
    assert plan.config == FAST
    assert variants_of(plan) == [ALIGNED, GENERIC]


def test_a_library_may_be_of_the_class(root, monkeypatch):
    monkeypatch.setattr(library.Library, "libraries", {"cublas": lambda: True})
    spec = spec_named("matmul")
    flags = {d.name: False for d in spec.dimensions if d.kind == "flag"}
    problem = spec.problem(rows=64, inner=64, columns=64, dtype="bfloat16", **flags)
    by_cublas = spec.generic(problem).but(implementation="cublas")
    write(({}, {}), root, facts(config=by_cublas), spec, problem, by_cublas)
    with tilekern.invariant():
        plan = dispatch.plan_for(spec, GPU, *(torch.bfloat16 if x == "bfloat16" else x for x in problem.values()))
    assert isinstance(plan, LibraryPlan)


def test_a_record_that_names_none_runs_its_winner_and_says_so_once(made, root):
    write(made, root, None)
    said = "rows of swiglu_forward may depend on others: its record names no"
    with pytest.warns(TilekernWarning, match=said), tilekern.invariant():
        plan = dispatch.plan_for(SPEC, GPU, *SIZES)
    assert plan.config == FAST
    assert said in str(report(torch.nn.Linear(2, 2)))


def test_two_classes_at_two_sizes_are_said(made, root):
    write(made, root, facts("a"))
    write(made, root, facts("b"), problem=PROBLEM.but(rows=2))
    with pytest.warns(TilekernWarning, match="tune all sizes in one run with --invariant"), tilekern.invariant():
        plans = [dispatch.plan_for(SPEC, GPU, rows, *SIZES[1:]) for rows in (50, 2)]
    assert [plan.config for plan in plans] == [SAME, FAST]


def test_a_kernel_beside_another_serves_in_the_mode_only_with_its_bits(made, root):
    """It says nothing where it does not: the other runs. Where a size has no class, that of the nearest serves."""
    write(made, root, facts("a"))
    for rows, told in ((2, facts("b")), (4000, None)):
        write(made, root, told, problem=PROBLEM.but(rows=rows))
    with tilekern.invariant():
        found = [dispatch.tuned_plan_for(SPEC, GPU, rows, *SIZES[1:]) for rows in (50, 2, 4000)]
    assert [plan and plan.config for plan in found] == [SAME, None, SAME]
    assert not dispatch.varying()
    assert dispatch.tuned_plan_for(SPEC, GPU, 4000, *SIZES[1:]).config == FAST


def test_models_tuned_apart_share_decoding_only_if_both_have_its_bits(made, root):
    """Their heads differ, and not the query heads of a key head: each has a class of attention of its own."""
    attention, decoding = spec_named("attention_forward"), spec_named("decode_attention")
    flags = {d.name: d.name == "causal" for d in attention.dimensions if d.kind == "flag"}
    sizes = {"batch": 1, "queries": 64, "keys": 64, "head_dim": 64, "dtype": "bfloat16"}
    one, other = (attention.problem(**sizes, heads=2 * heads, kv_heads=heads, **flags) for heads in (2, 4))
    flags = {d.name: False for d in decoding.dimensions if d.kind == "flag"}
    token = decoding.problem(kv_heads=2, keys=64, page_size=1, group=2, head_dim=64, dtype="bfloat16", **flags)
    for spec, problem, bits in ((attention, one, "1:a"), (attention, other, "1:b"), (decoding, token, "1:a")):
        config = spec.default(problem, H200).but(**{"splits": 1} if spec is decoding else {})
        artifacts = {name: replace(made[0][name], config=dict(config)) for name in (ALIGNED, GENERIC)}
        blobs = {x.sha256: made[1][x.sha256] for x in artifacts.values()}
        write((artifacts, blobs), root, facts(bits, config=config), spec, problem, config)

    def plan(find, spec, problem):
        return find(spec, GPU, *(torch.bfloat16 if x == "bfloat16" else x for x in problem.values()))

    with tilekern.invariant():
        for prompt in (one, other):
            assert plan(dispatch.plan_for, attention, prompt) is not None
            decoded = plan(dispatch.tuned_plan_for, decoding, token)
            assert (decoded is not None) == (prompt is one)
        assert not dispatch.varying()


def test_a_job_may_begin_in_the_mode(monkeypatch):
    for value, on in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("TILEKERN_INVARIANT", value)
        assert dispatch.State().invariant is on


def test_an_invariant_config_of_another_space_makes_a_record_a_misfit(made, root):
    write(made, root, facts(config={"no": "config"}))
    dispatch.set_miss_policy("fallback")
    with pytest.warns(TilekernWarning, match="is passed over"):
        assert dispatch.plan_for(SPEC, GPU, *SIZES) is None


@pytest.mark.parametrize("broken", ["missing", "damaged"])
def test_an_invariant_artifact_that_cannot_be_loaded_is_named_and_leaves_the_winner_alone(made, root, broken):
    write(made, root, facts())
    path = root / blob_path(made[0][INVARIANT].sha256)
    path.unlink() if broken == "missing" else path.write_bytes(b"damaged")
    with pytest.warns(TilekernWarning) as said, tilekern.invariant():
        same = dispatch.plan_for(SPEC, GPU, *SIZES)
    assert any(f"cannot be loaded: there is no {path}" in str(one.message) for one in said) == (broken == "missing")
    assert any(f"{path} is bad and was set aside" in str(one.message) for one in said) == (broken == "damaged")
    assert any("rows of swiglu_forward may depend on others" in str(one.message) for one in said)
    fast = dispatch.plan_for(SPEC, GPU, *SIZES)
    assert (same.config, fast.config, variants_of(fast)) == (FAST, FAST, [ALIGNED, GENERIC])


def test_a_record_without_the_artifact_that_it_names_runs_its_winner(made, root):
    artifacts = {name: one for name, one in made[0].items() if name != INVARIANT}
    write((artifacts, {one.sha256: made[1][one.sha256] for one in artifacts.values()}), root, facts())
    with pytest.warns(TilekernWarning, match="the record has no artifact of it"), tilekern.invariant():
        assert dispatch.plan_for(SPEC, GPU, *SIZES).config == FAST


def test_inside_a_read_only_cache_with_a_class_comes_before_the_user_s_without(made, root, tmp_path, monkeypatch):
    write(made, tmp_path / "shared", facts())
    write(made, root, None, config=SAME)
    monkeypatch.setenv("TILEKERN_CACHE_PATH", str(tmp_path / "shared"))
    dispatch.forget()
    assert dispatch.plan_for(SPEC, GPU, *SIZES).config == SAME, "the user's own winner"
    with tilekern.invariant():
        assert variants_of(dispatch.plan_for(SPEC, GPU, *SIZES)) == [INVARIANT]
    assert not dispatch.varying()


def test_a_pack_brings_the_invariant_kernel_along(made, root, tmp_path):
    """Packed, and unpacked into an empty cache: the record and its artifact, which runs in the mode."""
    write(made, root, facts())
    pack = tmp_path / "all.pack"
    assert main(["pack", str(pack), "--cache-dir", str(root)]) == 0
    shutil.rmtree(root)
    assert main(["unpack", str(pack), "--cache-dir", str(root)]) == 0
    dispatch.forget()
    with tilekern.invariant():
        plan = dispatch.plan_for(SPEC, GPU, *SIZES)
    assert (plan.config, variants_of(plan)) == (SAME, [INVARIANT])
