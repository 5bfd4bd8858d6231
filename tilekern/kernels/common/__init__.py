"""Families of kernels, each stated once: over elements (``elements``), and over rows (``rows``)."""
