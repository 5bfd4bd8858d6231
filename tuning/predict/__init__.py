"""Ranks candidates with no GPU: the roofline, what a launch has to do, and the cost model over it."""
