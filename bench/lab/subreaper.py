"""Subreaper process: runs one rank's command and ends all of its processes afterwards.

    python subreaper.py PARENT COMMAND...

The subreaper runs between a lab (base.py) and a rank. Orphans of the command become its children
(PR_SET_CHILD_SUBREAPER), whatever their session, so that it can end all of them. It does so when
the command has ended, when the process PARENT has ended (PR_SET_PDEATHSIG), and at SIGHUP. It
forwards SIGTERM to the command. Its exit status is the command's, or 128 + n if signal n ended the
command, as in a shell.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
NOT_FOUND = 127  # the exit status of a shell that cannot find a command
HEARD = {signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGINT}


def prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def start(command: list[str], mask: set[signal.Signals]) -> int:
    """Start the command, which dies with this process; return its pid."""
    subreaper = os.getpid()
    child = os.fork()
    if child:
        return child
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != subreaper:
        os._exit(128 + signal.SIGKILL)
    # Signal settings that Python changed at its start must not reach the command.
    for changed in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(changed, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    os._exit(NOT_FOUND)


def wait(child: int) -> int:
    """Return the exit status of the command, or of SIGHUP, as soon as there is one."""
    while True:
        heard = signal.sigwait(HEARD)
        if heard == signal.SIGHUP:
            return 128 + heard
        if heard == signal.SIGTERM:
            os.kill(child, heard)
        # A SIGINT from a terminal has reached the command as well.
        ended = -1
        while ended != 0:
            ended, status = os.waitpid(-1, os.WNOHANG)
            if ended == child:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code


def children() -> list[int]:
    """Return this process's children. (/proc/self/task/*/children is not in every kernel.)"""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                parent = file.read().rpartition(")")[2].split()[1]
        except OSError:
            continue  # the process has ended in the meantime
        if int(parent) == os.getpid():
            found.append(int(name))
    return found


def end_all() -> None:
    """Kill all children, and their children as this process inherits them, until none is left."""
    while True:
        for pid in children():
            os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def main() -> int:
    parent, *command = sys.argv[1:]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGHUP)
    if os.getppid() != int(parent):
        return 128 + signal.SIGHUP
    status = wait(start(command, set(mask)))
    end_all()
    return status


if __name__ == "__main__":
    sys.exit(main())
