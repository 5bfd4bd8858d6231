"""Define the targets, most of them for speed on the H200, and judge a file of results by them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.decode_ops import BENCHMARK as DECODE
from benchmarks.decode_ops import INVARIANT
from benchmarks.experts import BENCHMARK as EXPERTS
from benchmarks.experts import KEPT, WAITS
from benchmarks.experts_cases import BALANCED, FROZEN, LORA, ZIPF, label
from benchmarks.families import BENCHMARK as FAMILIES
from benchmarks.fp8 import BENCHMARK as OF_FP8
from benchmarks.fp8 import NEAR
from benchmarks.fp8_curves import distances
from benchmarks.fp8_errors import TORCH
from benchmarks.host import ALLOCATION
from benchmarks.inference import BENCHMARK as INFERENCE
from benchmarks.inference import INT8
from benchmarks.kernels import COPY, PRODUCTS
from benchmarks.providers import FP8, GRAPHS, OURS, is_in_bfloat16
from benchmarks.results import Results, Row, shown
from benchmarks.suite_cases import SUITE


@dataclass(frozen=True)
class Verdict:
    """One line of the report: op, case, target, figure, whether it meets the target, and the peers' figures."""

    what: str
    case: str
    target: str
    figure: str
    met: bool
    peers: str


@dataclass(frozen=True)
class Goal:
    """A line of the table of targets: its title, the benchmark that it reads, and a function that returns its verdicts.

    ``needs_gpu`` is False for goals that are measured without a GPU; there, goals that need one do not count as
    missing. ``target`` is shown beside the title if nothing was measured.
    """

    title: str
    benchmark: str
    judge: Callable[[Results], Iterator[Verdict]]
    needs_gpu: bool = True
    target: str = ""


_SWEEP, _LENGTHS = "kernels_sweep", ", at every length"


def _kernel_goal(
    op: str, metrics: Sequence[str], least_share: float, cases: Sequence[str] | None = None, benchmark: str = "kernels"
) -> Goal:
    def judge(results: Results) -> Iterator[Verdict]:
        for case in results.cases():
            if case.split(" ")[0] != op or (cases is not None and case not in cases):
                continue
            for metric in metrics:
                yield from _kernel_verdict(results, case, metric, least_share)

    return Goal(f"{op}: {', '.join(metrics)}{_LENGTHS if benchmark == _SWEEP else ''}", benchmark, judge)


def _no_slower(op: str, metrics: Sequence[str], benchmark: str = _SWEEP, only: str = "") -> Goal:
    """Make a goal for an op without a copy to compare: no slower than the best peer, at every length or in one case."""

    def judge(results: Results) -> Iterator[Verdict]:
        for case, metric in itertools.product(results.cases(), metrics):
            ours, peers = results.row(case, OURS, metric), _peers(results, case, metric)
            if case.split(" ")[0] == op and case.startswith(only) and ours is not None and peers:
                met = ours.value - peers[0].value <= ours.spread + peers[0].spread
                target = "no slower than the best peer"
                yield Verdict(f"{op} {metric}", case, target, f"{shown(ours)} us", met, _listed(peers))

    return Goal(f"{only or op}: {', '.join(metrics)}, no slower than peers", benchmark, judge)


def _times_faster(
    op: str, than: str, factor: float, benchmark: str, case: str = "", metric: str = "forward_backward"
) -> Goal:
    """Make a goal of a multiple of a peer's speed, if the peer is below 60 % of a copy or the case is named."""
    what = f"{op} {metric}, times {than}'s speed"

    def judge(results: Results) -> Iterator[Verdict]:
        for found in results.cases():
            ours, peer = results.row(found, OURS, metric), results.row(found, than, metric)
            share = results.row(found, than, f"{metric}_share_of_copy")
            if found.split(" ")[0] != op or ours is None or peer is None or (case and found != case):
                continue
            if case or (share is not None and share.value < 0.6):
                ratio = peer.value / ours.value
                figure = f"{ratio:.2f} x ({shown(ours)} us)"
                yield Verdict(what, found, f"≥ {factor:g} x", figure, ratio >= factor, _listed([peer]))

    return Goal(what, benchmark, judge)


def _kernel_verdict(results: Results, case: str, metric: str, least_share: float) -> Iterator[Verdict]:
    ours, share = results.row(case, OURS, metric), results.row(case, OURS, f"{metric}_share_of_copy")
    if ours is None or share is None:
        return
    peers = _peers(results, case, metric)
    best = min(peers, key=lambda row: row.value, default=None)
    # A difference within the uncertainty of the two medians counts as no slower.
    slower = best is not None and ours.value - best.value > ours.spread + best.spread
    target = f"≥ {least_share:.0%} of a copy; no slower than the best peer"
    figure = f"{shown(ours)} us, {share.value:.1%} of a copy"
    met = share.value >= least_share and not slower
    yield Verdict(f"{case.split(' ', maxsplit=1)[0]} {metric}", case, target, figure, met, _listed(peers))


def _peers(results: Results, case: str, metric: str) -> list[Row]:
    others = [row for row in results.figures(case, metric) if row.provider not in (COPY, PRODUCTS)]
    return sorted((row for row in others if not row.provider.startswith(OURS)), key=lambda row: row.value)


def _listed(rows: Sequence[Row]) -> str:
    return "; ".join(f"{row.provider} {shown(row)} {row.unit}".removesuffix(" 1") for row in rows) or "-"


def _near_curves(results: Results) -> Iterator[Verdict]:
    for case in results.cases():
        if apart := distances(results, case):
            figure = f"{apart[0]:.4f} nat, {apart[1]:.4f} nat"
            target = "≤ the distance of another order of batches"
            yield Verdict("8-bit floats, loss", case, target, figure, apart[0] <= apart[1], "-")


def _near_gradients(results: Results) -> Iterator[Verdict]:
    for case in results.cases():
        ours = results.row(case, FP8, "least_cosine_to_bf16")
        if ours and ": " not in case:
            bf16 = results.row(case, TORCH, "least_cosine_to_fp32")
            figure = shown(ours) + (f"; bfloat16 to float32 {shown(bf16)}" if bf16 else "")
            target = f"cosine ≥ {NEAR} for every parameter"
            yield Verdict("8-bit floats, gradients", case, target, figure, ours.value >= NEAR, "-")


def _host(results: Results) -> Iterator[Verdict]:
    for case in results.cases():
        plain, bare = results.row(case, OURS, "forward_no_grad"), results.row(case, "ct.launch", "launch")
        if plain and bare:
            ratio = plain.value / bare.value
            figure = f"{shown(plain)} us, {ratio:.2f} x {shown(bare)} us"
            if allocation := results.row(case, "torch", ALLOCATION):
                figure += f"; the results' allocation {shown(allocation)} us"
            peers = _listed(_peers(results, case, "forward_no_grad"))
            yield Verdict("forward under no_grad", case, "≤ 1.3 x a bare ct.launch", figure, ratio <= 1.3, peers)
        for metric in ("forward", "forward_backward"):
            ours, liger = results.row(case, OURS, metric), results.row(case, "liger-triton", metric)
            if ours and liger:
                figure = f"{shown(ours)} us, {ours.value / liger.value:.2f} of Liger's"
                peers = _listed(_peers(results, case, metric))
                met = ours.value <= 0.5 * liger.value
                yield Verdict(f"{metric} with autograd", case, "≤ half of Liger's", figure, met, peers)
        yield from _in_batches(results, case)


def _in_batches(results: Results, case: str) -> Iterator[Verdict]:
    """Compare a case ``<op> <batch>x<rows>x<columns>`` with its rows alone: host time above the bare launch."""
    op, _, size = case.partition(" ")
    sizes = size.split("x")
    if len(sizes) != 3 or not all(map(str.isdecimal, sizes)):
        return
    flat = f"{op} {int(sizes[0]) * int(sizes[1])}x{sizes[2]}"
    for metric in ("forward_no_grad", "forward"):
        above = [_above_launch(results, one, metric) for one in (case, flat)]
        if above[0] is not None and above[1] is not None:
            figure = f"{above[0]:.2f} us, {above[0] / above[1]:.2f} x {above[1]:.2f} us"
            met = above[0] <= 1.3 * above[1]
            yield Verdict(f"{metric} above the launch, of batches", case, "≤ 1.3 x that of rows", figure, met, "-")


def _above_launch(results: Results, case: str, metric: str) -> float | None:
    ours, bare = results.row(case, OURS, metric), results.row(case, "ct.launch", "launch")
    return ours.value - bare.value if ours and bare else None


def _at_most(
    benchmark: str,
    metric: str,
    limit: float,
    what: str,
    cases: str | tuple[str, ...] = "",
    target: str = "",
    needs_gpu: bool = True,
) -> Goal:
    """Make a goal that every case with the metric (whose name starts with one of ``cases``) is at most ``limit``."""

    def judge(results: Results) -> Iterator[Verdict]:
        for case in results.cases():
            row = results.row(case, OURS, metric)
            if row is not None and case.startswith(cases):
                unit = "" if row.unit == "1" else f" {row.unit}"
                peers = _listed(_peers(results, case, metric))
                wanted = target or f"≤ {limit:g}{unit}"
                yield Verdict(what, case, wanted, f"{shown(row)}{unit}", row.value <= limit, peers)

    return Goal(what, benchmark, judge, needs_gpu, target)


def _at_least(benchmark: str, metric: str, limit: float, what: str, needs_gpu: bool = True) -> Goal:
    def judge(results: Results) -> Iterator[Verdict]:
        for case in results.cases():
            row = results.row(case, OURS, metric)
            if row is not None:
                unit = "" if row.unit == "1" else f" {row.unit}"
                yield Verdict(what, case, f"≥ {limit:g}{unit}", f"{shown(row)}{unit}", row.value >= limit, "-")

    return Goal(what, benchmark, judge, needs_gpu)


def _no_worse_than_peers(metric: str, factor: float, what: str, target: str, *, more_is_better: bool) -> Goal:
    """Make a goal of training: at least (or at most) ``factor`` times the best peer's figure of the same case.

    Where captured steps are better than eager ones they are judged, since peers capture theirs too.
    """

    def judge(results: Results) -> Iterator[Verdict]:
        for case in results.cases():
            eager, found = results.row(case, OURS, metric), _peers(results, case, metric)
            peers = [row for row in found if is_in_bfloat16(row.provider)]
            if eager is None or not peers:
                continue
            ways = [eager, *filter(None, (results.row(case, name, metric) for name in GRAPHS))]
            ours = (max if more_is_better else min)(ways, key=lambda row: row.value)
            if more_is_better:
                peers.reverse()
            wanted = factor * peers[0].value
            met = ours.value >= wanted if more_is_better else ours.value <= wanted
            figure = f"{shown(ours)} {ours.unit}{'' if ours is eager else ', captured'}"
            yield Verdict(what, case, target, figure, met, _listed(peers))

    return Goal(what, "train", judge)


def _whole_models(what: str, provider: str, than: str, least: dict[str, float]) -> Goal:
    """Make a goal of whole models: ``least`` times the speed of another trainer, by cases.

    The figure also says what the GPU's own time allows, if the host never kept it waiting.
    """

    def judge(results: Results) -> Iterator[Verdict]:
        for case, factor in least.items():
            ours, theirs = (results.row(case, name, "tokens_per_s") for name in (provider, than))
            taken, on_gpu = results.row(case, than, "step_s"), results.row(case, provider, "gpu_s")
            if ours and theirs and taken and on_gpu:
                ratio = ours.value / theirs.value
                figure = f"{ratio:.2f} x ({shown(ours)} tok/s); its GPU time allows {taken.value / on_gpu.value:.2f} x"
                yield Verdict(what, case, f"≥ {factor:g} x", figure, ratio >= factor, _listed([theirs]))

    return Goal(what, "train", judge)


def _in_8_bits(what: str, least: float, than: Callable[[str], bool], who: str, models: Collection[str] = ()) -> Goal:
    """Make a goal of training by 8-bit floats: ``least`` times the fastest trainer whose name is ``than``'s."""
    target = f"≥ {least:g} x {who}"

    def judge(results: Results) -> Iterator[Verdict]:
        for case in results.cases():
            ours = results.row(case, FP8, "tokens_per_s")
            others = [row for row in results.figures(case, "tokens_per_s") if than(row.provider)]
            if ours and others and (not models or case.split(" ")[0] in models):
                best = max(others, key=lambda row: row.value)
                ratio = ours.value / best.value
                figure = f"{shown(ours)} tok/s, {ratio:.2f} x"
                yield Verdict(what, case, target, figure, ratio >= least, _listed([best]))

    return Goal(what, "train", judge, target=target)


def _rates_in_8_bits(what: str, least: Mapping[str, float]) -> Goal:
    def judge(results: Results) -> Iterator[Verdict]:
        for case, limit in least.items():
            if ours := results.row(case, FP8, "tokens_per_s"):
                peers = _listed(_peers(results, case, "tokens_per_s")[::-1])
                yield Verdict(what, case, f"≥ {limit:g} tok/s", f"{shown(ours)} tok/s", ours.value >= limit, peers)

    return Goal(what, "train", judge)


def _smaller_in_8_bits(what: str, most: float, cases: Sequence[str]) -> Goal:
    target = f"≤ {most:g} x tilekern in bfloat16"

    def judge(results: Results) -> Iterator[Verdict]:
        for case in cases:
            ours, wide = (results.row(case, name, "peak_gib") for name in (FP8, OURS))
            if ours and wide:
                ratio = ours.value / wide.value
                yield Verdict(what, case, target, f"{shown(ours)} GiB, {ratio:.3f} x", ratio <= most, _listed([wide]))

    return Goal(what, "train", judge, target=target)


def _family(model: str, factor: float, most_gib: float | None = None) -> list[Goal]:
    """Make the goals of a family's model: ``factor`` times the best peer's speed in the run, and a limit of memory."""
    speed, memory = f"training {model}, tokens a second", f"training {model}, peak memory"
    wanted = f"≥ {factor:.2f} x the best peer"

    def cases(results: Results) -> Iterator[str]:
        return (case for case in results.cases() if case.split(" ")[0] == model)

    def fast_enough(results: Results) -> Iterator[Verdict]:
        for case in cases(results):
            ours, peers = results.row(case, OURS, "tokens_per_s"), _peers(results, case, "tokens_per_s")[::-1]
            if ours is not None and peers:
                ratio = ours.value / peers[0].value
                figure = f"{shown(ours)} tok/s, {ratio:.2f} x"
                yield Verdict(speed, case, wanted, figure, ratio >= factor, _listed(peers))

    def small_enough(results: Results) -> Iterator[Verdict]:
        for case in cases(results):
            ours = results.row(case, OURS, "peak_gib")
            if ours is not None and most_gib is not None:
                met, peers = ours.value <= most_gib, _listed(_peers(results, case, "peak_gib"))
                yield Verdict(memory, case, f"≤ {most_gib:g} GiB", f"{shown(ours)} GiB", met, peers)

    goals = [Goal(speed, FAMILIES, fast_enough, target=wanted)]
    return goals if most_gib is None else [*goals, Goal(memory, FAMILIES, small_enough)]


def _layer(model: str, tokens: int, most_ms: float) -> Goal:
    """Make a goal for the GPU time of one layer of experts, forward and backward, with balanced routing."""
    what, case = f"layer of experts, {model} {tokens} tokens", label(model, tokens, BALANCED)
    return _at_most(
        EXPERTS, "forward_backward", 1000 * most_ms, what, cases=case, target=f"≤ {most_ms:g} ms"
    )  # fmt: skip


def _skewed(most: float) -> Goal:
    """Make a goal for Zipf routing: at most a multiple of the same layer's time with balanced routing."""
    what, target = "layer of experts with Zipf routing", f"≤ {most:g} x balanced"

    def judge(results: Results) -> Iterator[Verdict]:
        for case in results.cases():
            skewed = results.row(case, OURS, "forward_backward")
            even = results.row(case.replace(f", {ZIPF}", f", {BALANCED}"), OURS, "forward_backward")
            if case.endswith(f", {ZIPF}") and skewed and even:
                ratio, peers = skewed.value / even.value, _listed(_peers(results, case, "forward_backward"))
                yield Verdict(what, case, target, f"{ratio:.2f} x ({shown(skewed)} us)", ratio <= most, peers)

    return Goal(what, EXPERTS, judge, target=target)


def _faster_layer(kind: str, factor: float) -> Goal:
    """Make a goal for layers of this kind: at least a multiple of the best peer's speed."""
    what, target = f"layer of experts, {kind}", f"≥ {factor:g} x the best peer"

    def judge(results: Results) -> Iterator[Verdict]:
        for case in results.cases():
            ours, peers = results.row(case, OURS, "forward_backward"), _peers(results, case, "forward_backward")
            if case.endswith(f", {kind}") and ours and peers:
                ratio = peers[0].value / ours.value
                yield Verdict(what, case, target, f"{ratio:.2f} x ({shown(ours)} us)", ratio >= factor, _listed(peers))

    return Goal(what, EXPERTS, judge, target=target)


def _lag_beside_unpatched(most_s: float) -> Goal:
    """Make a goal for the first step's lag: a limit above the least lag of the unpatched model in the same run."""
    what = "training, first step over the second, above the unpatched model's"

    def judge(results: Results) -> Iterator[Verdict]:
        for case in results.cases():
            ours = results.row(case, OURS, "first_step_lag_s")
            peers = _peers(results, case, "first_step_lag_s")
            plain = next((row for row in peers if row.provider.startswith("hf-")), None)
            if ours is not None and plain is not None:
                above = ours.value - plain.value
                figure = f"{above:.2f} s ({shown(ours)} s)"
                yield Verdict(what, case, f"≤ {most_s:g} s", figure, above <= most_s, _listed(peers))

    return Goal(what, FAMILIES, judge)


def _beside(
    what: str, cases: str, metric: str, most: float, who: str = OURS, than: str = "", ending: str = "",
    benchmark: str = DECODE,
) -> Goal:  # fmt: skip
    """Make a goal of generation: at most a multiple of a provider's figure, or of the best peer's if none is named.

    ``cases`` and ``ending`` are how a case's name begins and ends. Where the multiple is 1, a difference within the
    spreads counts as none.
    """
    named = than or "the best peer"
    target = f"no slower than {named}" if most == 1 else f"≤ {most:.4g} x {named}"

    def judge(results: Results) -> Iterator[Verdict]:
        for case in results.cases():
            ours = results.row(case, who, metric)
            rivals = [results.row(case, than, metric)] if than else _peers(results, case, metric)
            others = [row for row in rivals if row is not None]
            if ours is not None and others and case.startswith(cases) and case.endswith(ending):
                best = others[0]
                slack = ours.spread + best.spread if most == 1 else 0.0
                figure = f"{ours.value / best.value:.3f} x ({shown(ours)} {ours.unit})"
                yield Verdict(what, case, target, figure, ours.value <= most * best.value + slack, _listed(others))

    return Goal(what, benchmark, judge, target=target)


def _token(who: str, batch: int, most_ms: float, target: str = "") -> Goal:
    """Make a goal for a step of Qwen3-8B that decodes one token of each sequence, after 4095 others."""
    what, wanted = f"a token by {who}, batch {batch}", target or f"≤ {most_ms:g} ms"

    def judge(results: Results) -> Iterator[Verdict]:
        case = f"qwen3-8b decode, batch {batch}, context 4096"
        if (ours := results.row(case, who, "token_ms")) is not None:
            peers = _listed(_peers(results, case, "token_ms"))
            yield Verdict(what, case, wanted, f"{shown(ours)} ms", ours.value <= most_ms, peers)

    return Goal(what, DECODE, judge, target=wanted)


def _generates(factor: float) -> Goal:
    """Make a goal for ``generate``: the faster of tilekern's ways over the static cache with torch.compile."""
    what, target = "generate of a patched model, tokens a second", f"≥ {factor:g} x the static cache and torch.compile"

    def judge(results: Results) -> Iterator[Verdict]:
        for case in results.cases():
            ways = [results.row(case, way, "tokens_per_s") for way in (OURS, f"{OURS}-compiled")]
            peer = results.row(case, "hf-compiled", "tokens_per_s")
            if "qwen3-8b generate" in case and peer is not None and any(ways):
                ours = max(filter(None, ways), key=lambda row: row.value)
                ratio = ours.value / peer.value
                figure = f"{ratio:.2f} x ({shown(ours)} tok/s by {ours.provider})"
                yield Verdict(what, case, target, figure, ratio >= factor, _listed([peer]))

    return Goal(what, DECODE, judge, target=target)


def _equal_logits(results: Results) -> Iterator[Verdict]:
    for case in results.cases():
        found, total = (results.row(case, INVARIANT, metric) for metric in ("differing_logits", "logits"))
        if found is not None and total is not None:
            outside = results.row(case, OURS, "differing_logits")
            figure = f"{found.value:,.0f} of {total.value:,.0f}"
            if outside is not None:
                figure += f"; outside of the mode {outside.value:,.0f}"
            yield Verdict(_LOGITS, case, "0", figure, found.value == 0, "-")


def _rate(op: str, case: str, metric: str, least: float, than: str = "") -> Goal:
    """Make a goal for one op bound by arithmetic: a least rate in TFLOP/s, or ``least`` times a peer's."""
    what = f"{op} {metric}, TFLOP/s"

    def judge(results: Results) -> Iterator[Verdict]:
        ours = results.row(case, OURS, f"{metric}_rate")
        peer = results.row(case, than, f"{metric}_rate") if than else None
        if ours is None or (than and peer is None):
            return
        wanted = least * peer.value if peer else least
        target = f"≥ {least:g} x {peer.provider}'s" if peer else f"≥ {least:g} TFLOP/s"
        peers = _listed(_peers(results, case, f"{metric}_rate")[::-1])
        yield Verdict(what, case, target, f"{shown(ours)} TFLOP/s", ours.value >= wanted, peers)

    return Goal(what, "kernels", judge)


_ATTENTION, _LINEAR = "attention 4x4096 32+32x128 causal", "linear 8192x4096x14336"
_LOSS, _HEAD = "cross_entropy 4096x128256", "fused_linear_cross_entropy 8192x4096x128256"
_HEADS = (_HEAD, "fused_linear_cross_entropy 8192x4096x151936")
_NORMS = ("rms_norm 8192x4096", "rms_norm 32768x4096")
# Models of a run of the families that share their targets.
_OTHERS = ("mistral-7b", "gemma-3-12b", "phi-4", "qwen2.5-vl-7b", "olmo-2-7b")
_COMPILED = "torch.compile-layers"
# Tokens a second.
_IN_8_BITS = {
    "qwen3-8b 4096 tokens": 14000, "qwen3-8b 8192 tokens": 13400, "qwen3-8b 16384 tokens": 11200,
    "qwen3-8b 32768 tokens, checkpointing": 7000,
}  # fmt: skip
# How much faster than layers by torch.compile a captured step must be: the smaller the model, the more.
_CAPTURED = {
    "qwen3-0.6b 256 tokens": 5.0, "qwen3-0.6b 1024 tokens": 4.0, "qwen3-0.6b 4096 tokens": 1.8,
    **{f"qwen3-{size} {tokens} tokens": 1.5 for size in ("1.7b", "4b") for tokens in (1024, 4096)},
    "llama-3.2-1b 1024 tokens": 2.0, "gpt2 8 x 1024 tokens": 2.0, "gemma-3-1b 1024 tokens": 2.0,
    **{f"qwen3-8b {tokens} tokens, LoRA of rank 16": 1.3 for tokens in (1024, 4096)},
}  # fmt: skip
_BOTH = ("forward", "backward", "forward_backward")
# Targets of the suite at every length of a sweep; ops whose gradient is made with the loss are timed for both at once.
# Short lengths are bound by launches and are judged too.
_ONE_WAY, _ARITHMETIC = ("jsd", "tvd"), ("tiled_geglu", "tiled_swiglu", "fused_linear_jsd", "linear_log_probs")
# Neither rows nor elements: each token reads those around it.
_NEIGHBOURS = "fused_neighborhood_attention"
_BEFORE = ("rms_norm", "fused_add_rms_norm", "swiglu", "rope", "cross_entropy")
_ABOVE = "memory above inputs and gradients"
_TWICE = ("group_norm", "sparsemax", "tvd", "kl_div", "dyt", "poly_norm")
_MOVING = (*_BEFORE, *(op for op in SUITE if op not in (*_ONE_WAY, *_ARITHMETIC, _NEIGHBOURS)))
_SUITE_GOALS = (
    *(_kernel_goal(op, ("forward",), 0.90, benchmark=_SWEEP) for op in _MOVING),
    *(_kernel_goal(op, ("backward", "forward_backward"), 0.85, benchmark=_SWEEP) for op in _MOVING),
    *(_kernel_goal(op, ("forward_backward",), 0.85, benchmark=_SWEEP) for op in _ONE_WAY),
    *(_no_slower(op, _BOTH) for op in _ARITHMETIC),
    _no_slower("fused_linear_cross_entropy", ("forward_backward",)),
    _no_slower(_NEIGHBOURS, _BOTH),
    _no_slower("jsd", ("forward_backward",), "kernels", "jsd 4096x128256"),
    *(_times_faster(op, "liger-triton", 2, _SWEEP) for op in _TWICE),
    _at_most("kernels", "forward_backward", 800, "jsd forward_backward", cases="jsd 2048x128256 float32"),
    _times_faster("jsd", "liger-triton", 4, "kernels", case="jsd 4096x128256"),
    _at_most("kernels", "forward_backward", 120, "layer_norm forward_backward", cases="layer_norm 8192x4096"),
    _at_most("kernels", "forward_backward", 95, "softmax forward_backward", cases="softmax 8192x4096"),
    _at_most(
        "kernels", "products_time", 1.15, "fused_linear_jsd forward_backward, of its products alone",
        cases="fused_linear_jsd", target="≤ 1.15 x",
    ),
    _at_most("kernels", "extra_peak", 717, f"fused_linear_jsd, {_ABOVE}", cases="fused_linear_jsd"),
    _at_most("kernels", "forward", 15800, "linear_log_probs forward", cases="linear_log_probs"),
    _at_most("kernels", "forward_backward", 63000, "linear_log_probs forward_backward", cases="linear_log_probs"),
    _at_most("kernels", "extra_peak", 717, f"linear_log_probs, {_ABOVE}", cases="linear_log_probs"),
)  # fmt: skip
_LOGITS = "logits that differ from training's inside tilekern.invariant()"
_PRODUCTS, _CACHED = "products of few rows, all layers and the head", "attention of a token to a cache"
_GRAPH, _INVARIANT_GRAPH = f"{OURS}-graph", f"{INVARIANT}-graph"
_GENERATION = (
    *(
        _beside(f"{_PRODUCTS}, by {who}", "qwen3-8b products", "time", most, who, ending="the head")
        for who, most in ((OURS, 1.0), (INVARIANT, 1.1))
    ),
    *(
        _beside(f"{_CACHED}, by {who}", "qwen3-8b decode attention", "time", most, who)
        for who, most in ((OURS, 1.0), (INVARIANT, 1.15))
    ),
    _token(_GRAPH, 1, 3.9),
    _token(_INVARIANT_GRAPH, 1, 4.4),
    # The limits read weights and cache once, at 4.8 TB/s.
    *(
        _token(who, batch, limit_ms / share, f"≥ {share:.0%} of the limit, {limit_ms:g} ms")
        for batch, limit_ms in ((8, 4.2), (64, 11.3))
        for who, share in ((_GRAPH, 0.8), (_INVARIANT_GRAPH, 0.7))
    ),
    _generates(1.3),
    _beside("a prompt of 8192 tokens, invariant", "qwen3-8b prompt of 8192", "prompt_ms", 1 / 0.95, INVARIANT, OURS),
    _whole_models(
        "training, invariant steps over normal ones",
        INVARIANT,
        OURS,
        {
            **{f"qwen3-8b {tokens} tokens": 0.97 for tokens in (4096, 8192)},
            "qwen3-30b-a3b 4096 tokens, 4 layers": 0.95,
        },
    ),
    Goal(_LOGITS, DECODE, _equal_logits, target="0"),
)  # fmt: skip
_GPT2, _MEDIUM, _QWEN3 = "gpt2", "mingpt-tile-medium", "qwen3-8b decode, batch"
_ENGINE = (
    _at_most(INFERENCE, "forward_ms", 0.15, "engine, tile-medium's logits", f"{_MEDIUM} forward, 8 x 128", "≤ 0.15 ms"),
    _at_most(INFERENCE, "forward_ms", 0.62, "engine, GPT-2's logits", f"{_GPT2} forward, 8 x 128", "≤ 0.62 ms"),
    _beside(
        "engine, logits of small models", "mingpt-", "forward_ms", 1 / 1.3, than="torch-graph", ending="4 x 64",
        benchmark=INFERENCE,
    ),
    _at_most(
        INFERENCE, "step_ms", 0.18, "engine, a token of GPT-2", f"{_GPT2} decode, batch 1, context 512", "≤ 0.18 ms"
    ),
    *(
        _at_most(
            INFERENCE, "step_ms", most, f"engine, a token of Qwen3-8B, batch {batch}",
            f"{_QWEN3} {batch}, context 4096", f"≤ {most:g} ms",
        )
        for batch, most in ((1, 3.9), (64, 14.1))
    ),
    _beside(
        "engine, a token by int8 weights", f"{_QWEN3} 1, context 4096", "step_ms", 1 / 1.6, INT8, OURS,
        benchmark=INFERENCE,
    ),
    _at_most(INFERENCE, "all_mb", 10, "engine, installed with GPT-2's kernels", _GPT2, "≤ 10 MB"),
    _at_most(
        INFERENCE, "without_load_s", 0.3, "engine, a process's first logits", f"{_GPT2} start, first logits",
        "≤ 0.3 s but for the weights",
    ),
    _at_most(
        INFERENCE, "without_load_s", 0.5, "engine, a process's first token", f"{_GPT2} start, first token",
        "≤ 0.5 s but for the weights",
    ),
)  # fmt: skip
GOALS = (
    _kernel_goal("rms_norm", ("forward",), 0.90, _NORMS),
    _kernel_goal("rms_norm", ("backward", "forward_backward"), 0.85, _NORMS),
    _kernel_goal("swiglu", _BOTH, 0.85),
    _kernel_goal("rope", _BOTH, 0.85),
    _at_most("kernels", "forward", 36.9, "rms_norm forward, by two compilers", cases=_NORMS[0]),
    _at_most("kernels", "backward", 57, "rms_norm backward, by two compilers", cases=_NORMS[0]),
    _kernel_goal("fused_add_rms_norm", ("forward", "forward_backward"), 0.85),
    _kernel_goal("fused_add_rms_norm", ("backward",), 0.92),
    _kernel_goal("qk_norm_rope", ("forward", "forward_backward"), 0.85),
    _kernel_goal("qk_norm_rope", ("backward",), 0.88),
    _at_most("kernels", "forward_backward", 800, "cross_entropy forward_backward", cases=_LOSS),
    _at_most("kernels", "forward_backward", 36000, "fused_linear_cross_entropy forward_backward", cases=_HEADS),
    _at_most(
        "kernels", "extra_peak", 700, "fused_linear_cross_entropy, memory above inputs and gradients", cases=_HEAD
    ),
    *_SUITE_GOALS,
    _rate("attention", _ATTENTION, "forward", 584),
    _rate("attention", _ATTENTION, "backward", 1.3, than="sdpa-flash"),
    _rate("linear", _LINEAR, "forward", 0.95, than="torch"),
    _no_worse_than_peers(
        "tokens_per_s", 1.10, "training, tokens a second", "≥ 1.10 x the best peer", more_is_better=True
    ),
    _no_worse_than_peers("peak_gib", 1.0, "training, peak memory", "≤ the best peer", more_is_better=False),
    _at_most("train", "first_step_lag_s", 0.5, "training, first step over the second", target="≤ 0.5 s"),
    _whole_models(
        "training, eager steps over torch.compile by layer",
        f"{OURS}-torch-adamw",
        _COMPILED,
        dict.fromkeys(_CAPTURED, 1.1),
    ),
    _whole_models("training, captured steps over torch.compile by layer", f"{OURS}-graphs", _COMPILED, _CAPTURED),
    _whole_models(
        "training, captured steps over eager ones",
        f"{OURS}-graphs",
        f"{OURS}-torch-adamw",
        {f"qwen3-8b {tokens} tokens": 1.03 for tokens in (2048, 4096)},
    ),
    _rates_in_8_bits("training by 8-bit floats, tokens a second", _IN_8_BITS),
    _in_8_bits(
        "training by 8-bit floats, over torchao",
        1.1,
        lambda name: name.startswith("torchao-fp8"),
        "torchao's 8-bit floats",
    ),
    _in_8_bits(
        "training by 8-bit floats, over bfloat16 peers",
        1.3,
        lambda name: is_in_bfloat16(name) and not name.startswith(OURS),
        "the best peer in bfloat16",
        ("llama-3-8b", "qwen2.5-7b", "mistral-7b", "phi-4", "olmo-2-7b"),
    ),
    _in_8_bits(
        "training by 8-bit floats, over bfloat16",
        1.25,
        lambda name: name == OURS,
        "tilekern in bfloat16",
        ("gemma-2-9b",),
    ),
    _smaller_in_8_bits("training by 8-bit floats, peak memory", 0.95, [f"qwen3-8b {n} tokens" for n in (4096, 8192)]),
    *_family("llama-3-8b", 1.25, most_gib=11.2),
    *_family("qwen2.5-7b", 1.25, most_gib=11.8),
    *_family("gemma-2-9b", 1.7),
    *(goal for model in _OTHERS for goal in _family(model, 1.2)),
    *_family("gpt2", 1.3),
    *_family("gpt-oss-20b", 2.2),
    *_family("qwen3-30b-a3b", 1.3),
    _layer("gpt-oss-20b", 4096, 5.0),
    _layer("gpt-oss-20b", 8192, 9.8),
    _layer("qwen3-30b-a3b", 4096, 3.2),
    _layer("qwen3-30b-a3b", 8192, 4.8),
    _skewed(1.15),
    _at_most(
        EXPERTS,
        KEPT,
        0.45,
        "layer of experts, kept for the backward",
        cases=label("gpt-oss-20b", 8192, BALANCED),
        target="≤ 0.45 GiB",
    ),
    _faster_layer(FROZEN, 1.2),
    _faster_layer(LORA, 1.2),
    _at_most(EXPERTS, WAITS, 0, "layer of experts, waits of the host for the GPU", target="0"),
    _lag_beside_unpatched(0.3),
    *_GENERATION,
    *_ENGINE,
    Goal("8-bit floats, loss beside bfloat16's", OF_FP8, _near_curves),
    Goal("8-bit floats, gradients beside bfloat16's", OF_FP8, _near_gradients),
    Goal("host time of one op call", "host", _host),
    _at_most(
        "startup", "first_step_lag", 0.3, "first step over the second, fresh process", target="≤ 0.3 s over the second"
    ),
    _at_least("compile", "tileiras_share", 0.8, "cores' time spent in tileiras"),
    _at_least("compile", "distinct_candidates", 150, "distinct candidates"),
    _at_least("compile", "share_of_linear", 0.9, "compile stage on all cores, of so many times one core"),
    _at_most("tune", "whole_s", 120, "a whole tune", target="≤ 2 min"),
    _at_most("gpus", "share_of_one", 0.6, "measure stage on several GPUs, of one GPU's time"),
    _at_least("races", "share_near_best", 0.95, "tuner's choices within 1 % of the best"),
    _at_least("races", "share_repeated", 0.95, "tuner's choices within 1 % of the next run's"),
    _at_most("races", "gpu_share_of_search", 0.2, "GPU time of a race, of cuda.tile's search"),
    _at_most("host", "lookup", 3, "lookup of a known problem"),
    _at_most("startup", "first_launch", 2, "first load of a kernel"),
    _at_most("regret", "median_regret", 1.05, "predicted winner's regret, median"),
    _at_most("regret", "p90_regret", 1.15, "predicted winner's regret, 90th percentile"),
    _at_most("startup", "import", 50, "import tilekern, without torch"),
    _at_most("startup", "process", 0.4, "python -m tilekern.cache_tools ls, whole process", cases="cache_tools ls"),
    _at_most("cache_scale", "ls_filtered", 1, "cache_tools ls with a filter, whole process", needs_gpu=False),
    _at_most("cache_scale", "lookup", 0.3, "lookup in a fresh process", needs_gpu=False),
    _at_most("cache_scale", "lookup_off_disk", 0.3, "lookup of files that are not in memory", needs_gpu=False),
    _at_most("cache_scale", "start", 60, "a job's start: import, layers and lookups", needs_gpu=False),
    _at_least("cache_scale", "verify_rate", 500, "cache_tools verify on one core", needs_gpu=False),
)
