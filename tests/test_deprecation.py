"""What is deprecated says so, is listed for users, works for two minor releases, and goes when it is due."""

import re
import warnings
from pathlib import Path

import pytest
from environments import ROOT
from packaging.version import Version

import tilekern
from tilekern.cache_tools.cli import main
from tilekern.warning import DEPRECATED, Deprecated

NAMES = pytest.mark.parametrize("one", DEPRECATED.values(), ids=list(DEPRECATED))
FLAG = Deprecated("tilekern.tune(fast=…)", "budget_s=…", "0.3", "0.5")


def fault(one, version):
    """Why a version must not have a deprecated name in this form; None if it may."""
    since, removed, now = Version(one.since), Version(one.removed_in), Version(Version(version).base_version)
    if now >= removed:
        return "its removal is due"
    if now < since:
        return "it is of a later release"
    # Until 1.0.0 a minor release may remove; from then on only a major one.
    enough = removed.minor - since.minor >= 2 if removed.major == since.major == 0 else removed.minor == 0
    return None if enough else "it must work in two minor releases"


@NAMES
def test_what_is_deprecated_is_not_past_its_removal(one):
    assert fault(one, tilekern.__version__) is None


@pytest.mark.parametrize(
    ("one", "version", "reason"),
    [
        (FLAG, "0.3.0", None),
        (FLAG, "0.4.9", None),
        (FLAG, "0.5.0.dev0", "its removal is due"),
        (FLAG, "0.2.0", "it is of a later release"),
        (Deprecated("a", "b", "0.3", "0.4"), "0.3.0", "it must work in two minor releases"),
        (Deprecated("a", "b", "1.3", "1.5"), "1.3.0", "it must work in two minor releases"),
        (Deprecated("a", "b", "1.3", "2.0"), "1.9.0", None),
    ],
)
def test_a_name_that_is_due_or_goes_too_soon_would_be_found(one, version, reason):
    assert fault(one, version) == reason


@NAMES
def test_the_changelog_lists_it_under_its_release(one):
    sections = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)[1:]
    own = [text for text in sections if text.startswith(("[Unreleased]", f"[{one.since}."))]
    listed = [re.search(r"^### Deprecated\n(.*?)(?=^### |\Z)", text, re.M | re.S) for text in own]
    assert any(found and one.name.split(" ")[0] in found[1] and one.removed_in in found[1] for found in listed)


def test_the_warning_names_the_successor_and_the_callers_line():
    def tune(**_):
        FLAG.warn()

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        tune(fast=True)
    (warning,) = said
    assert warning.category is DeprecationWarning
    text = "tilekern.tune(fast=…) is deprecated since tilekern 0.3 and will be removed in 0.5; use budget_s=…"
    assert str(warning.message) == text
    assert warning.filename == __file__
    assert "tune(fast=True)" in Path(__file__).read_text().splitlines()[warning.lineno - 1]


@pytest.mark.parametrize("words", [["--target", "B200"], ["--target=B200"], ["--gpu", "B200"]])
def test_a_deprecated_option_works_and_says_what_to_write(words, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("TILEKERN_CACHE_DIR", str(tmp_path))
    assert main(["ls", "--json", *words]) == 0
    out, err = capsys.readouterr()
    assert '"records": []' in out
    line = f"tilekern: {DEPRECATED['--target']}\n"
    assert err == (line if words[0].startswith("--target") else "")
