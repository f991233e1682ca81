"""The lab's program, which may run as root, is nobody else's."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from pycomm.bench.lab import wan
from pycomm.bench.lab.base import LabUnavailable

STRANGER = 65534


def planted(cache: Path) -> Path:
    """Put another program in the place of the link program."""
    (cache / "pycomm").mkdir(mode=0o700)
    name = "pycomm-wan-link-" + hashlib.sha256(wan.SOURCE.read_bytes()).hexdigest()[:16]
    program = cache / "pycomm" / name
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return program


def give_away(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can play two users")
    os.chown(path, STRANGER, STRANGER)


@pytest.mark.parametrize(
    "spoil",
    [
        give_away,
        lambda program: give_away(program.parent),
        lambda program: program.chmod(0o777),
        lambda program: program.parent.chmod(0o777),
        lambda program: (program.unlink(), program.symlink_to("/bin/true")),
    ],
    ids=["file of another", "folder of another", "file open", "folder open", "link"],
)
def test_a_program_that_others_could_change_is_not_run(tmp_path, monkeypatch, spoil):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    program = planted(tmp_path)
    assert wan.program() == program
    spoil(program)
    with pytest.raises(LabUnavailable, match="set XDG_CACHE_HOME to a folder of yours"):
        wan.program()
