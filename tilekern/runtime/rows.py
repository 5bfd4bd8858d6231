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
    r".*_backward(_remake)?|attention_(delta|dkdv|dq)|column_sum|dyt_sums|grouped_(weight_gradient|sum)|scale|adamw|labels|"
    r"cross_entropy_(forward|fused)|fused_linear_.*|kl_div.*|(logits_)?jsd.*|tvd.*|router_losses_forward"
)
# These copy rows, count and sort: no bit of theirs is rounded.
_EXACT = frozenset(("gather_rows", "greedy", "route_count", "route_place", "sample"))


def has_rows(kernel: str, problem: Problem | None = None) -> bool:
    """Return whether a kernel rounds rows of tokens, whose bits should not depend on other rows."""
    if kernel in _EXACT or _SUMS.fullmatch(kernel):
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
        classes: the bit class that runs, by kernel and the sizes that are not bucketed; the record's is added.
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
    sizes = sizes_of_class(spec, problem)
    running = classes.get(sizes, facts["bits"])
    if not agree(running, facts["bits"]):
        return "records of its sizes name two bit classes; tune all sizes in one run with --invariant"
    classes[sizes] = joined(running, facts["bits"])
    return ""


def invariant_artifact(record: Record) -> str:
    """Return the name of the artifact of a record's invariant kernel: its own, or the winner's."""
    return INVARIANT if INVARIANT in record.artifacts else ALIGNED


def _has_artifact(record: Record, config: dict[str, Any]) -> bool:
    artifact = record.artifacts.get(invariant_artifact(record))
    return artifact is not None and Config(artifact.config) == Config(config)
