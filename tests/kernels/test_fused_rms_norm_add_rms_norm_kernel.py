import torch
from spec_samples import configs, inputs_of, interpret, sized

from tilekern.kernels import spec_named

BACKWARD = spec_named("fused_rms_norm_add_rms_norm_backward")


def test_rows_beyond_the_last_add_nothing_where_eps_is_0():
    """Of zeros both rstd are infinite then; three rows end within a step of any number of rows but one and three."""
    problem = sized(BACKWARD, "float32", rows=3, columns=40)
    inputs = inputs_of(BACKWARD, problem) | {"eps": 0.0}
    tried = {config["tile_m"]: config for config in configs(BACKWARD, problem) if config["tile_m"] > 1}
    assert tried
    for config in tried.values():
        check = interpret(BACKWARD, problem, config, inputs)
        assert check.passed, check.reason
    assert torch.isfinite(BACKWARD.reference(**inputs, cast=False)["dweight"]).all()
