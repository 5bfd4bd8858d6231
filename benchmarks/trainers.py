"""Define the trainers of a whole model: tilekern and its peers, each enabled as its users do, before the model is made.

Each runs in its own processes, since patches and compiler settings affect a whole process. Liger chooses its back end
by ``LIGER_KERNEL_IMPL``. quack is not included: it has kernels and modules, but no patch for a model of transformers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.environment import version_of
from benchmarks.models import layers_of
from benchmarks.providers import OURS
from tilekern.errors import InputError

NO_PATCHES = "quack left out: it has no patch for the models of transformers"


def _nothing(_: Any) -> None:
    """Leave the model as it is."""


@dataclass(frozen=True)
class Trainer:
    """A way to train.

    Attributes:
        distribution: the package whose version follows the name; empty for tilekern.
        patch: called with the model's configuration before the model is made.
        attention: the attention implementation to make the model with.
        backend: the only SDPA back end of torch that may run; empty for torch's choice.
        compiled: the part that torch.compile gets: nothing, the whole model, or each layer by itself.
        mode: torch.compile's mode; empty for its default.
        environment: variables of the process.
        limit_s: seconds that one process may take.
        own_optimizer: whether ``tilekern.AdamW`` takes the steps instead of torch's fused AdamW.
        needs: another required package.
        convert: called with the model once it is made, before anything wraps or compiles it.
    """

    distribution: str = "transformers"
    patch: Callable[[Any], None] = _nothing
    attention: str = "sdpa"
    backend: str = ""
    compiled: Literal["", "model", "layers"] = ""
    mode: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    limit_s: float = 240.0
    own_optimizer: bool = False
    needs: str = ""
    convert: Callable[[Any], None] = _nothing

    def held_to_backend(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of the steps: it restricts torch's SDPA to the trainer's back end, if it names one."""
        if not self.backend:
            return contextlib.nullcontext()
        from torch.nn.attention import SDPBackend, sdpa_kernel

        return sdpa_kernel(getattr(SDPBackend, self.backend))

    def optimizer(self, model: Any, learning_rate: float) -> Any:
        """Return AdamW over all parameters of a model; each variant takes one pass over memory."""
        import torch

        if self.own_optimizer:
            import tilekern

            return tilekern.AdamW(model.parameters(), lr=learning_rate)
        # torch's fused step takes DTensors of one mesh, or plain tensors, and no mixture.
        groups: dict[Any, list[Any]] = {}
        for parameter in model.parameters():
            groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        alike = [{"params": parameters} for parameters in groups.values()]
        return torch.optim.AdamW(alike, lr=learning_rate, fused=True)

    def compile(self, model: Any) -> None:
        """Compile the model with torch.compile, which works at its first call."""
        if self.compiled:
            for part in [model] if self.compiled == "model" else layers_of(model):
                part.compile(dynamic=False, mode=self.mode or None)


def _tilekern(_: Any) -> None:
    """Apply all patches, including the one for experts: gradients repeat bit by bit."""
    import tilekern

    tilekern.apply(experts=True)


def _without_experts(_: Any) -> None:
    """Apply the patches that are on by default: experts run transformers' grouped products."""
    import tilekern

    tilekern.apply()


def _graphs(_: Any) -> None:
    """Apply all patches, and replay training steps from CUDA graphs."""
    import tilekern

    tilekern.apply(experts=True, graphs=True)


def _fp8(_: Any) -> None:
    """Apply all patches, and run linear layers by 8-bit floats."""
    import tilekern

    tilekern.apply(experts=True, fp8=True)


def _fp8_graphs(_: Any) -> None:
    """Also replay training steps from CUDA graphs."""
    import tilekern

    tilekern.apply(experts=True, graphs=True, fp8=True)


def _fp8_blockwise(_: Any) -> None:
    """Apply all patches, and run linear layers by 8-bit floats with scales of blocks."""
    import tilekern

    tilekern.apply(experts=True, fp8="blockwise")


def _liger(config: Any) -> None:
    from liger_kernel import transformers

    patch = getattr(transformers, f"apply_liger_kernel_to_{config.model_type}", None)
    if patch is None:
        raise InputError(f"Liger has no patch for {config.model_type}")
    patch()


def _torchao(recipe: str) -> Callable[[Any], None]:
    """Return a conversion of the linear layers of a model's decoder to 8-bit floats; the head stays as it is.

    Args:
        recipe: torchao's name of the scales: ``rowwise``, or ``tensorwise``, which has one for a matrix.
    """

    def convert(model: Any) -> None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        for layer in layers_of(model):
            convert_to_float8_training(
                layer,
                # Products of 8-bit floats take multiples of 16.
                module_filter_fn=lambda linear, _: linear.in_features % 16 == linear.out_features % 16 == 0,
                config=Float8LinearConfig.from_recipe_name(recipe),
            )

    return convert


_FLASH, _CUDNN = "FLASH_ATTENTION", "CUDNN_ATTENTION"
_LIGER = "liger-kernel"
TRAINERS: Mapping[str, Trainer] = {
    OURS: Trainer("", _tilekern, OURS, own_optimizer=True),
    # Like the peers' attention: dq is added up in any order.
    f"{OURS}-nondeterministic": Trainer("", _tilekern, f"{OURS}_nondeterministic", own_optimizer=True),
    f"{OURS}-torch-adamw": Trainer("", _tilekern, OURS),
    f"{OURS}-graphs": Trainer("", _graphs, OURS),
    f"{OURS}-graphs-adamw": Trainer("", _graphs, OURS, own_optimizer=True),
    f"{OURS}-fp8": Trainer("", _fp8, OURS, own_optimizer=True),
    f"{OURS}-fp8-graphs": Trainer("", _fp8_graphs, OURS, own_optimizer=True),
    f"{OURS}-fp8-blockwise": Trainer("", _fp8_blockwise, OURS, own_optimizer=True),
    # A token's logits have the bits that it has in generation; see docs/same-bits.md.
    f"{OURS}-invariant": Trainer("", _tilekern, OURS, environment={"TILEKERN_INVARIANT": "1"}, own_optimizer=True),
    f"{OURS}-grouped_mm": Trainer("", _without_experts, OURS, own_optimizer=True),
    "hf-sdpa-flash": Trainer(backend=_FLASH),
    "hf-sdpa-cudnn": Trainer(backend=_CUDNN),
    "hf-sdpa": Trainer(),
    "hf-flash": Trainer(attention="flash_attention_2", needs="flash-attn"),
    "hf-flex": Trainer(attention="flex_attention"),
    "hf-eager": Trainer(attention="eager"),
    "liger-triton": Trainer(_LIGER, _liger, backend=_FLASH),
    "liger-triton-cudnn": Trainer(_LIGER, _liger, backend=_CUDNN),
    "liger-triton-sdpa": Trainer(_LIGER, _liger),
    "liger-triton-flex": Trainer(_LIGER, _liger, "flex_attention"),
    "liger-triton-eager": Trainer(_LIGER, _liger, "eager"),
    "liger-cutile": Trainer(_LIGER, _liger, backend=_FLASH, environment={"LIGER_KERNEL_IMPL": "cutile"}),
    "torch.compile-layers": Trainer("torch", compiled="layers", limit_s=150),
    "torch.compile-layers-overhead": Trainer("torch", compiled="layers", mode="reduce-overhead", limit_s=150),
    "torch.compile-layers-cudnn": Trainer("torch", backend=_CUDNN, compiled="layers", limit_s=150),
    "torch.compile-layers-cudnn-overhead": Trainer(
        "torch", backend=_CUDNN, compiled="layers", mode="reduce-overhead", limit_s=150
    ),
    "torch.compile-layers-flex": Trainer("torch", attention="flex_attention", compiled="layers", limit_s=150),
    "torch.compile-layers-eager": Trainer("torch", attention="eager", compiled="layers", limit_s=150),
    # torchao's conversion is meant to be compiled; without it each quantisation is several passes over memory.
    "torchao-fp8-rowwise": Trainer("torchao", backend=_CUDNN, compiled="layers", convert=_torchao("rowwise")),
    "torchao-fp8-tensorwise": Trainer("torchao", backend=_CUDNN, compiled="layers", convert=_torchao("tensorwise")),
    "torch.compile": Trainer("torch", compiled="model", limit_s=150),
}
# Enough for a run of some minutes: the fastest of each family of peers on an H200.
USUAL = (OURS, f"{OURS}-nondeterministic", "hf-sdpa-cudnn", "liger-triton-cudnn", "torch.compile-layers-cudnn")


def trainer_named(name: str) -> Trainer:
    """Return the trainer of a name.

    Raises:
        InputError: the name is unknown.
    """
    if name not in TRAINERS:
        raise InputError(f"unknown provider {name!r}; known: {', '.join(TRAINERS)}")
    return TRAINERS[name]


def has_our_attention(name: str) -> bool:
    """Return whether a trainer's attention is tilekern's, whose results a checkpoint can keep."""
    return trainer_named(name).attention.startswith(OURS)


def full_name(name: str) -> str:
    """Return a trainer's name with its version, as in the results.

    Raises:
        importlib.metadata.PackageNotFoundError: the trainer, or a package that it needs, is not installed.
    """
    trainer = trainer_named(name)
    if trainer.needs:
        version_of(trainer.needs)
    distribution = trainer.distribution
    return f"{name} {version_of(distribution)}" if distribution else name
