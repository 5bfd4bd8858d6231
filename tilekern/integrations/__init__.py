"""Fitting into programs of others: ``import torch``, transformers, TRL, Liger-Kernel and the library ``kernels``."""
