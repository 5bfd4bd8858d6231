"""Packages of records, made by `wheel`: built twice, installed by a real pip, found by a new process."""

import base64
import csv
import hashlib
import os
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import msgspec
import pytest
from cache_samples import H200, PROBLEM, SOURCE, put
from command_line import ROOT
from ship_samples import sha256

pytestmark = pytest.mark.processes

FIND = f"""
import sys
from tilekern.cache import default_layers, lookup
layers = default_layers()
hit = lookup("rms_norm", {{**{PROBLEM!r}, "rows": int(sys.argv[1])}}, bucketed=[], target_key={H200["key"]!r},
             arch="sm_90", toolkit_key="tileiras-13.4.92", source={SOURCE!r}, layers=layers)
print(hit and (hit.layer.name, hit.load("aligned")[:4]))
"""


@pytest.fixture
def cache(tmp_path):
    """Two records, of 1024 and of 2048 rows."""
    for rows in (1024, 2048):
        put(tmp_path / "cache", b"%d" % rows * 100, problem={**PROBLEM, "rows": rows})
    return tmp_path / "cache"


@pytest.fixture
def make(cli, cache, tmp_path):
    def run(name, *options, version="1.0"):
        arguments = ("--name", name, "--version", version, "--cache-dir", cache)
        return Path(cli.json("wheel", tmp_path / "dist", *arguments, *options)["wheel"])

    return run


def run(*command):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TILEKERN_", "PYTHON", "PIP_"))}
    # A new environment has nothing of what the cache needs; msgspec stands where the tests' own Python has it.
    needed = os.pathsep.join([str(ROOT), str(Path(msgspec.__file__).parents[1])])
    env |= {"PYTHONPATH": needed, "TILEKERN_CACHE_DIR": "nowhere", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    ran = subprocess.run([str(part) for part in command], env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@pytest.mark.nightly
def test_pip_installs_them_and_a_new_process_finds_their_records(make, cache, tmp_path):
    """Two of them side by side, in a real environment; what is uninstalled is found no more."""
    put(tmp_path / "other", b"4096" * 100, problem={**PROBLEM, "rows": 4096})
    wheels = make("acme.b200"), make("Acme-H200", "--cache-dir", tmp_path / "other", version="2026.11.1")
    python = tmp_path / "venv" / "bin" / "python"
    run(sys.executable, "-m", "venv", "--system-site-packages", tmp_path / "venv")
    assert run(python, "-c", FIND, 1024) == "None"
    run(python, "-m", "pip", "install", "-q", "--no-index", *wheels)
    assert run(python, "-c", FIND, 1024) == "('acme-b200:records', b'1024')"
    assert run(python, "-c", FIND, 4096) == "('acme-h200:records', b'4096')"
    run(python, "-m", "pip", "uninstall", "-q", "-y", "acme-b200")
    assert run(python, "-c", FIND, 1024) == "None"
    assert run(python, "-c", FIND, 4096) == "('acme-h200:records', b'4096')"
    run(python, "-m", "pip", "uninstall", "-q", "-y", "acme-h200")
    assert run(python, "-c", FIND, 4096) == "None"
    assert not list((tmp_path / "venv").rglob("tilekern_packs*"))


def test_a_folder_of_pip_s_target_serves_as_well(make, tmp_path):
    wheel = make("acme-few")
    run(sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", tmp_path / "site", wheel)
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n{FIND}"
    assert run(sys.executable, "-c", code, 1024) == "('acme-few:records', b'1024')"


def test_the_same_records_give_the_same_bytes(make, tmp_path, monkeypatch):
    first = make("acme").read_bytes()
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.chdir(tmp_path)
    before = os.umask(0o077)
    try:
        assert make("acme").read_bytes() == first
    finally:
        os.umask(before)
    assert make("acme", version="1.1").read_bytes() != first


def test_what_the_wheel_says_of_itself_is_so(cli, pack, tmp_path):
    document = cli.json("wheel", tmp_path / "d", "--name", "Acme_Kernels", "--version", "v1.0", "--pack", pack)
    assert Path(document["wheel"]) == tmp_path / "d" / "acme_kernels-1.0-py3-none-any.whl"
    assert (document["name"], document["version"]) == ("acme-kernels", "1.0")
    assert (document["records"], document["sha256"]) == (2, sha256(pack))
    assert document["targets"] == ["sm_100-b200-148", "sm_90-h200-132"]
    assert document["wheel_sha256"] == sha256(Path(document["wheel"]))
    archive = zipfile.ZipFile(document["wheel"])
    info = "acme_kernels-1.0.dist-info"
    metadata = message_from_bytes(archive.read(f"{info}/METADATA"))
    assert (metadata["Name"], metadata["Version"], metadata["Requires-Dist"]) == ("acme-kernels", "1.0", None)
    assert "2 records" in metadata["Summary"]
    assert archive.read(f"{document['module']}/records.pack") == pack.read_bytes()
    assert "Root-Is-Purelib: true" in archive.read(f"{info}/WHEEL").decode()
    listed = {
        name: (digest, size) for name, digest, size in csv.reader(archive.read(f"{info}/RECORD").decode().split())
    }
    assert listed.keys() == set(archive.namelist())
    for name, (digest, size) in listed.items():
        data = archive.read(name)
        is_its_own = name == f"{info}/RECORD"
        found = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        assert (digest, size) == (("", "") if is_its_own else (f"sha256={found}", str(len(data))))


def test_a_bad_pack_makes_no_wheel(cli, pack, tmp_path):
    pack.write_bytes(pack.read_bytes()[:-100])
    cli.refused("wheel", tmp_path / "d", "--name", "acme", "--version", "1", "--pack", pack, says=str(pack))
    assert not (tmp_path / "d").exists()
