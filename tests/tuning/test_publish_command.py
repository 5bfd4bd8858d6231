"""``tune publish DIR`` on folders that have lost files, that others wrote in, or that hold no sweep."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
from recorded import RecordedExecutor
from tuning_samples import THREE, WIDE, needs_compiler

from tilekern.cache import Pack
from tilekern.tuning import cli
from tilekern.tuning.measure.stage import measure_all
from tilekern.tuning.publishing import keep_winners, winners
from tilekern.tuning.sweep.folder import Sweep

pytestmark = needs_compiler


@pytest.fixture
def folder(both, tmp_path) -> Path:
    """A copy of a measured sweep of four problems."""
    return Path(shutil.copytree(both.folder, tmp_path / "sweep"))


def run(*arguments: object) -> int:
    return cli.main([*map(str, arguments)])


def publish(folder: Path, *options: str) -> int:
    return run("publish", folder, "--cache-dir", folder.with_name("cache"), *options)


def own_artifact(folder: Path, named) -> Path:
    """Return an artifact of a problem's winner that no other winner has."""
    digests = {(won.kernel, won.problem): won.record.digests for won, _ in winners(Sweep(folder), {"key": "none"})}
    [digest, *_] = digests[named].difference(*(some for other, some in digests.items() if other != named))
    return folder / "artifacts" / digest


def lose(path: Path) -> None:
    path.unlink()


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(("harm", "how"), [(lose, "missing"), (damage, "damaged")])
def test_a_lost_artifact_costs_its_problem_its_record_alone(folder, capsys, harm, how):
    path = own_artifact(folder, WIDE)
    harm(path)
    assert publish(folder) == 0
    said = capsys.readouterr().out.splitlines()
    assert "1 problems have no record, as an artifact of their winner is lost" in said
    assert [line for line in said if str(path) in line] == [
        f"lost: {WIDE[0]} {WIDE[1].key}: {path} is {how}; compile it again"
    ]
    assert not any("not measured" in line for line in said)
    published = {address.problem_key for address in Pack(folder / "results.pack").records}
    assert published == {problem.key for _, problem in THREE}


def test_json_names_lost_problems(folder, capsys):
    lose(own_artifact(folder, WIDE))
    assert publish(folder, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert [(one["kernel"], one["problem"]) for one in document["lost"]] == [(WIDE[0], dict(WIDE[1]))]
    assert len(document["problems"]) == len(THREE)


def test_where_all_artifacts_are_lost_nothing_is_published(folder, capsys):
    shutil.rmtree(folder / "artifacts")
    assert publish(folder) == 2
    [said] = capsys.readouterr().err.splitlines()
    assert f"no record can be made of {folder}: each of 4 winners has lost an artifact" in said
    assert said.endswith("is missing; compile it again, or copy the folder again")
    assert not folder.with_name("cache").exists()


def test_a_lost_artifact_costs_its_problem_its_measurement_alone(folder):
    path = own_artifact(folder, WIDE)
    for journal in ("measured", "races"):
        (folder / f"{journal}.jsonl").unlink()
    damage(path)
    sweep = Sweep(folder)
    measure_all(sweep, RecordedExecutor(), keep_winners)
    assert {race["problem"] for race in sweep.races().values()} == {problem.key for _, problem in THREE}
    assert sweep.skipped() == {f"{WIDE[0]}|{WIDE[1].key}": f"{path} is damaged; compile it again"}


def test_a_report_names_lost_problems(folder, capsys):
    path = own_artifact(folder, WIDE)
    lose(path)
    assert run("report", folder, "--csv", folder.with_name("rows.csv")) == 0
    assert str(path) in capsys.readouterr().err


def unsealed(folder: Path, journal: str, changed: dict, *, of=WIDE) -> None:
    """Append a copy of the last line about a problem, changed and without its writer's seal, as others write it."""
    path = folder / f"{journal}.jsonl"
    keys = {item.key for item in Sweep(folder).candidates(*of)}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    last = next(line for line in reversed(lines) if line.get("candidate") in keys and "timing" in line)
    with path.open("a") as file:
        file.write(json.dumps({name: value for name, value in (last | changed).items() if name != "seal"}) + "\n")


def owners(folder: Path, capsys) -> dict[tuple[int, int], bool]:
    assert publish(folder, "--json") == 0
    problems = json.loads(capsys.readouterr().out)["problems"]
    return {(one["problem"]["rows"], one["problem"]["columns"]): one["own"] for one in problems}


def test_a_line_of_others_takes_only_the_record_that_rests_on_it(folder, capsys):
    mine = owners(folder, capsys)
    assert all(mine.values())
    assert len(mine) == 4
    unsealed(folder, "measured", {"timing": {"median_us": 0.5, "samples": 99, "spread_us": 0.1}})
    assert owners(folder, capsys) == mine | {(WIDE[1]["rows"], WIDE[1]["columns"]): False}
    assert publish(folder) == 0
    said = capsys.readouterr().out
    assert "1 of 4 records rest on what others compiled or measured, and are not yours" in said
    assert f"the first of {WIDE[0]} {WIDE[1].key}" in said


def test_a_copy_of_an_own_line_changes_no_owner(folder, capsys):
    unsealed(folder, "measured", {})
    assert all(owners(folder, capsys).values())


def test_a_line_of_others_that_quietly_removes_the_fastest_is_not_overlooked(folder, capsys):
    """Its record is another one than this user's lines alone give."""
    [won] = [won for won, _ in winners(Sweep(folder), {"key": "none"}) if (won.kernel, won.problem) == WIDE]
    line = next(
        one for one in Sweep(folder).measured().values() if one.get("timing", {}).get("median_us") == won.time_us
    )
    with (folder / "measured.jsonl").open("a") as file:
        wrong = {"passed": False, "relative_error": 1.0, "elementwise_error": 1.0, "reason": "no"}
        file.write(
            json.dumps({"candidate": line["candidate"], "check": wrong, "code_sha256": line["code_sha256"]}) + "\n"
        )
    assert [size for size, own in owners(folder, capsys).items() if not own] == [(WIDE[1]["rows"], WIDE[1]["columns"])]


def test_a_mistyped_folder_holds_no_sweep(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for name, why in (("empty", "it has no sweep.json"), ("typo", "there is no such folder")):
        assert publish(tmp_path / name) == 2
        [said] = capsys.readouterr().err.splitlines()
        assert said.startswith(f"tilekern: {tmp_path / name} holds no sweep: {why}; give the folder of one")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_commands_in_messages_name_a_folder_with_spaces_as_the_shell_takes_it(tmp_path, capsys):
    """The words behind --sweep, as a shell splits them, are the folder."""
    folder = tmp_path / "my  sweep's"
    problem = f"{WIDE[0]} {','.join(f'{name}={value}' for name, value in WIDE[1].items())}"
    unplanned = publish(folder), run("status", folder), run("report", folder)
    assert run("--stages", "plan", "--gpu", "H200", "--problem", problem, "--sweep", folder) == 0
    assert (*unplanned, publish(folder), run("--stages", "compile", "--dry-run", "--sweep", folder)) == (2, 2, 2, 2, 0)
    said = capsys.readouterr()
    lines = [line for line in (said.out + said.err).splitlines() if "--sweep" in line]
    assert len(lines) == 5
    for line in lines:
        _, _, rest = line.partition("--sweep ")
        assert shlex.split(rest)[0] == str(folder)
