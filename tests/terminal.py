"""The output of commands in a terminal."""

import os
import pty
import subprocess


def printed_in_a_terminal(command, columns, **more):
    """What a command prints where all its streams are a terminal of that width; ``more`` is for ``Popen``."""
    parent, child = pty.openpty()
    subprocess.run(["stty", "cols", str(columns)], stdin=child, check=True)
    with subprocess.Popen(command, stdin=child, stdout=child, stderr=child, **more):
        os.close(child)
        text = b""
        while part := _read(parent):
            text += part
    os.close(parent)
    return text.decode().replace("\r\n", "\n")


def _read(terminal):
    try:
        return os.read(terminal, 2**16)
    except OSError:  # its other end is closed
        return b""
