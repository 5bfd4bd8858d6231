"""From what a person names to the problems of a plan: a model whose steps are traced, a file, the wanted list, an op.

A plan is a traced step (:mod:`tilekern.runtime.recorder`). This is the one part of ``tuning`` that uses the ops and the
patches, and imports torch and transformers where a model is named, unless the steps are the engine's.
"""
