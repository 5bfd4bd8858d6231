"""Preflight on its own: what it calls what, its exit codes, and what --fix makes."""

import dataclasses
import hashlib
import json
import os
import types

import pytest
from msgspec.structs import replace
from tuning_samples import needs_compiler

import tilekern
from tilekern.cache import Artifact, Store
from tilekern.errors import InputError
from tilekern.kernels import spec_named
from tilekern.runtime import dispatch
from tilekern.runtime.records import record_of
from tilekern.spec import ALIGNED, GENERIC, INVARIANT
from tilekern.spec.bits import sizes_of_class
from tilekern.spec.targets import resolve
from tilekern.tuning import cli
from tilekern.tuning import preflight as checks
from tilekern.tuning.plan.choosing import plan_of_problem
from tilekern.tuning.plan.models import plan_of_model
from tilekern.tuning.plan.steps import Planned, Steps

H200, H100 = resolve("H200"), resolve("H100")
TOOLS = {"key": "tileiras-1.0-cuda_tile-1.0", "tileiras": "1.0", "cuda_tile": "1.0"}
# No pack of the wheel serves these sizes.
CONFIG = {
    "model_type": "qwen3", "hidden_size": 96, "intermediate_size": 224, "num_attention_heads": 3,
    "num_key_value_heads": 1, "head_dim": 16, "num_hidden_layers": 2, "vocab_size": 333,
}  # fmt: skip


@pytest.fixture(autouse=True)
def settings(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("TILEKERN_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TILEKERN_CACHE_DIR", str(tmp_path / "cache"))
    dispatch.forget()


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def put(root, kernel, problem, target=H200, provenance="predicted", bits=None, **changes):
    """A record whose artifacts are no code: a lookup asks for no more. Its winner is of the class ``bits``."""
    spec = spec_named(kernel)
    config = spec.default(problem, target)
    facts = {"measurement": {"median_us": 1.0}} if provenance == "measured" else {}
    if bits:
        facts["measurement"][INVARIANT] = {"config": dict(config), "bits": bits, "median_us": 1.0, "generic": False}
    code = b"no code"
    sha256 = hashlib.sha256(code).hexdigest()
    artifacts = {name: Artifact(sha256, len(code), "symbol", dict(config), [], {}) for name in (ALIGNED, GENERIC)}
    made = record_of(spec, problem, config, target, TOOLS, artifacts, provenance, **facts)
    Store(root).write(replace(made, **changes), {sha256: code})


def rope(**more):
    return checks.preflight(CONFIG, [64], gpu="H200", ops=["rope"], **more)


def run(*arguments):
    """The exit code of the command, however it ends."""
    try:
        return cli.main(["preflight", *arguments])
    except SystemExit as end:
        return end.code


def test_it_plans_what_the_tuner_plans():
    found = tilekern.preflight("qwen3-8b", [2048, 8192], gpu="H200")
    planned = plan_of_model("qwen3-8b", Steps([2048, 8192]), H200)
    assert tuple((need.kernel, need.problem) for need in found.needs) == planned.problems
    assert found.missing == [], "the wheel's pack"


def test_an_empty_cache_misses_everything_and_is_not_created(tmp_path):
    found = rope()
    assert {need.state for need in found.needs} == {checks.MISSING}
    assert found.missing == list(found.needs)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("target", "rows", "provenance", "state", "meets"),
    [
        (H200, 64, "measured", "exact", {"served", "exact", "measured"}),
        (H200, 64, "predicted", "exact", {"served", "exact"}),
        (H200, 64, "default", "exact", {"served", "exact"}),
        (H200, 256, "measured", "nearest", {"served"}),
        (H100, 64, "measured", "other_gpu", {"served"}),
        (resolve("B200"), 64, "measured", "missing", set()),
    ],
)
@pytest.mark.share(2)
@pytest.mark.slow
def test_what_is_there_has_a_name(tmp_path, target, rows, provenance, state, meets):
    for need in rope().needs:
        put(tmp_path / "cache", need.kernel, need.problem.but(tokens=rows), target, provenance)
    for demand in checks.DEMANDS:
        found = rope(need=demand)
        assert {need.state for need in found.needs} == {state}
        assert {need.provenance for need in found.needs} == {None if state == "missing" else provenance}
        assert (found.missing == []) == (demand in meets)
        assert found.counts()[state] == len(found.needs)


def planned_launches(launches):
    """A plan of swiglu at some rows, each launched so often."""
    sizes = {
        ("swiglu_forward", spec_named("swiglu_forward").problem(rows=rows, columns=columns, dtype="bfloat16")): count
        for (rows, columns), count in launches.items()
    }
    return Planned("a model", tuple(sizes), launches={named: count for named, count in sizes.items() if count})


def test_the_share_counts_launches_and_not_problems(tmp_path):
    planned = planned_launches({(64, 48): 3, (128, 48): 2, (256, 48): 1, (64, 56): 5, (64, 72): 0})
    put(tmp_path / "cache", *planned.problems[0])
    found = checks.preflight_of(planned, H200)
    share = found.share.as_json()
    assert share == {
        "percent": 54, "launches": 11, "served": 6, "missing": {"swiglu_forward": 5}, "records": 1,
        "by_state": {"exact": 3, "nearest": 3, "other_gpu": 0, "missing": 5},
    }  # fmt: skip
    assert [need.as_json()["launches"] for need in found.needs] == [3, 2, 1, 5, 0]
    assert checks.share_line(found) == (
        "54 % of 11 launches have a record: 3 exact, 3 nearest (1 record serves 3 problems); the other 5: "
        "swiglu_forward 5; 1 missing problem only with another winner"
    )


def test_parts_of_a_composite_that_its_winner_does_not_launch_are_not_missing(tmp_path):
    sizes = "batch=1,queries=64,keys=64,heads=2,kv_heads=1,head_dim=64,causal=True,dtype=bfloat16,deterministic=True"
    problems = plan_of_problem(f"attention_backward {sizes}", H200).problems
    planned = Planned("a model", problems, launches={problems[0]: 1})

    def missing(**more):
        return {need.kernel for need in checks.preflight_of(planned, H200, **more).missing}

    everything = {kernel for kernel, _ in problems}
    assert missing() == everything
    put(tmp_path / "cache", *problems[0], config={"implementation": "kept"})
    kept = {"attention_delta", "attention_dkdv_kept", "attention_dq_kept"}
    assert missing() == kept
    # A composite whose record does not do is raced again, with all parts.
    assert missing(need="measured") == everything
    for kernel, problem in problems[1:]:
        if kernel in kept:
            put(tmp_path / "cache", kernel, problem)
    assert not missing()


def test_no_part_of_a_composite_is_missing_where_a_kernel_of_its_own_won(tmp_path):
    flags = dict.fromkeys(("gated", "rounded", "biased", "gelu_tanh", "silu", "accumulated"), False)
    sizes = "rows=64,inner=4128,columns=6176," + ",".join(f"{name}={value}" for name, value in flags.items())
    problems = plan_of_problem(f"skinny_linear {sizes},dtype=bfloat16", H200).problems
    assert len(problems) > 1
    kernel, problem = problems[0]
    spec = spec_named(kernel)
    own = next(way for way in spec.space.candidates(problem, H200) if way["implementation"] == "tile")
    put(tmp_path / "cache", kernel, problem, config=dict(own))
    assert not checks.preflight_of(Planned("a model", problems, launches={problems[0]: 1}), H200).missing


@pytest.mark.parametrize(("served", "percent", "words"), [(199, 99, "99 % of 200"), (200, 100, "100 % of 200")])
def test_a_whole_share_is_the_only_one_of_100_percent(tmp_path, served, percent, words):
    planned = planned_launches({(64, 48): served, (64, 56): 200 - served})
    put(tmp_path / "cache", *planned.problems[0])
    found = checks.preflight_of(planned, H200)
    assert (found.share.percent, words in checks.share_line(found)) == (percent, True)


def test_without_known_launches_there_is_no_share(tmp_path):
    found = checks.preflight_of(planned_launches({(64, 48): 0}), H200)
    assert (found.share, checks.share_line(found), found.as_json()["share"]) == (None, None, None)
    assert found.needs[0].launches is None


def test_kernels_without_a_record_come_in_the_order_of_their_launches(model, capsys):
    assert run(model, "--gpu", "H200", "--tokens", "64", "--ops", "rope,swiglu,rms_norm", "--json") == 3
    share = json.loads(capsys.readouterr().out)["share"]
    assert share["missing"]["rope"] == 4, "forward and backward of two layers"
    assert share["missing"]["rms_norm_forward"] == 9, "two of a layer, of its q and of its k, and the last norm"
    assert list(share["missing"].values()) == sorted(share["missing"].values(), reverse=True)
    assert share["percent"] == 0
    assert run(model, "--gpu", "H200", "--tokens", "64", "--ops", "rope,swiglu,rms_norm") == 3
    assert f"0 % of {share['launches']} launches have a record; the other" in capsys.readouterr().out


def test_a_stale_record_is_missing_and_said_to_be_stale(tmp_path, model, capsys):
    for need in rope().needs:
        put(tmp_path / "cache", need.kernel, need.problem, source_digest="0" * 64)
    found = rope()
    assert all(need.is_stale and need.state == checks.MISSING for need in found.missing)
    assert run(model, "--gpu", "H200", "--tokens", "64", "--ops", "rope") == 3
    said = capsys.readouterr().out
    assert "missing: rope tokens=64,batch=1" in said
    assert "which an edit of the kernel made stale" in said


def test_a_stale_record_is_said_where_another_one_serves(tmp_path, model, capsys):
    for need in rope().needs:
        put(tmp_path / "cache", need.kernel, need.problem, source_digest="0" * 64)
        put(tmp_path / "cache", need.kernel, {**need.problem, "tokens": 128})
    assert run(model, "--gpu", "H200", "--tokens", "64", "--ops", "rope") == 0
    said = capsys.readouterr().out
    assert "served: rope tokens=64,batch=1" in said
    assert "nearest, predicted; there is one, which an edit of the kernel made stale" in said
    assert run(model, "--gpu", "H200", "--tokens", "64", "--ops", "rope", "--need", "exact") == 3
    assert "served: " not in capsys.readouterr().out, "a missing record is listed once"


def test_a_record_of_another_search_space_serves_and_is_said_not_to_be_known_to_be_the_best(tmp_path, model, capsys):
    for need in rope().needs:
        put(tmp_path / "cache", need.kernel, need.problem, provenance="measured", space_digest="0" * 64)
    found = rope(need="measured")
    assert found.missing == []
    assert {(need.fresh, need.is_stale, need.as_json()["fresh"]) for need in found.needs} == {(False, False, False)}
    assert run(model, "--gpu", "H200", "--tokens", "64", "--ops", "rope") == 0
    said = capsys.readouterr().out
    assert "served: rope tokens=64,batch=1" in said
    assert "exact, measured; not known to be the best: the space has changed since" in said


def test_a_damaged_cache_is_read_and_left_alone(tmp_path):
    for need in rope().needs:
        put(tmp_path / "cache", need.kernel, need.problem)
    files = list((tmp_path / "cache").rglob("*.json"))
    files[0].write_text("{")
    with pytest.warns(RuntimeWarning, match="is bad"):
        assert len(rope().missing) == 1
    assert files[0].read_text() == "{"


def test_the_command_lists_missing_records_and_exits_with_3(model, capsys):
    assert run(model, "--gpu", "H200", "--tokens", "64", "--ops", "rope,swiglu") == 3
    said = capsys.readouterr().out
    assert said.count("missing: ") == 4
    assert "4 problems: 4 missing" in said


def test_the_command_has_nothing_to_say_against_a_full_cache(capsys):
    assert run("qwen3-8b", "--gpu", "H200", "--tokens", "2048,8192", "--need", "exact") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "nothing is missing"


def test_json_is_the_document_that_the_help_describes(model, capsys):
    assert run(model, "--gpu", "H200", "--tokens", "64", "--ops", "rope", "--json") == 3
    document = json.loads(capsys.readouterr().out)
    assert run("--help") == 0
    help_text = capsys.readouterr().out
    assert document["complete"] is False
    assert document["missing"] == document["problems"]
    for name in (*document, *document["problems"][0]):
        assert name in help_text, name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["qwen9"], "unknown model 'qwen9'"),
        (["qwen3-8b", "--gpu", "H900"], "unknown GPU 'H900'"),
        (["qwen3-8b", "--gpu", "H200", "--tokens", "many"], "--tokens 'many': expected whole numbers"),
        (["qwen3-8b", "--gpu", "H200", "--ops", "fly"], "unknown op 'fly'"),
        (["qwen3-8b", "--gpu", "H200", "--need", "all"], "'all' is not one of"),
        ([], "--gpu auto: this machine has no CUDA GPU"),
        (["--gpu", "H200"], "name a model"),
    ],
)
def test_bad_input_is_one_line_and_2(arguments, words, capsys):
    assert run(*arguments) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_a_demand_that_nobody_knows_is_named():
    with pytest.raises(InputError, match="unknown need 'all'; known: served, exact, measured"):
        rope(need="all")


@pytest.mark.parametrize("at_hand", [None, H100])
def test_where_the_gpu_is_not_what_must_be_measured_is_not_promised(at_hand, model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(checks, "here", lambda: at_hand)
    arguments = [model, "--gpu", "H200", "--tokens", "64", "--ops", "rope", "--need", "measured"]
    reason = (
        "no H200 is here, and --need measured asks for records that were timed on one: --fix cannot make them on this "
        "machine"
    )
    assert run(*arguments) == 3
    first, *_, last = capsys.readouterr().out.splitlines()
    assert (first, last[:32]) == (reason, "2 missing; on a H200 --fix build")
    assert run(*arguments, "--json") == 3
    assert json.loads(capsys.readouterr().out)["cannot_fix"] == reason
    for way in ([], ["--by", "compile"]):
        assert run(*arguments, "--fix", *way) == 2
        assert capsys.readouterr() == ("", f"tilekern: {reason}; run it where the GPU is, or ask for less\n")
    assert not (tmp_path / "cache").exists()


def test_where_the_gpu_is_fix_is_promised_but_not_by_compiling(model, monkeypatch, capsys):
    monkeypatch.setattr(checks, "here", lambda: H200)
    arguments = [model, "--gpu", "H200", "--tokens", "64", "--ops", "rope", "--need", "measured"]
    assert run(*arguments) == 3
    said = capsys.readouterr().out
    assert said.startswith(f"{model} on H200: 2 problems: ")
    assert "2 missing; --fix builds them" in said
    assert run(*arguments, "--fix", "--by", "compile") == 2
    assert "--by compile measures nothing" in capsys.readouterr().err


def test_what_any_record_serves_is_promised_on_every_machine(model, monkeypatch, capsys):
    monkeypatch.setattr(checks, "here", lambda: None)
    for need in ("served", "exact"):
        assert run(model, "--gpu", "H200", "--tokens", "64", "--ops", "rope", "--need", need, "--json") == 3
        assert json.loads(capsys.readouterr().out)["cannot_fix"] is None


@pytest.fixture(scope="module")
def inside():
    """Two lengths of a step, planned for the invariant mode too."""
    steps = Steps((64, 128), ops=("rope", "swiglu"), optimizer="none", invariant=True)
    return plan_of_model(CONFIG, steps, H200)


def fill(root, planned, bits="a"):
    for named in planned.problems:
        put(root, *named, provenance="measured", bits=bits if named in planned.invariant else None)


def test_the_invariant_mode_needs_a_bit_class_for_each_problem_with_rows(inside, tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "here", lambda: None)
    fill(tmp_path / "cache", inside)
    found = checks.preflight_of(inside, H200)
    assert (found.missing, found.cannot_fix) == ([], None)
    # The kernels for decoding and for few rows serve beside others.
    needy = [named for named in inside.invariant if sizes_of_class(spec_named(named[0]), named[1])[0] == named[0]]
    assert found.invariant_counts() == {"with": len(needy), "without": 0}
    assert {need.bits for need in found.needs} == {None, "a"}, "gradients need none"
    alike = [named for named in needy if named[0] == "swiglu_forward"]
    assert len(alike) > 1
    for lacking in alike:
        assert not checks.preflight_of(inside, H200).missing, "a record of another size with a class serves"
        put(tmp_path / "cache", *lacking, provenance="measured")
    found = checks.preflight_of(inside, H200)
    assert sorted(((need.kernel, need.problem) for need in found.missing), key=str) == sorted(alike, key=str)
    for need in found.missing:
        assert "exact, measured; no bit class: its record names no kernel of one bit class" in checks.line_of(need)
    assert found.cannot_fix.startswith("no H200 is here, and --invariant asks for records that were timed on one")
    assert not checks.preflight_of(dataclasses.replace(inside, invariant=frozenset()), H200).missing


def test_fix_tunes_all_sizes_of_a_class_together(inside, tmp_path, monkeypatch):
    fill(tmp_path / "cache", inside)
    sizes = [named for named in inside.problems if named[0] == "swiglu_forward"]
    odd = sizes[-1]
    put(tmp_path / "cache", *odd, provenance="measured", bits="b")
    monkeypatch.setattr(checks, "here", lambda: H200)
    monkeypatch.setattr(checks, "require_toolkit", lambda: types.SimpleNamespace(key=TOOLS["key"]))
    found = checks.preflight_of(inside, H200)
    (need,) = found.missing
    assert len(sizes) == 2
    assert "records of its sizes name two bit classes" in need.varies
    with pytest.raises(InputError, match="--by compile measures nothing, and --invariant asks for that"):
        checks.fix(found, checks.COMPILE)

    def tuned(_cache, named, _options, _tell, invariant):
        assert (named, invariant) == (sizes, set(sizes))
        fill(tmp_path / "cache", inside, "c")
        return dict.fromkeys(named)

    monkeypatch.setattr("tilekern.tuning.serve.loop.tune", tuned)
    again = checks.fix(found)
    assert again.missing == []
    assert {need.bits for need in again.needs} == {None, "c"}


@pytest.mark.slow
def test_the_command_and_the_call_ask_for_classes(model, tmp_path, capsys):
    asked = {"ops": ["rope"], "optimizer": "none", "invariant": True}
    found = tilekern.preflight(CONFIG, 64, gpu="H200", decode=2, context=64, **asked)
    assert {need.kernel for need in found.needs if need.needs_class} >= {"rope", "matmul"}
    for need in found.needs:
        put(tmp_path / "cache", need.kernel, need.problem, provenance="measured")
    options = ["--tokens", "64", "--ops", "rope", "--optimizer", "none", "--decode", "2", "--context", "64"]
    assert run(model, "--gpu", "H200", *options) == 0
    capsys.readouterr()
    assert run(model, "--gpu", "H200", *options, "--invariant") == 3
    lacking = found.invariant_counts()["without"]
    assert f"tilekern.invariant(): 0 with a bit class, {lacking} without" in capsys.readouterr().out


@needs_compiler
@pytest.mark.slow
def test_fix_tunes_only_what_is_missing(model, default_configs, tmp_path, capsys):
    first = rope().needs[0]
    put(tmp_path / "cache", first.kernel, first.problem, provenance="measured")
    arguments = [model, "--gpu", "H200", "--tokens", "64", "--ops", "rope", "--json"]
    assert run(*arguments, "--fix") == 0
    done = json.loads(capsys.readouterr().out)
    assert done["complete"]
    assert [problem["provenance"] for problem in done["problems"]] == ["measured", "predicted"]
    (sweep,) = (tmp_path / "cache" / "sweeps").glob("*/sweep.json")
    assert len(json.loads(sweep.read_text())["problems"]) == 1
    assert run(*arguments) == 0


@pytest.mark.parametrize(("is_here", "provenance", "is_left_out"), [
    (False, "predicted", True), (True, "predicted", False), (True, "measured", True),
])  # fmt: skip
def test_a_tune_of_what_is_missing_leaves_out_what_serves(
    is_here, provenance, is_left_out, model, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(checks, "here", lambda: H200 if is_here else None)
    needs = rope().needs
    put(tmp_path / "cache", needs[0].kernel, needs[0].problem, provenance=provenance)
    arguments = [model, "--gpu", "H200", "--tokens", "64", "--op", "rope", "--missing", "--dry-run", "--json"]
    assert not cli.main(arguments)
    planned = json.loads(capsys.readouterr().out)["problems"]
    assert [problem["kernel"] for problem in planned] == [need.kernel for need in needs[is_left_out:]]


def test_a_tune_of_what_is_missing_has_nothing_to_do_where_all_is_there(model, tmp_path, capsys):
    for need in rope().needs:
        put(tmp_path / "cache", need.kernel, need.problem)
    assert not cli.main([model, "--gpu", "H200", "--tokens", "64", "--op", "rope", "--missing"])
    assert "2 of 2 problems have their records" in capsys.readouterr().out
    assert not list((tmp_path / "cache").glob("sweeps/*"))


@pytest.mark.parametrize("more", [["--stages", "measure"], ["--packs", "packs"]])
def test_a_tune_of_what_is_missing_plans_and_writes_no_packs_of_models(more, model, capsys):
    assert cli.main([model, "--gpu", "H200", "--missing", *more]) == 2
    assert "--missing" in capsys.readouterr().err


@needs_compiler
@pytest.mark.slow
def test_fix_by_compiling_takes_the_defaults(model, tmp_path, capsys):
    arguments = [model, "--gpu", "H200", "--tokens", "64", "--ops", "rope", "--json", "--cache-dir", tmp_path / "other"]
    assert run(*map(str, arguments), "--fix", "--by", "compile") == 0
    done = json.loads(capsys.readouterr().out)
    assert {problem["provenance"] for problem in done["problems"]} == {"default"}
    assert not (tmp_path / "cache").exists()


@needs_compiler
@pytest.mark.slow
def test_what_cannot_be_made_keeps_its_reason(tmp_path):
    found = checks.fix(rope(), checks.COMPILE, timeout_s=0.001)
    assert len(found.missing) == len(found.needs)
    for need in found.missing:
        assert "tileiras exceeded" in checks.line_of(need)
    assert checks.fix(found, checks.COMPILE).missing == []
