"""Folders whose contents this process will run or trust: who else could have written them?"""

from __future__ import annotations

import os
import stat
from pathlib import Path


def distrust(path: Path) -> str:
    """Return why a file or folder cannot be trusted, or "" if it can.

    It must be no link, belong to this user or to root, and be writable by nobody else.

    Args:
        path: it exists.

    Raises:
        OSError: it cannot be looked at.
    """
    found = os.lstat(path)
    if stat.S_ISLNK(found.st_mode):
        return f"{path} is a link"
    if found.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to another user (number {found.st_uid})"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{path} can be written by other users (chmod go-w)"
    return ""


def private(path: Path) -> None:
    """Make a folder that this user alone can read, or check one that is there.

    Raises:
        PermissionError: others could write into it.
        OSError: it cannot be made.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if reason := distrust(path):
        raise PermissionError(f"{reason}: name a folder that only you can write")
