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
from ship_samples import make_pack, sha256

from tilekern.cache_tools.__main__ import main

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("wheel of records")]

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


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A pack, a wheel with it, and the folder that the wheel was unpacked into."""
    folder = tmp_path_factory.mktemp("built")
    pack = make_pack(folder)
    assert main(["wheel", f"{folder}/dist", "--name", "Acme_Kernels", "--version", "v1.0", "--pack", str(pack)]) == 0
    (wheel,) = (folder / "dist").iterdir()
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return pack, wheel, folder / "site"


def test_an_unpacked_wheel_is_found_on_the_path(built):
    code = f"import sys; sys.path.insert(0, {str(built[2])!r})\n{FIND}"
    assert run(sys.executable, "-c", code, 8192) == "('acme-kernels:records', b'alig')"


def test_the_same_pack_gives_the_same_bytes_and_the_wheel_describes_itself(cli, built, tmp_path, monkeypatch):
    pack, wheel, _ = built
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.chdir(tmp_path)
    before = os.umask(0o077)
    try:
        document = cli.json("wheel", tmp_path / "d", "--name", "Acme_Kernels", "--version", "v1.0", "--pack", pack)
    finally:
        os.umask(before)
    assert Path(document["wheel"]) == tmp_path / "d" / "acme_kernels-1.0-py3-none-any.whl"
    assert Path(document["wheel"]).read_bytes() == wheel.read_bytes()
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
