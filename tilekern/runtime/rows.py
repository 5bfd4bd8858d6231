"""Which kernels compute rows of tokens, so that the invariant mode asks them for a bit class."""

from __future__ import annotations

import re

from tilekern.spec import Problem

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
