"""Kernels of CuTe DSL, imported only to compile; a :class:`tilekern.spec.CuteKernel` names each class.

They take arguments as cuTile's launcher passes them (:mod:`tilekern.kernels.cute.arguments`), so that it launches their
cubins as well. CuTe DSL compiles the same formulas as cuTile (:mod:`tilekern.kernels.cute.words`).
"""
