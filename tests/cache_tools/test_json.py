"""Every document that a command prints is one that its schema in docs/cache-json describes.

All tests of commands hold this of the documents that they read (``command_line.Commands.json``); these are about what
no other reads, and about the schemas.
"""

import re

import jsonschema
import pytest
from cache_samples import B200, H100, PROBLEM, blob_file, made_today, make, put, toolkit
from command_line import KEY, PREBUILT, ROOT, SCHEMAS

from tilekern.cache import Store, note_misses, note_wanted, wanted_name, write_pack
from tilekern.cache.trust.signing import generate_key
from tilekern.cache_tools.cli import app

pytestmark = pytest.mark.processes

SWIGLU = "rows=5000,columns=12288,dtype=bfloat16"


@pytest.fixture
def varied(cache, tmp_path, monkeypatch):
    """A cache with something of everything: stale, foreign, unreadable, wanted, left over, in other layers.

    Beside it stand a key, a pack, a file that is no pack, and a cache with one record of Qwen3 8B's sizes and an
    unreadable one.
    """
    today = made_today()
    put(cache, b"today" * 9, **today, toolkit=toolkit("13.5.0"))
    put(cache, kernel="foreign", module="no_such_module.at_all", target=B200, prediction=None)
    put(cache, problem={**PROBLEM, "rows": 2}, provenance="default", measurement=None, prediction=None, check=None)
    bad, unknown = (put(cache, kernel=name) for name in ("bad", "unknown"))
    bad.write_text("{")
    unknown.write_text('{"schema": 99, "blob": "%s"}' % ("0" * 64))
    bad.with_name("old.bad").write_text("")
    for data in (b"three" * 100, b"orphan"):
        blob_file(cache, data).parent.mkdir(parents=True, exist_ok=True)
        blob_file(cache, data).write_bytes(b"orphan")
    note_wanted(cache, "rope", PROBLEM, H100, "no record")
    note_misses(cache, "0" * 8, {wanted_name("rope", PROBLEM, H100): 3})
    write_pack(tmp_path / "more.pack", [make(**today)])
    monkeypatch.setenv("TILEKERN_CACHE_PATH", str(tmp_path / "more.pack"))
    (tmp_path / "bad.pack").write_text("")
    put(tmp_path / "sound", kernel="adamw")
    put(tmp_path / "sound", kernel="bad").write_text("{")
    generate_key(tmp_path / "team.key")
    return cache


@pytest.fixture
def named(varied, tmp_path):
    """A command with paths in place of the words in capitals."""
    names = {
        "CACHE": varied,
        "SOUND": tmp_path / "sound",
        "MORE": tmp_path / "more.pack",
        "BAD": tmp_path / "bad.pack",
        "OUT": tmp_path / "out.pack",
        "DIST": tmp_path / "dist",
        "HUB": tmp_path / "hub",
        "KEY": tmp_path / "team.key",
        "LIST": tmp_path / "team.revoked",
        "NEWKEY": tmp_path / "new.key",
        "FROM": f"file://{tmp_path}/more.pack",
        "TO": f"file://{tmp_path}/shared/more.pack",
    }
    return lambda words: [str(names.get(word, word)) for word in words]


COMMANDS = [
    (["ls"], 0),
    (["ls", "--layers"], 0),
    (["ls", "--kernel", "nothing"], 0),
    (["show", "rms_norm", KEY], 0),
    (["show", "foreign", KEY], 0),
    (["show", "rms_norm", KEY.replace("8192", "2"), "--gpu", "H200"], 0),
    (["show", "swiglu_forward", SWIGLU.replace("5000", "8192"), "--gpu=H200", "--sass", "--variant=generic"], 0),
    (["stats"], 0),
    (["stats", "--layers"], 0),
    (["why", "swiglu_forward", SWIGLU, "--gpu", "H100"], 0),
    (["why", "swiglu_forward", SWIGLU, "--gpu", "sm_121"], 0),
    (["wanted"], 0),
    (["wanted", "--clear"], 0),
    (["verify"], 1),
    (["verify", "CACHE"], 1),
    (["verify", "MORE"], 0),
    (["verify", "MORE", "--signed"], 1),
    (["verify", "BAD"], 1),
    (["clear", "--kernel", "rms_norm", "--dry-run"], 0),
    (["clear", "--kernel", "rms_norm", "--yes"], 0),
    (["clear", "--all", "--yes"], 0),
    (["prune", "--stale", "--keep-toolkits", "1", "--max-size", "0", "--dry-run"], 0),
    (["prune", "--unused-for", "0s", "--stale", "--yes"], 0),
    (["pack", "OUT", "--kernel", "rms_norm"], 0),
    (["pack", "OUT", "--model", "qwen3-8b", "--tp", "2", "--cache-dir", "SOUND"], 0),
    (["unpack", "MORE"], 0),
    (["add", "MORE"], 0),
    (["wheel", "DIST", "--name", "Acme_Kernels", "--version", "1.0", "--kernel", "rms_norm"], 0),
    (["wheel", "DIST", "--name", "acme", "--version", "1.0", "--pack", "MORE"], 0),
    (["repository", "DIST", "--repo-id", "acme/tilekern", "--kernel", "rms_norm"], 0),
    (["repository", "DIST", "--repo-id", "acme/tilekern", "--pack", "MORE", "--hub-cache", "HUB"], 0),
    (["push", "MORE", "TO"], 0),
    (["push", "MORE", "FROM"], 0),
    (["pull", "FROM"], 0),
    (["pull", "FROM", "--out", "OUT"], 0),
    (["keygen", "NEWKEY"], 0),
    (["keygen", "NEWKEY", "--name", "the team"], 0),
    (["sign", "MORE", "--key", "KEY"], 0),
    (["sign", "SOUND", "--key", "KEY"], 0),
    (["revoke", "MORE", "SOUND", "0" * 64, "--key", "KEY", "--out", "LIST"], 0),
    (["diff", "CACHE", "MORE"], 0),
    (["diff", "MORE", "CACHE"], 0),
    (["diff", "CACHE", "CACHE"], 0),
    (["diff", str(PREBUILT / "qwen3-8b-h200.pack"), "CACHE"], 0),
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("command", "code"), COMMANDS, ids=lambda value: " ".join(map(str, value))[:60] if isinstance(value, list) else ""
)
def test_the_output_of_a_command_matches_its_schema(cli, named, command, code):
    document = cli.json(*named(command), code=code)
    assert command[0] != "diff" or document["same"] or document["new"] or document["gone"]


def test_what_is_not_trusted_prints_the_same_form(cli, named, monkeypatch):
    monkeypatch.setenv("TILEKERN_TRUST", "signed")
    places = cli.json("show", "rms_norm", KEY, "--gpu", "H200", may_warn=True)["places"]
    monkeypatch.setenv("TILEKERN_CACHE_PATH", str(PREBUILT / "qwen3-8b-h200.pack"))
    steps = cli.json("why", "swiglu_forward", SWIGLU, "--gpu", "H200", may_warn=True)["steps"]
    for tried in (places, steps):
        assert "untrusted" in [one["outcome"] for one in tried]
    cli.json(*named(["verify", "MORE"]), code=1)


def test_the_documents_of_the_tests_have_something_in_every_list(cli, varied):
    document = cli.json("ls")
    assert {record["time_us"] is None for record in document["records"]} == {True, False}
    assert len(document["unreadable"]) == 2
    varied.chmod(0o777)
    assert cli.json("verify", code=1)["exposed"]
    varied.chmod(0o755)
    found = cli.json("verify", code=1)
    assert not found["exposed"]
    assert all(found[name] for name in ("broken", "stale", "unknown_source", "unknown_schema", "orphans", "leftovers"))
    assert len(list(Store(varied).entries())) == 8


@pytest.mark.parametrize("name", sorted(app.commands))
def test_every_command_has_a_schema_that_the_page_and_its_help_name(name):
    schema = app.commands[name].name
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[schema])
    (row,) = re.findall(rf"^\| `{name}`.*$", (ROOT / "docs" / "cache-json.md").read_text(), re.MULTILINE)
    assert f"[{schema}.json](cache-json/{schema}.json)" in row
    words = re.findall(r"\w+", app.commands[name].help)
    assert "JSON" in words
    for field in SCHEMAS[schema]["properties"]:
        assert field in words, field
    assert name in {command[0] for command, _ in COMMANDS}


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
