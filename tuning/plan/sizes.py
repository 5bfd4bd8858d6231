"""Counts the sizes of layers in public configurations, and holds those that occur often.

Counted are the defaults of transformers' causal language models, which are mostly those of the first published
checkpoint, and the presets in :data:`MODELS`; encoders are not. ``python -m tilekern.tuning.plan.sizes`` counts again
and prints the data.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from tilekern.tuning.plan.presets import PRESETS

# The presets that people train beside lessons, which minGPT and the larger sizes of GPT-2 are for today.
MODELS = tuple(name for name in PRESETS if not name.startswith(("mingpt-", "gpt2-")))
# A size of fewer configurations is left to the tuning of its model.
LEAST = 4
# The release of transformers whose defaults were counted.
COUNTED = "5.24"


class Layer(NamedTuple):
    """The sizes of a decoder layer: of its hidden states, its MLP, and its attention."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int

    def parts(self) -> set[tuple[Any, ...]]:
        """Return the sizes that kernels of the layer have one at a time."""
        return {("hidden", self.hidden), ("intermediate", self.intermediate), ("heads", *self[2:])}


# Layers of public configurations that have, together, each size that occurs at least LEAST times.
LAYERS: tuple[Layer, ...] = (
    Layer(768, 3072, 12, 12, 64),
    Layer(1024, 3072, 16, 8, 128),
    Layer(2048, 6144, 16, 16, 64),
    Layer(2048, 8192, 16, 16, 128),
    Layer(2048, 8192, 48, 8, 128),
    Layer(2304, 9216, 8, 4, 256),
    Layer(2560, 6144, 32, 32, 64),
    Layer(2816, 6912, 32, 32, 64),
    Layer(3072, 8192, 24, 8, 128),
    Layer(4096, 10240, 32, 2, 128),
    Layer(4096, 11008, 32, 32, 128),
    Layer(4096, 12288, 16, 4, 256),
    Layer(4096, 14336, 32, 8, 128),
    Layer(4096, 16384, 64, 64, 64),
    Layer(5120, 8192, 40, 8, 128),
    Layer(6144, 12288, 64, 64, 64),
    Layer(7168, 18432, 64, 64, 64),
    Layer(8192, 22528, 64, 64, 128),
    Layer(8192, 28672, 64, 8, 128),
)
# Sizes of hidden states with sizes of vocabularies, of at least LEAST configurations.
VOCABULARIES: tuple[tuple[int, int], ...] = (
    (2048, 128256),
    (2048, 151936),
    (4096, 32000),
    (4096, 102400),
    (4096, 131072),
    (4096, 151552),
    (4096, 151936),
    (4096, 262144),
    (8192, 256000),
)


def counted() -> tuple[tuple[Layer, ...], tuple[tuple[int, int], ...]]:
    """Return :data:`LAYERS` and :data:`VOCABULARIES` as the installed transformers has them."""
    layers: Counter[Layer] = Counter()
    vocabularies: Counter[tuple[int, int]] = Counter()
    for config in _configs():
        if config.is_encoder_decoder or not getattr(config, "is_decoder", True):
            continue
        with contextlib.suppress(Exception):  # transformers has no one value of what differs from layer to layer
            hidden, heads = config.hidden_size, config.num_attention_heads
            kv_heads = getattr(config, "num_key_value_heads", None) or heads
            head_dim = getattr(config, "head_dim", None) or hidden // heads
            layers[Layer(hidden, int(config.intermediate_size), heads, kv_heads, head_dim)] += 1
            vocabularies[hidden, config.vocab_size] += 1
    often = tuple(sorted(sizes for sizes, times in vocabularies.items() if times >= LEAST))
    return tuple(_covering(layers)), often


def _covering(layers: Counter[Layer]) -> Iterable[Layer]:
    """Return layers in which each frequent part occurs: one after the other, the one with most that no other has.

    Of several, one with no rare parts, which would be tuned for nothing.
    """
    times: Counter[tuple[Any, ...]] = Counter()
    for layer, count in layers.items():
        times.update(dict.fromkeys(layer.parts(), count))
    often = {part for part, count in times.items() if count >= LEAST}
    missing, chosen = set(often), []
    while missing:
        best = max(
            layers, key=lambda layer: (len(missing & layer.parts()), len(often & layer.parts()), layers[layer], layer)
        )
        missing -= best.parts()
        chosen.append(best)
    return sorted(chosen)


def _configs() -> Iterator[Any]:
    """Yield the configurations: of several parts, the one of the text."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    fields = [{"model_type": kind} for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    fields += [PRESETS[name] for name in MODELS]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for config in fields:
            with contextlib.suppress(Exception):  # a class without defaults of its own fails in its own way
                yield CONFIG_MAPPING[config["model_type"]].from_dict(dict(config)).get_text_config(decoder=True)


if __name__ == "__main__":
    for name, rows in zip(("LAYERS", "VOCABULARIES"), counted(), strict=True):
        print(f"{name} = (", *(f"    {row}," for row in rows), ")", sep="\n")  # noqa: T201
