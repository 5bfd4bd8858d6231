"""From a journal to records: who wins, what the record says, and that dispatch finds it."""

from pathlib import Path

import pytest
from report_samples import timing
from tuning_samples import COMPILED, SMALL

from tilekern.cache import FolderLayer, PackLayer, Store, lookup
from tilekern.kernels import spec_named
from tilekern.kernels.skinny.linear import sizes
from tilekern.spec.source import source_digest
from tilekern.tuning.compile.stage import compile_all
from tilekern.tuning.measure.stage import entrants, identity
from tilekern.tuning.publishing import Known, invariant_winners, publish, winners
from tilekern.tuning.sweep.candidates import candidates
from tilekern.tuning.sweep.folder import Sweep
from tilekern.tuning.sweep.lines import copy_key

TOOLKIT = {"key": "tileiras-1-cuda_tile-1", "tileiras": "1", "cuda_tile": "1"}
RIGHT = {"passed": True, "relative_error": 1e-7, "elementwise_error": 1e-7}
WRONG = {"passed": False, "relative_error": 0.5, "elementwise_error": 0.9, "reason": "y: relative error"}


def measure(sweep: Sweep, times: list[tuple[int, dict, dict]]) -> None:
    items = candidates(*SMALL, sweep.target)
    for index, check, time in times:
        sweep.note("measured", {"candidate": items[index].key, "check": check, "timing": time})
    sweep.note("gpu", {"gpu": "NVIDIA H200", "driver": "580", "torch": "2"})


def test_without_measurements_the_winner_is_predicted(sweep: Sweep):
    [(winner, blobs)] = winners(sweep, TOOLKIT)
    record = winner.record
    assert record.provenance == "predicted"
    assert record.measurement is None
    assert record.prediction["time_us"] == pytest.approx(winner.time_us)
    assert set(record.artifacts) == {"aligned", "generic"}
    assert {artifact.sha256 for artifact in record.artifacts.values()} == set(blobs)


def test_the_fastest_right_one_wins_and_the_wrong_one_never(sweep: Sweep):
    measure(
        sweep, [(0, RIGHT, timing(10.0)), (1, WRONG, timing(1.0, 5)), (2, RIGHT, timing(5.0)), (3, RIGHT, timing(7.0))]
    )
    sweep.note("measured", {"candidate": copy_key(*SMALL), "timing": timing(4.0)})
    [(winner, _)] = winners(sweep, TOOLKIT)
    record = winner.record
    assert record.provenance == "measured"
    assert record.config == dict(candidates(*SMALL, sweep.target)[2].config)
    assert (winner.time_us, winner.share, winner.gain) == (5.0, 0.8, 2.0)
    assert record.measurement["driver"] == "580"
    assert record.failed == 1
    assert [r["median_us"] for r in record.runners_up] == [7.0, 10.0]


def test_a_candidate_that_went_into_quarantine_after_its_timing_does_not_win(sweep: Sweep):
    measure(sweep, [(0, RIGHT, timing(10.0)), (2, RIGHT, timing(5.0))])
    [(before, _)] = winners(sweep, TOOLKIT)
    key = next(item.key for item in sweep.candidates(*SMALL) if dict(item.config) == before.record.config)
    sweep.note("quarantine", {"candidate": key, "reason": "the process died"})
    [(after, _)] = winners(sweep, TOOLKIT)
    assert (before.time_us, after.time_us) == (5.0, 10.0)


def test_a_timing_of_an_earlier_race_does_not_win(sweep: Sweep):
    measure(sweep, [(0, RIGHT, timing(5.0))])
    line = {"candidate": sweep.candidates(*SMALL)[2].key, "check": RIGHT, "timing": timing(10.0)}
    sweep.note("measured", line | {"race": "second"})
    sweep.note(
        "races", {"race": "second", "kernel": SMALL[0], "problem": SMALL[1].key, "strategy": "race", "untimed": {}}
    )
    [(winner, _)] = winners(sweep, TOOLKIT)
    assert winner.time_us == 10.0


def stood(bits):
    return RIGHT | {"cases": [{"case": "random", "sizes": "", "passed": True}], "bits": bits}


def test_the_fastest_of_the_winner_s_class_is_the_winner(sweep: Sweep):
    measure(sweep, [(0, stood("b"), timing(5.0)), (2, stood("a"), timing(9.0))])
    sweep.note("measured", {"candidate": sweep.candidates(*SMALL)[-1].key, "check": stood("b")})
    [(winner, _)] = winners(sweep, TOOLKIT)
    same = {"config": winner.record.config, "bits": "b", "median_us": 5.0, "generic": True}
    assert winner.record.measurement["invariant"] == same
    assert set(winner.record.artifacts) == {"aligned", "generic"}


def test_a_problem_that_only_the_usual_mode_asks_for_does_not_constrain_the_class(h200, tmp_path: Path):
    """Here 512 rows have another class than the others, and 4096 rows none."""
    sweep, spec = Sweep(tmp_path), spec_named(SMALL[0])
    few, usual, many = named = [(spec.name, SMALL[1].but(rows=rows)) for rows in (64, 512, 4096)]
    first = {pair: [item.config for item in candidates(*pair, h200)][:1] for pair in named}

    def outcome(invariant):
        sweep.begin(h200, "test", named, first, invariant=invariant)
        found, reasons = invariant_winners(sweep, Known.of(sweep))
        return {pair: dict(item.config) for pair, item in found.items()}, reasons

    sweep.begin(h200, "test", named, first)
    assert compile_all(sweep, jobs=2).failed == 0
    for pair, bits in zip(named, ("a", "b", ""), strict=True):
        item = sweep.candidates(*pair)[0]
        sweep.note("measured", {"candidate": item.key, "check": stood(bits), "timing": timing(9.0)})
    depends = "a row's bits depend on the rows around it, whichever kernel runs"
    assert outcome([few, many]) == ({few: dict(first[few][0])}, {many: depends})
    differ = "no class is common to all its sizes"
    assert outcome([few, usual]) == ({}, {few: differ, usual: differ})
    assert outcome([]) == ({}, {few: differ, usual: differ, many: depends})


@pytest.mark.parametrize("bits", ["", None])
def test_a_problem_without_a_class_has_no_invariant_kernel(sweep: Sweep, bits):
    check = RIGHT | {"cases": stood("")["cases"]} | ({} if bits is None else {"bits": bits})
    measure(sweep, [(0, check, timing(5.0)), (2, RIGHT | {"bits": "a"}, timing(9.0))])
    [(winner, _)] = winners(sweep, TOOLKIT)
    assert "invariant" not in winner.record.measurement


def test_the_buckets_of_a_problem_share_the_class_whose_slowest_costs_least(h200, tmp_path: Path):
    """Here 'a' wins few rows and costs half as much again for many, 'c' is only there for few; 'b' costs a tenth."""
    sweep, spec = Sweep(tmp_path), spec_named(SMALL[0])
    named = [(spec.name, SMALL[1].but(rows=rows)) for rows in (64, 4096)]
    items = {pair: candidates(*pair, h200) for pair in named}
    sweep.begin(h200, "test", named, {pair: [item.config for item in found[:3]] for pair, found in items.items()})
    assert compile_all(sweep, jobs=2).failed == 0
    times = {named[0]: {"a": 10.0, "b": 11.0, "c": 10.5}, named[1]: {"b": 100.0, "a": 150.0, "": 99.0}}
    for pair, by_class in times.items():
        found = sweep.candidates(*pair)
        for item, (bits, us) in zip(found, by_class.items(), strict=False):
            sweep.note("measured", {"candidate": item.key, "check": stood(bits), "timing": timing(us)})
        sweep.note("measured", {"candidate": found[-1].key, "check": stood("a")})
    sweep.note("gpu", {"gpu": "NVIDIA H200", "driver": "580", "torch": "2"})
    for winner, blobs in winners(sweep, TOOLKIT):
        record, place = winner.record, 1 if winner.problem["rows"] == 64 else 0
        same = dict(sweep.candidates(winner.kernel, winner.problem)[place].config)
        us = times[winner.kernel, winner.problem]["b"]
        assert record.measurement["invariant"] == {"config": same, "bits": "b", "median_us": us, "generic": False}
        assert record.config != same
        assert record.artifacts["invariant"].config == same
        assert record.digests == set(blobs)


def test_decoding_follows_the_class_of_training_where_it_can(h200, tmp_path: Path):
    """Training's fastest class is 'a'. A kernel for decoding has 'b', which costs training little or much; then 'c'."""
    sweep, alike = Sweep(tmp_path), {"head_dim": 64, "dtype": "bfloat16", "windowed": False}
    alike |= dict.fromkeys(("capped", "sinks"), False)
    training, decoding = spec_named("attention_forward"), spec_named("decode_attention")
    whole = {"batch": 1, "queries": 64, "keys": 64, "heads": 4, "kv_heads": 2, "causal": True, "packed": False}
    cached = {"kv_heads": 2, "keys": 64, "page_size": 1, "group": 2, "padded": False, "paged": False}
    named = [
        (training.name, training.problem(**whole, **alike)),
        (training.name, training.problem(**whole | {"queries": 1}, **alike)),
        (decoding.name, decoding.problem(**cached, **alike)),
    ]
    configs = {pair: [item.config for item in candidates(*pair, h200)][:2] for pair in named}
    sweep.begin(h200, "test", named, configs)
    for pair in named:
        for item in sweep.candidates(*pair):
            sweep.note("compiled", {"key": item.artifact} | COMPILED)

    def outcome(of_training, of_decoding):
        # Training's kernel of one query decides nothing: the one for decoding runs in its place.
        of_one = {bits: 100.0 * us if bits == b else us for bits, us in of_training.items()}
        for pair, classes in zip(named, (of_training, of_one, of_decoding), strict=True):
            for item, (bits, us) in zip(sweep.candidates(*pair), classes.items(), strict=False):
                sweep.note("measured", {"candidate": item.key, "check": stood(bits), "timing": timing(us)})
        known = Known.of(sweep)
        found, reasons = invariant_winners(sweep, known)
        pairs = named[::2]
        return [pair in found and known.bits(found[pair]) for pair in pairs], [reasons.get(pair, "") for pair in pairs]

    a, b, c = "64:a 64lse:x", "64:b 64lse:y", "64:c"
    follows = "no kernel has the bits of attention_forward, which serves in its place"
    assert outcome({a: 9.0, b: 13.4}, {"64:b": 3.0}) == ([b, "64:b"], ["", ""])
    assert outcome({a: 9.0, b: 13.6}, {"64:b": 3.0}) == ([a, False], ["", follows])
    assert outcome({a: 9.0, b: 9.5}, {c: 3.0}) == ([a, False], ["", follows])


def test_where_a_composite_has_won_its_record_has_the_best_kernel_for_arrays_without_torch(h200, tmp_path: Path):
    sweep, spec = Sweep(tmp_path), spec_named("skinny_linear")
    problem = spec.problem(**sizes(8, 8192, 2048, "bfloat16", ()))
    tile = spec.default(problem, h200)
    split = next(item.config for item in candidates(spec.name, problem, h200) if "splits" in item.config)
    named = spec.name, problem
    sweep.begin(h200, "test", [named], {named: [split, tile]})
    assert compile_all(sweep, jobs=2).failed == 0
    times = {item.key: timing(5.0 if item.config == split else 7.0) for item in sweep.candidates(*named)[:2]}
    for key, time in times.items():
        sweep.note("measured", {"candidate": key, "check": stood("a"), "timing": time})
    [(winner, blobs)] = winners(sweep, TOOLKIT)
    record = winner.record
    assert (record.config, record.best_kernel.config) == (dict(split), dict(tile))
    assert record.best_kernel.measurement["median_us"] == 7.0
    assert record.artifacts["aligned"].config == dict(tile)
    assert {artifact.sha256 for artifact in record.artifacts.values()} == set(blobs)


def test_few_samples_do_not_win_over_a_finalist(sweep: Sweep):
    measure(sweep, [(0, RIGHT, timing(10.0)), (2, RIGHT, timing(9.0, 5))])
    [(winner, _)] = winners(sweep, TOOLKIT)
    assert winner.time_us == 10.0


def test_a_wrong_generic_variant_leaves_no_record(sweep: Sweep):
    measure(sweep, [(0, RIGHT, timing(10.0)), (-1, WRONG, timing(1.0))])
    assert list(winners(sweep, TOOLKIT)) == []


def test_a_published_record_is_found_in_the_cache_and_in_the_pack(sweep: Sweep, tmp_path: Path):
    found = list(winners(sweep, TOOLKIT))
    publish(found, tmp_path / "results.pack", Store(tmp_path / "cache"))
    kernel, problem = SMALL
    target = sweep.target
    for layer in (FolderLayer(tmp_path / "cache", "cache"), PackLayer(tmp_path / "results.pack")):
        hit = lookup(
            kernel,
            dict(problem),
            bucketed=["rows"],
            target_key=target.key,
            arch=target.arch,
            toolkit_key=None,
            source=source_digest(spec_named(kernel).module),
            layers=[layer],
        )
        assert hit is not None
        assert hit.record.config == found[0][0].record.config


def test_candidates_that_do_the_same_are_measured_once(compiled_sweep: Sweep, h200):
    chosen = entrants(*SMALL, h200, compiled_sweep.compiled(), ())
    keys = [identity(e.candidate, e.compiled, h200) for e in chosen]
    assert len(keys) == len(set(keys))
    assert chosen[-1].candidate.variant == "generic"


def test_quarantined_candidates_are_not_measured(sweep: Sweep, h200):
    first = entrants(*SMALL, h200, sweep.compiled(), sweep.quarantined())[0].candidate
    sweep.note("quarantine", {"candidate": first.key, "reason": "the process died"})
    assert first.key not in [e.key for e in entrants(*SMALL, h200, sweep.compiled(), sweep.quarantined())]
