import functools
import itertools
import json
import math
import os
import re
import subprocess
import sys
import time
from collections import Counter

import pytest
from cache_samples import B200, H100, PROBLEM, blob_file, fill, made_today, make, put, sealed, toolkit
from command_line import KEY, ROOT, process, refused

import tilekern
from tilekern.cache import Pack, Store, note_wanted
from tilekern.cache_tools.__main__ import main
from tilekern.cache_tools.cli import app

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


def test_a_mistyped_command_is_told_the_nearest(cli):
    refused(cli("prun"), "'prun'", "'prune'")


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
        (["--target", "sm_90-h200-132"], 2),
        (["--target", "h200"], 2),
        (["--target", "SM_100"], 1),
        (["--toolkit", "tileiras-13.5.0"], 1),
        (["--provenance", "predicted"], 1),
        (["--provenance", "measured", "--target", "H200"], 1),
    ],
)
def test_ls_filters(as_json, filters, count):
    assert len(as_json("ls", *filters)["records"]) == count


def test_ls_json(as_json, cache):
    document = as_json("ls", "--kernel", "swiglu")
    (record,) = document["records"]
    assert document["cache_dir"] == str(cache)
    assert record["problem"] == PROBLEM
    assert (record["time_us"], record["provenance"], record["problem_key"]) == (37.8, "measured", KEY)
    assert record["gain"] == pytest.approx(124 / 37.8)
    assert record["age_s"] > 86400


def test_a_cache_that_is_not_there_is_empty(cli, as_json, tmp_path, monkeypatch):
    for command in ("ls", "stats"):
        code, out, _ = cli(command, root=tmp_path / "none")
        assert (code, "there is no cache at" in out) == (0, True)
        assert as_json(command, root=tmp_path / "none")["exists"] is False
    refused(cli("verify", root=tmp_path / "none"), "there is no cache at", "--cache-dir")
    refused(cli("show", "rms_norm", KEY, root=tmp_path / "none"), "there is no cache at", "--cache-dir")
    monkeypatch.setenv("TILEKERN_CACHE_DIR", str(tmp_path / "none"))
    assert main(["verify"]) == 0
    assert not (tmp_path / "none").exists()


def test_unreadable_records_are_named_beside_the_rest(cli, as_json, cache):
    path = next(entry.path for entry in Store(cache).entries())
    path.write_text("{")
    code, out, err = cli("ls")
    assert (code, out.count(KEY.partition(",")[2])) == (0, 2)
    assert str(path) in err
    assert as_json("ls")["unreadable"][0]["path"] == str(path)
    assert as_json("stats")["unreadable"] == 1


def test_show_prints_a_record_in_full(cli):
    code, out, _ = cli("show", "rms_norm", KEY)
    assert code == 0
    for words in ("spread_us: 0.4", "occupancy: 4", "registers: 64", '2. {"config"', "relative: 0.001", "aligned"):
        assert words in out


def test_show_json_has_every_field(as_json):
    expected = json.loads(make(b"one" * 100)[0].to_json())
    del expected["schema"], expected["sha256"]
    assert as_json("show", "rms_norm", KEY)["record"] == expected


def test_show_prints_nothing_that_a_terminal_obeys(cli, cache):
    put(cache, b"one" * 100, created_by="\x1b[2J evil", config={"\x1b[2J": "\x07"}, runners_up=["\x1b"])
    assert not set(cli("show", "rms_norm", KEY)[1]) & {"\x1b", "\x07"}


ODD = {
    "module": ["rms_norm"],
    "source_digest": {},
    "measurement": {"median_us": 10**400, "default_us": math.inf, "spread_us": 10**400},
    "prediction": {"time_us": math.inf},
    "runners_up": functools.reduce(lambda inner, _: [inner], range(900), []),
}


@pytest.mark.parametrize("field", ODD)
def test_a_record_with_an_odd_field_is_no_crash_of_any_command(cache, capsys, monkeypatch, field):
    monkeypatch.setenv("TILEKERN_CACHE_DIR", str(cache))
    path = next((cache / "v1").rglob(f"rms_norm/{KEY}.json"))
    text = json.dumps({**json.loads(path.read_text()), field: ODD[field]}, indent=1).replace("Infinity", "1e999")
    path.write_text(sealed(text))
    ways = (
        ["ls"],
        ["ls", "--stale"],
        ["show", "rms_norm", KEY],
        ["stats"],
        ["verify"],
        ["diff", str(cache), str(cache)],
    )
    for command, option in itertools.product(ways, ([], ["--json"])):
        code, said = main([*command, *option]), capsys.readouterr()
        assert code in (0, 1) or (code, said.err.count("\n")) == (2, 1)
        assert not {"Infinity", "NaN"} & set(re.findall(r"\w+", said.out))


def test_show_of_several_names_them(cli, cache):
    put(cache, target=H100)
    refused(cli("show", "rms_norm", KEY), "2 GPUs match", "sm_90-h100-132", "sm_90-h200-132", "--gpu")
    assert cli("show", "rms_norm", KEY, "--target", "H100")[0] == 0


def test_stats(as_json, cli, cache):
    note_wanted(cache, "rope", PROBLEM, H100, "no record")
    stray = blob_file(cache, b"stray")
    stray.parent.mkdir(parents=True, exist_ok=True)
    stray.write_bytes(b"stray")
    document = as_json("stats")
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


def test_verify_of_a_whole_cache(as_json, cache):
    put(cache, problem={**PROBLEM, "rows": 1}, module="tilekern.spec.source", **HERE)
    put(cache, problem={**PROBLEM, "rows": 2}, module="tilekern.spec.source")
    put(cache, problem={**PROBLEM, "rows": 4}, module="no_such_module.at_all")
    document = as_json("verify", "--cache-dir", str(cache))
    assert document["broken"] == []
    assert not any("rows=1," in path for path in document["stale"])
    assert any("rows=2," in path for path in document["stale"])
    assert any("rows=4," in path for path in document["unknown_source"])


@pytest.mark.parametrize("damage", ["record", "blob", "missing", "misplaced", "size"])
def test_verify_names_what_is_broken(cli, as_json, cache, damage):
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
    document = as_json("verify", code=1)
    assert len(document["broken"]) == 1
    code, out, _ = cli("verify")
    assert (code, "broken: " in out, "1 broken" in out) == (1, True, True)


def test_verify_says_a_reason_once_with_a_count(cli, as_json, root):
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
        "broken: 20 files: blob … is missing",
        "stale: 23 records: the kernel's source has changed since",
        "cannot tell whether stale: 20 records: the kernel's source is not installed here",
    ]
    assert f"{root}: 43 records, 5 blobs, 1 without a record; 22 broken, 23 stale" in out
    assert lines.count("  and 17 more, which --json names") == 2
    assert lines.count("  and 20 more, which --json names") == 1
    document = as_json("verify", code=1)
    assert [len(document[name]) for name in ("broken", "stale", "unknown_source")] == [22, 23, 20]
    assert len({fault["problem"] for fault in document["broken"]}) == 22
    root.chmod(0o777)
    assert cli("verify")[1].count("chmod -R go-w") == 1


def test_verify_opens_each_file_once(as_json, cache, monkeypatch):
    opened, really_open = Counter(), os.open

    def counting(path, *arguments, **options):
        opened[str(path)] += 1
        return really_open(path, *arguments, **options)

    monkeypatch.setattr(os, "open", counting)
    assert as_json("verify")["broken"] == []
    files = [str(path) for path in (cache / "v1").rglob("*") if path.is_file()]
    assert len(files) == 6
    assert {path: opened[path] for path in files} == dict.fromkeys(files, 1)


@pytest.mark.parametrize("change", ["removed", "written anew"])
def test_verify_finds_no_fault_with_records_that_change_while_it_looks(as_json, cache, monkeypatch, change):
    list_blobs = Store.blobs

    def changing(store):
        monkeypatch.setattr(Store, "blobs", list_blobs)
        chosen = [entry for entry in store.entries() if entry.record.kernel == "swiglu"]
        store.collect_garbage(store.remove(chosen))
        if change == "written anew":
            put(cache, b"four" * 100, target=B200, toolkit=toolkit("13.5.0"), kernel="swiglu")
        return list_blobs(store)

    monkeypatch.setattr(Store, "blobs", changing)
    assert as_json("verify")["broken"] == []


def test_verify_leaves_another_schema_alone(as_json, cache):
    path = next(entry.path for entry in Store(cache).entries())
    path.write_text('{"schema": 99}')
    assert as_json("verify")["unknown_schema"] == [str(path)]
    document = as_json("clear", "--all", "--yes")
    assert (document["removed"], document["left_alone"]) == (2, 1)
    assert "may refer to any blob" in document["kept"]
    assert path.read_text() == '{"schema": 99}'


@pytest.mark.parametrize(
    ("filters", "removed"),
    [
        (["--all"], 3),
        (["--kernel", "rms_norm"], 2),
        (["--target", "B200"], 1),
        (["--toolkit", "tileiras-13.4.92"], 2),
        (["--provenance", "predicted"], 1),
        (["--kernel", "rope"], 0),
        (["--older-than", "1000d"], 1),
        (["--older-than", "12h", "--kernel", "swiglu"], 1),
    ],
)
def test_clear_removes_what_was_chosen_and_its_blobs(as_json, cache, filters, removed):
    before = as_json("stats")
    told = as_json("clear", *filters, "--dry-run")
    assert as_json("stats") == before, "nothing is changed"
    document = as_json("clear", *filters, "--yes")
    after = as_json("stats")
    assert told == document | {"dry_run": True}
    assert (document["removed"], document["blobs"], after["records"]) == (removed, removed, 3 - removed)
    assert document["bytes"] == before["bytes"] - after["bytes"]
    assert after["orphans"]["count"] == 0


def test_clear_stale(as_json, cache):
    put(cache, problem={**PROBLEM, "rows": 1}, module="tilekern.spec.source", **HERE)
    put(cache, problem={**PROBLEM, "rows": 2}, module="tilekern.spec.source")
    as_json("clear", "--stale", "--yes")
    left = {row["problem"]["rows"] for row in as_json("ls")["records"]}
    assert 1 in left
    assert 2 not in left


def test_clear_says_what_it_did(cli):
    assert cli("clear", "--all", "--dry-run")[1].startswith("would remove 3 records and 3 blobs, ")
    assert cli("clear", "--all", "--yes")[1].startswith("removed 3 records and 3 blobs, ")
    assert "is empty" in cli("ls")[1]


@pytest.mark.parametrize(("answer", "left"), [("y\n", 0), ("n\n", 3), ("", 3)])
def test_clear_asks_first(cache, answer, left):
    done = process("clear", "--all", "--cache-dir", str(cache), input=answer)
    assert "Remove 3 records" in done.stdout
    assert done.returncode == (2 if left else 0)
    assert "Traceback" not in done.stderr
    assert len(list(Store(cache).entries())) == left


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], ["nonsense"]),
        ([], ["command"]),
        (["ls", "--nonsense"], ["--nonsense"]),
        (["ls", "--provenance", "guessed"], ["guessed", "measured, predicted, default"]),
        (["show", "rms_norm"], ["PROBLEM_KEY"]),
        (["show", "rms_norm", "nonsense"], ["nonsense", "rows=8192"]),
        (["show", "rope", KEY], ["rope", "ls"]),
        (["clear"], ["--all", "--kernel"]),
        (["clear", "--all", "--kernel", "rope"], ["--all"]),
        (["clear", "--all", "--json"], ["--yes", "--dry-run"]),
        (["clear", "--older-than", "soon"], ["soon", "30d"]),
        (["clear", "--older-than", "-3d"], ["-3d", "30d"]),
        (["pack", "out.zip"], ["out.zip", ".pack"]),
        (["pack", "out.pack", "--kernel", "rope"], ["no record"]),
        (["unpack", "nowhere.pack"], ["nowhere.pack"]),
        (["unpack", "."], ["."]),
        (["clear", "--all", "--yes", "--cache-dir", ""], ["--cache-dir must name a folder", "empty"]),
        (["verify", ""], ["must name a folder or a pack", "empty"]),
        (["diff", ".", ""], ["B must name a folder or a pack", "empty"]),
        (["sign", "", "--key", "none"], ["must name a folder or a pack", "empty"]),
    ],
)
def test_bad_input_is_one_line(cache, arguments, words):
    done = process(*arguments, env={**os.environ, "TILEKERN_CACHE_DIR": str(cache)})
    refused((done.returncode, done.stdout, done.stderr), *words)


def test_a_cache_that_is_a_file_is_one_line(cli, tmp_path):
    (tmp_path / "file").write_text("")
    refused(cli("ls", root=tmp_path / "file"), "file", "folder")


def test_pack_and_unpack_carry_a_cache(cli, as_json, tmp_path):
    out = tmp_path / "out.pack"
    packed = as_json("pack", str(out), "--kernel", "rms_norm")
    assert (packed["records"], packed["left_out"], packed["bytes"]) == (2, 0, out.stat().st_size)
    there = tmp_path / "there"
    assert as_json("unpack", str(out), root=there) == {"pack": str(out), "cache_dir": str(there), "installed": 2}
    assert as_json("verify", root=there)["broken"] == []
    assert "unpacked 2 records" in cli("unpack", str(out), root=there)[1]


@pytest.mark.nightly
def test_pack_of_a_model_takes_what_it_needs_and_nothing_else(as_json, cli, cache, tmp_path):
    """The records that ship with the wheel are those of one model; the fixture's have sizes of none."""
    bad = next(entry for entry in Store(cache).entries() if entry.address.target_key == "sm_90-h200-132")
    bad.path.write_text("{")
    for pack in sorted((ROOT / "tilekern" / "prebuilt").glob("qwen3-8b-*.pack")):
        as_json("unpack", str(pack))
    prebuilt = ROOT / "tilekern" / "prebuilt" / "qwen3-8b-h200.pack"
    shipped = len(Pack(prebuilt).records)
    whole = tmp_path / "whole.pack"
    packed = as_json("pack", str(whole), "--model", "qwen3-8b", "--target", "H200")
    assert packed["records"] == shipped, "the shipped pack is what the planner asks for, and no more"
    assert packed["left_out"] == 1
    kernels = Counter(address.kernel for address in Pack(whole).records)
    assert kernels["attention_backward"] == 10, "of five lengths, with gradients that repeat and with others"
    assert kernels["rms_norm_forward"] == 5
    assert "rope" not in kernels, "no patched step asks for it"
    refused(
        cli("pack", str(tmp_path / "other.pack"), "--model", "no/such", "--target", "H200"),
        "--model no/such",
        "no/such",
    )


def test_a_pack_with_a_bad_blob_is_refused(cli, cache, tmp_path):
    blob_file(cache, b"one" * 100).write_bytes(b"bad")
    refused(cli("pack", str(tmp_path / "out.pack")), "sha256")
    assert not (tmp_path / "out.pack").exists()


def test_a_bad_pack_is_one_line(cli, tmp_path):
    (tmp_path / "bad.pack").write_bytes(b"PK" * 100)
    refused(cli("unpack", str(tmp_path / "bad.pack"), root=tmp_path / "there"), "bad.pack")
    assert not (tmp_path / "there").exists()


def test_wanted(cli, as_json, cache):
    assert "nothing is wanted" in cli("wanted")[1]
    note_wanted(cache, "rope", PROBLEM, H100, "no record")
    assert as_json("wanted")["wanted"][0]["kernel"] == "rope"
    assert "sm_90-h100-132" in cli("wanted")[1]
    assert as_json("wanted", "--clear")["cleared"] == 1
    assert as_json("wanted")["wanted"] == []


def test_every_command_has_help():
    commands = ("ls", "show", "stats", "verify", "clear", "wanted", "pack", "unpack", "add", "keygen", "sign", "wheel",
                "push", "pull")  # fmt: skip
    for command in commands:
        assert "JSON" in process(command, "--help").stdout


def test_a_reader_that_goes_away_is_no_error(tmp_path):
    fill(tmp_path, 1000)
    with subprocess.Popen(
        [sys.executable, "-m", "tilekern.cache_tools", "ls", "--cache-dir", str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as listing:
        listing.stdout.readline()
        listing.stdout.close()
        assert listing.stderr.read() == b""


def test_ls_of_a_thousand_records_is_quick(tmp_path):
    fill(tmp_path, 1000)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        done = process("ls", "--cache-dir", str(tmp_path), env={**os.environ, "COLUMNS": "120"})
        times.append(time.perf_counter() - start)
        assert done.stdout.count("rms_norm ") == 1000
    assert min(times) < 1.5


def test_looking_at_a_cache_loads_neither_torch_nor_a_compiler_nor_other_commands(cache):
    code = (
        "import sys; from tilekern.cache_tools.__main__ import main; main(['ls', '--cache-dir', sys.argv[1]]); "
        "heavy = {'torch', 'cuda', 'typer', 'rich', 'transformers', 'numpy'} & set(sys.modules); "
        "assert not heavy, heavy; "
        "commands = [name for name in sys.modules if name.startswith('tilekern.cache_tools.commands.')]; "
        "assert commands == ['tilekern.cache_tools.commands.ls'], commands"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(cache)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
