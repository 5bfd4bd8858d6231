"""Packs in an OCI registry: a real one, started here."""

import base64
import contextlib
import json
import time

import oras.client
import pytest
from real_registry import NEEDS_REGISTRY, PASSWORD, USER, by_password, by_token, running
from ship_samples import carried, make_pack, sha256

from tilekern.cache import Corrupt
from tilekern.cache_tools.remotes.oci import ARTIFACT_TYPE, _pack_layer

pytestmark = NEEDS_REGISTRY


@pytest.fixture(scope="module")
def registry(tmp_path_factory):
    with running(tmp_path_factory.mktemp("registry") / "open") as found:
        yield found


@pytest.fixture(scope="module", params=["password", "token"])
def closed(request, tmp_path_factory):
    """One that asks who one is: for a password, or for a token of another service."""
    folder = tmp_path_factory.mktemp("registry") / "closed"
    guard = contextlib.nullcontext(by_password(folder)) if request.param == "password" else by_token(folder)
    with guard as auth, running(folder, auth) as found:
        yield found


@pytest.fixture(autouse=True)
def no_login(tmp_path, monkeypatch):
    """A home with no configuration of docker."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DOCKER_CONFIG", raising=False)


def log_in(folder, registry, password=PASSWORD):
    """Write what `docker login` writes."""
    folder.mkdir()
    auth = base64.b64encode(f"{USER}:{password}".encode()).decode()
    (folder / "config.json").write_text(json.dumps({"auths": {registry.host: {"auth": auth}}}))


def test_a_registry_carries_a_pack(cli, registry, pack, root):
    carried(cli, pack, f"oci://{registry.host}/team/kernels:carried", root)


def test_the_artifact_says_what_it_is(cli, registry, pack):
    cli.json("push", pack, f"oci://{registry.host}/team/kernels:said")
    manifest = registry.manifest("team/kernels", "said")
    assert manifest["artifactType"] == ARTIFACT_TYPE == "application/vnd.tilekern.pack.v1"
    assert manifest["config"]["mediaType"] == "application/vnd.oci.empty.v1+json"
    assert registry.blob(manifest["config"]["digest"].removeprefix("sha256:")).read_bytes() == b"{}"
    assert manifest["annotations"] == {
        "tilekern.runtime.records": "2",
        "tilekern.spec.targets": "sm_100-b200-148,sm_90-h200-132",
        "tilekern.toolkits": "tileiras-13.4.92",
    }
    (layer,) = manifest["layers"]
    assert (layer["digest"], layer["size"]) == (f"sha256:{sha256(pack)}", pack.stat().st_size)


def test_other_clients_fetch_it(cli, registry, pack, tmp_path):
    cli.json("push", pack, f"oci://{registry.host}/team/kernels:others")
    client = oras.client.OrasClient(insecure=True)
    (path,) = client.pull(f"{registry.host}/team/kernels:others", outdir=str(tmp_path / "by oras"))
    assert sha256(tmp_path / "by oras" / "kernels.pack") == sha256(pack)
    assert path.endswith("kernels.pack")


def test_the_same_pack_is_neither_pushed_nor_pulled_twice(cli, registry, pack, tmp_path):
    url = f"oci://{registry.host}/twice/kernels:b200"
    first = cli.json("push", pack, url)
    cli.json("pull", url)
    assert cli.json("pull", url, "--out", tmp_path / "kept.pack")["downloaded"] is True
    # Without its blob the registry could neither give nor compare the pack.
    blob = registry.blob(sha256(pack))
    aside = blob.rename(blob.with_name("aside"))
    assert cli.json("pull", url)["downloaded"] is False
    assert cli.json("pull", url, "--out", tmp_path / "kept.pack")["downloaded"] is False
    assert cli.json("push", pack, url)["pushed"] is False
    cli.refused("pull", url, "--cache-dir", tmp_path / "other", says=url)
    assert not (tmp_path / "other").exists()
    aside.rename(blob)
    assert cli.json("pull", first["place"], "--cache-dir", tmp_path / "other")["installed"] == 2


def test_a_digest_always_names_the_same_push(cli, registry, pack, tmp_path):
    url = f"oci://{registry.host}/moved/kernels:b200"
    place = cli.json("push", pack, url)["place"]
    assert place.startswith(f"oci://{registry.host}/moved/kernels@sha256:")
    newer = make_pack(tmp_path, b"newer" * 50, name="newer.pack")
    assert cli.json("push", newer, url)["pushed"] is True
    assert cli.json("pull", url)["sha256"] == sha256(newer)
    assert cli.json("pull", place)["sha256"] == sha256(pack)
    cli.refused("push", newer, place, says="names a digest")


@pytest.mark.parametrize("how", ["flipped", "longer", "shorter"])
def test_a_blob_that_was_changed_in_the_registry_is_refused(cli, registry, root, tmp_path, how):
    pack = make_pack(tmp_path, how.encode() * 100)
    url = f"oci://{registry.host}/changed/kernels:{how}"
    cli.json("push", pack, url)
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    changed = {"flipped": data, "longer": data + b"more", "shorter": data[:-4]}[how]
    registry.blob(sha256(pack)).write_bytes(changed)
    cli.refused("pull", url, says=url)
    assert not root.exists()


def test_an_artifact_of_another_type_is_refused(cli, registry, tmp_path):
    (tmp_path / "file.txt").write_text("an artifact of another type")
    client = oras.client.OrasClient(insecure=True)
    client.push(f"{registry.host}/other/thing:1", files=[str(tmp_path / "file.txt")], disable_path_validation=True)
    cli.refused("pull", f"oci://{registry.host}/other/thing:1", says=("is not a pack", ARTIFACT_TYPE))


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "\xff", '{"artifactType": "%s", "layers": [{"digest": 3}]}'])
def test_a_damaged_manifest_is_refused(text):
    with pytest.raises(Corrupt, match="is not a pack: its manifest reads") as caught:
        _pack_layer("oci://host/pack:1", text.replace("%s", ARTIFACT_TYPE).encode("latin-1"))
    assert "\n" not in str(caught.value)


def test_a_missing_pack_is_reported_as_missing(cli, registry, root):
    for place in ("team/kernels:none", "none/at/all", f"team/kernels@sha256:{'0' * 64}"):
        url = f"oci://{registry.host}/{place}"
        cli.refused("pull", url, says=f"there is no {url}")
    assert not root.exists()


def test_docker_s_login_is_used(cli, closed, pack, tmp_path, monkeypatch):
    url = f"oci://{closed.host}/team/kernels:b200"
    log_in(tmp_path / ".docker", closed)
    assert cli.json("push", pack, url)["pushed"] is True
    (tmp_path / ".docker" / "config.json").unlink()
    log_in(tmp_path / "elsewhere", closed)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "elsewhere"))
    assert cli.json("pull", url)["installed"] == 2


def test_a_missing_or_wrong_login_is_refused_in_one_line_and_soon(cli, closed, pack, tmp_path):
    url = f"oci://{closed.host}/team/kernels:b200"
    started = time.monotonic()
    cli.refused("pull", url, says=("docker login", closed.host))
    cli.refused("push", pack, url, says=("docker login", closed.host))
    log_in(tmp_path / ".docker", closed, "wrong")
    cli.refused("pull", url, says=("docker login", closed.host))
    cli.refused("push", pack, url, says=("docker login", closed.host))
    assert time.monotonic() - started < 30
