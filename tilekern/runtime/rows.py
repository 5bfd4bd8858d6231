"""Which kernels compute rows of tokens, so that the invariant mode asks them for a bit class, and whether one runs."""

from __future__ import annotations

import re
from collections.abc import Container
from typing import TYPE_CHECKING, Any

from tilekern.compile.library import library_of
from tilekern.spec import ALIGNED, INVARIANT, Config, KernelSpec, Problem
from tilekern.spec.bits import agree, joined, sizes_of_class

if TYPE_CHECKING:
    from tilekern.cache import Hit, Record

# Gradients and losses are sums over tokens, an optimizer has none, and checks of labels give no numbers.
_SUMS = re.compile(
    r".*_backward(_remake)?|attention_(delta|sums|dkdv_apart|(dkdv|dq)(_kept)?)|column_sum|dyt_sums|"
    r"grouped_(weight_gradient|sum)|scale|adamw|labels|cross_entropy_(forward|fused)|fused_linear_.*|kl_div.*|"
    r"(logits_)?jsd.*|tvd.*|router_losses_forward"
)
# These copy rows, count and sort: no bit of theirs is rounded. A token's embedding and its position's are two numbers,
# whose sum has one order. The parts of a token's attention have one order and whole exponents, which leave no choice to
# the kernel that adds them up. Who joins products in one launch sees to it that they are added up as each alone.
# Kernels that lay out weights see no tokens, and round each number by itself.
_EXACT = frozenset((
    "advance", "cache_rows", "decode_join", "dequantize_rows", "embedding", "gather_rows", "greedy", "greedy_join",
    "greedy_parts", "lay_out", "quantize_rows", "route_count", "route_place", "sample", "skinny_projections",
))  # fmt: skip

# The mode has other launches in their place.
_ELSEWHERE = frozenset((
    "early_attention_forward", "early_fused_add_layer_norm_forward", "early_fused_add_rms_norm_forward", "early_linear",
    "fp8_block_matmul", "fp8_blocks", "fp8_expert_weights_turned", "fp8_experts_gate", "fp8_gated_forward",
    "fp8_grouped_matmul", "fp8_grouped_turned", "fp8_grouped_weight_gradient", "fp8_matmul", "fp8_rows", "fp8_turned",
    "fp8_weight_blocks", "mxfp8_blocks", "mxfp8_matmul", "narrow_block", "narrow_linear", "skinny_held_linear",
    "token_attention",
))  # fmt: skip


def has_rows(kernel: str, problem: Problem | None = None) -> bool:
    """Return whether a kernel rounds rows of tokens, whose bits should not depend on other rows, in the mode."""
    if kernel in _EXACT or kernel in _ELSEWHERE or _SUMS.fullmatch(kernel):
        return False
    return problem is None or not problem.get("a_transposed", False)  # a product that sums over tokens


def why_varies(
    spec: KernelSpec, problem: Problem, found: Hit, classes: dict[tuple[Any, ...], str],
    libraries: Container[str] | None,
) -> str:  # fmt: skip
    """Return why a row of a problem may depend on others; empty if its record's invariant kernel is to run.

    Args:
        spec: the kernel.
        problem: the problem.
        found: the record that serves it.
        classes: the bit classes that run; the record's is added.
        libraries: the libraries that are here; None if that is not asked.
    """
    facts = (found.record.measurement or {}).get(INVARIANT)
    if facts is None:
        return "its record names no kernel of one bit class; tune with --invariant"
    library = library_of(facts["config"])
    if library is not None and libraries is not None and library not in libraries:
        return f"{library}, which its invariant record names, is not here"
    if library is None and (found.lost or not _has_artifact(found.record, facts["config"])):
        return f"the kernel that its record names cannot be loaded: {found.lost or 'the record has no artifact of it'}"
    own = _key(spec, problem)
    # A kernel that serves beside another takes its bits, of any number of heads.
    same = (bits for key, bits in classes.items() if key == own or (key[0] == own[0] and spec.name != own[0][0]))
    if not all(agree(bits, facts["bits"]) for bits in same):
        return "records of its sizes name two bit classes; tune all sizes in one run with --invariant"
    classes[own] = joined(classes.get(own, facts["bits"]), facts["bits"])
    return ""


def overruled(spec: KernelSpec, problem: Problem, classes: dict[tuple[Any, ...], str]) -> set[str]:
    """Return the kernels that have served beside a problem's and are of another class; ``classes`` loses theirs.

    Two models that were tuned apart may share a record of decoding, and have attention of two classes.
    """
    own = _key(spec, problem)
    beside = [key for key in classes if key[0] == own[0] and own[1] == own[0][0] != key[1]]
    wrong = [key for key in beside if not agree(classes[key], classes[own])]
    for key in wrong:
        del classes[key]
    return {key[1] for key in wrong}


def _key(spec: KernelSpec, problem: Problem) -> tuple[Any, ...]:
    """Return what problems have in common that run one class: first that of which their kernels should be tuned."""
    exact = (problem[d.name] for d in spec.dimensions if d.kind == "exact")
    return sizes_of_class(spec, problem), spec.name, *exact


def invariant_artifact(record: Record) -> str:
    """Return the name of the artifact of a record's invariant kernel: its own, or the winner's."""
    return INVARIANT if INVARIANT in record.artifacts else ALIGNED


def _has_artifact(record: Record, config: dict[str, Any]) -> bool:
    artifact = record.artifacts.get(invariant_artifact(record))
    return artifact is not None and Config(artifact.config) == Config(config)
