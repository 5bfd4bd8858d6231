"""The files about the project: metadata, citation, forms for issues, and the tiers of tests."""

import importlib.util
import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_python_versions_are_the_lowest_one_and_those_that_were_tried():
    """By a cell of the matrix of versions that passed, or by the results, which were measured with them."""
    runs = [json.loads(path.read_text())["run"] for path in ROOT.glob("benchmarks/results/*/*.json")]
    measured = {".".join(run["python"].split(".")[:2]) for run in runs if "python" in run}
    cells = json.loads((ROOT / "docs" / "versions.json").read_text())
    passed = {cell["python"] for cell in cells if cell["result"] == "passed"}
    told = re.findall(r":: (3\.\d+)$", "\n".join(PROJECT["classifiers"]), re.M)
    assert set(told) == {PROJECT["requires-python"].removeprefix(">="), *measured, *passed}


def test_the_classifiers_say_no_license_and_types_only_with_their_mark():
    """The license is an expression of SPDX, beside which setuptools refuses classifiers."""
    assert not [line for line in PROJECT["classifiers"] if line.startswith("License")]
    assert ("Typing :: Typed" in PROJECT["classifiers"]) == (ROOT / "tilekern" / "py.typed").exists()


def test_the_citation_is_of_the_newest_release_and_its_date():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["license"] == PROJECT["license"]
    newest = re.search(r"^## \[(.+)\] - (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert (str(citation["version"]), str(citation["date-released"])) == newest.groups()


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_for_issues_has_the_parts_that_github_needs_and_names_commands_that_exist(path):
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= set(form)
    fields = [part for part in form["body"] if part["type"] != "markdown"]
    assert {part["type"] for part in fields} <= {"textarea", "input"}
    for key in ("id", "label"):
        values = [part["id"] if key == "id" else part["attributes"]["label"] for part in fields]
        assert len(set(values)) == len(values) > 0
    for module in re.findall(r"python -m ([\w.]+)", path.read_text()):
        assert importlib.util.find_spec(module), module
    for page in re.findall(r"docs/[\w/-]+\.md", path.read_text()):
        assert (ROOT / page).exists(), page


def test_reports_of_bugs_and_of_slow_models_need_the_doctor_s_output():
    needed = {"bug": {"doctor", "repeat"}, "slower": {"doctor", "report", "tokens", "peer"}}
    for name, ids in needed.items():
        (path,) = [path for path in FORMS if path.stem == name]
        body = yaml.safe_load(path.read_text())["body"]
        required = {part["id"] for part in body if part.get("validations", {}).get("required")}
        assert ids <= required


def test_contributing_names_each_tier_of_the_tests():
    script = (ROOT / "tests" / "run.sh").read_text()
    (tiers,) = re.findall(r"^case \$tier in (.+?)\) ;;", script, re.M)
    told = re.findall(r"^\| `bash tests/run\.sh ?(\w*)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    assert {tier or "all" for tier in told} == set(tiers.split(" | "))
