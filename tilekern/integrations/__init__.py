"""Integrations with other programs: ``import torch``, transformers, TRL, Liger-Kernel and the library ``kernels``."""
