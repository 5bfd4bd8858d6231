"""Every document that a command prints is one that its schema in docs/cache-json describes."""

import hashlib
import json
import re

import jsonschema
import pytest
from cache_samples import B200, H100, PROBLEM, blob_file, made_today, make, put, toolkit
from command_line import KEY, ROOT

from tilekern.cache import Store, note_misses, note_wanted, wanted_name, write_pack
from tilekern.cache.keys import signature_path
from tilekern.cache.trust.signing import SigningKey, generate_key
from tilekern.cache_tools.__main__ import main
from tilekern.cache_tools.cli import app

pytestmark = pytest.mark.processes

FOLDER = ROOT / "docs" / "cache-json"
SCHEMAS = {path.stem: json.loads(path.read_text()) for path in FOLDER.glob("*.json")}
PREBUILT = ROOT / "tilekern" / "prebuilt"
SWIGLU = "rows=5000,columns=12288,dtype=bfloat16"


@pytest.fixture(autouse=True)
def settings(tmp_path, monkeypatch):
    """No trust roots, seals or policy of whoever runs the tests."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    for name in ("TILEKERN_TRUST", "TILEKERN_TRUST_ROOTS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def varied(cache, tmp_path, monkeypatch):
    """A cache with something of everything: stale, foreign, unreadable, wanted, left over, in other layers.

    Beside it stand a key, a pack, a file that is no pack, and a cache with one record of Qwen3 8B's sizes and an
    unreadable one.
    """
    monkeypatch.setenv("TILEKERN_CACHE_DIR", str(cache))
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
    (["show", "rms_norm", KEY.replace("8192", "2"), "--target", "H200"], 0),
    (["show", "swiglu_forward", SWIGLU.replace("5000", "8192"), "--target", "H200", "--sass"], 0),
    (["stats"], 0),
    (["stats", "--layers"], 0),
    (["why", "swiglu_forward", SWIGLU, "--target", "H100"], 0),
    (["why", "swiglu_forward", SWIGLU, "--target", "sm_121"], 0),
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
]
DIFFS = [["CACHE", "MORE"], ["MORE", "CACHE"], ["CACHE", "CACHE"], [str(PREBUILT / "qwen3-8b-h200.pack"), "CACHE"]]


def schema_of(command):
    """The name of a command's schema, which is one for all names of the command."""
    return app.commands[command].name


def checked(capsys, command, code):
    assert main([*command, "--json"]) == code
    document = json.loads(capsys.readouterr().out)
    jsonschema.validate(document, SCHEMAS[schema_of(command[0])], cls=jsonschema.Draft202012Validator)
    return document


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("command", "code"), COMMANDS, ids=lambda value: " ".join(map(str, value))[:60] if isinstance(value, list) else ""
)
def test_what_a_command_prints_is_what_its_schema_says(capsys, named, command, code):
    checked(capsys, named(command), code)


@pytest.mark.parametrize("sides", DIFFS)
def test_what_diff_prints_is_what_its_schema_says(capsys, named, sides):
    document = checked(capsys, ["diff", *named(sides)], 0)
    assert document["same"] or document["new"] or document["gone"]


@pytest.mark.filterwarnings("error")
def test_what_is_there_already_prints_the_same_form(capsys, named):
    pushed = [checked(capsys, named(["push", "MORE", "TO"]), 0)["pushed"] for _ in range(2)]
    pulled = [checked(capsys, named(["pull", "TO"]), 0) for _ in range(2)]
    kept = [checked(capsys, named(["pull", "TO", "--out", "OUT"]), 0)["downloaded"] for _ in range(2)]
    assert pushed == kept == [True, False]
    assert [(document["downloaded"], document["installed"]) for document in pulled] == [(True, 1), (False, 0)]


def test_what_is_not_trusted_prints_the_same_form(capsys, named, monkeypatch):
    monkeypatch.setenv("TILEKERN_TRUST", "signed")
    places = checked(capsys, named(["show", "rms_norm", KEY, "--target", "H200"]), 0)["places"]
    monkeypatch.setenv("TILEKERN_CACHE_PATH", str(PREBUILT / "qwen3-8b-h200.pack"))
    steps = checked(capsys, ["why", "swiglu_forward", SWIGLU, "--target", "H200"], 0)["steps"]
    for tried in (places, steps):
        assert "untrusted" in [one["outcome"] for one in tried]
    checked(capsys, named(["verify", "MORE"]), 1)


@pytest.mark.filterwarnings("error")
def test_what_verify_says_of_signatures_is_what_its_schema_says(capsys, named, tmp_path, monkeypatch):
    def signatures(path, code):
        return checked(capsys, named(["verify", path]), code)["signatures"]

    (sound,) = [entry for entry in Store(tmp_path / "sound").entries() if entry.record]
    public_key = checked(capsys, named(["keygen", "NEWKEY", "--name", "the team"]), 0)["public_key"]
    for path in ("MORE", "SOUND"):
        checked(capsys, named(["sign", path, "--key", "KEY"]), 0)
    assert (signatures("MORE", 0)["other_key"], signatures("SOUND", 1)["other_key"]) == (1, 1)
    place = tmp_path / "sound" / signature_path(hashlib.sha256(sound.path.read_bytes()).hexdigest(), public_key)
    place.write_bytes(SigningKey(tmp_path / "new.key").sign(b"another record"))
    assert len(signatures("SOUND", 1)["bad"]) == 1
    for path in ("MORE", "SOUND"):
        checked(capsys, named(["sign", path, "--key", "NEWKEY"]), 0)
    roots = tmp_path / "new.key.pub"
    monkeypatch.setenv("TILEKERN_TRUST_ROOTS", str(roots))
    assert (signatures("MORE", 0)["by"], signatures("SOUND", 1)["by"]) == ({"the team": 1}, {"the team": 1})
    roots.write_text("no key")
    assert str(roots) in signatures("MORE", 0)["unchecked"]


def test_a_cache_that_is_not_there_prints_the_same_form(capsys, tmp_path, monkeypatch):
    for command in (
        ["ls"],
        ["stats"],
        ["wanted"],
        ["prune", "--stale", "--yes"],
        ["clear", "--all", "--yes"],
    ):
        checked(capsys, [*command, "--cache-dir", str(tmp_path / "none")], 0)
    monkeypatch.setenv("TILEKERN_CACHE_DIR", str(tmp_path / "none"))
    checked(capsys, ["verify"], 0)


def test_the_documents_of_the_tests_have_something_in_every_list(capsys, varied):
    document = checked(capsys, ["ls", "--cache-dir", str(varied)], 0)
    assert document["records"]
    assert len(document["unreadable"]) == 2
    assert {record["time_us"] is None for record in document["records"]} == {True, False}
    varied.chmod(0o777)
    assert checked(capsys, ["verify", "--cache-dir", str(varied)], 1)["exposed"]
    varied.chmod(0o755)
    found = checked(capsys, ["verify", "--cache-dir", str(varied)], 1)
    assert not found["exposed"]
    assert all(found[name] for name in ("broken", "stale", "unknown_source", "unknown_schema", "orphans", "leftovers"))
    assert len(list(Store(varied).entries())) == 8


@pytest.mark.parametrize("name", sorted(app.commands))
def test_every_command_has_a_schema_that_the_page_and_its_help_name(name):
    schema = schema_of(name)
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[schema])
    (row,) = re.findall(rf"^\| `{name}`.*$", (ROOT / "docs" / "cache-json.md").read_text(), re.MULTILINE)
    assert f"[{schema}.json](cache-json/{schema}.json)" in row
    words = re.findall(r"\w+", app.commands[name].help)
    assert "JSON" in words
    for field in SCHEMAS[schema]["properties"]:
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
