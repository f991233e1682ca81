"""A program's locale, which may have a decimal comma, changes nothing that ranks read."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

GERMAN = "de_DE.UTF-8"


@pytest.fixture(scope="module")
def locales(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a locale that has a decimal comma."""
    folder = tmp_path_factory.mktemp("locales")
    if not shutil.which("localedef"):
        pytest.skip("localedef is not installed")
    command = ["localedef", "-i", "de_DE", "-f", "UTF-8", str(folder / GERMAN)]
    made = subprocess.run(command, capture_output=True, text=True)
    if not (folder / GERMAN).exists():
        pytest.skip(f"localedef cannot make {GERMAN}: {made.stderr}")
    return folder


def test_variables_are_read_with_a_point(locales):
    code = (
        f"import json, locale; locale.setlocale(locale.LC_ALL, {GERMAN!r})\n"
        "assert locale.str(1.5) == '1,5'\n"
        "from pycomm import _C; print(json.dumps(_C.env()))"
    )
    given = {"PYCOMM_TIMEOUT": "1.5", "PYCOMM_LINK": "2.5mbit", "LOCPATH": str(locales)}
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, env=os.environ | given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["timeout"] == 1.5
    assert found["link_bytes_per_second"] == 2.5e6 / 8


RANK = """
import array, locale, sys
rank, folder, own = int(sys.argv[1]), sys.argv[2], sys.argv[3]
locale.setlocale(locale.LC_ALL, own)
from pycomm.communicator import Communicator, Store
rate = ("12.5mbit/20mbit", "100mbit")[rank]
with Communicator(Store.file(folder), rank, 2, transport="tcp", timeout=20, rate=rate) as c:
    x = array.array("i", (rank + i for i in range(100_003)))
    c.all_reduce(x)
    print(x.tolist() == [2 * i + 1 for i in range(100_003)])
    print(c.describe().partition("; ")[2])
"""


def test_ranks_of_different_locales_know_the_same_links(locales, tmp_path):
    """Both publish rates, and compute from all of them who owns how much of a sum."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "store"), own],
            env=os.environ | {"LOCPATH": str(locales)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, own in enumerate((GERMAN, "C"))
    ]
    found = [rank.communicate(timeout=60)[0].splitlines() for rank in ranks]
    assert [lines[:1] for lines in found] == [["True"], ["True"]], found
    assert found[0][1] == found[1][1] == "rates 12.5/20 100 Mbit/s"
