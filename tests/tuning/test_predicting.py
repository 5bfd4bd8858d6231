"""The cost model on facts of real cubins and on times that an H200 measured."""

import functools
import gzip
import json
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tuning_samples import SMALL

from tilekern.compile.cubin import Resources
from tilekern.spec import ALIGNED, Config, Problem
from tilekern.spec.targets import KNOWN, resolve
from tilekern.tuning.compile.machine_code import MachineCode
from tilekern.tuning.predict.cost_model import MEMORY, PRODUCTS
from tilekern.tuning.predict.ranking import (
    code_in,
    costs_of,
    predict,
    predict_best,
    predict_library,
    ranking,
    resident_blocks,
)
from tilekern.tuning.predict.roofline import roofline
from tilekern.tuning.sweep.candidates import Candidate

RECORDED = Path(__file__).with_name("data") / "h200-costs.json.gz"
LEAN = Resources(registers=32, stack_bytes=0, shared_bytes=0, threads=128, code_bytes=4096)
H200, B200 = resolve("H200"), resolve("B200")
# Problems of one kernel that differ in nothing but how much there is to do.
SIZES = {"rows", "tokens", "queries", "keys"}


@dataclass(frozen=True)
class Row:
    """A measured candidate; what it was compiled to is None where a library runs it."""

    item: Candidate
    resources: Resources | None
    code: MachineCode | None
    median_us: float

    @functools.cache  # noqa: B019 (rows live as long as the process)
    def predict(self, target=H200):
        if self.resources is None:
            return predict_library(self.item, target)
        return predict(self.item, self.resources, target, self.code)


@functools.cache
def recorded() -> list[list[Row]]:
    """Candidates of all problems of a sweep of Qwen3-8B on an H200.

    They are each problem's default, its best, the one that was predicted to be when this was recorded, and every few of
    the rest, so that the regret of that model is the whole sweep's.
    """
    kept = json.loads(gzip.decompress(RECORDED.read_bytes()))
    facts = {
        name: (Resources(**found["resources"]), MachineCode.from_dict(found["machine_code"]))
        for name, found in kept["artifacts"].items()
    }

    def row(each, kept_row):
        config = Config(dict(zip(each["config"], kept_row["config"], strict=True)))
        item = Candidate(each["kernel"], Problem(each["problem"]), config, ALIGNED, kept_row["artifact"] or "")
        return Row(item, *facts.get(kept_row["artifact"], (None, None)), kept_row["median_us"])

    return [[row(each, kept_row) for kept_row in each["candidates"]] for each in kept["problems"]]


def compiled_rows() -> list[Row]:
    return [row for rows in recorded() for row in rows if row.resources is not None]


@pytest.mark.parametrize(
    ("resources", "blocks"),
    [
        (LEAN, 16),  # 2048 threads
        (replace(LEAN, registers=255), 2),  # 256 registers x 32 x 4 warps, of 65536
        (replace(LEAN, shared_bytes=100_000), 2),
        (replace(LEAN, threads=32), 32),
        (replace(LEAN, shared_bytes=300_000), 0),
    ],
)
def test_blocks_that_fit_on_an_sm_of_the_h200(resources, blocks):
    assert resident_blocks(resources, H200) == blocks


def test_the_recorded_winners_regret():
    regrets = []
    for rows in recorded():
        chosen = min(rows, key=lambda row: row.predict().rank)
        regrets.append(chosen.median_us / min(row.median_us for row in rows))
    assert len(regrets) == 157
    assert statistics.median(regrets) <= 1.05
    assert statistics.quantiles(regrets, n=10, method="inclusive")[-1] <= 1.15


def test_predicted_times_are_near_the_measured_ones():
    ratios = [1e6 * row.predict().seconds / row.median_us for row in compiled_rows() if not row.resources.stack_bytes]
    assert 0.9 <= statistics.median(ratios) <= 1.1
    tenths = statistics.quantiles(ratios, n=10)
    assert tenths[0] >= 0.7
    assert tenths[-1] <= 1.4


@pytest.mark.parametrize(("target", "every"), [(H200, 1), (B200, 6)], ids=["H200", "B200"])
def test_a_spilling_candidate_never_beats_one_that_does_not(target, every):
    for rows in recorded()[::every]:
        ranked = sorted((row for row in rows if row.resources), key=lambda row: row.predict(target).rank)
        stacks = [row.resources.stack_bytes > 0 for row in ranked]
        assert stacks == sorted(stacks)


def with_more(code: MachineCode, name: str) -> MachineCode:
    """The same code with more of one count, in each of its parts."""

    def more(part):
        return replace(part, **{name: 2 * getattr(part, name) + 7})

    return MachineCode(more(code.whole), tuple(more(loop) for loop in code.loops))


@pytest.mark.parametrize("name", ["local_accesses", "barriers", "global_loads", "global_stores"])
def test_more_to_do_is_never_predicted_faster(name):
    ratios = [
        predict(row.item, row.resources, H200, with_more(row.code, name)).seconds / row.predict().seconds
        for row in compiled_rows()[::14]
    ]
    assert min(ratios) >= 1
    assert max(ratios) > 1.02


def test_more_stack_never_ranks_better():
    for row in compiled_rows()[::14]:
        worse = replace(row.resources, stack_bytes=row.resources.stack_bytes + 64)
        assert predict(row.item, worse, H200, row.code).rank >= row.predict().rank


def test_larger_problems_are_predicted_to_take_longer():
    compared = 0
    for row in compiled_rows()[::4]:
        sizes = {name: 2 * row.item.problem[name] for name in SIZES & set(row.item.problem)}
        if row.item.kernel == "column_sum" or not sizes:
            continue
        larger = replace(row.item, problem=row.item.problem.but(**sizes))
        if row.item.spec.bytes_moved(row.item.problem) >= H200.l2_bytes:
            assert predict(larger, row.resources, H200, row.code).seconds > row.predict().seconds
            compared += 1
    assert compared >= 100


def test_no_weight_of_a_term_is_negative():
    for weights in (MEMORY, PRODUCTS):
        assert min(weights.terms.values()) >= 0
        assert weights.norm >= 1
        assert weights.overhead_s > 0
        assert weights.serial < weights.terms.keys()


def test_every_term_and_trait_has_a_weight():
    for row in compiled_rows()[::22]:
        costs, weights = costs_of(row.item, row.resources, H200, row.code)
        assert costs.terms.keys() == weights.terms.keys()
        assert costs.traits.keys() == weights.traits.keys()
        assert all(term >= 0 for term in costs.terms.values())


@pytest.mark.parametrize("target", KNOWN, ids=lambda target: target.key)
def test_a_starved_candidate_ranks_last_on_every_target(target):
    item, resources, _ = next((r.item, r.resources, r.code) for r in compiled_rows() if r.item.kernel == "adamw")
    starved = predict(item, replace(resources, shared_bytes=300_000), target)
    assert starved.resident_blocks == 0
    assert starved.seconds == float("inf")
    assert predict(item, LEAN, target).rank < starved.rank


def test_the_default_wins_a_tie():
    item = next(row.item for row in compiled_rows() if row.item.kernel == "swiglu_forward")
    default = replace(item, config=item.spec.default(item.problem, H200))
    said = predict(default, LEAN, H200)
    assert said.bonus > 0
    assert said.rank < replace(said, bonus=0.0).rank


def test_code_that_was_not_counted_is_ranked_by_its_size():
    item = next(row.item for row in compiled_rows() if row.item.kernel == "swiglu_forward")
    times = [predict(item, replace(LEAN, code_bytes=size), H200).seconds for size in (4096, 65536)]
    assert code_in({"status": "ok"}) is None
    assert 0 < times[0] < times[1]


def test_a_library_takes_longer_than_the_roofline_and_its_overhead():
    rows = [row for rows in recorded() for row in rows if row.resources is None]
    assert rows
    for row in rows:
        said, flops = row.predict(), row.item.spec.flops(row.item.problem)
        assert said.seconds > flops / (1e12 * H200.product_tflops(row.item.problem["dtype"])) + 50e-6
        assert not said.spills


def test_the_best_of_a_compiled_sweep(compiled_sweep, h200):
    ranked = ranking(compiled_sweep, *SMALL, h200)
    best = predict_best(compiled_sweep, *SMALL, h200)
    assert best == ranked[0][0]
    keys = [(item.backend.name == "cute", p.rank) for item, p in ranked]
    assert keys == sorted(keys)
    assert all(item.variant == "aligned" for item, _ in ranked)


def test_compiled_artifacts_keep_what_their_code_consists_of(compiled_sweep):
    for line in compiled_sweep.compiled().values():
        code = code_in(line)
        assert code.whole.instructions > 100
        assert code.as_dict() == line["machine_code"]


@pytest.mark.parametrize("vocabulary", [50257, 50264])
def test_cublas_is_slow_with_rows_of_no_whole_16_bytes(vocabulary):
    def seconds(kernel, config, **sizes):
        problem = Problem({"dtype": "bfloat16", **sizes})
        return predict_library(Candidate(kernel, problem, Config(config), ALIGNED, ""), H200).seconds

    flags = dict.fromkeys(("a_transposed", "biased", "gelu_tanh", "silu", "accumulated"), False) | {
        "b_transposed": True
    }
    sizes = {"rows": 4096, "inner": 768, "columns": vocabulary}
    product = seconds("matmul", {"implementation": "torch"}, **sizes, **flags)
    even = seconds("matmul", {"implementation": "torch"}, **sizes | {"columns": 50256}, **flags)
    of_head = {"rows": 4096, "hidden": 768, "vocabulary": vocabulary}
    loss, by_kernels = (
        seconds("fused_linear_cross_entropy", {"chunk": 4096, "products": products}, **of_head)
        for products in ("cublas", "tuned")
    )
    if vocabulary % 8:
        assert product > 3 * even
        assert by_kernels < loss / 3
    else:
        assert product < 1.1 * even
        assert by_kernels == loss


def test_torch_s_products_of_8_bits_are_predicted_as_measured_on_hopper_alone():
    sizes = {"rows": 4096, "inner": 4096, "columns": 4096, "over_rows": False, "biased": False, "accumulated": False}
    problem = Problem({"dtype": "bfloat16", **sizes})
    item = Candidate("fp8_matmul", problem, Config({"implementation": "torch"}), ALIGNED, "")
    shares = {
        name: predict_library(item, target).seconds / roofline("fp8_matmul", problem, target).seconds
        for name in ("H200", "H100", "B200", "RTX 5090")
        for target in [resolve(name)]
    }
    assert max(shares["H200"], shares["H100"]) < 0.8
    assert min(shares["B200"], shares["RTX 5090"]) > 1.9
