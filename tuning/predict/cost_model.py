"""Compute the time of a launch from its terms: one formula, two sets of weights.

The terms are those of :mod:`tilekern.tuning.predict.launch_costs`.

The steps of one thread (its waits, its chain of instructions, its barriers) add up; the work of an SM's units overlaps,
but never completely, which the p-norm of the terms models. Every launch also has a constant cost, and a factor covers
traits of the code that counts do not show:

    seconds = (overhead + (sum of (w_i t_i)^p over the parallel terms + (sum of w_j t_j over the serial ones)^p)^(1/p))
              * exp(sum of v_k trait_k)

No weight of a term is negative: more bytes, more spilled values or more waits are never predicted to be faster.

The weights come from ``python -m benchmarks.fit_cost_model`` on a sweep of Qwen3-8B, 2048 to 32768 tokens, measured on
an H200 on 21 November 2026 (driver 580.159.04): 4395 candidates of 109 problems bound by memory, 600 of 33 bound by the
matrix units. The time of the predicted winner over the best one, on all 157 problems: median 1.018 and 90th percentile
1.134 on what the weights were fitted to, 1.017 and 1.146 for problems left out of the fit, 1.019 and 1.160 for kernels
left out. The choice of terms and the default's bonus used the same sweep; with another bonus of 0.5 to 4 % the 90th
percentile is 1.158 to 1.160, with none 1.210. On an older sweep on another H200, 118 problems with the same code and no
libraries, these weights give 1.029 and 1.253, against 1.022 and 1.176 on the same problems of this sweep. No other
model of GPU was measured.

The figure of libraries is the median of their times over the roofline's in the same sweep, after subtracting the
overhead, which was set by hand: events around a library's call also see the host's work in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tilekern.tuning.predict.launch_costs import Costs


@dataclass(frozen=True)
class Weights:
    """The weights of one kind of kernel.

    Attributes:
        terms: factor of each term, by its name in :class:`tilekern.tuning.predict.launch_costs.Costs`; none is
        negative. serial: the names of the terms that add up. traits: coefficient of each trait. overhead_s: seconds
        that every launch takes. norm: the exponent p; terms add up at 1, and the largest alone counts at infinity.
    """

    terms: Mapping[str, float]
    serial: frozenset[str]
    traits: Mapping[str, float]
    overhead_s: float
    norm: float

    def seconds(self, costs: Costs) -> float:
        """Return the predicted time of a launch."""
        weighed = {name: weight * costs.terms[name] for name, weight in self.terms.items()}
        serial = sum(weighed[name] for name in self.serial)
        parallel = [weighed[name] for name in weighed.keys() - self.serial]
        work = math.fsum(value**self.norm for value in (*parallel, serial)) ** (1 / self.norm)
        factor = math.exp(math.fsum(weight * costs.traits[name] for name, weight in self.traits.items()))
        return (self.overhead_s + work) * factor


MEMORY = Weights(
    terms={
        "copy": 0.935,
        "intake": 0.51,
        "issue": 0.149,
        "access": 0.318,
        "local": 2.07,
        "boxes": 0.307,
        "latency": 0.329,
        "chain": 0.736,
        "barriers": 0.325,
        "blocks": 0.185,
        "start": 0.378,
    },
    serial=frozenset({"latency", "chain", "barriers", "blocks", "start"}),
    traits={
        "persistent": 0.055,
        "pipelined": -0.131,
        "specialised": 0.09,
    },
    overhead_s=4.99e-6,
    norm=2.035,
)
PRODUCTS = Weights(
    terms={
        "products": 0.675,
        "operands": 0.486,
        "steps": 0.364,
        "local": 0.343,
        "start": 0.37,
    },
    serial=frozenset({"start"}),
    traits={
        "uneven": 0.061,
        "shared_sm": -0.067,
        "tile": 0.243,
        "latency_hint": -0.017,
        "alone": 0.121,
        "split": 0.222,
    },
    overhead_s=2.17e-6,
    norm=3.307,
)
# A library's call takes this, and the roofline's time times a factor; composites launch kernels of ours in between.
LIBRARY_OVERHEAD_S = 100e-6
LIBRARY, COMPOSITE = 1.61, 1.67
# Libraries with their own figures, by name. On an H200 torch 2.11's grouped products took 1.74 to 2.77 times
# the roofline's time: all six of a layer of GPT-OSS-20B or Qwen3-30B-A3B, 4096 or 8192 tokens, balanced routing.
LIBRARIES = {"torch": 1.9}
# Kernels whose library has its own seconds and factor on GPUs with scaled products. The roofline counts products of
# 8-bit floats at bfloat16's rate; fitted to 170 products with scales of rows and 40 with scales of blocks, by torch
# 2.11 on an H200 (fp8-h200.pack).
LIBRARY_CALLS = {"fp8_matmul": (10e-6, 0.70), "fp8_block_matmul": (10e-6, 0.93)}
# cuBLAS's products of rows that are no whole 16 bytes take this many times as long: on an H200 GPT-2's logits of 4096
# tokens, 50257 wide, took 3.36 ms, where a kernel takes 0.51, and its step of 8192 tokens 26 ms in place of 16.
ODD_ROWS = 6.0
# The kernel's author chose the default: another config must be predicted faster by more than this to be preferred.
DEFAULT_BONUS = 0.01
