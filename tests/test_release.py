"""The release script: what it refuses, what it writes, and a whole release that nobody gets."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import release
from release import ReleaseError

sys.path.insert(0, str(Path(__file__).parent / "cache"))
from cache_samples import PROBLEM, digest_of, make, new_key

from tilekern.cache import write_pack
from tilekern.cache.trust.signing import SigningKey, generate_key, is_signed

ROOT = Path(__file__).parents[1]
CHANGES = """\
# Changelog

## [Unreleased]

## [0.2.0] - 2027-01-31

### Added

- It.

## [0.1.0] - 2026-11-21

Old.
"""
FILES = {"tilekern/__init__.py": b"code", "tilekern/prebuilt/a.pack": b"pack"}


def git(folder, *arguments):
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path):
    """A repository with one commit, of version 0.2.0."""
    (tmp_path / "tilekern").mkdir()
    (tmp_path / "tilekern" / "__init__.py").write_text('"""About."""\n\n__version__ = "0.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGES)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "A release")
    return tmp_path


@pytest.mark.processes
@pytest.mark.parametrize("name", ["CHANGELOG.md", "new.py"])
def test_a_checkout_with_changes_is_refused(checkout, name):
    release.require_clean(checkout)
    (checkout / name).write_text("changed")
    with pytest.raises(ReleaseError, match=rf"the checkout differs from HEAD \(.* {name}\)"):
        release.require_clean(checkout)


@pytest.mark.processes
def test_the_version_is_the_given_one_or_the_tags(checkout):
    assert release.version_of(checkout, "0.2.0") == "0.2.0"
    with pytest.raises(ReleaseError, match="HEAD has 0 tags of a version; name the version"):
        release.version_of(checkout, None)
    git(checkout, "tag", "v0.2.0")
    git(checkout, "tag", "verified")
    assert release.version_of(checkout, None) == release.version_of(checkout, "0.2.0") == "0.2.0"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("given", "tag", "message"),
    [
        ("0.3.0", None, "tilekern/__init__.py has version 0.2.0, not 0.3.0"),
        ("0.2.0.dev0", None, "0.2.0.dev0 is not a version of a release"),
        ("0.2.0", "v0.2.1", "HEAD has the tag v0.2.1, not v0.2.0"),
        (None, "v0.2.1", "tilekern/__init__.py has version 0.2.0, not 0.2.1"),
    ],
)
def test_a_version_that_is_not_the_commits_is_refused(checkout, given, tag, message):
    if tag:
        git(checkout, "tag", tag)
    with pytest.raises(ReleaseError, match=message):
        release.version_of(checkout, given)


@pytest.mark.processes
def test_a_version_whose_tag_is_another_commits_is_refused(checkout):
    git(checkout, "tag", "v0.2.0")
    git(checkout, "commit", "-q", "--allow-empty", "-m", "Later")
    with pytest.raises(ReleaseError, match=r"the tag v0\.2\.0 is another commit's"):
        release.version_of(checkout, "0.2.0")


def test_the_notes_are_the_versions_section():
    assert release.notes_of(CHANGES, "0.2.0") == "### Added\n\n- It."


@pytest.mark.parametrize(
    ("changes", "version", "message"),
    [
        (CHANGES, "0.3.0", r"has no section ## \[0\.3\.0\]"),
        (CHANGES.replace("[0.2.0] - 2027-01-31", "[0.2.0]"), "0.2.0", "must be .* YYYY-MM-DD, got"),
        (CHANGES, "0.1.0", r"\[0\.2\.0\] - 2027-01-31 stands above \[0\.1\.0\]"),
        (CHANGES.replace("[Unreleased]\n", "[Unreleased]\n\n- More.\n"), "0.2.0", r"\[Unreleased\] has entries"),
        (CHANGES.replace("### Added\n\n- It.\n", ""), "0.2.0", r"the section \[0\.2\.0\] is empty"),
    ],
)
def test_a_changelog_that_is_not_ready_is_refused(changes, version, message):
    with pytest.raises(ReleaseError, match=message):
        release.notes_of(changes, version)


def wheel_of(folder, files, date=(2027, 1, 31, 0, 0, 0)):
    """A wheel of 0.2.0 with these files and the metadata of a wheel."""
    folder.mkdir()
    path = folder / "tilekern-0.2.0-py3-none-any.whl"
    made = (release.NOTED, *(f"tilekern-0.2.0.dist-info/{name}" for name in release.METADATA))
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in (dict.fromkeys(made, b"") | files).items():
            archive.writestr(zipfile.ZipInfo(name, date), data)
    return path


def test_a_wheel_has_the_commits_files_and_nothing_else(tmp_path):
    release.check_wheel(wheel_of(tmp_path / "whole", FILES), FILES, "0.2.0")


@pytest.mark.parametrize(
    ("more", "left_out", "message"),
    [
        ({}, "tilekern/prebuilt/a.pack", r"lacks tilekern/prebuilt/a\.pack \(1 files\)"),
        ({"tests/test_a.py": b""}, None, r"must not have tests/test_a\.py"),
        ({"tilekern/__pycache__/a.cpython-311.pyc": b""}, None, "must not have tilekern/__pycache__"),
        ({"tilekern/__init__.py": b"other"}, None, r"has another content of tilekern/__init__\.py"),
    ],
)
def test_a_wheel_with_other_files_is_refused(tmp_path, more, left_out, message):
    files = {name: data for name, data in (FILES | more).items() if name != left_out}
    with pytest.raises(ReleaseError, match=message):
        release.check_wheel(wheel_of(tmp_path / "other", files), FILES, "0.2.0")


def test_a_wheel_of_another_version_or_too_large_is_refused(tmp_path, monkeypatch):
    path = wheel_of(tmp_path / "wheel", FILES)
    with pytest.raises(ReleaseError, match=r"not tilekern-0\.3\.0-py3-none-any\.whl"):
        release.check_wheel(path, FILES, "0.3.0")
    monkeypatch.setattr(release, "LARGEST_BYTES", 1000)
    with pytest.raises(ReleaseError, match=r"has 0\.0 MB and may have 0; take packs out of package-data"):
        release.check_wheel(path, FILES, "0.2.0")


def package_of(folder, *records, key=None, version="0.2.0", more=()):
    """A data package for the H200, as `.ci/data_packages.py` builds it, with more files."""
    signatures = {digest_of(one): {key.public_key: key.sign(one.to_json().encode())} for one, _ in records if key}
    folder.mkdir()
    write_pack(folder / "records.pack", records, signatures)
    path = folder / f"tilekern_packs_h200-{version}-py3-none-any.whl"
    info = (f"tilekern_packs_h200-{version}.dist-info/{name}" for name in release.DATA_METADATA)
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(folder / "records.pack", "tilekern_packs_h200/records.pack")
        for name in ("tilekern_packs_h200/__init__.py", *info, *more):
            archive.writestr(name, b"")
    return path


def test_data_packages_have_each_record_of_the_commits_packs_signed_by_the_key(tmp_path):
    one, other = make(), make(problem={**PROBLEM, "rows": 1024})
    write_pack(tmp_path / "a.pack", [one])
    write_pack(tmp_path / "b.pack", [one, other])
    packs, key = [tmp_path / "a.pack", tmp_path / "b.pack"], new_key(tmp_path / "release.key")

    def check(name, *records, public_key=None, **options):
        return release.check_packages([package_of(tmp_path / name, *records, **options)], packs, "0.2.0", public_key)

    assert check("whole", one, other) == "data packages: 2 records of 2 packs, not signed"
    said = check("signed", one, other, key=key, public_key=key.public_key)
    assert said == "data packages: 2 records of 2 packs, signed"
    with pytest.raises(ReleaseError, match="is not signed by the release's key"):
        check("unsigned", one, other, public_key=key.public_key)
    with pytest.raises(ReleaseError, match=r"no data package has v1/.*rows=1024.* \(1 records\)"):
        check("part", one)
    with pytest.raises(ReleaseError, match=r"must not have tests/a\.py"):
        check("more", one, other, more=["tests/a.py"])
    with pytest.raises(ReleaseError, match=r"0\.1\.0-py3-none-any\.whl is not of version 0\.2\.0"):
        check("old", one, other, version="0.1.0")


def test_two_builds_that_differ_are_refused_with_what_differs(tmp_path):
    one, same = (wheel_of(tmp_path / name, FILES) for name in ("one", "same"))
    release.require_same(one, same)
    with pytest.raises(ReleaseError, match=r"differ: tilekern/__init__\.py$"):
        release.require_same(one, wheel_of(tmp_path / "text", FILES | {"tilekern/__init__.py": b"other"}))
    with pytest.raises(ReleaseError, match="differ: times, modes or order of its files"):
        release.require_same(one, wheel_of(tmp_path / "time", FILES, date=(2027, 2, 1, 0, 0, 0)))


@pytest.mark.processes
def test_one_signature_covers_all_files_as_the_documentation_checks_it(tmp_path):
    public_key = generate_key(tmp_path / "release.key")
    key = SigningKey(tmp_path / "release.key")
    out = tmp_path / "out"
    release.write_files(out, [wheel_of(tmp_path / "built", FILES)], "Notes.", key)
    page = (ROOT / "docs" / "releasing.md").read_text()
    code = page.split("## Check a release")[1].split("```bash\n")[1].split("```")[0]

    def check(public_key):
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        env = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "PUBLIC_KEY": public_key}
        return subprocess.run(["bash", "-ec", code], cwd=out, env=env, capture_output=True, text=True, check=False)

    assert check(public_key).stdout == "RELEASE_NOTES.md: OK\ntilekern-0.2.0-py3-none-any.whl: OK\n"
    assert check(public_key).returncode == 0
    assert "not signed by this key" in check("0" * 64).stderr
    # One of a record is not valid.
    (out / "SHA256SUMS.sig").write_bytes(key.sign((out / "SHA256SUMS").read_bytes()))
    assert "not signed by this key" in check(public_key).stderr
    (out / "RELEASE_NOTES.md").write_text("Others.")
    assert check(public_key).returncode == 1


def test_a_key_that_others_can_read_is_refused(tmp_path):
    generate_key(tmp_path / "release.key")
    (tmp_path / "release.key").chmod(0o644)
    with pytest.raises(ReleaseError, match="others can read the private key"):
        release.read_key(tmp_path / "release.key")


@pytest.mark.nightly
@pytest.mark.processes
def test_a_whole_release_is_made_of_a_commit_and_not_published(tmp_path):
    """Of this checkout as it is, with a version of its own."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", "--no-tags", ROOT, clone], check=True)
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0"):
        if (ROOT / name).is_file() and not (ROOT / name).is_symlink():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, clone / name)
    package = clone / "tilekern" / "__init__.py"
    own = release.own_version(package)
    package.write_text(package.read_text().replace(f'"{own}"', '"98.0.0"'))
    (clone / "CHANGELOG.md").write_text(CHANGES.replace("[0.2.0]", "[98.0.0]"))
    git(clone, "add", ".")
    git(clone, "commit", "-qm", "A release")
    git(clone, "tag", "v98.0.0")
    key = tmp_path / "release.key"
    public_key = generate_key(key)
    # As on a machine that keeps bytecode beside its sources, which must not come into the wheel.
    env = {name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "TILEKERN_"))}
    command = [sys.executable, ".ci/release.py", "--key", key]
    ran = subprocess.run(command, cwd=clone, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.endswith("nothing was published\n")
    out = clone / "dist" / "tilekern-98.0.0"
    built = {"tilekern-98.0.0.tar.gz", "tilekern-98.0.0-py3-none-any.whl"}
    built |= {f"tilekern_packs_{gpu}-98.0.0-py3-none-any.whl" for gpu in ("b200", "h100", "h200")}
    assert {path.name for path in out.iterdir()} == built | {"RELEASE_NOTES.md", "SHA256SUMS", "SHA256SUMS.sig"}
    sums, signature = ((out / name).read_bytes() for name in ("SHA256SUMS", "SHA256SUMS.sig"))
    assert is_signed(public_key, sums, signature, release.PURPOSE)
    subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=out, check=True)
    again = subprocess.run(command, cwd=clone, env=env, capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert "exists already" in again.stderr
