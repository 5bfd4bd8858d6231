"""Families of kernels, each stated once: ``elements``, ``rows`` and ``losses``."""
