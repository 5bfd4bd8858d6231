"""Run GPT-2 or another checkpoint once in this fresh process, and print when each step was done.

python -m benchmarks.first_logits FOLDER TOKENS WHAT STARTED

WHAT is ``logits`` of a sequence of TOKENS tokens, or ``token``, the first one after such a prompt. STARTED is the time
at which this process was started. Nothing but the engine is imported before the last step is done.
"""

import sys
import time

_BEGUN = time.time()


def main(folder: str, tokens: str, what: str, started: str) -> None:
    """Print a JSON object.

    It has the ``seconds`` of each step. ``load`` is the time of the weights alone, that of loading them once more; what
    the first time took beyond it is ``gpu``, as the GPU gets ready meanwhile. It has the ``artifacts`` that served,
    bytes by digest; their ``kernels``; and of torch and numpy those that were ``imported``, which should be none.
    """
    marks = [("interpreter", float(started)), ("import", _BEGUN)]
    import tilekern.inference

    marks.append(("gpu", time.time()))
    engine = tilekern.inference.load(folder)
    engine.stream.synchronize()
    marks.append(("first", time.time()))
    ids = [[number % 1000 for number in range(int(tokens))]]
    if what == "logits":
        engine.forward(ids)
        engine.stream.synchronize()
    else:
        next(engine.generate(ids, 1))
    ends = [moment for _, moment in marks[1:]] + [time.time()]
    seconds = {name: end - begin for (name, begin), end in zip(marks, ends, strict=True)}
    begun = time.time()
    tilekern.inference.load(folder).stream.synchronize()
    seconds["load"] = time.time() - begun
    seconds["gpu"] -= seconds["load"]
    imported = [name for name in ("torch", "numpy") if name in sys.modules]

    import json

    from tilekern.runtime import dispatch

    records = [record for record in dispatch.resolved().values() if record is not None]
    artifacts = {one.sha256: one.size for record in records for one in record.artifacts.values()}
    kernels = sorted({record.kernel for record in records})
    print(json.dumps({"seconds": seconds, "artifacts": artifacts, "kernels": kernels, "imported": imported}))


if __name__ == "__main__":
    main(*sys.argv[1:])
