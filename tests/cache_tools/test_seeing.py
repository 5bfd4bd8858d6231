"""Commands that inspect layers: ls, show, stats, diff, why and wanted."""

import json

import pytest
from cache_samples import B200, H100, H200, PROBLEM, failing_folders, made_today, make, put, toolkit
from command_line import KEY, PREBUILT

from tilekern.cache import FolderLayer, Store, Where, default_layers, note_misses, note_wanted, wanted_name, write_pack
from tilekern.compile.toolchain import toolkit as installed
from tilekern.kernels import spec_named
from tilekern.runtime import dispatch
from tilekern.spec.targets import resolve

TODAY = made_today()
SWIGLU = "rows=5000,columns=12288,dtype=bfloat16"
SWIGLU_BUCKET = {"rows": 8192, "columns": 12288, "dtype": "bfloat16"}

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def layers(tmp_path, cache, monkeypatch):
    """Beside the cache, a folder and a pack of TILEKERN_CACHE_PATH: their names."""
    folder, pack = tmp_path / "folder", tmp_path / "more.pack"
    put(folder, b"four" * 100, created_by="the folder", **TODAY)
    write_pack(pack, [make(b"five" * 100, target=H100, **TODAY)])
    monkeypatch.setenv("TILEKERN_CACHE_PATH", f"{folder}:{pack}")
    return str(folder), pack.name


def test_ls_of_all_layers(cli, cache, layers):
    folder, pack = layers
    document = cli.json("ls", "--layers", "--kernel", "rms_norm")
    assert [layer["name"] for layer in document["layers"]][:3] == ["user", folder, pack]
    assert document["layers"][0]["path"] == str(cache)
    assert [record["layer"] for record in document["records"]] == ["user", "user", folder, pack]
    assert [record["layer"] for record in cli.json("ls", "--layer", pack)["records"]] == [pack]
    assert [record["layer"] for record in cli.json("ls")["records"]] == ["user"] * 3
    groups = [part.splitlines()[0] for part in cli("ls", "--layers", "--kernel", "rms_norm")[1].split("\n\n")]
    places = [("h200", "user"), ("h200", folder), ("h100", pack)]
    assert groups == [f"sm_90-{gpu}-132, tileiras-13.4.92, {layer}" for gpu, layer in places]
    cli.refused("ls", "--layer", "nowhere", says=("nowhere", "user", pack))


def test_a_bad_pack_among_the_layers_is_named_and_left_out(cli, tmp_path, monkeypatch):
    (tmp_path / "bad.pack").write_bytes(b"PK")
    monkeypatch.setenv("TILEKERN_CACHE_PATH", f"{tmp_path / 'bad.pack'}:{tmp_path / 'nowhere'}")
    code, out, err = cli("ls", "--layers", "--kernel", "rms_norm")
    assert (code, out.count("rms_norm ")) == (0, 2)
    assert "left out: " in err
    assert "bad.pack" in err
    assert "nowhere" in err
    assert "Traceback" not in err


def test_a_filter_keeps_what_it_refuses_from_being_read(cli, cache):
    bad = next(entry.path for entry in Store(cache).entries() if entry.record.kernel == "swiglu")
    bad.write_text("{")
    assert cli.json("ls", "--kernel", "rms_norm")["unreadable"] == []
    assert cli.json("ls", "--gpu", "H200")["unreadable"] == []
    assert [item["path"] for item in cli.json("ls", "--gpu", "B200")["unreadable"]] == [str(bad)]


@pytest.mark.parametrize(
    "filters",
    [
        ("--kernel", "swiglu"),
        ("--gpu", "B200"),
        ("--toolkit", "tileiras-13.5.0"),
        ("--problem", KEY),
        ("--provenance", "measured"),
        ("--older-than", "1d"),
        (),
    ],
)
def test_a_folder_that_cannot_be_listed_is_named_if_it_may_hold_chosen_records(
    cli, cache, tmp_path, monkeypatch, filters
):
    (folder,) = {entry.path.parent for entry in Store(cache).entries() if entry.record.kernel == "swiglu"}
    failing_folders(monkeypatch).append(folder)
    code, _, err = cli("ls", *filters)
    assert (code, err) == (0, f"unreadable: {folder}: cannot list {folder}: Input/output error\n")
    cli.refused("pack", str(tmp_path / "out.pack"), *filters, says=f"cannot list {folder}")
    assert not (tmp_path / "out.pack").exists()
    assert cli("ls", "--kernel", "rms_norm")[2] == ""
    assert cli("pack", str(tmp_path / "out.pack"), "--kernel", "rms_norm")[0] == 0
    assert cli.json("clear", "--kernel", "swiglu", "--yes")["removed"] == 0


def test_what_a_filter_looks_at_is_named_step_by_step(cache):
    asked = []

    def only_the_h200(names):
        asked.append(names)
        return names[0] == H200["key"]

    where: Where = only_the_h200
    assert {entry.address.target_key for entry in Store(cache).entries(where)} == {H200["key"]}
    assert {len(names) for names in asked} == {1, 2, 3, 4}
    assert [names for names in asked if names[0] == B200["key"]] == [(B200["key"],)]


def test_an_entry_without_bulk_is_still_judged_and_compared(tmp_path):
    put(tmp_path)
    (entry,) = Store(tmp_path).entries()
    light, record = entry.without_bulk().record, entry.record
    assert (light.address, light.digests, light.config) == (record.address, record.digests, record.config)
    assert (light.source_digest, light.measurement) == (record.source_digest, record.measurement)
    assert (light.runners_up, light.check, light.artifacts["aligned"].resources) == ([], None, {})
    assert not light.__dict__.get("data")


def test_show_names_the_layers_and_the_winner(cli, cache, layers):
    folder, pack = layers
    document = cli.json("show", "rms_norm", KEY)
    assert (document["layer"], document["record"]["created_by"], document["stale"]) == (folder, "the folder", False)
    assert document["wins"] == {"layer": folder, "target": H200["key"], "toolkit": toolkit()["key"]}
    assert [(place["layer"], place["outcome"]) for place in document["places"]] == [
        ("user", "stale"),
        (folder, "taken"),
    ]
    out = cli("show", "rms_norm", KEY)[1]
    assert "stale: made from another source of the kernel" in out
    there = cli.json("show", "rms_norm", KEY, "--gpu", "H100")
    assert (there["layer"], there["places"][0]["outcome"]) == (pack, "taken")


@pytest.fixture
def dated(cache):
    """The cache with a record of another search space, and a fresh one beside the stale ones: of 1 and 4 rows."""
    put(cache, problem={**PROBLEM, "rows": 4}, **TODAY)
    return put(cache, problem={**PROBLEM, "rows": 1}, **TODAY | {"space_digest": "0" * 64})


def test_every_command_says_what_is_not_known_to_be_the_best(cli, cache, dated):
    words = "not known to be the best: the space has changed since"
    found = {r["problem"]["rows"]: (r["stale"], r["fresh"]) for r in cli.json("ls", "--gpu", "H200")["records"]}
    assert found == {1: (False, False), 4: (False, True), 1024: (True, False), 8192: (True, False)}
    listed = cli("ls")[1]
    assert [listed.count(state) for state in ("measured (space changed)", "(stale)")] == [1, 3]
    verified = cli.json("verify")
    assert (verified["not_fresh"], len(verified["stale"]), verified["broken"]) == ([str(dated)], 3, [])
    assert f"not known to be the best: {dated}: the space has changed since" in cli("verify")[1]
    shown = cli.json("show", "rms_norm", dated.stem)
    assert (shown["stale"], shown["fresh"]) == (False, False)
    assert [place["detail"] for place in shown["places"]] == [f"taken, {words}"]
    assert f"fresh: no, {words}" in cli("show", "rms_norm", dated.stem)[1]
    assert f"fresh: no, {words}" not in cli("show", "rms_norm", KEY)[1]
    assert (cli.json("stats")["stale"], cli.json("stats")["not_fresh"]) == (3, 1)
    cli.json("clear", "--stale", "--yes")
    assert dated.exists()


def test_verify_of_a_pack_says_what_is_not_known_to_be_the_best(cli, tmp_path):
    write_pack(tmp_path / "a.pack", [make(**TODAY | {"space_digest": "0" * 64})])
    found = cli.json("verify", tmp_path / "a.pack")
    assert (found["not_fresh"], found["stale"]) == ([str(make()[0].address.path)], [])


def test_why_tells_of_a_record_that_is_taken_and_not_known_to_be_the_best(cli, tmp_path, monkeypatch):
    today = made_today("tilekern.kernels.swiglu")
    root = tmp_path / "dated"
    spec, target = spec_named("swiglu_forward"), resolve("H200")
    config = dict(spec.default(spec.problem(**SWIGLU_BUCKET), target))
    put(root, kernel="swiglu_forward", module="tilekern.kernels.swiglu", problem=SWIGLU_BUCKET, config=config,
        **today | {"space_digest": "0" * 64})  # fmt: skip
    monkeypatch.setenv("TILEKERN_CACHE_DIR", str(root))
    monkeypatch.setattr(
        "tilekern.cache_tools.commands.why.default_layers", lambda *_, **__: [FolderLayer(root, "user")]
    )
    document = cli.json("why", "swiglu_forward", SWIGLU, "--gpu", "H200")
    assert document["source_digest"] == today["source_digest"]
    assert [step["outcome"] for step in document["steps"]] == ["dated", "taken"]
    assert document["hit"]["fresh"] is False
    out = cli("why", "swiglu_forward", SWIGLU, "--gpu", "H200")[1]
    assert "it is not known to be the best: the space has changed since; tune it again" in out
    said = f"its own bucket, of another toolkit, {document['hit']['toolkit']}"
    assert (said in out) == (document["toolkit"] is not None)


def test_show_says_why_a_record_of_its_own_layer_does_not_win(cli, cache):
    for version, digests in (("13.9.0", {"source_digest": "0" * 64}), ("13.10.0", TODAY), ("13.8.0", TODAY)):
        put(cache, version.encode(), toolkit=toolkit(version), **digests)
    document = cli.json("show", "rms_norm", KEY)
    assert document["record"]["toolkit"]["tileiras"] == "13.10.0"
    assert {place["toolkit"]: place["outcome"] for place in document["places"]} == {
        "tileiras-13.10.0": "taken",
        "tileiras-13.8.0": "not_reached",
        "tileiras-13.9.0": "not_reached",
        "tileiras-13.4.92": "not_reached",
    }
    older = cli.json("show", "rms_norm", KEY, "--toolkit", "tileiras-13.9.0")
    assert (older["record"]["toolkit"]["tileiras"], older["stale"]) == ("13.9.0", True)
    assert older["wins"]["toolkit"] == "tileiras-13.10.0"


def test_show_of_a_kernel_that_is_not_installed_here(cli, cache):
    put(cache, kernel="foreign", module="no_such_module.at_all")
    document = cli.json("show", "foreign", KEY)
    assert (document["stale"], document["wins"]) == (None, None)
    assert document["places"][0]["outcome"] == "unknown"


def test_show_disassembles_an_artifact(cli, tmp_path, monkeypatch):
    (row,) = cli.json(
        "ls", "--layer", "prebuilt:qwen3-8b-h200", "--kernel", "swiglu_forward", "--problem", "rows=8192",
        root=tmp_path / "none",
    )["records"]  # fmt: skip
    both = ("show", row["kernel"], row["problem_key"], "--gpu", "H200", "--sass")
    (sass,) = cli.json(*both, "--variant", "generic", root=tmp_path / "none")["sass"].items()
    assert (sass[0], "EXIT" in sass[1]) == ("generic", True)
    cli.refused(*both, "--variant", "fast", root=tmp_path / "none", says=("fast", "aligned, generic"))
    monkeypatch.setattr("importlib.util.find_spec", {}.get)
    monkeypatch.setenv("PATH", str(tmp_path))
    cli.refused(*both, root=tmp_path / "none", says=("nvdisasm", "tilekern[inspect]"))
    (tmp_path / "nvdisasm").write_text("#!/bin/sh\necho EXIT\n")
    (tmp_path / "nvdisasm").chmod(0o755)
    assert cli.json(*both, root=tmp_path / "none")["sass"] == {"aligned": "EXIT\n", "generic": "EXIT\n"}


def test_show_refuses_to_disassemble_other_bytes_than_a_cubin(cli):
    cli.refused("show", "rms_norm", KEY, "--sass", says="nvdisasm cannot read the artifact")


def test_stats_of_all_layers(cli, cache, layers):
    folder, pack = layers
    alone, document = cli.json("stats"), cli.json("stats", "--layers")
    assert alone["by"]["layer"] == {"user": {"records": 3, "bytes": alone["bytes"]}}
    assert document["by"]["layer"][folder]["records"] == document["by"]["layer"][pack]["records"] == 1
    assert document["records"] == sum(total["records"] for total in document["by"]["layer"].values())
    for name in ("bytes", "blobs", "orphans"):
        assert document[name] == alone[name]
    assert (alone["stale"], document["stale"]) == (3, 3)
    assert alone["unknown_source"] == 0


def measured(median_us, spread_us=0.5):
    return {"median_us": median_us, "default_us": 100.0, "spread_us": spread_us}


def test_diff(cli, tmp_path):
    a, b = tmp_path / "a", tmp_path / "b.pack"
    pairs = {
        1: (measured(50.0), measured(40.0)),
        2: (measured(50.0), measured(60.0)),
        4: (measured(50.0), measured(50.9)),
        8: (measured(50.0), None),
        16: (None, measured(50.0)),
    }
    into_b = []
    for rows, (before, after) in pairs.items():
        problem = {**PROBLEM, "rows": rows}
        if before:
            put(a, b"a", problem=problem, measurement=before, **TODAY)
        if after:
            into_b.append(make(b"a", problem=problem, measurement=after, **TODAY))
    put(a, b"a", problem={**PROBLEM, "rows": 32}, provenance="predicted", measurement=None)
    into_b.append(make(b"b", problem={**PROBLEM, "rows": 32}, **TODAY))
    write_pack(b, into_b)
    document = cli.json("diff", a, b)
    rows_of = {
        name: [int(item["problem_key"].split(",")[0].removeprefix("rows=")) for item in document[name]]
        for name in ("new", "gone", "faster", "slower", "changed", "stale")
    }
    assert rows_of == {"new": [16], "gone": [8], "faster": [1], "slower": [2], "changed": [32], "stale": [32]}
    assert document["same"] == 1
    assert document["faster"][0]["ratio"] == 1.25
    assert (document["faster"][0]["a"]["time_us"], document["faster"][0]["b"]["spread_us"]) == (50.0, 0.5)
    assert document["changed"][0]["because"] == "other provenance, machine code, the kernel's source"
    out = cli.said("diff", a, b)
    assert "1 new, 1 gone, 1 faster, 1 slower, 1 changed, 1 stale, 1 the same" in out
    assert "1.25x" in out


def test_diff_across_toolkits(cli, tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    put(a, toolkit=toolkit("13.4.92"), measurement=measured(50.0))
    put(b, toolkit=toolkit("13.9.1"), measurement=measured(99.0))
    put(b, toolkit=toolkit("13.10.0"), measurement=measured(25.0))
    same_toolkit = cli.json("diff", a, b)
    assert (len(same_toolkit["new"]), len(same_toolkit["gone"])) == (2, 1)
    (faster,) = cli.json("diff", a, b, "--any-toolkit")["faster"]
    assert (faster["ratio"], faster["b"]["toolkit"], faster["because"]) == (2.0, "tileiras-13.10.0", "other toolkit")


def test_why_tells_the_lookup_that_dispatch_does(cli, cache):
    swiglu = {"kernel": "swiglu_forward", "module": "tilekern.kernels.swiglu", "problem": SWIGLU_BUCKET}
    put(cache, target=resolve("H200").describe(), toolkit=installed().describe(), **swiglu)
    document = cli.json("why", "swiglu_forward", SWIGLU, "--gpu", "H200")
    spec = spec_named("swiglu_forward")
    problem = spec.problem(rows=5000, columns=12288, dtype="bfloat16")
    layers = default_layers(cache, looking=True)
    hit = dispatch.find(spec, spec.bucketed(problem), resolve("H200"), layers=layers)
    assert (document["hit"]["layer"], document["hit"]["config"]) == (hit.layer.name, hit.record.config)
    pack = document["hit"]["layer"].removeprefix("prebuilt:")
    assert pack.endswith("-h200")
    assert document["problem_key"] == "rows=8192,columns=12288,dtype=bfloat16"
    packs = sorted(path.stem for path in PREBUILT.glob("*.pack"))
    asked = packs[: packs.index(pack)]
    before = [(f"prebuilt:{name}", "not_there" if name.endswith("-h200") else "no_records") for name in asked]
    assert {outcome for _, outcome in before} == {"not_there", "no_records"}
    assert [(step["layer"], step["outcome"]) for step in document["steps"]] == [
        ("user", "stale"),
        ("user", "not_there"),
        *before,
        (f"prebuilt:{pack}", "taken"),
    ]
    out = cli("why", "swiglu_forward", SWIGLU, "--gpu", "H200")[1]
    assert "1. user: " in out
    assert "no such record in: prebuilt:" in out
    assert f"taken: from prebuilt:{pack}, measured, of this very GPU, its own bucket" in out


def test_why_nothing_serves_or_a_relative_does(cli):
    lonely = cli.json("why", "swiglu_forward", SWIGLU, "--gpu", "sm_121")
    assert lonely["hit"] is None
    assert {step["outcome"] for step in lonely["steps"]} == {"no_records"}
    assert lonely["steps"][-1]["layer"] is None
    assert "TILEKERN_ON_MISS" in cli("why", "swiglu_forward", SWIGLU, "--gpu", "sm_121")[1]
    head = "rows=64,hidden=128,vocabulary=256,dtype=bfloat16"
    composite = cli("why", "fused_linear_cross_entropy", head, "--gpu", "sm_121")[1]
    assert "a job runs its default, chunk=128,products=cublas, by its kernels' own records" in composite
    relative = cli.json("why", "swiglu_forward", "rows=2,columns=12288,dtype=bfloat16", "--gpu", "sm_90-gh200-132")
    assert (relative["hit"]["exact_target"], relative["hit"]["exact_bucket"]) == (False, False)
    assert relative["target"] == "sm_90-gh200-132"


def test_why_changes_nothing_and_reports_a_bad_record(cli, cache):
    swiglu = {"kernel": "swiglu_forward", "module": "tilekern.kernels.swiglu", "problem": SWIGLU_BUCKET}
    path = put(cache, target=resolve("H200").describe(), toolkit=installed().describe(), **swiglu)
    path.write_text("{")
    code, out, err = cli("why", "swiglu_forward", SWIGLU, "--gpu", "H200", "--json")
    assert (code, json.loads(out)["steps"][0]["outcome"]) == (0, "bad")
    assert err == f"tilekern: {path} is bad: {json.loads(out)['steps'][0]['detail']}\n"
    assert path.read_text() == "{"


def test_wanted_says_how_often_a_problem_ran_untuned(cli, cache):
    assert "nothing is wanted" in cli.said("wanted")
    note_wanted(cache, "rope", PROBLEM, H100, "no record")
    note_wanted(cache, "swiglu", PROBLEM, H100, "no record")
    note_misses(cache, "0" * 8, {wanted_name("rope", PROBLEM, H100): 40})
    note_misses(cache, "1" * 8, {wanted_name("rope", PROBLEM, H100): 2})
    assert {item["kernel"]: item["runs"] for item in cli.json("wanted")["wanted"]} == {"rope": 42, "swiglu": 0}
    assert " 42 " in cli("wanted")[1]
    assert "sm_90-h100-132" in cli.said("wanted")
    assert cli.json("wanted", "--clear")["cleared"] == 2
    assert cli.json("wanted")["wanted"] == []
