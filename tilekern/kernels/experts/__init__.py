"""Kernels around the products of a layer of experts: router, routing, copies of rows, the gate, the weighted sum.

T tokens, K experts for each token, E experts. Slot t * K + k is the k-th choice of token t. Rows are slots sorted by
expert: ``offsets`` int32 [E] are the ends of the experts' rows (``offs`` of torch's grouped product), ``order`` int32
[T * K] the slot of each row, ``ranks`` int32 [T * K] the row of each slot, ``experts`` int32 [T * K] the expert of each
row. An id outside 0 to E - 1 (under expert parallelism, an expert of another rank) means no expert: its rows come last,
their expert is E, no product writes them, and no kernel reads their numbers.
"""

from tilekern.kernels.experts import combine, gate, gather, route, router, router_losses

SPECS = (*router.SPECS, *router_losses.SPECS, *route.SPECS, *gather.SPECS, *gate.SPECS, *combine.SPECS)
