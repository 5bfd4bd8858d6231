"""Why a figure misses its target: what bounds it and what was tried. Keyed by the report's ``what`` and ``on``."""

from __future__ import annotations

_HOST = (
    "Most of this time looks like torch's own: its engine hands the backward to another thread and back, and torch's "
    "own swiglu, which has no Python in it, takes 141 us. "
)
EXPLAINED = {
    ("rms_norm backward", "rms_norm 8192x4096"): (
        "Two launches: dx with one row of partial dweight for each of 264 resident blocks, then column_sum over "
        "those rows, whose launch overlaps the first kernel's end (programmatic dependent launch, which gained some). "
        "Tried without gain: rows in chunks of 1024 columns, deeper TMA pipelines (latency 3 and 8), one to four "
        "blocks an SM, two rows a step, loads without TMA, rank-3 tiles that need fewer TMA instructions, both row "
        "sums in one reduction (kept: a barrier less). What is left looks like the fill and drain of each block's "
        "loop of some 31 steps: with 32768 rows the same kernels reach 92 %."
    ),
    ("forward_backward with autograd", "swiglu 16x12288"): (
        _HOST + "Liger's Triton launch is what the rest saves; the forward alone takes 0.41 of Liger's."
    ),
    ("forward with autograd", "rope 1x16 32+8x128"): (
        "A launch of rope passes six arrays and thirteen constants and takes 10.8 us by itself; Liger turns q and k in "
        "place and allocates nothing. Next: launch a stand-in without the constants, which the cubin does not take."
    ),
    ("forward_backward with autograd", "rope 1x16 32+8x128"): (_HOST + "See the forward above for the rest."),
    ("first step over the second, fresh process", "qwen3-8b, 2 layers, 2048 tokens"): (
        "0.39 s of it are the unpatched model's own (cuBLAS and the attention library load their kernels in the first "
        "step); tilekern adds 0.10 s, of which ten cubins at 0.5 ms are little: the rest is likely cuda-tile's first "
        "launch in a process."
    ),
    ("cores' time spent in tileiras", "qwen3-8b, 2048, 8192 tokens"): (
        "Sixteen cores finish in 14 s, of which the first seconds go into loading cuda-tile's front end once for all "
        "workers, and the last into the longest compiles. With two cores, where these weigh less, the same stage "
        "spends 90 % in tileiras (the run with 2 jobs). Done so far: the front end's result shared by candidates that "
        "differ in hints alone, torch kept out of the workers, workers forked from one loaded server, long compiles "
        "first."
    ),
}
UNEXPLAINED = "not explained yet"
