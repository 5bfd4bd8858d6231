import torch
from spec_samples import assert_right, inputs_of, one_of_each, sized

from tilekern.kernels import spec_named

BACKWARD = spec_named("fused_rms_norm_add_rms_norm_backward")


def test_rows_beyond_the_last_add_nothing_where_eps_is_0():
    """Of zeros both rstd are infinite then; three rows end within a step of any number of rows but one and three."""
    problem = sized(BACKWARD, "float32", rows=3, columns=40)
    inputs = inputs_of(BACKWARD, problem) | {"eps": 0.0}
    several = [config for config in one_of_each(BACKWARD, problem, "tile_m") if config["tile_m"] > 1]
    assert_right(BACKWARD, problem, several, inputs)
    assert torch.isfinite(BACKWARD.reference(**inputs, cast=False)["dweight"]).all()
