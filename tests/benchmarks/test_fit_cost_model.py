"""The fit of the cost model on times that a known model made."""

import dataclasses

import pytest

pytest.importorskip("numpy")

from benchmarks import fit_cost_model as fitting
from benchmarks.regret import measure
from tilekern.kernels import spec_named
from tilekern.spec.targets import resolve
from tilekern.tuning.compile.stage import compile_all
from tilekern.tuning.predict.cost_model import MEMORY
from tilekern.tuning.predict.launch_costs import Costs
from tilekern.tuning.sweep.candidates import candidate
from tilekern.tuning.sweep.folder import Sweep

H200 = resolve("H200")
SPEC = spec_named("adamw")


def samples(weights, *, noise=(1.0,)):
    """Candidates of made-up costs, of which each problem has some bound by each term."""
    found = []
    for place in range(40):
        problem = SPEC.problem(rows=1 << place // 4, columns=4096, dtype="bfloat16")
        item = candidate(SPEC.name, problem, SPEC.default(problem, H200), "aligned", H200)
        for number, name in enumerate(weights.terms):
            terms = {term: 2e-6 * (1 + (3 * place + 5 * at) % 7) for at, term in enumerate(weights.terms)}
            terms[name] *= 30
            traits = {trait: float((place + number + at) % 2) for at, trait in enumerate(weights.traits)}
            costs = Costs(terms, traits, 1e-6, 1, 0.0)
            seconds = weights.seconds(costs) * noise[(place + number) % len(noise)]
            found.append(fitting.Sample(item, seconds, spills=False, bonus=0.0, costs=costs, kind="MEMORY"))
    return found


def test_the_fit_finds_the_times_of_a_known_model():
    truth = dataclasses.replace(MEMORY, terms={name: 1.5 * weight for name, weight in MEMORY.terms.items()}, norm=1.5)
    made = samples(truth)
    found = fitting.fit(made)["MEMORY"]
    ratios = [found.seconds(sample.costs) / sample.seconds for sample in made]
    assert min(ratios) > 0.93
    assert max(ratios) < 1.07


def test_noise_does_not_make_a_weight_negative():
    found = fitting.fit(samples(MEMORY, noise=(0.8, 1.0, 1.3)))["MEMORY"]
    assert min(found.terms.values()) > 0


def test_a_kind_without_samples_keeps_its_weights():
    assert fitting.fit(samples(MEMORY))["PRODUCTS"] is fitting.KINDS["PRODUCTS"]


def test_regret_is_the_time_of_the_first_in_rank_over_the_best():
    made = samples(MEMORY)[:2]
    slow = dataclasses.replace(made[0], seconds=3e-6)
    fast = dataclasses.replace(made[0], seconds=2e-6)
    assert fitting.regrets([slow, fast], [1.0, 2.0]) == {slow.problem: 1.5}
    assert fitting.regrets([slow, fast], [2.0, 1.0]) == {slow.problem: 1.0}
    spilling = dataclasses.replace(fast, spills=True)
    assert fitting.regrets([slow, spilling], [2.0, 1.0]) == {slow.problem: 1.5}


def test_the_left_out_are_predicted_by_what_others_say(tmp_path):
    made = samples(MEMORY)
    sweep = Sweep(tmp_path)
    found = fitting.left_out(made, sweep, (0, 1), lambda sample: made.index(sample) % 2)
    by_odd = fitting.fit(made[1::2])["MEMORY"]
    assert found[0] == by_odd.seconds(made[0].costs)
    assert len(found) == len(made)


@pytest.mark.slow
@pytest.mark.nightly
def test_a_measured_sweep_is_read_as_the_benchmark_reads_it(tmp_path):
    problem = spec_named("column_sum").problem(rows=256, columns=128, dtype="bfloat16")
    sweep = Sweep(tmp_path)
    sweep.begin(H200, "test", [("column_sum", problem)])
    compile_all(sweep, jobs=1)
    right = {"passed": True, "relative_error": 1e-7, "elementwise_error": 1e-7}
    for place, item in enumerate(sweep.candidates("column_sum", problem)):
        timing = {"median_us": 5.0 + place % 5, "spread_us": 0.1, "samples": 9}
        sweep.note("measured", {"candidate": item.key, "check": right, "timing": timing})
    made = fitting.samples_of(sweep)
    assert {sample.kind for sample in made} == {"MEMORY"}
    regrets = fitting.regrets(made, fitting.predicted(made, fitting.KINDS, sweep))
    (regret,) = regrets.values()
    assert measure(tmp_path).row("all problems", "tilekern", "median_regret").value == pytest.approx(regret, abs=1e-4)


def test_a_folder_that_cannot_be_fitted_to_is_named(tmp_path, monkeypatch, capsys):
    sweep = Sweep(tmp_path / "unmeasured")
    sweep.begin(H200, "test", [(SPEC.name, SPEC.problem(rows=64, columns=4096, dtype="bfloat16"))])
    for name, why in (("nowhere", "nowhere holds no sweep"), ("unmeasured", "unmeasured holds no measurements")):
        monkeypatch.setattr("sys.argv", ["fit_cost_model", str(tmp_path / name)])
        with pytest.raises(SystemExit, match="2"):
            fitting.main()
        assert why in capsys.readouterr().err.splitlines()[-1]
