"""Compiling: device functions become cubins, for any GPU that the compilers know."""
