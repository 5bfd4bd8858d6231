"""Chooses the kernels of a token in the engine's own step: what is fastest in a row need not make a token fastest."""
