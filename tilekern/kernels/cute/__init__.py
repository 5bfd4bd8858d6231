"""Kernels of CuTe DSL, imported only to compile; a :class:`tilekern.spec.CuteKernel` names each class.

They take the arguments of cuTile's launcher (:mod:`tilekern.kernels.cute.arguments`), so it can launch their cubins.
CuTe DSL compiles the same formulas as cuTile (:mod:`tilekern.kernels.cute.words`).
"""
