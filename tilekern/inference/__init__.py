"""Generation without torch: the engine, and the checkpoints that it reads.

Use::

    from tilekern.inference import load

    engine = load("Qwen/Qwen3-0.6B")
    for tokens in engine.generate([[9707, 11]], new_tokens=20):
        print(tokens)
"""

from tilekern.inference.engine import Engine, load
from tilekern.inference.sampling import Sampling

__all__ = ["Engine", "Sampling", "load"]
