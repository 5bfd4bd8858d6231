"""Generation without torch: the engine, and the checkpoints that it reads.

Use::

    from tilekern.inference import load

    engine = load("Qwen/Qwen3-0.6B")
    for tokens in engine.generate([[9707, 11]], new_tokens=20):
        print(tokens)
"""

from typing import TYPE_CHECKING, Any

from tilekern.inference.loading import load
from tilekern.inference.sampling import Sampling

if TYPE_CHECKING:
    from tilekern.inference.engine import Engine as Engine

__all__ = ["Engine", "Sampling", "load"]


def __getattr__(name: str) -> Any:
    # It brings most modules, which :func:`load` imports while the GPU gets ready.
    if name != "Engine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tilekern.inference.engine import Engine

    return Engine
