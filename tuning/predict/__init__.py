"""Rank candidates without a GPU: the roofline, the costs of a launch, and the cost model over them."""
