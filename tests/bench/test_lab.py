"""Rates of links mean what their page says."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pycomm.bench.lab import wan
from pycomm.bench.lab.base import LabUnavailable
from pycomm.bench.lab.rates import Rate, parse


@pytest.mark.parametrize(
    ("text", "links"),
    [
        ("1gbit", [Rate("1gbit", "1gbit")]),
        ("unlimited", [Rate(None, None)]),
        ("1.5mbit/unlimited", [Rate("1.5mbit", None)]),
        ("1gbit,9kbit/2mbit", [Rate("1gbit", "1gbit"), Rate("9kbit", "2mbit")]),
    ],
)
def test_rates(text, links):
    assert parse(text) == links


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "rate ''"),
        ("1gbit/", "rate ''"),
        ("gbit", "rate 'gbit'"),
        ("1gbit; rm x", "rate '1gbit; rm x'"),
        ("1gbit,", "rate ''"),
        ("2mbps", "rate '2mbps'"),  # of tc, which means bytes
        ("1gbit 30s:1mbit", "rate '1gbit 30s:1mbit'"),
    ],
)
def test_what_is_wrong_is_quoted(text, wrong):
    with pytest.raises(ValueError, match=wrong):
        parse(text)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--rate", "1gbit@0@200%"], "the loss 200% is no share: want 0% to 100%"),
        (["--rate", "1gbit@-3ms"], "cannot read the round trip '-3ms': want a time with a unit"),
        (["--rate", "1gbit@61s"], "the round trip 61s is impossible: want 0 to 60s"),
        (["--rate", "1gbit,1gbit@1ms"], "with delay or loss a node has one link"),
        (["--nodes", "two"], "invalid int value: 'two'"),
    ],
)
def test_bad_input_gets_one_line_and_status_2(options, problem):
    command = [sys.executable, "-m", "pycomm.bench.netlab", *options, "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "netlab: " in done.stderr
    assert problem in done.stderr
    assert done.stderr.count("\n") == 1


# --------------------------------------------------------------------------------- the link program
# The lab's program, which may run as root, is nobody else's.


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
