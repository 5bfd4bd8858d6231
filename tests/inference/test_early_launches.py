"""Which launches of many rows overlap the end of the one before: all that can, of models of some width."""

import pytest
from small_models import counts_of

from tilekern.inference.architectures import architecture_of
from tilekern.inference.planning import DryRun
from tilekern.runtime import dispatch
from tilekern.runtime.recorder import Trace
from tilekern.spec.targets import resolve

GPT2 = {
    "model_type": "gpt2", "vocab_size": 97, "n_embd": 768, "n_layer": 3, "n_head": 12, "n_positions": 512,
    "activation_function": "gelu_new",
}  # fmt: skip
OVERLAPPING = {"early_linear", "early_attention_forward", "early_fused_add_layer_norm_forward"}
OTHERS = {"matmul", "attention_forward", "fused_add_layer_norm_forward"}


def launches_of(config=GPT2, dtype="bfloat16", rows=(8, 128), **how):
    """How often whole sequences launch each kernel."""
    found = Trace(resolve("H200"))
    DryRun(found, architecture_of(config), dtype, **how).forward(*rows)
    return counts_of(found)


def test_all_launches_of_a_layer_overlap():
    """The first norm is not behind a residual."""
    norms = {"layer_norm_forward": 1, "early_fused_add_layer_norm_forward": 2 * 3}
    products = {"early_linear": 4 * 3 + 1, "early_attention_forward": 3}
    assert launches_of() == {"embedding": 1} | norms | products


@pytest.mark.parametrize(
    "how",
    [{"rows": (8, 8)}, {"dtype": "float32"}, {"config": GPT2 | {"n_embd": 1032}}, "invariant"],
    ids=str,
)
def test_others_do_not(how):
    """Few rows have kernels of their own, TF32 and the invariant mode those of any rows, and wide models need none."""
    before = dispatch.set_invariant(on=how == "invariant")
    try:
        found = launches_of(**({} if how == "invariant" else how))
    finally:
        dispatch.set_invariant(on=before)
    assert not OVERLAPPING & found.keys()
    assert OTHERS & found.keys()


def test_int8_weights_are_widened_right_before_a_product_that_waits():
    found = launches_of(int8=True)
    assert found["dequantize_rows"] >= 4 * 3
    assert found["early_linear"] >= 4 * 3
