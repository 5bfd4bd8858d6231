"""Norms with a residual that let the next kernel be launched early with many rows too.

The kernels are ``fused_add_layer_norm_forward`` and ``fused_add_rms_norm_forward``, which wait by themselves and let
the next kernel be launched with few rows alone (:mod:`tilekern.kernels.families.overlap`). What they read has just been
written, so they are timed with it in L2.
"""

from __future__ import annotations

import dataclasses

from tilekern.kernels import fused_add_layer_norm, fused_add_rms_norm
from tilekern.spec import Config, DeviceKernel, KernelSpec, Problem


def _spec(spec: KernelSpec) -> KernelSpec:
    def implement(problem: Problem, config: Config) -> DeviceKernel:
        made = spec.device(problem, config)
        constants = tuple((name, True if name == "few" else value) for name, value in made.constants)
        return dataclasses.replace(made, constants=constants)

    return dataclasses.replace(
        spec,
        name=f"early_{spec.name}",
        summary=f"{spec.summary}; the next kernel is launched before it has ended",
        module=__name__,
        implement=implement,
        inputs_in_l2=True,
    )


SPECS = tuple(map(_spec, (fused_add_layer_norm.FORWARD, fused_add_rms_norm.FORWARD)))
