"""What docs claim by measurements (claims.csv): the table of each claim, what repeats it.

Commands of `make bench` are in the column `quick`, as words after `python -m pycomm.bench`, joined
by "; "; claims without any take too long for it.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path

from pycomm.bench.common import tables

CLAIMS = tables.read(Path(__file__).with_suffix(".csv"))


def commands() -> Iterator[tuple[str, str]]:
    """Yield the tables and commands of `make bench`, in which MPI is a backend where it is here."""
    here = shutil.which("mpirun") and importlib.util.find_spec("mpi4py")
    for claim in CLAIMS:
        for words in filter(None, claim["quick"].split("; ")):
            yield claim["table"], words.replace("{mpi}", ",mpi" if here else "")
