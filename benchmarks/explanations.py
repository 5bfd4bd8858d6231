"""Why a figure misses its target: what bounds it and what was tried. Keyed by the report's ``what`` and ``on``."""

from __future__ import annotations

_HOST = (
    "Most of this time looks like torch's own: its engine hands the backward to another thread and back, and torch's "
    "own swiglu, which has no Python in it, takes 82 us. "
)
_BATCHES = (
    "The host was a third slower in some cases of this run than in others: the bare launch of the same kernel takes "
    "6.3 us for rows and 7.5 for batches. In an earlier run of the day (cd7e8c8, no results file) what is above the "
    "launch was 1.21 times that of rows without gradients, and 0.94 times with them."
)
_POWER = (
    "The GPU is at its power limit: matrix products of random numbers, back to back, draw 701 W of 700 W and bring the "
    "clock down to 1462 MHz, where cuBLAS holds 674 TFLOP/s; the same products of zeros draw 508 W and reach 807 "
    "(`sustained.json`). In timed steps tilekern and the best peer draw 674 to 715 W (`train.json`, "
    "`train-compile.json`), so time that a kernel saves comes back in part as a lower clock. `train_profile.json` "
    "gives the parts of a step and the floor from each matrix product's, the attention's and the optimizer's own "
    "time, measured alone. "
)
_FLOOR = (
    "The floor itself is below 1.10 x the best peer. Tried without gain: cuTile products in place of cuBLAS's, back to "
    "back at the power limit (no results file holds that). "
)
_DETERMINISTIC = (
    "The default's attention repeats bit by bit and pays for it with seven products in place of five; the same run "
    "holds `tilekern-nondeterministic`, which may add dq up in any order, as every peer here does."
)
_COLD = (
    "The lag depends on what the machine has read from its disk before. With the digests of the sources noted, as a "
    "wheel has them, it is 0.61 s in the first process on a machine that had just started (`train-no-toolkit-cold`), "
    "0.43 s in the second (`train-no-toolkit`). An earlier commit, on another machine of the kind, took 1.26 and 0.87 "
    "s (no results file holds these): each job parsed the kernels for the digests of their sources, some quarter of a "
    "second of Python. `train` (0.54 s) and `train-32768` (0.53 s) are of that commit. "
    "The peers of one run take 0.31 to 5.2 s, and torch.compile 11.6 s. "
)
_CHUNKS = (
    "The peers that are as fast keep 2.0 to 2.4 GiB of logits (one of them is 3 % faster in the sweep over lengths); "
    "this takes chunks of 2048 rows, the fewest below the memory's target. Tried: chunks of 256 to 4096 rows, and the "
    "products by cuTile, which the tuner takes where they are faster: up to 4096 tokens of Qwen3-8B."
)
_DISK = (
    "A lookup waits twice for a machine's virtual disk: for the record, and then for its artifacts, which come while "
    "the record is parsed. The reads alone, by the calls that the lookup makes and with nothing parsed, hashed or "
    "checked, take more than half of the target (`disk_alone` below); what is left would have to do for the digests of "
    "three files and for the JSON parser. With the files in memory it takes what the lines above say, and as long "
    "in a small cache as in a large one. One file for a record and its artifacts would save one of the waits, and keep "
    "an artifact as often as there are records of it. "
)
_PARSING = (
    "Records of 5 kB are most of this mix: opening and reading the files, Python's JSON parser and the checks of each "
    "field all take longer than sha256 over the blobs, and the first two alone half of the time (no results file holds "
    "that). "
)
EXPLAINED = {
    ("qk_norm_rope backward", "qk_norm_rope 1x8192 32+8x128"): (
        "Against a copy of the six arrays that must move. The launch of column_sum, which adds the partial gradients "
        "of both weights up, is in the time. Tried without gain: loads without TMA, 8 and 32 heads a step, one, three "
        "and four blocks an SM."
    ),
    ("qk_norm_rope forward_backward", "qk_norm_rope 1x8192 32+8x128"): "See the backward.",
    ("linear_cross_entropy forward_backward", "linear_cross_entropy 8192x4096x128256"): (
        "25.8 TFLOP at 655 TFLOP/s; 36 ms are 717, and cuBLAS alone holds 671 to 691 at the power limit "
        "(`sustained.json`). By the GPU's counters (`counters.json`) cuBLAS's products keep the tensor cores 90 to 100 "
        "% busy, so the clock is all that could make them faster; they are 33 ms where each runs alone and cool. "
        + _CHUNKS
    ),
    ("linear_cross_entropy forward_backward", "linear_cross_entropy 8192x4096x151936"): (
        "30.6 TFLOP; 36 ms were 850 TFLOP/s, more than cuBLAS reaches on products of zeros (807, `sustained.json`). "
        + _CHUNKS
    ),
    ("training, first step over the second", "qwen3-8b 2048 tokens"): _COLD,
    ("training, first step over the second", "qwen3-8b 32768 tokens, checkpointing"): _COLD,
    ("training, tokens a second", "qwen3-8b 4096 tokens"): (
        "Reached against every peer but torch.compile layer by layer, which takes 71.8 GiB for it: 1.05 of that "
        "(`train-compile.json`). " + _POWER + "That floor is 11760 tokens a second."
    ),
    ("training, tokens a second", "qwen3-8b 8192 tokens"): _POWER + _FLOOR + _DETERMINISTIC,
    ("training, tokens a second", "qwen3-8b 16384 tokens"): _POWER + _FLOOR + _DETERMINISTIC,
    ("rms_norm backward", "rms_norm 8192x4096"): (
        "Two launches: dx with one row of partial dweight for each of 264 resident blocks, then column_sum over "
        "those rows, whose launch overlaps the first kernel's end (programmatic dependent launch, which gained some). "
        "Tried without gain: rows in chunks of 1024 columns, deeper TMA pipelines (latency 3 and 8), one to four "
        "blocks an SM, two rows a step, loads without TMA, rank-3 tiles that need fewer TMA instructions, both row "
        "sums in one reduction (kept: a barrier less). By the GPU's counters (`counters.json`) the first kernel keeps "
        "the L2 cache at 87 % of its peak rate and memory at 78 %; the second, of 5 us, neither above a quarter. What "
        "is left looks like the second, and the fill and drain of each block's loop of some 31 steps: with 32768 rows "
        "the same kernels reach 92 %."
    ),
    ("forward_backward with autograd", "swiglu 16x12288"): (
        _HOST + "Liger's Triton launch is what the rest saves; the forward alone takes 0.40 of Liger's."
    ),
    ("forward_backward with autograd", "swiglu 2x8x12288"): _HOST,
    ("forward_no_grad above the launch, of batches", "swiglu 2x8x12288"): _BATCHES,
    ("forward above the launch, of batches", "swiglu 2x8x12288"): _BATCHES,
    ("forward with autograd", "rope 1x16 32+8x128"): (
        "A launch of rope passes six arrays and thirteen constants and takes 5.3 us by itself; Liger turns q and k in "
        "place and allocates nothing. Next: launch a stand-in without the constants, which the cubin does not take."
    ),
    ("forward_backward with autograd", "rope 1x16 32+8x128"): (_HOST + "See the forward above for the rest."),
    ("first step over the second, fresh process", "qwen3-8b, 2 layers, 2048 tokens"): (
        "The unpatched model's own first step lags by 0.46 s on the same machine: cuBLAS and the attention library "
        "load their kernels in it. The patches add 0.05 s, in which the job finds and loads its artifacts."
    ),
    ("cores' time spent in tileiras", "qwen3-8b, 2048, 8192 tokens"): (
        "Sixteen cores finish in 14 s, of which the first seconds go into loading cuda-tile's front end once for all "
        "workers, and the last into the longest compiles. With two cores, where these weigh less, the same stage "
        "spends 90 % in tileiras (the run with 2 jobs). Done so far: the front end's result shared by candidates that "
        "differ in hints alone, torch kept out of the workers, workers forked from one loaded server, long compiles "
        "first."
    ),
    ("compile stage on all cores, of so many times one core", "qwen3-8b, whole tune"): (
        "99 % of the cores' time goes into the work itself (`work_share` in `tune.json`), and what is lost is the "
        "machine's: the same work takes 1.19 times as long when all sixteen cores compile as when one does, the same "
        "before the stage and after it. How much that is differs from host to host: 0.89 of linear on another one, and "
        "1.01 on 16 of 32 cores, told from few artifacts, where cores that share nothing but the machine reach 0.89 "
        "(`compile_sample.json`, its note). Less than 1 % of it is work that one core would do once, batches that two "
        "workers lower (a replay of the stage). Huge pages, which spare the compiler half of its page faults, make it "
        "no faster, and a heap that is not given back 2 % (no results file holds these). With two cores it is 0.947 "
        "(`compile_two_cores.json`)."
    ),
    ("a whole tune", "qwen3-8b, 2048, 4096, 8192, 16384, 32768 tokens"): (
        "The traced plan has 105 problems where guesses had 157, and 2912 timings where there were 4874; the compile "
        "stage fell from 43.5 to 38 s. The plan takes 15 s in place of 3.4: it imports torch and transformers (a plan "
        "of named problems, which makes no model, takes 7 s on that host, and the whole plan 9 elsewhere). The "
        "measure stage fell from 136 to 128 s only: where a library wins a problem, the best kernel now stands the "
        "whole battery of checks beside it. Next: take apart what the battery takes."
    ),
    ("lookup of files that are not in memory", "200 records"): _DISK,
    ("lookup of files that are not in memory", "100,000 records"): _DISK,
    ("cache_tools verify on one core", "usual mix"): _PARSING,
}

UNEXPLAINED = "not explained yet"
