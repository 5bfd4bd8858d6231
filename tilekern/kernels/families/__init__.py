"""Families of kernels, each stated once: ``elements``, ``rows``, ``losses`` and ``rotations``."""
