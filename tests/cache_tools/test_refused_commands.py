"""Bad input gives one line on standard error and exit code 2, and changes nothing."""

import pytest
from cache_samples import put
from command_line import KEY, is_refusal, process
from ship_samples import URL_OF_NOTHING, make_pack

from tilekern.cache_tools.__main__ import main

SWIGLU = "rows=5000,columns=12288,dtype=bfloat16"
REPOSITORY = ["repository", "out", "--repo-id", "acme/tilekern", "--pack", "kernels.pack"]
WHEEL = ["wheel", "out", "--name", "acme", "--version", "1"]
NAMES = ["", "-acme", "acme-", "acme kernels", "acme/kernels", "äcme", "a\nb", "../acme", "."]
VERSIONS = ["", "new", "1.0-", "1..0", "1.0 beta x", "../1", "1.0\n2"]
NO_REGISTRY = ["oci://kernels:b200", "oci://team/kernels:b200", "oci://registry.example.com/Team/Kernels:b200",
               "oci://registry.example.com/../kernels:b200",
               "oci://user:secret@registry.example.com/kernels:b200"]  # fmt: skip

REFUSED = [
    (["nonsense"], ["nonsense"]),
    (["prun"], ["'prun'", "'prune'"]),
    ([], ["command"]),
    (["ls", "--nonsense"], ["--nonsense"]),
    (["ls", "--provenance", "guessed"], ["guessed", "measured, predicted, default"]),
    (["ls", "--cache-dir", "file"], ["file", "folder"]),
    (["show", "rms_norm"], ["PROBLEM_KEY"]),
    (["show", "rms_norm", "nonsense"], ["nonsense", "rows=8192"]),
    (["show", "rope", KEY], ["rope", "ls"]),
    (["show", "rms_norm", KEY, "--cache-dir", "none"], ["there is no cache at", "--cache-dir"]),
    (["why", "swiglu", SWIGLU, "--gpu", "H200"], ["unknown kernel 'swiglu'; did you mean swiglu_forward?"]),
    (["why", "swiglu_forward", "rows=1", "--gpu", "H200"], ["columns", "dtype"]),
    (["why", "swiglu_forward", "nonsense", "--gpu", "H200"], ["nonsense"]),
    (["why", "swiglu_forward", SWIGLU, "--gpu", "H2000"], ["H2000", "B200"]),
    (["clear"], ["--all", "--kernel"]),
    (["clear", "--all", "--kernel", "rope"], ["--all"]),
    (["clear", "--all", "--json"], ["--yes", "--dry-run"]),
    (["clear", "--older-than", "soon"], ["soon", "30d"]),
    (["clear", "--older-than", "-3d"], ["-3d", "30d"]),
    (["clear", "--all", "--yes", "--cache-dir", ""], ["--cache-dir must name a folder", "empty"]),
    (["prune"], ["--stale", "--max-size"]),
    (["prune", "--max-size", "2X"], ["2X", "2G"]),
    (["prune", "--max-size", "-1"], ["-1", "2G"]),
    (["prune", "--keep-toolkits", "0"], ["keep-toolkits", "0"]),
    (["prune", "--unused-for", "soon"], ["--unused-for", "soon", "30d"]),
    (["prune", "--stale", "--json"], ["--yes", "--dry-run"]),
    (["pack", "out.zip"], ["out.zip", ".pack"]),
    (["pack", "out.pack", "--kernel", "rope"], ["no record"]),
    (["unpack", "nowhere.pack"], ["nowhere.pack"]),
    (["unpack", "."], ["."]),
    (["unpack", "bad.pack"], ["bad.pack"]),
    (["verify", ""], ["must name a folder or a pack", "empty"]),
    (["verify", "nowhere.pack"], ["nowhere.pack"]),
    (["verify", "kernels.pack", "--cache-dir", "."], ["not both"]),
    (["verify", "--cache-dir", "none"], ["there is no cache at", "--cache-dir"]),
    (["diff", ".", ""], ["B must name a folder or a pack", "empty"]),
    (["diff", ".", "nowhere"], ["nowhere"]),
    (["diff", ".", "bad.pack"], ["bad.pack"]),
    (["sign", "", "--key", "none"], ["must name a folder or a pack", "empty"]),
    (["sign", "kernels.pack"], ["--key"]),
    (["sign", "kernels.pack", "--key", "nowhere"], ["nowhere"]),
    (["sign", "nowhere.pack", "--key", "team.key"], ["nowhere.pack"]),
    (["sign", "kernels.pack", "--key", "team.key.pub"], ["team.key.pub", "chmod 600"]),
    (["sign", "kernels.pack", "--key", "."], ["."]),
    (["keygen", "team.key"], ["never overwritten"]),
    (["keygen", ""], ["FILE must name a file, and is empty"]),
    (["keygen", "."], [". exists already"]),
    (["keygen", "/"], ["/ exists already"]),
    (["wheel", "", *WHEEL[2:]], ["OUT_DIR must name a folder, and is empty"]),
    (["keygen", "no/such/../../team.key.pub/x"], ["team.key.pub"]),
    (["keygen", "x", "--name", "\x1b[2J"], ["printable"]),
    (["keygen", "x", "--name", " "], ["--name must be"]),
    (["revoke", "--key", "team.key", "--out", "a.revoked"], ["Missing argument"]),
    *(
        (["revoke", what, "--key", "team.key", "--out", "a.revoked"], [says])
        for what, says in (
            ("nothing.pack", "there is no pack nothing.pack"),
            ("0" * 63, "there is no pack"),
            ("cache/none.json", "none.json"),
        )
    ),
    (["revoke", "0" * 64, "--key", "team.key", "--out", "list.json"], ["must end in .revoked"]),
    (["pull", "kernels.pack"], ["is not a URL", "oci://", "hf://", "s3://"]),
    (["pull", "s3://"], ["is not a URL"]),
    (["pull", "nonsense://bucket/kernels.pack"], ["nonsense"]),
    *((["pull", url], ["not a place in a registry"]) for url in NO_REGISTRY),
    (["pull", NO_REGISTRY[0]], ["oci://registry.example.com/team/kernels:h200"]),
    (["pull", "oci://127.0.0.1:1/team/kernels:b200"], ["127.0.0.1", "refused"]),
    (["pull", URL_OF_NOTHING], [f"cannot connect to {URL_OF_NOTHING}: ", "Connect call failed"]),
    (["pull", "https://no-such-host.invalid/a.pack"], ["cannot connect to https://no-such-host.invalid/a.pack"]),
    (["pull", "file:///nowhere/at/all.pack"], ["there is no file:///nowhere/at/all.pack"]),
    (["pull", "file:///"], ["file:/// is a folder"]),
    (["pull", "memory://none.pack", "--cache-dir", "none", "--out", "x.pack"], ["--out", "--cache-dir"]),
    (["pull", "memory://none.pack", "--out", "x.zip"], [".pack"]),
    (["pull", "memory://none.pack", "--out", "none/x.pack"], ["there is no folder"]),
    (["pull", "memory://none.pack", "--digest", "abc"], ["--digest must be 64"]),
    (["pull", "memory://none.pack", "--plain-http"], ["oci:// alone"]),
    (["push", "nowhere.pack", "file:///tmp/x.pack"], ["nowhere.pack"]),
    (["push", "kernels.pack", "memory://bucket/kernels.zip"], [".pack"]),
    (["push", "kernels.pack", "memory://other/"], [".pack"]),
    (["push", "kernels.pack", URL_OF_NOTHING], ["not pushed to"]),
    (["push", "kernels.pack", "oci://127.0.0.1:1/team/kernels:b200"], ["127.0.0.1", "refused"]),
    *((["wheel", "out", f"--name={name}", "--version", "1.0"], ["--name must be"]) for name in NAMES),
    *((["wheel", "out", "--name", "acme", f"--version={it}"], ["--version must be"]) for it in VERSIONS),
    *(
        (["wheel", "out", "--name", it, "--version", "1"], ["would replace tilekern itself"])
        for it in ("tilekern", "TileKern")
    ),
    ([*WHEEL, "--kernel", "rope"], ["no record in"]),
    ([*WHEEL, "--gpu", "H200", "--pack", "x.pack"], ["--pack", "filters"]),
    ([*WHEEL, "--pack", "bad.pack"], ["bad.pack"]),
    ([*WHEEL, "--pack", "nowhere.pack"], ["nowhere.pack"]),
    (["wheel", "file", *WHEEL[2:]], ["file"]),
    (["wheel", "file/below", *WHEEL[2:]], ["file"]),
    (["repository", "folder", *REPOSITORY[2:]], ["not a new folder"]),
    ([*REPOSITORY, "--repo-id", "tilekern"], ["--repo-id", "acme/tilekern"]),
    ([*REPOSITORY, "--kernel", "rope"], ["--pack"]),
]


@pytest.fixture(scope="module")
def files_of_all(tmp_path_factory):
    """A folder with a cache, a key, a pack, a file that is not a pack, and other files."""
    folder = tmp_path_factory.mktemp("refused")
    put(folder / "cache")
    assert main(["keygen", str(folder / "team.key"), "--name", "build team"]) == 0
    make_pack(folder)
    (folder / "bad.pack").write_bytes(b"PK" * 100)
    (folder / "file").touch()
    put(folder / "folder")
    return folder


@pytest.fixture
def folder(files_of_all, monkeypatch):
    """The current folder, which no refused command changes."""
    monkeypatch.chdir(files_of_all)
    monkeypatch.setattr("tilekern.cache_tools.remotes.oci._PAUSE_S", 0.01)
    monkeypatch.setenv("TILEKERN_CACHE_DIR", str(files_of_all / "cache"))
    return files_of_all


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("arguments", "words"), REFUSED, ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else ""
)
def test_bad_input_is_one_line_and_changes_nothing(cli, folder, arguments, words):
    before = files(folder)
    cli.refused(*arguments, says=words)
    assert files(folder) == before


@pytest.mark.processes
def test_a_process_ends_so_too(folder):
    done = process("show", "rope", KEY)
    is_refusal(done.returncode, done.stdout, done.stderr, "rope", "ls")
