"""Composites over a language model's head: they launch kernels and products chunk by chunk, and compile nothing.

:func:`tilekern.kernels.all_specs` finds their specs with those of kernels.
"""
