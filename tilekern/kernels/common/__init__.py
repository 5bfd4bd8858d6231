"""Families of kernels, each stated once: ``elements``, ``rows``, ``losses``, and composites over a ``head``."""
