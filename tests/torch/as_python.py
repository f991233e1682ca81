"""`python COMMAND` by a process that has imported torch already: see `interpreter.py`.

    python -IS tests/torch/as_python.py COMMAND

It is what `sys.executable` names in programs under test that start others, and that end them by
their process ids or by signals: the other process is killed when this one ends. Neither a network
namespace nor an affinity to cores is passed on.
"""

import json
import os
import signal
import socket
import sys
import tempfile

SHARED = "TESTS_FORK_SERVER"  # that of interpreter.py


def main(command: list[str]) -> int:
    wish = {"command": command, "env": dict(os.environ), "cwd": os.getcwd()}
    wish |= {"autoload": True, "finalized": False}
    link, there = socket.socketpair()
    with socket.socket(socket.AF_UNIX) as server, tempfile.TemporaryFile() as letter:
        server.connect(os.environ[SHARED])
        letter.write(json.dumps(wish).encode())
        letter.flush()
        socket.send_fds(server, [b"x"], [letter.fileno(), there.fileno(), 1, 2])
        there.close()
        process = int(link.recv(16, socket.MSG_WAITALL))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, _: os.kill(process, number))
        status = int(link.recv(16, socket.MSG_WAITALL) or b"1")
    if status < 0:
        if status != -signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    if sys.argv[1] not in ("-m", "-c"):  # such as a program of the standard library alone
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    sys.exit(main(sys.argv[1:]))
