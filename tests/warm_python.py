"""A ``python`` for commands that a test starts: it runs each in a fork of one process that has imported what is slow.

Torch and transformers take a process two to four seconds, which is most of what a small command takes. The command
itself is run as Python runs it: its own process, arguments, variables, folder and files, and this checkout's modules
imported anew.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from contextlib import contextmanager
from pathlib import Path

# What commands import of others; nothing of this checkout.
SLOW = ("torch", "torch._dynamo", "cuda.tile", "transformers.modeling_utils", "transformers.models.auto.modeling_auto")
CLIENT = """#!{python} -IS
import json, os, socket, sys

arguments = sys.argv[1:]
if arguments[:2] == ["-m", "tilekern.cache_tools"]:  # imports nothing slow
    os.execv({python!r}, [{python!r}, *arguments])
told = json.dumps([arguments, dict(os.environ), os.getcwd()]).encode()
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [len(told).to_bytes(8, "big")], [0, 1, 2])
    server.sendall(told)
    code = server.recv(1)
sys.exit(code[0] if code else "the process that ran the command was killed")
"""


@contextmanager
def warm_python(env):
    """The variables ``env`` with a PATH whose ``python`` runs commands so."""
    with tempfile.TemporaryDirectory(prefix="warm") as folder:
        address = os.path.join(folder, "socket")
        client = Path(folder, "python")
        client.write_text(CLIENT.format(python=sys.executable, address=address))
        client.chmod(client.stat().st_mode | stat.S_IXUSR)
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(address)
            listening.listen()
            command = [sys.executable, __file__, str(listening.fileno())]
            # It ends when this end of its input is closed, however that comes about.
            with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, pass_fds=[listening.fileno()]) as server:
                yield env | {"PATH": f"{folder}{os.pathsep}{env['PATH']}"}
                server.stdin.close()
                assert server.wait() == 0


def serve(listening):
    """Run what comes until the input ends; returns, in a process of its own, what it is to become."""
    for name in SLOW:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    while sys.stdin not in select.select([sys.stdin, listening], [], [])[0]:
        client, _ = listening.accept()
        # One process waits for the other, so that two commands of a pipe run at once.
        if not os.fork():
            command = receive(client)
            child = os.fork()
            if not child:
                return command
            client.sendall(bytes([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) % 256]))
            os._exit(0)
        client.close()
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return None


def receive(client):
    """The files, arguments, variables and folder of a command."""
    length, files, _, _ = socket.recv_fds(client, 8, 3)
    with client.makefile("rb") as told:
        return files, *json.loads(told.read(int.from_bytes(length, "big")))


def become(files, arguments, env, folder):
    """Run a command as ``python`` does."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    importlib.invalidate_caches()
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    first, *rest = arguments
    sys.path[0] = {"-m": folder, "-c": ""}.get(first) if first in ("-m", "-c") else str(Path(first).resolve().parent)
    if first == "-m":
        sys.argv = rest
        runpy._run_module_as_main(rest[0])
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    else:
        sys.argv = arguments
        runpy.run_path(first, run_name="__main__")


def ended(files, arguments, env, folder):
    """Run a command to its end; its exit code. Torch's modules are not taken down one by one, which takes a second."""
    try:
        become(files, arguments, env, folder)
        code = 0
    except SystemExit as error:
        code = error.code
        if not isinstance(code, int | None):
            sys.stderr.write(f"{code}\n")
            code = 1
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code or 0


if __name__ == "__main__":
    command = serve(socket.socket(fileno=int(sys.argv[1])))
    if command:
        os._exit(ended(*command))
