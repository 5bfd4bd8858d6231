#!/usr/bin/env python3
"""Make the files of a release of the commit that is checked out; nothing is published, tagged or pushed.

    python .ci/release.py 0.2.0 --key release.key

It builds the sdist, from it the wheel, and the data packages of all GPUs, twice; checks what is in them; installs the
wheels into a fresh environment; and writes dist/tilekern-VERSION/: these files, RELEASE_NOTES.md, SHA256SUMS and, with
a key, SHA256SUMS.sig. The first thing that is wrong ends it with one line and exit code 1, and nothing is written then.
docs/releasing.md has the steps before and after.

Needs git, and the extras tilekern[tools,ship,trust] in the environment that runs it; twine checks the metadata if it is
installed.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import hashlib
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.metadata import Metadata

ROOT = Path(__file__).resolve().parents[1]
# The checkout's own tilekern makes the signature.
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from tilekern.cache.trust.signing import SigningKey

PURPOSE = b"tilekern release 1\n"
# Of the sdist and the wheel; PyPI's default limit for one file is 100 MB.
LARGEST_BYTES = 10_000_000
# Made by the build of a wheel.
NOTED = "tilekern/spec/source_digests.json"
DATA_METADATA = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt")
METADATA = (*DATA_METADATA, "licenses/LICENSE")
EGG_INFO = ("PKG-INFO", "SOURCES.txt", "dependency_links.txt", "entry_points.txt", "requires.txt", "top_level.txt")
# Beside the package in an sdist; setuptools writes the last two.
SDIST_TOP = ("LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py", "PKG-INFO", "setup.cfg")
# Looks up a record of a data package as a job does, and prints its kernel and the layer that it is found in.
FIND = """
import sys
from tilekern.cache import default_layers, lookup, parse_problem_key
from tilekern.spec.source import source_digest
layers = default_layers()
own = next(layer for layer in layers if layer.name == sys.argv[1] + ":records")
(target, *_), (module, kernel, problem) = own.targets(), sys.argv[2:]
hit = lookup(kernel, parse_problem_key(problem), bucketed=[], target_key=target, arch=target.partition("-")[0],
             toolkit_key=None, source=source_digest(module), layers=layers)
print(kernel, "of", target, "in", hit and hit.layer.name)
"""
# The second build must not depend on what differs here.
BUILDS = {
    "first": {"PYTHONHASHSEED": "1", "TZ": "UTC", "LC_ALL": "C"},
    "second-of-two": {"PYTHONHASHSEED": "2", "TZ": "Asia/Tokyo", "LC_ALL": "C.UTF-8"},
}


class ReleaseError(Exception):
    """The release is not made; the message says why and what to do."""


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Build, check and sign the files of a release; publish nothing.")
    parser.add_argument("version", nargs="?", help="such as 0.2.0; default: HEAD's tag, without its v")
    parser.add_argument("--key", type=Path, help="private key of `tilekern-cache keygen`; default: no signature")
    parser.add_argument("--out", type=Path, help="new folder for the files; default dist/tilekern-VERSION")
    options = parser.parse_args()
    try:
        release(ROOT, options.version, options.key, options.out)
    except ReleaseError as error:
        raise SystemExit(f"release: {error}") from None


def release(root: Path, version: str | None, key_file: Path | None, out: Path | None) -> None:
    """Make the files of a release from a checkout.

    Args:
        root: the checkout.
        version: as on the command line, as are the others.

    Raises:
        ReleaseError: the checkout, the builds or their contents are not those of a release.
    """
    require_clean(root)
    version = version_of(root, version)
    notes = notes_of((root / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    out = out or root / "dist" / f"tilekern-{version}"
    if out.exists():
        raise ReleaseError(f"{out} exists already; remove it or give another --out")
    key = read_key(key_file) if key_file else None
    commit, seconds = git(root, "log", "-1", "--format=%H %ct").split()
    say(f"tilekern {version} of commit {commit[:12]}, SOURCE_DATE_EPOCH {seconds}")
    say(f"built by Python {sys.version.split()[0]}, setuptools {installed_version('setuptools')}")
    with tempfile.TemporaryDirectory(prefix="tilekern-release-") as scratch:
        sources = [unpack(commit_archive(root), Path(scratch, name, "source")) for name in BUILDS]
        builds = [
            build(source, source.parent, {"SOURCE_DATE_EPOCH": seconds, **varied}, key_file)
            for source, varied in zip(sources, BUILDS.values(), strict=True)
        ]
        for one, other in zip(*builds, strict=True):
            require_same(one, other)
            say(f"{one.name}: {megabytes(one)}, both builds are equal")
        sdist, wheel, *packages = builds[0]
        commits_files = unpack(commit_archive(root), Path(scratch, "files"))
        files = package_files(commits_files)
        check_sdist(sdist, files, version)
        check_wheel(wheel, files, version)
        for name in sorted(name for name in files if name.endswith(".pack")):
            say(f"  {name}: {len(files[name]):,} bytes")
        say(f"contents: {len(files)} files of the commit, the noted digests, metadata, and nothing else")
        say(check_packages(packages, packs_of(commits_files), version, key.public_key if key else None))
        say(f"metadata: {check_metadata(builds[0], version)}")
        for line in check_installed(wheel, packages, version, Path(scratch, "environment")):
            say(f"installed: {line}")
        finished = Path(scratch, "finished")
        write_files(finished, builds[0], notes, key)
        shutil.copytree(finished, out)
    say(f"signed with key {key.public_key[:16]}" if key else "not signed: no --key")
    say(f"wrote {out}: {', '.join(sorted(path.name for path in out.iterdir()))}")
    if f"v{version}" not in git(root, "tag", "--points-at", "HEAD").split():
        say(f"HEAD has no tag v{version} yet")
    say("nothing was published")


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


def megabytes(path: Path) -> str:
    """Return the size of a file for people."""
    return f"{path.stat().st_size / 1e6:.1f} MB"


def git(root: Path, *arguments: str) -> str:
    """Return what a command of git prints."""
    return run(["git", *arguments], cwd=root).strip()


def run(command: list[str], cwd: Path, env: Mapping[str, str] | None = None) -> str:
    """Run a command and return its output.

    Raises:
        ReleaseError: it failed, with its last line.
    """
    # Modes are part of the archives.
    ran = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False, umask=0o022)
    if ran.returncode:
        said = (ran.stderr.strip() or ran.stdout.strip() or f"exit code {ran.returncode}").splitlines()[-1]
        raise ReleaseError(f"{' '.join(command[:4])} failed: {said}")
    return ran.stdout


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment without settings of Python, pip and tilekern, which could change a build."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "PIP_", "TILEKERN_"))}
    return kept | more


def require_clean(root: Path) -> None:
    """Refuse a checkout with changes or new files."""
    if changes := git(root, "status", "--porcelain").splitlines():
        more = f" and {len(changes) - 1} more" if changes[1:] else ""
        raise ReleaseError(
            f"the checkout differs from HEAD ({changes[0].strip()}{more}); commit or remove what differs"
        )


def version_of(root: Path, given: str | None) -> str:
    """Return the version to release: the given one or that of HEAD's tag, which must be tilekern's own."""
    tags = [tag for tag in git(root, "tag", "--points-at", "HEAD").split() if re.match(r"v\d", tag)]
    if not given and len(tags) != 1:
        raise ReleaseError(f"HEAD has {len(tags)} tags of a version; name the version")
    version = given or tags[0][1:]
    if not re.fullmatch(r"\d+\.\d+\.\d+(rc\d+)?", version):
        raise ReleaseError(f"{version} is not a version of a release, such as 0.2.0 or 0.2.0rc1")
    tag = f"v{version}"
    if tags and tag not in tags:
        raise ReleaseError(f"HEAD has the tag {tags[0]}, not {tag}")
    if not tags and git(root, "tag", "--list", tag):
        raise ReleaseError(f"the tag {tag} is another commit's; check that out")
    own = own_version(root / "tilekern" / "__init__.py")
    if own != version:
        raise ReleaseError(f"tilekern/__init__.py has version {own}, not {version}; set it in the release's commit")
    return version


def own_version(path: Path) -> str:
    """Return ``__version__`` of a package's file, which is parsed and not imported."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            return str(ast.literal_eval(node.value))
    raise ReleaseError(f"{path} has no __version__")


def notes_of(changelog: str, version: str) -> str:
    """Return the text of a version's section of the changelog.

    Raises:
        ReleaseError: there is none, it has no date, an older one stands above it, or entries are left above it.
    """
    sections = re.split(r"^## ", changelog, flags=re.M)[1:]
    titles = [section.partition("\n")[0] for section in sections]
    texts = [section.partition("\n")[2].strip() for section in sections]
    released = [title for title in titles if title != "[Unreleased]"]
    title = next((title for title in released if title.startswith(f"[{version}]")), None)
    if title is None:
        raise ReleaseError(f"CHANGELOG.md has no section ## [{version}]; move the entries of [Unreleased] into one")
    if not re.fullmatch(re.escape(f"[{version}]") + r" - \d{4}-\d\d-\d\d", title):
        raise ReleaseError(f"CHANGELOG.md: the section must be ## [{version}] - YYYY-MM-DD, got ## {title}")
    if title != released[0]:
        raise ReleaseError(f"CHANGELOG.md: {released[0]} stands above [{version}]; a release is the newest section")
    if any(text for name, text in zip(titles, texts, strict=True) if name == "[Unreleased]"):
        raise ReleaseError(f"CHANGELOG.md: [Unreleased] has entries; move them into [{version}]")
    text = texts[titles.index(title)]
    if not text:
        raise ReleaseError(f"CHANGELOG.md: the section [{version}] is empty")
    return text


def read_key(path: Path) -> SigningKey:
    """Return a private key, before the minute that the builds take."""
    from tilekern.cache import CacheError
    from tilekern.cache.trust.signing import SigningKey

    try:
        return SigningKey(path)
    except CacheError as error:
        raise ReleaseError(str(error)) from None


def commit_archive(root: Path) -> bytes:
    """Return HEAD's files as a tar: no file that git ignores can come into a build."""
    return subprocess.run(["git", "archive", "HEAD"], cwd=root, capture_output=True, check=True).stdout


def unpack(archive: bytes, folder: Path) -> Path:
    """Unpack a tar into a new folder, and return that."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return folder


def build(source: Path, folder: Path, settings: Mapping[str, str], key_file: Path | None) -> list[Path]:
    """Build an sdist from sources, a wheel from the sdist, as pip does for who installs the sdist, and data packages.

    Returns:
        The sdist, the wheel and the data packages, in ``folder / "built"``.
    """
    built = folder / "built"
    built.mkdir()

    def hook(name: str, cwd: Path) -> Path:
        code = f"import sys; from setuptools import build_meta; build_meta.{name}(sys.argv[1])"
        before = set(built.iterdir())
        run([sys.executable, "-c", code, str(built)], cwd=cwd, env=environment(**settings))
        (made,) = set(built.iterdir()) - before
        return made

    sdist = hook("build_sdist", source)
    (unpacked,) = unpack(gzip.decompress(sdist.read_bytes()), folder / "unpacked").iterdir()
    wheel = hook("build_wheel", unpacked)
    signed = ["--key", str(key_file.resolve())] if key_file else []
    command = [sys.executable, str(source / ".ci" / "data_packages.py"), str(built), *signed]
    run(command, cwd=source, env=environment(**settings))
    return [sdist, wheel, *sorted(set(built.iterdir()) - {sdist, wheel})]


def require_same(one: Path, other: Path) -> None:
    """Refuse two builds of a file that differ, and name what differs."""
    if (one.name, one.read_bytes()) != (other.name, other.read_bytes()):
        first, second = contents(one), contents(other)
        names = sorted(name for name in first.keys() | second if first.get(name) != second.get(name))
        what = ", ".join(names[:5]) or "times, modes or order of its files"
        raise ReleaseError(f"two builds of {one.name} differ: {what}")


def contents(path: Path) -> dict[str, bytes]:
    """Return the files in a wheel or an sdist by name; names in an sdist are those below its folder."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            return {name: archive.read(name) for name in archive.namelist()}
    with tarfile.open(path) as tar:
        files = ((member.name.partition("/")[2], tar.extractfile(member)) for member in tar)
        return {name: file.read() for name, file in files if file}


def package_files(source: Path) -> dict[str, bytes]:
    """Return the files of a checkout that a release must have, as they are named there."""
    folders = {"tilekern": source / "tilekern"}
    # Both are links in the package, which rglob does not go through.
    folders |= {f"tilekern/{name}": source / name for name in ("tuning", "cache_tools")}
    files = {
        f"{above}/{path.relative_to(folder)}": path.read_bytes()
        for above, folder in folders.items()
        for path in folder.rglob("*.py")
    }
    data = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"]
    for name in (*(f"tilekern/{name}" for name in data["tilekern"]), "tilekern_startup.py"):
        files[name] = (source / name).read_bytes()
    return files


def packs_of(source: Path) -> list[Path]:
    """Return the packs of a checkout; the package has some of them, the data packages have all."""
    return sorted((source / "tilekern" / "prebuilt").glob("*.pack"))


def check_sdist(path: Path, files: Mapping[str, bytes], version: str) -> None:
    """Refuse an sdist that is not the package's files, those that build it, and metadata."""
    if path.name != f"tilekern-{version}.tar.gz":
        raise ReleaseError(f"the sdist is called {path.name}, not tilekern-{version}.tar.gz")
    require_contents(path, files, {*SDIST_TOP, *(f"tilekern.egg-info/{name}" for name in EGG_INFO)})
    require_size(path)


def check_wheel(path: Path, files: Mapping[str, bytes], version: str) -> None:
    """Refuse a wheel that is not the package's files, the noted digests, and metadata."""
    if path.name != f"tilekern-{version}-py3-none-any.whl":
        raise ReleaseError(f"the wheel is called {path.name}, not tilekern-{version}-py3-none-any.whl")
    require_contents(path, files, {NOTED, *(f"tilekern-{version}.dist-info/{name}" for name in METADATA)})
    require_size(path)


def require_contents(path: Path, files: Mapping[str, bytes], others: set[str]) -> None:
    """Refuse an archive without ``files`` as they are, without one of ``others``, or with anything else."""
    inside = contents(path)
    for problem, names in (
        ("lacks", (files.keys() | others) - inside.keys()),
        ("must not have", inside.keys() - files.keys() - others),
        ("has another content of", {name for name in files.keys() & inside if files[name] != inside[name]}),
    ):
        if names:
            raise ReleaseError(f"{path.name} {problem} {', '.join(sorted(names)[:5])} ({len(names)} files)")


def require_size(path: Path) -> None:
    """Refuse an sdist or wheel that is too large."""
    if path.stat().st_size > LARGEST_BYTES:
        raise ReleaseError(
            f"{path.name} has {megabytes(path)} and may have {LARGEST_BYTES / 1e6:.0f}; "
            "take packs out of package-data in pyproject.toml"
        )


def check_packages(packages: Sequence[Path], packs: Sequence[Path], version: str, public_key: str | None) -> str:
    """Refuse data packages that are not a pack and metadata, or that do not have each record of a commit's packs.

    Args:
        packages: the wheels.
        packs: the commit's packs.
        version: of the release.
        public_key: that of the key which must have signed every record; None for no signatures.

    Returns:
        A line about what was checked.
    """
    from tilekern.cache import CacheError, Pack, checked_contents
    from tilekern.cache.trust.signing import is_signed

    inside = set()
    for path in packages:
        module, suffix = path.name.split("-", 1)
        if suffix != f"{version}-py3-none-any.whl":
            raise ReleaseError(f"{path.name} is not of version {version}")
        pack_name = f"{module}/records.pack"
        info = {f"{module}-{version}.dist-info/{name}" for name in DATA_METADATA}
        require_contents(path, {}, {f"{module}/__init__.py", pack_name, *info})
        with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(path) as archive:
            pack = Pack(Path(archive.extract(pack_name, folder)))
            signatures = pack.signatures()
            try:
                records = [record for record, _ in checked_contents(pack)]
            except CacheError as error:
                raise ReleaseError(f"{path.name}: {error}") from None
        inside |= {record.address for record in records}
        for record in records:
            by_key = signatures.get(hashlib.sha256(record.data).hexdigest(), {})
            if public_key and not is_signed(public_key, record.data, by_key.get(public_key, b"")):
                raise ReleaseError(f"{path.name}: {record.address.path} is not signed by the release's key")
    if missing := {address for pack in packs for address in Pack(pack).records} - inside:
        raise ReleaseError(f"no data package has {min(missing).path} ({len(missing)} records)")
    return f"data packages: {len(inside):,} records of {len(packs)} packs, {'signed' if public_key else 'not signed'}"


def check_metadata(built: Sequence[Path], version: str) -> str:
    """Refuse metadata that an index would refuse; return a line about what was checked.

    Args:
        built: the sdist, the wheel, and the data packages.
        version: of the release.
    """
    documents = []
    for path in built:
        name = "tilekern" if path in built[:2] else path.name.partition("-")[0].replace("_", "-")
        inside = "PKG-INFO" if path == built[0] else f"{name.replace('-', '_')}-{version}.dist-info/METADATA"
        documents.append(contents(path)[inside])
        try:
            metadata = Metadata.from_email(documents[-1], validate=True)
        except ExceptionGroup as group:
            raise ReleaseError(f"{path.name}: {'; '.join(map(str, group.exceptions))}") from None
        if (metadata.name, str(metadata.version)) != (name, version):
            raise ReleaseError(f"{path.name} says that it is {metadata.name} {metadata.version}")
    if documents[0] != documents[1]:
        raise ReleaseError("the metadata of the sdist and of the wheel differ")
    if importlib.util.find_spec("twine") is None:
        return "valid by packaging (twine is not installed)"
    run([sys.executable, "-m", "twine", "check", "--strict", *map(str, built)], cwd=built[0].parent)
    return "valid by packaging and twine"


def check_installed(wheel: Path, packages: Sequence[Path], version: str, folder: Path) -> Iterator[str]:
    """Install wheels into a new environment and use them; yield a line for each thing that works.

    Its dependencies are those of the environment that runs this, so that no index is needed.
    """
    venv.create(folder)
    python = folder / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    ours = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    (site / "dependencies.pth").write_text("".join(f"{path}\n" for path in ours))
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index"]
    wheels = [str(path) for path in (wheel, *packages)]
    run([*command, *wheels], cwd=folder, env=environment(PIP_DISABLE_PIP_VERSION_CHECK="1"))

    def works(*arguments: str) -> str:
        return run([str(python), *arguments], cwd=folder, env=environment(TILEKERN_CACHE_DIR="cache")).strip()

    code = "import tilekern; from importlib.metadata import version; print(tilekern.__file__, version('tilekern'))"
    expected = f"{site / 'tilekern' / '__init__.py'} {version}"
    if (said := works("-c", code)) != expected:
        raise ReleaseError(f"the installed package is {said}, not {expected}")
    yield "import tilekern"
    works("-c", "import sys; sys.modules['torch'] = None; import tilekern.inference")
    yield "import tilekern.inference without torch"
    works("-m", "tilekern.doctor", "--help")
    yield "python -m tilekern.doctor --help"
    again = folder / "digests.json"
    code = "import sys; from pathlib import Path; from tilekern.spec.source import note_digests, spec_modules\n"
    works("-c", f"{code}note_digests(spec_modules(Path(sys.argv[1])), Path(sys.argv[2]))", str(site), str(again))
    if again.read_bytes() != (site / NOTED).read_bytes():
        raise ReleaseError(f"{NOTED} of the wheel differs from the digests of the sources beside it")
    yield f"{NOTED} is true"
    from tilekern.cache import Pack

    for path in packages:
        name = path.name.partition("-")[0].replace("_", "-")
        record = next(iter(Pack(site / name.replace("-", "_") / "records.pack").entries())).record
        assert record is not None
        found = works("-c", FIND, name, record.module, record.kernel, record.address.problem_key)
        if not found.endswith(f"in {name}:records"):
            raise ReleaseError(f"a lookup does not find a record of {name}: {found}")
        yield f"a lookup finds {found}"


def write_files(folder: Path, built: list[Path], notes: str, key: SigningKey | None) -> None:
    """Write a release's files into a new folder: the builds, notes, checksums and, with a key, their signature.

    The checksums name every other file, so one signature covers all of them.
    """
    folder.mkdir()
    for path in built:
        shutil.copy(path, folder)
    (folder / "RELEASE_NOTES.md").write_text(f"{notes}\n", encoding="utf-8")
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}
    sums = "".join(f"{digest}  {name}\n" for name, digest in digests.items()).encode()
    (folder / "SHA256SUMS").write_bytes(sums)
    if key:
        (folder / "SHA256SUMS.sig").write_bytes(key.sign(sums, PURPOSE))


if __name__ == "__main__":
    main()
