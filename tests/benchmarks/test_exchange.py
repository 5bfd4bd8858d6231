"""The benchmark of another GPU's records: which problems it compares, and what it makes of their times."""

import hashlib
import shutil

import pytest
import torch
from environments import ROOT
from msgspec.structs import replace
from replay_runner import ReplayRunner

from benchmarks import exchange
from benchmarks.exchange import Effort, other_gpu, pairs, summary
from benchmarks.pages import platform
from benchmarks.results import ALL, Results
from tilekern.cache import Artifact, FolderLayer, PackLayer, Store
from tilekern.errors import InputError
from tilekern.kernels import spec_named
from tilekern.runtime.records import record_of
from tilekern.spec import ALIGNED, GENERIC
from tilekern.spec.targets import resolve
from tilekern.tuning.verify.check import Check

H200, H100, B200 = resolve("H200"), resolve("H100"), resolve("B200")
TOOLS = {"key": "tileiras-1.0-cuda_tile-1.0", "tileiras": "1.0", "cuda_tile": "1.0"}
SWIGLU, NORM = spec_named("swiglu_forward"), spec_named("rms_norm_backward")
RUN = dict.fromkeys(("date", "driver", "toolkit", "torch", "commit"), "-") | {"gpu": "H200", "notes": []}


def swiglu(rows):
    return SWIGLU.problem(rows=rows, columns=48, dtype="bfloat16")


def configs(spec, problem):
    """Two configs of a problem."""
    return list(spec.space.candidates(problem, H200))[:2]


def put(root, spec, problem, target, config, provenance="measured", **changes):
    """A record whose artifacts are no code, the same for the same config."""
    code = f"code of {config.key}".encode()
    sha256 = hashlib.sha256(code).hexdigest()
    artifacts = {name: Artifact(sha256, len(code), "symbol", dict(config), [], {}) for name in (ALIGNED, GENERIC)}
    facts = {"measurement": {"median_us": 1.0}} if provenance == "measured" else {}
    made = record_of(spec, problem, config, target, TOOLS, artifacts, provenance, **facts)
    Store(root).write(replace(made, **changes), {sha256: code})


@pytest.fixture
def layers(tmp_path):
    """Records of two GPUs: of 64 rows equal, of 128 not; for the others a GPU has no fresh, measured one."""
    first, second = configs(SWIGLU, swiglu(64))
    for rows, target, config, changes in (
        (64, H200, first, {}), (64, H100, first, {}),
        (128, H200, first, {}), (128, H100, second, {}),
        (256, H200, first, {}), (256, H100, second, {"provenance": "predicted"}),
        (512, H200, first, {}), (512, H100, second, {"source_digest": "0" * 64}),
        (1024, H100, second, {}),
        (2048, H200, first, {}), (2048, B200, first, {}),
    ):  # fmt: skip
        put(tmp_path, SWIGLU, swiglu(rows), target, config, **changes)
    return [FolderLayer(tmp_path, "records")]


def test_problems_with_a_fresh_measured_record_of_both_gpus_are_compared(layers):
    found = pairs(H200, H100, layers)
    assert {(pair.problem["rows"], pair.is_equal) for pair in found} == {(64, True), (128, False)}
    assert {pair.family for pair in found} == {"swiglu"}
    assert {pair.own.record.target["key"] for pair in found} == {H200.key}
    assert {pair.other.record.target["key"] for pair in found} == {H100.key}


def test_the_wheels_packs_of_two_gpus_have_problems_in_common_and_families_take_turns():
    folder = ROOT / "tilekern" / "prebuilt"
    layers = [PackLayer(folder / f"qwen3-8b-{gpu}.pack", origin="wheel") for gpu in ("h200", "h100")]
    found = pairs(H200, H100, layers)
    assert len(found) > 50
    assert 0 < sum(pair.is_equal for pair in found) < len(found)
    families = {pair.family for pair in found}
    assert {pair.family for pair in found[: len(families)]} == families
    for pair in found:
        own, other = (exchange.entrant_of(pair.kernel, pair.problem, hit) for hit in (pair.own, pair.other))
        assert pair.is_equal == (own.key == other.key)
        assert own.candidate.is_library == ("sha256" not in own.compiled), "a library's record has another's artifact"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("H200", "that is the GPU here; name another one of sm_90"),
        ("B200", "code of sm_100 does not run on H200, which is of sm_90"),
        ("H300", "unknown GPU 'H300'"),
    ],
)
def test_a_gpu_without_use_is_refused(name, words):
    with pytest.raises(InputError, match=words):
        other_gpu(name, H200)
    assert other_gpu("H100", H200).key == H100.key


class Bench:
    """Stands for the bench of a GPU: notes its tasks, and launches nothing."""

    in_a_row = None
    tasks: list = []  # noqa: RUF012
    wrong = False

    def __init__(self, task):
        self.tasks.append(task)

    def check(self, entrant):
        is_wrong = self.wrong and entrant is self.tasks[-1].entrants[1]
        return Check(not is_wrong, 0.0, 0.0, "it is off by 2" if is_wrong else None)

    def prepare(self, *_):
        return lambda: None

    def load_code(self, _):
        return True

    def refresh(self):
        return None


@pytest.fixture
def gpu(layers, monkeypatch):
    """An H200 whose clock says that winners of an H100 take a tenth longer."""
    Bench.tasks, Bench.wrong = [], False

    def runner(watch, launches, *_, **__):
        own, other = launches
        return ReplayRunner({own: 100.0, other: 110.0}, 0.001, 0)

    class Watch:
        def __init__(self, flush_bytes):
            assert flush_bytes == H200.l2_bytes

        def warm_clocks(self):
            pass

    monkeypatch.setattr(exchange, "require_gpu", lambda: H200)
    monkeypatch.setattr(exchange, "unmet", lambda: None)
    monkeypatch.setattr(exchange, "facts", lambda: RUN | {"notes": []})
    monkeypatch.setattr(exchange, "default_layers", lambda **_: layers)
    monkeypatch.setattr(exchange, "Stopwatch", Watch)
    monkeypatch.setattr(exchange, "Bench", Bench)
    monkeypatch.setattr(exchange, "GpuRunner", runner)
    return layers


EFFORT = Effort(20, 1, 600)


def figures(results, case=ALL):
    return {row.metric: row.value for row in results.rows if row.case == case}


def test_unequal_winners_are_timed_and_equal_ones_count_as_no_loss(gpu):
    kept = []
    results = exchange.measure("H100", EFFORT, keep=lambda case, _: kept.append(case))
    (task,) = Bench.tasks
    case = f"swiglu_forward {swiglu(128).key}"
    assert (task.problem, kept) == (swiglu(128), [case])
    assert [len(task.cubins[entrant.compiled["sha256"]]) > 0 for entrant in task.entrants] == [True, True]
    assert figures(results, case) == pytest.approx({"own": 100, "other": 110, "loss": 0.1}, rel=0.05)
    loss = figures(results, case)["loss"]
    expected = {"problems": 2, "equal": 1, "median_loss": loss / 2, "p90_loss": loss, "worst_loss": loss}
    assert figures(results) == figures(results, "swiglu") == pytest.approx(expected, abs=1e-5)
    assert results.run["records_of"] == H100.name
    assert all(row.sources for row in results.rows)


def test_a_problem_that_cannot_be_timed_is_noted_and_not_counted(gpu, monkeypatch):
    Bench.wrong = True
    results = exchange.measure("H100", EFFORT)
    assert "is wrong here: it is off by 2" in results.run["notes"][0]
    assert figures(results)["problems"] == 1

    def full(_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(exchange, "Bench", full)
    assert "do not fit" in exchange.measure("H100", EFFORT).run["notes"][0]
    results = exchange.measure("H100", Effort(20, 1, 0))
    assert results.run["notes"] == [f"swiglu_forward {swiglu(128).key}: no time was left"]
    assert (figures(results)["problems"], figures(results)["equal"]) == (1, 1)


def test_without_common_records_it_says_so(gpu):
    with pytest.raises(InputError, match="no problem has a fresh, measured record of H200 and of H100"):
        exchange.measure("H100", EFFORT, ["rope"])
    with pytest.raises(InputError, match="of H20 in the caches"):
        exchange.measure("H20", EFFORT)


def test_a_winner_of_a_library_that_is_not_here_is_noted(gpu, monkeypatch):
    monkeypatch.setattr(exchange, "library_of", lambda _: "cudnn")
    monkeypatch.setattr(exchange, "libraries_here", list)
    assert "cudnn, which runs a winner, is not here" in exchange.measure("H100", EFFORT).run["notes"][0]


def test_kernels_behind_a_winner_are_launched_too(gpu, tmp_path):
    problem = NORM.problem(rows=128, columns=64, dtype="bfloat16", weight_dtype="bfloat16")
    by_blocks = {}
    for config in NORM.space.candidates(problem, H200):
        by_blocks.setdefault(NORM.implement(problem, config).grid(problem, H200.sm_count), config)
    (one, first), (two, second) = list(by_blocks.items())[:2]
    put(tmp_path, NORM, problem, H200, first)
    put(tmp_path, NORM, problem, H100, second)
    sums = spec_named(NORM.follower.kernel)
    for blocks in (one, two):
        behind = sums.bucketed(sums.problem(**NORM.follower.dimensions(problem, blocks)))
        put(tmp_path, sums, behind, H200, sums.default(behind, H200))
    exchange.measure("H100", EFFORT, ["rms_norm_backward"])
    task = Bench.tasks.pop()
    assert set(task.followers) == {one, two}
    assert {entrant.candidate.kernel for entrant in task.followers.values()} == {sums.name}
    assert task.cubins.keys() >= {entrant.compiled["sha256"] for entrant in task.followers.values()}
    shutil.rmtree(tmp_path / "v1" / H200.key / TOOLS["key"] / sums.name)
    exchange.measure("H100", EFFORT, ["rms_norm_backward"])
    assert Bench.tasks.pop().followers == {}, "both are timed without"


def test_the_page_has_a_line_for_all_problems_and_one_for_each_family(layers):
    found = pairs(H200, H100, layers)
    losses = {pair.case: 0.0 if pair.is_equal else 0.0234 for pair in found}
    run = RUN | {"records_of": "H100 80GB HBM3"}
    text = platform.page([Results(run, summary(found, losses), "h200/exchange.json")])[platform.NAME]
    assert "loss of up to 3 % in the median the records serve" in text
    for case in (ALL, "swiglu"):
        assert f"| H200 | H100 80GB HBM3 | {case} | 2 | 1 | +1.2 % | +2.3 % | +2.3 % | `" in text
