"""Forks the ranks of a job from one process that has imported what takes seconds: torch, and what else is named.

    python rank_fork.py HOME RANKS MODULES CODE MEET ARGUMENTS...

MODULES are names with commas between them; CODE is a file of Python, or Python. It runs as ``__main__``, with MEET, the
rank, RANKS and ARGUMENTS. HOME gets what each rank says, in ``out.RANK`` and ``err.RANK``; the exit codes come out in
one JSON line.
"""

import gc
import importlib
import json
import os
import sys
from pathlib import Path


def forked(home, ranks):
    """The number of a rank, in its own process; in this one None, when all have ended."""
    processes = []
    gc.freeze()  # what is there will not be looked through, and so copied, in each of them
    for rank in range(ranks):
        process = os.fork()
        if not process:
            for descriptor, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(f"{home}/{name}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), descriptor)
            return rank
        processes.append(process)
    ended = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
    print(json.dumps(ended), flush=True)  # noqa: T201
    return None


home, count, modules, code, meet, *arguments = sys.argv[1:]
for module in modules.split(","):
    importlib.import_module(module)
if (rank := forked(home, int(count))) is not None:
    source = code
    if code.endswith(".py"):
        source, sys.path[0] = Path(code).read_text(), str(Path(code).parent)
    sys.argv = [code, meet, str(rank), count, *arguments]
    exec(compile(source, code if code.endswith(".py") else "<string>", "exec"), globals())
