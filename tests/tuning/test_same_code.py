"""Records that an edit made stale keep their figures where their machine code is the same; by a real compiler."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tuning_samples import H200, SMALL

from tilekern.cache import BestKernel, FolderLayer, Record, Store, freshness, write_pack
from tilekern.compile.toolchain import compile_candidate, toolkit
from tilekern.kernels import spec_named
from tilekern.runtime.records import artifact_of, record_of
from tilekern.spec import ALIGNED, GENERIC, INVARIANT, Config
from tilekern.spec.source import source_digest
from tilekern.tuning import carrying, cli
from tilekern.tuning.carrying import HISTORY, carry_over, held_in_cache, held_in_pack
from tilekern.tuning.compile.order import Order
from tilekern.tuning.plan.choosing import parts_of, with_parts
from tilekern.tuning.sweep.candidates import candidates

ROOT = Path(__file__).parents[2]
ANOTHER = "0" * 64
SCALE = ("scale", spec_named("scale").problem(rows=8192, columns=4096, dtype="bfloat16"))
MEASUREMENT = {
    "median_us": 7.5,
    "default_us": 8.0,
    "spread_us": 0.1,
    "samples": 85,
    "gpu": "NVIDIA H200",
    "driver": "5",
}
PREDICTION = {"time_us": 7.5, "default_us": 8.0}
pytestmark = [
    pytest.mark.processes, pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")
]  # fmt: skip


def made(named, provenance="measured", config=None, **changes):
    """A record of another source than today's, and its artifacts as today's source makes them."""
    spec, problem = spec_named(named[0]), named[1]
    config = config or spec.default(problem, H200)
    artifacts, blobs = {}, {}
    for variant, chosen in ((ALIGNED, config), (GENERIC, spec.generic(problem))):
        if not spec.is_library(problem, config):
            compiled = compile_candidate(spec, problem, chosen, H200, variant)
            artifacts[variant] = artifact_of(compiled, chosen)
            blobs[artifacts[variant].sha256] = compiled.cubin
    figures = {"measurement": MEASUREMENT} if provenance == "measured" else {"prediction": PREDICTION}
    record = record_of(
        spec, problem, config, H200, toolkit().describe(), artifacts, provenance, **figures,
        candidates=len(candidates(*named, H200)),
    )  # fmt: skip
    created = {"created": "2026-01-31T12:00:00+00:00", "source_digest": ANOTHER, "space_digest": ANOTHER}
    return msgspec.structs.replace(record, **(created | changes)), blobs


@pytest.fixture(scope="module")
def scale():
    return made(SCALE)


@pytest.fixture(scope="module")
def predicted():
    return made(SMALL, "predicted")


def carried(*held, **options):
    return carry_over([held], toolkit().key, 1, **options)[0]


def worth(record: Record) -> str:
    return freshness(record, source_digest(record.module))


def reasons(found):
    return [left.reason for left in found.left]


def without_bytecode(record):
    artifacts = {name: msgspec.structs.replace(one, bytecode=None) for name, one in record.artifacts.items()}
    return msgspec.structs.replace(record, artifacts=artifacts)


@pytest.mark.parametrize(("name", "compiled"), [("scale", 0), ("scale", 2), ("predicted", 0)])
def test_what_is_the_same_keeps_its_figures_and_says_so(name, compiled, request):
    """What the front end lowers to the same bytecode is not compiled; where a record does not say, it is."""
    old, blobs = request.getfixturevalue(name)
    artifacts = old.artifacts
    old = without_bytecode(old) if compiled else old
    assert worth(old) == "stale"
    found = carried((old, blobs))
    assert (found.left, found.current, found.compiled) == ([], 0, compiled)
    [(before, (new, new_blobs))] = found.carried
    assert before is old
    assert worth(new) == "fresh"
    assert set(new_blobs) == new.digests
    assert [one.bytecode for one in new.artifacts.values()] == [one.bytecode for one in artifacts.values()]
    assert new.to_json() == Record.from_json(new.to_json()).to_json()
    figures, old_figures = (one.measurement or one.prediction for one in (new, old))
    [step] = figures[HISTORY]
    assert (step["because"], step["source_digest"]) == ("identical machine code", ANOTHER)
    assert {name: figures[name] for name in old_figures} == old_figures
    kept = ("problem", "config", "provenance", "created", "created_by", "check", "runners_up", "candidates", "target")
    assert [getattr(new, name) for name in kept] == [getattr(old, name) for name in kept]
    again = msgspec.structs.replace(new, source_digest="1" * 64)
    [(_, (newest, _))] = carried((again, new_blobs)).carried
    steps = (newest.measurement or newest.prediction)[HISTORY]
    assert [one["source_digest"] for one in steps] == [ANOTHER, "1" * 64]
    assert [one["times"] for one in steps] == [1, 2]


@pytest.mark.parametrize(("earlier", "times"), [(["1", "2"], 3), (["1", "2", "3", "4", "5"], 6)])
def test_the_first_and_the_last_time_are_kept_also_of_records_that_list_all(scale, earlier, times):
    old, blobs = scale
    # As versions before wrote them, which did not count.
    listed = [{"because": "identical machine code", "source_digest": one * 64} for one in earlier]
    old = msgspec.structs.replace(old, measurement=old.measurement | {HISTORY: listed})
    for more in range(2):
        [(_, (new, _))] = carried((old, blobs)).carried
        first, last = new.measurement[HISTORY]
        assert first == listed[0]
        assert (last["source_digest"], last["times"]) == (old.source_digest, times + more)
        old = msgspec.structs.replace(new, source_digest=ANOTHER)


def test_an_invariant_kernel_is_carried_with_the_winner(scale):
    spec, problem = spec_named(SCALE[0]), SCALE[1]
    record, blobs = scale
    other = Config(record.config)
    other = other.but(tile_n=2048 if other["tile_n"] != 2048 else 1024)
    made = compile_candidate(spec, problem, other, H200, ALIGNED)
    artifact = artifact_of(made, other)
    held = msgspec.structs.replace(record, artifacts=record.artifacts | {INVARIANT: artifact})
    [(_, (new, new_blobs))] = carried((held, blobs | {artifact.sha256: made.cubin})).carried
    assert new.artifacts[INVARIANT] == artifact
    assert new_blobs[artifact.sha256] == made.cubin


def test_other_machine_code_stays_stale(scale):
    """The aligned artifact is that of another config, as if the kernel had differed."""
    spec, problem = spec_named(SCALE[0]), SCALE[1]
    record, blobs = scale
    config = Config(record.config)
    other = compile_candidate(
        spec, problem, config.but(tile_n=2048 if config["tile_n"] != 2048 else 1024), H200, ALIGNED
    )
    artifact = artifact_of(other, config)
    bad = msgspec.structs.replace(record, artifacts=record.artifacts | {ALIGNED: artifact})
    found = carried((bad, blobs | {artifact.sha256: other.cubin}))
    assert not found.carried
    [reason] = reasons(found)
    assert reason.startswith("aligned: other machine code")


def test_records_that_cannot_be_judged_stay_stale_with_a_reason(scale):
    record, blobs = scale
    replaced = msgspec.structs.replace
    other = {**record.config, "tile_n": 2048 if record.config["tile_n"] != 2048 else 1024}
    held = {
        "cuda_tile-1 made it": replaced(record, toolkit={**record.toolkit, "key": "tileiras-1-cuda_tile-1"}),
        "has other dimensions": replaced(record, problem={**record.problem, "new": 3}),
        "other parameters": replaced(record, config={**record.config, "new": 3}),
        "today's default is another config": replaced(record, config=other, measurement=None, provenance="default"),
        "is not known here": replaced(record, target={**record.target, "key": "sm_90-other"}),
        "does not have the kernel": replaced(record, kernel="no_such_kernel"),
        "no artifacts": replaced(record, artifacts={}),
        "its config cannot be read": replaced(record, config={**record.config, "tile_n": [1]}),
    }
    today = replaced(record, source_digest=source_digest(record.module))
    found = carried(*((one, blobs) for one in held.values()), (today, blobs))
    assert (found.carried, found.current, found.compiled) == ([], 1, 0)
    for expected, reason in zip(held, reasons(found), strict=True):
        assert expected in reason


def test_a_default_is_carried_while_it_is_the_default():
    old, blobs = made(SMALL, "default", prediction=None)
    [(_, (new, _))] = carried((old, blobs)).carried
    assert (new.provenance, worth(new)) == ("default", "fresh")
    assert (new.measurement, new.prediction, new.config) == (None, None, old.config)


def test_a_winner_of_another_space_is_not_known_to_be_the_best(scale):
    record, blobs = scale
    for changes in ({"candidates": 99}, {"runners_up": [{"config": {**record.config, "tile_n": 64}}]}):
        other = msgspec.structs.replace(record, **changes)
        [(_, (new, new_blobs))] = carried((other, blobs)).carried
        assert worth(new) == "dated"
        assert carried((new, new_blobs)).current == 1
        [(_, (newest, _))] = carried((msgspec.structs.replace(new, source_digest="1" * 64), new_blobs)).carried
        assert worth(newest) == "dated"


def test_a_refreshed_record_stays_the_best_where_its_space_is_said_to_be_the_same(scale):
    """A refresh tries the winner, some runners-up and the default."""
    record, blobs = scale
    refreshed = msgspec.structs.replace(record, candidates=3)
    [(_, (new, _))] = carried((refreshed, blobs)).carried
    assert worth(new) == "dated"
    elsewhere = msgspec.structs.replace(refreshed, runners_up=[{"config": {**record.config, "tile_n": 64}}])
    dated = msgspec.structs.replace(refreshed, space_digest="1" * 64)
    for one, expected in ((refreshed, "fresh"), (elsewhere, "dated"), (dated, "dated")):
        [(_, (new, _))] = carried((one, blobs), same_spaces=True).carried
        assert worth(new) == expected


def test_places_share_what_is_made(scale, monkeypatch):
    made = []
    monkeypatch.setattr(carrying, "Order", lambda items: made.extend(items) or Order(items))
    outcomes = carry_over([[scale], [scale]], toolkit().key, 1)
    assert len(made) == 2
    assert [len(found.carried) for found in outcomes] == [1, 1]


def test_flags_that_are_new_are_off():
    spec = spec_named("matmul")
    flags = [dimension.name for dimension in spec.dimensions if dimension.kind == "flag"]
    assert flags
    sizes = {"rows": 64, "inner": 64, "columns": 64, "dtype": "bfloat16"}
    assert carrying._problem_today(spec, sizes) == spec.problem(**sizes, **dict.fromkeys(flags, False))
    assert carrying._problem_today(spec, {**sizes, flags[0]: True})[flags[0]] is True


def test_a_librarys_winner_is_carried_where_its_call_is_said_to_be_the_same():
    spec = spec_named("matmul")
    flags = {dimension.name: False for dimension in spec.dimensions if dimension.kind == "flag"}
    problem = spec.problem(rows=256, inner=256, columns=256, dtype="bfloat16", **flags)
    tile = next(item.config for item in candidates("matmul", problem, H200) if not item.is_library)
    by_cublas = next(item.config for item in candidates("matmul", problem, H200) if item.is_library)
    record, blobs = made(("matmul", problem), config=tile)
    best = BestKernel(dict(tile), {"median_us": 8.0}, None)
    record = msgspec.structs.replace(record, config=dict(by_cublas), best_kernel=best)
    assert "--same-calls" in reasons(carried((record, blobs)))[0]
    [(_, (new, _))] = carried((record, blobs), same_calls=True).carried
    assert (worth(new), new.best_kernel, new.config) == ("fresh", best, dict(by_cublas))


def test_a_composite_needs_records_of_today_of_all_its_parts(monkeypatch):
    spec = spec_named("attention_backward")
    problem = spec.problem(
        batch=1, queries=2048, keys=2048, heads=32, kv_heads=8, head_dim=128, causal=True, windowed=False,
        capped=False, packed=False, dtype="bfloat16", deterministic=True,
    )  # fmt: skip
    config = spec.default(problem, H200)
    whole = made((spec.name, problem), config=config)
    parts = [named for named in with_parts([(spec.name, problem)], H200) if named != (spec.name, problem)]
    assert parts

    def held(*others, **changes):
        return [(msgspec.structs.replace(made_of(named), **changes), {}) for named in others]

    def made_of(named):
        part = spec_named(named[0])
        return record_of(part, named[1], part.default(named[1], H200), H200, toolkit().describe(), {}, "measured",
                         measurement=MEASUREMENT)  # fmt: skip

    assert len(carried(whole, *held(*parts), same_calls=True).carried) == 1
    apart = carry_over([[whole], held(*parts)], toolkit().key, 1, same_calls=True)
    assert [len(found.carried) for found in apart] == [1, 0]
    missing = carried(whole, *held(*parts[1:]), same_calls=True)
    assert reasons(missing) == [f"its part {parts[0][0]} {parts[0][1].key} has no record of today here"]
    stale = carried(whole, *held(*parts[1:]), *held(parts[0], source_digest=ANOTHER), same_calls=True)
    assert any("has no record of today here" in reason for reason in reasons(stale))
    assert not stale.carried
    # Only what the winner launches, and a neighbouring bucket's record serves.
    way = Config(implementation="kernels")
    own = parts_of((spec.name, problem), way, H200)
    assert 0 < len(own) < len(parts)
    longer = [(kernel, sizes.but(**dict.fromkeys({"queries", "keys"} & set(sizes), 8192))) for kernel, sizes in own]
    for there in (own, longer):
        assert len(carried(made((spec.name, problem), config=way), *held(*there), same_calls=True).carried) == 1


def refresh(*arguments, capsys):
    assert cli.main(["refresh", "--same-code", "--jobs", "1", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["places"]


def test_a_pack_and_a_cache_are_written_anew(scale, predicted, tmp_path, capsys):
    pack, store = tmp_path / "a.pack", Store(tmp_path / "cache")
    today, blobs = made(SMALL)
    digests = dict.fromkeys(("source_digest", "space_digest"), source_digest(today.module))
    today = msgspec.structs.replace(today, **digests)
    write_pack(pack, [scale, (today, blobs)])
    store.write(*scale)
    in_pack, in_cache = refresh("--pack", pack, "--cache-dir", store.root, capsys=capsys)
    assert [len(place["carried"]) for place in (in_pack, in_cache)] == [1, 1]
    assert (in_pack["current"], in_pack["stale"], in_cache["current"]) == (1, [], 0)
    assert in_pack["carried"][0]["fresh"] is True
    assert [worth(record) for record, _ in held_in_pack(pack)] == ["fresh", "fresh"]
    assert [worth(record) for record, _ in held_in_cache(store.root)] == ["fresh"]
    before = pack.read_bytes()
    assert refresh("--pack", pack, capsys=capsys)[0]["current"] == 2
    assert pack.read_bytes() == before
    layer = FolderLayer(store.root, "cache")
    record = layer.read_record(H200.key, toolkit().key, "scale", scale[0].problem)
    assert all(layer.read_blob(digest) for digest in record.digests)


def test_options_that_say_nothing_together_are_refused(tmp_path, capsys):
    for options in (["--same-code", "--all"], ["--same-code", "--gpu", "H200"], ["--same-calls"], ["--same-spaces"]):
        assert cli.main(["refresh", *options, "--cache-dir", str(tmp_path)]) == 2
        assert "--same-code" in capsys.readouterr().err


OFF = {
    "ConstBool):\n": "ConstBool, twice: ConstBool):\n",
    " * by\n": " * by\n            if twice:\n                tile = tile * 2.0\n",
    "constants=bounds_of_tiles,":
        "constants=lambda problem, config: bounds_of_tiles(problem, config) | {\"twice\": False},",
}  # fmt: skip
OTHER = {" * by\n": " * by * 1.5\n"}


@pytest.mark.nightly
@pytest.mark.parametrize(("edit", "stays"), [(OFF, False), (OTHER, True)])
def test_an_edit_of_the_source_is_judged_by_what_it_compiles_to(edit, stays, scale, tmp_path):
    """The whole command in a copy of the package: a new option that is off changes nothing, another product does."""
    ignored = shutil.ignore_patterns("__pycache__", "*.pack", "source_digests.json")
    shutil.copytree(ROOT / "tilekern", tmp_path / "tilekern", ignore=ignored)
    path = tmp_path / "tilekern" / "kernels" / "scale.py"
    text = path.read_text(encoding="utf-8")
    for before, after in edit.items():
        assert text.count(before) == 1
        text = text.replace(before, after)
    path.write_text(text, encoding="utf-8")
    record = msgspec.structs.replace(scale[0], source_digest=source_digest(scale[0].module))
    pack = tmp_path / "scale.pack"
    write_pack(pack, [(record, scale[1])])
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "tilekern.tune", "refresh", "--same-code", "--pack", str(pack), "--json"]
    ran = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=True)
    [place] = json.loads(ran.stdout)["places"]
    [(new, _)] = held_in_pack(pack)
    if stays:
        assert place["stale"][0]["reason"].startswith("aligned: other machine code")
        assert new.to_json() == record.to_json()
    else:
        assert (place["stale"], len(place["carried"])) == ([], 1)
        assert new.source_digest != record.source_digest
        assert new.artifacts["aligned"].assumptions[-1] == {"kind": "constant", "value": False}
        assert new.measurement["median_us"] == record.measurement["median_us"]


def test_an_artifact_that_is_not_a_cubin_stays_where_it_is(scale):
    record, blobs = scale
    broken = dict.fromkeys(blobs, b"not a cubin")
    [reason] = reasons(carried((without_bytecode(record), broken)))
    assert reason.startswith("aligned: its artifact cannot be read: ")
