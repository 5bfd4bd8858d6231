import functools
import io
import itertools
import json
import math
import os
import re
import resource
import subprocess
import sys
from collections import Counter

import pytest
from cache_samples import B200, H100, PROBLEM, blob_file, fill, made_today, make, put, quietly, sealed, toolkit
from command_line import KEY, PREBUILT, ROOT, process

import tilekern
from tilekern.cache import FolderLayer, Pack, Store, note_wanted
from tilekern.cache_tools.cli import app, main
from tilekern.cache_tools.commands import pack as packing
from tilekern.spec.targets import resolve
from tilekern.tuning.plan.engine import plan_of_engine
from tilekern.tuning.plan.steps import Steps

H200 = resolve("H200")
HERE = made_today(module="tilekern.spec.source")

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("cache")]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", [None, *sorted(app.commands)])
def test_every_command_has_h_and_version(name, capsys):
    given = [name] if name else []
    assert main([*given, "-h"]) == 0
    brief = capsys.readouterr().out
    assert brief.startswith(f"Usage: {' '.join(['python -m tilekern.cache_tools', *given])} [OPTIONS]")
    assert main([*given, "--help"]) == 0
    assert capsys.readouterr().out == brief
    assert brief.count("--version") == 1
    if name != "wheel":  # whose --version is the package's
        assert main([*given, "--version"]) == 0
        assert capsys.readouterr().out == f"tilekern {tilekern.__version__}\n"


def test_every_file_of_a_command_is_a_command():
    files = {path.stem for path in (ROOT / "cache_tools" / "commands").glob("*.py")} - {"__init__"}
    assert {command.name for command in app.commands.values()} == files


def test_ls_lists_the_records_in_columns(cli):
    code, out, _ = cli("ls")
    assert code == 0
    h200, b200 = (part.splitlines() for part in out.split("\n\n"))
    assert (h200[0], b200[0]) == ("sm_90-h200-132, tileiras-13.4.92", "sm_100-b200-148, tileiras-13.5.0")
    for _, header, *_ in (h200, b200):
        assert header.split() == ["KERNEL", "PROBLEM", "PROVENANCE", "TIME", "GAIN", "SIZE", "AGE"]
    assert [row.split()[1] for row in h200[2:]] == [KEY.replace("8192", "1024"), KEY]
    assert h200[3].split()[2:7] == ["measured", "(stale)", "37.8", "us", "3.28x"]
    assert h200[2].split()[2:7] == ["predicted", "(stale)", "~40.0", "us", "-"]
    assert b200[2].split()[:2] == ["swiglu", KEY]


@pytest.mark.parametrize(
    ("filters", "count"),
    [
        ([], 3),
        (["--kernel", "swiglu"], 1),
        (["--kernel", "rope"], 0),
        (["--gpu", "sm_90-h200-132"], 2),
        (["--gpu", "h200"], 2),
        (["--gpu", "h200é"], 0),
        (["--gpu", "SM_100"], 1),
        (["--toolkit", "tileiras-13.5.0"], 1),
        (["--provenance", "predicted"], 1),
        (["--provenance", "measured", "--gpu", "H200"], 1),
        (["--problem", "rows=1024"], 1),
        (["--problem", "dtype=bfloat16,columns=4096"], 3),
        (["--problem", "rows=102"], 0),
        (["--older-than", "1000d"], 1),
        (["--stale", "--kernel", "rms_norm"], 2),
    ],
)
def test_ls_filters(cli, filters, count):
    assert len(cli.json("ls", *filters)["records"]) == count


def test_ls_json(cli, cache):
    document = cli.json("ls", "--kernel", "swiglu")
    (record,) = document["records"]
    assert document["cache_dir"] == str(cache)
    assert record["problem"] == PROBLEM
    assert (record["time_us"], record["provenance"], record["problem_key"]) == (37.8, "measured", KEY)
    assert record["gain"] == pytest.approx(124 / 37.8)
    assert record["age_s"] > 86400


def test_a_cache_that_is_not_there_is_empty(cli, tmp_path, monkeypatch):
    for command in ("ls", "stats", "wanted", "prune --stale --yes", "clear --all --yes"):
        document = cli.json(*command.split(), root=tmp_path / "none")
        assert document.get("exists", False) is False
    for command in ("ls", "stats"):
        assert "there is no cache at" in cli.said(command, root=tmp_path / "none")
    monkeypatch.setenv("TILEKERN_CACHE_DIR", str(tmp_path / "none"))
    cli.json("verify")
    assert not (tmp_path / "none").exists()


def test_unreadable_records_are_named_beside_the_rest(cli, cache):
    path = next(entry.path for entry in Store(cache).entries())
    path.write_text("{")
    code, out, err = cli("ls")
    assert (code, out.count(KEY.partition(",")[2])) == (0, 2)
    assert str(path) in err
    assert cli.json("ls")["unreadable"][0]["path"] == str(path)
    assert cli.json("stats")["unreadable"] == 1


def test_show_prints_a_record_in_full(cli):
    code, out, _ = cli("show", "rms_norm", KEY)
    assert code == 0
    for words in ("spread_us: 0.4", "occupancy: 4", "registers: 64", '2. {"config"', "relative: 0.001", "aligned"):
        assert words in out


def test_show_json_has_every_field(cli):
    expected = json.loads(make(b"one" * 100)[0].to_json())
    del expected["schema"], expected["sha256"]
    assert cli.json("show", "rms_norm", KEY)["record"] == expected


ODD = {
    "module": ["rms_norm"],
    "source_digest": {},
    "measurement": {"median_us": 10**400, "default_us": math.inf, "spread_us": 10**400},
    "prediction": {"time_us": math.inf},
    "runners_up": functools.reduce(lambda inner, _: [inner], range(900), []),
}


@pytest.mark.parametrize("field", ODD)
def test_a_record_with_an_odd_field_crashes_no_command(cli, cache, field):
    path = next((cache / "v1").rglob(f"rms_norm/{KEY}.json"))
    text = json.dumps({**json.loads(path.read_text()), field: ODD[field]}, indent=1).replace("Infinity", "1e999")
    path.write_text(sealed(text))
    ways = (["ls"], ["ls", "--stale"], ["show", "rms_norm", KEY], ["stats"], ["verify"], ["diff", cache, cache])
    for command, option in itertools.product(ways, ([], ["--json"])):
        code, out, err = cli(*command, *option)
        assert code in (0, 1) or (code, err.count("\n")) == (2, 1)
        assert not {"Infinity", "NaN"} & set(re.findall(r"\w+", out))


@pytest.mark.parametrize("number", ["1e999", "-1e999"])
def test_a_record_with_a_number_beyond_all_bounds_is_bad_for_every_reader(cli, root, tmp_path, number):
    large = {"like one": 0x7FF0 << 90, "negative": -(2**1000), "largest": 1.7976931348623157e308}
    path = put(root, problem={**PROBLEM, "rows": 2}, check={"relative": 0.001, **large})
    path.write_text(sealed(path.read_text().replace("0.001", number)))
    (fault,) = cli.json("verify", code=1)["broken"]
    assert (fault["path"], "Number out of range" in fault["problem"]) == (str(path), True)
    assert "1 unreadable record left out" in cli.said("pack", tmp_path / "all.pack")
    assert quietly([FolderLayer(root, "user")]).record.problem["rows"] == 8192


def test_show_of_several_names_them(cli, cache):
    put(cache, target=H100)
    cli.refused("show", "rms_norm", KEY, says=("2 GPUs match", "sm_90-h100-132", "sm_90-h200-132", "--gpu"))
    assert cli("show", "rms_norm", KEY, "--gpu", "H100")[0] == 0


def test_stats(cli, cache):
    note_wanted(cache, "rope", PROBLEM, H100, "no record")
    stray = blob_file(cache, b"stray")
    stray.parent.mkdir(parents=True, exist_ok=True)
    stray.write_bytes(b"stray")
    document = cli.json("stats")
    assert document["records"] == 3
    assert document["by"]["kernel"]["rms_norm"]["records"] == 2
    assert {name: total["records"] for name, total in document["by"]["provenance"].items()} == {
        "measured": 2,
        "predicted": 1,
    }
    assert document["blobs"] == {"count": 4, "bytes": 300 + 300 + 500 + 5}
    assert document["orphans"] == {"count": 1, "bytes": 5}
    assert document["wanted"] == 1
    assert document["bytes"] == sum(
        path.stat().st_size for path in cache.rglob("*") if path.parent.name != "wanted" and path.is_file()
    )
    assert "orphans: 1 (5 B)" in cli("stats")[1]


def test_verify_of_a_whole_cache(cli, cache):
    put(cache, problem={**PROBLEM, "rows": 1}, module="tilekern.spec.source", **HERE)
    put(cache, problem={**PROBLEM, "rows": 2}, module="tilekern.spec.source")
    put(cache, problem={**PROBLEM, "rows": 4}, module="no_such_module.at_all")
    document = cli.json("verify", "--cache-dir", str(cache))
    assert document["broken"] == []
    assert not any("rows=1," in path for path in document["stale"])
    assert any("rows=2," in path for path in document["stale"])
    assert any("rows=4," in path for path in document["unknown_source"])


@pytest.mark.parametrize("damage", ["record", "blob", "missing", "misplaced", "size"])
def test_verify_names_what_is_broken(cli, cache, damage):
    path = next(entry.path for entry in Store(cache).entries() if entry.record.kernel == "swiglu")
    blob = blob_file(cache, b"three" * 100)
    if damage == "record":
        path.write_text("{")
    elif damage == "blob":
        blob.write_bytes(b"bad")
    elif damage == "missing":
        blob.unlink()
    elif damage == "size":
        path.write_text(path.read_text().replace('"size": 500', '"size": 499'))
    else:
        path.rename(path.with_name("rows=3.json"))
    document = cli.json("verify", code=1)
    assert len(document["broken"]) == 1
    code, out, _ = cli("verify")
    assert (code, "broken: " in out, "1 broken" in out) == (1, True, True)


def test_verify_says_a_reason_once_with_a_count(cli, root):
    for rows in range(10, 30):
        put(root, b"x", problem={**PROBLEM, "rows": rows}, module="tilekern.spec.source")
        put(root, b"%d" % rows, kernel="scale", problem={**PROBLEM, "rows": rows}, module="no_such_module.at_all")
        blob_file(root, b"%d" % rows).unlink()
    for rows in (1, 2):
        put(root, b"y", kernel="rope", problem={**PROBLEM, "rows": rows}).write_text("{" + "\n" * rows + "x")
    out = cli("verify")[1]
    lines = out.splitlines()
    assert [line for line in lines if not line.startswith("  ")][:-2] == [
        "broken: 2 files: not valid JSON: JSON is malformed: object keys must be strings (byte …)",
        "broken: 20 files: artifact aligned: blob … is missing",
        "stale: 23 records: the kernel's source has changed since",
        "cannot tell whether stale: 20 records: the kernel's source is not installed here",
    ]
    assert f"{root}: 43 records, 5 blobs, 1 without a record; 22 broken, 23 stale" in out
    assert lines.count("  and 17 more, which --json names") == 2
    assert lines.count("  and 20 more, which --json names") == 1
    document = cli.json("verify", code=1)
    assert [len(document[name]) for name in ("broken", "stale", "unknown_source")] == [22, 23, 20]
    assert len({fault["problem"] for fault in document["broken"]}) == 22
    root.chmod(0o777)
    assert cli("verify")[1].count("chmod -R go-w") == 1


def test_verify_opens_each_file_once(cli, cache, monkeypatch):
    opened, really_open = Counter(), os.open

    def counting(path, *arguments, **options):
        opened[str(path)] += 1
        return really_open(path, *arguments, **options)

    monkeypatch.setattr(os, "open", counting)
    assert cli.json("verify")["broken"] == []
    files = [str(path) for path in (cache / "v1").rglob("*") if path.is_file()]
    assert len(files) == 6
    assert {path: opened[path] for path in files} == dict.fromkeys(files, 1)


@pytest.mark.parametrize("change", ["removed", "written anew"])
def test_verify_finds_no_fault_with_records_that_change_while_it_looks(cli, cache, monkeypatch, change):
    list_blobs = Store.blobs

    def changing(store):
        monkeypatch.setattr(Store, "blobs", list_blobs)
        chosen = [entry for entry in store.entries() if entry.record.kernel == "swiglu"]
        store.collect_garbage(store.remove(chosen))
        if change == "written anew":
            put(cache, b"four" * 100, target=B200, toolkit=toolkit("13.5.0"), kernel="swiglu")
        return list_blobs(store)

    monkeypatch.setattr(Store, "blobs", changing)
    assert cli.json("verify")["broken"] == []


def test_verify_leaves_another_schema_alone(cli, cache):
    path = next(entry.path for entry in Store(cache).entries())
    path.write_text('{"schema": 99}')
    assert cli.json("verify")["unknown_schema"] == [str(path)]
    document = cli.json("clear", "--all", "--yes")
    assert (document["removed"], document["left_alone"]) == (2, 1)
    assert "may refer to any blob" in document["kept"]
    assert path.read_text() == '{"schema": 99}'


@pytest.mark.parametrize(
    ("filters", "removed"),
    [
        (["--all"], 3),
        (["--kernel", "rms_norm"], 2),
        (["--gpu", "B200"], 1),
        (["--toolkit", "tileiras-13.4.92"], 2),
        (["--provenance", "predicted"], 1),
        (["--kernel", "rope"], 0),
        (["--older-than", "1000d"], 1),
        (["--older-than", "12h", "--kernel", "swiglu"], 1),
    ],
)
def test_clear_removes_what_was_chosen_and_its_blobs(cli, cache, filters, removed):
    before = cli.json("stats")
    told = cli.json("clear", *filters, "--dry-run")
    assert cli.json("stats") == before, "nothing is changed"
    document = cli.json("clear", *filters, "--yes")
    after = cli.json("stats")
    assert told == document | {"dry_run": True}
    assert (document["removed"], document["blobs"], after["records"]) == (removed, removed, 3 - removed)
    assert document["bytes"] == before["bytes"] - after["bytes"]
    assert after["orphans"]["count"] == 0


def test_clear_stale(cli, cache):
    assert cli.said("clear", "--all", "--dry-run").startswith("would remove 3 records and 3 blobs, ")
    put(cache, problem={**PROBLEM, "rows": 1}, module="tilekern.spec.source", **HERE)
    put(cache, problem={**PROBLEM, "rows": 2}, module="tilekern.spec.source")
    assert cli.said("clear", "--stale", "--yes").startswith("removed 4 records and ")
    assert [row["problem"]["rows"] for row in cli.json("ls")["records"]] == [1]
    cli.said("clear", "--all", "--yes")
    assert "is empty" in cli.said("ls")


@pytest.mark.parametrize(
    ("command", "answer", "left"),
    [("clear --all", "y\n", 0), ("clear --all", "", 3), ("prune --stale", "y\n", 0), ("prune --stale", "n\n", 3)],
)
def test_deleting_commands_ask_first(cli, cache, monkeypatch, command, answer, left):
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    code, out, _ = cli(*command.split())
    assert "Remove 3 records" in out
    assert code == (2 if left else 0)
    assert len(list(Store(cache).entries())) == left


def test_pack_and_unpack_carry_a_cache(cli, tmp_path):
    out = tmp_path / "out.pack"
    packed = cli.json("pack", str(out), "--kernel", "rms_norm")
    assert (packed["records"], packed["left_out"], packed["bytes"]) == (2, 0, out.stat().st_size)
    there = tmp_path / "there"
    unpacked = {"pack": str(out), "cache_dir": str(there), "installed": 2, "kept": {}}
    assert cli.json("unpack", str(out), root=there) == unpacked
    assert cli.json("verify", root=there)["broken"] == []
    assert "unpacked 2 records" in cli("unpack", str(out), root=there)[1]


@pytest.mark.nightly
def test_pack_of_a_model_takes_what_it_needs_and_nothing_else(cli, cache, tmp_path):
    """The records that ship with the wheel are those of one model; the fixture's have sizes of none."""
    bad = next(entry for entry in Store(cache).entries() if entry.address.target_key == "sm_90-h200-132")
    bad.path.write_text("{")
    for pack in sorted(PREBUILT.glob("qwen3-8b-*.pack")):
        cli.json("unpack", pack)
    whole = tmp_path / "whole.pack"
    packed = cli.json("pack", whole, "--model", "qwen3-8b", "--gpu", "H200")
    engines = tmp_path / "engine.pack"
    cli.json("pack", engines, "--model", "qwen3-8b", "--engine", "--gpu", "H200")
    shipped = set(Pack(PREBUILT / "qwen3-8b-h200.pack").records)
    asked = {*Pack(whole).records, *Pack(engines).records}
    assert asked == shipped, "the shipped pack is what the planner asks for, and no more"
    assert packed["left_out"] == 1
    kernels = Counter(address.kernel for address in Pack(whole).records)
    assert kernels["attention_backward"] == 10, "of five lengths, with gradients that repeat and with others"
    assert kernels["rms_norm_forward"] == 9, "of five lengths, chunks of a prompt and a token of 1, 8 and 64 sequences"
    assert "rope" not in kernels, "no patched step asks for it"
    other = ("pack", tmp_path / "other.pack", "--model", "no/such", "--gpu", "H200")
    cli.refused(*other, says="--model no/such")


@pytest.mark.processes
def test_pack_of_the_engine_takes_what_it_needs_of_any_length_and_nothing_else(cli, root, tmp_path):
    of_engine = {"decode": (3, 70), "context": (700,), "dtype": ("float16",), "engine": True}
    wanted = [
        problem
        for weights in (None, "int8")
        for problem in plan_of_engine("mingpt-nano", Steps((64,), weight_dtype=weights, **of_engine), H200).problems
    ]
    others = plan_of_engine("mingpt-micro", Steps((64,), **of_engine), H200).problems
    for kernel, problem in {*wanted, *others}:
        put(root, kernel=kernel, problem=dict(problem))
    packed = tmp_path / "engine.pack"
    document = cli.json("pack", packed, "--model", "mingpt-nano", "--engine")
    found = {(address.kernel, address.problem_key) for address in Pack(packed).records}
    wanted = {(kernel, problem.key) for kernel, problem in wanted}
    assert wanted <= found
    # All of their sizes are buckets, which do not tell a model.
    assert {kernel for kernel, _ in found - wanted} <= {"lay_out", "quantize_rows", "dequantize_rows"}
    assert document["records"] == len(found) < len({*wanted, *((kernel, problem.key) for kernel, problem in others)})
    cli.refused("pack", tmp_path / "other.pack", "--engine", says="pass --model too")
    of_another = ("pack", tmp_path / "other.pack", "--model", "gemma-2-9b", "--engine")
    cli.refused(*of_another, says="--model gemma-2-9b: gemma-2-9b: config.json: model_type is 'gemma2'")


def test_pack_of_a_model_by_8_bit_floats_takes_their_records_too(cli, root, tmp_path, monkeypatch):
    """The planner's processes are those of the test above; here their answers are made of its problems by name."""
    of_format = {"": "rms_norm_forward", "rowwise": "fp8_rows", "blockwise": "fp8_blocks"}
    sizes = {"rows": 64, "columns": 256, "dtype": "bfloat16"}
    for kernel in of_format.values():
        put(root, kernel=kernel, problem=sizes)

    def run(words, **_):
        asked = words[words.index("--fp8") + 1] if "--fp8" in words else ""
        problem = {"kernel": of_format[asked], "problem": sizes, "bucketed": ["rows"]}
        return subprocess.CompletedProcess(words, 0, json.dumps({"problems": [problem]}), "")

    monkeypatch.setattr("tilekern.cache_tools.commands.pack.subprocess.run", run)
    # Plans of this model that another test has made are not taken, nor these by another test.
    monkeypatch.setattr(packing, "_needed_by", packing._needed_by.__wrapped__)
    for words, formats in (([], [""]), (["--fp8"], ["", "rowwise"]), (["--fp8", "blockwise"], ["", "blockwise"])):
        cli.json("pack", tmp_path / "out.pack", "--model", "qwen3-8b", *words)
        packed = {address.kernel for address in Pack(tmp_path / "out.pack").records}
        assert packed == {of_format[name] for name in formats}
    cli.refused("pack", tmp_path / "out.pack", "--fp8", "rowwise", says="--fp8 says what of a model is meant")
    both = ("pack", tmp_path / "out.pack", "--model", "qwen3-8b", "--engine", "--fp8", "rowwise")
    cli.refused(*both, says="leave it out with --engine")
    hint = "unknown format; known: rowwise, blockwise, mxfp8; write --fp8 rowwise before OUT.pack"
    cli.refused("pack", "--model", "qwen3-8b", "--fp8", "out.pack", says=f"--fp8 'out.pack': {hint}")


def test_a_pack_with_a_bad_blob_is_refused(cli, cache, tmp_path):
    blob_file(cache, b"one" * 100).write_bytes(b"bad")
    cli.refused("pack", str(tmp_path / "out.pack"), says="sha256")
    assert not (tmp_path / "out.pack").exists()


@pytest.fixture(scope="module")
def thousand(tmp_path_factory):
    """A cache of a thousand records."""
    root = tmp_path_factory.mktemp("thousand")
    fill(root, 1000)
    return root


def test_a_reader_that_goes_away_is_not_an_error(thousand):
    command = [sys.executable, "-m", "tilekern.cache_tools", "ls", "--cache-dir", thousand]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as listing:
        listing.stdout.readline()
        listing.stdout.close()
        assert listing.stderr.read() == b""


def test_ls_of_a_thousand_records_is_quick(thousand):
    """Measure processor time, which other processes do not lengthen."""
    before = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    assert process("ls", "--cache-dir", thousand).stdout.count("rms_norm ") == 1000
    assert sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - before < 1.5


def test_looking_at_a_cache_loads_neither_torch_nor_a_compiler_nor_other_commands(cache):
    code = (
        "import sys; from tilekern.cache_tools.__main__ import main; main(['ls']); "
        "heavy = {'torch', 'cuda', 'typer', 'rich', 'transformers', 'numpy'} & set(sys.modules); "
        "assert not heavy, heavy; "
        "commands = [name for name in sys.modules if name.startswith('tilekern.cache_tools.commands.')]; "
        "assert commands == ['tilekern.cache_tools.commands.ls'], commands"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
