"""Who trains a whole model: tilekern and its peers, each as its users switch it on before the model is made.

Each runs in processes of its own, since patches and compiler settings hold for a process. Liger chooses its back end
by ``LIGER_KERNEL_IMPL``. quack is not among them: it has kernels and modules, but no patch for a model of transformers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.environment import version_of
from benchmarks.providers import OURS
from tilekern.errors import InputError

ATTENTION = "sdpa"
NO_PATCHES = "quack left out: it has no patch for the models of transformers"


def _nothing(_: Any) -> str:
    return ATTENTION


@dataclass(frozen=True)
class Trainer:
    """A way to train.

    Attributes:
        distribution: the package whose version is put behind the name; empty for tilekern.
        patch: model's configuration -> the attention implementation to make the model with; called before it is made.
        backend: the one of torch's SDPA back ends that may run; empty for torch's own choice.
        compiled: what torch.compile is given: nothing, the whole model, or each layer by itself.
        environment: variables of the process.
        limit_s: seconds that one process may take.
        own_optimizer: whether ``tilekern.AdamW`` takes the steps, and not torch's fused AdamW.
    """

    distribution: str = "transformers"
    patch: Callable[[Any], str] = _nothing
    backend: str = ""
    compiled: Literal["", "model", "layers"] = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    limit_s: float = 240.0
    own_optimizer: bool = False

    def attention(self) -> contextlib.AbstractContextManager[Any]:
        """What the steps run in: torch's SDPA is held to one back end where the trainer names it."""
        if not self.backend:
            return contextlib.nullcontext()
        from torch.nn.attention import SDPBackend, sdpa_kernel

        return sdpa_kernel(getattr(SDPBackend, self.backend))

    def optimizer(self, model: Any, learning_rate: float) -> Any:
        """AdamW over all parameters of a model, in one pass over memory whoever takes it."""
        import torch

        if self.own_optimizer:
            import tilekern

            return tilekern.AdamW(model.parameters(), lr=learning_rate)
        return torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True)

    def compile(self, model: Any) -> None:
        """Hand the model to torch.compile, which works at its first call."""
        if self.compiled == "model":
            model.compile(dynamic=False)
        elif self.compiled == "layers":
            for layer in model.model.layers:
                layer.compile(dynamic=False)


def _tilekern(_: Any) -> str:
    """All patches, as they are by default: gradients repeat bit by bit."""
    import tilekern

    tilekern.apply()
    return "tilekern"


def _tilekern_nondeterministic(config: Any) -> str:
    """As the peers' attention is: dq is added up in any order."""
    return f"{_tilekern(config)}_nondeterministic"


def _liger(config: Any) -> str:
    from liger_kernel import transformers

    getattr(transformers, f"apply_liger_kernel_to_{config.model_type}")()
    return ATTENTION


_FLASH, _CUDNN = "FLASH_ATTENTION", "CUDNN_ATTENTION"
_LIGER = "liger-kernel"
TRAINERS: Mapping[str, Trainer] = {
    OURS: Trainer("", _tilekern, own_optimizer=True),
    f"{OURS}-nondeterministic": Trainer("", _tilekern_nondeterministic, own_optimizer=True),
    f"{OURS}-torch-adamw": Trainer("", _tilekern),
    "hf-sdpa-flash": Trainer(backend=_FLASH),
    "hf-sdpa-cudnn": Trainer(backend=_CUDNN),
    "liger-triton": Trainer(_LIGER, _liger, _FLASH),
    "liger-triton-cudnn": Trainer(_LIGER, _liger, _CUDNN),
    "liger-cutile": Trainer(_LIGER, _liger, _FLASH, environment={"LIGER_KERNEL_IMPL": "cutile"}),
    "torch.compile-layers": Trainer("torch", compiled="layers", limit_s=150),
    "torch.compile": Trainer("torch", compiled="model", limit_s=150),
}
# Enough for one run of some minutes: the best peers, and the model as it is. The compilers take minutes of their own.
PEERS = ("hf-sdpa-flash", "hf-sdpa-cudnn", "liger-triton", "liger-triton-cudnn", "liger-cutile")
USUAL = (OURS, f"{OURS}-nondeterministic", f"{OURS}-torch-adamw", *PEERS)


def trainer_named(name: str) -> Trainer:
    """The trainer of a name.

    Raises:
        InputError: there is none.
    """
    if name not in TRAINERS:
        raise InputError(f"unknown provider {name!r}; known: {', '.join(TRAINERS)}")
    return TRAINERS[name]


def full_name(name: str) -> str:
    """A trainer's name with its version, as results have it.

    Raises:
        importlib.metadata.PackageNotFoundError: it is not installed.
    """
    distribution = trainer_named(name).distribution
    return f"{name} {version_of(distribution)}" if distribution else name
