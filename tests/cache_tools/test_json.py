"""Every document that a command prints is one that its schema in docs/cache-json describes."""

import json
import re

import jsonschema
import pytest
from cache_samples import B200, H100, PROBLEM, blob_file, make, put, toolkit
from command_line import KEY, ROOT

from cache_tools.__main__ import main
from cache_tools.cli import app
from tilekern.cache import Store, note_misses, note_wanted, wanted_name, write_pack
from tilekern.source import digest_of_module

FOLDER = ROOT / "docs" / "cache-json"
SCHEMAS = {path.stem: json.loads(path.read_text()) for path in FOLDER.glob("*.json")}
PREBUILT = ROOT / "tilekern" / "prebuilt"
SWIGLU = "rows=5000,columns=12288,dtype=bfloat16"


@pytest.fixture
def varied(cache, tmp_path, monkeypatch):
    """A cache with something of everything: stale, foreign, unreadable, wanted, left over, in other layers."""
    today = digest_of_module("tilekern.kernels.rms_norm")
    put(cache, b"today" * 9, source_digest=today, toolkit=toolkit("13.5.0"))
    put(cache, kernel="foreign", module="no_such_module.at_all", target=B200, prediction=None)
    put(cache, problem={**PROBLEM, "rows": 2}, provenance="default", measurement=None, prediction=None, check=None)
    bad, unknown = (put(cache, kernel=name) for name in ("bad", "unknown"))
    bad.write_text("{")
    unknown.write_text('{"schema": 2, "blob": "%s"}' % ("0" * 64))
    bad.with_name("old.bad").write_text("")
    for data in (b"three" * 100, b"orphan"):
        blob_file(cache, data).parent.mkdir(parents=True, exist_ok=True)
        blob_file(cache, data).write_bytes(b"orphan")
    note_wanted(cache, "rope", PROBLEM, H100, "no record")
    note_misses(cache, "0" * 8, {wanted_name("rope", PROBLEM, H100): 3})
    write_pack(tmp_path / "more.pack", [make(source_digest=today)])
    monkeypatch.setenv("TILEKERN_CACHE_PATH", str(tmp_path / "more.pack"))
    return cache


COMMANDS = [
    (["ls"], 0),
    (["ls", "--layers"], 0),
    (["ls", "--kernel", "nothing"], 0),
    (["show", "rms_norm", KEY], 0),
    (["show", "foreign", KEY], 0),
    (["show", "rms_norm", KEY.replace("8192", "2"), "--target", "H200"], 0),
    (["show", "swiglu_forward", SWIGLU.replace("5000", "8192"), "--target", "H200", "--sass"], 0),
    (["stats"], 0),
    (["stats", "--layers"], 0),
    (["why", "swiglu_forward", SWIGLU, "--target", "H100"], 0),
    (["why", "swiglu_forward", SWIGLU, "--target", "sm_121"], 0),
    (["wanted"], 0),
    (["wanted", "--clear"], 0),
    (["verify"], 1),
    (["clear", "--kernel", "rms_norm", "--yes"], 0),
    (["clear", "--all", "--yes"], 0),
    (["prune", "--stale", "--keep-toolkits", "1", "--max-size", "0", "--dry-run"], 0),
    (["prune", "--unused-for", "0s", "--stale", "--yes"], 0),
    (["pack", "OUT", "--kernel", "rms_norm"], 0),
    (["unpack", "MORE"], 0),
]
DIFFS = [["CACHE", "MORE"], ["MORE", "CACHE"], ["CACHE", "CACHE"], [str(PREBUILT / "qwen3-8b-h200.pack"), "CACHE"]]


def checked(capsys, command, code):
    assert main([*command, "--json"]) == code
    document = json.loads(capsys.readouterr().out)
    jsonschema.validate(document, SCHEMAS[command[0]], cls=jsonschema.Draft202012Validator)
    return document


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("command", "code"), COMMANDS, ids=lambda value: " ".join(map(str, value))[:60] if isinstance(value, list) else ""
)
def test_what_a_command_prints_is_what_its_schema_says(capsys, varied, tmp_path, command, code):
    names = {"OUT": str(tmp_path / "out.pack"), "MORE": str(tmp_path / "more.pack")}
    checked(capsys, [*(names.get(word, word) for word in command), "--cache-dir", str(varied)], code)


@pytest.mark.parametrize("sides", DIFFS)
def test_what_diff_prints_is_what_its_schema_says(capsys, varied, tmp_path, sides):
    names = {"CACHE": str(varied), "MORE": str(tmp_path / "more.pack")}
    document = checked(capsys, ["diff", *(names.get(side, side) for side in sides)], 0)
    assert document["same"] or document["new"] or document["gone"]


def test_a_cache_that_is_not_there_prints_the_same_form(capsys, tmp_path):
    for command in (
        ["ls"],
        ["stats"],
        ["verify"],
        ["wanted"],
        ["prune", "--stale", "--yes"],
        ["clear", "--all", "--yes"],
    ):
        checked(capsys, [*command, "--cache-dir", str(tmp_path / "none")], 0)


def test_the_documents_of_the_tests_have_something_in_every_list(capsys, varied):
    document = checked(capsys, ["ls", "--cache-dir", str(varied)], 0)
    assert document["records"]
    assert len(document["unreadable"]) == 2
    assert {record["time_us"] is None for record in document["records"]} == {True, False}
    found = checked(capsys, ["verify", "--cache-dir", str(varied)], 1)
    assert all(found[name] for name in ("broken", "stale", "unknown_source", "unknown_schema", "orphans", "leftovers"))
    assert len(list(Store(varied).entries())) == 8


@pytest.mark.parametrize("name", sorted(app.commands))
def test_every_command_has_a_schema_that_the_page_and_its_help_name(name):
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[name])
    assert f"[{name}.json](cache-json/{name}.json)" in (ROOT / "docs" / "cache-json.md").read_text()
    words = re.findall(r"\w+", app.commands[name].help)
    assert "JSON" in words
    for field in SCHEMAS[name]["properties"]:
        assert field in words, field
    tested = {command[0] for command, _ in COMMANDS} | {"diff"}
    assert name in tested


def fields(schema):
    """Every schema within a schema."""
    yield schema
    for inner in (*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties")):
        if isinstance(inner, dict):
            yield from fields(inner)


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_every_field_is_described_and_none_may_be_left_out_of_its_schema(name):
    for schema in fields(SCHEMAS[name]):
        for field, inner in schema.get("properties", {}).items():
            assert inner.get("description"), field
        if "properties" in schema:
            assert schema["additionalProperties"] is False
            assert set(schema["required"]) <= set(schema["properties"])
