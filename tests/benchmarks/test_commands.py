"""The command line, and what of the benchmarks runs without a GPU."""

from __future__ import annotations

import pytest
import torch
from benchmark_samples import is_one_line, rows

import tilekern
from benchmarks import several_gpus, whole_tune
from benchmarks.__main__ import main
from benchmarks.clock import FIRST_SLEEP, LONGEST_SLEEP, WARM_UP, Entrant, Race
from benchmarks.environment import facts
from benchmarks.pages import files_of, write_files
from benchmarks.records import fill
from benchmarks.results import RUN_FIELDS, read_results, write_results
from tilekern.cache import Store
from tilekern.errors import InputError

pytestmark = pytest.mark.processes

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


@no_gpu
@pytest.mark.parametrize(
    "command",
    [
        "kernels",
        "experts",
        "fp8",
        "decode",
        "host",
        "startup",
        "tune",
        "gpus --sweep no",
        "exchange --from H100",
        "races --sweep no",
        "strategies --sweep no",
    ],
)  # fmt: skip
def test_without_a_gpu_one_line_says_so(command, tmp_path, capsys):
    is_one_line(capsys, [*command.split(), "--out", str(tmp_path)], "needs a CUDA GPU")


def test_help_and_version(capsys):
    for command in ([], ["report"]):
        assert main([*command, "-h"]) == 0
        brief = capsys.readouterr().out
        assert main([*command, "--help"]) == 0
        assert capsys.readouterr().out == brief != ""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"tilekern {tilekern.__version__}\n"


def test_bad_input_is_one_line(tmp_path, capsys):
    assert main(["nothing"]) == 2
    assert main(["compile", "--gpu", "H9000", "--out", str(tmp_path)]) == 2
    (tmp_path / "bad.json").write_text("{")
    assert main(["report", "--results", str(tmp_path), "--out", str(tmp_path / "pages")]) == 2
    assert not (tmp_path / "pages").exists()
    assert capsys.readouterr().err.count("error: ") == 3


@pytest.mark.parametrize("command", ["train qwen3-8b --device cpu", "cache-scale", "compile --gpu H200"])
def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.cli.write_results", lambda *_: pytest.fail("something was measured"))
    (tmp_path / "file").touch()
    says = f"{tmp_path / 'file'} is not a folder that this user can write to"
    is_one_line(capsys, [*command.split(), "--out", str(tmp_path / "file" / "deeper")], says)


def test_a_whole_tune_takes_no_sweep_that_is_there(tmp_path):
    with pytest.raises(InputError, match="is there already"):
        whole_tune.measure("qwen3-8b", "2048", tmp_path)


@no_gpu
def test_several_gpus_must_be_here(tmp_path):
    with pytest.raises(InputError, match="--gpus 2: this host's GPUs that are alike are 0"):
        several_gpus.measure("qwen3-8b", "2048", tmp_path)


def test_several_gpus_take_no_sweep_that_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(several_gpus, "devices", lambda: ["0", "1"])
    (tmp_path / "1").mkdir()
    with pytest.raises(InputError, match="holds 1 already"):
        several_gpus.measure("qwen3-8b", "2048", tmp_path)


def test_several_gpus_are_set_against_one():
    found = {row.metric: row.value for row in several_gpus.rows("a model", {1: 100.0, 2: 53.0})}
    assert found == {"measure_on_one": 100.0, "measure_on_several": 53.0, "gpus": 2, "share_of_one": 0.53}


def test_a_report_that_cannot_be_made_leaves_the_old_one(tmp_path, capsys):
    old = tmp_path / "pages" / "models.md"
    old.parent.mkdir()
    old.write_text("old")
    assert main(["report", "--results", str(tmp_path / "nowhere"), "--out", str(old.parent)]) == 2
    (tmp_path / "results").mkdir()
    write_results(tmp_path / "results" / "kernels.json", rows("kernels"))
    assert main(["report", "--results", str(tmp_path / "results"), "--out", str(old)]) == 2
    readme = tmp_path / "README.md"
    readme.write_text("no lines for the table")
    assert (
        main(["report", "--results", str(tmp_path / "results"), "--out", str(old.parent), "--readme", str(readme)]) == 2
    )
    assert capsys.readouterr().err.count("error: ") == 3
    assert old.read_text() == "old"


def test_a_report_of_nothing_is_seven_pages(tmp_path):
    plots = tmp_path / "pages" / "plots"
    plots.mkdir(parents=True)
    (plots / "of-an-earlier-report.svg").touch()
    write_files(tmp_path / "pages", files_of([]))
    found = sorted(path.relative_to(tmp_path / "pages").as_posix() for path in tmp_path.rglob("pages/**/*.*"))
    assert found == [
        "decoding.md",
        "fp8.md",
        "long-sequences.md",
        "maintainers.md",
        "models.md",
        "ops.md",
        "platform.md",
    ]


def test_facts_are_complete_and_take_the_commit_from_the_environment(monkeypatch):
    monkeypatch.setenv("BENCHMARK_COMMIT", "feedface")
    found = facts(gpu="B200")
    assert all(isinstance(found[name], str) and found[name] for name in RUN_FIELDS)
    assert (found["commit"], found["gpu"], found["notes"]) == ("feedface", "B200", [])


def test_a_made_up_cache_holds_as_many_records_as_asked_for(tmp_path):
    fill(tmp_path, 3)
    assert len(list(Store(tmp_path).entries())) == 3


def test_a_late_host_gets_more_time_up_to_a_limit():
    entrant = Entrant(lambda: None)
    for _ in range(WARM_UP - 1):
        entrant.late()
    assert (entrant.sleep, entrant.waits) == (LONGEST_SLEEP, False)
    for _ in range(20):
        entrant.late()
    assert (entrant.sleep, entrant.waits) == (FIRST_SLEEP, True)


def test_each_round_of_a_race_has_another_order():
    entrants, rounds = {name: Entrant(lambda: None) for name in "abcd"}, []

    class Listed(Race):
        def __init__(self):
            """Without a GPU."""

        def turn(self, entrants):
            rounds.append("".join(entrants))
            for entrant in entrants.values():
                entrant.samples_us.append(1.0)

    assert set(Listed().run(entrants, 20, 60.0)) == set("abcd")
    assert {"".join(sorted(order)) for order in rounds} == {"abcd"}
    assert len({order[order.index("a") - 1] for order in rounds}) == 3


REFUSED = [
    ("kernels --ops nothing", "unknown op 'nothing'"),
    ("kernels --providers nobody", "unknown provider 'nobody'"),
    ("kernels --samples 0", "--samples"),
    ("kernels --model llama-3-8b", "--sweep"),
    ("kernels --sweep tokens", "--model"),
    ("kernels --sweep heads --model llama-3-8b", "heads"),
    ("kernels --sweep tokens --model llama-3-8b --tokens many", "'many'"),
    ("train no-such-model --device cpu --out x", "unknown model"),
    ("train qwen3-8b --device cpu", "--out"),
    ("train qwen3-8b --device cpu --out x --tokens 12,-3", "'-3'"),
    ("train qwen3-8b --device cpu --out x --providers nobody", "nobody"),
    ("train qwen3-8b --device cpu --out x --steps 0", "--steps"),
    ("train qwen3-8b --device cpu --out x --sequence 1000", "--sequence 1000"),
    ("train no-such-model --device tpu --out x", "'tpu'"),
    ("train no-such-model --device cpu --out x --profile", "--profile"),
    ("families --models bert", "bert"),
    ("families --providers nobody", "nobody"),
    ("families --steps 0", "--steps"),
    ("experts --device cpu --kinds all", "unknown kind 'all'"),
    ("experts --device cpu --providers nobody", "unknown provider 'nobody'"),
    ("experts --device cpu --tokens few", "'few'"),
    ("experts --device cpu --models bert-large --plan p", "bert-large"),
    ("experts --device cpu --models llama-3-8b --plan p", "no experts"),
    ("experts --device cpu", "--out"),
    ("decode --device cpu --parts speech", "unknown part 'speech'"),
    ("decode --device cpu --providers nobody", "unknown provider 'nobody'"),
    ("decode --device cpu --batch 1,none", "'none'"),
    ("decode --device cpu --context 84 --out x", "--context 84: --samples 20 of a step take 85 tokens at least"),
    ("decode --device cpu", "--out"),
    ("decode no-such-model --device cpu --out x", "unknown model"),
    ("parallel --ways pp --device cpu --out x", "'pp'"),
    ("parallel --device cpu", "--out"),
    ("parallel --gpus 1", "--gpus"),
    ("parallel --models no-such-model --device cpu --out x", "unknown model"),
    ("nothing", "nothing"),
    ("compile --gpu H9000 --out x", "H9000"),
    ("report --results . --out RESULTS.md", "bad.json"),
    ("report --results nowhere --out RESULTS.md", "nowhere"),
    ("report --results empty --out empty", "--results empty holds no results"),
    ("regret --sweep RESULTS.md", "RESULTS.md holds no sweep: it is a file"),
]


@pytest.mark.parametrize(("command", "said"), REFUSED)
def test_bad_input_is_one_line_and_changes_nothing(command, said, tmp_path, monkeypatch, capsys):
    if command.startswith("families"):
        monkeypatch.setattr("benchmarks.cli.require_gpu", lambda: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for name, text in (("bad.json", "{"), ("RESULTS.md", "old")):
        (tmp_path / name).write_text(text)
    is_one_line(capsys, command.split(), said)
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "bad.json", "RESULTS.md"}
    assert (tmp_path / "RESULTS.md").read_text() == "old"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_kernels_are_measured_on_the_gpu(tmp_path):
    arguments = ["kernels", "--out", str(tmp_path), "--ops", "swiglu", "--providers", "torch", "--samples", "5"]
    assert main(arguments) == 0
    results = read_results(tmp_path / "kernels.json")
    assert {row.provider.split(" ")[0] for row in results.rows} == {"torch", "copy"}


@pytest.mark.slow
@pytest.mark.nightly
def test_a_cache_of_many_records_is_timed():
    from benchmarks.cache_scale import measure as measure_scale

    metrics = {row.metric for row in measure_scale(records=[400], repeats=1).rows}
    assert {"first_lookup_off_disk", "disk_alone", "lookup", "ls_filtered", "verify_rate", "start"} <= metrics


@pytest.mark.slow
@pytest.mark.nightly
def test_the_commands_that_are_timed_run():
    from benchmarks.startup import command_rows

    rows = command_rows(repeats=2)
    assert {row.metric for row in rows} == {"import", "process"}
