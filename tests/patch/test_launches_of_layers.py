"""Beside its kernels and matrix products a decoder layer as one op launches few operations of torch."""

import sys
from collections import Counter

import pytest
import torch
from test_whole_layers import of_family
from torch.utils._python_dispatch import TorchDispatchMode

import tilekern
from tilekern.ops.projections import gradient, input_gradient
from tilekern.patch.stepping import _AUTOCAST
from tilekern.runtime.recorder import products_cast

# On meta these widen what they multiply, as on the CPU; on a GPU a product itself gives float32.
WIDENING = {gradient.__code__, input_gradient.__code__}
PRODUCTS = {"mm", "addmm", "addmm_"}
# What launches nothing.
FREE = PRODUCTS | {
    "_unsafe_view", "alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "new_empty",
    "new_empty_strided", "promote_types", "resize_", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose",
    "unsqueeze", "view",
}  # fmt: skip


class Launches(TorchDispatchMode):
    """Counts the operations of torch that launch something by themselves."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, frame = func.overloadpacket.__name__, sys._getframe()
        while frame is not None and frame.f_code not in WIDENING:
            frame = frame.f_back
        if name not in FREE and frame is None:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def made(family, kind, dtype):
    """A model on meta of which all learns, or nothing, or adapters, of float32 or of the weights' dtype."""
    with torch.device("meta"):
        model = of_family(family, dtype=dtype)
    if kind == "frozen":
        model.requires_grad_(False)
    elif kind.startswith("adapters"):
        peft = pytest.importorskip("peft")
        adapters = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0)
        is_wide = kind == "adapters of float32"
        model = peft.get_peft_model(model, adapters, autocast_adapter_dtype=is_wide).get_base_model()
    return model


def launches_of(family, kind, dtype, is_cast):
    tilekern.apply()
    with tilekern.trace(gpu="H200") as trace, _AUTOCAST.off_on_meta(), products_cast("cpu"):
        trace.stands_for = "cpu"
        model = made(family, kind, dtype)
        x = torch.empty(2, 9, model.config.hidden_size, dtype=dtype, device="meta", requires_grad=True)
        places, decoder = torch.empty(1, 9, dtype=torch.long, device="meta"), model.model
        angles = decoder.rotary_emb(x.detach(), places, *(["full_attention"] if family == "gemma3" else []))
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast), Launches() as forward:
            y = decoder.layers[1](x, position_embeddings=angles, attention_mask=None)
        with Launches() as backward:
            y.backward(torch.empty_like(y))
    assert tilekern.report(model).whole == {"model.layers.1": 1}
    return forward.found, backward.found


# Under autocast over float32 the backward casts the slopes of both halves' last products.
CAST = {"_foreach_copy_": 1, "add": 1}, {"_to_copy": 2}
JOINED = {"cat": 2}
# By what learns, and the dtype of the weights.
AUTOCAST = {
    ("all", "float32"): CAST,
    ("frozen", "float32"): CAST,
    ("adapters", "float32"): CAST,
    ("adapters of float32", "bfloat16"): ({"_foreach_copy_": 1, "add_": 1}, {}),
}
WITHOUT = {
    "all": ({"add_": 1}, {}),
    "frozen": ({"add_": 1}, {}),
    "adapters": (JOINED | {"add_": 1}, JOINED),
    # Their products read rows and slopes in float32, each cast once in a direction, and are added by themselves.
    "adapters of float32": (JOINED | {"_to_copy": 4, "add_": 8}, JOINED | {"_to_copy": 11, "add_": 4}),
}


def of(family, dtype, forward, backward):
    """Of Gemma-3's layers the last norm adds in its launch, and the first one's gradient does not."""
    if family != "gemma3" or dtype == "float32":
        return forward, backward
    return Counter(forward) - Counter(add_=1), Counter(backward) + Counter(add_=1)


@pytest.mark.parametrize(("kind", "dtype"), AUTOCAST)
@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3"])
def test_under_autocast(family, kind, dtype):
    forward, backward = AUTOCAST[kind, dtype]
    assert launches_of(family, kind, getattr(torch, dtype), True) == of(family, dtype, forward, backward)


@pytest.mark.parametrize("kind", WITHOUT)
@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3"])
def test_in_a_half_type(family, kind):
    assert launches_of(family, kind, torch.bfloat16, False) == of(family, "bfloat16", *WITHOUT[kind])
