"""Kernels of CuTe DSL, which only a compile imports: each class is one that a :class:`tilekern.spec.CuteKernel` names.

Their arguments come as cuTile's launcher passes them (:mod:`tilekern.kernels.cute.arguments`), so that it launches
their cubins as well. Where a family's kernels are formulas, CuTe DSL compiles the very formulas that cuTile compiles
(:mod:`tilekern.kernels.cute.words`).
"""
